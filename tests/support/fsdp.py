# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""FSDP2 on gloo.

With torch 2.7 gloo's reduce_scatter(AVG) sums. So the gradients on W ranks are W times too large.
"""

from __future__ import annotations

import copy
import os
from typing import Any

os.environ['FSDP_VERSION'] = '2'

import torch
import torch.distributed

from tests.support.training import hugging_face

FSDP: dict[str, Any] = {'parallelism_config': {'fsdp': {'state_dict_type': 'full'}}}
"""Options of the Trainer."""


def sharded(model: torch.nn.Module) -> Any:
    """Returns a copy in which FSDP shards each vision and text block separately. A rank that skips one hangs others."""
    wrapped = hugging_face(copy.deepcopy(model))
    blocks = ('DecoderLayer', 'EncoderLayer', 'VisionBlock')
    wrapped.model.fsdp_wrap_fn = lambda module: type(module).__name__.endswith(blocks)
    return wrapped


def averages() -> bool:
    """Returns whether reduce_scatter(AVG) of this backend averages ones to ones."""
    world_size = torch.distributed.get_world_size()
    average = torch.zeros(1)
    torch.distributed.reduce_scatter_tensor(average, torch.ones(world_size), op=torch.distributed.ReduceOp.AVG)
    return average.item() == 1.0


def repair_average() -> None:
    """Lets FSDP2 itself divide by the number of ranks if AVG sums."""
    if averages():
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    world_size = float(torch.distributed.get_world_size())
    _fsdp_collectives._get_gradient_divide_factors = lambda *args, **kwargs: (1.0, world_size)
