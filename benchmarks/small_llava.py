# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The model of the throughput benchmark, rows of given lengths for it, and made-up samples for models without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

VOCABULARY, IMAGE_TOKEN, IMAGE_LENGTH = 512, 3, 4
# A word that stands for any text; ids of special tokens lie at the ends of a vocabulary, seldom here.
_WORD_ID = 11
Row = dict[str, Any]


def build_model(*, hidden_size: int = 512, num_layers: int = 4) -> LlavaForConditionalGeneration:
    """The same weights every time."""
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden_size, intermediate_size=hidden_size * 43 // 16,
        num_hidden_layers=num_layers, num_attention_heads=hidden_size // 64, num_key_value_heads=hidden_size // 64,
        max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_seq_length=IMAGE_LENGTH,
        vision_feature_layer=-1, vision_feature_select_strategy='default',
    )  # fmt: skip
    config.use_cache = False
    return LlavaForConditionalGeneration(config)


def make_rows(lengths: Sequence[int], seed: int, config: Any = None) -> list[Row]:
    """One-row batches; every other row long enough for one begins with an image.

    Args:
        lengths: Tokens of each row, those of its image included.
        seed: Of all that is drawn.
        config: Of the LLaVA that the rows are for; the small one's by default.
    """
    side, vocabulary, placeholder, image_length = 16, VOCABULARY, IMAGE_TOKEN, IMAGE_LENGTH
    if config is not None:
        side, vocabulary = config.vision_config.image_size, config.text_config.vocab_size
        image_length = (side // config.vision_config.patch_size) ** 2
        placeholder = next(
            value
            for name in ('image_token_id', 'image_token_index')
            if (value := getattr(config, name, None)) is not None
        )
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, length in enumerate(lengths):
        ids = torch.randint(4, vocabulary, (1, int(length)), generator=generator)
        # A drawn placeholder would ask for an image that is not there.
        ids[ids == placeholder] = 4
        row: Row = {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': ids.clone(), 'num_images': [0]}
        if index % 2 == 0 and length > 2 * image_length:
            ids[:, :image_length] = placeholder
            row['labels'][:, : length // 2] = -100
            row['pixel_values'] = torch.randn(1, 3, side, side, generator=generator)
            row['num_images'] = [1]
        rows.append(row)
    return rows


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
