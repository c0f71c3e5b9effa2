# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the memory of a microbatch depends on, and the microbatches that tell its terms apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.layout import BatchLayout
from composer_tokacc.layout.tensors import cat_padded

Sample = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The sizes of a microbatch that its memory follows."""

    rows: int
    width: int
    """Padded width in tokens, image placeholders included."""
    image_tokens: int = 0
    image_area: float = 0.0
    """Sum over the images of squared image tokens: eager attention inside the vision encoder."""
    pixel_bytes: int = 0
    """Bytes of pixels and audio features, as the processor returns them."""
    is_padded: bool = True
    """Whether some position is padding. Without any, SDPA needs no mask."""
    labels: int | None = None
    """Positions of which logits are computed, if that is only where a label is; None: logits of all positions."""

    @property
    def tokens(self) -> int:
        """Positions computed, padding included."""
        return self.rows * self.width

    @property
    def logits(self) -> int:
        """Positions of which logits are computed."""
        return self.tokens if self.labels is None else self.labels

    @property
    def area(self) -> int:
        """Entries of an attention mask: ``rows x width^2``."""
        return self.rows * self.width * self.width

    @property
    def input_bytes(self) -> int:
        """Bytes of ids, mask and labels, 8 each a position."""
        return 3 * 8 * self.tokens

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any], layout: BatchLayout) -> BatchShape:
        """Returns the shape of a batch."""
        rows, width = batch['input_ids'].shape
        image_tokens = 0 if layout.config is None else sum(layout.image_tokens_per_row(batch))
        grids = [batch[key] for key in ('image_grid_thw', 'video_grid_thw') if key in batch]
        if grids:  # each frame attends to itself alone
            frames, height, breadth = torch.cat(grids).unbind(dim=1)
            merged = getattr(getattr(layout.config, 'vision_config', None), 'spatial_merge_size', 2)  # of Qwen-VL
            sizes = (height * breadth // merged**2).repeat_interleave(frames).double()
        else:
            images = max(sum(layout.media_per_row(batch)), 1)
            sizes = torch.full((images,), image_tokens / images, dtype=torch.float64)
        mask = batch.get('attention_mask')  # packed rows have none
        media = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
        return cls(
            rows=rows,
            width=width,
            image_tokens=image_tokens,
            image_area=float(sizes.square().sum()),
            pixel_bytes=sum(value.nbytes for value in media),
            is_padded=mask is not None and not bool((mask != 0).all()),
        )


def batch_of_width(layout: BatchLayout, samples: Sequence[Sample], width: int) -> dict[str, Any]:
    """Returns a batch of the samples, one row each, at exactly this width, the added positions masked."""
    batch = dict(layout.concat(samples))
    if width < layout.width(batch):
        raise ValueError(f'`width` must be at least the longest sample, got: {width} < {layout.width(batch)}.')
    entries = {key: layout.entry_of(batch, key) for key, value in batch.items() if isinstance(value, torch.Tensor)}
    for key, entry in entries.items():
        batch[key] = cat_padded([batch[key]], entry, width, 'right') if entry.seq_dims else batch[key]
    if bool((batch['attention_mask'] != 0).all()) and batch['input_ids'].shape[0] > 1:
        # Samples of equal length: the last position of the last row stands for the padding that real batches have.
        batch['attention_mask'] = batch['attention_mask'].clone()
        batch['attention_mask'][-1, -1] = 0
    return batch


def probe_batches(layout: BatchLayout, samples: Sequence[Sample], width: int) -> list[dict[str, Any]]:
    """Returns batches of real samples, widened with padding: four of text, six where there are images.

    Samples are as the processor returns them, with and without images as the dataset has them, and with images of
    different sizes where they differ. The first batch is small and has an image where any sample has one.
    """
    # Rows, width and images vary independently: tokens, rows x width^2 and image tokens are then no multiples of each
    # other. Those of several rows have padding, as real microbatches have.
    if not samples:
        raise ValueError('`samples` must hold at least one sample, got: none.')
    by_length = sorted(samples, key=_length)
    with_images = [sample for sample in by_length if any(layout.media_per_row(sample))]
    text = [sample for sample in by_length if not any(layout.media_per_row(sample))]
    if not with_images:
        small = text[0]
        wide = max(width, 4 * _length(small))
        sizes = [(small, 2, wide // 4), (small, 2, wide), (small, 4, wide // 2), (small, 3, wide // 4)]
    else:
        small, large = with_images[0], with_images[-1]
        wide = max(width, 2 * _length(small), _length(large) + 1)
        sizes = [(small, 2, wide // 2), (small, 4, wide // 2), (small, 2, wide)]
        sizes += [(large, 2, wide), (large, 3, wide * 3 // 4)]
        sizes += [(sample, 2, wide // 2) for sample in text[:1]]
    return [batch_of_width(layout, [sample] * rows, max(columns, _length(sample))) for sample, rows, columns in sizes]


def with_share_of_labels(batch: Mapping[str, Any], one_in: int) -> dict[str, Any]:
    """Returns a batch in which one in so many positions has a label; memory asks for their number, not their place."""
    labels = batch['labels'].flatten().clone()
    labels[:] = IGNORE_INDEX
    labels[::one_in] = 0
    return {**batch, 'labels': labels.view_as(batch['labels'])}


def _length(sample: Sample) -> int:
    return sample['input_ids'].shape[1]
