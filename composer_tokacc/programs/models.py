# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Builds Hugging Face models for the Composer Trainer, of a checkpoint or, with seeded random weights, of a config."""

from __future__ import annotations

import copy
import inspect
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from composer.metrics import LanguageCrossEntropy, MaskedAccuracy
from composer.models import HuggingFaceModel
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.func import functional_call
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto import modeling_auto as auto

from composer_tokacc.compat import FakeTensorMode, detect_fake_mode, skip_embedding_resize
from composer_tokacc.model_structure import cast_model, transformer_blocks
from composer_tokacc.programs.errors import must, unknown_name
from composer_tokacc.programs.lora import (
    check_lora,
    four_bit_options,
    keep_trained_only,
    refuse_other_adapters,
    refuse_partial,
    with_adapter,
)
from composer_tokacc.programs.schema import AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, Range

log = logging.getLogger(__name__)

# These read hidden_states[vision_feature_layer] of their vision encoder: whatever comes after it gets no gradient.
_FEATURE_LAYER_FAMILIES = ('llava', 'llava_next', 'llava_next_video', 'llava_onevision', 'video_llava', 'vipllava')
# Accepted by Transformers without being attributes of every config class.
_ALWAYS_KNOWN = frozenset({'model_type', 'rope_theta', 'rope_scaling', 'rope_parameters', 'tie_word_embeddings'})
# By how a field's name ends, what it may be.
_FIELD_RANGES = {'_size': AT_LEAST_1, '_heads': AT_LEAST_1, '_theta': POSITIVE, 'dropout': FRACTION}
TRAIN_METRICS, EVAL_METRICS = (LanguageCrossEntropy,), (LanguageCrossEntropy, MaskedAccuracy)


def build_model(*, processor: Any = None, train_metrics: bool = False, **settings: Any) -> HuggingFaceModel:
    """Builds a vision-language (or text) model for the Composer Trainer; see :func:`build_transformers_model`.

    ``processor`` is saved with every checkpoint. For ``train_metrics`` Composer copies each device batch.
    """
    inner, metrics = build_transformers_model(processor=processor, **settings), [metric() for metric in TRAIN_METRICS]
    # Auto-detection of shift_labels says False for most vision-language models, whose metrics are then of others.
    model = _RunModel(
        inner, processor, use_logits=True, metrics=metrics if train_metrics else None, shift_labels=True,
        eval_metrics=[metric() for metric in EVAL_METRICS],
    )  # fmt: skip
    refuse_other_adapters(model)
    if settings.get('lora') is not None and settings.get('pretrained') is not None:
        keep_trained_only(model)
    return model


def build_transformers_model(
    *,
    pretrained: str | None = None,
    config: dict[str, Any] | None = None,
    processor: Any = None,
    freeze: Sequence[str] = (),
    lora: Mapping[str, Any] | None = None,
    dtype: str = 'float32',
    attn_implementation: str | None = None,
    activation_checkpointing: bool = False,
    seed: int = 0,
    load_weights: bool = True,
) -> Any:
    """Builds the Transformers model of a run, frozen and marked for FSDP; see :class:`.ModelConfig`.

    Vocabulary size and special token ids that a ``config`` leaves out come from ``processor``. ``seed`` is that of
    fresh weights and of rows added for new tokens; global generators stay untouched. Without ``load_weights`` a
    ``pretrained`` model is fresh: only its config is read.
    """
    check_model(pretrained, config, lora)
    options: dict[str, Any] = {} if attn_implementation is None else {'attn_implementation': attn_implementation}
    if lora is not None and lora.get('bits') is not None:
        if not load_weights:
            raise ValueError('`lora.bits` must be left out where memory is sized: no 4-bit weights are counted, got: 4')
        options |= four_bit_options(lora, empty_model(read_config(pretrained, config)), getattr(torch, dtype))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if pretrained is not None and load_weights:
            tokenizer, has_lora = tokenizer_of(processor), lora is not None
            model = _from_checkpoint(pretrained, tokenizer, getattr(torch, dtype), options, has_lora=has_lora)
        else:
            model = _fresh(read_config(pretrained, config, processor), getattr(torch, dtype), options)
    if model.config.get_text_config().is_encoder_decoder:  # which would read the answers, where the labels stand
        raise ValueError(f'the model must have a decoder alone, got: {model.config.model_type} with an encoder')
    set_cache(model, on=False)
    unreached = _freeze_unreached_vision_layers(model)
    freeze_parameters(model, freeze)
    if lora is not None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = with_adapter(model, lora, base=pretrained, never_trained=unreached)
    if activation_checkpointing:
        # Non-reentrant: the reentrant kind breaks DDP's hooks and needs inputs with gradients.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
    # Composer's FSDP asks this of every module; the rest stays in the root unit.
    model.fsdp_wrap_fn = model.activation_checkpointing_fn = set(transformer_blocks(model)).__contains__
    return model


