# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Families with images, videos and sound: tiny configs, and random rows.

Rows of the families in ``tests/support`` come from their own processors; the others are written by hand, because their
processors want packages for videos and sound that nothing else here needs.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from PIL import Image

from tests.matrix.collator import Row, cat_padded
from tests.support.families import FAMILIES, FamilyCase
from tests.support.family_models import CLASSES, config_of
from tests.support.sample_encoder import WORDS, Sample

__all__ = ['HAND_MADE', 'hand_made_config', 'hand_made_row', 'processor_case', 'processor_row']

# Families whose rows come from their own processors.


@functools.cache
def processor_case(name: str) -> FamilyCase:
    """Model, processor and samples of a family in ``tests/support``."""
    return FAMILIES[name]()


@functools.cache
def _processor_pool(name: str, size: int = 24) -> list[Row]:
    """Rows to draw from: processors are slower than the models."""
    rng, encode = random.Random(name), processor_case(name).encode
    samples = [_sample(rng) for _ in range(size)]
    return [{**_tensors(encode(sample)), 'num_images': [len(sample.images)]} for sample in samples]


def _tensors(encoded: Mapping[str, Any]) -> Row:
    return {key: value for key, value in encoded.items() if torch.is_tensor(value)}


def _sample(rng: random.Random) -> Sample:
    sizes = (16, 24, 32, 40, 48)
    images = [
        Image.frombytes('RGB', (width, height), rng.randbytes(3 * width * height))
        for width, height in [(rng.choice(sizes), rng.choice(sizes)) for _ in range(rng.choice((0, 0, 1, 1, 1, 2)))]
    ]
    gaps = [[rng.choice(WORDS) for _ in range(rng.randint(1, 9))]]
    gaps += [[rng.choice(WORDS) for _ in range(rng.randint(0, 2))] for _ in images]
    return Sample(gaps=gaps, answer=[rng.choice(WORDS) for _ in range(rng.randint(1, 9))], images=images)


def processor_row(name: str, rng: random.Random, *, has_image: bool | None = None) -> Row:
    """One of the family's rows; with or without an image where asked."""
    pool = [row for row in _processor_pool(name) if has_image is None or ('pixel_values' in row) == has_image]
    row = rng.choice(pool)
    return {**row, 'labels': row['labels'].clone()}


# Families written by hand. Ids: 0 pad, 1 image, 2 video, 3 audio, 4 begins and 5 ends a picture, words from 8.

VOCABULARY, PATCH, SIDE = 64, 4, 16
IMAGE, VIDEO, AUDIO, BEGIN, END = 1, 2, 3, 4, 5
MEL_BINS, FRAMES = 8, 16
_SOURCES = {
    'qwen2_vl_video': 'qwen2_vl',
    'llava_onevision_video': 'llava_onevision',
    'instructblip_video': 'instructblipvideo',
    **{name: name for name in ('qwen3_vl', 'llava_next_video', 'mistral3', 'qwen2_audio', 'blip2', 'instructblip')},
}


class _Ids:
    """Of the tokens in a config."""

    tokenizer, pad_token_id = range(VOCABULARY), 0

    def token_id(self, token: str) -> int:
        named = {'<s>': 6, '</s>': 7, 'start': BEGIN, 'end': END, 'video': VIDEO, 'AUDIO': AUDIO, 'im': IMAGE}
        named['IMG'] = IMAGE
        return next(number for name, number in named.items() if name in token)


HAND_MADE = {name: CLASSES[source] for name, source in _SOURCES.items() if hasattr(transformers, CLASSES[source])}


def hand_made_config(name: str) -> Any:
    """A fresh config."""
    config = config_of(_SOURCES[name], _Ids(), hidden=32)
    if name == 'qwen2_audio':
        config.audio_config.max_source_positions = FRAMES // 2
    return config


