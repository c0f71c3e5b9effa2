# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A tiny model of any type of transformers: its default config with every size made small, by the name of the size."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.model_types.exceptions import CONFIGS

VOCABULARY = 160
FIRST_MARK = 100
"""Ids of words are 4 to 99; those that the config names follow."""
HIDDEN = 32
HEAD = 16
PATCH = 4
IMAGE = 16
MEL = 16

# By patterns of their names; the first that fits decides.
SIZES: Mapping[str, int] = {
    r'pos_emb_.*': 8,
    r'patch_embed_hidden_size': 48,
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
    r'max_position_embeddings': 4096,
    r'num_query_tokens|latent_query_num|mm_tokens_per_image': 4,
    r'base_channels': 32,
    r'sliding_window|attention_chunk_size': 64,
    r'chunk_size|mamba_chunk_size': 8,
    r'state_size|ssm_state_size|mamba_d_state|d_state': 8,
}
_SIZES = [(re.compile(rf'^({pattern})$'), size) for pattern, size in SIZES.items()]
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
"""The sizes to which LLaVA-NeXT and its successors resize images before they cut tiles."""
ROPE = 'rope_scaling' if transformers.__version__.startswith('4.') else 'rope_parameters'
_NUM_LAYERS = ('num_hidden_layers', 'num_layers', 'n_layer')
_SPELLINGS = {
    'bos': ('<s>',),
    'eos': ('</s>',),
    'image': ('<|IMAGE|>', '<image_soft_token>', '<IMG_CONTEXT>', '[IMG]'),
    'video': ('<|VIDEO|>',),
    'audio': ('<|AUDIO|>',),
    'vision_start': ('<|vision_bos|>',),
    'vision_end': ('<|vision_eos|>',),
    'audio_start': ('<|audio_bos|>',),
    'audio_end': ('<|audio_eos|>',),
    'boi': ('<start_of_image>',),
    'eoi': ('<end_of_image>',),
}
"""How some tokenizers write what a config names. Others write ``<image>``, ``<|image|>`` or ``<|image_pad|>``."""
PART_CLASSES = {'qwen2_5_omni_thinker': transformers.Qwen2_5OmniThinkerConfig}
_SIZES_THAT_MAY_STAY = ('position_embedding_size', 'vocab_size')
_OF_CHECKPOINTS = ('model_type', 'torch_dtype', 'dtype', 'architectures', 'transformers_version')


def tiny_config(model_type: str, settings: Mapping[str, Any] | None = None, *, tokenizer: Any = None) -> Any:
    """Returns a new config of a type, with small sizes. The ids that it names are in the vocabulary.

    Args:
        model_type: The model type.
        settings: Further entries by path, as in :data:`CONFIGS`.
        tokenizer: Gives the size of the vocabulary and the ids of special tokens.
    """
    if model_type in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
    else:  # transformers 4 knows parts only by their class
        config_class = PART_CLASSES[model_type]
    entries = CONFIGS.get(model_type, {}) | dict(settings or {})
    values = config_class().to_dict()
    for path, entry in entries.items():
        if _is_config_class(entry):
            values[path] = getattr(transformers, entry)().to_dict()
    _shrink(values, {})
    for path, entry in entries.items():
        if not _is_config_class(entry):
            _set_entry(values, path, entry)
    for name in _OF_CHECKPOINTS:
        values.pop(name, None)
    config = config_class(**values)
    if tokenizer is not None:
        _set_token_ids(config, tokenizer)
    return config


def _set_token_ids(config: PretrainedConfig, tokenizer: Any) -> None:
    """Gives a config and its parts the vocabulary of a tokenizer, and the ids of its special tokens."""
    vocabulary = tokenizer.get_vocab()
    for part in _parts(config):
        if hasattr(part, 'vocab_size'):
            part.vocab_size = len(tokenizer)
        for key in list(vars(part)):
            name = key.removesuffix('_id').removesuffix('_index').removesuffix('_token')
            for token in (f'<{name}>', f'<|{name}|>', f'<|{name}_pad|>', *_SPELLINGS.get(name, ())):
                if key.endswith(('_token_id', '_token_index')) and token in vocabulary:
                    setattr(part, key, vocabulary[token])


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    parts = [config]
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            parts += _parts(part)
    return parts


def _is_config_class(entry: Any) -> bool:
    return isinstance(entry, str) and entry.endswith('Config')


def _set_entry(values: dict[str, Any], path: str, entry: Any) -> None:
    *parents, name = path.replace('rope_parameters', ROPE).split('.')
    part = values
    for parent in parents:
        part = part.setdefault(parent, {})
    part[name] = copy.deepcopy(entry)  # configs write into their dicts


