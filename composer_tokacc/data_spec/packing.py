# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Packs a microbatch: its rows become one row, one after the other, without any padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from composer_tokacc.batch import (
    COUNT_KEYS,
    IGNORE_INDEX,
    Batch,
    BatchDict,
    attended_positions,
    num_runs,
    real_positions,
    sample_name,
)
from composer_tokacc.counting import LossRule
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.layout import BatchLayout
from composer_tokacc.layout.layout import labels_along_text
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.row_counts import ROWS_KEY, RowCounts, packed_counts, row_counts_of


def pack_rows(
    layout: BatchLayout,
    batch: Batch,
    attention: DocumentAttention,
) -> BatchDict:
    """Returns a batch of one row, which holds the tokens of all rows. Each row becomes a document of the packed row.

    Labels stay at their tokens. If the loss rule shifts labels, the model predicts a label from the previous token.
    Then the label of the first token of each document is masked, because the last token of the previous document
    would predict it.

    Args:
        layout: How the tensors of the batch belong to its rows.
        batch: The rows. They must not have holes, which are positions without attention between attended ones. The
            loss rule is in the counts of the batch. Without counts, the previous token is taken to predict a label.
        attention: The model's attention, which tells documents apart.

    Returns:
        The packed row. Its entries are:

        - ``input_ids``, ``labels`` and all other tensors along the text, ``(1, total)``;
        - ``position_ids``, which restart with each document, ``(1, total)``. Rotary positions of media are
          ``(3, 1, total)``. If the attention takes no packed mask, they are ``(4, 1, total)``: the position in the
          text, then the three rotary ones;
        - ``attention_mask``, the packed mask, bool ``(documents, total)``, True at the tokens of a document. It is
          missing if the attention takes no packed mask;
        - the counts of the rows, and lists and other values, see :func:`_pack_value`.

    Raises:
        ValueError: If the batch has an entry that cannot be packed.
    """
    rule = row_counts_of(batch)[0].rule
    if rule is LossRule.CAUSAL_ATTENDED:
        # This rule does not count labels on padding. They are masked, or real_positions() would count a pad that has a
        # label as a token.
        is_padding = ~attended_positions(batch)
        batch = {**batch, 'labels': batch['labels'].masked_fill(is_padding, IGNORE_INDEX)}
    is_shifted = rule is None or rule.shifts_labels
    real = real_positions(batch)
    _check_rows(layout, batch, real, attention, is_shifted=is_shifted)
    if not bool(real.any()):
        # If all rows are empty, one pad stays, because the model cannot compute a row without tokens.
        real = torch.zeros_like(real)
        real[0, 0] = True
    packed: BatchDict = {}
    for key, value in batch.items():
        if key in ('attention_mask', 'position_ids'):
            continue  # both are written below
        if key == ROWS_KEY:
            counts = _counts_that_stay(value, real)
            packed[key] = [packed_counts(counts)]
        elif isinstance(value, Tensor):
            packed[key] = _pack_tensor(layout, batch, key, real)
        else:
            packed[key] = _pack_value(key, value, num_rows=len(real))
    # The first real token of each row starts a document. For example, rows of 2 and 3 tokens give 1 0 1 0 0.
    is_first_token = real & (real.cumsum(dim=1) == 1)
    starts_document = is_first_token[real][None]  # `[real]` takes the real tokens, row after row
    if is_shifted:
        packed['labels'] = packed['labels'].masked_fill(starts_document, IGNORE_INDEX)
    if attention.uses_packed_masks:
        document_of_token = starts_document.cumsum(dim=1) - 1  # such as 0 0 1 1 1
        num_documents = int(document_of_token[0, -1]) + 1
        documents = torch.arange(num_documents, device=real.device)
        packed['attention_mask'] = document_of_token == documents[:, None]
    packed['position_ids'] = _pack_positions(batch, real, attention)
    return packed


def _counts_that_stay(counts: Sequence[RowCounts], real: Tensor) -> list[RowCounts]:
    """Returns the counts of the rows that the packed row counts.

    A dummy row or a repeated sample without real positions leaves nothing in it. An empty sample is no document either,
    but counts as a sample.
    """
    has_tokens = real.any(dim=1).tolist()
    counts_that_stay = []
    for row_counts, row_has_tokens in zip(counts, has_tokens, strict=True):
        if row_counts.samples > 0 or row_has_tokens:
            counts_that_stay.append(row_counts)
    return counts_that_stay


