# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checkpoint folders of the newest families, as on the hub: a tiny model and its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model_types.processors import small_processor
from tests.model_types.tiny import model_class_of, tiny_config, tiny_model
from tests.support.family_processors import QWEN3_WORDS, QWEN_TOKENS, QWEN_VIDEO, word_tokenizer

__all__ = ['CHECKPOINTS', 'write_checkpoint']

ROLES = ('<|user|>', '<|assistant|>', '<|end|>')
TEMPLATE = (
    "{%% for message in messages %%}{{ '<|' + message['role'] + '|>' }}{%% if message['content'] is string %%}"
    "{{ message['content'] }}{%% else %%}{%% for part in message['content'] %%}{%% if part['type'] == 'image' %%}%s"
    "{%% elif part['type'] == 'video' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}"
    "{%% if message['role'] == 'assistant' %%}<|end|>{%% endif %%}{%% endfor %%}"
    '{%% if add_generation_prompt %%}<|assistant|>{%% endif %%}'
)


def _qwen() -> Any:
    tokenizer = word_tokenizer(*QWEN_TOKENS, *QWEN3_WORDS, *ROLES)
    images = small_processor('qwen2_vl', 'image')
    videos = small_processor('qwen3_vl', 'video', **QWEN_VIDEO)
    placeholders = tuple(f'<|vision_start|><|{modality}_pad|><|vision_end|>' for modality in ('image', 'video'))
    return transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE % placeholders)


def _gemma() -> Any:
    special_tokens = {f'{name}_token': f'<|{name}|>' for name in ('image', 'boi', 'eoi', 'audio', 'boa', 'eoa')}
    tokenizer = word_tokenizer('<|video|>', *QWEN3_WORDS, ':', *ROLES, **special_tokens)
    return transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        small_processor('gemma4', 'image'),
        tokenizer,
        small_processor('gemma4', 'video', num_frames=4),
        TEMPLATE % ('<|image|>', '<|video|>'),
    )


_GEMMA_EXPERTS = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)
CHECKPOINTS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    'qwen3_5_moe': ('qwen3_5_moe', _qwen, dict(output_router_logits=True, router_aux_loss_coef=0.5)),
    'gemma4_moe': ('gemma4', _gemma, _GEMMA_EXPERTS),
}
"""Model type, function that makes the processor, and settings of the experts in the config of the text model."""


def write_checkpoint(name: str, folder: Path) -> Path:
    """Writes model and processor. The config has the ids of the processor's special tokens."""
    model_type, make_processor, settings = CHECKPOINTS[name]
    processor = make_processor()
    config = tiny_config(model_type, tokenizer=processor.tokenizer)
    if model_type == 'gemma4':
        config.audio_config = None
    for key, value in settings.items():
        setattr(config.text_config, key, value)
    model: Any = tiny_model(config, model_class_of(config))
    model.generation_config.eos_token_id = processor.tokenizer.convert_tokens_to_ids('<|end|>')
    model.to(torch.float32).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
