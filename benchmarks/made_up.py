# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Made-up samples for a model that has no data yet: what its processor would return, as far as sizes go."""

from __future__ import annotations

from typing import Any

import torch

# A word that stands for any text; ids of special tokens lie at the ends of a vocabulary, seldom here.
_WORD_ID = 11


def made_up_sample(
    config: Any, num_text_tokens: int, *, num_images: int = 0, image_size: tuple[int, int] | None = None
) -> dict[str, Any]:
    """A sample of one row with white images, for text models, the LLaVA-1.5 family and Qwen2/2.5-VL.

    Args:
        config: Transformers config of the model.
        num_text_tokens: Tokens besides those of images.
        num_images: Images, all of one size.
        image_size: Height and width in pixels, where the family lets images differ; by default 448 x 448.

    Returns:
        ``input_ids``, ``attention_mask``, ``labels`` of shape ``(1, length)``, image entries, ``num_images``.

    Raises:
        ValueError: The family has another format of images. Take samples from a dataset then.
    """
    media, placeholders = {}, []
    if num_images:
        if config.model_type in ('llava', 'vipllava'):
            media, placeholders = _llava_images(config, num_images)
        elif config.model_type in ('qwen2_vl', 'qwen2_5_vl'):
            media, placeholders = _qwen_images(config, num_images, image_size or (448, 448))
        else:
            raise ValueError(
                f'`config.model_type` must be llava, vipllava, qwen2_vl or qwen2_5_vl to make up images, got: '
                f'{config.model_type}. Take samples of the dataset, as its processor returns them.'
            )
    ids = torch.tensor([[*placeholders, *[_WORD_ID] * num_text_tokens]])
    labels = ids.clone()
    labels[:, : len(placeholders)] = -100
    sample = {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels, **media}
    if config.model_type.startswith('qwen2'):
        sample['mm_token_type_ids'] = (ids == config.image_token_id).long()
    return {**sample, 'num_images': [num_images]}


def _llava_images(config: Any, num_images: int) -> tuple[dict[str, Any], list[int]]:
    side = config.vision_config.image_size
    num_tokens = (side // config.vision_config.patch_size) ** 2
    num_tokens += config.vision_feature_select_strategy == 'full'
    token_id = getattr(config, 'image_token_id', None)
    token_id = config.image_token_index if token_id is None else token_id
    return {'pixel_values': torch.ones(num_images, 3, side, side)}, [token_id] * (num_tokens * num_images)


def _qwen_images(config: Any, num_images: int, size: tuple[int, int]) -> tuple[dict[str, Any], list[int]]:
    vision = config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    height, width = (max(round(pixels / unit), 1) * vision.spatial_merge_size for pixels in size)
    values = getattr(vision, 'in_channels', 3) * vision.temporal_patch_size * vision.patch_size**2
    media = {
        'pixel_values': torch.ones(num_images * height * width, values),
        'image_grid_thw': torch.tensor([[1, height, width]] * num_images),
    }
    num_tokens = height * width // vision.spatial_merge_size**2
    image = [config.vision_start_token_id, *[config.image_token_id] * num_tokens, config.vision_end_token_id]
    return media, image * num_images
