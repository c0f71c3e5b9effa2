# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Reads and checks the text, labels, mask and padding of a batch, without knowing which media belong to which row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_tokacc.refusals import InvalidInputError

Batch = Mapping[str, Any]
"""The values of a batch by key. A function that takes a ``Batch`` does not change it."""
BatchDict = dict[str, Any]
"""A new batch, which may be changed."""
IGNORE_INDEX = -100
"""Label of a position without loss."""
MODALITIES = ('image', 'video', 'audio')
COUNT_KEYS = {'num_images': 'image', 'num_videos': 'video', 'num_audios': 'audio'}
"""Keys of the numbers of images, videos and audios of each row, with their modality."""


def text_of(batch: Batch) -> Tensor:
    """Returns the tensor that tells the number of rows and their width: the ids, else the labels, else the decoder ids.

    Only its first two dimensions tell them: ids of several codebooks have a third one.

    Raises ValueError if the batch has none of these tensors, or if it has no ids and its labels are not of shape
    (rows, width).
    """
    if isinstance(batch, Mapping):
        if isinstance(batch.get('input_ids'), Tensor):
            return batch['input_ids']
        if isinstance(batch.get('labels'), Tensor):
            return labels_of(batch)
        if isinstance(batch.get('decoder_input_ids'), Tensor):
            return batch['decoder_input_ids']
    raise InvalidInputError(
        f'`batch` must have tensors `input_ids` or `labels` of shape (rows, width), got: {_keys_or_type(batch)}.'
    )


def has_input_text(batch: Batch) -> bool:
    """Returns whether the input of the model is text: the batch has ``input_ids``, or ``inputs_embeds`` at its labels.

    If it is not (Whisper), :func:`text_of` returns the labels, which are the text of a decoder, and the mask belongs to
    the input, such as the frames of an audio. With ``decoder_input_ids`` the labels are those of a decoder, too, so
    they do not show that ``inputs_embeds`` are text.
    """
    if batch.get('input_ids') is not None:  # not always a tensor, because a custom model may have ids of another type
        return True
    if batch.get('decoder_input_ids') is not None:
        return False
    embeddings = batch.get('inputs_embeds')
    labels = batch.get('labels')
    if not isinstance(embeddings, Tensor) or not isinstance(labels, Tensor):
        return False
    # (rows, width, size of the model), with a label for each position
    return embeddings.dim() == 3 and embeddings.shape[:2] == labels.shape


def labels_at_text(batch: Batch) -> Tensor | None:
    """Returns the labels if they have the rows and the width of the text, else None.

    The labels of an encoder-decoder model lie at positions of the decoder, but may be as wide as the text by chance. If
    the batch has no ``decoder_input_ids``, it does not show this, and the labels are returned. If a config of the model
    is at hand, use :func:`.labels_along_text`, which reads it.
    """
    labels = batch.get('labels')
    if not isinstance(labels, Tensor) or batch.get('decoder_input_ids') is not None:
        return None
    return labels if labels.shape == text_of(batch).shape[:2] else None


def lacks_labels(batch: Batch) -> list[bool]:
    """Returns for each row whether it has no label. The first column does not count, as in most models."""
    is_masked = labels_of(batch)[:, 1:] == IGNORE_INDEX
    return is_masked.all(dim=1).tolist()


def labels_of(batch: object) -> Tensor:
    """Returns the labels of a batch. Raises ValueError unless they are a tensor of integers ``(rows, width)``."""
    labels = batch.get('labels') if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        raise InvalidInputError(
            f'`batch` must be a mapping with a `labels` tensor of shape (rows, width), got: {_keys_or_type(batch)}. '
            'Token accumulation counts loss-generating labels; write them in the collator.'
        )
    if labels.dim() != 2 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise InvalidInputError(
            f'`labels` must be integers of shape (rows, width), one for each token, got: {labels.dtype} of shape '
            f'{tuple(labels.shape)}. A loss of whole rows, or of several labels a token, is no mean over tokens.'
        )
    return labels


