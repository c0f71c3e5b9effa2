# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Text families: tiny configs of Hugging Face's own classes, and random rows of ids."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

__all__ = ['EXPERTS', 'LLAMA', 'TEXT_CONFIGS', 'WINDOW', 'masked_row', 'seq2seq_row', 'text_row']

VOCABULARY, LONGEST = 64, 24
FIRST_ID = 4
"""Ids below are pad, beginning, end and mask."""

_SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
_LAYERS = dict(vocab_size=VOCABULARY, n_layer=2, n_head=2)
LLAMA = dict(
    _SIZES, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    tie_word_embeddings=False,
)  # fmt: skip
# Sliding windows of 4 positions: most rows are longer.
WINDOW = dict(sliding_window=4)
EXPERTS = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)

TEXT_CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # name: (model class, settings)
    'llama': ('LlamaForCausalLM', LLAMA),
    'gpt2': ('GPT2LMHeadModel', dict(_LAYERS, n_embd=32, n_positions=64)),
    'gpt_neo': (
        'GPTNeoForCausalLM',
        dict(vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=2, window_size=4,
             attention_types=[[['global', 'local'], 1]],
             max_position_embeddings=256),  # as wide as a packed row: its causal mask is a buffer of this size
    ),
    'opt': (
        'OPTForCausalLM',
        dict(_SIZES, word_embed_proj_dim=32, ffn_dim=48, max_position_embeddings=64, pad_token_id=0),
    ),
    'bloom': ('BloomForCausalLM', dict(_LAYERS, hidden_size=32, pad_token_id=0)),
    'falcon': ('FalconForCausalLM', _SIZES),
    'falcon_alibi': ('FalconForCausalLM', dict(_SIZES, alibi=True)),
    'mpt': ('MptForCausalLM', dict(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=2, max_seq_len=64)),
    'mamba': (
        'MambaForCausalLM',
        dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0),
    ),
    'mistral': ('MistralForCausalLM', dict(LLAMA, **WINDOW)),
    'gemma2': ('Gemma2ForCausalLM', dict(LLAMA, **WINDOW, head_dim=16)),
    'mixtral': ('MixtralForCausalLM', dict(LLAMA, **EXPERTS, sliding_window=None)),
    'qwen3_moe': (
        'Qwen3MoeForCausalLM', dict(LLAMA, **EXPERTS, head_dim=16, decoder_sparse_step=1, norm_topk_prob=True),
    ),
    'bert': ('BertForMaskedLM', dict(_SIZES, intermediate_size=48, max_position_embeddings=64)),
    't5': (
        'T5ForConditionalGeneration',
        dict(vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0),
    ),
}  # fmt: skip


def text_model(name: str) -> tuple[type, Any]:
    """Class of a text family, and a fresh config."""
    class_name, settings = TEXT_CONFIGS[name]
    model_class = getattr(transformers, class_name)
    return model_class, model_class.config_class(**copy.deepcopy(settings))


def _ids(rng: random.Random, length: int) -> torch.Tensor:
    return torch.tensor([[rng.randrange(FIRST_ID, VOCABULARY) for _ in range(length)]])


def _length(rng: random.Random) -> int:
    """Mostly short, some long, now and then a single token."""
    return min(1 + int(rng.lognormvariate(1.9, 0.8)), LONGEST)


def text_row(rng: random.Random) -> dict[str, torch.Tensor]:
    """Labels on a suffix, on all tokens, or on none."""
    ids = _ids(rng, _length(rng))
    labels = ids.clone()
    labels[:, : rng.choice((0, rng.randint(0, ids.shape[1])))] = -100
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels}


def masked_row(rng: random.Random) -> dict[str, torch.Tensor]:
    """A third of the tokens masked and labelled, column 0 among them where it falls so."""
    ids = _ids(rng, _length(rng) + 1)
    masked = torch.tensor([[rng.random() < 1 / 3 for _ in range(ids.shape[1])]])
    row = {'input_ids': ids.masked_fill(masked, 3), 'attention_mask': torch.ones_like(ids)}
    return {**row, 'token_type_ids': torch.zeros_like(ids), 'labels': ids.masked_fill(~masked, -100)}


def seq2seq_row(rng: random.Random) -> dict[str, torch.Tensor]:
    """Labels of a width of their own."""
    ids = _ids(rng, _length(rng))
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': _ids(rng, rng.randint(1, 9))}


ROWS: Mapping[str, Callable[[random.Random], dict[str, torch.Tensor]]] = {'bert': masked_row, 't5': seq2seq_row}
