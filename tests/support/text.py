# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tiny real models of text, and ragged batches for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, WhisperConfig, WhisperForConditionalGeneration

VOCABULARY = 64


def text_model(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            use_cache=False,
            **config,
        )
    )


def whisper_model() -> WhisperForConditionalGeneration:
    """Takes sounds of 8 mel bins and 16 frames."""
    layers = {'layers': 2, 'attention_heads': 2, 'ffn_dim': 48}
    sizes = {f'{part}_{name}': value for part in ('encoder', 'decoder') for name, value in layers.items()}
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dropout=0.0,
        use_cache=False,
        **sizes,
    )
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(config)


def text_row(length: int, labelled: int, *, seed: int = 0) -> dict[str, Any]:
    """One row whose last ``labelled`` tokens carry labels."""
    ids = torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1000 * seed + length))
    labels = ids.clone()
    labels[:, : length - labelled] = -100
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels}


def text_rows(shape: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Rows of the given (length, labelled tokens)."""
    return [text_row(length, labelled, seed=index) for index, (length, labelled) in enumerate(shape)]


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    """Cross-entropy of each label, by the logits at the position before it."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def collate(rows: Sequence[dict[str, Any]], *, side: str = 'right', labels_on_pads: int = -100) -> dict[str, Any]:
    """Pads with plain torch, independently of BatchLayout."""
    width = max(row['input_ids'].shape[1] for row in rows)
    fills = {'input_ids': 0, 'attention_mask': 0, 'labels': labels_on_pads}
    batch = {}
    for key, fill in fills.items():
        padded = [
            torch.nn.functional.pad(
                row[key],
                (width - row[key].shape[1], 0) if side == 'left' else (0, width - row[key].shape[1]),
                value=fill,
            )
            for row in rows
        ]
        batch[key] = torch.cat(padded)
    return batch
