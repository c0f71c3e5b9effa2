# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A LLaVA small enough to learn the digits task from random weights on two CPU cores in minutes."""

from __future__ import annotations

from typing import Any

from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

__all__ = ['digits_model_config']


def digits_model_config(
    processor: Any,
    *,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    vision_hidden_size: int = 64,
    num_vision_layers: int = 2,
) -> LlavaConfig:
    """Returns the config of a LLaVA: a CLIP vision encoder, a projector and a Llama. By default: a million parameters.

    Args:
        processor: From ``build_digits_processor``. Has the vocabulary, the image size and the patch size.
        hidden_size: Hidden size of the language model.
        num_layers: Layers of the language model.
        num_heads: Attention heads of each of the two models.
        vision_hidden_size: Hidden size of the vision encoder.
        num_vision_layers: Layers of the vision encoder. The projector reads the last one.
    """
    tokenizer = processor.tokenizer
    patch_size = processor.patch_size
    image_size = processor.image_processor.crop_size['height']
    vision_config = CLIPVisionConfig(
        hidden_size=vision_hidden_size,
        intermediate_size=2 * vision_hidden_size,
        num_hidden_layers=num_vision_layers,
        num_attention_heads=num_heads,
        image_size=image_size,
        patch_size=patch_size,
    )
    text_config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=256,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlavaConfig(
        vision_config=vision_config,
        text_config=text_config,
        image_token_index=tokenizer.convert_tokens_to_ids('<image>'),
        image_seq_length=(image_size // patch_size) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy='default',
    )
