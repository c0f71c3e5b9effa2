# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The model of the throughput benchmark, and rows of given lengths for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

__all__ = ['build_model', 'make_rows']

VOCABULARY, IMAGE_TOKEN, IMAGE_LENGTH = 512, 3, 4
Row = dict[str, Any]


def build_model() -> LlavaForConditionalGeneration:
    """The same weights every time."""
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=4096, use_cache=False,
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


def make_rows(lengths: Sequence[int], seed: int) -> list[Row]:
    """One-row batches; every other row long enough for one begins with an image."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, length in enumerate(lengths):
        ids = torch.randint(4, VOCABULARY, (1, int(length)), generator=generator)
        row: Row = {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': ids.clone(), 'num_images': [0]}
        if index % 2 == 0 and length > 2 * IMAGE_LENGTH:
            ids[:, :IMAGE_LENGTH] = IMAGE_TOKEN
            row['labels'][:, : length // 2] = -100
            row['pixel_values'] = torch.randn(1, 3, 16, 16, generator=generator)
            row['num_images'] = [1]
        rows.append(row)
    return rows
