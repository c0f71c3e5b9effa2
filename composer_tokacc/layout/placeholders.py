# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Ids of placeholder tokens, and how many of them each image, video and audio has, computed as the models do it.

The functions from :func:`equal` on are the ``sizes`` of :class:`.Media`:
``(batch, config, num_items, num_tokens) -> list[int]``. They return the number of placeholders of each item. The batch
has ``num_items`` items and ``num_tokens`` placeholders in all. An empty list means that the batch does not tell. The
config is only None if ``mm_token_type_ids`` tell the placeholders.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import torch

from composer_tokacc.batch import Batch

MODALITY_WORDS = {
    'video': re.compile('video|second_per_grid|frame'),
    'audio': re.compile('audio|speech|sound|chunk_|input_features|feature_attention|^input_values|^padding_mask'),
    'image': re.compile('image|pixel|patch|vision|visual|grid|tile|crop|aspect_ratio|spatial_shapes|target_sizes'),
}
"""Words in the names of tensors and of config entries, by modality. The first modality that fits counts."""
ID_SUFFIX = re.compile('_(id|index)$')
_NO_PLACEHOLDER = re.compile(
    'start|end|begin|boi|eoi|boa|eoa|bos|eos|newline|break|row|col|sep|pad_token|base|num_|size|length'
)
"""Words in the names of ids that are no placeholders: of tokens at the edges of an item or between the lines of an
image, of padding, and of numbers that are no ids of tokens."""


@cache  # called for every key of every microbatch
def modality_of(name: Hashable) -> str | None:
    """Returns the modality that a name speaks of. Keys of a batch may be other values than strings."""
    for modality, words in MODALITY_WORDS.items():
        if words.search(str(name)):
            return modality
    return None


def placeholder_ids(config: Any, modality: str) -> tuple[int, ...]:
    """Returns all ids that a config names as placeholders of a modality, without ids of edges and lines."""
    ids: dict[str, int] = {}
    vision_config = getattr(config, 'vision_config', None)
    audio_config = getattr(config, 'audio_config', None)
    for part in (config, vision_config, audio_config):
        values = dict(getattr(part, '__dict__', {}))
        # `__dict__` lacks aliases, such as `image_token_index` for `image_token_id`.
        for alias in getattr(part, 'attribute_map', ()):
            values[alias] = getattr(part, alias, None)
        for name, value in values.items():
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            is_id = ID_SUFFIX.search(name) and not _NO_PLACEHOLDER.search(name)
            if not is_integer or not is_id:
                continue
            # Kimi-VL calls it `media_placeholder_token_id`.
            usual_name = name.replace('media', 'image')
            if modality_of(usual_name) == modality:
                # An encoder's config may repeat the name, perhaps with its default. The first value is the model's own.
                ids.setdefault(name, value)
    return tuple(dict.fromkeys(ids.values()))  # each id once


def all_placeholders(config: Any) -> list[int]:
    """Returns the ids that a config names as placeholders of any modality. An id may be in the list twice."""
    ids: list[int] = []
    for modality in MODALITY_WORDS:
        ids += placeholder_ids(config, modality)
        # A config may compute the id with the usual name. Then it is not in its `__dict__`.
        ids += token_ids(config, modality)
    return ids


def token_ids(config: Any, modality: str) -> tuple[int, ...]:
    """Returns the id with the usual name, ``image_token_id``. If there is none, all ids of :func:`placeholder_ids`."""
    for suffix in ('id', 'index'):  # older configs call it an index
        token_id = getattr(config, f'{modality}_token_{suffix}', None)
        if token_id is not None:
            return (token_id,)
    return placeholder_ids(config, modality)


