# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tiny models of the families whose own processors make rows, with the ids of their tokenizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.model_types.tiny import tiny_config
from tests.support.family_processors import IMAGE_SIZE, PATCH_SIZE

__all__ = ['MODELS']

NUM_PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2
Settings = Mapping[str, Any]
"""Entries of a config by path; those of ids name a token."""

IMAGE: Settings = {'image_token_index': '<image>'}
VIDEO: Settings = {**IMAGE, 'video_token_index': '<video>'}
PIXTRAL: Settings = {'image_token_index': '[IMG]', 'vision_config.image_size': 2 * IMAGE_SIZE}
LAST: Settings = {'vision_feature_layer': -1}
QWEN: Settings = {
    'image_token_id': '<|image_pad|>',
    'video_token_id': '<|video_pad|>',
    'vision_start_token_id': '<|vision_start|>',
    'vision_end_token_id': '<|vision_end|>',
}
SOUNDS: Settings = {'audio_config.num_mel_bins': 8}
OMNI: Settings = {
    **SOUNDS,
    'image_token_index': '<|IMAGE|>',
    'video_token_index': '<|VIDEO|>',
    'audio_token_index': '<|AUDIO|>',
    'vision_start_token_id': '<|vision_bos|>',
    'vision_end_token_id': '<|vision_eos|>',
    'audio_start_token_id': '<|audio_bos|>',
    'audio_end_token_id': '<|audio_eos|>',
}
GEMMA3: Settings = {
    'image_token_index': '<image_soft_token>',
    'boi_token_index': '<start_of_image>',
    'eoi_token_index': '<end_of_image>',
    'mm_tokens_per_image': NUM_PATCHES // 4,
}
GLM: Settings = {f'{name}_token_id': f'<{name}>' for name in ('image', 'video')} | {
    f'{name}_{edge}_token_id': f'<{name}_{edge}>' for name in ('image', 'video') for edge in ('start', 'end')
}
INSTRUCT: Settings = {'text_config': 'LlamaConfig', 'qformer_config.vocab_size': 600}

FAMILIES: Mapping[str, tuple[str, str, Settings]] = {
    # name: (model type, prefix of the class, settings)
    'llava': ('llava', 'Llava', {**IMAGE, **LAST, 'image_seq_length': NUM_PATCHES}),
    'llava_next': ('llava_next', 'LlavaNext', {**IMAGE, **LAST, 'image_seq_length': NUM_PATCHES}),
    'llava_onevision': ('llava_onevision', 'LlavaOnevision', {**VIDEO, **LAST}),
    'llava_next_video': ('llava_next_video', 'LlavaNextVideo', {**VIDEO, **LAST}),
    'video_llava': ('video_llava', 'VideoLlava', {**VIDEO, **LAST}),
    'qwen2_vl': ('qwen2_vl', 'Qwen2VL', QWEN),
    'qwen2_5_vl': ('qwen2_5_vl', 'Qwen2_5_VL', QWEN),
    'qwen3_vl': ('qwen3_vl', 'Qwen3VL', QWEN),
    'qwen2_5_omni': ('qwen2_5_omni_thinker', 'Qwen2_5OmniThinker', OMNI),
    'qwen2_audio': ('qwen2_audio', 'Qwen2Audio', {**SOUNDS, 'audio_token_index': '<|AUDIO|>'}),
    'idefics3': ('idefics3', 'Idefics3', {'image_token_id': '<image>', 'scale_factor': 2}),
    'smolvlm': ('smolvlm', 'SmolVLM', {'image_token_id': '<image>', 'scale_factor': 2}),
    'paligemma': ('paligemma', 'PaliGemma', IMAGE),
    'gemma3': ('gemma3', 'Gemma3', GEMMA3),
    'mllama': ('mllama', 'Mllama', {'image_token_index': '<|image|>'}),
    'internvl': ('internvl', 'InternVL', {'image_token_id': '<IMG_CONTEXT>', 'image_seq_length': NUM_PATCHES // 4}),
    'mistral3': ('mistral3', 'Mistral3', {**PIXTRAL, **LAST, 'spatial_merge_size': 2}),
    'llava_pixtral': (
        'llava',
        'Llava',
        {
            'vision_config': 'PixtralVisionConfig',
            'text_config': 'MistralConfig',
            **PIXTRAL,
            **LAST,
            'vision_feature_select_strategy': 'full',
        },
    ),
    'glm4v': ('glm4v', 'Glm4v', GLM),
    # With a query transformer.
    'blip2': ('blip-2', 'Blip2', IMAGE),
    'instructblip': ('instructblip', 'InstructBlip', {**INSTRUCT, **IMAGE}),
    'instructblipvideo': ('instructblipvideo', 'InstructBlipVideo', {**INSTRUCT, 'video_token_index': '<video>'}),
}


def _model(name: str, ids: Any) -> PreTrainedModel:
    """A seeded model in float32, with the ids of the tokens (``SampleEncoder``, ``TokenIds``)."""
    model_type, prefix, settings = FAMILIES.get(name, ('llama', '', {}))
    token_ids = {'pad_token_id': '<pad>', 'bos_token_id': '<s>', 'eos_token_id': '</s>'}
    text = {'vocab_size': len(ids.tokenizer), **{key: ids.token_id(token) for key, token in token_ids.items()}}
    filled = {key: ids.token_id(value) if '_token_i' in key else value for key, value in settings.items()}
    filled |= {f'text_config.{key}' if prefix else key: value for key, value in text.items()}
    config = tiny_config(model_type, filled)
    config.use_cache = False
    config.get_text_config().use_cache = False
    with torch.random.fork_rng():
        torch.manual_seed(0)
        class_name = f'{prefix}ForConditionalGeneration' if prefix else 'LlamaForCausalLM'
        model = getattr(transformers, class_name)(config)
        # The usual standard deviation of 0.02, and gates of zero, let images hardly reach the loss of so small a model.
        for parameter in model.parameters():
            if parameter.dim() > 1 or not parameter.any():
                torch.nn.init.normal_(parameter, std=0.14)
    return model.float().train()


MODELS: dict[str, Callable[[Any], PreTrainedModel]] = {
    name: functools.partial(_model, name) for name in ('llama', *FAMILIES)
}
