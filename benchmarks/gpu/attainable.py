# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What part (b) can show at most, without a GPU: positions computed, stock's over each other way's.

    python -m benchmarks.gpu.attainable [--lengths DIR]

A GPU that is busy takes time in proportion to positions, but for attention, which favours narrow rows further.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np

from benchmarks.gpu.scale import FULL, Scale
from benchmarks.gpu.speed import TARGETS, lengths_of
from benchmarks.record import parser_of
from composer_tokacc.planning import CutOptions, cut_rows

BATCHES = 40


def positions(lengths: np.ndarray, microbatch: int) -> dict[str, int]:
    """Positions that each way computes of one device batch, for the memory of `microbatch` rows of its width."""
    width = int(lengths.max())
    groups = cut_rows(lengths.tolist(), CutOptions(max_tokens=microbatch * width), max_width=width)
    chunks = [lengths[start : start + microbatch] for start in range(0, len(lengths), microbatch)]
    return {
        'stock': width * len(lengths),
        'hugging_face': sum(len(chunk) * int(chunk.max()) for chunk in chunks),
        'ours': sum(len(group) * int(lengths[group].max()) for group in groups),
        'none': int(lengths.sum()),
    }


def ratios(variation: float | None, scale: Scale) -> dict[str, float]:
    drawn = np.random.default_rng(0).choice(lengths_of(variation, scale), (BATCHES, scale.device_batch))
    found = [positions(row, scale.microbatch) for row in drawn]
    return {way: statistics.median(one['stock'] / one[way] for one in found) for way in found[0]}


def main() -> None:
    scale = replace(FULL, lengths=parser_of(__doc__, results=None, lengths=True).parse_args().lengths)
    for variation in (*scale.variations, None):
        found = ratios(variation, scale)
        name = 'tables' if variation is None else f'variation {variation}'
        target = f', to beat {TARGETS[variation]}' if variation in TARGETS else ''
        print(
            f'{name}: padded per microbatch {found["hugging_face"]:.2f}, token_data_spec {found["ours"]:.2f}, '
            f'no padding at all {found["none"]:.2f}{target}'
        )


if __name__ == '__main__':
    main()
