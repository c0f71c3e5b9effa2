# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Exceptions by model type: entries of its config by path, settings of its processors, and why it is not tried."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_ROPE = {'rope_theta': 1e4, 'rope_type': 'default', 'mrope_section': [4, 2, 2]}
_MROPE = ('glm_ocr', 'glmga', 'qwen2_vl', 'qwen2_5_vl', 'glm46v', 'glm4v', 'paddleocr_vl')
_THINKER = {'vision_start_token_id': 152, 'vision_end_token_id': 153}
_MINICPM = {'image_token_id': 150, 'video_token_id': 151, 'insert_layer_id': 0}

_INDEXER = {
    'indexer_n_heads': 2,
    'indexer_kv_heads': 1,
    'indexer_head_dim': 16,
    'indexer_budget': 64,
    'indexer_compress_ratio': 4,
}

CONFIGS: dict[str, dict[str, Any]] = {
    'apertus1p5': {
        'image_token_offset': 110,
        'audio_token_offset': 118,
        'vision_config.codebook_size': 8,
        'vision_config.base_channels': 32,
        'audio_config.codebook_size': 8,
        'audio_config.codebook_dim': 32,
    },
    'aria': {
        'vision_config.patch_size': 98,
        'vision_config.image_size': 490,
        'projector_patch_to_query_dict': {25: 4},
        'max_value_projector_patch_to_query_dict': 4,
    },
    'chameleon': {
        'image_token_id': 150,
        'vq_config.num_embeddings': 8,
        'vq_config.base_channels': 32,
        'vq_config.resolution': 16,
        'vocabulary_map': {'<image>': 150, **{f'IMGIMG{chr(65 + n)}Z': 110 + n for n in range(8)}},
    },
    'emu3': {
        'image_token_id': 150,
        'vq_config.codebook_size': 8,
        'vq_config.hidden_size': 128,
        'vq_config.base_channels': 32,
        'vocabulary_map': {
            '<image>': 150,
            '<|extra_200|>': 99,
            **{f'<|visual token {n:06}|>': 110 + n for n in range(8)},
        },
    },
    'fast_vlm': {'vision_config.hidden_size': 16},
    'gemma3n': {
        'vision_config.hidden_size': 16,
        'vision_soft_tokens_per_image': 16,
        'text_config.num_kv_shared_layers': 0,
    },
    'perception_lm': {'vision_config.model_args': {'embed_dim': 16}, 'vision_use_cls_token': False},
    'mistral4': {'rope_parameters.partial_rotary_factor': 1.0},
    'hunyuan_vl': {'text_config.head_dim': 16, 'text_config.rope_parameters': {**_ROPE, 'mrope_section': [2, 2, 2, 2]}},
    'molmo2': {
        'adapter_config.vision_feature_layer': [1, 0],
        'vision_config.image_size': [16, 16],
        'vision_config.num_position_embeddings': 16,
        'adapter_config.text_hidden_size': 32,
        'text_config.rope_scaling_layers': None,
    },
    'fun_asr_nano': {'adaptor_config.intermediate_size': 8},
    'ernie4_5_vl_moe': {
        'text_config.moe_intermediate_size': [32, 32],
        'text_config.rope_parameters': {**_ROPE, 'mrope_section': [3, 3, 2]},
    },
    **{name: {'text_config.rope_parameters': _ROPE} for name in _MROPE},
    'gemma4': {
        'vision_config': 'Gemma4VisionConfig',
        'audio_config': 'Gemma4AudioConfig',
        'audio_config.subsampling_conv_channels': [128, 4],
    },
    'gemma4_unified': {
        'vision_config': 'Gemma4UnifiedVisionConfig',
        'audio_config': 'Gemma4UnifiedAudioConfig',
        'audio_config.audio_embed_dim': 640,
    },
    'minicpm_ocr': _MINICPM,
    'minicpmv4_6': _MINICPM,
    'minicpmv4_7': _MINICPM,
    'blip-2': {'image_token_id': 150, 'image_token_index': 150},
    'instructblip': {'image_token_id': 150, 'image_token_index': 150},
    'instructblipvideo': {'video_token_id': 150, 'video_token_index': 150},
    'cohere_compass': {'text_config.rope_parameters': {'full_attention': _ROPE, 'sliding_attention': _ROPE}},
    'deepseek_ocr2': {
        'text_config.mlp_layer_types': ['dense', 'sparse'],
        'text_config.num_experts_per_tok': 2,
        'text_config.n_group': 1,
        'text_config.topk_group': 1,
        'vision_config.sam_config.global_attn_indexes': [1],
        'vision_config.sam_config.downsample_channels': [32, 32],
        'vision_config.sam_config.output_channels': 32,
    },
    'diffusion_gemma': {
        'text_config.num_experts': 4,
        'text_config.top_k_experts': 2,
        'text_config.moe_intermediate_size': 32,
    },
    'dots3_note': {'audio_config.conv_output_size': 64},
    'granite4_vision': {
        'downsample_rate': '1/2',
        'vision_config.hidden_size': 128,
        'qformer_config.hidden_size': 128,
        'deepstack_layer_map': [[0, 0], [1, 1]],
        'spatial_target_layers': [0, 1],
    },
    'qwen4_exp': {f'text_config.{key}': size for key, size in _INDEXER.items()},
    'qwen4_exp_text': _INDEXER,
    'qwen2_5_omni_thinker': {**_THINKER, 'text_config.rope_parameters': _ROPE},
    'qwen3_omni_moe_thinker': {**_THINKER, 'audio_config.downsample_hidden_size': 16},
    'gemma3': {'mm_tokens_per_image': 4},
    'shieldgemma2': {'mm_tokens_per_image': 4},
    't5gemma2': {'encoder.mm_tokens_per_image': 4, 'mm_tokens_per_image': 4},
    'step3p7': {'text_config.sliding_window': 64},
    'muse_glimmer': {'out_hidden_size': 128},
    'muse_spark': {
        'out_hidden_size': 128,
        'audio_config.num_hidden_layers': 2,
        'audio_config.patch_sizes': [16, 6],
        'audio_config.hidden_sizes': [32, 32],
        'audio_config.depths': [1, 1],
    },
    'vipllava': {'vision_feature_layers': [-1, -2]},
    'mllama': {
        'vision_config.intermediate_layers_indices': [0, 1],
        'vision_config.vision_output_dim': 96,
        'text_config.cross_attention_layers': [1],
        'vision_config.attention_heads': 2,
    },
    'llama4': {'vision_config.intermediate_size': 128},
    'kosmos-2.5': {'latent_query_num': 4, 'vision_config.patch_embed_hidden_size': 48},
    'pix2struct': {'vision_config.patch_embed_hidden_size': 48},
    'kyutai_speech_to_text': {'codec_config.upsample_groups': 32},
    'nemotron_h_omni': {
        'image_token_id': 150,
        'video_token_id': 151,
        'audio_token_id': 152,
        'vision_config.max_img_size': 64,
    },
    'florence2': {
        'vision_config.embed_dim': [16, 16, 32, 32],
        'vision_config.num_heads': [2] * 4,
        'vision_config.num_groups': [2] * 4,
        'vision_config.depths': [1] * 4,
        'vision_config.window_size': 2,
        'vision_config.patch_size': [7, 3, 3, 3],
    },
    'lfm2_vl': {'vision_config.num_patches': 16},
    **{name: {'text_config.rope_parameters': {**_ROPE, 'mrope_section': [2, 1, 1]}} for name in ('glm4v_moe',)},
    'voxtral': {'audio_token_id': 150, 'audio_config.intermediate_size': 128, 'audio_config.max_source_positions': 100},
    'voxtral_realtime': {'audio_config.intermediate_size': 128},
    'qwen2_audio': {'ignore_index': -100},
    'vision-encoder-decoder': {'pad_token_id': 0, 'decoder_start_token_id': 1},
    'kosmos-2': {'latent_query_num': 4},
    'moss_transcribe_diarize': {'audio_config.max_source_positions': 100},
    'unlimited_ocr': {
        'vision_config.sam_config.downsample_channels': [32, 32],
        'vision_config.sam_config.output_channels': 32,
    },
    'udop': {'decoder_start_token_id': 0},
    't5': {'decoder_start_token_id': 0},
    'glmasr': {'audio_config.intermediate_size': 128},
    'janus': {'vq_config.base_channels': 32, 'vq_config.channel_multiplier': [1, 1], 'vq_config.num_embeddings': 8},
    'phi4_multimodal': {
        'audio_config.nemo_conv_channels': 32,
        'audio_config.ext_pw_out_channel': 32,
        'audio_config.depthwise_separable_out_channel': 32,
        'vision_config.crop_size': 16,
    },
    'deepseek_vl_hybrid': {'high_res_vision_config.global_attn_indexes': [0]},
    'vibevoice_asr': {
        **{
            f'{part}_tokenizer_encoder_config.{key}': value
            for part in ('acoustic', 'semantic')
            for key, value in (('num_filters', 1), ('depths', [1] * 7))
        },
    },
    # Text.
    'bailing_hybrid': {'topk_group': 1},
    'codegen': {'n_head': 4, 'rotary_dim': 4},
    'cohere_compass_text': {'rope_parameters': {'full_attention': _ROPE, 'sliding_attention': _ROPE}},
    'dbrx': {'attn_config.rope_theta': 1e4, 'attn_config.clip_qkv': 8.0},
    'deepseek_v2': {'num_experts_per_tok': 2},
    'dory': {
        'num_hidden_layers': 4,
        'n_input_layers': 1,
        'n_recurrent_layers': 2,
        'n_output_layers': 1,
        'layer_types': ['sliding_attention', 'full_attention'] * 2,
    },
    'dots1': {'n_routed_experts': 4, 'num_experts_per_tok': 2, 'n_shared_experts': 1, 'moe_intermediate_size': 32},
    'hunyuan_v1_dense': {'head_dim': 16},
    'hunyuan_v1_moe': {'head_dim': 16, 'num_experts': 4, 'moe_topk': [2, 2], 'num_experts_per_tok': 2},
    'jamba': {'attn_layer_period': 2, 'attn_layer_offset': 1},
    'lfm2_moe': {'layer_types': ['conv', 'full_attention'], 'num_dense_layers': 1},
    'mamba2': {'num_heads': 4, 'n_groups': 1},
    'mimo_v2_flash': {
        'num_attention_heads': 4,
        'rope_parameters': {
            kind: {'rope_type': 'default', 'rope_theta': 1e4, 'partial_rotary_factor': 0.5}
            for kind in ('full_attention', 'sliding_attention')
        },
    },
    'ministral': {'head_dim': 16},
    'nemotron': {'num_key_value_heads': 2},
    'recurrent_gemma': {'num_hidden_layers': 3},
    'reformer': {'is_decoder': True, 'axial_pos_embds': False},
    'xlstm': {'mode': 'train', 'chunk_size': 1},
    'falcon_h1': {'mamba_d_head': 16},
    'xmod': {'default_language': 'en_XX'},
    'zamba': {
        'attention_hidden_size': 64,
        'attention_head_dim': 32,
        'num_hidden_layers': 4,
        'layers_block_type': ['linear_attention', 'hybrid'] * 2,
    },
    'zamba2': {
        'num_hidden_layers': 4,
        'layers_block_type': ['linear_attention', 'hybrid'] * 2,
        'hybrid_layer_ids': [1, 3],
        'n_mamba_heads': 4,
        'mamba_headdim': 16,
        'mamba_ngroups': 1,
        'attention_hidden_size': 64,
        'attention_head_dim': 32,
    },
}

