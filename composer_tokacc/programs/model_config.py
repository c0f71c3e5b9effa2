# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Transformers configs of fresh models from plain mappings, completed by what the run's processor knows."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from composer_tokacc.programs.registry import unknown_name
from composer_tokacc.data.patches import side_of_patch

__all__ = ['config_from_dict', 'read_config', 'tokenizer_of', 'vision_patch_size']

# Accepted by Transformers without being attributes of every config class.
_ALWAYS_KNOWN = frozenset({'model_type', 'rope_theta', 'rope_scaling', 'rope_parameters', 'tie_word_embeddings'})
_SPECIAL_TOKENS = ('pad_token_id', 'bos_token_id', 'eos_token_id')


def read_config(pretrained: str | None, config: dict[str, Any] | None, processor: Any = None) -> PretrainedConfig:
    """The config of a checkpoint, or that of a fresh model, without the model; see :func:`.build_model`."""
    return (
        AutoConfig.from_pretrained(pretrained) if pretrained is not None else config_from_dict(config or {}, processor)
    )


def vision_patch_size(config: PretrainedConfig) -> int | None:
    """Side of the vision tower's patches in pixels; None without a tower, or where its config names none (timm's)."""
    return side_of_patch(getattr(getattr(config, 'vision_config', None), 'patch_size', None))


def config_from_dict(settings: dict[str, Any], processor: Any = None) -> PretrainedConfig:
    """Makes a Transformers config; unlike Transformers itself it refuses names that the config class does not know.

    Args:
        settings: the config's fields, ``model_type`` among them; nested parts (``text_config``, ``vision_config``) as
            mappings.
        processor: processor or tokenizer from which vocabulary size, special tokens and image token are taken where
            ``settings`` leaves them out.

    Raises:
        ValueError: for an unknown model type or field, or a vocabulary smaller than the tokenizer's.
    """
    model_type = str(settings.get('model_type'))
    if model_type not in CONFIG_MAPPING:
        raise ValueError(unknown_name('`model.config.model_type`', model_type, CONFIG_MAPPING.keys()))
    default = CONFIG_MAPPING[model_type]()
    _refuse_unknown(settings, default, 'model.config')
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
    text = settings.setdefault('text_config', {}) if hasattr(default, 'text_config') else settings
    _complete_text(text, tokenizer_of(processor))
    for modality in ('image', 'video'):
        names = [name for name in (f'{modality}_token_index', f'{modality}_token_id') if name in default.to_dict()]
        token_id = _placeholder_id(processor, modality)
        if names and token_id is not None and not settings.keys() & {f'{modality}_token_index', f'{modality}_token_id'}:
            settings[names[0]] = token_id
    settings.pop('model_type')
    return CONFIG_MAPPING[model_type](**settings)


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer inside a processor, or the tokenizer itself, or None."""
    return getattr(processor, 'tokenizer', processor)


def _refuse_unknown(settings: dict[str, Any], default: PretrainedConfig, path: str) -> None:
    known = _ALWAYS_KNOWN | set(default.to_dict()) | set(default.attribute_map)
    known |= set(inspect.signature(type(default).__init__).parameters) - {'self', 'kwargs'}
    for key, value in settings.items():
        if key not in known:
            raise ValueError(unknown_name(f'`{path}` key', key, known))
        inner = getattr(default, key, None)
        if isinstance(value, dict) and isinstance(inner, PretrainedConfig):
            named = value.get('model_type', inner.model_type)
            if named in CONFIG_MAPPING:
                inner = CONFIG_MAPPING[named]()
            _refuse_unknown(value, inner, f'{path}.{key}')


def _complete_text(text: dict[str, Any], tokenizer: Any) -> None:
    if tokenizer is None:
        return
    num_tokens = len(tokenizer)
    if text.setdefault('vocab_size', num_tokens) < num_tokens:
        raise ValueError(
            f"`vocab_size` must be at least the tokenizer's {num_tokens}, got: {text['vocab_size']}. "
            'Leave it out to take it from the tokenizer'
        )
    for name in _SPECIAL_TOKENS:
        # None too: Llama's default ids belong to another vocabulary.
        text.setdefault(name, getattr(tokenizer, name, None))


def _placeholder_id(processor: Any, modality: str) -> int | None:
    token_id = getattr(processor, f'{modality}_token_id', None)
    token = getattr(processor, f'{modality}_token', None)
    if token_id is None and isinstance(token, str):
        token_id = tokenizer_of(processor).convert_tokens_to_ids(token)
    return token_id
