# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which microbatches to calibrate on: four to six shapes that tell the terms apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_tokacc.layout import BatchLayout
from composer_tokacc.memory.shapes import batch_of_width

__all__ = ['probe_batches']

Sample = Mapping[str, Any]


def probe_batches(layout: BatchLayout, samples: Sequence[Sample], width: int) -> list[dict[str, Any]]:
    """Batches of real samples, widened with padding; the first is small and has an image where any sample has one.

    Rows, width and images vary independently: tokens, ``rows x width^2`` and image tokens are then no multiples of each
    other. Every probe of several rows has padding, as real microbatches have.

    Args:
        layout: Of the model.
        samples: Samples as the processor returns them, with and without images as the dataset has them, and with
            images of different sizes where they differ.
        width: Width of the widest probe; raised to the longest sample in use.

    Returns:
        Four batches for a text run, six where there are images.
    """
    if not samples:
        raise ValueError('`samples` must hold at least one sample, got: none.')
    images = [sum(layout.images_per_row(sample)) for sample in samples]
    plain = [sample for sample, count in zip(samples, images, strict=True) if count == 0]
    seeing = sorted(
        (sample for sample, count in zip(samples, images, strict=True) if count), key=lambda sample: _length(sample)
    )
    text = min(plain, key=_length) if plain else None
    if not seeing:
        assert text is not None, 'samples without images are text'
        wide = max(width, 4 * _length(text))
        sizes = ((2, wide // 4), (2, wide), (4, wide // 2), (3, wide // 4))
        return [batch_of_width(layout, [text] * rows, columns) for rows, columns in sizes]
    small, large = seeing[0], seeing[-1]
    wide = max(width, 2 * _length(small), _length(large) + 1)
    batches = [
        batch_of_width(layout, [small] * 2, max(wide // 2, _length(small))),
        batch_of_width(layout, [small] * 4, wide // 2),
        batch_of_width(layout, [small] * 2, wide),
        batch_of_width(layout, [large] * 2, wide),
        batch_of_width(layout, [large] * 3, max(wide * 3 // 4, _length(large))),
    ]
    if text is not None:
        batches.append(batch_of_width(layout, [text] * 2, max(wide // 2, _length(text))))
    return batches


def _length(sample: Sample) -> int:
    return sample['input_ids'].shape[1]
