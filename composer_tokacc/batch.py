# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A batch, and what is asked of it before anything is known of its layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

Batch = Mapping[str, Any]
IGNORE_INDEX = -100
"""Label of a position without loss."""
MODALITIES = ('image', 'video', 'audio')


def text_of(batch: Batch) -> torch.Tensor:
    """Returns the ids or labels whose rows are the batch's."""
    get = getattr(batch, 'get', {}.get)
    for key in ('input_ids', 'labels', 'decoder_input_ids'):
        if isinstance(text := get(key), torch.Tensor):
            return text
    got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
    raise ValueError(f'`batch` must have tensors `input_ids` or `labels` of shape (rows, width), got: {got}.')


def own_labels(batch: Batch) -> torch.Tensor | None:
    """The labels where they stand at the positions of the rows' text; those of a decoder may be as wide by chance."""
    labels = batch.get('labels')
    is_own = isinstance(labels, torch.Tensor) and labels.shape == text_of(batch).shape
    return labels if is_own and 'decoder_input_ids' not in batch else None


def labels_of(batch: Any) -> torch.Tensor:
    """Returns the labels of a batch, integers ``(rows, width)``; raises ValueError where there are no such ones."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get('labels'), torch.Tensor):
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f'`batch` must be a mapping with a `labels` tensor of shape (rows, width), got: {got}. Token accumulation '
            'counts loss-generating labels; write them in the collator.'
        )
    labels = batch['labels']
    if labels.dim() != 2 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f'`labels` must be integers of shape (rows, width), one for each token, got: {labels.dtype} of shape '
            f'{tuple(labels.shape)}. Losses of whole rows or of several codes a token are no means over tokens.'
        )
    return labels


def check_dense(batch: Batch) -> None:
    """Raises ValueError unless the rows of all tensors can be taken."""
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            continue
        is_dense = value.layout is torch.strided and not (value.is_meta or value.is_nested or value.is_quantized)
        if not is_dense or value.requires_grad:
            raise ValueError(
                f'`batch[{key!r}]` must be a dense tensor without a gradient, got: {value.dtype}, {value.layout}, on '
                f'{value.device}, beginning with {sample_name(batch, 0)}. Make it one in the collator (`to_dense`, '
                '`to_padded_tensor`, `dequantize`, `detach`).'
            )


def check_ids(batch: Batch) -> None:
    """Raises ValueError unless ids are integers ``(rows, width)``, and mask and positions as wide."""
    ids = batch.get('input_ids')
    if not isinstance(ids, torch.Tensor | None):
        return
    if ids is not None and (ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64)):
        raise ValueError(
            f'`input_ids` must be integers of shape (rows, width), got: {ids.dtype} of shape {tuple(ids.shape)}. Give '
            'vectors as `inputs_embeds`, and one row as `ids[None]`.'
        )
    mask = batch.get('attention_mask')
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4) or _is_no_number(mask)):
        got = f'{mask.dtype} of shape {tuple(mask.shape)}' if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f'`attention_mask` must be real numbers, (rows, width) or (rows, heads, width, width), got: {got}, '
            f'beginning with {sample_name(batch, 0)}. Give one mask for all heads as `mask[:, None]`.'
        )
    for key, dims in (('attention_mask', (2, 4)), ('position_ids', (2, 3))):
        if ids is None or not isinstance(value := batch.get(key), torch.Tensor) or value.dim() not in dims:
            continue
        # One mask may be for all rows, if it says so by its four dimensions.
        has_rows = key == 'position_ids' or len(value) == len(ids) or (value.dim() == 4 and len(value) == 1)
        if value.shape[-1] != ids.shape[1] or not has_rows:
            raise ValueError(
                f'`{key}` must be as wide as `input_ids`, {tuple(ids.shape)}, got: {tuple(value.shape)}, beginning '
                f'with {sample_name(batch, 0)}.'
            )


def _is_no_number(mask: torch.Tensor) -> bool:
    return mask.is_complex() or (mask.is_floating_point() and bool(mask.isnan().any()))


def check_batch(batch: Any, *, is_decoder: bool = False) -> None:
    """Raises ValueError, naming the sample, where a batch is none that tokens can be counted of; it is on the CPU.

    ``is_decoder``: whether labels must stand at the positions of the ids.
    """
    labels = labels_of(batch)
    check_dense(batch)
    check_ids(batch)
    if is_decoder and batch.get('input_ids') is not None and labels.shape != batch['input_ids'].shape:
        raise ValueError(
            f'`labels` must be of the shape of `input_ids`, {tuple(batch["input_ids"].shape)}, one for each token, '
            f'got: {tuple(labels.shape)}, beginning with {sample_name(batch, 0)}. A head that classifies whole rows '
            'has no mean over tokens: train it without TokenAccumulation.'
        )
    if labels.dtype != torch.int64:
        raise ValueError(f'`labels` must be int64 for cross-entropy, got: {labels.dtype}. Give it `.long()`.')
    if not labels.numel():
        raise ValueError(
            f'A batch must hold at least one row of one token, got: labels of shape {tuple(labels.shape)}. Have the '
            'loader leave such batches out, on all ranks alike.'
        )
    nowhere = ~attended_positions(batch).any(dim=1)
    if bool(nowhere.any()) and bool((lost := nowhere & (labels != IGNORE_INDEX).any(dim=1)).any()):
        raise ValueError(
            f'`attention_mask` must be 1 where tokens are and 0 on padding, got: no token in '
            f'{sample_name(batch, int(lost.int().argmax()))}, which has labels. Is the mask inverted, or additive?'
        )


def check_vocabulary(batch: Batch, key: str, size: int | None, others: Callable[[], Iterable[int]]) -> None:
    """Raises ValueError, naming the sample, where torch would only say that an index is out of range, or a GPU stop.

    ``size``: ids of the vocabulary, None: not known; ``others``: those that may stand there beside them.
    """
    ids = batch[key]
    bad = ids < 0 if size is None else (ids < 0) | (ids >= size)
    if not bool(bad.any()):
        return
    for other in others():
        bad &= ids != other
    if bool(bad.any()):
        row = int(bad.any(dim=1).int().argmax())
        which = 'of the vocabulary' if size is None else f'from 0 to {size - 1}'
        also = f'{IGNORE_INDEX} or ' if key == 'labels' else ''
        raise ValueError(
            f'`{key}` must be {also}ids {which}, got: {int(ids[row][bad[row]][0])} in {sample_name(batch, row)}. Take '
            'the tokenizer that belongs to the model, mask labels of media, and resize the embedding for new tokens.'
        )


def sample_name(batch: Mapping[str, Any], row: int) -> str:
    """Returns what a message calls a row: the sample by its id, or where the batch has none the row by its number."""
    ids = batch.get('sample_ids')
    return f'sample {ids[row]!r}' if isinstance(ids, (list, tuple)) and len(ids) > row else f'row {row}'


def with_own_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the batch with copies of its tensors, so that whoever writes into them changes no other batch."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def real_positions(batch: Batch) -> torch.Tensor:
    """Returns ``(rows, width)`` bool: attended, or labelled (a label on a pad counts for some models and must stay)."""
    real, labels = attended_positions(batch), own_labels(batch)
    return real if labels is None else real | (labels != IGNORE_INDEX)


def attended_positions(batch: Batch) -> torch.Tensor:
    """Returns ``(rows, width)`` bool: all that the mask does not hide; those of a mask of another input are all."""
    ids, mask = text_of(batch), batch.get('attention_mask')
    if mask is None or 'input_ids' not in batch:
        return torch.ones_like(ids, dtype=torch.bool)
    if mask.dim() > 2:  # additive masks hold 0 where a key is attended, boolean ones True
        attended = mask == 0 if mask.dtype.is_floating_point else mask.bool()
        return attended.flatten(1, -2).any(dim=1).expand_as(ids)
    return mask != 0


def padding_side(batch: Batch) -> str:
    """Returns ``'left'`` if every row ends at the last column and some do not start at the first, else ``'right'``."""
    return side_of(real_positions(batch))


def side_of(real: torch.Tensor) -> str:
    """Returns the padding side that real positions show."""
    return 'left' if bool(real[:, -1].all()) and not bool(real[:, 0].all()) else 'right'


def span(batch: Batch) -> tuple[str, list[int]]:
    """Returns the padding side, and the width that each row needs by itself once trimmed, at least 1."""
    real = real_positions(batch)
    side = side_of(real)
    return side, lengths_of(real, side)


def lengths_of(real: torch.Tensor, side: str) -> list[int]:
    """Returns the width that each row needs, of its real positions and padding side."""
    rows, width = real.shape
    if bool(real.all()):
        return [width] * rows
    positions = torch.arange(1, width + 1, device=real.device)
    distance = positions.flip(0) if side == 'left' else positions
    return (real * distance).amax(dim=1).clamp(min=1).tolist()
