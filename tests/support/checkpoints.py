# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checkpoint folders of the newest families, as on the hub: a tiny model and its processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model_types.tiny import PATCH, model_class_of, tiny_config, tiny_model
from tests.support.family_processors import QWEN3_WORDS, QWEN_TOKENS, word_tokenizer

__all__ = ['CHECKPOINTS', 'write_checkpoint']

MEAN_STD = {'image_mean': [0.5] * 3, 'image_std': [0.5] * 3}
GRID = {'patch_size': PATCH, 'merge_size': 2, 'temporal_patch_size': 2, **MEAN_STD}
VIDEO_SIZES = {'shortest_edge': 64, 'longest_edge': 4096}
ROLES = ('<|user|>', '<|assistant|>', '<|end|>')
_TEMPLATE = (
    '{% for message in messages %}'
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE_TEXT{% elif part['type'] == 'video' %}VIDEO_TEXT"
    "{% else %}{{ part['text'] }}{% endif %}"
    '{% endfor %}'
    '{% endif %}'
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}"
    '{% endfor %}'
    '{% if add_generation_prompt %}<|assistant|>{% endif %}'
)


@dataclass(frozen=True)
class Checkpoint:
    """How a checkpoint is made."""

    model_type: str
    make_processor: Callable[[], Any]
    text_settings: dict[str, Any]
    """Settings of the experts in the config of the text model."""


def _template(image_text: str, video_text: str) -> str:
    return _TEMPLATE.replace('IMAGE_TEXT', image_text).replace('VIDEO_TEXT', video_text)


def _qwen() -> Any:
    tokenizer = word_tokenizer(*QWEN_TOKENS, *QWEN3_WORDS, *ROLES)
    images = transformers.Qwen2VLImageProcessor(min_pixels=64, max_pixels=512, **GRID)
    videos = transformers.Qwen3VLVideoProcessor(size=VIDEO_SIZES, do_sample_frames=False, **GRID)
    image_text = '<|vision_start|><|image_pad|><|vision_end|>'
    video_text = '<|vision_start|><|video_pad|><|vision_end|>'
    template = _template(image_text, video_text)
    return transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=template)


def _gemma() -> Any:
    special_tokens = {f'{name}_token': f'<|{name}|>' for name in ('image', 'boi', 'eoi', 'audio', 'boa', 'eoa')}
    tokenizer = word_tokenizer('<|video|>', *QWEN3_WORDS, ':', *ROLES, **special_tokens)
    sizes = dict(patch_size=PATCH, max_soft_tokens=70, pooling_kernel_size=2, **MEAN_STD)
    return transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(**sizes),
        tokenizer,
        transformers.Gemma4VideoProcessor(**{**sizes, 'num_frames': 4}),
        _template('<|image|>', '<|video|>'),
    )


CHECKPOINTS = {
    'qwen3_5_moe': Checkpoint('qwen3_5_moe', _qwen, {'output_router_logits': True, 'router_aux_loss_coef': 0.5}),
    'gemma4_moe': Checkpoint(
        'gemma4',
        _gemma,
        {'enable_moe_block': True, 'num_experts': 4, 'top_k_experts': 2, 'moe_intermediate_size': 32},
    ),
}


def write_checkpoint(name: str, folder: Path) -> Path:
    """Writes model and processor. The config has the ids of the processor's special tokens."""
    checkpoint = CHECKPOINTS[name]
    processor = checkpoint.make_processor()
    config = tiny_config(checkpoint.model_type, tokenizer=processor.tokenizer)
    if checkpoint.model_type == 'gemma4':
        config.audio_config = None
    for key, value in checkpoint.text_settings.items():
        setattr(config.text_config, key, value)
    model: Any = tiny_model(config, model_class_of(config))
    model.generation_config.eos_token_id = processor.tokenizer.convert_tokens_to_ids('<|end|>')
    model.to(torch.float32).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