class _Writer:
    """Ids, token types and media of one row."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.ids: list[int] = []
        self.types: list[int] = []
        self.media: dict[str, list[torch.Tensor]] = {}

    def words(self, count: int) -> None:
        self.ids += [self.rng.randrange(8, VOCABULARY) for _ in range(count)]
        self.types += [0] * count

    def place(self, token: int, count: int, token_type: int) -> None:
        """Placeholders between the marks of a picture."""
        self.ids += [BEGIN, *[token] * count, END]
        self.types += [0, *[token_type] * count, 0]

    def keep(self, **tensors: torch.Tensor) -> None:
        for key, value in tensors.items():
            self.media.setdefault(key, []).append(value)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def row(self, num_labels: int, *, has_types: bool) -> Row:
        ids = torch.tensor([self.ids])
        labels = ids.clone()
        labels[:, : len(self.ids) - num_labels] = -100
        row = {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels}
        if has_types:
            row['mm_token_type_ids'] = torch.tensor([self.types])
        counts = {f'num_{unit}s': [len(self.media.get(key, ()))] for unit, key in _ONE_A_UNIT.items()}
        return {**row, **counts, **{key: cat_padded(values) for key, values in self.media.items()}}


_ONE_A_UNIT = {'image': 'pixel_values', 'video': 'pixel_values_videos', 'audio': 'input_features'}


def _grid(rng: random.Random) -> tuple[int, int]:
    """Height and width of a picture, in patches."""
    return rng.choice((2, 4)), rng.choice((2, 4, 6))


def _qwen_image(writer: _Writer) -> None:
    height, width = _grid(writer.rng)
    writer.place(IMAGE, height * width // 4, 1)
    writer.keep(
        pixel_values=writer.random(height * width, 3 * 2 * PATCH**2),
        image_grid_thw=torch.tensor([[1, height, width]]),
    )


def _qwen2_video(writer: _Writer) -> None:
    frames, (height, width) = writer.rng.choice((1, 2, 3)), _grid(writer.rng)
    writer.place(VIDEO, frames * height * width // 4, 2)
    writer.keep(
        pixel_values_videos=writer.random(frames * height * width, 3 * 2 * PATCH**2),
        video_grid_thw=torch.tensor([[frames, height, width]]),
    )


def _qwen3_video(writer: _Writer) -> None:
    """Every frame has marks of its own, behind the words of its time."""
    frames, (height, width) = writer.rng.choice((1, 2, 3)), _grid(writer.rng)
    for _ in range(frames):
        writer.words(2)
        writer.place(VIDEO, height * width // 4, 2)
    writer.keep(
        pixel_values_videos=writer.random(frames * height * width, 3 * 2 * PATCH**2),
        video_grid_thw=torch.tensor([[frames, height, width]]),
    )


def _onevision_video(writer: _Writer) -> None:
    # Pooled to a quarter of the patches, and one token for a new line.
    writer.place(VIDEO, 2 * (SIDE // PATCH // 2) ** 2 + 1, 0)
    writer.keep(pixel_values_videos=writer.random(1, 2, 3, SIDE, SIDE))


def _next_video(writer: _Writer) -> None:
    writer.place(VIDEO, 2 * (SIDE // PATCH // 2) ** 2, 0)
    writer.keep(pixel_values_videos=writer.random(1, 2, 3, SIDE, SIDE))


def _pixtral_image(writer: _Writer) -> None:
    # Two tokens or more: Mistral3 squeezes the dimension of a microbatch's only token away.
    height, width = writer.rng.choice((2, 4)), writer.rng.choice((4, 6))
    for line in range(height // 2):  # a mark ends each line of tokens
        writer.ids += [IMAGE] * (width // 2) + [BEGIN if line < height // 2 - 1 else END]
        writer.types += [0] * (width // 2 + 1)
    writer.keep(
        pixel_values=writer.random(1, 3, PATCH * height, PATCH * width),
        image_sizes=torch.tensor([[PATCH * height, PATCH * width]]),
    )


def _audio(writer: _Writer) -> None:
    frames = writer.rng.choice((10, 12, FRAMES))  # two placeholders or more: single ones are old-style for Qwen2-Audio
    writer.place(AUDIO, ((frames - 1) // 2 + 1 - 2) // 2 + 1, 0)
    writer.keep(
        input_features=writer.random(1, MEL_BINS, FRAMES),
        feature_attention_mask=(torch.arange(FRAMES) < frames).long()[None],
    )


def _queried(writer: _Writer, token: int, *frames: int) -> None:
    writer.ids += [token] * 4 * math.prod(frames)
    writer.types += [0] * 4 * math.prod(frames)
    writer.keep(pixel_values=writer.random(1, *frames, 3, SIDE, SIDE))


def _instructed(writer: _Writer, token: int, *frames: int) -> None:
    _queried(writer, token, *frames)
    words = torch.tensor([[writer.rng.randrange(8, VOCABULARY) for _ in range(writer.rng.randint(1, 5))]])
    writer.keep(qformer_input_ids=words, qformer_attention_mask=torch.ones_like(words))


_MEDIA: Mapping[str, Sequence[Callable[[_Writer], None]]] = {
    'qwen2_vl_video': (_qwen_image, _qwen2_video),
    'qwen3_vl': (_qwen_image, _qwen3_video),
    'llava_onevision_video': (_onevision_video,),
    'llava_next_video': (_next_video,),
    'mistral3': (_pixtral_image,),
    'qwen2_audio': (_audio,),
    'blip2': (lambda writer: _queried(writer, IMAGE),),
    'instructblip': (lambda writer: _instructed(writer, IMAGE),),
    'instructblip_video': (lambda writer: _instructed(writer, VIDEO, 4),),
}


def hand_made_row(name: str, rng: random.Random) -> Row:
    """Words, none to two pictures (videos, sounds), words; labels on the last of them."""
    writer = _Writer(rng)
    writer.words(rng.randint(1, 6))
    for _ in range(rng.choice((0, 1, 1, 2))):
        rng.choice(_MEDIA[name])(writer)
        writer.words(rng.randint(0, 2))
    num_words = rng.randint(1, 9)
    writer.words(num_words)
    return writer.row(rng.randint(0, num_words), has_types=name.startswith('qwen') and 'vl' in name)