def _keys_or_type(batch: object) -> str:
    if not isinstance(batch, Mapping):
        return type(batch).__name__
    return str(sorted(batch, key=str))  # keys need not be strings


def check_dense(batch: Batch) -> None:
    """Raises ValueError unless all tensors are plain: dense, with values in memory, and without a gradient."""
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            continue
        is_strided = value.layout is torch.strided
        is_special = value.is_meta or value.is_nested or value.is_quantized
        if not is_strided or is_special or value.requires_grad:
            raise InvalidInputError(
                f'`batch[{key!r}]` must be a dense tensor without a gradient, got: {value.dtype}, {value.layout}, on '
                f'{value.device}, beginning with {sample_name(batch, 0)}. Make it one in the collator (`to_dense`, '
                '`to_padded_tensor`, `dequantize`, `detach`).'
            )


def check_ids(batch: Batch) -> None:
    """Raises ValueError unless ``input_ids``, ``attention_mask`` and ``position_ids`` have the right types and shapes.

    The ids must be integers ``(rows, width)``. The mask must be numbers with the rows and the width of the ids, and the
    positions must have their width. All three may be absent.
    """
    ids = batch.get('input_ids')
    if not isinstance(ids, Tensor | None):
        return  # a custom model may have ids of another type. Then `labels` are the text, see text_of()
    if ids is not None and (ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2):
        raise InvalidInputError(
            f'`input_ids` must be integers of shape (rows, width), got: {ids.dtype} of shape {tuple(ids.shape)}. '
            'Give vectors as `inputs_embeds`, and one row as `ids[None]`.'
        )
    mask = batch.get('attention_mask')
    if mask is not None and not _is_mask_of(mask, ids):
        shown_value = type(mask).__name__
        if isinstance(mask, Tensor):
            shown_value = f'{mask.dtype} of shape {tuple(mask.shape)}'
        raise InvalidInputError(
            '`attention_mask` must be real numbers, (rows, width) or (rows, heads, width, width), with rows and width '
            f'of `input_ids`, got: {shown_value}, beginning with {sample_name(batch, 0)}. Give one mask for all heads '
            'as `mask[:, None]`.'
        )
    positions = batch.get('position_ids')
    if ids is None or not isinstance(positions, Tensor) or positions.dim() not in (2, 3):
        return
    # Rows are not compared, because the first of three dimensions is for time, height and width.
    if positions.shape[-1] != ids.shape[1]:
        raise InvalidInputError(
            f'`position_ids` must be as wide as `input_ids`, {ids.shape[1]}, got: {tuple(positions.shape)}, '
            f'beginning with {sample_name(batch, 0)}.'
        )


def _is_mask_of(mask: object, ids: Tensor | None) -> bool:
    """Returns whether a mask is a tensor of real numbers of two or four dimensions, with rows and width of the ids."""
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.is_complex():
        return False
    if mask.is_floating_point() and bool(mask.isnan().any()):  # NaN says neither "attend" nor "hide"
        return False
    if ids is None:
        return True
    is_for_all_rows = mask.dim() == 4 and len(mask) == 1
    has_rows_of_ids = is_for_all_rows or len(mask) == len(ids)
    return has_rows_of_ids and mask.shape[-1] == ids.shape[1]


