# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The sizes that the memory of a microbatch depends on, and probe microbatches in which these sizes differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from composer_tokacc.batch import IGNORE_INDEX, Batch
from composer_tokacc.labelled import is_worth_selecting
from composer_tokacc.layout import BatchLayout
from composer_tokacc.layout.tensors import GRID_KEYS, cat_padded
from composer_tokacc.refusals import InvalidInputError


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The sizes of a microbatch that its memory depends on."""

    rows: float
    """Number of rows. Not always an integer: an upper bound may have a part of a row."""
    width: int
    """Padded width in tokens, image placeholders included."""
    image_tokens: int = 0
    """Placeholders of images, videos and audios, in all rows."""
    image_area: float = 0.0
    """The squared number of image tokens of an image or video frame, summed over all of them. Eager attention in the
    vision encoder holds that many entries."""
    pixel_bytes: int = 0
    """Bytes of pixels and audio features, as the processor returns them."""
    is_padded: bool = True
    """Whether some position is padding. If none is, SDPA needs no mask."""
    labels: int | None = None
    """If the run computes logits only at labels: the number of positions with logits, which is a bit higher than the
    number of labels, see ``logit_positions``. None: logits at all positions."""

    @property
    def tokens(self) -> float:
        """Number of positions, padding included."""
        return self.rows * self.width

    @property
    def logits(self) -> float:
        """Number of positions at which logits are computed."""
        return self.tokens if self.labels is None else self.labels

    @property
    def area(self) -> float:
        """Entries of an attention mask: ``rows x width^2``."""
        return self.rows * self.width * self.width

    @property
    def input_bytes(self) -> float:
        """Bytes of the ids, the mask and the labels. Each of the three has 8 bytes for a position."""
        return 3 * 8 * self.tokens

    @classmethod
    def from_batch(cls, batch: Batch, layout: BatchLayout) -> BatchShape:
        """Returns the shape of a batch. Its logits count at all positions."""
        rows, width = batch['input_ids'].shape
        image_tokens = 0
        if layout.config is not None:
            image_tokens = sum(layout.image_tokens_per_row(batch))
        mask = batch.get('attention_mask')  # a batch without one has no padding
        pixel_bytes = 0
        for value in batch.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                pixel_bytes += value.nbytes
        return cls(
            rows=rows,
            width=width,
            image_tokens=image_tokens,
            image_area=_image_area(batch, layout, image_tokens),
            pixel_bytes=pixel_bytes,
            is_padded=mask is not None and not bool((mask != 0).all()),
        )


def _image_area(
    batch: Batch,
    layout: BatchLayout,
    image_tokens: int,
) -> float:
    """Returns :attr:`BatchShape.image_area`. Exact if the batch has the grid of each image, as for Qwen-VL.

    For example an image of 4 x 6 image tokens and one of 2 x 2 have the area 24^2 + 4^2. Without grids both count as
    14 tokens.
    """
    grids = [batch[key] for key in GRID_KEYS if key in batch]
    if not grids:
        # All images count as equally large: n images of (tokens / n) tokens.
        num_images = max(sum(layout.media_per_row(batch)), 1)
        return image_tokens**2 / num_images
    num_frames, height, width = torch.cat(grids).unbind(dim=1)  # height and width in patches
    vision_config = getattr(layout.config, 'vision_config', None)
    # One image token stands for a square of patches. Its side is 2 in Qwen-VL.
    merge_size = getattr(vision_config, 'spatial_merge_size', 2)
    # Each frame of a video attends only to itself. An image is one frame.
    tokens_per_frame = height * width // merge_size**2
    return float((num_frames * tokens_per_frame**2).sum())


def logit_positions(num_labels: int, num_positions: int) -> int:
    """Returns the number of positions of a microbatch with logits, if the run computes them only at labels.

    :class:`.LabelledPositions` adds a position if the model shifts labels. Here it is added for any model, so the
    number may be one too large. If nearly all positions have a label, the run computes all logits.
    """
    if is_worth_selecting(num_labels, num_positions):
        return num_labels + 1
    return num_positions


def batch_of_width(
    layout: BatchLayout,
    samples: Sequence[Batch],
    width: int,
) -> Batch:
    """Returns a batch with a row for each sample, padded to exactly this width.

    If it has several rows, at least one position is padding.
    """
    batch = layout.concat(samples)
    widened = dict(batch)
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            entry = layout.entry_of(batch, key)
            if entry.seq_dims:
                widened[key] = cat_padded([value], entry, width, 'right')
    mask = widened['attention_mask']
    if len(mask) > 1 and bool((mask != 0).all()):
        # No row needed padding. One position is masked, because real batches of several rows have padding.
        mask = mask.clone()
        mask[-1, -1] = 0
        widened['attention_mask'] = mask
    return widened


class _RepeatedSample(NamedTuple):
    """A probe batch: rows that all hold the same sample."""

    sample: Batch
    num_rows: int
    width: int


def probe_batches(
    layout: BatchLayout,
    samples: Sequence[Batch],
    width: int,
) -> list[Batch]:
    """Returns batches to which a model of memory or operations can be fitted. Raises ValueError without samples.

    Each batch repeats one real sample, and is widened with padding. There are four batches for text, and five or six
    for images. The first batch is small, and has an image if any sample has one.

    Args:
        layout: Layout of the model's batches.
        samples: Samples as the processor returns them. Some should have images and some not, if the dataset has both,
            and the images should have different sizes.
        width: Width of the widest batch in tokens. It grows if the samples do not fit.
    """
    if not samples:
        raise InvalidInputError('`samples` must hold at least one sample, got: none.')
    with_images: list[Batch] = []
    without_images: list[Batch] = []
    for sample in sorted(samples, key=_length):
        if any(layout.media_per_row(sample)):
            with_images.append(sample)
        else:
            without_images.append(sample)
    if with_images:
        probes = _probes_of_images(with_images, without_images, width)
    else:
        probes = _probes_of_text(without_images[0], width)
    batches = []
    for probe in probes:
        # A sample may be longer than its part of the greatest width.
        batch_width = max(probe.width, _length(probe.sample))
        batches.append(batch_of_width(layout, [probe.sample] * probe.num_rows, batch_width))
    return batches


# Sample, number of rows and width of the probes vary independently. Otherwise tokens, rows x width^2 and image tokens
# would grow in proportion, and a fit could not tell them apart. At the greatest width every sample has padding.


def _probes_of_images(
    with_images: Sequence[Batch],
    without_images: Sequence[Batch],
    width: int,
) -> list[_RepeatedSample]:
    """Returns the probes of a dataset with images. Both lists of samples begin with the shortest."""
    shortest = with_images[0]
    longest = with_images[-1]
    # So that the shortest sample fits into half of it, and the longest has padding.
    widest = max(width, 2 * _length(shortest), _length(longest) + 1)
    probes = [
        _RepeatedSample(shortest, num_rows=2, width=widest // 2),
        _RepeatedSample(shortest, num_rows=4, width=widest // 2),
        _RepeatedSample(shortest, num_rows=2, width=widest),
        _RepeatedSample(longest, num_rows=2, width=widest),
        _RepeatedSample(longest, num_rows=3, width=widest * 3 // 4),
    ]
    if without_images:
        probes.append(_RepeatedSample(without_images[0], num_rows=2, width=widest // 2))
    return probes


def _probes_of_text(shortest: Batch, width: int) -> list[_RepeatedSample]:
    """Returns the probes of a dataset without images. All of them repeat its shortest sample."""
    widest = max(width, 4 * _length(shortest))  # so that the sample fits into a quarter of it
    return [
        _RepeatedSample(shortest, num_rows=2, width=widest // 4),
        _RepeatedSample(shortest, num_rows=2, width=widest),
        _RepeatedSample(shortest, num_rows=4, width=widest // 2),
        _RepeatedSample(shortest, num_rows=3, width=widest // 4),
    ]


def with_spaced_labels(batch: Batch, spacing: int) -> Batch:
    """Returns the batch with a label at every `spacing`-th position of its flattened rows.

    All labels are 0, because their values do not change the memory.
    """
    labels = torch.full_like(batch['labels'], IGNORE_INDEX)
    labels.view(-1)[::spacing] = 0
    return {**batch, 'labels': labels}


def _length(sample: Batch) -> int:
    """Returns the number of tokens of a sample, which is a batch of one row."""
    return sample['input_ids'].shape[1]
