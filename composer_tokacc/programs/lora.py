# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""LoRA by peft: low-rank adapters on frozen weights, and checkpoints that hold only the trained weights.

The base is the model without the adapter. An adapter is all that peft adds to it: matrices of low rank, and trained
copies of whole modules (``modules_to_save``). Peft renames the parameters of the base: see :func:`name_in_base`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn
from transformers import BitsAndBytesConfig

from composer_tokacc.cache import fingerprint_of_bytes
from composer_tokacc.compat import name_in_state_dict
from composer_tokacc.programs.errors import ConfigError, building
from composer_tokacc.programs.host_types import Section
from composer_tokacc.programs.schema import Count, Fraction, Name, Positive

PEFT_NAMES = {'alpha': 'lora_alpha', 'dropout': 'lora_dropout'}
"""Keys of the section ``model.lora`` that peft calls by another name."""
NOT_IN_WEIGHTS = ('alpha', 'dropout', 'bias', 'use_rslora')
"""Settings that the names and shapes of an adapter's weights do not show."""
DEFAULT_TARGETS = (
    r'(?!.*(vision|visual|image|audio|tower|resampler|connector|qformer)).*\.(q|k|v|o|qkv|gate|up|gate_up|down)_proj'
)
"""Matches the full names of the linear layers in the blocks of most language models. Encoders and projectors are
left out. QLoRA (arXiv:2305.14314) recommends an adapter on all of these layers. Peft refuses a model that has none of
them."""
IN_ADAPTER = re.compile(r'\.(lora_|modules_to_save\.)')
"""Found in the name of every parameter of an adapter, and of no other parameter."""
NUM_END_VALUES = 32
"""Number of values at each end of a frozen matrix that go into the fingerprint of a base. Both ends are needed, because
two bases may differ only in the last rows of their embeddings, which belong to added tokens."""


ModuleNames = Annotated[list[Name], Field(min_length=1)]


@dataclass(kw_only=True)
class LoraSection:
    """The section ``model.lora``. A key that is null counts as left out.

    Keys without a description have the meaning and the default of the same key of peft's ``LoraConfig``.
    """

    r: Count | None = 8
    """Rank of the matrices."""
    alpha: Positive | None = None
    """Default: ``2 r``."""
    dropout: Fraction | None = None
    target_modules: Name | ModuleNames | None = None
    """Layers with an adapter: ends of their names, or a regular expression of the full name. Default:
    ``DEFAULT_TARGETS``."""
    modules_to_save: ModuleNames | None = None
    """Modules that are trained as a whole, such as ``['multi_modal_projector']``."""
    bias: Literal['none', 'all', 'lora_only'] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    bits: Literal[4] | None = None
    """4 rounds the base to 4 bits, as in QLoRA."""


def with_adapter(model: Any, lora: Section, *, base: str | None) -> Any:
    """Returns a model with a new adapter, which is trained in float32. The base is frozen.

    With the setting ``bias``, biases of the base are trained too, in the type of the base. Refuses a name in
    ``modules_to_save`` that no module has, because peft ignores it.

    Args:
        model: The base.
        lora: The settings, see :class:`LoraSection`.
        base: Folder or hub name of the frozen weights, which an exported adapter names in its config. None if these
            weights are random.
    """
    # Arguments of peft's LoraConfig: our defaults, which a value of `lora` replaces.
    settings: dict[str, Any] = {'r': LoraSection.r, 'target_modules': DEFAULT_TARGETS}
    for name, value in lora.items():
        if value is not None and name != 'bits':
            peft_name = PEFT_NAMES.get(name, name)
            settings[peft_name] = value
    settings.setdefault('lora_alpha', 2 * settings['r'])
    module_names = [f'.{name}' for name, _ in model.named_modules()]
    for name in settings.get('modules_to_save', ()):
        if not any(module_name.endswith(f'.{name}') for module_name in module_names):
            raise ConfigError('model.lora.modules_to_save', f'must name modules of the model, got: {name!r}')
    with building('model.lora'):
        from peft import LoraConfig
        from peft.utils import ModulesToSaveWrapper

        model = _attach(model, LoraConfig(**settings), base)
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            # In float32, as peft's own matrices are: in bfloat16 the small steps of AdamW would be rounded away.
            module.modules_to_save.to(torch.float32)
    return model