def check_batch(batch: Batch, *, labels_are_at_ids: bool = False) -> None:
    """Raises ValueError unless models of Transformers can compute a batch, and its tokens can be counted.

    A Composer run checks its batches by this function, and a user's own loop by :func:`check_rows`. It calls
    :func:`check_ids` and :func:`check_dense`. In addition labels must be int64, there must be a token, and the mask
    must not hide all tokens of a row that has labels.

    Args:
        batch: A batch on the CPU.
        labels_are_at_ids: Whether labels must have the shape of the ids. False for an encoder-decoder model.
    """
    labels = labels_of(batch)
    check_dense(batch)
    check_ids(batch)
    ids = batch.get('input_ids')
    if labels_are_at_ids and ids is not None:
        # If the ids are not a tensor, this is the name of their type, which differs from any shape.
        shape_of_ids = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        if labels.shape != shape_of_ids:
            raise InvalidInputError(
                f'`labels` must be of the shape of `input_ids`, which must be a tensor, one for each token, got: '
                f'{tuple(labels.shape)} for {shape_of_ids}, beginning with {sample_name(batch, 0)}. A head that '
                'classifies whole rows has no mean over tokens: train it without TokenAccumulation.'
            )
    if labels.dtype != torch.int64:
        raise InvalidInputError(f'`labels` must be int64 for cross-entropy, got: {labels.dtype}. Give it `.long()`.')
    _check_tokens(batch, labels)


def check_rows(batch: Batch) -> None:
    """Raises ValueError unless the rows of a batch can be told apart, and its labels can be counted.

    These are the checks of :func:`.verify_invariance`, whose batches a user's own loop reads. So they allow more than
    :func:`check_batch`: ids of bytes, ids of several codebooks ``(rows, width, codebooks)``, labels of int32, or a mask
    of three dimensions. Ids and mask must have the rows of the labels, all tensors must be plain, and there must be a
    token. A row that has labels must not be hidden by the mask as a whole.
    """
    labels = labels_of(batch)
    if not labels.dtype.is_signed:
        raise InvalidInputError(f'`labels` must be of a type that can hold -100, got: {labels.dtype}.')
    check_dense(batch)
    mask = batch.get('attention_mask')
    if not isinstance(mask, Tensor | None):
        raise InvalidInputError(f'`attention_mask` must be a tensor, got: {type(mask).__name__}.')
    for key in ('input_ids', 'attention_mask'):
        tensor = batch.get(key)
        if not isinstance(tensor, Tensor):
            continue  # absent, or ids of another type. Then `labels` are the text, see text_of()
        is_for_all_rows = tensor.dim() == 4 and len(tensor) == 1  # only a mask can be
        if tensor.dim() < 2 or (len(tensor) != len(labels) and not is_for_all_rows):
            raise InvalidInputError(
                f'`{key}` must have the rows of `labels`, {len(labels)}, as its first dimension, and their tokens as '
                f'another, got: shape {tuple(tensor.shape)}. Give one row as `{key}[None]`.'
            )
    _check_tokens(batch, labels)


def _check_tokens(batch: Batch, labels: Tensor) -> None:
    """Raises ValueError if there is no token, or if the mask hides all of a row that has labels."""
    if labels.numel() == 0:
        raise InvalidInputError(
            f'A batch must hold at least one row of one token, got: labels of shape {tuple(labels.shape)}. Have the '
            'loader leave such batches out, on all ranks alike.'
        )
    has_attention = attended_positions(batch).any(dim=1)
    if bool(has_attention.all()):
        return  # the usual case. The next lines would find the same, but take time in each step
    loses_labels = ~has_attention & (labels != IGNORE_INDEX).any(dim=1)
    if bool(loses_labels.any()):
        first_row = int(loses_labels.int().argmax())
        raise InvalidInputError(
            f'`attention_mask` must be 1 where tokens are and 0 on padding, got: no token in '
            f'{sample_name(batch, first_row)}, which has labels. Is the mask inverted, or additive?'
        )


