# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Lengths from a CSV file or a stated distribution, for sizing a run whose data is elsewhere, and stand-in samples."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from omegaconf import MISSING
from PIL import Image
from transformers import PretrainedConfig

from composer_tokacc.data import LengthTable
from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs.models import tokenizer_of
from composer_tokacc.programs.schema import ConfigError, merge
from composer_tokacc.programs.values import Range

CSV_COLUMNS = {'tokens': 'lengths', **{name: name for name in ('image_tokens', 'loss_tokens', 'vision_patches')}}
LONGEST = 2**24
"""Tokens of a sample, far above what any model takes; at a hundred times as many the simulation fills the memory."""
CLASS_TOKENS = {'clip_vision_model': 1, 'siglip_vision_model': 0}
"""Features of encoders with one size of image beside those of its patches."""
STAND_IN_SIDES = (336, 1344)
"""Pixels of a small and a large image, which differ in tokens wherever the size decides."""


@dataclass(kw_only=True)
class LengthDistribution:
    """What is known of data that is not at hand: lognormal lengths of the text, and a share of samples with images."""

    mean: Annotated[float, Range(least=1, most=LONGEST)] = MISSING
    """Tokens of a sample beside those of its images, on average."""
    variation: Annotated[float, Range(least=0, below=100)] = 0.7
    """Standard deviation of them over their mean."""
    image_tokens: Annotated[int, Range(least=0, most=LONGEST)] = 0
    """Tokens of the images of a sample that has any."""
    with_images: Annotated[float, Range(least=0, most=1)] = 1.0
    """Share of the samples that have."""
    longest: Annotated[int, Range(least=1, most=LONGEST)] | None = None
    """Longer samples are as long as this; null: ``dataset.max_length``."""
    samples: Annotated[int, Range(least=1, most=10**7)] = 20_000
    """Samples to draw."""

    def draw(self, *, longest: int | None, seed: int) -> LengthTable:
        """Returns a table of so many samples."""
        longest = (longest or LONGEST) if self.longest is None else self.longest
        if self.image_tokens >= longest:
            raise ConfigError(
                f'`lengths.image_tokens` must be below the longest, got: {self.image_tokens} of {longest}'
            )
        generator = np.random.default_rng(seed)
        spread = math.sqrt(math.log1p(self.variation**2))
        text = generator.lognormal(math.log(self.mean) - spread**2 / 2, spread, self.samples)
        images = np.where(generator.random(self.samples) < self.with_images, self.image_tokens, 0)
        lengths = np.clip(np.rint(text), 1, longest - images) + images
        lengths, images, unknown = (table.astype(np.int32) for table in (lengths, images, np.zeros(self.samples)))
        return LengthTable(lengths=lengths, image_tokens=images, loss_tokens=unknown, vision_patches=unknown)


def lengths_of(given: Any, *, longest: int | None, seed: int) -> LengthTable:
    """Returns the table of a CSV file, or one drawn from the figures of a :class:`LengthDistribution`."""
    if not isinstance(given, Mapping):
        return read_lengths(str(given))
    return merge(LengthDistribution, dict(given), path='lengths').draw(longest=longest, seed=seed)


