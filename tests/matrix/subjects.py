# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The families of the matrix: tiny models of ``tests/model_types``, and random batches like those of a loader."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from composer.models import HuggingFaceModel

from tests.matrix.collator import Row, join
from tests.model_types.rows import Maker
from tests.model_types.tiny import set_large_weights, tiny_config

__all__ = ['SUBJECTS', 'Subject', 'text_subject']

LARGE_STD = 0.15
FIRST_LABELLED = 3
"""Batches whose seed has this remainder by 4 also have labels of first tokens, as in pretraining. With padding on the
left a pad predicts such a label."""
FIRST_ID, LAST_ID = 4, 63
"""Ids of words. Smaller ids are pad, beginning, end and mask."""
LONGEST = 24
POOL_SIZE = 24
"""Number of rows with media to choose from. They are made once, because processors are slower than the models."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A family.

    Args:
        name: Its name in test ids.
        model_type: The model type of its config.
        class_name: The class of its model.
        settings: Entries of the config by path.
        modalities: Modalities of the media in its rows.
        slots: Whether images have a slot dimension (Idefics3, Mllama).
        packs: Whether the model keeps the documents of a packed row apart, with transformers 5.
        needs_media: Whether the model needs a medium in every ``'row'`` or in every ``'batch'``; empty: in neither.
    """

    name: str
    model_type: str
    class_name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    modalities: Sequence[str] = ()
    slots: bool = False
    packs: bool = True
    needs_media: str = ''

    def config(self) -> Any:
        """Returns a new config, without dropout and without a cache."""
        config = tiny_config(self.model_type, self.settings)
        config.use_cache = False
        config.get_text_config().use_cache = False
        return config

    def model(self, init: str) -> HuggingFaceModel:
        """Returns a model with the initial weights of Hugging Face (``'fresh'``), or with larger ones (``'large'``).

        With fresh weights, leaking attention hardly changes the loss of a model of this size. Large weights show it.
        """
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = getattr(transformers, self.class_name)(self.config())
            if init == 'large':
                set_large_weights(model, LARGE_STD)
        return HuggingFaceModel(model.float().train(), shift_labels=True, use_logits=True)

    def batch(self, seed: int, *, side: str) -> Row:
        """Returns a random batch, as a loader would make it."""
        return self.collate(self.rows(seed), seed, side=side)

    def rows(self, seed: int) -> list[Row]:
        """Returns the rows of a random batch. At least one has a label that counts."""
        rng = random.Random(f'{self.name} {seed}')
        rows = [self.row(rng) for _ in range(rng.randint(5, 8))]
        while self.needs_media and not any(map(has_media, rows)):
            rows[0] = self.row(rng)
        if seed % 4 != FIRST_LABELLED and not self.modalities and self.model_type not in UNSHIFTED_ROWS:
            for row in rows:
                row['labels'][:, 0] = -100
        if all((row['labels'][:, 1:] == -100).all() for row in rows):
            longest_row = max(rows, key=lambda row: row['input_ids'].shape[1])
            longest_row['labels'][:, -1] = longest_row['input_ids'][:, -1]
        if seed % 2:
            # Without the numbers of media, so that the package must count placeholders.
            rows = [without_numbers(row) for row in rows]
        return rows

    def row(self, rng: random.Random) -> Row:
        """Returns a random row: tensors of shape ``(1, width)``, and media."""
        if self.modalities:
            row = rng.choice(_pool(self.name))
            return {**row, 'labels': row['labels'].clone()}
        return UNSHIFTED_ROWS.get(self.model_type, causal_row)(rng)

    def collate(self, rows: Sequence[Row], seed: int, *, side: str) -> Row:
        """Joins rows into a batch. In one of three batches the width is a multiple of 8."""
        multiple = 8 if seed % 3 == 2 else 1
        return join(rows, side=side, multiple=multiple, slots=self.slots)


# Rows.

MEDIA = ('pixel_values', 'pixel_values_videos', 'input_features')


def without_numbers(row: Row) -> Row:
    return {key: value for key, value in row.items() if not key.startswith('num_')}


def has_media(row: Row) -> bool:
    """Whether the row has an image, a video or a sound."""
    return any(key in row for key in MEDIA)


@functools.cache
def _maker(model_type: str, class_name: str) -> Maker:
    """Returns the Maker for all subjects of a type. Rows do not depend on the weights of a model."""
    with torch.random.fork_rng():
        model = getattr(transformers, class_name)(tiny_config(model_type))
    return Maker(model_type, model)


@functools.cache
def _pool(name: str) -> list[Row]:
    subject = SUBJECTS[name]
    maker, rng = _maker(subject.model_type, subject.class_name), random.Random(name)
    rows: list[Row] = []
    while len(rows) < POOL_SIZE:
        row = maker.random_row(subject.modalities, rng)
        if has_media(row) or subject.needs_media != 'row':
            rows.append(row)
    return rows


def _ids(rng: random.Random, length: int) -> torch.Tensor:
    return torch.tensor([[rng.randint(FIRST_ID, LAST_ID) for _ in range(length)]])


