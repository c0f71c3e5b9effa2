# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A tiny model of any type of transformers: its default config with every size made small, by the name of the size."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.model_types.exceptions import CONFIGS

VOCABULARY, FIRST_MARK = 160, 100
"""Ids of words are 4 to 99; those that the config names follow."""
HIDDEN, HEAD, PATCH, IMAGE, MEL = 32, 16, 4, 16, 16

SIZES: Mapping[str, int] = {
    r'dropout|drop_path|drop_rate|dropout_rate|layerdrop|jitter': 0,
    r'pos_emb_.*': 8,
    r'position_embedding_size': 1024,
    r'mamba_(n|num)_heads': 4,
    r'mamba_d_ssm': 64,
    r'qk_head_dim': 2 * HEAD,
    r'num_expert_group': 1,
    r'num_experts_per_token': 2,
    r'(decoder_|encoder_|unpadded_)?vocab_size|vocab_size_per_layer_input': VOCABULARY,
    r'num_kv_shared_layers|num_nextn_predict_layers|first_k_dense_replace|mtp_num_hidden_layers|num_mtp_layers': 0,
    r'(qk_(rope|nope)_|v_|mamba_|global_|kv_|index_|linear_(key|value)_)?head_dim|attention_head_size'
    r'|d_kv|mamba_d_head|kv_channels'
    r'|d_head|head_size': HEAD,
    r'[qkvo]+_lora_rank|rotary_dim': HEAD,
    r'num_(key_value|kv|global_key_value)_heads|.*num_.*heads?|n_heads?|.*attention_heads|linear_num_.*_heads|.*_heads|'
    r'num_attention_groups|num_query_groups|multi_query_group_num': 2,
    r'(num_|n_)?(routed_|local_|text_|moe_)?(num_)?experts|moe_num_experts|n_routed_experts': 4,
    r'num_experts_per_tok|moe_k|moe_top_?k|num_selected_experts|top_k_experts|experts_per_token|moe_topk': 2,
    r'n_group|topk_group|n_groups|mamba_n_groups|moe_layer_start_index': 1,
    r'(num_|n_)?(hidden_|encoder_|decoder_|transformer_|vision_|global_|vit_'
    r'|text_)*(num_)?(hidden_)?(layers?|depth|blocks)|num_res_blocks': 2,
    r'(.*_)?(hidden_size|hidden_dim|embed_dim|d_model|n_embd|embedding_size|hidden_channels|dim_model|model_dim'
    r'|projection_dim|embedding_dim|proj_dim|embed_size|input_dim|output_dim|output_hidden_size|width|attention_dim)'
    r'|dim|channels|vision_output_dim|adapter_(in|out)_dim|adapter_input_size|mm_embed_dim'
    r'|output_proj_dims|audio_embed_dim|word_embed_proj_dim|hidden_size_per_layer_input': HIDDEN,
    r'(.*_)?(intermediate_size|downsample_hidden_size|ffn_dim|ffn_hidden_size|mlp_dim|d_ff|n_inner'
    r'|expert_dim|intermediate_dim|feedforward_dim)': 48,
    r'patch_size|encoder_patch_size|vision_patch_size': PATCH,
    r'image_size|window_size|img_size|crop_size|tile_size|vision_image_size|projector_patch_to_query': IMAGE,
    r'num_mel_bins|feature_size|mel_bins': MEL,
    r'max_source_positions': 50,
    r'num_query_tokens': 4,
    r'sliding_window|attention_chunk_size': 64,
    r'chunk_size|mamba_chunk_size': 8,
    r'state_size|ssm_state_size|mamba_d_state|d_state': 8,
}
_SIZES = [(re.compile(rf'^({pattern})$'), size) for pattern, size in SIZES.items()]
ROPE = 'rope_scaling' if transformers.__version__.startswith('4.') else 'rope_parameters'
_KEPT = ('model_type', 'torch_dtype', 'dtype', 'architectures', 'transformers_version')


def tiny_config(model_type: str, settings: Mapping[str, Any] | None = None) -> Any:
    """A fresh config of the type; ids that it names lie inside of the vocabulary.

    ``settings`` are further entries by path, as in :data:`CONFIGS`.
    """
    config_class = CONFIG_MAPPING[model_type]
    extra = CONFIGS.get(model_type, {}) | dict(settings or {})
    values = config_class().to_dict()
    marks: dict[int, int] = {}
    parts = {path: value for path, value in extra.items() if isinstance(value, str) and value.endswith('Config')}
    values |= {path: getattr(transformers, name)().to_dict() for path, name in parts.items()}
    _shrink(values, marks)
    for path, value in extra.items():
        if path in parts:
            continue
        value = copy.deepcopy(value)  # configs write into their dicts
        *parents, name = path.replace('rope_parameters', ROPE).split('.')
        place = functools.reduce(lambda part, key: part.setdefault(key, {}), parents, values)
        is_known_mark = isinstance(value, int) and name.endswith(('_id', '_index')) and path not in (settings or {})
        place[name] = marks.get(value, value) if is_known_mark else value
    values = {key: value for key, value in values.items() if key not in _KEPT}
    return config_class(**values)


