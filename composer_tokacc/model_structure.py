# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Parts of a Transformers model, found by how it is built, and their precision."""

from __future__ import annotations

import torch
from torch import nn

# Transformers' names of what turns pixels and sounds into embeddings of the language model.
VISION_MODULES = {'vision_tower', 'visual', 'vision_model', 'image_tower', 'video_tower', 'audio_tower', 'qformer',
                  'multi_modal_projector', 'connector'}  # fmt: skip


def vision_modules(model: nn.Module) -> list[nn.Module]:
    """Returns vision encoders and projectors; some of them may be inside others."""
    return [module for name, module in model.named_modules() if name.rpartition('.')[2] in VISION_MODULES]


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated blocks of text and encoders: members of the outermost module lists, no experts inside."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            blocks += [block for block in child if any(True for _ in block.parameters())]
        else:
            blocks += transformer_blocks(child)
    return blocks


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts a model as ``model.to(dtype)`` does, real or fake.

    Newer versions of torch swap the tensors of fake parameters in ``nn.Module.to``, and fail where anything else refers
    to them. Here the module gets new parameters, so call it before an optimizer holds the old ones.
    """
    cast_of: dict[int, torch.Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        for name, tensor in [*module.named_parameters('', False, False), *module.named_buffers('', False, False)]:
            if not tensor.is_floating_point() or tensor.dtype == dtype:
                continue
            if id(tensor) not in cast_of:
                converted = tensor.detach().to(dtype)
                is_weight = isinstance(tensor, nn.Parameter)
                cast_of[id(tensor)] = nn.Parameter(converted, tensor.requires_grad) if is_weight else converted
            setattr(module, name, cast_of[id(tensor)])
