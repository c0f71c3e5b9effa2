# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Arguments of the sampler, refused before anything is planned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ['check_batch_size', 'int_table', 'media_of']


def media_of(
    modality: str, media: Sequence[int] | np.ndarray | None, image_tokens: np.ndarray | None, num_samples: int
) -> np.ndarray | None:
    """Medium of each sample, or None where global batches mix them."""
    if modality not in ('mixed', 'per_step'):
        raise ValueError(f"`modality` must be 'mixed' or 'per_step', got: {modality!r}.")
    if modality == 'mixed':
        return None
    if media is not None:
        return int_table('media', media, num_samples, 0, 'media', None)
    if image_tokens is None:
        raise ValueError("`image_tokens` or `media` must be given with modality='per_step', got: neither.")
    return (image_tokens > 0).astype(np.int64)


def check_batch_size(global_batch_size: int, num_replicas: int, num_samples: int, drop_last: bool) -> None:
    """Refuses a global batch that ranks cannot share, or that an epoch cannot fill; `num_samples` an epoch."""
    if num_samples < 1:
        raise ValueError('`dataset` must hold at least one sample, got: none.')
    if global_batch_size < 1 or global_batch_size % num_replicas:
        above = max(-(-global_batch_size // num_replicas), 1) * num_replicas
        raise ValueError(
            f'`global_batch_size` must be a positive multiple of the number of ranks, got: {global_batch_size} on '
            f'{num_replicas} ranks. Set it to {above}, or launch another number of ranks.'
        )
    if drop_last and num_samples < global_batch_size:
        raise ValueError(
            f'`global_batch_size` must be at most the dataset with `drop_last`, got: {global_batch_size} > '
            f'{num_samples} samples. Lower it or set drop_last=False.'
        )


def int_table(
    name: str, values: Sequence[int] | np.ndarray, num_samples: int, least: int, cap_name: str, cap: int | None
) -> np.ndarray:
    """One non-negative int per sample, int64 (n,), none over the cap."""
    table = np.asarray(values)
    if table.shape != (num_samples,):
        raise ValueError(
            f'`{name}` must have one entry per sample, got: shape {table.shape} for {num_samples} samples. Was the '
            'table made for another dataset?'
        )
    if table.dtype.kind not in 'iu':
        raise ValueError(f'`{name}` must be integers, got: {table.dtype}. Pass token counts.')
    table = table.astype(np.int64)
    lowest, highest = int(table.argmin()), int(table.argmax())
    if table[lowest] < least:
        raise ValueError(f'`{name}` must be at least {least}, got: {table[lowest]} at sample {lowest}. Count it anew.')
    if cap is not None and table[highest] > cap:
        raise ValueError(
            f'`{cap_name}` must be at least the longest sample, got: {cap} < {table[highest]} (sample {highest}). '
            'Raise it, or leave the sample out.'
        )
    return table
