# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A small LLaVA with random rows, and made-up samples for text models and LLaVA-1.5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

VOCABULARY = 512
IMAGE_TOKEN = 3
IMAGE_LENGTH = 4
IMAGE_SIDE = 16
# The id of the token that made-up texts repeat. Special tokens have other ids: the first or the last of a vocabulary.
WORD_ID = 11
Row = dict[str, Any]


def build_model(*, hidden_size: int = 512, num_layers: int = 4) -> LlavaForConditionalGeneration:
    """Returns a model with the same weights at every call."""
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 43 // 16,  # the ratio of Llama-7B
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        max_position_embeddings=4096,
        use_cache=False,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIDE,
        patch_size=8,
    )
    return LlavaForConditionalGeneration(llava_config(text, vision, IMAGE_TOKEN))


def llava_config(text: LlamaConfig, vision: CLIPVisionConfig, image_token: int) -> LlavaConfig:
    """Joins both configs. LLaVA reads the last vision layer here, so that every layer gets a gradient."""
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_token,
        image_seq_length=(vision.image_size // vision.patch_size) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy='default',
    )
    config.use_cache = False
    return config


def freeze_unused(model: LlavaForConditionalGeneration) -> None:
    """Freezes the last norm of the vision encoder. LLaVA does not read it, so DDP would wait for its gradient."""
    for name, parameter in model.named_parameters():
        if 'post_layernorm' in name:
            parameter.requires_grad_(False)


def make_rows(lengths: Sequence[int], seed: int, config: Any = None) -> list[Row]:
    """Returns batches of one row with random tokens. Every other row begins with an image, if it is long enough.

    Args:
        lengths: The number of tokens of each row, with its image tokens.
        seed: The seed of tokens and images.
        config: The config of the LLaVA that reads the rows. None: the small one.
    """
    side = IMAGE_SIDE
    vocabulary = VOCABULARY
    placeholder = IMAGE_TOKEN
    image_length = IMAGE_LENGTH
    if config is not None:
        side = config.vision_config.image_size
        vocabulary = config.text_config.vocab_size
        placeholder = image_token_of(config)
        image_length = (side // config.vision_config.patch_size) ** 2
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, length in enumerate(lengths):
        ids = torch.randint(4, vocabulary, (1, int(length)), generator=generator)
        # A placeholder that was drawn by chance would need an image.
        ids[ids == placeholder] = 4
        row: Row = {
            'input_ids': ids,
            'attention_mask': torch.ones_like(ids),
            'labels': ids.clone(),
            'num_images': [0],
        }
        if index % 2 == 0 and length > 2 * image_length:
            ids[:, :image_length] = placeholder
            row['labels'][:, : length // 2] = -100
            row['pixel_values'] = torch.randn(1, 3, side, side, generator=generator)
            row['num_images'] = [1]
        rows.append(row)
    return rows


def image_token_of(config: Any) -> int:
    """Returns the id of the image placeholder. Its key differs between versions of Transformers."""
    token = getattr(config, 'image_token_id', None)
    return config.image_token_index if token is None else token


def made_up_sample(config: Any, num_text_tokens: int, *, num_images: int = 0) -> Row:
    """Returns a batch of one row that begins with white images, for text models and LLaVA-1.5."""
    ids = [WORD_ID] * num_text_tokens
    row: Row = {}
    num_image_tokens = 0
    if num_images:
        vision = config.vision_config
        tokens_per_image = (vision.image_size // vision.patch_size) ** 2
        if config.vision_feature_select_strategy == 'full':
            tokens_per_image += 1  # the class token
        num_image_tokens = num_images * tokens_per_image
        ids = [image_token_of(config)] * num_image_tokens + ids
        row['pixel_values'] = torch.ones(num_images, 3, vision.image_size, vision.image_size)
    row['input_ids'] = torch.tensor([ids])
    row['attention_mask'] = torch.ones_like(row['input_ids'])
    row['labels'] = row['input_ids'].clone()
    row['labels'][:, :num_image_tokens] = -100
    row['num_images'] = [num_images]
    return row
