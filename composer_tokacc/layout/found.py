# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Layouts that are found, not registered: what a tensor's name and shape, the config and the batch tell.

A tensor with one entry a row belongs to rows. One of images, videos or audios has so many entries an item, or a patch,
or a tile: which of them belong to which row is told by the placeholders, if only one answer fits. What the first batch
gives that way is proven by the first-batch check; a batch that gives no answer, or two, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from composer_tokacc.batch import MODALITIES, Batch, text_of
from composer_tokacc.layout.families import TEXT_FAMILY, Entry, Family, Media
from composer_tokacc.layout.placeholders import modality_of, placeholder_ids, stand_at


def found_family(config: Any) -> Family:
    """Returns the family of a model that none is registered for: its modalities, as its config names them."""
    parts = {'image': getattr(config, 'vision_config', None), 'audio': getattr(config, 'audio_config', None)}
    named = [one for one in MODALITIES if placeholder_ids(config, one) or parts.get(one) is not None]
    media = dict.fromkeys(named, Media())
    return Family(name=config.model_type, media=media) if media else TEXT_FAMILY


def found_entry(batch: Batch, key: str, num_rows: int, width: int) -> Entry | None:
    """Returns how a tensor of an unknown name belongs to rows; None: it cannot be told."""
    value = batch[key]
    if value.dim() == 0:
        return Entry(unit='shared')
    modality, shape = modality_of(key), tuple(value.shape)
    # Pixels are floats; masks and types of the text may bear the name of a modality.
    if shape[:2] == (num_rows, width) and not (modality and value.is_floating_point()):
        return Entry(seq_dims=(1,))
    if modality is not None:
        dim = -1 if _lies_side_by_side(batch, value, modality) else 0
        pixels = 'pixel_values_videos' if modality == 'video' else 'pixel_values'
        points_into = pixels if key.endswith('_token_pooling') and pixels in batch else None  # Molmo 2
        return Entry(unit=f'{modality}/{shape[dim]}', row_dim=dim, points_into=points_into)
    if shape[0] == num_rows:
        return Entry()
    if shape in ((1,), (1, width)):
        return Entry(unit='shared', seq_dims=(1,) if len(shape) == 2 else ())
    return None


def _lies_side_by_side(batch: Batch, value: torch.Tensor, modality: str) -> bool:
    """Whether patches of all images follow one another in the last dimension: MiniCPM-V, whose first is always 1."""
    if value.dim() < 3 or value.shape[0] != 1:
        return False
    sizes = [one for key, one in batch.items() if key != 'input_ids' and modality_of(key) == modality]
    sizes = [one for one in sizes if isinstance(one, torch.Tensor) and one.shape[1:] == (2,)]
    return any(int(one.prod(dim=1).sum()) * value.shape[-2] == value.shape[-1] for one in sizes)


def has_sound_along_text(batch: Batch, config: Any) -> bool:
    """Returns whether sound has so many frames a column of text, which cannot be trimmed alone (Voxtral Realtime)."""
    num_rows, width = text_of(batch).shape[:2]
    sounds = [value for key, value in batch.items() if torch.is_tensor(value) and modality_of(key) == 'audio']
    shapes = [value.shape for value in sounds if value.dim() == 3 and len(value) == num_rows]
    return any(shape[-1] % width == 0 for shape in shapes) and not placeholder_ids(config, 'audio')


def carried_counts(batch: Batch, modality: str) -> list[int] | None:
    """Returns the numbers of images, videos or audios that a batch carries, one a row; None where it carries none."""
    carried = batch.get(f'num_{modality}s')
    entries = carried.flatten().tolist() if isinstance(carried, torch.Tensor) else carried
    if entries is None:
        return None
    if not isinstance(entries, Sequence) or not all(hasattr(one, '__index__') and one >= 0 for one in entries):
        raise ValueError(f'`num_{modality}s` must be a list of ints from 0, one per row, got: {carried}. Count anew.')
    return [int(one) for one in entries]


def found_counts(batch: Batch, config: Any, modality: str, count: int, num_rows: int) -> list[int]:
    """Returns how many of so many entries of a modality's tensors belong to each row; refuses no answer, and two."""
    if num_rows == 1:
        return [count]
    is_placeholder = stand_at(text_of(batch), placeholder_ids(config, modality))
    tokens = is_placeholder.sum(dim=1).tolist()
    begins = is_placeholder & ~torch.nn.functional.pad(is_placeholder[:, :-1], (1, 0))
    runs, total = begins.sum(dim=1).tolist(), sum(tokens)
    answers = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and modality_of(key) == modality:
            answers |= _by_sizes(key, value, count, tokens, runs)
    if total and not answers and all(count * number % total == 0 for number in tokens):
        answers['placeholders'] = [count * number // total for number in tokens]  # items of one size
    if sum(runs) == count:
        answers['runs of placeholders'] = runs
    carried = carried_counts(batch, modality)
    if carried is not None and len(carried) == num_rows and sum(carried) == count:
        answers = {'carried': carried}
    if not total and count == num_rows:  # no placeholders at all: an encoder that every row attends to
        answers = {'rows': [1] * num_rows}
    if len(set(map(tuple, answers.values()))) != 1:
        raise ValueError(
            f'`layout` must tell which of {count} entries of {modality}s belong to which of {num_rows} rows, got: '
            f'{tokens} placeholders in {runs} runs by row, and {answers or "no way to share them"}. Carry '
            f'`num_{modality}s` in the batch, one int per row, or register the tensors: docs/families.md#not-there'
        )
    return next(iter(answers.values()))


def _by_sizes(
    key: str, value: torch.Tensor, count: int, tokens: Sequence[int], runs: Sequence[int]
) -> dict[str, list[int]]:
    """Returns the answers of a tensor that holds the size of each item: grids of patches, numbers of tiles."""
    if value.dim() not in (1, 2) or not len(value):
        return {}
    sizes, answers = (value if value.dim() == 1 else value.prod(dim=1)).tolist(), {}
    total, patches = sum(tokens), sum(sizes)
    whole = None
    if not patches or (value.dim() == 2 and min(sizes) < 1):  # a mask
        return {}
    if total and patches % total == 0 and all(size % (patches // total) == 0 for size in sizes):
        whole = items_of_rows(tokens, [size * total // patches for size in sizes])  # merged patches are tokens
    elif sum(runs) == len(sizes):
        whole = list(runs)
    elif sum(runs) == patches:  # each frame of a video by itself
        whole = items_of_rows(runs, sizes)
    if whole is not None and len(sizes) == count:
        answers[key] = whole
    if whole is not None and count % patches == 0:
        ends, rows = [0, *accumulate(sizes)], [0, *accumulate(whole)]
        answers[key] = [count // patches * (ends[end] - ends[start]) for start, end in pairwise(rows)]
    return answers


def items_of_rows(tokens: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    """Returns the items of each row, where rows hold whole ones: 20 and 10 tokens of items of 10 are 2 and 1.

    There is one answer at most, as every item has tokens and items come in the order of the rows; None: there is none.
    """
    ends, row_ends = [0, *accumulate(sizes)], list(accumulate(tokens))
    if not sizes or min(sizes) < 1 or row_ends[-1] != ends[-1] or not set(row_ends) <= set(ends):
        return None
    return [ends.index(stop) - ends.index(start) for start, stop in pairwise([0, *row_ends])]
