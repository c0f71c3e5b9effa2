# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The families of the matrix: tiny models of ``tests/model_types``, and random batches as a loader makes them."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from composer.models import HuggingFaceModel

from tests.matrix.collator import Row, join
from tests.model_types.rows import Maker
from tests.model_types.tiny import LARGE_STD, float32_model, tiny_config

__all__ = ['SUBJECTS', 'Subject', 'text_subject']

FIRST_LABELLED = 3
"""Batches whose ``seed % 4`` is this also have labels of first tokens, as in pretraining. With padding on the left a
pad predicts such a label."""
MASK_ID = 3
FIRST_ID = 4
LAST_ID = 63
"""Words have the ids from the first to the last. Smaller ids are pad, beginning, end and mask."""
LONGEST = 24
POOL_SIZE = 24
"""Number of rows with media to choose from. They are made once, because processors are slower than the models."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A family.

    Args:
        name: Its name in test ids.
        model_type: The model type of its config.
        settings: Entries of the config by path.
        modalities: Modalities of the media in its rows.
        slots: Whether images have a slot dimension (Idefics3, Mllama).
        packs: Whether the model keeps the documents of a packed row apart, with transformers 5.
        needs_media: Whether the model needs a medium in every ``'row'`` or in every ``'batch'``; empty: in neither.
    """

    name: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    modalities: Sequence[str] = ()
    slots: bool = False
    packs: bool = True
    needs_media: str = ''

    def model(self, init: str) -> HuggingFaceModel:
        """Returns a model with the initial weights of Hugging Face (``'fresh'``), or with larger ones (``'large'``)."""
        config = tiny_config(self.model_type, self.settings)
        model = float32_model(config, std=LARGE_STD if init == 'large' else None)
        return HuggingFaceModel(model, shift_labels=True, use_logits=True)

    def batch(self, seed: int, *, side: str) -> Row:
        """Returns a random batch, as a loader would make it."""
        return self.collate(self.rows(seed), seed, side=side)

    def rows(self, seed: int) -> list[Row]:
        """Returns the rows of a random batch. At least one has a label that counts."""
        rng = random.Random(f'{self.name} {seed}')
        num_rows = rng.randint(5, 8)
        rows = [self.row(rng) for _ in range(num_rows)]
        while self.needs_media and not any(map(has_media, rows)):
            rows[0] = self.row(rng)

        is_causal_text = not self.modalities and self.model_type not in UNSHIFTED_ROWS
        may_label_first_token = seed % 4 == FIRST_LABELLED
        if is_causal_text and not may_label_first_token:
            for row in rows:
                row['labels'][:, 0] = -100
        if not any(map(has_labels, rows)):
            longest_row = max(rows, key=lambda row: row['input_ids'].shape[1])
            longest_row['labels'][:, -1] = longest_row['input_ids'][:, -1]

        tells_numbers_of_media = seed % 2 == 0  # if not, the package must count placeholders
        if not tells_numbers_of_media:
            for row in rows:
                for modality in self.modalities:
                    row.pop(f'num_{modality}s', None)
        return rows

    def row(self, rng: random.Random) -> Row:
        """Returns a random row: tensors of shape ``(1, width)``, and media."""
        if self.modalities:
            row = rng.choice(_pool(self.name))
            return {**row, 'labels': row['labels'].clone()}
        make_row = UNSHIFTED_ROWS.get(self.model_type, causal_row)
        return make_row(rng)

    def collate(self, rows: Sequence[Row], seed: int, *, side: str) -> Row:
        """Joins rows into a batch. In one of three batches the width is a multiple of 8."""
        multiple = 8 if seed % 3 == 2 else 1
        return join(rows, side=side, multiple=multiple, slots=self.slots)


# Rows.

MEDIA = ('pixel_values', 'pixel_values_videos', 'input_features')


def has_media(row: Row) -> bool:
    """Returns whether the row has an image, a video or audio."""
    return any(key in row for key in MEDIA)


def has_labels(row: Row) -> bool:
    """Returns whether the row has a label that counts. The first one is predicted by nothing."""
    next_labels = row['labels'][:, 1:]
    return bool((next_labels != -100).any())


@functools.cache
def _maker(model_type: str) -> Maker:
    """Returns the Maker for all subjects of a type. Rows do not depend on the weights of a model."""
    model = float32_model(tiny_config(model_type))
    return Maker(model_type, model)


@functools.cache
def _pool(name: str) -> list[Row]:
    """Returns the rows with media that a family chooses from."""
    subject = SUBJECTS[name]
    maker = _maker(subject.model_type)
    rng = random.Random(name)
    rows: list[Row] = []
    while len(rows) < POOL_SIZE:
        row = maker.random_row(subject.modalities, rng)
        if has_media(row) or subject.needs_media != 'row':
            rows.append(row)
    return rows


