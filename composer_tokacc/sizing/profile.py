# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a dataset is made of, as far as microbatches are concerned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from composer_tokacc.data.lengths import LengthTable

__all__ = ['DatasetProfile', 'SampleSizes', 'profile_lengths']

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True)
class SampleSizes:
    """One entry a sample.

    Args:
        tokens: Length in tokens, image tokens included, (n,).
        loss_tokens: Positions that carry loss, (n,); None where unknown.
        image_tokens: Tokens that stand for images, (n,); None where there are none.
        vision_patches: Patches that the vision tower computes, (n,); None where unknown.
        sample_ids: Names for messages; indices where None.

    Raises:
        ValueError: A column is empty, of another length than ``tokens``, or out of range.
    """

    tokens: np.ndarray
    loss_tokens: np.ndarray | None = None
    image_tokens: np.ndarray | None = None
    vision_patches: np.ndarray | None = None
    sample_ids: Sequence[str] | None = None

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens)
        if tokens.ndim != 1 or len(tokens) == 0:
            raise ValueError(
                f'`lengths` must hold at least one sample, got: shape {tokens.shape}. Is the dataset empty?'
            )
        for name, lowest in (('tokens', 1), ('loss_tokens', 0), ('image_tokens', 0), ('vision_patches', 0)):
            column = getattr(self, name)
            if column is None:
                continue
            column = np.asarray(column)
            if column.shape != tokens.shape:
                raise ValueError(f'`{name}` must have one entry per sample, got: {column.shape} for {len(tokens)}.')
            if column.dtype.kind not in 'iu':
                raise ValueError(f'`{name}` must be integers, got: {column.dtype}.')
            if int(column.min()) < lowest:
                at = int(np.argmin(column))
                raise ValueError(
                    f'`{name}` must be at least {lowest}, got: {column[at]} (sample {self.name_of(at)}). Leave it out.'
                )
            object.__setattr__(self, name, column.astype(np.int64))
        if self.image_tokens is not None and bool((self.image_tokens > self.tokens).any()):
            at = int(np.argmax(self.image_tokens - self.tokens))
            raise ValueError(
                f'`image_tokens` must be part of `tokens`, got: {self.image_tokens[at]} of {self.tokens[at]} '
                f'(sample {self.name_of(at)}).'
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def vision(self) -> np.ndarray:
        """Image tokens, zeros where there are none."""
        return np.zeros_like(self.tokens) if self.image_tokens is None else self.image_tokens

    def name_of(self, index: int) -> str:
        """Id of a sample, quoted, or its index."""
        return f'"{self.sample_ids[index]}"' if self.sample_ids is not None else str(index)

    def names(self, chosen: np.ndarray) -> list[str]:
        """Ids and lengths of some samples, the longest first.

        Args:
            chosen: Which, (n,) bools.
        """
        indices = np.flatnonzero(chosen)
        order = indices[np.argsort(-self.tokens[indices], kind='stable')]
        return [f'{self.name_of(index)}: {self.tokens[index]} tokens' for index in order.tolist()]

    @classmethod
    def of(
        cls, lengths: LengthTable | Sequence[int] | np.ndarray, sample_ids: Sequence[str] | None = None
    ) -> SampleSizes:
        """Checked sizes of a scanned table, or of plain lengths."""
        if isinstance(lengths, Sequence | np.ndarray):
            return cls(np.asarray(lengths), sample_ids=sample_ids)
        columns = (lengths.lengths, lengths.loss_tokens, lengths.image_tokens, lengths.vision_patches)
        return cls(*columns, sample_ids)


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
    """Patches that the vision tower computes for a sample with any, on average; None without images, or unknown."""
    patches_per_image_token: float | None
    """Of them, for each image token: 4 where the model merges squares of 2 x 2, large behind a resampler."""


def profile_lengths(table: SampleSizes) -> DatasetProfile:
    """Figures of a length table."""
    tokens, total = table.tokens, int(table.tokens.sum())
    image_tokens = int(table.vision.sum())
    patches = np.zeros(0) if table.vision_patches is None else table.vision_patches[table.vision_patches > 0]
    return DatasetProfile(
        num_samples=len(table),
        mean=float(tokens.mean()),
        longest=int(tokens.max()),
        shortest=int(tokens.min()),
        quantiles={f'{quantile * 100:g}': int(np.quantile(tokens, quantile)) for quantile in QUANTILES},
        variation=float(tokens.std() / tokens.mean()),
        loss_share=None if table.loss_tokens is None else float(table.loss_tokens.sum() / total),
        image_share=image_tokens / total,
        text_only_share=float((table.vision == 0).mean()),
        patches_per_sample=float(patches.mean()) if len(patches) else None,
        patches_per_image_token=float(patches.sum() / image_tokens) if len(patches) and image_tokens else None,
    )