def read_lengths(path: str) -> LengthTable:
    """Reads one line a sample: ``tokens``, and perhaps ``image_tokens``, ``loss_tokens``, ``vision_patches``."""
    if not Path(path).is_file():  # a pipe would be waited for
        raise ConfigError(f'`lengths` must be a CSV file, plain or .gz, got: {path}')
    try:
        opener = gzip.open if path.endswith('.gz') else open
        with opener(path, 'rt', encoding='utf-8-sig') as file:
            lines = csv.reader(file)
            names = [name.strip() for name in next(lines, [])]
            if 'tokens' not in names or not set(names) <= CSV_COLUMNS.keys() or len(names) > len(set(names)):
                raise ConfigError(
                    f'`lengths` must have the column tokens once, and perhaps {", ".join(list(CSV_COLUMNS)[1:])}, got: '
                    f'{", ".join(names)} in {path}. Rename or remove the others'
                )
            rows = [_row(path, lines.line_num, line, len(names)) for line in lines if line]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f'`lengths` must be a CSV file, plain or .gz, got: {path} ({error})') from error
    if not rows:
        raise ConfigError(f'`lengths` must hold at least one sample, got: none in {path}')
    columns = dict(zip((CSV_COLUMNS[name] for name in names), np.array(rows, dtype=np.int32).T.copy(), strict=True))
    for name in ('image_tokens', 'loss_tokens'):
        if name in columns and (over := columns[name] > columns['lengths']).any():
            row = int(over.argmax())
            raise ConfigError(
                f'`lengths` must have at most as many {name} as tokens, got: {columns[name][row]} of '
                f'{columns["lengths"][row]} in row {row + 1} of {path}'
            )
    for name in CSV_COLUMNS.values():
        columns.setdefault(name, np.zeros(len(rows), dtype=np.int32))
    return LengthTable(**columns)


def _row(path: str, number: int, line: list[str], num_columns: int) -> list[int]:
    try:
        values = [int(value) for value in line]
        if len(values) != num_columns or min(values) < 0 or max(values) > LONGEST:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f'`lengths` must have {num_columns} whole numbers up to {LONGEST} a line, got: {",".join(line)} '
            f'(line {number} of {path})'
        ) from None
    return values


class StandIns:
    """Shape-only samples for the memory model, which must see no more than an image or none, small or large.

    Without a processor the model's config must tell what an image is.
    """

    def __init__(self, table: LengthTable, processor: Any, config: PretrainedConfig) -> None:
        self.image_tokens = table.image_tokens
        self.processor = processor
        self._image: dict[str, Any] | None = None
        if processor is None and table.image_tokens.any():
            self._image = _image_of(config)
            if self._image is None:
                raise ConfigError(
                    f'`lengths` with images of any size needs `model.pretrained`, whose processor makes them, got: a '
                    f'`model.config` of {config.model_type}. Name a checkpoint; its folder needs no weights'
                )

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a sample with an image where the table has one; the large image is that of the row with most."""
        has_image = bool(self.image_tokens[index])
        if self.processor is None:
            ids = torch.ones(1, 1, dtype=torch.long)
            sample = self._image if has_image and self._image else {'input_ids': ids, 'attention_mask': ids}
        else:
            sample = self._processed(index)
        return {**sample, 'labels': sample['input_ids'].clone(), 'num_images': [int(has_image)]}

    def _processed(self, index: int) -> dict[str, Any]:
        images, content = [], [{'type': 'text', 'text': 'a'}]
        if self.image_tokens[index]:
            side = STAND_IN_SIDES[int(self.image_tokens[index] == self.image_tokens.max())]
            images, content = [Image.new('RGB', (side, side))], [{'type': 'image'}, *content]
        text = self.processor.apply_chat_template([{'role': 'user', 'content': content}], tokenize=False)
        encode = self.processor if images else tokenizer_of(self.processor)
        return dict(encode(text=text, return_tensors='pt', **({'images': images} if images else {})))


def _image_of(config: Any) -> dict[str, Any] | None:
    """Returns a sample of one image, of LLaVA with an encoder of one size; None: the config does not tell.

    What an encoder of any size, or of tiles, takes for its smallest image says nothing of real ones.
    """
    vision: Any = getattr(config, 'vision_config', None)
    token = BatchLayout.for_model(config).image_token_id
    if config.model_type != 'llava' or vision.model_type not in CLASS_TOKENS or token is None:
        return None
    drops_first = config.vision_feature_select_strategy == 'default'
    count = (vision.image_size // vision.patch_size) ** 2 + CLASS_TOKENS[vision.model_type] - drops_first
    ids = torch.full((1, count), token)
    pixels = torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'pixel_values': pixels}
