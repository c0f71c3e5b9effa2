# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The families' own model classes with two layers, seeded, float32, without cache: one table of their configs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.model_types.tiny import set_large_weights
from tests.support.family_processors import IMAGE_SIZE, PATCH_SIZE, PINPOINTS

__all__ = ['MODELS']

NUM_PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2
IMAGE = dict(image_token_index='<image>')
VIDEO = dict(**IMAGE, video_token_index='<video>')
LAST = dict(vision_feature_layer=-1)
UNTIED = dict(tie_word_embeddings=False)
QWEN = dict(
    image_token_id='<|image_pad|>',
    video_token_id='<|video_pad|>',
    vision_start_token_id='<|vision_start|>',
    vision_end_token_id='<|vision_end|>',
    **UNTIED,
)
OMNI = dict(
    audio_token_index='<|AUDIO|>',
    image_token_index='<|IMAGE|>',
    video_token_index='<|VIDEO|>',
    audio_start_token_id='<|audio_bos|>',
    audio_end_token_id='<|audio_eos|>',
    vision_start_token_id='<|vision_bos|>',
    vision_end_token_id='<|vision_eos|>',
)
GLM = dict(
    image_token_id='<image>',
    image_start_token_id='<image_start>',
    image_end_token_id='<image_end>',
    video_token_id='<video>',
    video_start_token_id='<video_start>',
    video_end_token_id='<video_end>',
)


