# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How large the runs are: for a GPU by its memory, and for a rehearsal on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.device import CPU, GPU, ComputeDevice

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of all parts.

    Args:
        device: Where.
        text: Sizes of the text model of the timed LLaVA.
        vision: Sizes of its vision tower.
        device_batch: Rows a step.
        microbatch: Rows that a microbatch may hold at the width of the device batch.
        checkpointing: Whether activations are computed again in the backward pass.
        variations: Coefficients of variation of the lognormal length sets.
        mean_length: Mean of the lognormal length sets.
        longest: Where they are clipped.
        table_divisor: What the real lengths are divided by.
        num_steps: Timed steps a method, at most.
        num_widths: Widths at which the bound is timed.
        step_seconds: A method whose steps would take longer than all of this together gets fewer.
        rounds: Rounds of steps with and without the algorithm, in turn.
        steps_a_round: Steps in each, the first of which warms up.
        images: Rows of the page-locking part, an image each.
        lengths: Folder of real tables, if at hand.
    """

    device: ComputeDevice
    text: dict[str, int]
    vision: dict[str, int]
    device_batch: int = 64
    microbatch: int = 4
    checkpointing: bool = False
    variations: tuple[float, ...] = (0.29, 0.48, 1.0, 0.8)
    mean_length: int = 1200
    longest: int = 8192
    table_divisor: int = 1
    num_steps: int = 3
    num_widths: int = 6
    step_seconds: float = 20.0
    rounds: int = 3
    steps_a_round: int = 6
    images: int = 128
    lengths: Path | None = None

    def config(self) -> LlavaConfig:
        text = LlamaConfig(**self.text, max_position_embeddings=self.longest, use_cache=False)
        config = LlavaConfig(
            text_config=text,
            vision_config=CLIPVisionConfig(**self.vision),
            image_token_index=3,
            image_seq_length=(self.vision['image_size'] // self.vision['patch_size']) ** 2,
            # The last one, so that every layer of the tower gets a gradient.
            vision_feature_layer=-1,
            vision_feature_select_strategy='default',
        )
        config.use_cache = False
        return config


# 1.0 B parameters: 0.7 B of text behind CLIP ViT-L/14 at 336 pixels.
FULL = Scale(
    device=GPU,
    text={
        'vocab_size': 32064, 'hidden_size': 1536, 'intermediate_size': 6144, 'num_hidden_layers': 16,
        'num_attention_heads': 12, 'num_key_value_heads': 12,
    },
    vision={
        'hidden_size': 1024, 'intermediate_size': 4096, 'num_hidden_layers': 24, 'num_attention_heads': 16,
        'image_size': 336, 'patch_size': 14,
    },
)  # fmt: skip

REHEARSAL = Scale(
    device=CPU,
    text={
        'vocab_size': 64, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2, 'num_attention_heads': 2,
        'num_key_value_heads': 2,
    },
    vision={
        'hidden_size': 16, 'intermediate_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'image_size': 16,
        'patch_size': 8,
    },
    device_batch=8, microbatch=2, mean_length=32, longest=96, table_divisor=32, num_steps=1, num_widths=2, rounds=1,
    steps_a_round=2, images=8,
    variations=(1.0,),
)  # fmt: skip


def for_memory(scale: Scale, total_bytes: int) -> Scale:
    """The scale for a GPU with this much memory.

    Parameters, gradients and bf16 copies are 10 GiB; a row of 8,192 tokens keeps about 15 GiB, or 3 with checkpointing,
    and 3 for its logits.
    """
    if total_bytes > 110 * GIB:
        return scale
    if total_bytes > 60 * GIB:
        return replace(scale, microbatch=2)
    return replace(scale, microbatch=1, checkpointing=True)


def build_llava(
    config: LlavaConfig, device: ComputeDevice, *, attention: str = 'sdpa', checkpointing: bool = False
) -> LlavaForConditionalGeneration:
    """The same random weights every time, float32, in training mode, drawn where they will be."""
    torch.manual_seed(0)
    with torch.device(device.name):
        model = LlavaForConditionalGeneration._from_config(config, attn_implementation=attention)
    model = model.float().train()
    # What the last vision layer's norm makes is not used, and a parameter without gradient is no part of a step.
    for name, parameter in model.named_parameters():
        if 'post_layernorm' in name:
            parameter.requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
    return model


def count_parameters(config: LlavaConfig) -> int:
    with torch.device('meta'):
        return sum(parameter.numel() for parameter in LlavaForConditionalGeneration(config).parameters())