def _check_rows(
    layout: BatchLayout,
    batch: Batch,
    real: Tensor,
    attention: DocumentAttention,
    *,
    is_shifted: bool,
) -> None:
    """Raises ValueError for entries that packing cannot handle, and for rows that it would change."""
    if batch.get('input_ids') is None:
        raise InvalidInputError('`input_ids` must be in the batch for packing, got: no ids.')
    if labels_along_text(layout, batch) is None:
        raise InvalidInputError(
            '`labels` must lie at the tokens of `input_ids` for packing, got: labels of shape '
            f'{tuple(batch["labels"].shape)} and ids of shape {tuple(real.shape)}. Labels of an encoder-decoder (T5) '
            'lie at the tokens of its decoder, even if they are as wide as the ids, so its rows cannot be packed.'
        )
    mask = batch.get('attention_mask')
    if mask is not None and mask.dim() != 2:
        raise InvalidInputError(f'`attention_mask` must be 2-D for packing, got: {mask.dim()}-D.')
    positions = batch.get('position_ids')
    if positions is not None:
        expected = attention.positions(batch, real)
        are_as_expected = positions.shape == real.shape and torch.equal(positions[real], expected[real])
        if not are_as_expected:
            raise InvalidInputError(
                '`position_ids` must be absent for packing, or count the tokens of each row from its first one, got: '
                'others.'
            )
    _check_runs(batch, real, is_shifted=is_shifted)


def _check_runs(batch: Batch, real: Tensor, *, is_shifted: bool) -> None:
    """Raises ValueError unless the text of each row is one run of tokens.

    Packing keeps only the ``real`` positions, which have attention or a label. So a hole would disappear, and padding
    with a label would become a token.
    """
    attended = attended_positions(batch)
    is_labelled_pad = real & ~attended
    if is_shifted:
        # A label on the first pad after an attended position is allowed, because the last token predicts it. This pad
        # becomes the last token of the document, and predicts nothing itself.
        follows_attended = torch.zeros_like(attended)
        follows_attended[:, 1:] = attended[:, :-1]
        is_labelled_pad &= ~follows_attended
    has_hole = num_runs(attended) > 1
    is_wrong = has_hole | is_labelled_pad.any(dim=1)
    if bool(is_wrong.any()):
        first_wrong_row = int(is_wrong.int().argmax())
        name = sample_name(batch, first_wrong_row)
        allowed = 'with at most one label after it' if is_shifted else 'without labels on padding'
        raise InvalidInputError(
            f'Rows must be one run of tokens {allowed} to be packed, got: a hole in `attention_mask`, or labels on '
            f'padding, in {name}. Mask those labels (-100, docs/errors.md#packing).'
        )


def _pack_tensor(
    layout: BatchLayout,
    batch: Batch,
    key: str,
    real: Tensor,
) -> Tensor:
    """Returns the tensor of the packed row for one key of the batch. ``real`` marks the tokens that are packed.

    Raises ValueError for a tensor of the rows that has not exactly one value for each position of the text.
    """
    value = batch[key]
    entry = layout.entry_of(batch, key)
    if key in COUNT_KEYS:
        # The packed row has the images, videos and audios of all rows.
        return value.sum(dim=0, keepdim=True)
    if entry.slot_dim == 1 and not entry.seq_dims:
        # Each row has slots for its images, and no columns (Idefics3). From (rows, slots, ...) to
        # (1, rows * slots, ...).
        return value.flatten(0, 1)[None]
    if entry.unit != 'row' or entry.is_media:
        # All rows share the tensor, or it holds media. The packed row has the media of all rows, in the same order.
        # Mllama's `cross_attention_mask`, with rows and images, never comes here: rows of Mllama are not packed, see
        # `Family.coupling`.
        return value
    if value.shape == real.shape and entry.seq_dims:
        # The tensor lies along the text. Takes its values at the real tokens, row after row.
        return value[real][None]
    raise InvalidInputError(
        f'`batch[{key!r}]` must be of shape {tuple(real.shape)} for packing, got: {tuple(value.shape)}. Give '
        'values that only callbacks read, one a row, as a list.'
    )


def _pack_value(key: str, value: Any, *, num_rows: int) -> Any:
    """Returns the value of the packed row for a key that has no tensor.

    A list with one count per row, such as ``num_images``, becomes a list with the sum. Any other list with one value
    per row becomes a list with one list. Numbers such as ``sample_ids`` are not added up, because their sum would name
    another sample. All other values stay as they are.
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
    attention: DocumentAttention,
) -> Tensor:
    """Returns the position of each token of the packed row in its own document; for shapes see :func:`pack_rows`."""
    positions_in_row = attention.positions(batch, real)
    positions = positions_in_row[real][None]
    rotary = attention.rotary_positions(batch)
    if rotary is None:
        return positions
    # From (3, rows, width) to (3, 1, total).
    packed_rotary = rotary[:, real][:, None]
    if attention.uses_packed_masks:
        return packed_rotary
    # Attention without packed masks finds the documents by positions in the text. Transformers expects these first.
    return torch.cat([positions[None], packed_rotary])