def with_saved_adapter(
    model: Any,
    saved_config: Section,
    weights: Mapping[str, torch.Tensor],
    *,
    assign: bool = False,
) -> Any:
    """Returns a base with the adapter of a checkpoint.

    Args:
        model: The base.
        saved_config: Content of peft's ``adapter_config.json``.
        weights: Weights of the checkpoint, by peft's names. If they include the base, they replace the weights of
            ``model``.
        assign: Whether these tensors become the parameters, instead of being copied into them.
    """
    import peft

    adapter_config = peft.get_peft_config(dict(saved_config))
    model = _attach(model, adapter_config, saved_config.get('base_model_name_or_path'))
    missing = load_weights(model, weights, assign=assign)
    if not contains_base(weights):  # then the checkpoint lacks the base
        missing = [name for name in missing if IN_ADAPTER.search(name)]
    refuse_partial('a whole adapter of its base', missing)
    return model


def contains_base(weights: Collection[str]) -> bool:
    """Returns whether a checkpoint with an adapter has the matrices of its base, too. It has all of them or none.

    Peft calls the layer under an adapter ``base_layer``. Only its matrix is looked for. A bias proves nothing, because
    LoRA may train biases (``bias``), and then they are in every checkpoint.

    Args:
        weights: The weights of the checkpoint, or only their names.
    """
    return any(name.endswith('.base_layer.weight') for name in weights)


def _attach(model: Any, config: Any, base: str | None) -> Any:
    """Returns a model with an adapter of a ``LoraConfig``, and writes the name of the base into this config.

    The name is None if the base has random weights.
    """
    import peft

    # Peft copies this name into the config, and warns if the config has another one.
    model.name_or_path = base or ''
    model = peft.get_peft_model(model, config)
    # For random weights peft has written ''. identify_adapter() expects None, and older releases of peft would look for
    # '' on the hub when they save the adapter.
    config.base_model_name_or_path = base
    return model


def refuse_partial(content: str, missing: Sequence[str], *, path: str = '') -> None:
    """Refuses a checkpoint without some of the weights that it must hold.

    Args:
        content: The weights that it must hold, in words.
        missing: Names of weights that it lacks.
        path: The checkpoint, if it is known.
    """
    if missing:
        raise ConfigError('', f'the checkpoint {path} must hold {content}, got: {len(missing)} missing {missing[:3]}')


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], *, assign: bool) -> list[str]:
    """Loads the weights of a checkpoint into a model. Returns the names of the model's weights that it lacks.

    Refuses weights that the model does not have. The caller decides which weights the checkpoint may lack.

    Args:
        model: The model.
        weights: The weights by name.
        assign: Whether these tensors become the parameters, instead of being copied into them.
    """
    with building('the weights of the checkpoint'):
        missing, unknown = model.load_state_dict(dict(weights), strict=False, assign=assign)
    if unknown:
        raise ConfigError(
            '', f'the checkpoint must hold only weights of its model, got: {len(unknown)} unknown {unknown[:3]}'
        )
    return missing


