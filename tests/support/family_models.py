# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The families' own model classes with two layers and a hidden size of 16, seeded, float32, without cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from tests.support.family_processors import IMAGE_SIZE, PATCH_SIZE, PINPOINTS
from tests.support.sample_encoder import SampleEncoder

__all__ = ['MODELS']


def _text(encode: SampleEncoder, **extra: Any) -> dict[str, Any]:
    return {
        'vocab_size': len(encode.tokenizer),
        'hidden_size': 16,
        'intermediate_size': 32,
        'num_hidden_layers': 2,
        'num_attention_heads': 2,
        'num_key_value_heads': 1,
        'max_position_embeddings': 1024,
        'pad_token_id': encode.pad_token_id,
        'bos_token_id': encode.token_id('<s>'),
        'eos_token_id': encode.token_id('</s>'),
        'tie_word_embeddings': False,
        'use_cache': False,
        **extra,
    }


def _vision(**extra: Any) -> dict[str, Any]:
    return {
        'hidden_size': 16,
        'intermediate_size': 32,
        'num_hidden_layers': 2,
        'num_attention_heads': 2,
        'image_size': IMAGE_SIZE,
        'patch_size': PATCH_SIZE,
        **extra,
    }


def _model(class_name: str, config: PretrainedConfig) -> PreTrainedModel:
    config.use_cache = False
    config.get_text_config().use_cache = False
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, class_name)(config)
        # The usual standard deviation of 0.02, and gates of zero, let images hardly reach the loss of so small a model.
        for parameter in model.parameters():
            if parameter.dim() > 1 or not parameter.any():
                torch.nn.init.normal_(parameter, std=0.2)
    return model.float().train()


def _llama(encode: SampleEncoder) -> PreTrainedModel:
    return _model('LlamaForCausalLM', transformers.LlamaConfig(**_text(encode)))


