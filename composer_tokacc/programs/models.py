# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Builds Hugging Face models for the Composer Trainer.

A model comes from a checkpoint, or from a config with seeded random weights.
"""

from __future__ import annotations

import copy
import inspect
import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from composer.metrics import LanguageCrossEntropy, MaskedAccuracy
from composer.models import HuggingFaceModel
from composer.utils import ensure_tuple
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig
from transformers.models.auto import modeling_auto as auto

from composer_tokacc.compat import skip_embedding_resize
from composer_tokacc.model_structure import transformer_blocks
from composer_tokacc.programs.errors import ConfigError, building, unknown_name
from composer_tokacc.programs.host_types import Processor, Section
from composer_tokacc.programs.lora import (
    IN_ADAPTER,
    LoraSection,
    four_bit_options,
    keep_trained_only,
    name_in_base,
    refuse_partial,
    with_adapter,
)
from composer_tokacc.programs.schema import check_arguments, check_names
from composer_tokacc.random_state import same_random_numbers

log = logging.getLogger(__name__)

FEATURE_LAYER_FAMILIES = (
    'aya_vision',
    'llava',
    'llava_next',
    'llava_next_video',
    'llava_onevision',
    'mistral3',
    'video_llava',
    'vipllava',
)
"""Model types that read ``hidden_states[vision_feature_layer]`` of their vision encoders, and no later layer."""
VISION_ENCODERS = ('vision_tower', 'image_tower', 'video_tower')
"""Ends of the names of the vision encoders in these model types. Video-LLaVA has one for images and one for videos."""
ALWAYS_KNOWN = frozenset({'model_type', 'rope_theta', 'rope_scaling', 'rope_parameters', 'tie_word_embeddings'})
"""Fields that Transformers accepts in every config, even if the config class has no such attribute."""
TRAIN_METRICS = (LanguageCrossEntropy,)
EVAL_METRICS = (LanguageCrossEntropy, MaskedAccuracy)


def build_model(
    *, processor: Processor | None = None, train_metrics: bool = False, **settings: Any
) -> HuggingFaceModel:
    """Builds a vision-language (or text) model for the Composer Trainer.

    Args:
        processor: The processor or tokenizer of the run. It is saved with every checkpoint.
        train_metrics: Whether metrics of training batches are computed. Composer then copies each device batch.
        settings: Further arguments of :func:`build_transformers_model`.
    """
    inner_model = build_transformers_model(processor=processor, **settings)
    metrics = None
    if train_metrics:
        metrics = [metric() for metric in TRAIN_METRICS]
    model = _RunModel(
        inner_model,
        processor,
        use_logits=True,
        metrics=metrics,
        eval_metrics=[metric() for metric in EVAL_METRICS],
        # Metrics must compare the logits of a decoder with the next token. Without this argument, Composer would take
        # most vision-language models for models that need no shift, and compare the logits with the same token.
        shift_labels=not is_encoder(inner_model.config),
    )
    has_adapter = settings.get('lora') is not None
    is_pretrained = settings.get('pretrained') is not None
    if has_adapter and is_pretrained:
        # The base can be loaded again from its folder, so checkpoints hold only the adapter.
        keep_trained_only(model)
    return model


def build_transformers_model(
    *,
    pretrained: str | None = None,
    config: Section | None = None,
    processor: Processor | None = None,
    freeze: Sequence[str] = (),
    lora: Section | None = None,
    dtype: str = 'float32',
    attn_implementation: str | None = None,
    activation_checkpointing: bool = False,
    seed: int = 0,
    load_weights: bool = True,
) -> Any:
    """Builds the Transformers model of a run: its weights, frozen parts and adapter, and the units of FSDP.

    Most arguments are keys of the YAML file: see :class:`.ModelConfig`. The others:

    - ``processor`` gives the vocabulary size and the special token ids that ``config`` leaves out.
    - ``seed`` is for fresh weights, for rows of the embeddings that are added for new tokens, and for an adapter. The
      random numbers of the run are not touched.
    - Without ``load_weights`` only the config of a ``pretrained`` model is read, and its weights are random.
    """
    check_model(pretrained, config, lora)
    model_config = read_config(pretrained, config, processor)
    model_class = auto_class(model_config)
    _check_builds_no_encoder(model_class, model_config)

    torch_dtype = getattr(torch, dtype)
    options: dict[str, Any] = {}
    if attn_implementation is not None:
        options['attn_implementation'] = attn_implementation
    if lora is not None and lora.get('bits') is not None:
        if not load_weights:
            raise ConfigError(
                'model.lora.bits',
                'must be left out to size memory, because 4-bit weights are not counted, got: 4',
            )
        empty_base = empty_model(model_config)  # only for the names of its layers
        options |= four_bit_options(lora, empty_base, torch_dtype)

    with same_random_numbers(seed):
        if pretrained is not None and load_weights:
            model = _from_checkpoint(pretrained, model_class, torch_dtype, options)
            _fit_embeddings(model, tokenizer_of(processor), has_lora=lora is not None)
        else:
            model = _fresh(model_config, torch_dtype, options)
    set_cache(model, on=False)

    unreached_names = _unreached_vision_layers(model)  # before the adapter, which renames the layers of its base
    frozen_names = freeze_parameters(model, freeze)
    if lora is not None:
        # Seeded again, so that the adapter does not depend on how many random numbers were drawn for its base.
        with same_random_numbers(seed):
            model = with_adapter(model, lora, base=pretrained)
    _freeze_in_adapted_model(model, frozen_names, unreached_names)

    if activation_checkpointing:
        # The reentrant kind does not work with DDP's hooks, and needs inputs with gradients.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
    _declare_fsdp_units(model)
    return model


def _check_builds_no_encoder(model_class: Any, config: PretrainedConfig) -> None:
    """Refuses a model with an encoder and a decoder. Its encoder would read the answer in the row of the question.

    Only AutoModelForCausalLM can be used with such a config (BART), because it builds only the decoder.
    """
    if model_class is not auto.AutoModelForCausalLM and config.get_text_config().is_encoder_decoder:
        raise ConfigError('model', f'must have only a decoder, got: {config.model_type} with an encoder')


def _freeze_in_adapted_model(model: nn.Module, frozen_names: set[str], unreached_names: set[str]) -> None:
    """Freezes parameters by their names before an adapter was added.

    Args:
        model: The model, with or without an adapter.
        frozen_names: Parameters of frozen parts. With ``lora.bias``, peft has made their biases trainable again. An
            adapter in a frozen part is trained.
        unreached_names: Parameters that no loss reaches. None reaches their adapters, either.
    """
    for name, parameter in model.named_parameters():
        base_name = name_in_base(name)  # of an adapter's matrix: the name of the weight that it adapts
        is_unreached = base_name in unreached_names
        is_frozen = base_name in frozen_names and not IN_ADAPTER.search(name)
        if is_unreached or is_frozen:
            parameter.requires_grad_(False)


def _declare_fsdp_units(model: Any) -> None:
    """Tells Composer that each block of the model becomes a unit of FSDP. All other modules are in the root unit."""
    # Composer calls these functions with every module. They return whether the module is a block. It calls the second
    # one only if the settings of FSDP have their own `activation_checkpointing`.
    is_block = set(transformer_blocks(model)).__contains__
    model.fsdp_wrap_fn = is_block
    model.activation_checkpointing_fn = is_block


def check_model(
    pretrained: str | None,
    config: Section | None,
    lora: Section | None,
) -> None:
    """Refuses a model without a source or with two, a bad config and a bad adapter, before anything is loaded."""
    has_checkpoint = pretrained is not None
    has_config = bool(config)
    if has_checkpoint == has_config:
        requirement = 'must have exactly one of `pretrained` and `config`, and null for the other'
        raise ConfigError('model', f'{requirement}, got: {pretrained}, {config}')
    if config:
        read_config(None, config)  # only for its refusals
    if lora is not None:
        check_arguments('model.lora', LoraSection, lora)
        if lora.get('bits') is not None and not has_checkpoint:
            raise ConfigError('model.lora.bits', 'needs the weights of `model.pretrained` to round them')


def freeze_parameters(model: nn.Module, names: Sequence[str]) -> set[str]:
    """Switches off the gradient of every parameter below one of ``names``. Returns the full names of the parameters.

    A name is a dotted prefix such as ``language_model.layers.0``. A leading ``model.``, which newer Transformers put
    before all parts, makes no difference.
    """
    parameters = dict(model.named_parameters())
    frozen_names: set[str] = set()
    for name in names:
        names_of_part = [full_name for full_name in parameters if _matched_length(full_name, name)]
        if not names_of_part:
            # Only the two outer levels are suggested, such as `model.layers`. A head that is tied to the embeddings has
            # no parameters of its own, so it is not suggested.
            outer_parts = {'.'.join(full_name.split('.')[:2]) for full_name in parameters}
            raise ConfigError('model.freeze', unknown_name('part', name, outer_parts))
        frozen_names.update(names_of_part)
    for full_name in frozen_names:
        parameters[full_name].requires_grad_(False)
    return frozen_names


def parameter_groups(model: nn.Module, parts: Mapping[str, Section]) -> list[dict[str, Any]]:
    """Returns the trained parameters in groups for an optimizer: one for each part of the model, and one for the rest.

    Raises ConfigError if a part gets no parameter.

    Args:
        model: The model.
        parts: Arguments of the optimizer by the name of a part, as in :func:`freeze_parameters`. A parameter belongs to
            the innermost part that contains it, one of an adapter to the part of the layer that it adapts.
    """
    groups: dict[str, dict[str, Any]] = {name: {**arguments, 'params': []} for name, arguments in parts.items()}
    groups[''] = {'params': []}  # all other parameters, with the optimizer's own arguments
    for full_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        part = _innermost_part(full_name, parts)
        groups[part]['params'].append(parameter)
    for name, group in groups.items():
        if name and not group['params']:
            raise ConfigError('optimizer.parts', f'must name parts of the model that are trained, got: {name}')
    return [group for group in groups.values() if group['params']]


def _innermost_part(parameter_name: str, parts: Iterable[str]) -> str:
    """Returns the longest name of a part that contains a parameter; empty if none contains it."""
    base_name = name_in_base(parameter_name)
    innermost_part = ''
    longest_match = 0
    for part in parts:
        matched_length = _matched_length(parameter_name, part) or _matched_length(base_name, part)
        if matched_length > longest_match:
            innermost_part = part
            longest_match = matched_length
    return innermost_part


def read_config(
    pretrained: str | None,
    config: Section | None,
    processor: Processor | None = None,
) -> PretrainedConfig:
    """Returns the config of a checkpoint as it is, or a fresh one with the fields of ``config``. Builds no model.

    For a fresh config, refuses fields that the config class does not have, because Transformers would accept them
    without any effect. Vocabulary size, special tokens and placeholders that ``config`` leaves out come from
    ``processor``.
    """
    if pretrained is not None:
        with building('model.pretrained'):
            # With the default of trust_remote_code, Transformers would ask on the terminal.
            return AutoConfig.from_pretrained(pretrained, trust_remote_code=False)
    settings: dict[str, Any] = copy.deepcopy(dict(config or {}))
    model_type = str(settings.pop('model_type', None))
    if model_type not in CONFIG_MAPPING:
        raise ConfigError('model.config.model_type', unknown_name('type', model_type, CONFIG_MAPPING.keys()))
    with building('model.config'):
        config_class = CONFIG_MAPPING[model_type]
        default = config_class()
        _check_fields(settings, default, 'model.config')
        if processor is not None:
            _complete_text(settings, default, tokenizer_of(processor))
            _complete_placeholders(settings, default, processor)
        return config_class(**settings)


def _check_fields(settings: Section, default: PretrainedConfig, path: str) -> None:
    """Refuses unknown fields, also in the configs inside a config.

    Args:
        settings: The user's fields.
        default: A config of the same class with default values. It tells which fields there are.
        path: The key of ``settings`` in the YAML file.
    """
    known_names = ALWAYS_KNOWN | set(default.to_dict()) | set(default.attribute_map)
    known_names |= set(inspect.signature(type(default)).parameters) - {'kwargs'}
    check_names(path, settings, known_names)
    for key, value in settings.items():
        attribute = default.attribute_map.get(key, key)  # a key may be another name for an attribute
        # vars(), because getattr() raises for a field with a value for each layer, such as Gemma 4's head_dim.
        inner_default = vars(default).get(attribute)
        if isinstance(value, dict) and isinstance(inner_default, PretrainedConfig):
            # The settings may name another type of encoder or language model than the default one.
            inner_type = str(value.get('model_type', inner_default.model_type))
            if inner_type in CONFIG_MAPPING:
                inner_default = CONFIG_MAPPING[inner_type]()
            _check_fields(value, inner_default, f'{path}.{key}')


def _complete_text(settings: dict[str, Any], default: PretrainedConfig, tokenizer: Any) -> None:
    """Adds vocabulary size and special tokens of the tokenizer to the settings of the language model.

    Settings that the user gives stay. A vocabulary that is too small for the tokenizer is refused.
    """
    text_settings = settings
    path = 'model.config'
    if hasattr(default, 'text_config'):
        text_settings = settings.get('text_config') or {}  # it may be null in the file
        settings['text_config'] = text_settings
        path = 'model.config.text_config'
    num_tokens = len(tokenizer)
    vocab_size = text_settings.setdefault('vocab_size', num_tokens)
    if vocab_size < num_tokens:
        message = f"must be at least the tokenizer's {num_tokens}, got: {vocab_size}"
        raise ConfigError(f'{path}.vocab_size', message)
    for name in ('pad_token_id', 'bos_token_id', 'eos_token_id'):
        # Set to None if the tokenizer has none, because the defaults of the config class are ids of another vocabulary.
        text_settings.setdefault(name, getattr(tokenizer, name, None))


def _complete_placeholders(
    settings: dict[str, Any],
    default: PretrainedConfig,
    processor: Processor,
) -> None:
    """Adds the ids of the processor's placeholder tokens, each under a name that the config class has for it."""
    for modality in ('image', 'video', 'audio'):
        token_id = getattr(processor, f'{modality}_token_id', None)
        token = getattr(processor, f'{modality}_token', None)
        if token_id is None and isinstance(token, str):
            token_id = tokenizer_of(processor).convert_tokens_to_ids(token)
        names = [f'{modality}_token_index', f'{modality}_token_id']
        known_names = [name for name in names if name in default.to_dict()]
        is_set = not settings.keys().isdisjoint(names)
        if known_names and token_id is not None and not is_set:
            settings[known_names[0]] = token_id


