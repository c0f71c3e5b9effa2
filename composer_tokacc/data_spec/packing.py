# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Packed rows: the rows of a microbatch one after the other, without any padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from composer_tokacc.batch import (
    IGNORE_INDEX,
    MODALITIES,
    Batch,
    BatchDict,
    attended_positions,
    num_runs,
    real_positions,
    sample_name,
)
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.layout import BatchLayout
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.row_counts import ROWS_KEY, summed

_ITEM_COUNTS = frozenset(f'num_{modality}s' for modality in MODALITIES)
"""Keys of the numbers of images, videos and audios of each row."""


def pack_rows(
    layout: BatchLayout,
    batch: Batch,
    attention: DocumentAttention | None = None,
) -> BatchDict:
    """Returns one row with the real tokens of all rows. Each row becomes a document.

    Labels stay at their tokens. If the model predicts a label from the token before it (every rule but
    ``'unshifted'``), the label of the first token of each document is masked: the document before it would predict it.

    Args:
        layout: How the tensors of the batch belong to its rows.
        batch: Rows without holes. Its counts name the loss rule. Without counts the rule is causal.
        attention: The attention of the model. None: one that takes masks and counts positions from 0.

    Returns:
        ``input_ids`` ``(1, total)``; ``attention_mask`` bool ``(documents, total)``, True at the tokens of a document;
        ``position_ids`` that restart with each document, ``(1, total)``, or ``(3, 1, total)`` for multimodal ones.
        A list with one value per row becomes a list with one list, a list of counts (``num_images``) their sum.

    Raises:
        ValueError: If the batch has an entry that cannot be packed.
    """
    is_shifted = ROWS_KEY not in batch or batch[ROWS_KEY][0].rule != 'unshifted'
    real = real_positions(batch)
    _check_rows(batch, real, is_shifted=is_shifted)
    if not bool(real.any()):
        # A model cannot compute a row without tokens, so one padding token is kept.
        real = torch.zeros_like(real)
        real[0, 0] = True
    packed: BatchDict = {}
    for key, value in batch.items():
        if key == ROWS_KEY:
            packed[key] = [summed(value)]
        elif isinstance(value, Tensor):
            if key != 'attention_mask':  # the mask of the documents is written below
                packed[key] = _pack_tensor(layout, batch, key, real)
        else:
            packed[key] = _pack_value(key, value, num_rows=len(real))
    # The first real token of each row starts a document. `[real]` takes the real tokens, row after row.
    is_first_token = real.cumsum(dim=1) == 1
    is_start = is_first_token[real][None]
    if is_shifted:
        packed['labels'] = packed['labels'].masked_fill(is_start, IGNORE_INDEX)
    if attention is None or attention.has_masks:
        document_of_token = is_start.cumsum(dim=1) - 1
        num_documents = int(document_of_token[0, -1]) + 1
        documents = torch.arange(num_documents, device=real.device)
        packed['attention_mask'] = document_of_token == documents[:, None]
    packed['position_ids'] = _pack_positions(batch, real, attention)
    return packed


def _check_rows(
    batch: Batch,
    real: Tensor,
    *,
    is_shifted: bool,
) -> None:
    """Raises ValueError if a row has holes, or labels on padding, because these positions would become tokens."""
    mask = batch.get('attention_mask')
    if mask is not None and mask.dim() != 2:
        raise InvalidInputError(f'`attention_mask` must be 2-D for packing, got: {mask.dim()}-D. Set `packing=False`.')
    if batch.get('position_ids') is not None:
        raise InvalidInputError('`position_ids` must be absent for packing, got: a tensor. Set `packing=False`.')
    attended = attended_positions(batch)
    labelled_padding = real & ~attended
    if is_shifted:
        # The last token predicts a label right behind it. A label further on is predicted from padding.
        labelled_padding[:, 1:] &= ~attended[:, :-1]
    is_wrong = (num_runs(attended) > 1) | labelled_padding.any(dim=1)
    if bool(is_wrong.any()):
        first_wrong_row = int(is_wrong.int().argmax())
        name = sample_name(batch, first_wrong_row)
        allowed = 'with at most one label behind it' if is_shifted else 'without labels on padding'
        raise InvalidInputError(
            f'Rows must be one run of tokens, {allowed}, to be packed, got: another '
            f'`attention_mask` or labels on padding in {name}. Set `packing=False`.'
        )


def _pack_tensor(
    layout: BatchLayout,
    batch: Batch,
    key: str,
    real: Tensor,
) -> Tensor:
    """Returns a tensor of the one packed row."""
    value = batch[key]
    entry = layout.entry_of(batch, key)
    if key in _ITEM_COUNTS:
        return value.sum(dim=0, keepdim=True)  # the packed row has the items of all rows
    if entry.slot_dim == 1 and not entry.seq_dims:
        return value.flatten(0, 1)[None]  # the image slots of the rows one after the other
    if entry.unit != 'row' or entry.is_media:
        return value  # images are already in the order of the rows
    if value.shape == real.shape and entry.seq_dims:
        return value[real][None]
    raise InvalidInputError(
        f'`batch[{key!r}]` must be of shape {tuple(real.shape)} for packing, got: {tuple(value.shape)}.'
    )


def _pack_value(key: str, value: Any, *, num_rows: int) -> Any:
    """Returns a value of the one packed row.

    A list of counts (``num_images``), one per row, becomes a list with their sum. Any other list with one value per row
    becomes a list with that list: the sum of ``sample_ids`` would name another sample. What is not a list of rows stays
    as it is.
    """
    if not isinstance(value, (list, tuple)) or len(value) != num_rows:
        return value
    are_numbers = all(isinstance(item, (int, float)) for item in value)
    if key.startswith('num_') and are_numbers:
        return [sum(value)]
    return [list(value)]


def _pack_positions(
    batch: Batch,
    real: Tensor,
    attention: DocumentAttention | None,
) -> Tensor:
    """Returns the position of each token of the packed row in its own document."""
    if attention is None:
        positions_in_row = real.cumsum(dim=1) - 1
        return positions_in_row[real][None]
    positions_in_row = attention.positions(batch, real)
    positions = positions_in_row[real][None]
    rotary = attention.rotary_positions(batch)
    if rotary is None:
        return positions
    packed_rotary = rotary[:, real][:, None]
    if attention.has_masks:
        return packed_rotary
    # Attention without a mask finds the documents by the positions of text, which come first.
    return torch.cat([positions[None], packed_rotary])