def check_vocabulary(
    batch: Batch,
    key: str,
    size: int | None,
    further_ids: Callable[[], Iterable[int]] | None = None,
) -> None:
    """Raises ValueError, which names the sample, if an id is out of the vocabulary. The CUDA error would not name it.

    Args:
        batch: A batch on the CPU.
        key: The entry with the ids. In ``'labels'``, -100 is allowed.
        size: Number of ids of the vocabulary. None: it is not known, so only negative ids are refused.
        further_ids: Returns further ids that are allowed. A function, because reading them from a config is slow, and
            they are only needed if an id is out of the vocabulary. None: no further id is allowed.
    """
    ids = batch[key]
    if key == 'labels':
        ids = ids.masked_fill(ids == IGNORE_INDEX, 0)
    is_bad = ids < 0
    if size is not None:
        is_bad |= ids >= size
    if not bool(is_bad.any()):
        return
    if further_ids is not None:
        for further_id in further_ids():
            is_bad &= ids != further_id
    if not bool(is_bad.any()):
        return
    row, column = is_bad.nonzero()[0].tolist()
    first_bad = ids[row, column].item()
    allowed = 'ids of the vocabulary' if size is None else f'ids from 0 to {size - 1}'
    if key == 'labels':
        allowed = f'{IGNORE_INDEX} or {allowed}'
    raise InvalidInputError(
        f'`{key}` must be {allowed}, got: {first_bad} in {sample_name(batch, row)}. Take the tokenizer that belongs to '
        'the model, mask labels of media, and resize the embedding for new tokens.'
    )


def sample_name(batch: Batch, row: int) -> str:
    """Returns the name of a row for messages: the id of its sample, or its number if the batch has no ids."""
    ids = batch.get('sample_ids')
    if isinstance(ids, (list, tuple)) and len(ids) > row:
        return f'sample {ids[row]!r}'
    return f'row {row}'


def with_copied_tensors(batch: Batch) -> BatchDict:
    """Returns the batch with copies of its tensors, so that a write into them changes no other batch."""
    return map_tensors(batch, Tensor.clone)


def map_tensors(
    batch: Batch,
    function: Callable[[Tensor], Tensor],
) -> BatchDict:
    """Returns the batch with the results of calling a function with each of its tensors."""
    changed = dict(batch)
    for key, value in batch.items():
        if isinstance(value, Tensor):
            changed[key] = function(value)
    return changed


def real_positions(batch: Batch) -> Tensor:
    """Returns the positions that must not be trimmed, bool ``(rows, width)``: those with attention or with a label.

    A label counts even without attention, because some models count it.
    """
    is_real = attended_positions(batch)
    labels = labels_at_text(batch)
    if labels is not None:
        is_real = is_real | (labels != IGNORE_INDEX)
    return is_real


def padding_positions(real: Tensor) -> Tensor:
    """Returns the padding of each row, bool ``(rows, width)``: before its first real position, and after its last one.

    A hole between real positions is not padding. It is never trimmed.
    """
    is_before_row = real.cumsum(dim=1) == 0
    is_after_row = real.flip(1).cumsum(dim=1).flip(1) == 0
    return is_before_row | is_after_row


def attended_positions(batch: Batch) -> Tensor:
    """Returns the positions that the mask does not hide, bool ``(rows, width)``. Without a mask of the text, all.

    In a mask of three or four dimensions, a position is attended if any query attends to it.
    """
    text = text_of(batch)
    mask = batch.get('attention_mask')
    # Without text, or with another width, the mask belongs to another input, such as the frames of Whisper.
    if mask is None or not has_input_text(batch) or mask.shape[-1] != text.shape[1]:
        # Not `ones_like(text)`, because ids of several codebooks have a third dimension.
        return torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    if mask.dim() == 2:
        return mask != 0
    # (rows, heads, queries, keys), or without heads. Floats are added to the scores, so 0 means attended. Otherwise 0
    # means hidden.
    is_attended = mask == 0 if mask.dtype.is_floating_point else mask.bool()
    is_attended_by_any = is_attended.flatten(1, -2).any(dim=1)
    return is_attended_by_any.expand(len(text), -1)


