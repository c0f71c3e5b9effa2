# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Made-up samples for a model that has no data yet: what its processor would return, as far as sizes go."""

from __future__ import annotations

from typing import Any

import torch

# A word that stands for any text; ids of special tokens lie at the ends of a vocabulary, seldom here.
_WORD_ID = 11


def made_up_sample(config: Any, num_text_tokens: int, *, num_images: int = 0) -> dict[str, Any]:
    """A sample of one row with white images, for text models and LLaVA-1.5.

    Args:
        config: Transformers config of the model.
        num_text_tokens: Tokens besides those of images.
        num_images: Images, which come first.
    """
    media, placeholders = {}, []
    if num_images:
        side, patch = config.vision_config.image_size, config.vision_config.patch_size
        per_image = (side // patch) ** 2 + (config.vision_feature_select_strategy == 'full')
        token_id = getattr(config, 'image_token_id', None)
        placeholders = [config.image_token_index if token_id is None else token_id] * (per_image * num_images)
        media = {'pixel_values': torch.ones(num_images, 3, side, side)}
    ids = torch.tensor([[*placeholders, *[_WORD_ID] * num_text_tokens]])
    labels = ids.clone()
    labels[:, : len(placeholders)] = -100
    return {
        'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels, **media, 'num_images': [num_images]
    }  # fmt: skip
