# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Parts of a Transformers model, recognised by its modules, and their precision."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

VISION_MODULES = {
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
"""Transformers' names of modules that turn pixels and sounds into embeddings of the language model."""


def vision_modules(model: nn.Module) -> list[nn.Module]:
    """Returns vision encoders and projectors. Some of them may be inside others."""
    modules = []
    for name, module in model.named_modules():
        last_name = name.rpartition('.')[2]
        if last_name in VISION_MODULES:
            modules.append(module)
    return modules


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated blocks of the language model and of encoders.

    These are the members of the outermost module lists. Lists within a block, such as its experts, do not count.
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


def unwrapped_block(block: nn.Module) -> nn.Module:
    """Returns the block inside of torch's wrappers, such as that of activation checkpointing."""
    children = list(block.children())
    while type(block).__module__.startswith('torch.') and len(children) == 1:
        [block] = children
        children = list(block.children())
    return block


def fsdp_units(model: nn.Module) -> list[nn.Module]:
    """Returns the modules whose weights FSDP1 or FSDP2 gathers together."""
    units = []
    for module in model.modules():
        # By its name, because a newer torch may have no FSDP1.
        if isinstance(module, FSDPModule) or type(module).__name__ == 'FullyShardedDataParallel':
            units.append(module)
    return units


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts a model as ``model.to(dtype)`` does. It may have fake tensors, which have no data.

    Newer versions of torch swap the tensors of fake parameters in ``nn.Module.to``, and fail if anything else refers to
    them. Here the module gets new parameters, so call it before an optimizer holds the old ones.
    """
    new_tensors: dict[int, torch.Tensor] = {}  # by the identity of the old one: tied weights stay tied
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        # A list, because the loop replaces members.
        for name, tensor in list(chain(parameters, buffers)):
            if not tensor.is_floating_point() or tensor.dtype == dtype:
                continue
            identity = id(tensor)
            if identity not in new_tensors:
                new_tensors[identity] = _cast(tensor, dtype)
            setattr(module, name, new_tensors[identity])


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    converted = tensor.detach().to(dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(converted, tensor.requires_grad)
    return converted
