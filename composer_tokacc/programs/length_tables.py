# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Reads or draws the lengths of samples for ``size lengths=...``, which needs no data.

``size`` runs the model on a few samples of :class:`MadeUpSamples`, and predicts memory from these runs
(:class:`.MemoryModel`).
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from transformers import PretrainedConfig

from composer_tokacc.data import LengthTable
from composer_tokacc.data.chat_template import owner_of_template
from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs.errors import ConfigError, shorten
from composer_tokacc.programs.host_types import Row, Section
from composer_tokacc.programs.models import tokenizer_of
from composer_tokacc.programs.schema import build_dataclass

CSV_COLUMNS = {
    'tokens': 'lengths',
    'image_tokens': 'image_tokens',
    'loss_tokens': 'loss_tokens',
    'vision_patches': 'vision_patches',
}
"""Columns of the CSV file, and the field of :class:`.LengthTable` for each."""
LONGEST_SAMPLE = 2**24
"""Most tokens of a sample, far more than any model takes. With a hundred times as many, the simulation of ``size`` runs
out of memory."""
SMALL_SIDE = 336
"""Side of a small image, in pixels."""
LARGE_SIDE = 1344
"""Side of a large image, in pixels. It has more tokens than a small one if the model's tokens depend on the size."""


@dataclass(kw_only=True)
class LengthDistribution:
    """Figures to draw lengths from: a lognormal distribution of text tokens, and a share of samples with images."""

    mean: Annotated[float, Field(ge=1, le=LONGEST_SAMPLE)]
    """Mean text tokens of a sample."""
    variation: Annotated[float, Field(ge=0, lt=100)] = 0.7
    """Standard deviation of the text tokens, divided by ``mean``."""
    image_tokens: Annotated[int, Field(ge=0, le=LONGEST_SAMPLE)] = 0
    """Tokens of the images of a sample that has images."""
    with_images: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the samples that have images."""
    longest: Annotated[int, Field(ge=1, le=LONGEST_SAMPLE)] | None = None
    """Most tokens of a sample, with its images. Longer texts are cut. null: ``dataset.max_length``."""
    samples: Annotated[int, Field(ge=1, le=10**7)] = 20_000
    """Number of samples to draw."""

    def draw(self, *, max_length: int | None, seed: int) -> LengthTable:
        """Returns a table of drawn samples.

        Args:
            max_length: ``dataset.max_length``. It is used if the field ``longest`` is null. None: no limit.
            seed: Seed of the draw.
        """
        longest = self.longest or max_length or LONGEST_SAMPLE
        if self.image_tokens >= longest:
            raise ConfigError(
                'lengths.image_tokens', f'must be below the longest sample, got: {self.image_tokens} of {longest}'
            )
        generator = np.random.default_rng(seed)
        # Deviation and mean of the logarithm, for a lognormal distribution with this `mean` and `variation`.
        sigma = math.sqrt(math.log1p(self.variation**2))
        mu = math.log(self.mean) - sigma**2 / 2
        text_tokens = generator.lognormal(mu, sigma, self.samples)
        has_images = generator.random(self.samples) < self.with_images
        image_tokens = np.where(has_images, self.image_tokens, 0)
        most_text_tokens = longest - image_tokens
        text_tokens = np.clip(np.rint(text_tokens), 1, most_text_tokens)
        lengths = text_tokens + image_tokens
        unknown = _unknown_column(self.samples)
        return LengthTable(
            lengths=lengths.astype(np.int32),
            image_tokens=image_tokens.astype(np.int32),
            loss_tokens=unknown,
            vision_patches=unknown,
        )


def _unknown_column(num_samples: int) -> np.ndarray:
    """Returns a column of a :class:`.LengthTable` that is not known. It has only zeros, which count as unknown."""
    return np.zeros(num_samples, dtype=np.int32)


def lengths_of(source: str | Section, *, max_length: int | None, seed: int) -> LengthTable:
    """Returns the lengths of samples.

    Args:
        source: The path of a CSV file, or the fields of a :class:`LengthDistribution` to draw from.
        max_length: ``dataset.max_length``; None: no limit. See :meth:`LengthDistribution.draw`.
        seed: Seed of the draw.
    """
    if isinstance(source, Mapping):
        return build_dataclass('lengths', LengthDistribution, source).draw(max_length=max_length, seed=seed)
    return read_lengths(str(source))


def read_lengths(path: str) -> LengthTable:
    """Returns the table of a CSV file, which has a line for each sample.

    The first line names the columns: ``tokens``, and perhaps ``image_tokens``, ``loss_tokens``, ``vision_patches``. The
    unit of the first three is tokens. ``tokens`` are all tokens of the sample. ``vision_patches`` are the patches that
    the vision encoder computes, before they are merged into image tokens.
    """
    columns = _read_columns(path)
    tokens = columns['tokens']
    if not tokens.size:
        raise ConfigError('lengths', f'must hold at least one sample, got: none in {path}')
    table: dict[str, Any] = dict.fromkeys(CSV_COLUMNS.values(), _unknown_column(len(tokens)))
    for name, values in columns.items():
        _check_values(name, values, tokens, path)
        table[CSV_COLUMNS[name]] = values.astype(np.int32)
    return LengthTable(**table)


def _read_columns(path: str) -> dict[str, np.ndarray]:
    """Returns the columns of a CSV file by name, float64 (samples,).

    Refuses a file without ``tokens``, with a column of another name, or with two columns of one name.
    """
    if not Path(path).is_file():  # reading a pipe would wait for somebody to write to it
        raise ConfigError('lengths', f'must be a CSV file, plain or .gz, got: {path}')
    open_file = gzip.open if path.endswith('.gz') else open
    try:
        with open_file(path, 'rt', encoding='utf-8-sig', newline='') as file:
            names, numbers = _read_csv(file)
    except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:
        raise ConfigError(
            'lengths',
            f'must be a CSV file of numbers, plain or .gz, got: {path} ({shorten(error)})',
        ) from error
    has_repeated_name = len(set(names)) < len(names)
    if 'tokens' not in names or has_repeated_name or not CSV_COLUMNS.keys() >= set(names):
        allowed_names = ', '.join(CSV_COLUMNS)
        raise ConfigError(
            'lengths',
            f'must have the columns {allowed_names}, each once (all but tokens can be left out), got: '
            f'{shorten(", ".join(names), 300)} in {path}',
        )
    return dict(zip(names, numbers, strict=True))


def _check_values(name: str, values: np.ndarray, tokens: np.ndarray, path: str) -> None:
    """Refuses a column of a CSV file with numbers that no sample can have. Names the first row with such a number.

    Args:
        name: The name of the column.
        values: Its numbers, float64 (samples,).
        tokens: The column ``tokens``, float64 (samples,).
        path: The file.
    """
    is_valid = (values >= 0) & (values <= LONGEST_SAMPLE) & (values % 1 == 0)
    if name == 'tokens':
        is_valid &= values >= 1
    elif name in ('image_tokens', 'loss_tokens'):  # they are among the tokens of the sample
        is_valid &= values <= tokens
    if not is_valid.all():
        row = int(is_valid.argmin())  # the first row that is not valid
        raise ConfigError(
            'lengths',
            f'must have whole numbers up to {LONGEST_SAMPLE}, at least one token for each sample, and no more '
            f'image_tokens or loss_tokens than tokens, got: {values[row]:g} {name} in row {row + 1} of {path}',
        )


def _read_csv(file: TextIO) -> tuple[list[str], np.ndarray]:
    """Returns the names of the columns, and their numbers, float64 (columns, samples).

    Raises ValueError with the line and the value if a cell is not a number.
    """
    names = []
    rows = []
    # Not csv.reader(file), because it does not tell a comment from a quoted "#7", which is a wrong number.
    for line_number, line in enumerate(file, start=1):
        cells = next(csv.reader([line]), [])
        if line_number == 1:
            # `np.savetxt` begins the header with #
            names = [cell.strip().removeprefix('#').strip() for cell in cells]
            continue
        is_comment = line.startswith('#')
        if is_comment or not cells:
            continue
        if len(cells) != len(names):
            raise ValueError(f'{len(cells)} cells in line {line_number}, and {len(names)} columns')
        try:
            rows.append([float(cell) for cell in cells])
        except ValueError as error:
            raise ValueError(f'line {line_number}: {error}') from error
    return names, np.reshape(rows, (len(rows), len(names))).T


class MadeUpSamples:
    """Made-up samples for ``size lengths=...``, which knows the lengths of the samples, but not their content.

    A sample has a short text, and perhaps an image. The image is large if the sample has the most image tokens of the
    table, and small otherwise. The length of a sample is not the one in the table, because the memory model pads its
    batches to widths that it chooses.

    Args:
        table: The lengths of the samples. A sample has an image if it has image tokens.
        processor: The processor of the run; None for a model with random weights.
        config: The config of the model. Without a processor, the shape of an image is found in it.
    """

    def __init__(
        self,
        table: LengthTable,
        processor: Any,
        config: PretrainedConfig,
    ) -> None:
        self.image_tokens = table.image_tokens
        self.processor = processor
        self.config = config

    def __len__(self) -> int:
        return len(self.image_tokens)

    def __getitem__(self, index: int) -> Row:
        """Returns a sample for a row of the table. Its tensors have shape (1, ...), as in every dataset."""
        num_image_tokens = self.image_tokens[index]
        has_image = bool(num_image_tokens > 0)
        if self.processor is None:
            sample = _image_sample_of(self.config) if has_image else _text_sample()
        elif has_image:
            is_largest = num_image_tokens == self.image_tokens.max()
            sample = self._processed(image_side=LARGE_SIDE if is_largest else SMALL_SIDE)
        else:
            sample = self._processed(image_side=None)
        labels = sample['input_ids'].clone()
        return {**sample, 'labels': labels, 'num_images': [int(has_image)]}

    def _processed(self, *, image_side: int | None) -> Row:
        """Lets the processor make a sample of one letter and a square image.

        Args:
            image_side: The side of the image in pixels; None: no image.
        """
        content = [{'type': 'text', 'text': 'a'}]
        if image_side is not None:
            content.insert(0, {'type': 'image'})
        conversation = [{'role': 'user', 'content': content}]
        text = owner_of_template(self.processor).apply_chat_template(conversation, tokenize=False)
        if image_side is None:
            return dict(tokenizer_of(self.processor)(text=text, return_tensors='pt'))
        image = Image.new('RGB', (image_side, image_side))
        return dict(self.processor(text=text, return_tensors='pt', images=[image]))


def _text_sample() -> Row:
    """Returns a sample of one token. Every model has a token with the id 1."""
    token_ids = torch.ones(1, 1, dtype=torch.long)
    return {'input_ids': token_ids, 'attention_mask': torch.ones_like(token_ids)}


def _image_sample_of(config: Any) -> Row:
    """Returns a sample that is only an image, for LLaVA with CLIP as its vision encoder. Refuses other models.

    If an encoder takes images of any size, or cuts them into tiles, its config does not say how large they are.
    Other models with one size, such as PaliGemma, are not supported.
    """
    vision_config: Any = getattr(config, 'vision_config', None)
    token_id = BatchLayout.for_model(config).image_token_id
    if config.model_type != 'llava' or vision_config.model_type != 'clip_vision_model' or token_id is None:
        raise ConfigError(
            'lengths',
            f'with image tokens needs `model.pretrained`, got: a `model.config` of {config.model_type}, from which no '
            'image can be made. Name a checkpoint; its folder needs no weights',
        )
    side = vision_config.image_size
    patches_per_side = side // vision_config.patch_size
    num_tokens = patches_per_side**2
    if config.vision_feature_select_strategy != 'default':  # with `default`, LLaVA drops CLIP's class token
        num_tokens += 1
    token_ids = torch.full((1, num_tokens), token_id)
    return {
        'input_ids': token_ids,
        'attention_mask': torch.ones_like(token_ids),
        'pixel_values': torch.zeros(1, vision_config.num_channels, side, side),
    }
