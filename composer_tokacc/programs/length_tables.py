# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Lengths of samples that are not at hand: from a CSV file, or drawn from a few figures. For ``size lengths=...``."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from composer_tokacc.data import LengthTable
from composer_tokacc.programs.errors import ConfigError, shorten
from composer_tokacc.programs.host_types import Section
from composer_tokacc.programs.schema import build_dataclass

CSV_COLUMNS = {
    'tokens': 'lengths',
    'image_tokens': 'image_tokens',
    'loss_tokens': 'loss_tokens',
    'vision_patches': 'vision_patches',
}
"""Columns of the file, and the field of :class:`.LengthTable` for each."""
LONGEST_SAMPLE = 2**24
"""Most tokens of a sample, far more than any model takes. With a hundred times as many the simulation fills the
memory."""


@dataclass(kw_only=True)
class LengthDistribution:
    """Lognormal lengths of the text, and a share of samples with images."""

    mean: Annotated[float, Field(ge=1, le=LONGEST_SAMPLE)]
    """Mean text tokens of a sample."""
    variation: Annotated[float, Field(ge=0, lt=100)] = 0.7
    """Their standard deviation divided by their mean."""
    image_tokens: Annotated[int, Field(ge=0, le=LONGEST_SAMPLE)] = 0
    """Tokens of the images of a sample that has images."""
    with_images: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the samples that have images."""
    longest: Annotated[int, Field(ge=1, le=LONGEST_SAMPLE)] | None = None
    """Longer samples are cut to this; null: ``dataset.max_length``."""
    samples: Annotated[int, Field(ge=1, le=10**7)] = 20_000
    """Samples to draw."""

    def draw(self, *, longest: int | None, seed: int) -> LengthTable:
        """Returns a table of drawn samples. ``longest`` is the limit of the config, if the distribution has none."""
        longest = self.longest or longest or LONGEST_SAMPLE
        if self.image_tokens >= longest:
            raise ConfigError(
                'lengths.image_tokens', f'must be below the longest sample, got: {self.image_tokens} of {longest}'
            )
        generator = np.random.default_rng(seed)
        # Parameters of the lognormal distribution that has this mean and this deviation over the mean.
        sigma = math.sqrt(math.log1p(self.variation**2))
        mu = math.log(self.mean) - sigma**2 / 2
        text_tokens = generator.lognormal(mu, sigma, self.samples)
        has_images = generator.random(self.samples) < self.with_images
        image_tokens = np.where(has_images, self.image_tokens, 0)
        lengths = np.clip(np.rint(text_tokens), 1, longest - image_tokens) + image_tokens
        unknown = np.zeros(self.samples, dtype=np.int32)  # zeros everywhere: nobody has counted them
        return LengthTable(
            lengths=lengths.astype(np.int32),
            image_tokens=image_tokens.astype(np.int32),
            loss_tokens=unknown,
            vision_patches=unknown,
        )


def lengths_of(source: str | Section, *, longest: int | None, seed: int) -> LengthTable:
    """Returns the table of a CSV file, or one drawn from the figures of a :class:`LengthDistribution`."""
    if isinstance(source, Mapping):
        return build_dataclass('lengths', LengthDistribution, source).draw(longest=longest, seed=seed)
    return read_lengths(str(source))


def read_lengths(path: str) -> LengthTable:
    """Reads a line for each sample: ``tokens``, and perhaps ``image_tokens``, ``loss_tokens``, ``vision_patches``."""
    if not Path(path).is_file():  # reading a pipe would wait for somebody to write to it
        raise ConfigError('lengths', f'must be a CSV file, plain or .gz, got: {path}')
    try:
        opener = gzip.open if path.endswith('.gz') else open
        with opener(path, 'rt', encoding='utf-8-sig') as file:
            lines = csv.reader(file)
            names = [name.strip() for name in next(lines, [])]
            _check_header(names, path)
            rows = []
            for line in lines:
                if line:
                    rows.append(_row(line, len(names), f'line {lines.line_num} of {path}'))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError('lengths', f'must be a CSV file, plain or .gz, got: {path} ({error})') from error
    if not rows:
        raise ConfigError('lengths', f'must hold at least one sample, got: none in {path}')
    table: dict[str, Any] = dict.fromkeys(CSV_COLUMNS.values(), np.zeros(len(rows), dtype=np.int32))
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        table[CSV_COLUMNS[name]] = np.array(values, dtype=np.int32)
    for name in ('image_tokens', 'loss_tokens'):
        _check_at_most_tokens(table, name, path)
    return LengthTable(**table)


def _check_header(names: list[str], path: str) -> None:
    if 'tokens' in names and set(names) <= CSV_COLUMNS.keys() and len(names) == len(set(names)):
        return
    optional = [name for name in CSV_COLUMNS if name != 'tokens']
    raise ConfigError(
        'lengths',
        f'must have the column tokens once, and perhaps {", ".join(optional)}, got: {shorten(", ".join(names), 300)} '
        f'in {path}. Rename or remove the others',
    )


def _row(line: list[str], num_columns: int, place: str) -> list[int]:
    """Returns the numbers of a line; ``place`` names the line in the error."""
    try:
        values = [int(value) for value in line]
    except ValueError:
        values = []
    if len(values) == num_columns and min(values) >= 0 and max(values) <= LONGEST_SAMPLE:
        return values
    raise ConfigError(
        'lengths',
        f'must have {num_columns} whole numbers up to {LONGEST_SAMPLE} a line, got: {shorten(",".join(line), 300)} '
        f'({place})',
    )


def _check_at_most_tokens(table: Mapping[str, np.ndarray], name: str, path: str) -> None:
    over = table[name] > table['lengths']
    if over.any():
        row = int(over.argmax())
        raise ConfigError(
            'lengths',
            f'must have at most as many {name} as tokens, got: {table[name][row]} of {table["lengths"][row]} in row '
            f'{row + 1} of {path}',
        )