def four_bit_options(
    lora: Section,
    empty_model: nn.Module,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Returns arguments of ``from_pretrained`` for a base in 4 bits, as in QLoRA: NF4 with double quantization.

    Only the language model's linear layers are rounded. Encoders, head and ``modules_to_save`` stay as they are.

    Args:
        lora: The settings, see :class:`LoraSection`.
        empty_model: The base without memory for its weights. It has the names of the layers.
        dtype: Type of the products with the rounded weights.
    """
    saved_modules = lora.get('modules_to_save') or ()
    unrounded = []
    for name, module in empty_model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        dotted_name = f'.{name}.'
        is_saved = any(f'.{saved}.' in dotted_name for saved in saved_modules)
        if is_saved or not re.fullmatch(DEFAULT_TARGETS, name):
            unrounded.append(name)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type='nf4',
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=unrounded,  # Transformers uses it for 4 bits too, despite its name
    )
    # bitsandbytes rounds weights while they are loaded onto a GPU, so Transformers must load them onto this rank's GPU.
    return {'quantization_config': quantization, 'device_map': {'': torch.cuda.current_device()}}


def keep_trained_only(composer_model: nn.Module) -> None:
    """Leaves the frozen weights of a pretrained base out of checkpoints, because the base can be loaded again.

    Composer has ``should_save_peft_only`` for this, but it leaves out ``modules_to_save`` too, and under DDP it has no
    effect. Hooks of torch's state dict work for every kind of checkpoint.
    """

    def leave_out(
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
    ) -> None:
        frozen_names = {prefix + name for name in _frozen_names(module)}
        for key in list(state_dict):
            # A weight in 4 bits has more entries than `weight`: `weight.absmax`, `weight.quant_map`, ...
            weight_name = re.sub(r'\.weight\..*', '.weight', key)
            if key in frozen_names or weight_name in frozen_names:
                del state_dict[key]

    def allow_missing(module: nn.Module, incompatible_keys: Any) -> None:
        frozen_names = tuple(_frozen_names(module))
        missing_keys = incompatible_keys.missing_keys
        # Strict loading raises an error for each name that stays in this list. The names may have a prefix of DDP.
        for key in list(missing_keys):
            if name_in_state_dict(key).endswith(frozen_names):
                missing_keys.remove(key)

    composer_model.register_state_dict_post_hook(leave_out)
    composer_model.register_load_state_dict_post_hook(allow_missing)


def _frozen_names(module: nn.Module) -> set[str]:
    """Returns the names that the frozen weights of the base have in a state dict.

    A frozen weight of an adapter is not one of them.
    """
    names = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if _is_frozen_base(name, parameter):
            names.add(name_in_state_dict(name))
    return names


def _is_frozen_base(name: str, parameter: nn.Parameter) -> bool:
    """Returns whether a parameter belongs to the base and is frozen. With ``bias``, biases of the base are trained."""
    return not parameter.requires_grad and not IN_ADAPTER.search(name)


def identify_adapter(model: nn.Module) -> dict[str, Any]:
    """Returns the settings ``NOT_IN_WEIGHTS`` of an adapter and a fingerprint of its base, by keys of the YAML file.

    The result is empty for a model without an adapter. A resumed run must have the same settings and fingerprint as its
    checkpoint. The fingerprint is made from some values of each frozen matrix, so it stays the same if the base moves
    to another folder or type. A base with random weights (``model.config``) has no fingerprint, because the checkpoint
    holds the base.
    """
    config = getattr(model, 'peft_config', {}).get('default')
    if config is None:
        return {}
    identity = {}
    for name in NOT_IN_WEIGHTS:
        peft_name = PEFT_NAMES.get(name, name)
        identity[f'model.lora.{name}'] = getattr(config, peft_name)
    if config.base_model_name_or_path is not None:
        identity['model.pretrained'] = identify_base(model)
    return identity


def identify_base(model: nn.Module) -> str:
    """Returns a fingerprint of the frozen base of an adapter. It is the same with the adapter and without it."""
    return fingerprint_of_bytes(_ends_of_base(model))


def _ends_of_base(model: nn.Module) -> Iterator[bytes]:
    """Yields the name with the first and last values of each frozen matrix of the base."""
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() > 1
        if is_matrix and _is_frozen_base(name, parameter):
            values = parameter.detach().flatten()
            ends = torch.cat([values[:NUM_END_VALUES], values[-NUM_END_VALUES:]])
            # Rounded, so that the same base has the same values in float32 and in bfloat16.
            ends = ends.to(torch.bfloat16).float()
            yield name_in_base(name).encode() + ends.cpu().numpy().tobytes()


def name_in_base(name: str) -> str:
    """Returns the name that a parameter had before peft renamed it. A matrix of an adapter gets its layer's weight.

    ``...q_proj.lora_A.default.weight`` and ``...q_proj.base_layer.weight`` both give ``...q_proj.weight``.
    """
    name = name.removeprefix('base_model.model.')
    name = re.sub(r'\.(modules_to_save\.default|original_module|base_layer)', '', name)
    return re.sub(r'\.lora_.*', '.weight', name)
