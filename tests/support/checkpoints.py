# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Folders as the hub has them, of the newest families: a tiny model of its own class, and its own processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model_types.tiny import PATCH, tiny_config, tiny_model
from tests.support.family_processors import GRID, MEAN_STD, QWEN3_WORDS, QWEN_TOKENS, VIDEO_SIZES
from tests.support.sample_encoder import word_tokenizer

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
    images = transformers.Qwen2VLImageProcessor(min_pixels=64, max_pixels=512, **GRID)
    videos = transformers.Qwen3VLVideoProcessor(size=VIDEO_SIZES, do_sample_frames=False, **GRID)
    places = [f'<|vision_start|><|{kind}_pad|><|vision_end|>' for kind in ('image', 'video')]
    return transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE % tuple(places))


def _gemma() -> Any:
    named = {f'{name}_token': f'<|{name}|>' for name in ('image', 'boi', 'eoi', 'audio', 'boa', 'eoa')}
    tokenizer = word_tokenizer('<|video|>', *QWEN3_WORDS, ':', *ROLES, **named)
    sizes = dict(patch_size=PATCH, max_soft_tokens=70, **MEAN_STD)
    return transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(**sizes),
        tokenizer,
        transformers.Gemma4VideoProcessor(**{**sizes, 'num_frames': 4}),
        TEMPLATE % ('<|image|>', '<|video|>'),
    )


_GEMMA_EXPERTS = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)
CHECKPOINTS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    'qwen3_5_moe': ('qwen3_5_moe', _qwen, dict(output_router_logits=True, router_aux_loss_coef=0.5)),
    'gemma4_moe': ('gemma4', _gemma, _GEMMA_EXPERTS),
}
"""Type, processor and what its text part has beside a dense one's."""
_MARKS = {'vision_start': '<|vision_start|>', 'vision_end': '<|vision_end|>', 'bos': '<s>', 'eos': '</s>'}


def write_checkpoint(name: str, folder: Path) -> Path:
    """Writes model and processor, whose tokens the config names."""
    model_type, make, settings = CHECKPOINTS[name]
    config, processor = tiny_config(model_type), make()
    if model_type == 'gemma4':
        config.audio_config = None
    for key, value in settings.items():
        setattr(config.text_config, key, value)
    for part in (config, config.text_config):
        for key in vars(part).copy():
            mark = key.removesuffix('_token_id')
            named = [f'<|{mark}_pad|>', f'<|{mark}|>', _MARKS.get(mark, f'<{mark}>')]
            ids = [
                one
                for one in processor.tokenizer.convert_tokens_to_ids(named)
                if one != processor.tokenizer.unk_token_id
            ]
            if mark != key and ids:
                setattr(part, key, ids[0])
    model_class = transformers.AutoModelForImageTextToText._model_mapping[type(config)]
    model: Any = tiny_model(config, model_class[0] if isinstance(model_class, tuple) else model_class)
    model.generation_config.eos_token_id = processor.tokenizer.convert_tokens_to_ids('<|end|>')
    model.to(torch.float32).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
