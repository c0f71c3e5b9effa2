# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Builds the models of the benchmarks, small ones and ones of known sizes, and random rows and samples for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.record import Row
from composer_tokacc.batch import BatchDict

VOCABULARY = 512
IMAGE_TOKEN = 3
# The small LLaVA makes 2 x 2 tokens of an image of 16 x 16 pixels.
IMAGE_LENGTH = 4
IMAGE_SIDE = 16
# The id of the token that made-up texts repeat. Special tokens have other ids: the first or the last of a vocabulary.
WORD_ID = 11
# Text models of SmolVLM-256M-Instruct and Qwen2.5-VL-3B-Instruct.
SMOLVLM_TEXT: Row = {
    'vocab_size': 49_280,
    'hidden_size': 576,
    'intermediate_size': 1536,
    'num_hidden_layers': 30,
    'num_attention_heads': 9,
    'num_key_value_heads': 3,
}
QWEN_TEXT: Row = {
    'vocab_size': 151_936,
    'hidden_size': 2048,
    'intermediate_size': 11_008,
    'num_hidden_layers': 36,
    'num_attention_heads': 16,
    'num_key_value_heads': 2,
}


def smolvlm_config() -> transformers.SmolVLMConfig:
    """Returns the config of SmolVLM-256M-Instruct."""
    vision = {
        'hidden_size': 768,
        'intermediate_size': 3072,
        'num_hidden_layers': 12,
        'num_attention_heads': 12,
        'image_size': 512,
        'patch_size': 16,
    }
    text = {'model_type': 'llama', **SMOLVLM_TEXT}
    return transformers.SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=4)


def qwen_config() -> transformers.Qwen2_5_VLConfig:
    """Returns the config of Qwen2.5-VL-3B-Instruct. All other sizes are the defaults of Transformers."""
    text = {
        **QWEN_TEXT,
        'tie_word_embeddings': True,
        'use_cache': False,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6, 'mrope_section': [16, 24, 24]},
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config={'hidden_size': 1280, 'out_hidden_size': 2048},
        tie_word_embeddings=True,
        image_token_id=151_655,
        video_token_id=151_656,
        vision_start_token_id=151_652,
        vision_end_token_id=151_653,
    )


def text_config(vocabulary: int, hidden_size: int, num_layers: int, **sizes: Any) -> LlamaConfig:
    """Returns a Llama config. By default it has heads of 64, and an inner size in the same ratio as in Llama-7B."""
    defaults = {
        'intermediate_size': hidden_size * 43 // 16,
        'num_attention_heads': hidden_size // 64,
        'max_position_embeddings': 4096,
        'use_cache': False,
    }
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        **(defaults | sizes),
    )


def llava_config(text: LlamaConfig, vision: CLIPVisionConfig) -> LlavaConfig:
    """Returns a LLaVA config of both. LLaVA reads the last vision layer here, so that every layer gets a gradient."""
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        image_seq_length=patches_of(vision),
        vision_feature_layer=-1,
        vision_feature_select_strategy='default',
    )
    config.use_cache = False
    return config


def patches_of(vision: Any) -> int:
    """Returns the number of patches of an image. Each becomes one image token."""
    return (vision.image_size // vision.patch_size) ** 2


def small_llava_config(*, hidden_size: int = 512, num_layers: int = 4) -> LlavaConfig:
    """Returns the config of a LLaVA with 30 M parameters by default. An image becomes 4 tokens."""
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIDE,
        patch_size=8,
    )
    return llava_config(text_config(VOCABULARY, hidden_size, num_layers), vision)


def large_llava_config() -> LlavaConfig:
    """Returns the config of a LLaVA of 1.0 B parameters."""
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
    )
    sizes = {'intermediate_size': 6144, 'num_attention_heads': 12, 'max_position_embeddings': 8192}
    return llava_config(text_config(32_064, 1536, 16, **sizes), vision)


def new_llava(config: LlavaConfig) -> LlavaForConditionalGeneration:
    """Makes a model with the same weights at every call."""
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    freeze_unused(model)
    return model


def freeze_unused(model: torch.nn.Module) -> None:
    """Freezes the last norm of a LLaVA's vision encoder. LLaVA does not read it, so DDP would wait for its gradient."""
    for name, parameter in model.named_parameters():
        if 'post_layernorm' in name:
            parameter.requires_grad_(False)


def with_labels(ids: torch.Tensor, num_prompt_tokens: int = 0) -> BatchDict:
    """Returns rows of equal length. All their tokens have labels, except the first `num_prompt_tokens`."""
    labels = ids.clone()
    labels[..., :num_prompt_tokens] = -100
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels}


def text_batch(vocabulary: int, rows: int, width: int, num_labels: int) -> BatchDict:
    """Returns random rows of equal length. The last tokens of each row have labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (rows, width), generator=generator)
    return with_labels(ids, width - num_labels)


def make_rows(lengths: Sequence[int], seed: int, config: Any) -> list[BatchDict]:
    """Returns batches of one row with random tokens, for a LLaVA of this config. The lengths include image tokens.

    Every other row begins with an image, if it is long enough. Its first half is the prompt, which has no labels.
    """
    side = config.vision_config.image_size
    image_length = patches_of(config.vision_config)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, length in enumerate(lengths):
        # Ids from 4 on, because a placeholder (3) that was drawn by chance would need an image.
        ids = torch.randint(4, config.text_config.vocab_size, (1, int(length)), generator=generator)
        if index % 2 == 0 and length > 2 * image_length:
            ids[:, :image_length] = IMAGE_TOKEN
            row = with_labels(ids, length // 2)
            row['pixel_values'] = torch.randn(1, 3, side, side, generator=generator)
            row['num_images'] = [1]
        else:
            row = with_labels(ids)
            row['num_images'] = [0]
        rows.append(row)
    return rows


def made_up_sample(config: Any, num_text_tokens: int, *, num_images: int = 0) -> BatchDict:
    """Returns a batch of one row that begins with white images, for text models and LLaVA-1.5."""
    text_ids = [WORD_ID] * num_text_tokens
    if num_images == 0:
        row = with_labels(torch.tensor([text_ids]))
    else:
        side = config.vision_config.image_size
        tokens_per_image = patches_of(config.vision_config)
        if config.vision_feature_select_strategy == 'full':
            tokens_per_image += 1  # the class token
        num_image_tokens = num_images * tokens_per_image
        image_ids = [config.image_token_index] * num_image_tokens
        row = with_labels(torch.tensor([image_ids + text_ids]), num_image_tokens)
        row['pixel_values'] = torch.ones(num_images, 3, side, side)
    row['num_images'] = [num_images]
    return row
