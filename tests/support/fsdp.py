# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""FSDP2 on gloo. With torch 2.7 gloo's reduce_scatter(AVG) sums, so gradients come out W times too large."""

from __future__ import annotations

import copy
import os
from typing import Any

os.environ['FSDP_VERSION'] = '2'

import torch
import torch.distributed

from tests.support.training import hugging_face

FSDP: dict[str, Any] = {'parallelism_config': {'fsdp': {'state_dict_type': 'full'}}}
"""Of the Trainer."""


def sharded(model: torch.nn.Module) -> Any:
    """Every vision and text block is a unit of its own: a rank that skips one hangs the others."""
    wrapped = hugging_face(copy.deepcopy(model))
    blocks = ('DecoderLayer', 'EncoderLayer', 'VisionBlock')
    wrapped.model.fsdp_wrap_fn = lambda module: type(module).__name__.endswith(blocks)
    return wrapped


def averages() -> bool:
    """Whether this backend's reduce_scatter(AVG) of ones gives ones."""
    world = torch.distributed.get_world_size()
    out = torch.zeros(1)
    torch.distributed.reduce_scatter_tensor(out, torch.ones(world), op=torch.distributed.ReduceOp.AVG)
    return out.item() == 1.0


def repair_average() -> None:
    """Where AVG sums, lets FSDP2 divide by itself."""
    if not averages():
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        world = float(torch.distributed.get_world_size())
        _fsdp_collectives._get_gradient_divide_factors = lambda *args, **kwargs: (1.0, world)