def tokenizer_of(processor: Processor | None) -> Any:
    """Returns the tokenizer of a processor. The processor of a text model is the tokenizer itself."""
    return getattr(processor, 'tokenizer', processor)


def _matched_length(parameter_name: str, part_name: str) -> int:
    """Returns the length of a part's name at the start of a parameter's name; 0 if the parameter is not in the part.

    Either name may have a leading ``model.`` that the other one lacks.
    """
    short_name = part_name.removeprefix('model.')
    for spelling in (part_name, short_name, f'model.{short_name}'):
        # The dot keeps `layers.10` out of `layers.1`.
        if f'{parameter_name}.'.startswith(f'{spelling}.'):
            return len(spelling)
    return 0


def is_encoder(config: PretrainedConfig) -> bool:
    """Tells whether a model of this config learns masked tokens, as BERT does, and not the next token."""
    is_decoder = getattr(config, 'is_decoder', False) or config.is_encoder_decoder
    return not is_decoder and type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING


def auto_class(config: PretrainedConfig) -> Any:
    """Returns the class of Transformers that builds a model of this config with its language head."""
    if type(config) in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return auto.AutoModelForImageTextToText
    if is_encoder(config):
        return auto.AutoModelForMaskedLM
    # BART is in both lists, and gets the causal class, which builds only its decoder. The other class is for models
    # that are only in the sequence-to-sequence list. Qwen2-Audio is one of them, although it has no encoder.
    is_causal = type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and not is_causal:
        return auto.AutoModelForSeq2SeqLM
    return auto.AutoModelForCausalLM


