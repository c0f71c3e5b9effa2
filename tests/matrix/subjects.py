# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Every family of the matrix: a tiny model by its own class, and random batches as a loader makes them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from composer.models import HuggingFaceModel

from tests.matrix import media_families, text_families
from tests.matrix.collator import Row, join
from tests.support.families import IMAGE_FAMILIES

__all__ = ['SUBJECTS', 'Subject']

LARGE_STD = 0.15
FIRST_LABELLED = 3
"""One batch of four labels the first token of a row, as pretraining does: behind padding it has a prediction."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A family.

    Args:
        name: Its name in the table.
        group: ``'text'``, ``'image'``, ``'video'`` or ``'audio'``.
        packs: Whether it tells the documents of a packed row apart, in transformers 5.
        blank: Makes the model's class and a fresh config.
        row: Draws one row, ``row(rng)``: tensors of shape ``(1, width)`` and media.
        slots: Whether the images of a row lie in slots, a dimension of their own (Idefics3, Mllama).
    """

    name: str
    group: str
    blank: Callable[[], tuple[type, Any]]
    row: Callable[[random.Random], Row]
    packs: bool = False
    slots: bool = False

    def model(self, init: str) -> HuggingFaceModel:
        """A model with Hugging Face's own first weights (``'fresh'``), or with larger ones (``'large'``).

        Where attention leaks, the first hardly change the loss of so small a model and the second change it much.
        """
        model_class, config = self.blank()
        config = without_dropout(config)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = model_class(config)
            if init == 'large':
                for parameter in model.parameters():
                    if parameter.dim() > 1 or not parameter.any():
                        torch.nn.init.normal_(parameter, std=LARGE_STD)
        return HuggingFaceModel(model.float().train(), shift_labels=True, use_logits=True)

    def batch(self, seed: int, *, side: str) -> Row:
        """A random batch, as a loader would make it."""
        return self.collate(self.rows(seed), seed, side=side)

    def rows(self, seed: int) -> list[Row]:
        """The rows of a random batch: at least one has a label that counts."""
        rng = random.Random(f'{self.name} {seed}')
        rows = [self.row(rng) for _ in range(rng.randint(5, 8))]
        if seed % 4 != FIRST_LABELLED and self.group == 'text' and self.name not in ('bert', 't5'):
            for row in rows:
                row['labels'][:, 0] = -100
        if all((row['labels'][:, 1:] == -100).all() for row in rows):
            rows[0]['labels'][:, -1] = rows[0]['input_ids'][:, -1]
        if seed % 2:  # what the model and the placeholders tell must do
            rows = [{key: value for key, value in row.items() if not key.startswith('num_')} for row in rows]
        return rows

    def collate(self, rows: Sequence[Row], seed: int, *, side: str) -> Row:
        """One batch; one of three as wide as a multiple of 8, so that no row fills it."""
        return join(rows, side=side, multiple=8 if seed % 3 == 2 else 1, slots=self.slots)


def without_dropout(config: Any) -> Any:
    """No randomness in forward, and no cache, in a config and those inside it."""
    nested = [getattr(config, name) for name in getattr(config, 'sub_configs', {})]
    for part in (config, *(part for part in nested if part is not None)):
        for name, value in list(vars(part).items()):
            if 'drop' in name and isinstance(value, float):
                setattr(part, name, 0.0)
        if part is config or hasattr(part, 'use_cache'):  # not a vision tower, which transformers 4 hands it to
            part.use_cache = False
    return config


# The families.

PACKS = (
    *('llama', 'gpt2', 'gpt_neo', 'opt', 'mistral', 'gemma2', 'mixtral', 'qwen3_moe'),
    *('llava', 'llava_next', 'idefics3', 'smolvlm', 'internvl', 'mistral3', 'qwen2_audio', 'gemma3'),
    *('qwen2_vl', 'qwen2_vl_video', 'qwen2_5_vl', 'qwen3_vl'),
)


def _text(name: str) -> Subject:
    row = text_families.ROWS.get(name, text_families.text_row)
    return Subject(name=name, group='text', packs=name in PACKS, blank=lambda: text_families.text_model(name), row=row)


def _processor(name: str, *, source: str = '', has_image: bool | None = None) -> Subject:
    source = source or name

    def blank() -> tuple[type, Any]:
        case = media_families.processor_case(source)
        return type(case.model), copy.deepcopy(case.config)

    return Subject(
        name=name,
        group='image',
        packs=name in PACKS,
        blank=blank,
        row=lambda rng: media_families.processor_row(source, rng, has_image=has_image),
        slots=source in ('idefics3', 'smolvlm', 'mllama'),
    )


def _hand_made(name: str) -> Subject:
    model_class = media_families.HAND_MADE[name]
    return Subject(
        name=name,
        group='audio' if 'audio' in name else 'video' if 'video' in name else 'image',
        packs=name in PACKS,
        blank=lambda: (getattr(transformers, model_class), media_families.hand_made_config(name)),
        row=lambda rng: media_families.hand_made_row(name, rng),
    )


_ALL = [
    *(_text(name) for name in text_families.TEXT_CONFIGS),
    *(_processor(name) for name in IMAGE_FAMILIES if name != 'mllama'),
    *(_hand_made(name) for name in media_families.HAND_MADE),
    _processor('mllama', has_image=True),
    _processor('mllama_mixed', source='mllama'),
]
SUBJECTS: dict[str, Subject] = {subject.name: subject for subject in _ALL}
