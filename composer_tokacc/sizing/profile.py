# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The sizes of all samples of a dataset, and the figures that the report shows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from composer_tokacc.planning import CutOptions, Rows, checked_table

if TYPE_CHECKING:
    from composer_tokacc.data import LengthTable

PERCENTS = (5, 25, 50, 75, 95, 99)
"""Percentiles of the sample lengths in a :class:`DatasetProfile`."""


@dataclass(frozen=True, kw_only=True)
class SampleSizes:
    """Sizes of all samples, by index. They come from a length table, or from a plain list of lengths."""

    tokens: np.ndarray
    """Length in tokens, image tokens included, int64 (samples,)."""
    image_tokens: np.ndarray
    """Tokens that stand for images, videos and audio, int64 (samples,)."""
    loss_tokens: np.ndarray | None = None
    """Positions that carry loss, int64 (samples,). None: unknown."""
    vision_patches: np.ndarray | None = None
    """Patches that the vision encoder computes, int64 (samples,). None: unknown."""
    sample_ids: Sequence[str] | None = None
    """Names of the samples for messages. None: messages give the index."""

    @classmethod
    def from_lengths(
        cls, lengths: LengthTable | Sequence[int] | np.ndarray, sample_ids: Sequence[str] | None = None
    ) -> SampleSizes:
        """Returns the sizes of a length table, or of plain lengths. Raises ValueError if a length is below 1."""
        if hasattr(lengths, '__array__'):  # a tensor, or a column of a pandas table
            lengths = np.asarray(lengths)
        if isinstance(lengths, Sequence | np.ndarray):
            tokens = checked_table('lengths', lengths, least=1, sample_ids=sample_ids)
            return cls(tokens=tokens, image_tokens=np.zeros_like(tokens), sample_ids=sample_ids)
        length_table = lengths
        return cls(
            tokens=checked_table('lengths', length_table.lengths, least=1, sample_ids=sample_ids),
            image_tokens=length_table.image_tokens.astype(np.int64),
            loss_tokens=counted_sizes(length_table.loss_tokens),
            vision_patches=counted_sizes(length_table.vision_patches),
            sample_ids=sample_ids,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def largest_share_of_labels(self) -> float:
        """The largest share of a sample's tokens that may have a label, under any loss rule. It is 1 if unknown.

        ``loss_tokens`` are counted for a model that shifts labels, so the first token of a sample never counts. Under
        other rules it may count, so one is added for each sample. For example, samples of 10 and 20 tokens, with 4 and
        5 loss tokens, give 5/10 and 6/20, so the result is 0.5.
        """
        if self.loss_tokens is None:
            return 1.0
        shares = (self.loss_tokens + 1) / self.tokens
        return min(float(shares.max()), 1.0)

    def loss_tokens_of(self, samples: np.ndarray) -> np.ndarray | None:
        """Returns the loss tokens of the samples with these indices, int64 (samples,); None if unknown."""
        return None if self.loss_tokens is None else self.loss_tokens[samples]

    def select(self, samples: np.ndarray) -> SampleSizes:
        """Returns the sizes of some samples, without their names.

        Args:
            samples: Indices of the samples, int64 (n,). The result has n samples in this order.
        """
        vision_patches = self.vision_patches
        if vision_patches is not None:
            vision_patches = vision_patches[samples]
        return SampleSizes(
            tokens=self.tokens[samples],
            image_tokens=self.image_tokens[samples],
            loss_tokens=self.loss_tokens_of(samples),
            vision_patches=vision_patches,
        )

    def rows(self, options: CutOptions) -> Rows:
        """Returns all samples in the form that the planner takes. Row i is sample i; each table is (samples,).

        Raises ValueError if there is no sample, or if a size has a cap but is unknown.
        """
        return Rows(
            self.tokens,
            options,
            image_tokens=self.image_tokens,
            loss_tokens=self.loss_tokens,
            vision_cost=options.cost.vision(self.image_tokens, self.vision_patches),
        )

    def names(self, chosen: np.ndarray) -> list[str]:
        """Returns a text such as ``"img-7": 3021 tokens`` for each chosen sample, the longest first.

        Args:
            chosen: Which samples, bool (samples,).
        """
        indices = np.flatnonzero(chosen)
        longest_first = indices[np.argsort(-self.tokens[indices], kind='stable')]
        names = []
        for index in longest_first.tolist():
            name = f'sample {index}'
            if self.sample_ids is not None:
                name = f'"{self.sample_ids[index]}"'
            names.append(f'{name}: {self.tokens[index]} tokens')
        return names

    def profile(self) -> DatasetProfile:
        """Returns the figures of the dataset for the report."""
        quantiles = {}
        for percent in PERCENTS:
            quantiles[str(percent)] = int(np.percentile(self.tokens, percent))
        return DatasetProfile(
            num_samples=len(self),
            mean=float(self.tokens.mean()),
            longest=int(self.tokens.max()),
            quantiles=quantiles,
            text_only_share=float((self.image_tokens == 0).mean()),
        )


def counted_sizes(column: np.ndarray) -> np.ndarray | None:
    """Returns a column of a table, int64 (samples,). None if it has only zeros, because then it was not counted."""
    return column.astype(np.int64) if column.any() else None


@dataclass(frozen=True, kw_only=True)
class DatasetProfile:
    """Figures of a dataset, for the report. Lengths are in tokens, shares are fractions of 1."""

    num_samples: int
    mean: float
    """Mean length."""
    longest: int
    quantiles: dict[str, int]
    """Quantiles of the lengths, by percent: ``{'5': 31, ...}``."""
    text_only_share: float
    """Share of the samples without an image, a video or an audio."""