def num_runs(positions: Tensor) -> Tensor:
    """Returns the number of runs of True in each row, from bool ``(rows, width)`` to int ``(rows,)``.

    It shows whether a mask has a hole. Then the attended positions of a row are more than one run.
    """
    # A run starts at a True whose column before it is False. A False column is added before the first one.
    differs_from_left = F.pad(positions, (1, 0)).diff(dim=1)
    is_start = positions & differs_from_left
    return is_start.sum(dim=1)


def lengths_of_runs(positions: Tensor) -> list[list[int]]:
    """Returns the lengths of the runs of True in each row, from bool ``(rows, width)``.

    For example, the row ``1 1 0 1`` has the lengths 2 and 1.
    """
    # A False column on both sides, so that each run has a first column and a column after its last one.
    is_change = F.pad(positions, (1, 1)).diff(dim=1)  # for bools a difference is the exclusive or
    # Row by row, and in each row from left to right, so each first column is followed by the end column of its run.
    changes = is_change.nonzero().tolist()
    lengths_of_rows: list[list[int]] = [[] for _ in range(len(positions))]
    for (row, first_column), (_, end_column) in zip(changes[::2], changes[1::2], strict=True):
        lengths_of_rows[row].append(end_column - first_column)
    return lengths_of_rows


def padding_side(batch: Batch) -> str:
    """Returns the padding side. It is ``'left'`` if all rows end in the last column, but not all begin in the first.

    Otherwise it is ``'right'``, also without any padding.
    """
    return Reach.of(real_positions(batch)).side


def common_padding_side(batches: Iterable[Batch]) -> str:
    """Returns the padding side of several batches of one collator: left if any batch has its padding there.

    One batch is enough, because batches without padding or without text do not show the side.
    """
    for batch in batches:
        # A custom model may have ids of another type, which has_input_text() takes for text.
        has_readable_ids = isinstance(batch.get('input_ids'), Tensor | None)
        if has_readable_ids and has_input_text(batch) and padding_side(batch) == 'left':
            return 'left'
    return 'right'


@dataclass(frozen=True)
class Reach:
    """How far the marked positions of each row, such as the real ones, reach from its first column and from its last.

    A row of width 6 with the marks ``0 0 1 1 1 0`` reaches 5 columns from the first one, and 4 from the last one.
    """

    width: int
    from_first: list[int]
    """For each row, the number of columns from the first column to its last mark, both included; 0: it has no mark."""
    from_last: list[int]
    """For each row, the number of columns from its first mark to the last column, both included; 0: it has no mark."""

    @classmethod
    def of(cls, positions: Tensor) -> Reach:
        """Returns the reach of the positions that are True, bool ``(rows, width)``."""
        width = positions.shape[1]
        distances_from_first = torch.arange(1, width + 1, device=positions.device)
        distances_from_last = distances_from_first.flip(0)
        # Both at once, so that a GPU is waited for only once.
        distances = torch.stack([distances_from_first, distances_from_last])
        distances_of_marks = positions * distances[:, None]  # (2, rows, width), 0 at positions without a mark
        from_first, from_last = distances_of_marks.amax(dim=2).tolist()
        return cls(width, from_first, from_last)

    @property
    def side(self) -> str:
        """The padding side if the marks are the real positions, see :func:`padding_side`."""
        all_end_last = True
        all_begin_first = True
        for from_first, from_last in zip(self.from_first, self.from_last, strict=True):
            if from_first == 0:
                continue  # a row without real positions says nothing about the side
            if from_first < self.width:
                all_end_last = False
            if from_last < self.width:
                all_begin_first = False
        return 'left' if all_end_last and not all_begin_first else 'right'

    def lengths(self, side: str) -> list[int]:
        """Returns the width of each row without its padding on this side, at least 1. The marks must be real positions.

        Positions without attention between real ones are not padding, so they count.
        """
        widths = self.from_first
        if side == 'left':
            widths = self.from_last
        return [max(num_columns, 1) for num_columns in widths]