@functools.cache
def _table(h: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Prefix of the classes and settings of each family for a hidden size; ``text_config`` is beside :func:`_text`."""
    i = h + 16
    vision = dict(
        hidden_size=h,
        intermediate_size=i,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    clip = dict(vision, model_type='clip_vision_model')
    siglip = dict(vision, model_type='siglip_vision_model', vision_use_head=False)
    pixtral = dict(vision, model_type='pixtral', image_size=2 * IMAGE_SIZE)
    mllama = dict(
        vision,
        attention_heads=2,
        num_global_layers=1,
        max_num_tiles=4,
        intermediate_layers_indices=[0],
        vision_output_dim=2 * h,
    )
    grid = dict(depth=2, hidden_size=h, num_heads=2, patch_size=PATCH_SIZE, spatial_merge_size=2, temporal_patch_size=2)
    windows = dict(grid, intermediate_size=i, window_size=16, fullatt_block_indexes=[1], out_hidden_size=h)
    deep = dict(grid, intermediate_size=i, out_hidden_size=h, num_position_embeddings=16, deepstack_visual_indexes=[0])
    glm = dict(
        depth=2,
        hidden_size=h,
        num_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        out_hidden_size=h,
        intermediate_size=h,
    )
    audio = dict(
        num_mel_bins=8,
        d_model=h,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=i,
        max_source_positions=50,
    )
    qformer = dict(
        vocab_size=600,
        hidden_size=h,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=i,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    queries = dict(vision_config=vision, qformer_config=qformer, num_query_tokens=4)
    llama, qwen2 = dict(model_type='llama'), dict(model_type='qwen2')
    mistral = dict(model_type='mistral', head_dim=h // 2, sliding_window=None)
    opt = dict(model_type='opt', ffn_dim=i, word_embed_proj_dim=h, dropout=0.0)
    mrope = dict(rope_scaling=dict(type='mrope', rope_type='default', mrope_section=[h // 8, h // 16, h // 16]))
    default = dict(rope_scaling=dict(mrope['rope_scaling'], type='default'))
    llava_next = dict(text_config=llama, vision_config=clip, **LAST, image_grid_pinpoints=PINPOINTS)
    idefics3 = dict(text_config=llama, vision_config=vision, image_token_id='<image>', scale_factor=2, **UNTIED)
    return {
        'llava': ('Llava', dict(text_config=llama, vision_config=clip, **IMAGE, **LAST, image_seq_length=NUM_PATCHES)),
        'llava_next': ('LlavaNext', dict(llava_next, **IMAGE, image_seq_length=NUM_PATCHES)),
        'llava_onevision': (
            'LlavaOnevision',
            dict(text_config=qwen2, vision_config=siglip, **VIDEO, **LAST, image_grid_pinpoints=PINPOINTS),
        ),
        'qwen2_vl': ('Qwen2VL', dict(text_config=mrope, vision_config=dict(grid, embed_dim=h, mlp_ratio=2), **QWEN)),
        'qwen2_5_vl': ('Qwen2_5_VL', dict(text_config=mrope, vision_config=windows, **QWEN)),
        'idefics3': ('Idefics3', idefics3),
        'smolvlm': ('SmolVLM', idefics3),
        'paligemma': (
            'PaliGemma',
            dict(
                text_config=dict(model_type='gemma', head_dim=8),
                vision_config=siglip,
                **IMAGE,
                projection_dim=h,
                hidden_size=h,
            ),
        ),
        'gemma3': (
            'Gemma3',
            dict(
                text_config=dict(model_type='gemma3_text', head_dim=8, sliding_window=64),
                vision_config=siglip,
                mm_tokens_per_image=NUM_PATCHES // 4,
                image_token_index='<image_soft_token>',
                boi_token_index='<start_of_image>',
                eoi_token_index='<end_of_image>',
            ),
        ),
        'mllama': (
            'Mllama',
            dict(
                text_config=dict(cross_attention_layers=[1], rope_scaling=dict(rope_type='default')),
                vision_config=mllama,
                image_token_index='<|image|>',
            ),
        ),
        'internvl': (
            'InternVL',
            dict(
                text_config=qwen2,
                vision_config=dict(vision, model_type='internvl_vision'),
                image_token_id='<IMG_CONTEXT>',
                image_seq_length=NUM_PATCHES // 4,
            ),
        ),
        'qwen3_vl': ('Qwen3VL', dict(text_config=dict(mrope, head_dim=h // 2), vision_config=deep, **QWEN)),
        'qwen2_5_omni': (
            'Qwen2_5OmniThinker',
            dict(
                text_config=default, vision_config=windows, audio_config=dict(audio, n_window=4, output_dim=h), **OMNI
            ),
        ),
        'qwen2_audio': (
            'Qwen2Audio',
            dict(
                text_config=qwen2,
                audio_config=dict(audio, model_type='qwen2_audio_encoder'),
                audio_token_index='<|AUDIO|>',
            ),
        ),
        'llava_next_video': ('LlavaNextVideo', dict(llava_next, **VIDEO)),
        'video_llava': ('VideoLlava', dict(text_config=llama, vision_config=clip, **VIDEO, **LAST)),
        'mistral3': (
            'Mistral3',
            dict(
                text_config=mistral,
                vision_config=pixtral,
                image_token_index='[IMG]',
                spatial_merge_size=2,
                **LAST,
                **UNTIED,
            ),
        ),
        'llava_pixtral': (
            'Llava',
            dict(
                text_config=mistral,
                vision_config=pixtral,
                image_token_index='[IMG]',
                **LAST,
                vision_feature_select_strategy='full',
            ),
        ),
        'glm4v': (
            'Glm4v',
            dict(
                text_config=dict(
                    rope_scaling=dict(
                        rope_type='default', rope_theta=10000.0, mrope_section=[2, 1, 1], partial_rotary_factor=1.0
                    )
                ),
                vision_config=glm,
                **GLM,
            ),
        ),
        # With a query transformer.
        'blip2': ('Blip2', dict(queries, text_config=opt, **IMAGE)),
        'instructblip': ('InstructBlip', dict(queries, text_config=llama, **IMAGE)),
        'instructblipvideo': ('InstructBlipVideo', dict(queries, text_config=llama, video_token_index='<video>')),
    }


CLASSES = {'llama': 'LlamaForCausalLM'} | {
    name: f'{prefix}ForConditionalGeneration' for name, (prefix, _) in _table(16).items()
}


def _text(ids: Any, hidden: int) -> dict[str, Any]:
    return dict(
        vocab_size=len(ids.tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden + 16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        pad_token_id=ids.pad_token_id,
        bos_token_id=ids.token_id('<s>'),
        eos_token_id=ids.token_id('</s>'),
        use_cache=False,
        **UNTIED,
    )


def config_of(name: str, ids: Any, *, hidden: int = 16) -> Any:
    """A fresh config, with the ids of its tokens (``SampleEncoder``, ``TokenIds``)."""
    if name == 'llama':
        return transformers.LlamaConfig(**_text(ids, hidden))
    prefix, settings = _table(hidden)[name]
    config_class = getattr(transformers, f'{prefix}Config')
    told: dict[str, Any] = {
        key: ids.token_id(value) if '_token_i' in key else dict(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
    }
    told['text_config'] |= {key: value for key, value in _text(ids, hidden).items() if key not in told['text_config']}
    # Up to 4.51 Qwen's text settings lie in the config itself, from 4.52 in `text_config`.
    if prefix.startswith('Qwen2') and 'VL' in prefix and 'text_config' not in config_class.sub_configs:
        told = {**told.pop('text_config'), **told}
    return config_class(**told)


def _model(name: str, ids: Any) -> PreTrainedModel:
    config = config_of(name, ids)
    config.use_cache = False
    config.get_text_config().use_cache = False
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, CLASSES[name])(config)
        set_large_weights(model, std=0.2)
    return model.float().train()


MODELS: dict[str, Callable[[Any], PreTrainedModel]] = {name: functools.partial(_model, name) for name in CLASSES}