def empty_model(config: PretrainedConfig) -> Any:
    """Returns the model without memory for its weights, on the device ``meta``."""
    with torch.device('meta'):
        return auto_class(config).from_config(config, trust_remote_code=False)


def _from_checkpoint(path: str, model_class: Any, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Loads a model, and corrects ``tie_word_embeddings`` in its config.

    Refuses a damaged generation config, and a checkpoint that lacks weights, which Transformers would draw at random.
    """
    with building('model.pretrained'):
        model, loading = model_class.from_pretrained(
            path, **options, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
        if (Path(path) / 'generation_config.json').is_file():
            # Read only to refuse a damaged file, which Transformers treats as a missing one.
            GenerationConfig.from_pretrained(path)
    # Weights that the model has no place for are allowed, because many checkpoints hold heads for other tasks.
    refuse_partial(f'the weights of a {type(model).__name__}', sorted(loading['missing_keys']), path=path)
    if model.get_output_embeddings() is not None and not has_tied_head(model):
        # If the checkpoint holds a head of its own, Transformers 5 leaves it untied, even if the config says tied. Then
        # resize_token_embeddings() would follow the config, and replace the head by the embeddings.
        note_tying(model, is_tied=False)
    return model


def has_tied_head(model: Any) -> bool:
    """Returns whether the head of a model and its embeddings are one weight."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def note_tying(model: Any, *, is_tied: bool) -> None:
    """Sets ``tie_word_embeddings`` in the config of a model, and in the config of its language model."""
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = is_tied


def _fit_embeddings(model: Any, tokenizer: Any, *, has_lora: bool) -> None:
    """Enlarges the embeddings if the tokenizer has more tokens than the model. With LoRA raises ConfigError instead."""
    num_rows = model.get_input_embeddings().num_embeddings
    num_tokens = 0 if tokenizer is None else len(tokenizer)
    if num_tokens <= num_rows:
        return
    if has_lora:
        # An exported adapter is loaded on its base, and the folder of that base would still have the old size.
        raise ConfigError(
            'model.pretrained',
            f'must have embeddings for all tokens of the processor with `lora`, got: {num_rows} < {num_tokens}. Call '
            f'resize_token_embeddings({num_tokens}) on it, save it and name that folder',
        )
    log.warning('Enlarging the embeddings from %d tokens to at least the %d of the tokenizer.', num_rows, num_tokens)
    model.resize_token_embeddings(num_tokens, pad_to_multiple_of=64)  # a width at which tensor cores are fast


def _fresh(config: PretrainedConfig, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Builds a model with random weights."""
    with building('model'):
        model = auto_class(config).from_config(config, dtype=dtype, **options, trust_remote_code=False)
    # Buffers stay as Transformers makes them, because rotary frequencies must be in float32. Parameters all get one
    # type, as FSDP 1 needs. A loaded model keeps some in float32, such as the routers of a mixture of experts.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def set_cache(model: nn.Module, on: bool) -> None:
    """Switches the key-value cache of a model on or off, in the configs of all its modules and in configs inside these.

    Only generation needs it. In training it is off: with a cache, Transformers does not detect packed documents from
    ``position_ids``, so they would attend to each other.
    """
    candidates: list[Any] = [getattr(module, 'config', None) for module in model.modules()]
    while candidates:
        candidate = candidates.pop()
        if isinstance(candidate, PretrainedConfig):
            candidate.use_cache = on
            candidates.extend(vars(candidate).values())  # some of them are configs, such as `text_config`


def _unreached_vision_layers(model: Any) -> set[str]:
    """Returns the names of the parameters after the vision feature layer, for the caller to freeze.

    No loss reaches them. On one rank they would have no gradient, and so no optimizer state, but torch looks for one
    when a run is resumed. On several ranks DDP would give them gradients of zero, and weight decay would shrink them.
    """
    if model.config.model_type not in FEATURE_LAYER_FAMILIES:
        return set()
    feature_layers = getattr(model.config, 'vision_feature_layer', None)
    if feature_layers is None:
        feature_layers = model.config.vision_feature_layers  # of VipLLaVA
    feature_layers = ensure_tuple(feature_layers)
    unreached = set()
    for encoder_name, encoder in model.named_modules():
        if encoder_name.endswith(VISION_ENCODERS):
            with building('model.config.vision_feature_layer'):
                names = _unreached_parameters(encoder, feature_layers)
            for name in names:
                unreached.add(f'{encoder_name}.{name}')
    log.info('Freezing %d parameters after the vision feature layer, which no loss reaches.', len(unreached))
    return unreached


def _unreached_parameters(encoder: Any, feature_layers: Sequence[int]) -> list[str]:
    """Returns the names of the parameters of a vision encoder that do not change its hidden states at these layers.

    A backward from these states through a copy without memory finds them. They cannot be found by the names of layers:
    in some releases of Transformers the last hidden state is taken after the final norm, in others before it.
    """
    config = copy.deepcopy(encoder.config)
    sides = ensure_tuple(config.image_size)  # one or two
    height = sides[0]
    width = sides[-1]
    with torch.device('meta'), torch.enable_grad():
        empty_encoder = type(encoder)(config)
        # All kinds of attention use the same parameters. Flash attention would read values, which the copy lacks.
        empty_encoder.set_attn_implementation('eager')
        pixels = torch.empty(1, config.num_channels, height, width, dtype=empty_encoder.dtype)
        states = empty_encoder(pixels, output_hidden_states=True).hidden_states
        for layer in feature_layers:
            states[layer].sum().backward(retain_graph=True)  # the states of several layers share a graph
    # On `meta` gradients have no values, but a parameter that was not reached has no gradient at all.
    return [name for name, parameter in empty_encoder.named_parameters() if parameter.grad is None]


@skip_embedding_resize  # _fit_embeddings() enlarges them if they are too small
class _RunModel(HuggingFaceModel):
    """A HuggingFaceModel whose checkpoints also hold the processor, which :mod:`composer_tokacc.export` needs."""

    def __init__(self, model: Any, processor: Processor, **options: Any) -> None:
        # The filter for peft would leave out `modules_to_save`. build_model() calls keep_trained_only() instead.
        super().__init__(model, tokenizer=tokenizer_of(processor), should_save_peft_only=False, **options)
        self.processor = processor

    def get_metadata(self) -> dict[str, Any]:
        """Returns Composer's metadata with the generation config and every file of the processor."""
        try:
            metadata = super().get_metadata()
        except (ValueError, ImportError):
            # Composer saves no tokenizer with several chat templates, and needs sentencepiece for one with a `.model`
            # file (Transformers 4). The files of the processor, below, include the files of the tokenizer.
            tokenizer = self.tokenizer
            self.tokenizer = None
            try:
                metadata = super().get_metadata()
            finally:
                self.tokenizer = tokenizer
        generation_config = getattr(self.model, 'generation_config', None)
        if generation_config is not None:
            content = generation_config.to_dict()
            metadata['model']['generation_config'] = {'file_extension': '.json', 'content': content}
        if self.processor is not None:
            metadata['processor'] = _files_of(self.processor)
        return metadata


def _files_of(processor: Processor) -> dict[str, dict[str, Any]]:
    """Returns the files of a saved processor by name, in the form that files have in Composer's metadata.

    Composer itself saves only the files of the tokenizer, as parsed JSON. Sharded checkpoints lose empty mappings in
    such JSON, so these files are kept as bytes.
    """
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        for file in sorted(Path(folder).rglob('*')):
            if file.is_file():
                name = str(file.relative_to(folder))
                files[name] = {'file_extension': file.suffix, 'content': file.read_bytes()}
    return files
