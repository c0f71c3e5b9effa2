# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Ids of placeholder tokens, and their number for each item in models that do not notice a wrong number.

The text has placeholders at the positions at which the model puts the embeddings of an image, video or audio (an item).
There are two sets of ids:

- :func:`named_ids`: all ids that the config names as placeholders.
- :func:`replaced_ids`: only those that the model replaces with embeddings. The config of Qwen2-VL names
  ``image_token_id`` and ``vision_token_id``, and the model replaces only the first.

The models of ``families.py`` replace one id of each modality. For other models nothing tells which ids are replaced,
and there may be several: Higgs Audio also replaces ``audio_delay_token_id``. For them all named ids are taken.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import torch

from composer_tokacc.batch import Batch

MODALITY_WORDS = {
    'video': re.compile('video|second_per_grid|frame'),
    'audio': re.compile('audio|speech|sound|chunk_|input_features|feature_attention|^input_values|^padding_mask'),
    'image': re.compile(
        'image|pixel|(?<![a-z])(patch|vision|tile)|visual|grid|crop|aspect_ratio|spatial_shapes|target_sizes'
    ),
}
"""Words in the names of tensors and of config entries, by modality. The first modality that fits counts, because names
of videos and audios also contain words of images, as `pixel_values_videos` does. Three words count only at the
beginning of a word, not in `dispatch`, `supervision` or `percentile`."""
_NO_PLACEHOLDER = re.compile(
    'start|end|begin|boi|eoi|boa|eoa|bos|eos|newline|break|row|col|sep|pad_token|base|num_|size|length'
)
"""Words in names of config entries that end in `_id` or `_index`, but do not name a placeholder. Such entries name
tokens that begin or end an item or a line of an image, the token of padding, or numbers that are not ids."""


@cache  # called for every key of every microbatch
def modality_of(name: Hashable) -> str | None:
    """Returns the modality that the name of a tensor or config entry tells, or None."""
    for modality, words in MODALITY_WORDS.items():
        # Keys of a batch need not be strings.
        if words.search(str(name)):
            return modality
    return None


def tensors_named_after(modality: str, batch: Batch) -> dict[str, torch.Tensor]:
    """Returns the tensors of a batch whose names tell this modality, by key."""
    tensors = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and modality_of(key) == modality:
            tensors[key] = value
    return tensors


def named_ids(config: Any, modality: str) -> tuple[int, ...]:
    """Returns all ids that a config names as placeholders of a modality, each id once."""
    id_by_name: dict[str, int] = {}
    vision_config = getattr(config, 'vision_config', None)
    audio_config = getattr(config, 'audio_config', None)
    for part in (config, vision_config, audio_config):
        values = dict(getattr(part, '__dict__', {}))
        # `__dict__` lacks aliases, such as `image_token_index` for `image_token_id`.
        for alias in getattr(part, 'attribute_map', ()):
            values[alias] = getattr(part, alias, None)
        for name, value in values.items():
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            is_id = name.endswith(('_id', '_index')) and not _NO_PLACEHOLDER.search(name)
            if not is_integer or not is_id:
                continue
            # Kimi-VL names the placeholder of images `media_placeholder_token_id`.
            if modality_of(name.replace('media', 'image')) == modality:
                # An encoder's config may repeat the name, perhaps with a default. The first value is the model's own.
                id_by_name.setdefault(name, value)
    return tuple(dict.fromkeys(id_by_name.values()))


def replaced_ids(config: Any, modality: str) -> tuple[int, ...]:
    """Returns the ids of the placeholders that the model replaces with the embeddings of a modality.

    If the config has an id of the usual name, such as ``image_token_id``, it is the only one. Otherwise the config does
    not tell which of the :func:`named_ids` are replaced, and all of them are returned.
    """
    for suffix in ('id', 'index'):  # older configs call it an index
        token_id = getattr(config, f'{modality}_token_{suffix}', None)
        if token_id is not None:
            return (token_id,)
    return named_ids(config, modality)


def all_placeholders(config: Any) -> list[int]:
    """Returns the ids that a config names as placeholders of any modality. An id may be in the list twice."""
    ids: list[int] = []
    for modality in MODALITY_WORDS:
        ids += named_ids(config, modality)
        # named_ids() does not find an id that the config computes as a property. replaced_ids() does.
        ids += replaced_ids(config, modality)
    return ids


def has_any_id(text: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Returns which positions of a text hold one of the ids, bool of the shape of the text."""
    has_id = torch.zeros_like(text, dtype=torch.bool)
    # There are few ids. For one id `torch.isin` takes four times as long.
    for token_id in ids:
        has_id |= text == token_id
    return has_id


# The next two functions return the number of placeholders of each item, for `families.Media.sizes`. They are called
# with the numbers of items and of placeholders of the modality in the batch. They are needed for models that do not
# notice a wrong number of placeholders.


def query_tokens(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """Returns the number of placeholders of each image or video of BLIP.

    It is the fixed number of query tokens for each image or frame. All videos have the same number of frames.
    """
    pixels = batch['pixel_values']
    frames_per_item = 1
    if pixels.dim() == 5:  # (videos, frames, channels, height, width)
        frames_per_item = pixels.shape[1]
    return [frames_per_item * config.num_query_tokens] * num_items


def audio_tokens(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """Returns the number of placeholders of each audio of Qwen-Audio and Qwen-Omni.

    A convolution halves the number of real frames, and a pooling halves it again.
    """
    # Processors up to transformers 4.45 write one placeholder per audio, which the model replaces with all its tokens.
    if num_tokens == num_items:
        return [1] * num_items
    mask = batch.get('feature_attention_mask')
    if mask is None:
        max_frames = batch['input_features'].shape[-1]
        mask = torch.ones(num_items, max_frames)
    frames_per_item = mask.sum(dim=-1).int().tolist()
    tokens_per_item = []
    for num_frames in frames_per_item:
        after_convolution = (num_frames - 1) // 2 + 1  # stride 2, kernel 3, padding 1
        after_pooling = (after_convolution - 2) // 2 + 1  # stride 2, kernel 2
        tokens_per_item.append(after_pooling)
    return tokens_per_item