_GEMMA_PATCHES = {'image': {'patch_size': 4, 'max_soft_tokens': 70}, 'video': {'patch_size': 4, 'max_soft_tokens': 70}}
_SQUARE = {'height': 64, 'width': 64}
_FULL_SOUND = {'audio_call': {'padding': 'max_length'}}

_ALONE: list[list[int]] = [[0], [1], [2]]

PROCESSORS: dict[str, dict[str, Any]] = {
    **{name: {'image': {'name': 'CLIPImageProcessor'}} for name in ('fast_vlm', 'gemma3n')},
    'perception_lm': {'image': {'max_num_tiles': 2, 'tile_size': 16}, 'image_items': [[1], [], [1, 1], []]},
    'nemotron_h_omni': {
        'video': {
            'norm_mean': [0.5] * 3,
            'norm_std': [0.5] * 3,
            'patch_size': 4,
            'video_target_num_patches': 16,
        }
    },
    'pp_formulanet': {'decoder_ids': True},
    'unlimited_ocr': {'image_items': _ALONE, 'lists': ('num_local_patches',)},
    'aria': {'image': {'max_image_size': 490}},
    'qwen3_omni_moe_thinker': {'like': 'qwen3_omni_moe'},
    'qwen2_5_omni_thinker': {'like': 'qwen2_5_omni'},
    'molmo2': {'image': {'overlap_margins': [1, 1]}},
    'gemma4': _GEMMA_PATCHES,
    'gemma4_unified': _GEMMA_PATCHES,
    'glm4v': {'frames': True},
    'glm46v': {'frames': True},
    'glmga': {'frames': True},
    'glm5_next': {'frames': True},
    'glm4v_moe': {'like': 'glm4v', 'frames': True},
    'glm_ocr': {'like': 'glm46v', 'frames': True},
    'qwen3_vl': {'video_runs': 2},
    'qwen3_vl_moe': {'like': 'qwen3_vl'},
    'vision-encoder-decoder': {'image': {'name': 'ViTImageProcessor'}},
    **{name: {'nested': True} for name in ('idefics2', 'idefics3', 'smolvlm', 'granite_docling')},
    'mllama': {'nested': True, 'image_items': _ALONE, 'image_count': 1},
    'idefics': {'slots': True},
    'moss_transcribe_diarize': {**_FULL_SOUND, 'audio': {'chunk_length': 2}},
    'voxtral': {**_FULL_SOUND, 'audio': {'chunk_length': 2}},
    'glmasr': {'length': 3840},
    'voxtral_realtime': {'length': 5120, 'words': lambda media: media['input_features'].shape[-1] // 8},
    'llava_onevision': {'nested': True, 'image_items': _ALONE},  # several in a row are not cut into tiles
    'ernie4_5_vl_moe': {'video': {'draw_on_frames': False}},
    'florence2': {'image': {'size': _SQUARE, 'crop_size': _SQUARE}},
    'lfm2_vl': {'image': {'max_num_patches': 64, 'encoder_patch_size': 4, 'tile_size': 32}},
    **{name: {'image': {'size': {'height': 8, 'width': 8}}} for name in ('inkling2', 'inkling2_loop')},
    'dots3_note': {'image': {'temporal_patch_size': 1}, 'video': {'temporal_patch_size': 1}},
    'diffusion_gemma': {'like': 'gemma4', **_GEMMA_PATCHES},
    'nemo_speechlm': {'length': 3680, 'audio': {'feature_size': 16}},
    'kyutai_speech_to_text': {'modalities': (), 'codes': True},
    'pi0': {'modalities': (), 'robot': True},
    'smolvlm': {'nested': True, 'video_items': [[0], [1], [2]]},
    'video_llava': {'image_count': 16},
    'udop': {'image': {'name': 'ViTImageProcessor', 'size': {'height': 16, 'width': 16}}},
    'evolla': {'image_media': 'protein'},
    # torchaudio makes their features: three tokens for 15 frames; seven stacked frames of 16 bins.
    'granite_speech': {'sound_size': 32, 'frames_a_token': 5},
    'granite_speech_plus': {'sound_size': 32, 'frames_a_token': 5},
    'fun_asr_nano': {'sound_size': 112},
    'instructblip': {'modalities': ('image',)},
    'qwen2_audio': {**_FULL_SOUND, 'audio_count': lambda maker, item: 5 + 2 * item},
}
"""Settings of processors by model type and modality. Other keys:

- ``like``: another type, whose processors it uses. ``modalities``: if it has fewer than its processors.
- ``image_items`` (and of videos): the media of each row, for types that take at most one in a row.
- ``image_count`` (and of audios): placeholders of a medium. ``video_runs``: runs of placeholders of a video.
- ``nested``: images come as a list for each row. ``lists``: entries that must be lists. ``slots``: for Idefics.
- ``frames``: frames of videos have the placeholder of images.
- ``words``: the number of tokens of a row, for types whose audios decide it. ``length``: samples of an audio.
- ``audio_call``: arguments of the audio processor's call. ``sound_size``, ``frames_a_token``: if there is none.
- ``image_media``: other tensors that take the place of images.
- ``decoder_ids``, ``codes``, ``robot``: further entries of a batch.
"""

if transformers.__version__.startswith('4.'):  # what later releases have by default
    CONFIGS['qwen3_vl'] = {'text_config.rope_parameters': _ROPE}
    CONFIGS['mistral3'] = {'vision_config.image_size': 32}
    CONFIGS['mllama'] |= {'text_config.rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4}}
    PROCESSORS['internvl'] = {'image': {'name': 'GotOcr2ImageProcessorFast'}}
    PROCESSORS['qwen2_audio'] |= {'audio': {'name': 'WhisperFeatureExtractor'}}

THINKERS = {'qwen2_5_omni': 'qwen2_5_omni_thinker', 'qwen3_omni_moe': 'qwen3_omni_moe_thinker'}
"""Types whose forward takes no batch, and the type of their part that is trained."""

NEWER = 'it wants torch 2.8 or newer: scatter of int32'
_IS_OLD = tuple(map(int, torch.__version__.split('.')[:2])) < (2, 8)
UNTRIED: dict[str, str] = {'glm5_next': NEWER, 'qwen4_exp': NEWER} if _IS_OLD else {}
"""Types that are not tried, and why."""

_DRAFTS = 'it drafts for another model, whose states it takes'
_DECODES = 'its decoder writes what is no text'
UNTRIED_TEXT: dict[str, str] = {
    'gemma4_assistant': _DRAFTS,
    'gemma4_unified_assistant': _DRAFTS,
    'git': 'it takes no batch without images; it stands among the multimodal types',
    'musicgen': _DECODES,
    'musicgen_melody': _DECODES,
    **({'qwen4_exp': NEWER, 'qwen4_exp_text': NEWER} if _IS_OLD else {}),
}
"""The same for text types."""

ONE_EACH: dict[str, str] = {
    'blip': 'text',
    'idefics': 'text',
    'git': 'text',
    'pix2struct': 'decoder',
    'pp_formulanet': 'decoder',
    'vision-encoder-decoder': 'decoder',
    'udop': 'seq2seq',
    'kosmos-2': 'masked',
    'kosmos-2.5': 'masked',
    'evolla': 'text',
    'voxtral_realtime': 'text',
}
"""Types that need one image in each row.

``'text'``: the image has no placeholders. ``'decoder'``: there is no text but the labels of a decoder. ``'seq2seq'``:
text and labels of a decoder. ``'masked'``: placeholders are told by a mask."""
