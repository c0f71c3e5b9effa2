# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Ids of placeholder tokens, and how many each image, video and audio fills, computed as the models compute it.

Every function that an entry names is ``(batch, config, num_items, num_tokens) -> list[int]``: the placeholders of each
item, given that the batch holds ``num_items`` items and ``num_tokens`` placeholders in all; an empty list where the
batch does not tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from composer_tokacc.batch import Batch

MODALITY_WORDS = {
    'video': re.compile('video|second_per_grid|frame'),
    'audio': re.compile('audio|speech|sound|chunk_|input_features|feature_attention|^input_values|^padding_mask'),
    'image': re.compile('image|pixel|patch|vision|visual|grid|tile|crop|aspect_ratio|spatial_shapes|target_sizes'),
}
"""Words in the names of tensors and of config entries, by modality; the first that fits."""
_EDGES = re.compile('start|end|begin|boi|eoi|boa|eoa|bos|eos|newline|break|row|col|sep|pad_token|base|num_|size|length')


@cache  # asked of every key of every microbatch
def modality_of(name: str) -> str | None:
    """Returns the modality that a name speaks of."""
    return next((modality for modality, words in MODALITY_WORDS.items() if words.search(str(name))), None)


def placeholder_ids(config: Any, modality: str) -> tuple[int, ...]:
    """Returns the ids that a config names as placeholders of a modality, those of edges and of lines left out."""
    parts = [config, getattr(config, 'vision_config', None), getattr(config, 'audio_config', None)]
    found = {}
    for part in parts:
        aliases = {alias: getattr(part, alias, None) for alias in getattr(part, 'attribute_map', ())}
        for name, value in {**getattr(part, '__dict__', {}), **aliases}.items():
            is_id = isinstance(value, int) and not isinstance(value, bool) and re.search('_(id|index)$', name)
            if is_id and not _EDGES.search(name) and modality_of(name.replace('media', 'image')) == modality:
                found[name] = value
    return tuple(dict.fromkeys(found.values()))


def all_placeholders(config: Any) -> list[int]:
    """Returns what a config names as placeholders of any modality."""
    return [
        one for modality in MODALITY_WORDS for one in (*placeholder_ids(config, modality), *token_ids(config, modality))
    ]


def token_ids(config: Any, modality: str) -> tuple[int, ...]:
    """Returns the id that a config gives a modality's placeholder by name (once an index), else all by other names."""
    named = (getattr(config, f'{modality}_token_{word}', None) for word in ('id', 'index'))
    found = next((one for one in named if one is not None), None)
    return placeholder_ids(config, modality) if found is None else (found,)


def stand_at(text: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Returns where the ids stand in a text, bool of its shape."""
    found = torch.zeros_like(text, dtype=torch.bool)
    for one in ids:  # a few; `torch.isin` takes four times as long for one
        found |= text == one
    return found


def equal(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """Items of one tensor with one shape: the model itself demands ``num_items x (tokens of that shape)`` in all."""
    return [num_tokens // num_items] * num_items if num_tokens % num_items == 0 else []


def image_grid(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """Qwen-VL: as many tokens as merged patches."""
    return _merged(batch['image_grid_thw'], config, num_tokens)


def video_grid(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """Qwen-VL: as many tokens as merged patches of all frames, whatever text stands between the frames."""
    return _merged(batch['video_grid_thw'], config, num_tokens)


def _merged(grid: torch.Tensor, config: Any, num_tokens: int) -> list[int]:
    patches = grid.prod(dim=1).tolist()
    if config is not None and hasattr(config, 'vision_config'):
        square = config.vision_config.spatial_merge_size**2
    else:  # the model demands that all tokens be all patches over the merged square
        square = sum(patches) // num_tokens if num_tokens else 0
    return [] if not square or any(count % square for count in patches) else [count // square for count in patches]


def patch_counts(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """LLaVA and its kin: equal images, but where they bring their sizes (Pixtral) as many tokens as merged patches."""
    sizes = batch.get('image_sizes')
    if sizes is None:
        return equal(batch, config, num_items, num_tokens)
    if config is None:
        return []
    side = config.vision_config.patch_size * getattr(config, 'spatial_merge_size', 1)
    return (torch.as_tensor(sizes) // side).prod(dim=-1).tolist()


def queries(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """BLIP: a fixed number of query tokens an image."""
    return [] if config is None else [config.num_query_tokens] * num_items


def frame_queries(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """InstructBLIP-Video: a fixed number of query tokens a frame; all clips of a batch have as many frames."""
    return [batch['pixel_values'].shape[1] * size for size in queries(batch, config, num_items, num_tokens)]


def audio_frames(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """Qwen-Audio: two strided convolutions and a pooling over the real frames."""
    if num_tokens == num_items:  # one token each, which the model itself expands (processors up to transformers 4.45)
        return [1] * num_items
    mask = batch.get('feature_attention_mask')
    lengths = [batch['input_features'].shape[-1]] * num_items if mask is None else mask.sum(dim=-1).tolist()
    return [((int(length) - 1) // 2 + 1 - 2) // 2 + 1 for length in lengths]


def anyres(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """LLaVA-NeXT: the whole image, and its tiles without the padding, with a token at the end of each line."""
    return [] if config is None else [_tiled(size, config) for size in torch.as_tensor(batch['image_sizes']).tolist()]


def anyres_capped(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """LLaVA-OneVision: as LLaVA-NeXT up to a number of tiles; an image beside others in its row is not tiled."""
    if config is None:
        return []
    cap = int(getattr(config, 'vision_aspect_ratio', 'anyres_max_9').removeprefix('anyres_max_'))
    counts = batch.get('batch_num_images')
    counts = [1] * num_items if counts is None else torch.as_tensor(counts).tolist()
    is_alone = [count == 1 for count in counts for _ in range(count)]
    if len(is_alone) != num_items:
        return []
    sizes, whole = torch.as_tensor(batch['image_sizes']).tolist(), _side(config) ** 2
    return [_tiled(size, config, cap=cap) if alone else whole + 1 for size, alone in zip(sizes, is_alone, strict=True)]


def _side(config: Any) -> int:
    """Returns patches along one side of a tile."""
    return config.vision_config.image_size // config.vision_config.patch_size


def _tiled(size: Sequence[int], config: Any, *, cap: int | None = None) -> int:
    """Returns tokens of one image, as ``pack_image_features`` of the models makes them, by their own functions."""
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

    side = _side(config)
    tiles = get_anyres_image_grid_shape(size, config.image_grid_pinpoints, config.vision_config.image_size)
    patches = torch.empty(1, tiles[0] * side, tiles[1] * side, device='meta')
    height, width = unpad_image(patches, size).shape[1:]
    if cap is not None:
        ratio = math.sqrt(height * width / (cap * side**2))
        if ratio > 1.1:
            height, width = int(height // ratio), int(width // ratio)
    return side**2 + height * (width + 1)
