# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""LoRA by peft: low-rank adapters beside frozen weights, and checkpoints that hold only what is trained."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from composer_tokacc.cache import fingerprint
from composer_tokacc.model_structure import cast_model
from composer_tokacc.programs.errors import ConfigError, must
from composer_tokacc.programs.schema import AT_LEAST_1, FRACTION, POSITIVE, check_arguments

# Names of the YAML section, as users write them, and of peft.
_NAMES = {'alpha': 'lora_alpha', 'dropout': 'lora_dropout'}
_BESIDE_WEIGHTS = ('alpha', 'dropout', 'bias', 'use_rslora')
"""Settings that neither names nor shapes of an adapter's weights tell."""
_DEFAULT_TARGETS = (
    r'(?!.*(vision|visual|image|audio|tower|resampler|connector|qformer)).*\.(q|k|v|o|qkv|gate|up|gate_up|down)_proj'
)
"""Every linear layer of the language model's blocks, as QLoRA (arXiv:2305.14314) found best; no encoder's."""
_IN_ADAPTER = r'\.(lora_|modules_to_save\.)'
NUM_VALUES = 32
"""At both ends of a frozen tensor, by which a base is known again; the last are those of tokens that were added."""


@dataclass(kw_only=True)
class LoraSection:
    """Settings of an adapter; null is as if left out."""

    r: Annotated[int, AT_LEAST_1] | None = 8
    alpha: Annotated[float, POSITIVE] | None = None
    """Default: ``2 r``."""
    dropout: Annotated[float, FRACTION] | None = None
    target_modules: str | list[str] | None = None
    """Names, or a regular expression of the whole name; default: the language model's linear layers."""
    modules_to_save: list[str] | None = None
    """Trained as a whole, such as ``['multi_modal_projector']``."""
    bias: Literal['none', 'all', 'lora_only'] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    bits: Literal[4] | None = None


def check_lora(lora: Mapping[str, Any], *, pretrained: str | None) -> None:
    """Refuses settings that no model can take, before any is loaded; :func:`with_adapter` refuses the rest."""
    check_arguments('model.lora', LoraSection, lora)
    for name in ('target_modules', 'modules_to_save'):
        if lora.get(name) is not None and not all(lora[name] or [None]):
            raise ConfigError(f'`model.lora.{name}` must name modules, got: {lora[name]!r}')
    needed = {'peft': 'model.lora'}
    if lora.get('bits') is not None:
        needed |= {'bitsandbytes': 'model.lora.bits', 'accelerate': 'model.lora.bits'}
        if pretrained is None:
            raise ConfigError('`model.lora.bits` must come with `model.pretrained`, got: no weights to round')
        if not torch.cuda.is_available():
            raise ConfigError('`model.lora.bits` must have a GPU, got: none. Leave it out to keep the base as `dtype`')
    for package, key in needed.items():
        if find_spec(package) is None:
            raise ConfigError(f'`{key}` needs the package {package}, got: none. pip install {package}')


def with_adapter(model: Any, lora: Mapping[str, Any], *, base: str | None, never_trained: Collection[str] = ()) -> Any:
    """Returns the model with a fresh adapter; only that and ``modules_to_save`` are trained, and kept in float32.

    ``base`` is the folder or hub name of the frozen weights, which the exported adapter names. Parameters named in
    ``never_trained`` are reached by no loss: neither they nor an adapter beside them is trained.
    """
    import peft

    settings: dict[str, Any] = {'r': 8, 'target_modules': _DEFAULT_TARGETS}
    settings |= {_NAMES.get(name, name): value for name, value in lora.items() if value is not None and name != 'bits'}
    settings.setdefault('lora_alpha', 2 * settings['r'])
    for name in settings.get('modules_to_save', ()):
        if not any(full == name or full.endswith(f'.{name}') for full, _ in model.named_modules()):
            raise ValueError(f'`lora.modules_to_save` must name modules of the model, got: {name!r}, which fits none')
    widest = max((max(module.weight.shape) for module in model.modules() if isinstance(module, nn.Linear)), default=0)
    if settings['r'] > widest > 0:
        raise ValueError(f'`lora.r` must be at most the width of the widest layer, got: {settings["r"]} > {widest}')
    refusals = (ValueError, TypeError, NotImplementedError, re.error)
    with must('`lora` must be what peft can add to this model', dict(lora), *refusals, raises=ValueError):
        model = _attach(model, peft.LoraConfig(**settings), base)
    for module in model.modules():
        if isinstance(module, peft.utils.ModulesToSaveWrapper):
            # As peft does with its adapters: steps of AdamW are lost in the eight bits of a bfloat16.
            cast_model(module.modules_to_save, torch.float32)
    for name, parameter in model.named_parameters():
        if _name_in_base(name) in never_trained:
            parameter.requires_grad_(False)
    return model


def with_saved_adapter(
    model: Any, content: Mapping[str, Any], weights: Mapping[str, torch.Tensor], *, assign: bool = False
) -> Any:
    """Returns the base with the adapter of a checkpoint, whose config is ``content``, as peft writes it.

    What ``weights`` hold of the base replaces its own; with ``assign`` the tensors themselves become the parameters.
    """
    import peft

    model = _attach(model, peft.get_peft_config(dict(content)), content.get('base_model_name_or_path'))
    found = load_weights(model, weights, assign=assign)
    is_whole = any('.base_layer.' in name for name in weights)
    lacking = [name for name in found.missing_keys if is_whole or re.search(_IN_ADAPTER, name)]
    refuse_partial('a whole adapter of its base', lacking, found.unexpected_keys)
    return model


