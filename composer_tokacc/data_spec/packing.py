# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Packed rows: the rows of a microbatch one after the other, without any padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from composer_tokacc.batch import IGNORE_INDEX, real_positions, sample_name
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.layout import BatchLayout
from composer_tokacc.metadata import METADATA_PREFIX


def pack_rows(
    layout: BatchLayout, batch: Mapping[str, Any], attention: DocumentAttention | None = None
) -> dict[str, Any]:
    """Returns one row of all rows' real tokens, whose mask says which of them make a document.

    ``attention`` is the model's; by default one that takes masks, with positions as of text. Of ``input_ids``
    ``(1, total)`` the ``attention_mask`` is bool ``(documents, total)``, True where a document is, and ``position_ids``
    start anew with each, ``(1, total)`` or, multimodal ones, ``(3, 1, total)``. Per-row lists become one list per row
    of a list. Raises ValueError if the batch has an entry that cannot be packed.
    """
    real = real_positions(batch)
    _check_runs(batch, real)
    if not bool(real.any()):  # a model takes no row of nothing
        real = torch.zeros_like(real)
        real[0, 0] = True
    num_rows, packed = len(real), dict[str, Any]()
    positions = (real.cumsum(dim=1) - 1)[real][None]
    for key, value in batch.items():
        if key == 'attention_mask':
            continue
        if key == f'{METADATA_PREFIX}rule':
            packed[key] = value[:1]
        elif isinstance(value, torch.Tensor):
            packed[key] = _pack_tensor(layout, batch, key, real)
        elif isinstance(value, (list, tuple)) and len(value) == num_rows:
            are_numbers = all(isinstance(item, (int, float)) for item in value)
            packed[key] = [sum(value)] if are_numbers else [list(value)]
        else:
            packed[key] = value
    packed['labels'] = packed['labels'].masked_fill(positions == 0, IGNORE_INDEX)
    documents = (positions == 0).cumsum(dim=1) - 1
    if attention is None or attention.has_masks:
        numbers = torch.arange(int(documents[0, -1]) + 1, device=documents.device)
        packed['attention_mask'] = documents == numbers[:, None]
    rotary = attention.rotary_positions(batch) if attention is not None else None
    if rotary is not None:
        rotary = rotary[:, real][:, None]
        # Attention without a mask finds the documents by the positions of text, which come first.
        positions = rotary if 'attention_mask' in packed else torch.cat([positions[None], rotary])
    packed['position_ids'] = positions
    return packed


def _check_runs(batch: Mapping[str, Any], real: torch.Tensor) -> None:
    """Refuses rows that are not one run of tokens: what stands between or behind them would become tokens as well."""
    mask = batch.get('attention_mask')
    if mask is not None and mask.dim() != 2:
        raise ValueError(f'`attention_mask` must be 2-D for packing, got: {mask.dim()}-D. Set `packing=False`.')
    if batch.get('position_ids') is not None:
        raise ValueError('`position_ids` must be absent for packing, got: a tensor. Set `packing=False`.')
    attended = torch.ones_like(real) if mask is None else mask != 0
    before = torch.nn.functional.pad(attended[:, :-1], (1, 0))
    # A label right behind the last token is predicted from that token; one further on, from padding.
    wrong = ((attended & ~before).sum(dim=1) > 1) | (real & ~attended & ~before).any(dim=1)
    if bool(wrong.any()):
        name = sample_name(batch, int(wrong.int().argmax()))
        raise ValueError(
            'Rows must be one run of tokens, with at most one label behind it, to be packed, got: another '
            f'`attention_mask` or labels on padding in {name}. Set `packing=False`.'
        )


def _pack_tensor(layout: BatchLayout, batch: Mapping[str, Any], key: str, real: torch.Tensor) -> torch.Tensor:
    value, entry = batch[key], layout.entry_of(batch, key)
    if entry.slot_dim == 1 and not entry.seq_dims:
        return value.flatten(0, 1)[None]  # the rows' image slots one after the other
    if entry.unit != 'row' or entry.is_media:
        return value  # images already follow each other in row order
    if value.shape == real.shape and entry.seq_dims:
        return value[real][None]
    raise ValueError(f'`batch[{key!r}]` must be of shape {tuple(real.shape)} for packing, got: {tuple(value.shape)}.')