def _shrink(values: dict[Any, Any], ids: dict[int, int]) -> None:
    """Makes the values of a config and of its parts small, in place.

    Args:
        values: The values by name.
        ids: The small id of each special token, by its id in the default config. It is filled here.
    """
    if not all(isinstance(name, str) for name in values):
        return
    values.pop('per_layer_config', None)
    layer_lists = _layer_lists(values)
    # One layer of each kind, and at least two.
    num_layers = 2
    for kinds in layer_lists.values():
        if isinstance(kinds[0], str):
            num_layers = max(num_layers, len(set(kinds)))
    for name, value in values.items():
        if isinstance(value, dict):
            if name not in ('id2label', 'label2id'):
                _shrink(value, ids)
        elif name in layer_lists:
            each_once = list(dict.fromkeys(value))
            num_missing = num_layers - len(each_once)
            values[name] = each_once[:num_layers] + each_once[-1:] * num_missing
        elif isinstance(value, (list, tuple)):
            values[name] = _small_list(name, value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            values[name] = _small_number(name, value, num_layers, ids)


def _layer_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the lists that have an entry for each layer, by name."""
    num_layers = next((values[name] for name in _NUM_LAYERS if values.get(name)), None)
    if not isinstance(num_layers, int) or num_layers < 2:
        return {}
    lists = {}
    for name, value in values.items():
        is_list = isinstance(value, (list, tuple)) and len(value) == num_layers
        if is_list and name != 'image_grid_pinpoints' and not name.startswith('hidden_sizes'):
            lists[name] = value
    return lists


def _small_list(name: str, value: Any) -> Any:
    if name == 'image_grid_pinpoints' and value:
        return PINPOINTS
    if name == 'image_size':
        return [IMAGE] * len(value)
    if name == 'patch_size':
        return [PATCH] * len(value)
    if name == 'mrope_section':  # half of a head, for time, height and width
        height = width = HEAD // 6
        return [HEAD // 2 - height - width, height, width]
    return value


def _small_number(name: str, value: Any, num_layers: int, ids: dict[int, int]) -> Any:
    if name.endswith(('_id', '_index')) and isinstance(value, int) and value > 3:
        return ids.setdefault(value, FIRST_MARK + len(ids))
    if re.search('dropout|pdrop|drop_path|drop_rate|layerdrop|jitter', name):
        return type(value)(0)
    if not isinstance(value, int) or value == 0:
        return value
    if name in _NUM_LAYERS:
        return min(num_layers, value)
    size = next((size for pattern, size in _SIZES if pattern.match(name)), value)
    if name.endswith('size') and name not in _SIZES_THAT_MAY_STAY:
        return size  # also if the default is smaller, because sizes must fit each other
    return min(size, value)


class TimmStandIn(transformers.PreTrainedModel):
    """One convolution in place of an encoder of timm. The batches are the same, because the processor makes them."""

    config_class = transformers.TimmWrapperConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.is_sequence = 'embed_dim' in (config.model_args or {})
        size = config.model_args['embed_dim'] if self.is_sequence else config.hidden_size
        self.patches = torch.nn.Conv2d(3, size, PATCH, PATCH)

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> Any:
        states = self.patches(pixel_values)  # (images, size, height, width)
        if self.is_sequence:
            states = states.flatten(2).transpose(1, 2)
        return BaseModelOutputWithPooling(last_hidden_state=states)


class Gemma3nStandIn(TimmStandIn):
    """The same for Gemma 3n's own config."""

    config_class = transformers.Gemma3nVisionConfig


for _stand_in in (TimmStandIn, Gemma3nStandIn):
    transformers.AutoModel.register(_stand_in.config_class, _stand_in, exist_ok=True)


def tiny_model(config: PretrainedConfig, model_class: Any) -> torch.nn.Module:
    """Returns a model with random weights that are larger than fresh ones, so that positions and media matter.

    Unlike :func:`float32_model` it leaves biases and gates as they are, and the type of the weights.
    """
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dim() > 1:
                parameter.normal_(std=0.1)
            elif parameter.is_floating_point() and not torch.isfinite(parameter).all():
                parameter.zero_()
    return model


LARGE_STD = 0.15
"""With fresh weights, media and leaking attention hardly change the loss of a tiny model. These show it."""


def float32_model(
    config: PretrainedConfig, *, std: float | None = LARGE_STD, model_class: Any = None
) -> PreTrainedModel:
    """Returns a model of a config in training, without a cache. Leaves the random state as it is.

    Args:
        config: The config.
        std: Standard deviation of the weights, also of gates that begin at zero. None: the fresh weights.
        model_class: The class of the model. None: :func:`model_class_of`.
    """
    config.use_cache = False
    config.get_text_config().use_cache = False
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (model_class or model_class_of(config))(config)
        if std is not None:
            for parameter in model.parameters():
                if parameter.dim() > 1 or not parameter.any():
                    torch.nn.init.normal_(parameter, std=std)
    return model.float().train()


def model_class_of(config: PretrainedConfig) -> Any:
    """Returns the class that computes a loss from labels, by the name of the config's class."""
    prefix = type(config).__name__.removesuffix('Config')
    suffixes = ('ForConditionalGeneration', 'ForCausalLM', 'ForMaskedLM', 'LMHeadModel')
    name = next(prefix + suffix for suffix in suffixes if hasattr(transformers, prefix + suffix))
    return getattr(transformers, name)