def _attach(model: Any, config: Any, base: str | None) -> Any:
    import peft

    model.name_or_path = base or ''  # peft warns where it differs
    model = peft.get_peft_model(model, config)
    config.base_model_name_or_path = base  # some releases put the model's own name there
    return model


def refuse_partial(what: str, missing: Sequence[str], unknown: Sequence[str]) -> None:
    """Refuses a checkpoint that lacks weights of a model, or holds others."""
    if missing or unknown:
        raise ConfigError(
            f'the checkpoint must hold {what}, got: {len(missing)} missing {missing[:3]}, {len(unknown)} unknown '
            f'{unknown[:3]}'
        )


def load_weights(model: Any, weights: Mapping[str, torch.Tensor], *, assign: bool) -> Any:
    """Loads what a checkpoint holds and returns which names were missing and which unknown."""
    with must('the checkpoint must fit its model', None, RuntimeError):
        return model.load_state_dict(dict(weights), strict=False, assign=assign)


def four_bit_options(lora: Mapping[str, Any], empty_model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Returns arguments of ``from_pretrained`` for a base in 4 bits, as QLoRA has it: normal floats, rounded twice.

    Only the language model's linear layers are rounded; encoders, head and ``modules_to_save`` stay as they are.
    """
    trained = lora.get('modules_to_save') or ()
    linear = [name for name, module in empty_model.named_modules() if isinstance(module, nn.Linear)]
    whole = [name for name in linear if any(f'.{part}.' in f'.{name}.' for part in trained)]
    kept = [name for name in linear if name in whole or not re.fullmatch(_DEFAULT_TARGETS, name)]
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=kept,
    )  # fmt: skip
    return {'quantization_config': quantization, 'device_map': {'': torch.cuda.current_device()}}


def keep_trained_only(composer_model: nn.Module) -> None:
    """Leaves the frozen weights of a base out of checkpoints, where it can be loaded again.

    Composer's own ``should_save_peft_only`` leaves out ``modules_to_save`` as well, and under DDP leaves out nothing.
    Hooks of torch's state dict see every way in which a checkpoint is written and read.
    """

    def leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        names = {prefix + name for name in frozen(module)}
        for key in list(state_dict):
            # In 4 bits a weight has constants beside it: `weight.absmax`, `weight.quant_map`, ...
            if key in names or re.sub(r'\.weight\..*', '.weight', key) in names:
                del state_dict[key]

    def fill_in(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, value in frozen(module).items():
            state_dict.setdefault(prefix + name, value)

    def frozen(module: nn.Module) -> dict[str, Any]:
        named = module.named_parameters(remove_duplicate=False)
        # An adapter is kept whole, what no loss reaches too: peft misses it otherwise.
        return {name: p.data for name, p in named if not p.requires_grad and not re.search(_IN_ADAPTER, name)}

    composer_model.register_state_dict_post_hook(leave_out)
    composer_model.register_load_state_dict_pre_hook(fill_in)


def refuse_other_adapters(composer_model: nn.Module) -> None:
    """Refuses, in one line, checkpoints of a run that had another adapter, or one where this has none."""

    def compare(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Activation checkpointing and the first FSDP put themselves into the names, the latter flattens too.
        named = module.named_parameters(remove_duplicate=False)
        own = {re.sub(r'_\w+_wrapped_module\.', '', prefix + name): parameter.shape for name, parameter in named}
        here, saved = ({name for name in names if re.search(_IN_ADAPTER, name)} for names in (own, state_dict))
        shapes = {name: state_dict[name].shape for name in saved & own.keys()}
        differing = saved ^ here
        differing |= {name for name, shape in shapes.items() if len(shape) == len(own[name]) and shape != own[name]}
        if differing:
            raise ConfigError(
                f'the checkpoint must be of a run with the same `model.lora`, got: {len(differing)} weights differ '
                f'({min(differing)}). Give the settings of that run, or another `trainer.run_name` and `save_folder`'
            )

    composer_model.register_load_state_dict_pre_hook(compare)


def identify_adapter(model: nn.Module) -> dict[str, Any]:
    """Returns what the weights in a checkpoint of an adapter do not tell, by its name in the config.

    That is how it is applied, and the base that it was trained beside, by some values of each frozen matrix: that may
    lie elsewhere, in another type. A base that is nowhere else (``model.config``) is in the checkpoint itself.
    """
    config = getattr(model, 'peft_config', {}).get('default')
    if config is None:
        return {}
    found = {f'model.lora.{name}': getattr(config, _NAMES.get(name, name)) for name in _BESIDE_WEIGHTS}
    if config.base_model_name_or_path is not None:
        found['model.pretrained'] = fingerprint(_ends_of_base(model))
    return found


def _ends_of_base(model: nn.Module) -> Iterator[bytes]:
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not parameter.requires_grad and not re.search(_IN_ADAPTER, name):
            values = parameter.detach().flatten()
            ends = torch.cat([values[:NUM_VALUES], values[-NUM_VALUES:]]).to(torch.bfloat16).float()
            yield _name_in_base(name).encode() + ends.cpu().numpy().tobytes()


def _name_in_base(name: str) -> str:
    """Returns the parameter of the model without an adapter that a parameter stands for, or lies beside."""
    name = name.removeprefix('base_model.model.')
    name = re.sub(r'\.(modules_to_save\.default|original_module|base_layer)', '', name)
    return re.sub(r'\.lora_.*', '.weight', name)