def _llava(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.LlavaConfig(
        text_config={'model_type': 'llama', **_text(encode)},
        vision_config={'model_type': 'clip_vision_model', **_vision()},
        image_token_index=encode.token_id('<image>'),
        vision_feature_layer=-1,
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2,
    )
    return _model('LlavaForConditionalGeneration', config)


def _llava_next(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.LlavaNextConfig(
        text_config={'model_type': 'llama', **_text(encode)},
        vision_config={'model_type': 'clip_vision_model', **_vision()},
        image_token_index=encode.token_id('<image>'),
        vision_feature_layer=-1,
        image_grid_pinpoints=PINPOINTS,
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2,
    )
    return _model('LlavaNextForConditionalGeneration', config)


def _llava_onevision(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.LlavaOnevisionConfig(
        text_config={'model_type': 'qwen2', **_text(encode)},
        vision_config={'model_type': 'siglip_vision_model', 'vision_use_head': False, **_vision()},
        image_token_index=encode.token_id('<image>'),
        video_token_index=encode.token_id('<video>'),
        vision_feature_layer=-1,
        image_grid_pinpoints=PINPOINTS,
    )
    return _model('LlavaOnevisionForConditionalGeneration', config)


def _qwen_config(name: str, encode: SampleEncoder, vision: dict[str, Any]) -> Any:
    rotary = {'type': 'mrope', 'rope_type': 'default', 'mrope_section': [2, 1, 1]}
    text = _text(encode, rope_scaling=rotary)
    special = {
        'image_token_id': encode.token_id('<|image_pad|>'),
        'video_token_id': encode.token_id('<|video_pad|>'),
        'vision_start_token_id': encode.token_id('<|vision_start|>'),
        'vision_end_token_id': encode.token_id('<|vision_end|>'),
    }
    # Up to 4.51 the text settings lie in the config itself, from 4.52 in `text_config`.
    config_class = getattr(transformers, name)
    text_settings = {'text_config': text} if 'text_config' in config_class.sub_configs else text
    return config_class(vision_config=vision, **{**text_settings, **special, 'tie_word_embeddings': False})


def _qwen2_vl(encode: SampleEncoder) -> PreTrainedModel:
    vision = {
        'depth': 2,
        'embed_dim': 16,
        'hidden_size': 16,
        'num_heads': 2,
        'mlp_ratio': 2,
        'patch_size': PATCH_SIZE,
        'spatial_merge_size': 2,
        'temporal_patch_size': 2,
    }
    return _model('Qwen2VLForConditionalGeneration', _qwen_config('Qwen2VLConfig', encode, vision))


def _qwen2_5_vl(encode: SampleEncoder) -> PreTrainedModel:
    vision = {
        'depth': 2,
        'hidden_size': 16,
        'intermediate_size': 32,
        'num_heads': 2,
        'patch_size': PATCH_SIZE,
        'spatial_merge_size': 2,
        'temporal_patch_size': 2,
        'window_size': 16,
        'fullatt_block_indexes': [1],
        'out_hidden_size': 16,
    }
    return _model('Qwen2_5_VLForConditionalGeneration', _qwen_config('Qwen2_5_VLConfig', encode, vision))


def _idefics3(encode: SampleEncoder, name: str) -> PreTrainedModel:
    config_class = getattr(transformers, f'{name}Config')
    config = config_class(
        text_config={'model_type': 'llama', **_text(encode)},
        vision_config=_vision(),
        image_token_id=encode.token_id('<image>'),
        scale_factor=2,
        tie_word_embeddings=False,
    )
    return _model(f'{name}ForConditionalGeneration', config)


def _paligemma(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.PaliGemmaConfig(
        text_config={'model_type': 'gemma', 'head_dim': 8, **_text(encode)},
        vision_config={'model_type': 'siglip_vision_model', 'vision_use_head': False, **_vision()},
        image_token_index=encode.token_id('<image>'),
        projection_dim=16,
        hidden_size=16,
    )
    return _model('PaliGemmaForConditionalGeneration', config)


def _gemma3(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.Gemma3Config(
        text_config={'model_type': 'gemma3_text', 'head_dim': 8, 'sliding_window': 64, **_text(encode)},
        vision_config={'model_type': 'siglip_vision_model', 'vision_use_head': False, **_vision()},
        mm_tokens_per_image=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4,
        image_token_index=encode.token_id('<image_soft_token>'),
        boi_token_index=encode.token_id('<start_of_image>'),
        eoi_token_index=encode.token_id('<end_of_image>'),
    )
    return _model('Gemma3ForConditionalGeneration', config)


def _mllama(encode: SampleEncoder) -> PreTrainedModel:
    vision = {
        'attention_heads': 2,
        'num_global_layers': 1,
        'max_num_tiles': 4,
        'intermediate_layers_indices': [0],
        'vision_output_dim': 32,
    }
    config = transformers.MllamaConfig(
        text_config={'cross_attention_layers': [1], 'rope_scaling': {'rope_type': 'default'}, **_text(encode)},
        vision_config={**_vision(), **vision},
        image_token_index=encode.token_id('<|image|>'),
    )
    return _model('MllamaForConditionalGeneration', config)


def _internvl(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.InternVLConfig(
        text_config={'model_type': 'qwen2', **_text(encode)},
        vision_config={'model_type': 'internvl_vision', **_vision()},
        image_token_id=encode.token_id('<IMG_CONTEXT>'),
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4,
    )
    return _model('InternVLForConditionalGeneration', config)


def _qwen3_vl(encode: SampleEncoder) -> PreTrainedModel:
    vision = {
        'depth': 2,
        'hidden_size': 16,
        'intermediate_size': 32,
        'num_heads': 2,
        'patch_size': PATCH_SIZE,
        'spatial_merge_size': 2,
        'temporal_patch_size': 2,
        'out_hidden_size': 16,
        'num_position_embeddings': 16,
        'deepstack_visual_indexes': [0],
    }
    config = _qwen_config('Qwen3VLConfig', encode, vision)
    return _model('Qwen3VLForConditionalGeneration', config)


def _qwen2_5_omni(encode: SampleEncoder) -> PreTrainedModel:
    vision = {
        'depth': 2,
        'hidden_size': 16,
        'intermediate_size': 32,
        'num_heads': 2,
        'patch_size': PATCH_SIZE,
        'spatial_merge_size': 2,
        'temporal_patch_size': 2,
        'window_size': 16,
        'fullatt_block_indexes': [1],
        'out_hidden_size': 16,
    }
    rotary = {'type': 'default', 'rope_type': 'default', 'mrope_section': [2, 1, 1]}
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config={**_audio(), 'n_window': 4, 'output_dim': 16},
        vision_config=vision,
        text_config=_text(encode, rope_scaling=rotary),
        audio_token_index=encode.token_id('<|AUDIO|>'),
        image_token_index=encode.token_id('<|IMAGE|>'),
        video_token_index=encode.token_id('<|VIDEO|>'),
        audio_start_token_id=encode.token_id('<|audio_bos|>'),
        audio_end_token_id=encode.token_id('<|audio_eos|>'),
        vision_start_token_id=encode.token_id('<|vision_bos|>'),
        vision_end_token_id=encode.token_id('<|vision_eos|>'),
    )
    return _model('Qwen2_5OmniThinkerForConditionalGeneration', config)


def _audio() -> dict[str, Any]:
    return {
        'num_mel_bins': 8,
        'd_model': 16,
        'encoder_layers': 2,
        'encoder_attention_heads': 2,
        'encoder_ffn_dim': 32,
        'max_source_positions': 50,
    }


def _qwen2_audio(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.Qwen2AudioConfig(
        audio_config={'model_type': 'qwen2_audio_encoder', **_audio()},
        text_config={'model_type': 'qwen2', **_text(encode)},
        audio_token_index=encode.token_id('<|AUDIO|>'),
    )
    return _model('Qwen2AudioForConditionalGeneration', config)


def _llava_next_video(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.LlavaNextVideoConfig(
        text_config={'model_type': 'llama', **_text(encode)},
        vision_config={'model_type': 'clip_vision_model', **_vision()},
        image_token_index=encode.token_id('<image>'),
        video_token_index=encode.token_id('<video>'),
        vision_feature_layer=-1,
        image_grid_pinpoints=PINPOINTS,
    )
    return _model('LlavaNextVideoForConditionalGeneration', config)


def _video_llava(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.VideoLlavaConfig(
        text_config={'model_type': 'llama', **_text(encode)},
        vision_config={'model_type': 'clip_vision_model', **_vision()},
        image_token_index=encode.token_id('<image>'),
        video_token_index=encode.token_id('<video>'),
        vision_feature_layer=-1,
    )
    return _model('VideoLlavaForConditionalGeneration', config)


def _mistral3(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.Mistral3Config(
        text_config={'model_type': 'mistral', 'head_dim': 8, **_text(encode)},
        vision_config={'model_type': 'pixtral', **_vision(image_size=32)},
        image_token_index=encode.token_id('[IMG]'),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    return _model('Mistral3ForConditionalGeneration', config)


def _llava_pixtral(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.LlavaConfig(
        text_config={'model_type': 'mistral', 'head_dim': 8, **_text(encode)},
        vision_config={'model_type': 'pixtral', **_vision(image_size=32)},
        image_token_index=encode.token_id('[IMG]'),
        vision_feature_layer=-1,
        vision_feature_select_strategy='full',
    )
    return _model('LlavaForConditionalGeneration', config)


# Families without a processor here: their models say what a blank row is worth.


def _vipllava(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.VipLlavaConfig(
        text_config={'model_type': 'llama', **_text(encode)},
        vision_config={'model_type': 'clip_vision_model', **_vision()},
        image_token_index=encode.token_id('<image>'),
        vision_feature_layers=[-1, -2],
    )
    return _model('VipLlavaForConditionalGeneration', config)


def _idefics2(encode: SampleEncoder) -> PreTrainedModel:
    perceiver = {
        'hidden_size': 16,
        'resampler_n_latents': 4,
        'resampler_depth': 1,
        'resampler_n_heads': 2,
        'resampler_head_dim': 8,
        'num_key_value_heads': 1,
    }
    config = transformers.Idefics2Config(
        text_config={'model_type': 'mistral', 'head_dim': 8, **_text(encode)},
        vision_config=_vision(),
        perceiver_config=perceiver,
        image_token_id=encode.token_id('<image>'),
        tie_word_embeddings=False,
    )
    return _model('Idefics2ForConditionalGeneration', config)


def _got_ocr2(encode: SampleEncoder) -> PreTrainedModel:
    vision = {
        'hidden_size': 16,
        'output_channels': 8,
        'num_hidden_layers': 2,
        'num_attention_heads': 2,
        'image_size': 32,
        'patch_size': PATCH_SIZE,
        'window_size': 4,
        'global_attn_indexes': [1],
        'mlp_dim': 16,
    }
    config = transformers.GotOcr2Config(
        text_config={'model_type': 'qwen2', **_text(encode)},
        vision_config=vision,
        image_token_index=encode.token_id('<image>'),
        tie_word_embeddings=False,
    )
    return _model('GotOcr2ForConditionalGeneration', config)


def _aya_vision(encode: SampleEncoder) -> PreTrainedModel:
    config = transformers.AyaVisionConfig(
        text_config={'model_type': 'cohere2', 'head_dim': 8, **_text(encode)},
        vision_config={'model_type': 'siglip_vision_model', 'vision_use_head': False, **_vision()},
        image_token_index=encode.token_id('<image>'),
        downsample_factor=2,
    )
    return _model('AyaVisionForConditionalGeneration', config)


def _glm4v(encode: SampleEncoder) -> PreTrainedModel:
    vision = {
        'depth': 2,
        'hidden_size': 16,
        'num_heads': 2,
        'image_size': IMAGE_SIZE,
        'patch_size': PATCH_SIZE,
        'out_hidden_size': 16,
        'intermediate_size': 16,
    }
    rotary = {'rope_type': 'default', 'rope_theta': 10000.0, 'mrope_section': [2, 1, 1], 'partial_rotary_factor': 1.0}
    config = transformers.Glm4vConfig(
        text_config=_text(encode, rope_scaling=rotary),
        vision_config=vision,
        image_token_id=encode.token_id('<image>'),
        video_token_id=encode.token_id('<video>'),
        image_start_token_id=encode.token_id('<image_start>'),
        image_end_token_id=encode.token_id('<image_end>'),
        video_start_token_id=encode.token_id('<video_start>'),
        video_end_token_id=encode.token_id('<video_end>'),
    )
    return _model('Glm4vForConditionalGeneration', config)


def _queried(name: str, text: dict[str, Any], **settings: Any) -> PreTrainedModel:
    """Models with a query transformer."""
    qformer = {
        'vocab_size': 600,
        'hidden_size': 16,
        'num_hidden_layers': 2,
        'num_attention_heads': 2,
        'intermediate_size': 16,
        'hidden_dropout_prob': 0.0,
        'attention_probs_dropout_prob': 0.0,
    }
    config = getattr(transformers, f'{name}Config')(
        vision_config=_vision(), qformer_config=qformer, text_config=text, num_query_tokens=4, **settings
    )
    return _model(f'{name}ForConditionalGeneration', config)


def _opt(encode: SampleEncoder) -> dict[str, Any]:
    return {'model_type': 'opt', 'ffn_dim': 16, 'word_embed_proj_dim': 16, 'dropout': 0.0, **_text(encode)}


def _blip2(encode: SampleEncoder) -> PreTrainedModel:
    return _queried('Blip2', _opt(encode), image_token_index=encode.token_id('<image>'))


def _instructblip(encode: SampleEncoder) -> PreTrainedModel:
    text = {'model_type': 'llama', **_text(encode)}
    return _queried('InstructBlip', text, image_token_index=encode.token_id('<image>'))


def _instructblipvideo(encode: SampleEncoder) -> PreTrainedModel:
    text = {'model_type': 'llama', **_text(encode)}
    return _queried('InstructBlipVideo', text, video_token_index=encode.token_id('<video>'))


MODELS: dict[str, Callable[[SampleEncoder], PreTrainedModel]] = {
    'llama': _llama,
    'llava': _llava,
    'llava_next': _llava_next,
    'llava_onevision': _llava_onevision,
    'qwen2_vl': _qwen2_vl,
    'qwen2_5_vl': _qwen2_5_vl,
    'idefics3': lambda encode: _idefics3(encode, 'Idefics3'),
    'smolvlm': lambda encode: _idefics3(encode, 'SmolVLM'),
    'paligemma': _paligemma,
    'gemma3': _gemma3,
    'mllama': _mllama,
    'internvl': _internvl,
    'qwen3_vl': _qwen3_vl,
    'qwen2_5_omni': _qwen2_5_omni,
    'qwen2_audio': _qwen2_audio,
    'llava_next_video': _llava_next_video,
    'video_llava': _video_llava,
    'mistral3': _mistral3,
    'llava_pixtral': _llava_pixtral,
    'vipllava': _vipllava,
    'idefics2': _idefics2,
    'got_ocr2': _got_ocr2,
    'aya_vision': _aya_vision,
    'glm4v': _glm4v,
    'blip2': _blip2,
    'instructblip': _instructblip,
    'instructblipvideo': _instructblipvideo,
}
