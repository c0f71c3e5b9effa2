# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Sets of lengths: from real tables if there are any, else synthetic ones with a fixed seed."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = 'COMPOSER_TOKACC_LENGTHS'
# A processor cuts an image into tiles, and each tile becomes as many image tokens.
TOKENS_PER_TILE = 256
# The numbers of tiles that images of synthetic samples have.
TILE_COUNTS = (1, 3, 4, 5)


@dataclass(frozen=True)
class LengthSet:
    """Lengths of many samples, and the number of image tokens in each."""

    name: str
    lengths: np.ndarray
    image_tokens: np.ndarray

    @property
    def variation(self) -> float:
        """The coefficient of variation of the lengths."""
        return float(self.lengths.std() / self.lengths.mean())

    def draw(self, num_samples: int, seed: int) -> LengthSet:
        """Returns samples in random order, without repetition if there are enough of them."""
        rng = np.random.default_rng(seed)
        chosen = rng.choice(
            len(self.lengths),
            num_samples,
            replace=num_samples > len(self.lengths),
        )
        return self.take(chosen)

    def take(self, indices: np.ndarray) -> LengthSet:
        return LengthSet(self.name, self.lengths[indices], self.image_tokens[indices])

    def global_batches(self, size: int) -> list[LengthSet]:
        """Returns the samples in parts of this size. Leaves out samples at the end that do not fill a part."""
        batches = []
        for start in range(0, len(self.lengths) - size + 1, size):
            indices = np.arange(start, start + size)
            batches.append(self.take(indices))
        return batches


def read_tables(folder: Path | None = None) -> tuple[LengthSet, str]:
    """Returns the lengths of all tables in a folder as one set, and a line that names their source.

    Without tables, the lengths are synthetic.

    A table is a file `NAME.csv.gz` with the columns `tokens,image_tiles`. The default folder is the value of the
    environment variable COMPOSER_TOKACC_LENGTHS.
    """
    if folder is None and os.environ.get(FOLDER):
        folder = Path(os.environ[FOLDER])
    files = sorted(folder.glob('*.csv.gz')) if folder is not None else []
    if not files:
        return _synthetic(), f'SYNTHETIC tables (no *.csv.gz in {folder}): figures are not those of real data'
    tables = []
    for file in files:
        with gzip.open(file, 'rt') as lines:
            tables.append(np.loadtxt(lines, delimiter=',', skiprows=1, dtype=np.int64, ndmin=2))
    rows = np.concatenate(tables)
    length_set = LengthSet('tables mixed', lengths=rows[:, 0], image_tokens=rows[:, 1] * TOKENS_PER_TILE)
    names = ', '.join(file.name.removesuffix('.csv.gz') for file in files)
    return length_set, f'real tables: {names}'


@dataclass(frozen=True)
class TableShape:
    """Statistics of a real table. Synthetic lengths are drawn from them."""

    num_samples: int
    shares: tuple[float, float, float, float]
    """The shares of the samples that have each of the TILE_COUNTS."""
    mean: float
    """Mean of the text tokens."""
    deviation: float
    """Standard deviation of the text tokens."""


AI2D = TableShape(12_000, (0.47, 0.30, 0.05, 0.18), 54, 13)
CHARTQA = TableShape(18_000, (0.03, 0.06, 0.01, 0.90), 89, 64)
DOCVQA = TableShape(10_000, (0.01, 0.18, 0.01, 0.80), 282, 196)


def _synthetic() -> LengthSet:
    rng = np.random.default_rng(0)
    lengths = []
    image_tokens = []
    for shape in (AI2D, CHARTQA, DOCVQA):
        tiles = rng.choice(TILE_COUNTS, size=shape.num_samples, p=shape.shares)
        drawn = _draw_lognormal(rng, shape.mean, shape.deviation / shape.mean, shape.num_samples)
        text = np.clip(drawn, 32, 1300).astype(np.int64)
        lengths.append(text + tiles * TOKENS_PER_TILE)
        image_tokens.append(tiles * TOKENS_PER_TILE)
    return LengthSet('synthetic tables', np.concatenate(lengths), np.concatenate(image_tokens))


def lognormal(
    variation: float,
    *,
    mean: float = 500,
    longest: int = 4096,
    num_samples: int = 40_000,
) -> LengthSet:
    """Returns lognormal lengths, clipped to 8 and `longest`. Clipping makes their coefficient of variation smaller."""
    drawn = _draw_lognormal(np.random.default_rng(1), mean, variation, num_samples)
    lengths = np.clip(drawn, 8, longest).astype(np.int64)
    image_tokens = np.zeros(num_samples, dtype=np.int64)
    return LengthSet(f'lognormal {variation}', lengths, image_tokens)


def _draw_lognormal(rng: np.random.Generator, mean: float, variation: float, count: int) -> np.ndarray:
    """Draws numbers with a mean and a coefficient of variation. `spread` is the deviation of their logarithms."""
    spread = np.sqrt(np.log(1 + variation**2))
    return rng.lognormal(np.log(mean) - spread**2 / 2, spread, count)
