# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Ids of placeholder tokens, and how many of them each image, video and audio has, computed as the models do it.

The text has placeholders at the positions at which the model puts the embeddings of an image, video or audio (an item).
The config of a model in ``families.py`` names one id of each modality, ``image_token_id``, and perhaps others that the
model does not replace: configs of Qwen2-VL have ``vision_token_id``. :func:`replaced_ids` returns only the first. For
other models nothing tells which ids are replaced, and it may be several: Higgs Audio has ``audio_delay_token_id``, too.
So ``found.py`` takes all ids, :func:`placeholder_ids`.
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
tokens that begin or end an item or a line of an image, the token of padding, or numbers that are no ids."""


@cache  # called for every key of every microbatch
def modality_of(name: Hashable) -> str | None:
    """Returns the modality that the name of a tensor or config entry tells, or None."""
    for modality, words in MODALITY_WORDS.items():
        # Keys of a batch need not be strings.
        if words.search(str(name)):
            return modality
    return None


def placeholder_ids(config: Any, modality: str) -> tuple[int, ...]:
    """Returns all ids that a config names as placeholders of a modality, each id once."""
    ids: dict[str, int] = {}  # by name
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
            name_of_image = name.replace('media', 'image')
            if modality_of(name_of_image) == modality:
                # An encoder's config may repeat the name, perhaps with a default. The first value is the model's own.
                ids.setdefault(name, value)
    return tuple(dict.fromkeys(ids.values()))


def all_placeholders(config: Any) -> list[int]:
    """Returns the ids that a config names as placeholders of any modality. An id may be in the list twice."""
    ids: list[int] = []
    for modality in MODALITY_WORDS:
        ids += placeholder_ids(config, modality)
        # placeholder_ids() does not find an id that the config computes as a property. replaced_ids() does.
        ids += replaced_ids(config, modality)
    return ids


def replaced_ids(config: Any, modality: str) -> tuple[int, ...]:
    """Returns the ids of the placeholders that the model replaces with the embeddings of a modality.

    If the config has an id of the usual name, such as ``image_token_id``, it is the only one. Otherwise the config does
    not tell which of :func:`placeholder_ids` are replaced, and all of them are returned.
    """
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


# Placeholders of each item. These functions are the `sizes` of `families.Media`. They return the number of placeholders
# of each item, or an empty list if the batch does not tell it. The batch has `num_items` items of the modality, and
# `num_tokens` placeholders in all. The config is None only if the batch marks its placeholders by `mm_token_type_ids`.


def equal(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """All items have one shape, so the model gives each item the same number of tokens."""
    if num_items == 0 or num_tokens % num_items:
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
    """Returns the number of placeholders of each item. The model merges a few patches into one token.

    ``grid`` holds frames, height and width of each item in patches, ``(items, 3)``.
    """
    patches = grid.prod(dim=1).tolist()
    if config is not None and hasattr(config, 'vision_config'):
        patches_per_token = config.vision_config.spatial_merge_size**2
    elif num_tokens and sum(patches) % num_tokens == 0:
        # The config does not tell. But all placeholders of the batch together stand for all its patches.
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
    """LLaVA: images of one shape. Pixtral has ``image_sizes``, and as many tokens as merged patches."""
    sizes = batch.get('image_sizes')
    if sizes is None:
        return equal(batch, config, num_items, num_tokens)
    # In pixels, as are the height and width of each image in `image_sizes`.
    merged_patch_side = config.vision_config.patch_size * getattr(config, 'spatial_merge_size', 1)
    grids = torch.as_tensor(sizes) // merged_patch_side
    return grids.prod(dim=-1).tolist()


def queries(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """BLIP: a fixed number of query tokens per image."""
    return [config.num_query_tokens] * num_items


def frame_queries(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """InstructBLIP-Video: a fixed number of query tokens per frame, and the same number of frames in all clips."""
    frames_per_item = batch['pixel_values'].shape[1]
    return [frames_per_item * config.num_query_tokens] * num_items


def audio_frames(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """Qwen-Audio: a convolution halves the number of real frames, and a pooling halves it again."""
    # Processors up to transformers 4.45 write one placeholder per audio, which the model replaces with all its tokens.
    if num_tokens == num_items:
        return [1] * num_items
    frames_per_item: list[int] = [batch['input_features'].shape[-1]] * num_items
    mask = batch.get('feature_attention_mask')
    if mask is not None:
        frames_per_item = mask.sum(dim=-1).tolist()
    tokens_per_item = []
    for num_frames in frames_per_item:
        after_convolution = (int(num_frames) - 1) // 2 + 1  # stride 2, kernel 3, padding 1
        after_pooling = (after_convolution - 2) // 2 + 1  # stride 2, kernel 2
        tokens_per_item.append(after_pooling)
    return tokens_per_item


def anyres(batch: Batch, config: Any, num_items: int, num_tokens: int) -> list[int]:
    """LLaVA-NeXT: the whole image, and its tiles without the padding, with a token at the end of each line.

    LLaVA-OneVision shrinks the tiles of a large image to the number of tokens that ``max_tiles`` tiles have. It cuts an
    image into tiles only if its row has no other image.
    """
    max_tiles = None  # LLaVA-NeXT does not shrink tiles
    aspect_ratio = getattr(config, 'vision_aspect_ratio', None)  # LLaVA-OneVision: such as 'anyres_max_9'
    if aspect_ratio is not None:
        max_tiles = int(aspect_ratio.removeprefix('anyres_max_'))
    images_per_row = [1] * num_items  # LLaVA-NeXT tiles every image as if it were alone in its row
    counts = batch.get('batch_num_images')
    if counts is not None:
        images_per_row = torch.as_tensor(counts).tolist()
    is_tiled: list[bool] = []  # for each image
    for count in images_per_row:
        is_tiled += [count == 1] * count
    if len(is_tiled) != num_items:
        return []
    tokens = []
    sizes = torch.as_tensor(batch['image_sizes']).tolist()
    for size, tiled in zip(sizes, is_tiled, strict=True):
        if tiled:
            tokens.append(_tokens_of_tiles(size, config, max_tiles))
        else:
            tokens_of_tile = _patches_per_side(config) ** 2
            tokens.append(tokens_of_tile + 1)  # one token ends the image
    return tokens


def _patches_per_side(config: Any) -> int:
    """Returns the number of patches along one side of a tile, which is a square."""
    return config.vision_config.image_size // config.vision_config.patch_size


def _tokens_of_tiles(
    size: Sequence[int],
    config: Any,
    max_tiles: int | None,
) -> int:
    """Returns the number of tokens of a tiled image, computed as in ``pack_image_features`` of Transformers.

    Args:
        size: Height and width of the image, in pixels.
        config: The model's config.
        max_tiles: The model shrinks the tiles to as many tokens as this number of tiles has. None: it does not.
    """
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

    side = _patches_per_side(config)
    tiles = get_anyres_image_grid_shape(size, config.image_grid_pinpoints, config.vision_config.image_size)
    patches = torch.empty(1, tiles[0] * side, tiles[1] * side, device='meta')  # only its shape is needed
    unpadded = unpad_image(patches, size)
    height, width = unpadded.shape[1:]
    if max_tiles is not None:
        most_tokens = max_tiles * side**2
        ratio = math.sqrt(height * width / most_tokens)
        if ratio > 1.1:  # Transformers' number: tiles that are only a little too large are not shrunk
            height = int(height // ratio)
            width = int(width // ratio)
    tokens_of_whole_image = side**2
    tokens_of_tiles = height * (width + 1)  # one token ends each line
    return tokens_of_whole_image + tokens_of_tiles
