# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a dataset is made of, as far as microbatches are concerned."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from composer_tokacc.planning.rows import checked_table

if TYPE_CHECKING:
    from composer_tokacc.data import LengthTable

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True, kw_only=True)
class SampleSizes:
    """One entry a sample: a scanned length table, or plain lengths, of which less is known."""

    tokens: np.ndarray
    """Length in tokens, image tokens included, int64 (n,)."""
    image_tokens: np.ndarray
    """Tokens that stand for images, int64 (n,)."""
    loss_tokens: np.ndarray | None = None
    """Positions that carry loss, (n,); None where unknown."""
    vision_patches: np.ndarray | None = None
    """Patches that the vision encoder computes, (n,); None where unknown."""
    sample_ids: Sequence[str] | None = None
    """Names for messages; indices where None."""

    @classmethod
    def from_lengths(
        cls, lengths: LengthTable | Sequence[int] | np.ndarray, sample_ids: Sequence[str] | None = None
    ) -> SampleSizes:
        """Returns the sizes of a scanned table, or of plain lengths."""
        if not len(lengths):
            raise ValueError('`lengths` must hold at least one sample, got: none.')
        if isinstance(lengths, Sequence | np.ndarray):
            tokens = checked_table('lengths', lengths, len(lengths), least=-sys.maxsize)
            sizes = cls(tokens=tokens, image_tokens=np.zeros_like(tokens), sample_ids=sample_ids)
        else:
            sizes = cls(
                tokens=lengths.lengths.astype(np.int64),
                image_tokens=lengths.image_tokens.astype(np.int64),
                # All zero: nobody has counted them.
                loss_tokens=lengths.loss_tokens if lengths.loss_tokens.any() else None,
                vision_patches=lengths.vision_patches if lengths.vision_patches.any() else None,
                sample_ids=sample_ids,
            )
        at = int(np.argmin(sizes.tokens))
        if sizes.tokens[at] < 1:
            raise ValueError(
                f'`lengths` must be at least 1, got: {sizes.tokens[at]} ({sizes._name(at)}). Leave it out.'
            )
        return sizes

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def largest_share_of_labels(self) -> float:
        """Loss-generating tokens over all tokens of the sample where that is largest; 1 if they are not known."""
        return 1.0 if self.loss_tokens is None else float((self.loss_tokens / self.tokens).max())

    def names(self, chosen: np.ndarray) -> list[str]:
        """Returns ids and lengths of the `chosen` samples, bool (n,), the longest first."""
        indices = np.flatnonzero(chosen)
        order = indices[np.argsort(-self.tokens[indices], kind='stable')]
        return [f'{self._name(index)}: {self.tokens[index]} tokens' for index in order.tolist()]

    def _name(self, index: int) -> str:
        return f'sample {index}' if self.sample_ids is None else f'"{self.sample_ids[index]}"'

    def profile(self) -> DatasetProfile:
        """Returns figures of the dataset."""
        tokens, total, image_tokens = self.tokens, int(self.tokens.sum()), int(self.image_tokens.sum())
        patches = np.zeros(0) if self.vision_patches is None else self.vision_patches[self.vision_patches > 0]
        return DatasetProfile(
            num_samples=len(self),
            mean=float(tokens.mean()),
            longest=int(tokens.max()),
            shortest=int(tokens.min()),
            quantiles={f'{quantile * 100:g}': int(np.quantile(tokens, quantile)) for quantile in QUANTILES},
            variation=float(tokens.std() / tokens.mean()),
            loss_share=None if self.loss_tokens is None else float(self.loss_tokens.sum() / total),
            image_share=image_tokens / total,
            text_only_share=float((self.image_tokens == 0).mean()),
            patches_per_sample=float(patches.mean()) if len(patches) else None,
            patches_per_image_token=float(patches.sum() / image_tokens) if len(patches) and image_tokens else None,
        )


@dataclass(frozen=True, kw_only=True)
class DatasetProfile:
    """Figures of a length table; shares are of 1."""

    num_samples: int
    mean: float
    longest: int
    shortest: int
    quantiles: dict[str, int]
    """By percent: ``{'5': 31, ...}``."""
    variation: float
    """Standard deviation of the lengths over their mean."""
    loss_share: float | None
    """Loss-generating tokens over all tokens."""
    image_share: float
    """Image tokens over all tokens."""
    text_only_share: float
    """Samples without an image."""
    patches_per_sample: float | None
    """Patches that the vision encoder computes for a sample with any, on average; None without images, or unknown."""
    patches_per_image_token: float | None
    """Of them, for each image token: 4 where the model merges squares of 2 x 2, large behind a resampler."""
