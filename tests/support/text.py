# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tiny real models of text, and ragged batches for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from composer_tokacc.batch import BatchDict
from composer_tokacc.data_spec.document_attention import DocumentAttention

VOCABULARY = 64
RAGGED = [(4, 2), (5, 3), (9, 7), (14, 11), (6, 1), (3, 2)]
"""Length and number of labels of each of six rows."""
ONE_UNLABELLED = [(4, 2), (9, 0), (5, 3), (14, 11), (6, 1), (3, 2)]
"""The same with a row without labels."""


def text_model(seed: int = 0, *, num_hidden_layers: int = 2, **settings: Any) -> LlamaForCausalLM:
    """Returns a small Llama with weights of the seed. ``settings`` are further settings of its config."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=2,
        use_cache=False,
        **settings,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def one_layer_model(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """Returns the smallest text model, for tests that do not depend on the number of layers."""
    return text_model(seed, num_hidden_layers=1, **config)


def text_attention() -> DocumentAttention:
    """Returns the attention of packed rows in the smallest text model."""
    return DocumentAttention(one_layer_model())


class ColumnCounter(GPT2LMHeadModel):
    """Counts positions from the first column. Its forward has no argument ``position_ids``."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return super().forward(
            input_ids=input_ids, attention_mask=attention_mask, labels=labels, position_ids=positions, use_cache=False
        )


def gpt2(model_class: type[GPT2LMHeadModel] = GPT2LMHeadModel) -> Any:
    """Returns a small GPT-2 without dropout."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    torch.manual_seed(0)
    return model_class(config)


def column_counter() -> ColumnCounter:
    return gpt2(ColumnCounter)


def with_vectors(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the batch with ``inputs_embeds`` instead of ids."""
    changed = {key: value for key, value in batch.items() if key != 'input_ids'}
    changed['inputs_embeds'] = model.get_input_embeddings()(batch['input_ids']).detach()
    return changed


def whisper_model() -> WhisperForConditionalGeneration:
    """Returns a Whisper for audio of 8 mel bins and 16 frames, which its encoder halves to 8 positions."""
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=48,
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
    )
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(config)


def text_row(length: int, labelled: int, *, seed: int = 0) -> BatchDict:
    """Returns one row. Its last ``labelled`` tokens have labels."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids = torch.randint(3, VOCABULARY, (1, length), generator=generator)
    labels = ids.clone()
    labels[:, : length - labelled] = -100
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels}


def text_rows(row_sizes: Sequence[tuple[int, int]]) -> list[BatchDict]:
    """Returns rows of the given (length, labelled tokens)."""
    rows = []
    for index, (length, labelled) in enumerate(row_sizes):
        rows.append(text_row(length, labelled, seed=index))
    return rows


def packed_row(documents: Sequence[BatchDict]) -> BatchDict:
    """Returns one row of several documents. Their positions restart at 0. It has no mask, because it has no padding."""
    ids = []
    labels = []
    positions = []
    for document in documents:
        length = document['input_ids'].shape[1]
        ids.append(document['input_ids'])
        labels.append(document['labels'])
        positions.append(torch.arange(length))
    return {
        'input_ids': torch.cat(ids, dim=1),
        'labels': torch.cat(labels, dim=1),
        'position_ids': torch.cat(positions)[None],
    }


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    """Returns the cross-entropy of the labels, each by the logits at the position before it."""
    predictions = logits[:, :-1].flatten(0, 1)
    next_labels = labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(predictions, next_labels, **options)


def collate(rows: Sequence[BatchDict], *, side: str = 'right', labels_on_pads: int = -100, width: int = 0) -> BatchDict:
    """Pads with plain torch, independently of BatchLayout, to the longest row or to ``width``."""
    longest = max(row['input_ids'].shape[1] for row in rows)
    width = max(width, longest)
    fills = {'input_ids': 0, 'attention_mask': 0, 'labels': labels_on_pads}
    batch = {}
    for key, fill in fills.items():
        padded_rows = []
        for row in rows:
            num_pads = width - row[key].shape[1]
            padding = (num_pads, 0) if side == 'left' else (0, num_pads)
            padded_rows.append(torch.nn.functional.pad(row[key], padding, value=fill))
        batch[key] = torch.cat(padded_rows)
    return batch


def ragged_batch(row_sizes: Sequence[tuple[int, int]] = RAGGED, **options: Any) -> BatchDict:
    """Returns rows of the given (length, labelled tokens). Takes the options of :func:`collate`."""
    return collate(text_rows(row_sizes), **options)


def single_rows(batch: BatchDict) -> list[BatchDict]:
    """Returns each row of a batch as a batch. All entries must have one value per row."""
    rows = []
    for row in range(len(batch['labels'])):
        entries = {key: value[row : row + 1] for key, value in batch.items()}
        rows.append(entries)
    return rows


def positions_of(batch: BatchDict) -> torch.Tensor:
    """Returns the ``position_ids`` of padded rows: each token has its place in the row, padding does not count."""
    tokens_so_far = batch['attention_mask'].cumsum(dim=1)
    return (tokens_so_far - 1).clamp(min=0)


def named_batch(row_sizes: Sequence[tuple[int, int]] = RAGGED, **options: Any) -> BatchDict:
    """Returns the rows of :func:`ragged_batch`. The samples are called ``sample-0`` and so on."""
    batch = ragged_batch(row_sizes, **options)
    batch['sample_ids'] = [f'sample-{row}' for row in range(len(row_sizes))]
    return batch