def _length(rng: random.Random) -> int:
    """Mostly short, some long, now and then a single token."""
    return min(1 + int(rng.lognormvariate(1.9, 0.8)), LONGEST)


def causal_row(rng: random.Random) -> Row:
    """Labels on a suffix, on all tokens, or on none."""
    ids = _ids(rng, _length(rng))
    labels = ids.clone()
    labels[:, : rng.choice((0, rng.randint(0, ids.shape[1])))] = -100
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels}


def masked_row(rng: random.Random) -> Row:
    """A third of the tokens masked and labelled, column 0 among them now and then."""
    ids = _ids(rng, _length(rng) + 1)
    masked = torch.tensor([[rng.random() < 1 / 3 for _ in range(ids.shape[1])]])
    row = {'input_ids': ids.masked_fill(masked, 3), 'attention_mask': torch.ones_like(ids)}
    return {**row, 'token_type_ids': torch.zeros_like(ids), 'labels': ids.masked_fill(~masked, -100)}


def seq2seq_row(rng: random.Random) -> Row:
    """Labels of a width of their own."""
    ids = _ids(rng, _length(rng))
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': _ids(rng, rng.randint(1, 9))}


UNSHIFTED_ROWS = {'bert': masked_row, 't5': seq2seq_row}

# The families.

WINDOW = {'sliding_window': 4}
"""Most rows are longer."""
GPT_NEO = {
    'window_size': 4,
    'attention_types': [[['global', 'local'], 1]],
    'max_position_embeddings': 256,  # as wide as a packed row: its causal mask is a buffer of this size
}
QUERIES: dict[str, Any] = {'settings': {'text_config': 'LlamaConfig'}, 'needs_media': 'batch'}


def text_subject(model_type: str, class_name: str, name: str = '', packs: bool = True, **settings: Any) -> Subject:
    """A family of texts."""
    settings = {'vocab_size': LAST_ID + 1, **settings}
    return Subject(
        name=name or model_type, model_type=model_type, class_name=class_name, packs=packs, settings=settings
    )


def _media(name: str, prefix: str, *modalities: str, model_type: str = '', **options: Any) -> Subject:
    return Subject(
        name=name,
        model_type=model_type or name,
        class_name=f'{prefix}ForConditionalGeneration',
        modalities=modalities,
        **options,
    )


_ALL = [
    text_subject('llama', 'LlamaForCausalLM'),
    text_subject('gpt2', 'GPT2LMHeadModel'),
    text_subject('gpt_neo', 'GPTNeoForCausalLM', **GPT_NEO),
    text_subject('opt', 'OPTForCausalLM'),
    text_subject('bloom', 'BloomForCausalLM', packs=False),
    text_subject('falcon', 'FalconForCausalLM'),
    text_subject('falcon', 'FalconForCausalLM', 'falcon_alibi', alibi=True),
    text_subject('mpt', 'MptForCausalLM', packs=False),
    text_subject('mamba', 'MambaForCausalLM'),
    text_subject('mistral', 'MistralForCausalLM', **WINDOW),
    text_subject('gemma2', 'Gemma2ForCausalLM', **WINDOW),
    text_subject('mixtral', 'MixtralForCausalLM'),
    text_subject('qwen3_moe', 'Qwen3MoeForCausalLM'),
    text_subject('bert', 'BertForMaskedLM', packs=False),
    text_subject('t5', 'T5ForConditionalGeneration', packs=False, decoder_start_token_id=0),
    _media('llava', 'Llava', 'image'),
    _media('llava_next', 'LlavaNext', 'image'),
    _media('llava_onevision', 'LlavaOnevision', 'image', packs=False),
    _media('qwen2_vl', 'Qwen2VL', 'image'),
    _media('qwen2_5_vl', 'Qwen2_5_VL', 'image'),
    _media('idefics3', 'Idefics3', 'image', slots=True),
    _media('smolvlm', 'SmolVLM', 'image', slots=True),
    _media('paligemma', 'PaliGemma', 'image'),
    _media('gemma3', 'Gemma3', 'image'),
    _media('internvl', 'InternVL', 'image'),
    _media('qwen2_vl_video', 'Qwen2VL', 'image', 'video', model_type='qwen2_vl'),
    _media('llava_onevision_video', 'LlavaOnevision', 'video', model_type='llava_onevision'),
    _media('instructblip_video', 'InstructBlipVideo', 'video', model_type='instructblipvideo', **QUERIES),
    _media('qwen3_vl', 'Qwen3VL', 'image', 'video'),
    _media('llava_next_video', 'LlavaNextVideo', 'video'),
    _media('mistral3', 'Mistral3', 'image'),
    _media('qwen2_audio', 'Qwen2Audio', 'audio'),
    _media('blip2', 'Blip2', 'image', model_type='blip-2', packs=False, needs_media='batch'),
    _media('instructblip', 'InstructBlip', 'image', **QUERIES),
    _media('mllama', 'Mllama', 'image', slots=True, packs=False, needs_media='row'),
    _media('mllama_mixed', 'Mllama', 'image', model_type='mllama', slots=True, packs=False),
]
SUBJECTS: dict[str, Subject] = {subject.name: subject for subject in _ALL}
