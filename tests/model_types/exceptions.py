# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Exceptions by model type: entries of its config by path, settings of its processors, and why it is not tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
        'vq_config.resolution': 16,
        'vocabulary_map': {'<image>': 150, **{f'IMGIMG{chr(65 + n)}Z': 110 + n for n in range(8)}},
    },
    'emu3': {
        'image_token_id': 150,
        'vq_config.codebook_size': 8,
        'vq_config.hidden_size': 128,
        'vocabulary_map': {
            '<image>': 150,
            '<|extra_200|>': 99,
            **{f'<|visual token {n:06}|>': 110 + n for n in range(8)},
        },
    },
    'esm': {'vocab_size': 160, 'pad_token_id': 1, 'mask_token_id': 2},
    'esmc': {'vocab_size': 160},
    'fast_vlm': {'vision_config.hidden_size': 16},
    'gemma3n': {
        'vision_config.hidden_size': 16,
        'vision_soft_tokens_per_image': 16,
    },
    'led': {'attention_window': [4, 4]},
    'longformer': {'attention_window': [4, 4]},
    'longt5': {'decoder_start_token_id': 0},
    'luke': {'entity_vocab_size': 8, 'entity_emb_size': 32},
    'mobilebert': {'intra_bottleneck_size': 32, 'true_hidden_size': 32},
    'perceiver': {'d_model': 32, 'd_latents': 32, 'num_latents': 8},
    'perception_lm': {'vision_config.model_args': {'embed_dim': 16}, 'vision_use_cls_token': False},
    'mistral4': {'rope_parameters.partial_rotary_factor': 1.0},
    'hunyuan_vl': {'text_config.head_dim': 16, 'text_config.rope_parameters': {**_ROPE, 'mrope_section': [2, 2, 2, 2]}},
    'molmo2': {'adapter_config.vision_feature_layer': [1, 0], 'vision_config.num_position_embeddings': 16},
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
        'text_config.global_head_dim': 16,  # of layers with full attention; 512 by default
        'vision_config.pooling_kernel_size': 2,
    },
    'gemma4_unified': {
        'vision_config': 'Gemma4UnifiedVisionConfig',
        'audio_config': 'Gemma4UnifiedAudioConfig',
        'audio_config.audio_embed_dim': 640,
    },
    'minicpm_ocr': _MINICPM,
    'minicpmv4_6': _MINICPM,
    'minicpmv4_7': _MINICPM,
    'blip-2': {'image_token_index': 150},
    'instructblip': {'image_token_index': 150},
    'instructblipvideo': {'video_token_index': 150},
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
    'dots3_note': {'audio_config.conv_output_size': 64, 'text_config.per_layer_config': {'1': {'head_dim': 32}}},
    'dots3_note_text': {'per_layer_config': {'1': {'head_dim': 32}}},
    'granite4_vision': {
        'downsample_rate': '1/2',
        'vision_config.hidden_size': 128,
        'deepstack_layer_map': [[0, 0], [1, 1]],
        'spatial_target_layers': [0, 1],
    },
    'qwen4_exp': {f'text_config.{key}': size for key, size in _INDEXER.items()},
    'qwen4_exp_text': _INDEXER,
    'qwen2_5_omni_thinker': {**_THINKER, 'text_config.rope_parameters': _ROPE},
    'qwen3_omni_moe_thinker': {**_THINKER, 'audio_config.downsample_hidden_size': 16},
    'switch_transformers': {'decoder_start_token_id': 0},
    't5gemma2': {'mm_tokens_per_image': 4},
    'step3p7': {'text_config.sliding_window': 64},
    'muse_glimmer': {'out_hidden_size': 128},
    'muse_spark': {
        'out_hidden_size': 128,
        'audio_config.hidden_sizes': [32, 32],
        'audio_config.depths': [1, 1],
    },
    'vipllava': {'vision_feature_layers': [-1, -2]},
    'mllama': {
        'vision_config.intermediate_layers_indices': [0, 1],
        'vision_config.vision_output_dim': 96,
        'text_config.cross_attention_layers': [1],
    },
    'llama4': {'vision_config.intermediate_size': 128},
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
    'glm4v_moe': {'text_config.rope_parameters': {**_ROPE, 'mrope_section': [2, 1, 1]}},
    'voxtral': {'audio_token_id': 150, 'audio_config.intermediate_size': 128, 'audio_config.max_source_positions': 100},
    'voxtral_realtime': {'audio_config.intermediate_size': 128},
    'qwen2_audio': {'ignore_index': -100},
    'vision-encoder-decoder': {'pad_token_id': 0, 'decoder_start_token_id': 1},
    'moss_transcribe_diarize': {'audio_config.max_source_positions': 100},
    'unlimited_ocr': {
        'vision_config.sam_config.downsample_channels': [32, 32],
        'vision_config.sam_config.output_channels': 32,
    },
    'udop': {'decoder_start_token_id': 0},
    'xlm': {'emb_dim': 32, 'n_heads': 2, 'n_layers': 2},
    't5': {'decoder_start_token_id': 0},
    'glmasr': {'audio_config.intermediate_size': 128},
    'janus': {'vq_config.channel_multiplier': [1, 1], 'vq_config.num_embeddings': 8},
    'phi4_multimodal': {
        'audio_config.nemo_conv_channels': 32,
        'audio_config.ext_pw_out_channel': 32,
        'audio_config.depthwise_separable_out_channel': 32,
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
    'hunyuan_v1_moe': {'head_dim': 16, 'num_experts': 4, 'num_experts_per_tok': 2},
    'jamba': {'attn_layer_period': 2, 'attn_layer_offset': 1},
    'lfm2_moe': {'layer_types': ['conv', 'full_attention'], 'num_dense_layers': 1},
    'mamba2': {'num_heads': 4},
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
        'attention_hidden_size': 64,
        'attention_head_dim': 32,
    },
}


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How rows of a model type are made, if not by its processors alone.

    Args:
        image: Settings of its image processor. ``name``: the class, if transformers names none, or another one.
        video: The same for videos.
        audio: The same for sounds.
        like: Another type, whose processors it uses.
        modalities: Its modalities, if it has fewer than processors.
        one_each: Set for types that need one image in each row. ``'text'``: the image has no placeholders.
            ``'decoder'``: there is no text but the labels of a decoder. ``'seq2seq'``: text and labels of a decoder.
            ``'masked'``: a mask tells the placeholders.
        items: By modality the numbers of the media of each row.
        counts: By modality the number of placeholders of a medium, or a function of its number.
        video_runs: Into how many runs the placeholders of a video are divided.
        nested: Images and videos are given as a list for each row.
        lists: Entries of a batch that must be lists.
        slots: Images have slots, and a mask says which token sees which slot (Idefics).
        frames_as_images: Frames of videos have the placeholder of images.
        words: Returns the number of tokens of a row with these media, for types whose sounds decide it.
        sound_length: Samples of the shortest sound.
        audio_call: Arguments of the call of the audio processor.
        sound_size: Features of a frame, for types whose audio processor needs torchaudio. 0: it is there.
        frames_per_token: Frames of such a sound for each token.
        proteins: Proteins take the place of images.
        decoder_ids: A batch also has ids of a decoder.
        codes: Codes of sounds stand beside the ids.
        robot: A batch has states and actions of a robot instead of labels.
    """

    image: Mapping[str, Any] = field(default_factory=dict)
    video: Mapping[str, Any] = field(default_factory=dict)
    audio: Mapping[str, Any] = field(default_factory=dict)
    like: str = ''
    modalities: Sequence[str] = ('image', 'video', 'audio')
    one_each: Literal['', 'text', 'decoder', 'seq2seq', 'masked'] = ''
    items: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    counts: Mapping[str, int | Callable[[int], int]] = field(default_factory=dict)
    video_runs: int = 1
    nested: bool = False
    lists: Sequence[str] = ()
    slots: bool = False
    frames_as_images: bool = False
    words: Callable[[Mapping[str, torch.Tensor]], int] | None = None
    sound_length: int = 3200
    audio_call: Mapping[str, Any] = field(default_factory=dict)
    sound_size: int = 0
    frames_per_token: int = 1
    proteins: bool = False
    decoder_ids: bool = False
    codes: bool = False
    robot: bool = False


_SQUARE = {'height': 64, 'width': 64}
_ONE_IN_A_ROW = [[0], [1], [2]]
_FULL_SOUND = {'padding': 'max_length'}
_GEMMA_PATCHES = {'image': {'max_soft_tokens': 70}, 'video': {'max_soft_tokens': 70}}
# As few patches as its pooling allows.
_GEMMA4_PATCHES = {name: {**sizes, 'pooling_kernel_size': 2} for name, sizes in _GEMMA_PATCHES.items()}
_FRAMES_AS_IMAGES = RowSettings(frames_as_images=True)
_NESTED = RowSettings(nested=True)
_CLIP = RowSettings(image={'name': 'CLIPImageProcessor'})
_TINY_IMAGES = RowSettings(image={'size': {'height': 8, 'width': 8}})
# Torchaudio makes their features: three tokens for 15 frames.
_GRANITE_SPEECH = RowSettings(sound_size=32, frames_per_token=5)

ROWS: dict[str, RowSettings] = {
    'aria': RowSettings(image={'max_image_size': 490}),
    'blip': RowSettings(one_each='text'),
    'diffusion_gemma': RowSettings(like='gemma4', **_GEMMA_PATCHES),
    'dots3_note': RowSettings(image={'temporal_patch_size': 1}, video={'temporal_patch_size': 1}),
    'ernie4_5_vl_moe': RowSettings(video={'draw_on_frames': False}),
    'evolla': RowSettings(proteins=True, one_each='text'),
    'fast_vlm': _CLIP,
    'florence2': RowSettings(image={'size': _SQUARE, 'crop_size': _SQUARE}),
    'fun_asr_nano': RowSettings(sound_size=112),  # seven stacked frames of 16 bins
    'gemma3n': _CLIP,
    'gemma4': RowSettings(**_GEMMA4_PATCHES),
    'gemma4_unified': RowSettings(**_GEMMA_PATCHES),
    'git': RowSettings(one_each='text'),
    'glm46v': _FRAMES_AS_IMAGES,
    'glm4v': _FRAMES_AS_IMAGES,
    'glm4v_moe': RowSettings(like='glm4v', frames_as_images=True),
    'glm5_next': _FRAMES_AS_IMAGES,
    'glm_ocr': RowSettings(like='glm46v', frames_as_images=True),
    'glmasr': RowSettings(sound_length=3840),
    'glmga': _FRAMES_AS_IMAGES,
    'granite_docling': _NESTED,
    'granite_speech': _GRANITE_SPEECH,
    'granite_speech_plus': _GRANITE_SPEECH,
    'idefics': RowSettings(slots=True, one_each='text'),
    'idefics2': _NESTED,
    'idefics3': _NESTED,
    'inkling2': _TINY_IMAGES,
    'inkling2_loop': _TINY_IMAGES,
    'instructblip': RowSettings(modalities=('image',)),
    'kosmos-2': RowSettings(one_each='masked'),
    'kosmos-2.5': RowSettings(one_each='masked'),
    'kyutai_speech_to_text': RowSettings(modalities=(), codes=True),
    'lfm2_vl': RowSettings(image={'max_num_patches': 64, 'encoder_patch_size': 4, 'tile_size': 32}),
    # Several images in a row are not cut into tiles.
    'llava_onevision': RowSettings(nested=True, items={'image': _ONE_IN_A_ROW}),
    'mllama': RowSettings(nested=True, items={'image': _ONE_IN_A_ROW}, counts={'image': 1}),
    'molmo2': RowSettings(image={'overlap_margins': [1, 1]}),
    'moss_transcribe_diarize': RowSettings(audio_call=_FULL_SOUND, audio={'chunk_length': 2}),
    'nemo_speechlm': RowSettings(sound_length=3680, audio={'feature_size': 16}),
    'nemotron_h_omni': RowSettings(
        video={'norm_mean': [0.5] * 3, 'norm_std': [0.5] * 3, 'video_target_num_patches': 16}
    ),
    'perception_lm': RowSettings(image={'max_num_tiles': 2}, items={'image': [[1], [], [1, 1], []]}),
    'pi0': RowSettings(modalities=(), robot=True),
    'pix2struct': RowSettings(one_each='decoder'),
    'pp_formulanet': RowSettings(decoder_ids=True, one_each='decoder'),
    'qwen2_5_omni_thinker': RowSettings(like='qwen2_5_omni'),
    'qwen2_audio': RowSettings(audio_call=_FULL_SOUND, counts={'audio': lambda item: 5 + 2 * item}),
    'qwen3_omni_moe_thinker': RowSettings(like='qwen3_omni_moe'),
    'qwen3_vl': RowSettings(video_runs=2),
    'qwen3_vl_moe': RowSettings(like='qwen3_vl'),
    'smolvlm': RowSettings(nested=True, items={'video': _ONE_IN_A_ROW}),
    'udop': RowSettings(image={'name': 'ViTImageProcessor'}, one_each='seq2seq'),
    'unlimited_ocr': RowSettings(items={'image': _ONE_IN_A_ROW}, lists=('num_local_patches',)),
    'video_llava': RowSettings(counts={'image': 16}),
    'vision-encoder-decoder': RowSettings(image={'name': 'ViTImageProcessor'}, one_each='decoder'),
    'voxtral': RowSettings(audio_call=_FULL_SOUND, audio={'chunk_length': 2}),
    'voxtral_realtime': RowSettings(
        sound_length=5120,
        words=lambda media: media['input_features'].shape[-1] // 8,
        one_each='text',
    ),
}
"""Model types that need settings for their rows."""

if transformers.__version__.startswith('4.'):  # transformers 5 has these by default
    CONFIGS['qwen3_vl'] = {'text_config.rope_parameters': _ROPE}
    CONFIGS['mistral3'] = {'vision_config.image_size': 32}
    CONFIGS['mllama'] |= {'text_config.rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4}}
    _OLD_PROCESSORS = {
        'blip-2': {'image': 'BlipImageProcessor'},
        'idefics3': {'image': 'Idefics3ImageProcessor'},
        'internvl': {'image': 'GotOcr2ImageProcessorFast'},
        'llava_next_video': {'image': 'LlavaNextImageProcessor'},
        'qwen2_5_omni': {
            'image': 'Qwen2VLImageProcessor',
            'video': 'Qwen2VLVideoProcessor',
            'audio': 'WhisperFeatureExtractor',
        },
        'qwen2_audio': {'audio': 'WhisperFeatureExtractor'},
        'smolvlm': {'image': 'SmolVLMImageProcessor'},
        'video_llava': {'image': 'VideoLlavaImageProcessor', 'video': 'VideoLlavaVideoProcessor'},
    }
    for _model_type, _class_names in _OLD_PROCESSORS.items():
        _settings = {modality: {'name': class_name} for modality, class_name in _class_names.items()}
        ROWS[_model_type] = replace(ROWS.get(_model_type, RowSettings()), **_settings)

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