def check_model(pretrained: str | None, config: dict[str, Any] | None, lora: Mapping[str, Any] | None = None) -> None:
    """Refuses a model from nowhere or from two places, and a bad adapter, before anything is loaded."""
    if (pretrained is None) == (not config):
        found = 'both. Remove one' if config else 'none. Name a checkpoint or a `model_type`'
        raise ValueError(f'`model` must have exactly one of `pretrained` and `config`, got: {found}')
    if config:
        read_config(None, config)
    if lora is not None:
        check_lora(lora, pretrained=pretrained)


def freeze_parameters(model: nn.Module, names: Sequence[str]) -> None:
    """Switches off the gradient of every parameter that lies under one of ``names``.

    A name is a dotted prefix such as ``language_model.layers.0``; a leading ``model.``, which newer Transformers put
    before all parts, counts for nothing.
    """
    for name in names:
        matches = [parameter for full, parameter in model.named_parameters() if _lies_under(full, name)]
        if not matches:
            parts = [part for part, _ in model.named_modules() if part and part.count('.') < 2]
            listed = ', '.join(sorted(parts, key=lambda part: part.count('.')))
            raise ValueError(f'`freeze` must name parts of the model, got: {name!r}. Parts: {listed}')
        for parameter in matches:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f'`freeze` must leave something to train, got: {list(names)}, which is the whole model')


def parameter_groups(model: nn.Module, parts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns what is trained as an optimizer's groups: one for each part, with its own arguments, and the rest.

    Parts are named as in :func:`freeze_parameters`; a parameter belongs to the longest name that it lies under.
    """
    groups: dict[str, dict[str, Any]] = {name: {**own, 'params': []} for name, own in [*parts.items(), ('', {})]}
    for full, parameter in model.named_parameters():
        if parameter.requires_grad:
            names = [name for name in parts if _lies_under(full, name)]
            groups[max(names, key=len, default='')]['params'].append(parameter)
    empty = [name for name in parts if not groups[name]['params']]
    if empty:
        raise ValueError(f'`optimizer.parts` must name parts of the model that are trained, got: {", ".join(empty)}')
    return [group for group in groups.values() if group['params']]


def read_config(pretrained: str | None, config: dict[str, Any] | None, processor: Any = None) -> PretrainedConfig:
    """Returns the config of a checkpoint, or that of a fresh model with the given fields, without the model.

    Refuses names that the config class does not know, unlike Transformers itself. Vocabulary size, special tokens and
    placeholders that ``config`` leaves out come from ``processor``.
    """
    if pretrained is not None:
        with read_from(pretrained):
            return AutoConfig.from_pretrained(pretrained)
    settings = copy.deepcopy(config or {})
    model_type = str(settings.get('model_type'))
    if model_type not in CONFIG_MAPPING:
        raise ValueError(unknown_name('`model.config.model_type`', model_type, CONFIG_MAPPING.keys()))
    default = CONFIG_MAPPING[model_type]()
    _refuse_unknown(settings, default, 'model.config')
    text = settings.setdefault('text_config', {}) if hasattr(default, 'text_config') else settings
    if processor is not None:
        _complete_text(text, tokenizer_of(processor))
    for modality in ('image', 'video', 'audio'):
        names = [f'{modality}_token_index', f'{modality}_token_id']
        own = next((name for name in names if name in default.to_dict()), None)
        token_id = _placeholder_id(processor, modality)
        if own is not None and token_id is not None and not settings.keys() & {*names}:
            settings[own] = token_id
    del settings['model_type']
    with _makes_a_model('config'):
        built = CONFIG_MAPPING[model_type](**settings)
    _check_shapes(built)
    return built


def read_from(pretrained: str) -> AbstractContextManager[None]:
    """Refuses a folder or a name on the hub that lacks what is read from it."""
    requirement = '`pretrained` must be a folder or a name on the hub with config, processor and weights'
    kinds = (OSError, ValueError, TypeError, RuntimeError, SafetensorError, UnpicklingError)
    return must(requirement, pretrained, *kinds, raises=ValueError)


@contextmanager
def _makes_a_model(name: str) -> Iterator[None]:
    """Refuses a model that its config's values, or its kernels, do not let be made."""
    kinds = (ValueError, TypeError, RuntimeError, AssertionError, ImportError, StrictDataclassError, ArithmeticError,
             KeyError)  # fmt: skip
    with must(f'`{name}` must make a model', None, *kinds, raises=ValueError):
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error


def _check_shapes(config: PretrainedConfig) -> None:
    """Refuses what shows in the first forward alone: heads that do not divide, a layer that is not there."""
    depth = getattr(getattr(config, 'vision_config', None), 'num_hidden_layers', None)
    chosen = getattr(config, 'vision_feature_layer', None)
    for layer in chosen if isinstance(chosen, list | tuple) else [chosen]:
        if isinstance(layer, int) and isinstance(depth, int) and not -depth - 1 <= layer <= depth:
            raise ValueError(f'`vision_feature_layer` must be one of {depth} layers, got: {layer}')
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))):
        heads, groups = (getattr(part, f'num_{kind}_heads', None) for kind in ('attention', 'key_value'))
        if isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups:
            what = f'`config` must have `num_attention_heads` of {part.model_type} a multiple of `num_key_value_heads`'
            raise ValueError(f'{what}, got: {heads} and {groups}')


