# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""For ``size lengths=...``: lengths of samples that are not at hand, and samples that stand for them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from transformers import PretrainedConfig

from composer_tokacc.data import LengthTable
from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs.errors import ConfigError, shorten
from composer_tokacc.programs.host_types import Row, Section
from composer_tokacc.programs.models import tokenizer_of
from composer_tokacc.programs.process import without_warnings
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
CLASS_TOKENS = {'clip_vision_model': 1, 'siglip_vision_model': 0}
"""Features in addition to the patches, for the encoders that have one fixed image size."""
SMALL_SIDE, LARGE_SIDE = 336, 1344
"""Side of a small and a large image, in pixels. If tokens depend on the size, these two differ in their number."""


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
    names, columns = _read_csv(path)
    are_known = set(names) <= CSV_COLUMNS.keys()
    are_distinct = len(names) == len(set(names))
    if 'tokens' not in names or not are_known or not are_distinct:
        allowed_names = ', '.join(CSV_COLUMNS)
        raise ConfigError(
            'lengths',
            f'must have the columns {allowed_names}, or only some with tokens, got: {shorten(", ".join(names), 300)} '
            f'in {path}',
        )
    if not columns.size:
        raise ConfigError('lengths', f'must hold at least one sample, got: none in {path}')
    if len(columns) != len(names):
        raise ConfigError('lengths', f'must have {len(names)} numbers a line, got: {len(columns)} in {path}')
    tokens = columns[names.index('tokens')]
    unknown = np.zeros(len(tokens), dtype=np.int32)
    table: dict[str, Any] = dict.fromkeys(CSV_COLUMNS.values(), unknown)
    for name, values in zip(names, columns, strict=True):
        limit: Any = LONGEST_SAMPLE
        if name in ('image_tokens', 'loss_tokens'):
            limit = tokens
        is_valid = (values >= 0) & (values <= limit) & (values % 1 == 0)
        if not is_valid.all():
            row = int(is_valid.argmin())
            raise ConfigError(
                'lengths',
                f'must have whole numbers up to {LONGEST_SAMPLE}, and no more {name} than tokens, got: {values[row]:g} '
                f'{name} in row {row + 1} of {path}',
            )
        table[CSV_COLUMNS[name]] = values.astype(np.int32)
    return LengthTable(**table)


def _read_csv(path: str) -> tuple[list[str], np.ndarray]:
    """Returns the names in the first line, and the numbers of each column."""
    if not Path(path).is_file():  # reading a pipe would wait for somebody to write to it
        raise ConfigError('lengths', f'must be a CSV file, plain or .gz, got: {path}')
    read = partial(
        np.loadtxt,
        path,
        delimiter=',',
        comments=None,
        quotechar='"',
        encoding='utf-8-sig',
        ndmin=2,
    )
    try:
        with without_warnings():  # of an empty file
            header = read(dtype=str, max_rows=1)
            # As floats, because numpy would read 1.5 as the integer 1.
            lines = read(dtype=float, skiprows=1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError('lengths', f'must be a CSV file of numbers, plain or .gz, got: {path} ({error})') from error
    names = [name.strip() for name in header.ravel()]
    return names, lines.T


class StandIns:
    """Samples with the shapes that the memory model must see: no image, a small image, a large image.

    Their lengths differ from the lengths in the table. The memory model pads its batches to widths that it chooses.

    Args:
        table: The lengths of the samples. They decide which samples have an image.
        processor: The processor of the run; None for a fresh model.
        config: The config of the model. Without a processor it must tell the shape of an image.
    """

    def __init__(
        self,
        table: LengthTable,
        processor: Any,
        config: PretrainedConfig,
    ) -> None:
        self.image_tokens = table.image_tokens
        self.processor = processor
        self._image_sample: dict[str, torch.Tensor] | None = None
        if processor is None and table.image_tokens.any():
            self._image_sample = _image_sample_of(config)
            if self._image_sample is None:
                raise ConfigError(
                    'lengths',
                    f'with images of any size needs `model.pretrained`, got: a `model.config` of {config.model_type}. '
                    'Name a checkpoint; its folder needs no weights',
                )

    def __len__(self) -> int:
        return len(self.image_tokens)

    def __getitem__(self, index: int) -> Row:
        """Returns a sample, with an image if the table has one.

        The image is large if no sample has more image tokens, else small.
        """
        has_image = bool(self.image_tokens[index])
        if self.processor is not None:
            sample = self._processed(index)
        elif has_image and self._image_sample is not None:
            sample = dict(self._image_sample)
        else:
            token = torch.ones(1, 1, dtype=torch.long)
            sample = {'input_ids': token, 'attention_mask': token}
        labels = sample['input_ids'].clone()
        return {**sample, 'labels': labels, 'num_images': [int(has_image)]}

    def _processed(self, index: int) -> Row:
        content = [{'type': 'text', 'text': 'a'}]
        has_image = bool(self.image_tokens[index])
        if has_image:
            content.insert(0, {'type': 'image'})
        conversation = [{'role': 'user', 'content': content}]
        text = self.processor.apply_chat_template(conversation, tokenize=False)
        if not has_image:
            tokenizer = tokenizer_of(self.processor)
            return dict(tokenizer(text=text, return_tensors='pt'))
        is_largest = self.image_tokens[index] == self.image_tokens.max()
        side = LARGE_SIDE if is_largest else SMALL_SIDE
        image = Image.new('RGB', (side, side))
        return dict(self.processor(text=text, return_tensors='pt', images=[image]))


def _image_sample_of(config: Any) -> dict[str, torch.Tensor] | None:
    """Returns a sample of one image for LLaVA with an encoder of one image size; None for other models.

    If an encoder takes images of any size, or cuts them into tiles, its config does not tell how large they are.
    """
    vision_config: Any = getattr(config, 'vision_config', None)
    token_id = BatchLayout.for_model(config).image_token_id
    if config.model_type != 'llava' or vision_config.model_type not in CLASS_TOKENS or token_id is None:
        return None
    side = vision_config.image_size
    num_tokens = (side // vision_config.patch_size) ** 2 + CLASS_TOKENS[vision_config.model_type]
    if config.vision_feature_select_strategy == 'default':  # drops the first feature
        num_tokens -= 1
    token_ids = torch.full((1, num_tokens), token_id)
    return {
        'input_ids': token_ids,
        'attention_mask': torch.ones_like(token_ids),
        'pixel_values': torch.zeros(1, vision_config.num_channels, side, side),
    }
