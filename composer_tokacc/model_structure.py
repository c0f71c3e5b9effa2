# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds parts of a Transformers model by its modules and methods, and the arguments of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

HALF_PRECISION = (torch.float16, torch.bfloat16)
"""The types of 16 bits in which models compute."""

MEDIA_MODULES = {
    'vision_tower',
    'visual',
    'vision_model',
    'image_tower',
    'video_tower',
    'audio_tower',
    'qformer',
    'multi_modal_projector',
    'connector',
}
"""Transformers' names of the modules that turn images, videos or audio into embeddings of the language model."""


def transformers_model(model: Any) -> Any:
    """Returns the Hugging Face model inside of a Composer model, or any other model itself."""
    # Every ComposerModel has `eval_forward`. With isinstance(), Composer would have to be imported.
    if hasattr(model, 'eval_forward'):
        return getattr(model, 'model', model)
    return model


def output_embedding(model: Any) -> nn.Module | None:
    """Returns the module that computes logits from hidden states, or None if the model does not name one."""
    return _module_from(model, 'get_output_embeddings')


def input_embedding(model: Any) -> nn.Module | None:
    """Returns the module that turns token ids into embeddings, or None if the model does not name one."""
    return _module_from(model, 'get_input_embeddings')


def _module_from(model: Any, method_name: str) -> nn.Module | None:
    """Returns the module that a method of a Transformers model returns.

    None: the model has no such method, or the method raises because the model has no such module.
    """
    try:
        get_module = getattr(model, method_name)
        return get_module()
    except (AttributeError, NotImplementedError):
        return None


def media_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the encoders of images, videos and audio, and their projectors. Some of them may be inside others."""
    modules = []
    for name, module in model.named_modules():
        last_name = name.rpartition('.')[2]  # the name of the attribute
        if last_name in MEDIA_MODULES:
            modules.append(module)
    return modules


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated blocks of the language model and of encoders.

    These are the members of the outermost module lists. Lists within a block, such as its experts, do not count.
    Members without parameters are left out: FSDP has nothing to shard in them.
    """
    blocks: list[nn.Module] = []
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            blocks += transformer_blocks(child)
            continue
        for block in child:
            has_parameters = next(block.parameters(), None) is not None
            if has_parameters:
                blocks.append(block)
    return blocks


def fsdp_units(model: nn.Module) -> list[nn.Module]:
    """Returns the units of FSDP1 or FSDP2, outer ones first. The weights of a unit are gathered together."""
    units = []
    for module in model.modules():
        # FSDP1 by the name of its class, because a newer torch may not have it.
        if isinstance(module, FSDPModule) or type(module).__name__ == 'FullyShardedDataParallel':
            units.append(module)
    return units


def shard_again(model: nn.Module) -> None:
    """Shards all weights of FSDP2 that are gathered, so that the parameters of the model are DTensors.

    After a forward without a backward, such as one of an evaluation, FSDP2 leaves the weights of its outermost unit
    gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def forward_parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a Hugging Face model's forward, by name and in their order.

    The forward of a PEFT model may have only ``*args`` and ``**kwargs``, which it passes on to the model that it
    adapts. So the parameters of that model's forward are added.
    """
    parameters = dict(inspect.signature(model.forward).parameters)
    if hasattr(model, 'get_base_model'):
        parameters |= inspect.signature(model.get_base_model().forward).parameters
    return parameters
