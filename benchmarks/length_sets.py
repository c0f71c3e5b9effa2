# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Length sets that the planning benchmark runs on: real tables where they are at hand, seeded synthetic ones if not."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = 'COMPOSER_TOKACC_LENGTHS'
TOKENS_PER_TILE = 256
# Share of image samples, and mean and deviation of text tokens, roughly as in the real tables.
SYNTHETIC = {
    'ai2d': (12_000, (0.47, 0.30, 0.05, 0.18), 54, 13),
    'chartqa': (18_000, (0.03, 0.06, 0.01, 0.90), 89, 64),
    'docvqa': (10_000, (0.01, 0.18, 0.01, 0.80), 282, 196),
}


@dataclass(frozen=True)
class LengthSet:
    """Lengths of many samples, with the image tokens among them."""

    name: str
    lengths: np.ndarray
    image_tokens: np.ndarray

    @property
    def variation(self) -> float:
        return float(self.lengths.std() / self.lengths.mean())

    def draw(self, num_samples: int, seed: int) -> LengthSet:
        """Samples in random order, without repetition where there are enough."""
        rng = np.random.default_rng(seed)
        chosen = rng.choice(len(self.lengths), num_samples, replace=num_samples > len(self.lengths))
        return self.take(chosen)

    def take(self, indices: np.ndarray) -> LengthSet:
        return LengthSet(self.name, self.lengths[indices], self.image_tokens[indices])

    def global_batches(self, size: int) -> list[LengthSet]:
        return [self.take(np.arange(start, start + size)) for start in range(0, len(self.lengths) - size + 1, size)]


def read_tables(folder: Path | None = None) -> tuple[LengthSet, str]:
    """The tables (`tokens,image_tiles` as .csv.gz) of a folder in one, or synthetic ones, and a line on which.

    Without a folder it is that of the variable COMPOSER_TOKACC_LENGTHS.
    """
    if folder is None and os.environ.get(FOLDER):
        folder = Path(os.environ[FOLDER])
    files = sorted(folder.glob('*.csv.gz')) if folder is not None else []
    if not files:
        where = f'no *.csv.gz in {folder.name}/' if folder is not None else 'no folder given'
        return _synthetic(), f'SYNTHETIC tables ({where}): figures are not those of real data'
    parts = []
    for file in files:
        with gzip.open(file, 'rt') as lines:
            parts.append(np.loadtxt(lines, delimiter=',', skiprows=1, dtype=np.int64, ndmin=2))
    table = np.concatenate(parts)
    names = ', '.join(file.name.removesuffix('.csv.gz') for file in files)
    return LengthSet('tables mixed', table[:, 0], table[:, 1] * TOKENS_PER_TILE), f'real tables: {names}'


def _synthetic() -> LengthSet:
    rng = np.random.default_rng(0)
    lengths, images = [], []
    for count, shares, mean, deviation in SYNTHETIC.values():
        tiles = rng.choice([1, 3, 4, 5], size=count, p=shares)
        spread = np.sqrt(np.log(1 + (deviation / mean) ** 2))
        text = np.clip(rng.lognormal(np.log(mean) - spread**2 / 2, spread, count), 32, 1300).astype(np.int64)
        lengths.append(text + tiles * TOKENS_PER_TILE)
        images.append(tiles * TOKENS_PER_TILE)
    return LengthSet('synthetic tables', np.concatenate(lengths), np.concatenate(images))


def half_text(tables: LengthSet) -> LengthSet:
    """Half the samples from the tables, half text-only ones (lognormal, mean 400, variation 0.6)."""
    count = len(tables.lengths)
    text = lognormal(0.6, mean=400, num_samples=count).lengths
    lengths = np.concatenate([tables.lengths, text])
    images = np.concatenate([tables.image_tokens, np.zeros(count, dtype=np.int64)])
    return LengthSet('half text, half image', lengths, images)


def lognormal(variation: float, *, mean: float = 500, longest: int = 4096, num_samples: int = 40_000) -> LengthSet:
    """Lognormal lengths from 8 to `longest`, with this coefficient of variation before they are clipped."""
    spread = np.sqrt(np.log(1 + variation**2))
    drawn = np.random.default_rng(1).lognormal(np.log(mean) - spread**2 / 2, spread, num_samples)
    lengths = np.clip(drawn, 8, longest).astype(np.int64)
    return LengthSet(f'lognormal {variation}', lengths, np.zeros(num_samples, dtype=np.int64))
