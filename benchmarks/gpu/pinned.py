# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""(d) What the host does with a batch of images between two steps, page-locked and not."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.scale import Scale
from benchmarks.gpu.store import Store
from benchmarks.small_llava import make_rows
from benchmarks.timed_steps import Row, data_of
from composer_tokacc import BatchLayout

ROUNDS = 7
TEXT = 64


def tensors(batch: Row) -> list[torch.Tensor]:
    return [value for value in batch.values() if isinstance(value, torch.Tensor)]


def time_way(method: str, batch: Row, scale: Scale) -> dict[str, Any]:
    """Milliseconds of the split on the host, and until all microbatches are on the device."""
    spec = data_of(method, [batch], BatchLayout.for_model(scale.config()))
    split, move, pinned = [], [], []
    for _ in range(ROUNDS):
        given = spec.batch_transforms(batch)
        scale.device.synchronize()
        started = time.perf_counter()
        microbatches = spec.split_batch(given, scale.microbatch)
        split.append(time.perf_counter() - started)
        pinned = [value.is_pinned() for one in microbatches for value in tensors(one)] if scale.device.is_gpu else []
        started = time.perf_counter()
        # As Composer moves them; a copy from ordinary memory holds the host up.
        moved = [value.to(scale.device.name, non_blocking=True) for one in microbatches for value in tensors(one)]
        queued = time.perf_counter() - started
        scale.device.synchronize()
        move.append((queued, time.perf_counter() - started))
        del moved
    return {
        'split_ms': statistics.median(split) * 1e3,
        'queue_copies_ms': statistics.median(one[0] for one in move) * 1e3,
        'copies_ms': statistics.median(one[1] for one in move) * 1e3,
        'microbatches': len(microbatches),
        'pinned_share': sum(pinned) / len(pinned) if pinned else None,
    }


def measure(scale: Scale) -> dict[str, Any]:
    """Split and copy of a batch with an image a row, by stock and by token_data_spec."""
    config = scale.config()
    # Every row has an image: make_rows gives one to every other.
    length = 2 * config.image_seq_length + TEXT
    rows = make_rows([length] * 2 * scale.images, 0, config)[::2]
    batch = BatchLayout.for_model(config).concat(rows)
    result: dict[str, Any] = {'rows': scale.images, 'batch_mib': sum(value.nbytes for value in tensors(batch)) / 2**20}
    locked = {key: value.pin_memory() if isinstance(value, torch.Tensor) and scale.device.is_gpu else value
              for key, value in batch.items()}  # fmt: skip
    for name, given in (('ordinary', batch), ('page-locked', locked)):
        result[name] = {method: time_way(method, given, scale) for method in ('stock', 'ours')}
    if scale.device.is_gpu:
        result['holds'] = result['page-locked']['ours']['pinned_share'] == 1.0
    return result


def run(scale: Scale, store: Store) -> None:
    store.measure('d_pinned', lambda: measure(scale))