def _ids(rng: random.Random, length: int) -> torch.Tensor:
    ids = [rng.randint(FIRST_ID, LAST_ID) for _ in range(length)]
    return torch.tensor([ids])


def _length(rng: random.Random) -> int:
    """Returns a length: mostly short, sometimes long, seldom a single token."""
    length = 1 + int(rng.lognormvariate(1.9, 0.8))
    return min(length, LONGEST)


def causal_row(rng: random.Random) -> Row:
    """Returns a row with labels on its last tokens, on all tokens, or on none."""
    length = _length(rng)
    ids = _ids(rng, length)
    some_tokens = rng.randint(0, length)
    num_unlabelled = rng.choice((0, some_tokens))
    labels = ids.clone()
    labels[:, :num_unlabelled] = -100
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels}


def masked_row(rng: random.Random) -> Row:
    """Returns a row with a third of its tokens masked and labelled, sometimes also the first one."""
    length = _length(rng) + 1
    ids = _ids(rng, length)
    is_place_masked = [rng.random() < 1 / 3 for _ in range(length)]
    is_masked = torch.tensor([is_place_masked])
    return {
        'input_ids': ids.masked_fill(is_masked, MASK_ID),
        'attention_mask': torch.ones_like(ids),
        'token_type_ids': torch.zeros_like(ids),
        'labels': ids.masked_fill(~is_masked, -100),
    }


def seq2seq_row(rng: random.Random) -> Row:
    """Returns a row whose labels are not as wide as its ids."""
    ids = _ids(rng, _length(rng))
    labels = _ids(rng, rng.randint(1, 9))
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels}


UNSHIFTED_ROWS = {'bert': masked_row, 't5': seq2seq_row}

# The families.

WINDOW = {'sliding_window': 4}
"""Most rows are longer."""
GPT_NEO = {
    'window_size': 4,
    'attention_types': [[['global', 'local'], 1]],
    'max_position_embeddings': 256,  # as wide as a packed row: its causal mask is a buffer of this size
}
# InstructBLIP: a Q-Former turns each medium into query tokens. The forward needs a medium in every batch.
QUERIES: dict[str, Any] = {'settings': {'text_config': 'LlamaConfig'}, 'needs_media': 'batch'}


def text_subject(model_type: str, name: str = '', packs: bool = True, **settings: Any) -> Subject:
    """Returns a family of texts."""
    settings = {'vocab_size': LAST_ID + 1, **settings}
    return Subject(name=name or model_type, model_type=model_type, packs=packs, settings=settings)


def _media(name: str, *modalities: str, model_type: str = '', **options: Any) -> Subject:
    return Subject(name=name, model_type=model_type or name, modalities=modalities, **options)


_ALL = [
    text_subject('llama'),
    text_subject('gpt2'),
    text_subject('gpt_neo', **GPT_NEO),
    text_subject('opt'),
    text_subject('bloom', packs=False),
    text_subject('falcon'),
    text_subject('falcon', 'falcon_alibi', alibi=True),
    text_subject('mpt', packs=False),
    text_subject('mamba'),
    text_subject('mistral', **WINDOW),
    text_subject('gemma2', **WINDOW),
    text_subject('mixtral'),
    text_subject('qwen3_moe'),
    text_subject('bert', packs=False),
    text_subject('t5', packs=False, decoder_start_token_id=0),
    _media('llava', 'image'),
    _media('llava_next', 'image'),
    _media('llava_onevision', 'image', packs=False),
    _media('qwen2_vl', 'image'),
    _media('qwen2_5_vl', 'image'),
    _media('idefics3', 'image', slots=True),
    _media('smolvlm', 'image', slots=True),
    _media('paligemma', 'image'),
    _media('gemma3', 'image'),
    _media('internvl', 'image'),
    _media('qwen2_vl_video', 'image', 'video', model_type='qwen2_vl'),
    _media('llava_onevision_video', 'video', model_type='llava_onevision'),
    _media('instructblip_video', 'video', model_type='instructblipvideo', **QUERIES),
    _media('qwen3_vl', 'image', 'video'),
    _media('llava_next_video', 'video'),
    _media('mistral3', 'image'),
    _media('qwen2_audio', 'audio'),
    _media('blip2', 'image', model_type='blip-2', packs=False, needs_media='batch'),
    _media('instructblip', 'image', **QUERIES),
    _media('mllama', 'image', slots=True, packs=False, needs_media='row'),
    _media('mllama_mixed', 'image', model_type='mllama', slots=True, packs=False),
]
SUBJECTS: dict[str, Subject] = {subject.name: subject for subject in _ALL}