def tokenizer_of(processor: Any) -> Any:
    """Returns the tokenizer inside a processor, or the tokenizer itself, or None."""
    return getattr(processor, 'tokenizer', processor)


def _lies_under(parameter_name: str, name: str) -> bool:
    pairs = ((parameter_name, name), (parameter_name.removeprefix('model.'), name.removeprefix('model.')))
    return any(f'{inner}.'.startswith(f'{outer}.') for inner, outer in pairs)


def auto_class(config: PretrainedConfig) -> Any:
    """Returns the class of Transformers that builds a model of this config with its language head."""
    if type(config) in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return auto.AutoModelForImageTextToText
    is_causal = type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING  # BART is in both, Qwen2-Audio in the other alone
    is_seq2seq = type(config) in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and not is_causal
    return auto.AutoModelForSeq2SeqLM if is_seq2seq else auto.AutoModelForCausalLM


def empty_model(config: PretrainedConfig) -> Any:
    """Returns the model without memory for its weights."""
    with torch.device('meta'):
        return auto_class(config).from_config(config)


def _from_checkpoint(path: str, tokenizer: Any, dtype: torch.dtype, options: dict[str, Any], *, has_lora: bool) -> Any:
    # Weights in few bits need further packages, and new enough ones.
    remedy = '. pip install -U bitsandbytes accelerate' if 'quantization_config' in options else ''
    requirement = '`pretrained` must be what the installed packages can load'
    config = read_config(path, None)
    with must(requirement, path, ImportError, remedy=remedy, raises=ValueError), read_from(path):
        model, found = auto_class(config).from_pretrained(path, **options, dtype=dtype, output_loading_info=True)
    refuse_partial(f'in {path} the weights of a {type(model).__name__}', sorted(found['missing_keys']), [])
    num_rows, num_tokens = model.get_input_embeddings().num_embeddings, 0 if tokenizer is None else len(tokenizer)
    if num_tokens > num_rows and has_lora:  # an adapter is loaded beside its base as that is
        raise ValueError(
            f'`pretrained` must have embeddings for all tokens of the processor with `lora`, got: {num_rows} < '
            f'{num_tokens}. Call resize_token_embeddings({num_tokens}) on it, save it and name that folder'
        )
    if num_tokens > num_rows:
        log.warning('Enlarging the embeddings from %d to %d tokens, as the tokenizer has.', num_rows, num_tokens)
        model.resize_token_embeddings(num_tokens, pad_to_multiple_of=64)
    return model


