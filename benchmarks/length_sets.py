# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Sets of lengths: from real tables if there are any, else synthetic ones with a fixed seed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# The environment variable that names the folder of the tables.
FOLDER = 'COMPOSER_TOKACC_LENGTHS'
# A processor cuts an image into tiles, and each tile becomes this many image tokens.
TOKENS_PER_TILE = 256


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
        chosen = rng.choice(len(self.lengths), num_samples, replace=num_samples > len(self.lengths))
        return self.take(chosen)

    def take(self, indices: np.ndarray) -> LengthSet:
        return LengthSet(self.name, self.lengths[indices], self.image_tokens[indices])

    def global_batches(self, size: int) -> list[LengthSet]:
        """Returns the samples in parts of this size. Leaves out samples at the end that do not fill a part."""
        indices = np.arange(len(self.lengths) // size * size)
        return [self.take(part) for part in indices.reshape(-1, size)]


def read_tables(folder: Path | None = None) -> tuple[LengthSet, str]:
    """Returns the lengths of all tables in a folder as one set, and a line that names their source.

    A table is a file `NAME.csv.gz` with the columns `tokens,image_tiles`. The default folder is the value of the
    environment variable COMPOSER_TOKACC_LENGTHS. Without any folder, the lengths are synthetic.
    """
    if folder is None and os.environ.get(FOLDER):
        folder = Path(os.environ[FOLDER])
    if folder is None:
        return _synthetic(), f'SYNTHETIC tables ({FOLDER} is not set): figures are not those of real data'
    files = sorted(folder.glob('*.csv.gz'))
    if not files:
        raise FileNotFoundError(f'{folder} has no tables *.csv.gz.')
    tables = []
    for file in files:
        tables.append(np.loadtxt(file, delimiter=',', skiprows=1, dtype=np.int64, ndmin=2))
    tokens, image_tiles = np.concatenate(tables).T
    length_set = LengthSet('tables mixed', tokens, image_tiles * TOKENS_PER_TILE)
    names = ', '.join(file.name.removesuffix('.csv.gz') for file in files)
    return length_set, f'real tables: {names}'


def _synthetic() -> LengthSet:
    """Returns samples with as many text tokens and tiles as those of AI2D, ChartQA and DocVQA together."""
    rng = np.random.default_rng(0)
    num_samples = 40_000
    tiles = rng.choice((1, 3, 4, 5), num_samples, p=(0.16, 0.16, 0.02, 0.66))
    drawn = _draw_lognormal(rng, 127, 1.1, num_samples)
    text_tokens = np.clip(drawn, 32, 1300).astype(np.int64)
    image_tokens = tiles * TOKENS_PER_TILE
    return LengthSet('synthetic tables', text_tokens + image_tokens, image_tokens)


def lognormal(variation: float, *, mean: float = 500, longest: int = 4096) -> LengthSet:
    """Returns lognormal lengths, clipped to 8 and `longest`. Clipping makes their coefficient of variation smaller."""
    num_samples = 40_000
    drawn = _draw_lognormal(np.random.default_rng(1), mean, variation, num_samples)
    lengths = np.clip(drawn, 8, longest).astype(np.int64)
    image_tokens = np.zeros(num_samples, dtype=np.int64)
    return LengthSet(f'lognormal {variation}', lengths, image_tokens)


def _draw_lognormal(rng: np.random.Generator, mean: float, variation: float, count: int) -> np.ndarray:
    """Draws lognormal numbers with this mean and this coefficient of variation."""
    # The standard deviation of their logarithms.
    spread = np.sqrt(np.log(1 + variation**2))
    return rng.lognormal(np.log(mean) - spread**2 / 2, spread, count)