def has_any_id(text: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Returns which positions of a text hold one of the ids, bool of the shape of the text."""
    has_id = torch.zeros_like(text, dtype=torch.bool)
    # There are few ids. For one id `torch.isin` takes four times as long.
    for token_id in ids:
        has_id |= text == token_id
    return has_id


def equal(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """All items have one shape, so the model gives each item the same number of tokens."""
    if num_items == 0:
        return []
    if num_tokens % num_items:
        return []
    return [num_tokens // num_items] * num_items


def image_grid(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """Qwen-VL: as many tokens as merged patches."""
    return _tokens_of_grid(batch['image_grid_thw'], config, num_tokens)


def video_grid(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """Qwen-VL: as many tokens as merged patches of all frames. Text between the frames does not count."""
    return _tokens_of_grid(batch['video_grid_thw'], config, num_tokens)


def _tokens_of_grid(
    grid: torch.Tensor,
    config: Any,
    num_tokens: int,
) -> list[int]:
    """Returns the placeholders of each item of a grid. The model merges a few patches into one token."""
    patches = grid.prod(dim=1).tolist()
    if config is not None and hasattr(config, 'vision_config'):
        patches_per_token = config.vision_config.spatial_merge_size**2
    elif num_tokens and sum(patches) % num_tokens == 0:
        # The model requires that all tokens together stand for all patches.
        patches_per_token = sum(patches) // num_tokens
    else:
        return []
    if patches_per_token == 0:
        return []
    tokens = []
    for count in patches:
        if count % patches_per_token:
            return []
        tokens.append(count // patches_per_token)
    return tokens


def patch_counts(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """LLaVA: images of one shape; with ``image_sizes`` (Pixtral) as many tokens as merged patches."""
    sizes = batch.get('image_sizes')
    if sizes is None:
        return equal(batch, config, num_items, num_tokens)
    side = config.vision_config.patch_size * getattr(config, 'spatial_merge_size', 1)
    grids = torch.as_tensor(sizes) // side
    return grids.prod(dim=-1).tolist()


def queries(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """BLIP: a fixed number of query tokens per image."""
    return [config.num_query_tokens] * num_items


def frame_queries(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """InstructBLIP-Video: a fixed number of query tokens per frame, and the same number of frames in all clips."""
    queries_per_frame = queries(batch, config, num_items, num_tokens)
    return [batch['pixel_values'].shape[1] * count for count in queries_per_frame]


def audio_frames(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """Qwen-Audio: convolutions that halve the number of real frames, and a pooling that halves it again."""
    # Processors up to transformers 4.45 write one token per audio, and the model expands it.
    if num_tokens == num_items:
        return [1] * num_items
    frames_per_item: list[int] = [batch['input_features'].shape[-1]] * num_items
    mask = batch.get('feature_attention_mask')
    if mask is not None:
        frames_per_item = mask.sum(dim=-1).tolist()
    tokens_per_item = []
    for num_frames in frames_per_item:
        after_convolutions = (int(num_frames) - 1) // 2 + 1
        tokens_per_item.append((after_convolutions - 2) // 2 + 1)
    return tokens_per_item


def anyres(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """LLaVA-NeXT: the whole image, and its tiles without the padding, with a token at the end of each line.

    LLaVA-OneVision shrinks all tiles together to the size of a largest number of tiles. It cuts an image into tiles
    only if its row has no other image.
    """
    max_tiles = None
    aspect_ratio = getattr(config, 'vision_aspect_ratio', None)  # such as 'anyres_max_9'
    if aspect_ratio is not None:
        max_tiles = int(aspect_ratio.removeprefix('anyres_max_'))
    images_per_row = [1] * num_items
    counts = batch.get('batch_num_images')
    if counts is not None:
        images_per_row = torch.as_tensor(counts).tolist()
    is_tiled: list[bool] = []
    for count in images_per_row:
        is_tiled += [count == 1] * count
    if len(is_tiled) != num_items:
        return []
    tokens = []
    sizes = torch.as_tensor(batch['image_sizes']).tolist()
    for size, tiled in zip(sizes, is_tiled, strict=True):
        if tiled:
            tokens.append(_tokens_of_tiles(size, config, max_tiles=max_tiles))
        else:
            tokens.append(_side(config) ** 2 + 1)  # one token ends the image
    return tokens


def _side(config: Any) -> int:
    """Returns the number of patches along one side of a tile."""
    return config.vision_config.image_size // config.vision_config.patch_size


def _tokens_of_tiles(
    size: Sequence[int],
    config: Any,
    *,
    max_tiles: int | None = None,
) -> int:
    """Returns the tokens of one tiled image, computed as in ``pack_image_features``, with the models' own functions."""
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

    side = _side(config)
    tiles = get_anyres_image_grid_shape(size, config.image_grid_pinpoints, config.vision_config.image_size)
    patches = torch.empty(1, tiles[0] * side, tiles[1] * side, device='meta')  # only its shape is needed
    height, width = unpad_image(patches, size).shape[1:]
    if max_tiles is not None:
        most_tokens = max_tiles * side**2
        ratio = math.sqrt(height * width / most_tokens)
        if ratio > 1.1:  # the threshold of the model
            height = int(height // ratio)
            width = int(width // ratio)
    tokens_of_whole_image = side**2
    tokens_of_tiles = height * (width + 1)  # one token ends each line
    return tokens_of_whole_image + tokens_of_tiles
