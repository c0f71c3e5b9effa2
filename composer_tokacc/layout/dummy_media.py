# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The smallest row with one image, video or audio of each family, made of its config alone.

Every function is ``(config) -> dict | None``: ``input_ids`` of one row and its media, or None where the config does
not tell. Media are one shade of grey rather than zeros, which Idefics takes for padding and which leave the norms of an
encoder nothing to norm; frames and sizes are the least that the model takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from composer_tokacc.layout import placeholders
from composer_tokacc.layout.placeholders import token_ids

DummySample = dict[str, Any]
GREY = 0.5
AUDIO_FRAMES = 8
"""Two tokens: Qwen2-Audio takes a lone audio token for one that it must expand itself."""


def plain_id(config: Any) -> int:
    """The least id that the config does not name as a special token."""
    named = [*vars(config).items(), *vars(config.get_text_config()).items()]
    special = {value for key, value in named if key.endswith(('_token_id', '_token_index'))}
    return next(index for index in range(len(special) + 1) if index not in special)


def _ids(config: Any, unit: str, count: int, *, around: tuple[str, str] = ('', '')) -> torch.Tensor:
    """``(1, width)``: a plain token, the placeholders between the tokens that must stand around them, a plain token."""
    before, after = ([getattr(config, name)] if getattr(config, name, None) is not None else [] for name in around)
    plain = [plain_id(config)]
    return torch.tensor([[*plain, *before, *token_ids(config, unit)[:1] * count, *after, *plain]])


def _size(vision: Any) -> tuple[int, int]:
    size = vision.image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _grey(vision: Any, *leading: int, size: Sequence[int] | None = None) -> torch.Tensor:
    channels = getattr(vision, 'num_channels', 3)
    return torch.full((*leading, channels, *(size or _size(vision))), GREY)