def _fresh(config: PretrainedConfig, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    with _makes_a_model('attn_implementation' if options else 'config'):
        model = auto_class(config).from_config(config, **options)
    cast_model(model, dtype)
    return model


def set_cache(model: nn.Module, on: bool) -> None:
    """Switches the key-value cache of all parts of a model, which generation alone reads.

    Training keeps it off: packed rows leak attention with it. Before transformers 4.52 each part had its own config.
    """
    configs: list[Any] = [getattr(module, 'config', None) for module in model.modules()]
    while configs:
        config = configs.pop()
        if isinstance(config, PretrainedConfig):
            config.use_cache = on
            configs += vars(config).values()


def _freeze_unreached_vision_layers(model: Any) -> set[str]:
    """Freezes what lies behind the vision feature layer, and returns the names.

    Without gradients it would have no optimizer state on one rank, which torch misses when a run is resumed, and on
    several, where DDP gives it gradients of zero, weight decay would shrink it. Found by a backward on tensors without
    data, as releases differ: some give the normed output as the last state.
    """
    if getattr(model.config, 'model_type', None) not in _FEATURE_LAYER_FAMILIES:
        return set()
    towers = [name for name, _ in model.named_modules() if name.endswith(('vision_tower', 'image_tower'))]
    encoder = model.get_submodule(towers[0])
    chosen = getattr(model.config, 'vision_feature_layer', None)
    if chosen is None:
        chosen = model.config.vision_feature_layers
    config, size, empty = encoder.config, encoder.config.image_size, detect_fake_mode() or FakeTensorMode()
    sides = size if isinstance(size, list | tuple) else (size, size)
    tensors = chain(encoder.named_parameters(), encoder.named_buffers())
    weights: dict[str, torch.Tensor] = {name: empty.from_tensor(value) for name, value in tensors}
    with empty, torch.enable_grad():
        pixels = torch.empty(1, config.num_channels, *sides, dtype=encoder.dtype, device=encoder.device)
        states = functional_call(encoder, weights, (pixels,), {'output_hidden_states': True}).hidden_states
        layers = chosen if isinstance(chosen, list | tuple) else [chosen]
        features = torch.stack([states[layer].sum() for layer in layers]).sum()
        names = [name for name, parameter in encoder.named_parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(features, [weights[name] for name in names], allow_unused=True)
    unreached = {f'{towers[0]}.{name}' for name, found in zip(names, gradients, strict=True) if found is None}
    for name in unreached:
        model.get_parameter(name).requires_grad_(False)
    log.info('Freezing %d parameters behind the vision feature layer, which no loss reaches.', len(unreached))
    return unreached


@skip_embedding_resize
class _RunModel(HuggingFaceModel):
    """HuggingFaceModel whose checkpoints hold all that :mod:`composer_tokacc.export` needs, the image processor too."""

    def __init__(self, model: Any, processor: Any, **options: Any) -> None:
        # Peft's own filter would leave out `modules_to_save`; see keep_trained_only().
        super().__init__(model, tokenizer=tokenizer_of(processor), should_save_peft_only=False, **options)
        self.processor = processor

    def get_metadata(self) -> dict[str, Any]:
        """As Composer's, with every file of the processor and the generation config."""
        metadata = super().get_metadata()
        generation = getattr(self.model, 'generation_config', None)
        if generation is not None:
            metadata['model']['generation_config'] = {'file_extension': '.json', 'content': generation.to_dict()}
        if self.processor is not None:
            with tempfile.TemporaryDirectory() as folder:
                self.processor.save_pretrained(folder)
                metadata['processor'] = {
                    str(file.relative_to(folder)): {'file_extension': file.suffix, 'content': file.read_bytes()}
                    for file in sorted(Path(folder).rglob('*'))
                    # The tokenizer too: Composer keeps it as parsed JSON, and sharded checkpoints lose empty mappings.
                    if file.is_file()
                }
        return metadata


def _refuse_unknown(settings: dict[str, Any], default: PretrainedConfig, path: str) -> None:
    known = _ALWAYS_KNOWN | set(default.to_dict()) | set(default.attribute_map)
    known |= set(inspect.signature(type(default).__init__).parameters) - {'self', 'kwargs'}
    for key, value in settings.items():
        if key not in known:
            raise ValueError(unknown_name(f'`{path}` key', key, known))
        allowed = next((found for ending, found in _FIELD_RANGES.items() if key.endswith(ending)), None)
        allowed = allowed or (AT_LEAST_0 if key.startswith('num_') else Range())
        if isinstance(value, int | float) and value not in allowed:
            raise ValueError(f'`{path}.{key}` must be {allowed}, got: {value}')
        inner = getattr(default, key, None)
        if isinstance(value, dict) and isinstance(inner, PretrainedConfig):
            named = str(value.get('model_type', inner.model_type))
            if named in CONFIG_MAPPING:
                inner = CONFIG_MAPPING[named]()
            _refuse_unknown(value, inner, f'{path}.{key}')


def _complete_text(text: dict[str, Any], tokenizer: Any) -> None:
    num_tokens = len(tokenizer)
    if text.setdefault('vocab_size', num_tokens) < num_tokens:
        raise ValueError(f"`vocab_size` must be at least the tokenizer's {num_tokens}, got: {text['vocab_size']}")
    for name in ('pad_token_id', 'bos_token_id', 'eos_token_id'):
        # None too: Llama's default ids belong to another vocabulary.
        text.setdefault(name, getattr(tokenizer, name, None))


def _placeholder_id(processor: Any, modality: str) -> int | None:
    token_id = getattr(processor, f'{modality}_token_id', None)
    token = getattr(processor, f'{modality}_token', None)
    if token_id is None and isinstance(token, str):
        token_id = tokenizer_of(processor).convert_tokens_to_ids(token)
    return token_id
