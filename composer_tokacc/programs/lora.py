# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""LoRA by peft: low-rank adapters beside frozen weights, and checkpoints that hold only what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from torch import nn

__all__ = ['keep_trained_only', 'with_adapter']

# Names of the YAML section, as users write them, and of peft.
_NAMES = {'alpha': 'lora_alpha', 'dropout': 'lora_dropout'}
_SETTINGS = ('r', 'alpha', 'dropout', 'target_modules', 'modules_to_save', 'bias', 'use_rslora', 'use_dora')
_DEFAULT_TARGETS = r'(?!.*(vision|visual|image|audio)).*\.(q|k|v|o|gate|up|down)_proj'
"""Every linear layer of the language model's blocks, as QLoRA (arXiv:2305.14314) found best; no encoder's."""


def with_adapter(model: Any, lora: Mapping[str, Any], *, base: str | None) -> Any:
    """The model with a LoRA adapter; all but the adapter and ``modules_to_save`` is frozen.

    Args:
        model: A Transformers model.
        lora: ``r``, ``alpha`` (default ``2 r``), ``dropout``, ``target_modules`` (names, or a regular expression of the
            whole name; default: the language model's linear layers), ``modules_to_save`` (trained as a whole, such as
            ``['multi_modal_projector']``), and peft's ``bias``, ``use_rslora``, ``use_dora``.
        base: Folder or hub name of the frozen weights, which the exported adapter names.

    Raises:
        ValueError: If peft is not there, or a setting is unknown or fits no module.
    """
    if find_spec('peft') is None:
        raise ValueError('`lora` needs the package peft, got: none. pip install peft')
    import peft

    unknown = sorted(lora.keys() - set(_SETTINGS))
    if unknown:
        raise ValueError(f'`lora` must have keys of {_SETTINGS}, got: {unknown}')
    settings: dict[str, Any] = {_NAMES.get(name, name): value for name, value in lora.items()}
    settings.setdefault('r', 8)
    settings.setdefault('lora_alpha', 2 * settings['r'])
    settings.setdefault('target_modules', _DEFAULT_TARGETS)
    for name in settings.get('modules_to_save') or ():
        if not any(full == name or full.endswith(f'.{name}') for full, _ in model.named_modules()):
            raise ValueError(f'`lora.modules_to_save` must name modules of the model, got: {name!r}, which fits none')
    config = peft.LoraConfig(**settings)
    config.base_model_name_or_path = base
    return peft.get_peft_model(model, config)


def keep_trained_only(composer_model: nn.Module) -> None:
    """Leaves the frozen weights of a base out of checkpoints, where it can be loaded again.

    Composer's own ``should_save_peft_only`` leaves out ``modules_to_save`` as well, and under DDP leaves out nothing.
    Hooks of torch's state dict see every way in which a checkpoint is written and read.
    """

    def leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name in frozen(module):
            state_dict.pop(prefix + name, None)

    def fill_in(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, value in frozen(module).items():
            state_dict.setdefault(prefix + name, value)

    def frozen(module: nn.Module) -> dict[str, Any]:
        return {name: p.data for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}

    composer_model.register_state_dict_post_hook(leave_out)
    composer_model.register_load_state_dict_pre_hook(fill_in)