def _patches(vision: Any) -> int:
    """Patches of an image of the encoder's own size."""
    side = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    return math.prod(length // side for length in _size(vision))


# Encoders with one size of image.


def llava_image(config: Any) -> DummySample | None:
    """CLIP, whose class token the default strategy drops, SigLIP, which has none, or Pixtral with any size."""
    vision = config.vision_config
    if vision.model_type == 'pixtral':
        return pixtral_image(config)
    if vision.model_type not in ('clip_vision_model', 'siglip_vision_model'):
        return None
    count = _patches(vision) + (vision.model_type == 'clip_vision_model') - _drops_first(config)
    return _image_row(config, count)


def _drops_first(config: Any) -> bool:
    """Whether the default strategy leaves out the first token of the encoder."""
    return getattr(config, 'vision_feature_select_strategy', 'default') == 'default'


def _image_row(config: Any, count: int) -> DummySample:
    """One image of the encoder's own size, and as many placeholders."""
    return {'input_ids': _ids(config, 'image', count), 'pixel_values': _grey(config.vision_config, 1)}


def pixtral_image(config: Any) -> DummySample:
    """Two merged patches: of an image of a single one Mistral3 loses the dimension of tokens."""
    side = config.vision_config.patch_size * getattr(config, 'spatial_merge_size', 1)
    return {
        'input_ids': _ids(config, 'image', 2),
        'pixel_values': _grey(config.vision_config, 1, size=(side, 2 * side)),
        'image_sizes': torch.tensor([[side, 2 * side]]),
    }


# Encoders that tile.


def llava_next_image(config: Any) -> DummySample:
    """The image of as few tiles and tokens as the config allows."""
    return _anyres_image(config, placeholders.anyres)


def llava_onevision_image(config: Any) -> DummySample:
    """As LLaVA-NeXT; it is the only image of its row."""
    return {**_anyres_image(config, placeholders.anyres_capped), 'batch_num_images': torch.tensor([1])}


def _anyres_image(config: Any, sizes: Any) -> DummySample:
    """A strip one patch high (or wide), which after the cut of its padding leaves a line or two of the tiles."""
    vision, tile = config.vision_config, config.vision_config.image_size
    height, width = min(config.image_grid_pinpoints, key=lambda size: (size[0] * size[1], size))
    strip = (vision.patch_size, width) if width >= height else (height, vision.patch_size)
    row = {'image_sizes': torch.tensor([strip])}
    height, width = placeholders.best_resolution(strip, config.image_grid_pinpoints)
    num_tiles = 1 + math.ceil(height / tile) * math.ceil(width / tile)
    (count,) = sizes(row, config, 1, 0)
    return {**row, 'input_ids': _ids(config, 'image', count), 'pixel_values': _grey(vision, 1, num_tiles)}


def llava_next_video(config: Any) -> DummySample:
    """One frame, pooled."""
    vision = config.vision_config
    count = (vision.image_size // vision.patch_size // config.spatial_pool_stride) ** 2
    return {'input_ids': _ids(config, 'video', count), 'pixel_values_videos': _grey(vision, 1, 1)}


def llava_onevision_video(config: Any) -> DummySample:
    """One frame, halved in each direction, and the token that ends a video."""
    vision = config.vision_config
    count = math.ceil(vision.image_size // vision.patch_size / 2) ** 2 + 1
    return {'input_ids': _ids(config, 'video', count), 'pixel_values_videos': _grey(vision, 1, 1)}


def video_llava_image(config: Any) -> DummySample:
    """CLIP, whose class token only the default strategy drops."""
    count = _patches(config.vision_config) + 1 - _drops_first(config)
    return {'input_ids': _ids(config, 'image', count), 'pixel_values_images': _grey(config.vision_config, 1)}


def video_llava_video(config: Any) -> DummySample:
    """One frame with its class token."""
    count = _patches(config.vision_config) + 1
    return {'input_ids': _ids(config, 'video', count), 'pixel_values_videos': _grey(config.vision_config, 1, 1)}


# Encoders with a grid of patches.


def qwen_image(config: Any) -> DummySample:
    """One token: a square of merged patches."""
    return _grid_row(config, 'image', 'pixel_values', 1)


def qwen_video(config: Any) -> DummySample:
    """One token of one pair of frames."""
    return _grid_row(config, 'video', 'pixel_values_videos', 2)


def _grid_row(config: Any, unit: str, key: str, token_type: int) -> DummySample:
    vision, merge = config.vision_config, config.vision_config.spatial_merge_size
    around = ('vision_start_token_id', 'vision_end_token_id')
    ids = _ids(config, unit, 1, around=around)
    values = getattr(vision, 'in_channels', 3) * vision.temporal_patch_size * vision.patch_size**2
    return {
        'input_ids': ids,
        'mm_token_type_ids': (ids == token_ids(config, unit)[0]).long() * token_type,
        key: torch.full((merge**2, values), GREY),
        f'{unit}_grid_thw': torch.tensor([[1, merge, merge]]),
    }


def glm4v_image(config: Any) -> DummySample:
    """As Qwen-VL, between tokens of its own."""
    return _glm_row(config, qwen_image(config), 'image')


def glm4v_video(config: Any) -> DummySample:
    """As Qwen-VL, but the frames are images between the tokens of a video."""
    return _glm_row(config, qwen_video(config), 'video')


def _glm_row(config: Any, row: DummySample, unit: str) -> DummySample:
    around = (f'{unit}_start_token_id', f'{unit}_end_token_id')
    ids = _ids(config, 'image', 1, around=around)
    types = (ids == token_ids(config, 'image')[0]).long() * int(row['mm_token_type_ids'].max())
    return {**row, 'input_ids': ids, 'mm_token_type_ids': types}


# Encoders with slots.


def idefics_image(config: Any) -> DummySample | None:
    """One token: a square of joined patches; None for Idefics2, which resamples them."""
    side, scale = config.vision_config.patch_size, getattr(config, 'scale_factor', None)
    return scale and {
        'input_ids': _ids(config, 'image', 1),
        'pixel_values': _grey(config.vision_config, 1, 1, size=(side * scale, side * scale)),
        'pixel_attention_mask': torch.ones(1, 1, side * scale, side * scale, dtype=torch.long),
    }


def mllama_image(config: Any) -> DummySample:
    """One tile of the first aspect ratio, which the placeholder and what follows it attend to."""
    vision, ids = config.vision_config, _ids(config, 'image', 1)
    tiles = vision.max_num_tiles
    pixels = _grey(vision, 1, 1, tiles)
    pixels[:, :, 1:] = 0
    is_first = torch.zeros(tiles, dtype=torch.long)
    is_first[0] = 1
    attends = (ids == token_ids(config, 'image')[0]).long().cumsum(dim=1)
    return {
        'input_ids': ids,
        'pixel_values': pixels,
        'aspect_ratio_ids': torch.ones(1, 1, dtype=torch.long),
        'aspect_ratio_mask': is_first.view(1, 1, tiles),
        'cross_attention_mask': attends[:, :, None, None] * is_first,
    }


# Query transformers.


def blip2_image(config: Any) -> DummySample | None:
    """As many placeholders as query tokens."""
    return _queried(config, 'image')


def instructblip_image(config: Any) -> DummySample | None:
    """As BLIP-2, with an instruction of one token."""
    return _instructed(config, _queried(config, 'image'))


def instructblip_video(config: Any) -> DummySample | None:
    """The query tokens of each of four frames: the processor writes them for as many, whatever the clip holds."""
    return _instructed(config, _queried(config, 'video', 4))


def _queried(config: Any, unit: str, *frames: int) -> DummySample | None:
    """None for checkpoints that have no placeholder."""
    if not token_ids(config, unit):
        return None
    return {
        'input_ids': _ids(config, unit, math.prod(frames) * config.num_query_tokens),
        'pixel_values': _grey(config.vision_config, 1, *frames),
    }


def _instructed(config: Any, row: DummySample | None) -> DummySample | None:
    instruction = torch.tensor([[plain_id(config.qformer_config)]])
    return row and {**row, 'qformer_input_ids': instruction, 'qformer_attention_mask': torch.ones_like(instruction)}


# Audio.


def qwen_audio(config: Any) -> DummySample:
    """Two tokens; the encoder takes frames up to its own length, the rest of them masked."""
    return _audio_row(config, 2 * config.audio_config.max_source_positions)


def omni_image(config: Any) -> DummySample:
    """As Qwen-VL, but the model finds its media by their ids."""
    return _without_types(qwen_image(config))


def omni_video(config: Any) -> DummySample:
    """As Qwen-VL, with the seconds that the positions of frames need."""
    return {**_without_types(qwen_video(config)), 'video_second_per_grid': torch.tensor([1.0])}


def _without_types(row: DummySample) -> DummySample:
    return {key: value for key, value in row.items() if key != 'mm_token_type_ids'}


def omni_audio(config: Any) -> DummySample:
    """Two tokens, no padding."""
    return _audio_row(config, AUDIO_FRAMES, around=('audio_start_token_id', 'audio_end_token_id'))


def _audio_row(config: Any, num_frames: int, *, around: tuple[str, str] = ('', '')) -> DummySample:
    mask = (torch.arange(num_frames) < AUDIO_FRAMES).long()[None]
    features = torch.full((1, config.audio_config.num_mel_bins, num_frames), GREY) * mask[:, None]
    row = {'input_features': features, 'feature_attention_mask': mask}
    (count,) = placeholders.audio_frames(row, config, 1, 0)
    return {**row, 'input_ids': _ids(config, 'audio', count, around=around)}