def _shrink(values: dict[Any, Any], marks: dict[int, int]) -> None:
    if not all(isinstance(name, str) for name in values):
        return
    layers = values.get('num_hidden_layers') or values.get('num_layers') or values.get('n_layer')
    by_layer = {
        key: value
        for key, value in values.items()
        if isinstance(value, (list, tuple))
        and isinstance(layers, int)
        and layers > 1
        and len(value) == layers
        and not key.startswith('hidden_sizes')
    }
    kinds = max([2, *(len(set(map(str, value))) for key, value in by_layer.items() if isinstance(value[0], str))])
    for name, value in list(values.items()):
        if isinstance(value, dict) and name != 'per_layer_config' and name not in ('id2label', 'label2id'):
            _shrink(value, marks)
        elif name == 'per_layer_config':
            values.pop(name)
        elif name == 'image_grid_pinpoints' and value:
            values[name] = [[16, 32], [32, 16], [32, 32]]
        elif name in by_layer:
            kept = list(dict.fromkeys(value))
            values[name] = [*kept, *[kept[-1]] * kinds][:kinds]
        elif name in ('image_size', 'patch_size') and isinstance(value, (list, tuple)):
            values[name] = [IMAGE if name == 'image_size' else PATCH] * len(value)
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            if name == 'mrope_section':
                values[name] = [value and HEAD // 2 - 2 * (HEAD // 6), HEAD // 6, HEAD // 6]
            continue
        elif re.search('_(token_id|token_index|id|index)$', name) and isinstance(value, int) and value > 3:
            values[name] = marks.setdefault(value, FIRST_MARK + len(marks))
        elif re.search('dropout|pdrop|drop_path|drop_rate|layerdrop|jitter', name):
            values[name] = type(value)(0)
        elif isinstance(value, int) and value:
            size = next((size for pattern, size in _SIZES if pattern.match(name)), value)
            if size == 2 and ('layer' in name or 'depth' in name):
                size = kinds if name in ('num_hidden_layers', 'num_layers', 'n_layer') else 2
            values[name] = (
                min(size, value)
                if name == 'position_embedding_size' or not name.endswith('size') or name == 'vocab_size'
                else size
            )
            if name == 'max_position_embeddings':
                values[name] = min(value, 4096)


class TimmStandIn(transformers.PreTrainedModel):
    """One convolution in place of an encoder of timm: what a batch holds is the processor's, not the encoder's."""

    config_class = transformers.TimmWrapperConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.is_sequence = 'embed_dim' in (config.model_args or {})
        size = config.model_args['embed_dim'] if self.is_sequence else config.hidden_size
        self.patches = torch.nn.Conv2d(3, size, PATCH, PATCH)

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> Any:
        found = self.patches(pixel_values)  # (images, size, height, width)
        found = found.flatten(2).transpose(1, 2) if self.is_sequence else found
        return BaseModelOutputWithPooling(last_hidden_state=found)


class Gemma3nStandIn(TimmStandIn):
    """The same, of Gemma 3n's own config."""

    config_class = transformers.Gemma3nVisionConfig


for _stand_in in (TimmStandIn, Gemma3nStandIn):
    transformers.AutoModel.register(_stand_in.config_class, _stand_in, exist_ok=True)


def tiny_model(config: Any, model_class: Any, *, seed: int = 0) -> torch.nn.Module:
    """Random weights, larger than fresh ones, so that positions and media matter."""
    torch.manual_seed(seed)
    model = model_class(config) if isinstance(config, PretrainedConfig) else model_class(**config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dim() > 1:
                parameter.normal_(std=0.1)
            elif parameter.is_floating_point() and not torch.isfinite(parameter).all():
                parameter.zero_()
    return model


def set_large_weights(model: torch.nn.Module, std: float) -> None:
    """Draws large weights, gates of zero too.

    With fresh weights, media and leaking attention hardly change the loss of a tiny model.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1 or not parameter.any():
            torch.nn.init.normal_(parameter, std=std)
