# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: the norm of the gradient of a model that FSDP1 shards, as Composer does it on GPUs."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from composer.core import Event
from composer.utils import dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from composer_tokacc.monitor.token_monitor import GradientNorm

STRATEGIES = ('FULL_SHARD', 'SHARD_GRAD_OP', 'NO_SHARD')


def main() -> dict[str, Any]:
    """Returns the norm without FSDP, and the monitor's norm under each strategy."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    rows = torch.randn(4, 7)
    # The frozen layer is larger than the trained one, so no shard of the second rank is trained.
    part_frozen = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3), torch.nn.Linear(3, 40))
    part_frozen[1].requires_grad_(False)
    part_frozen[2].requires_grad_(False)
    return {
        'expected': plain_norm(model, rows),
        'measured': {strategy: sharded_norm(model, rows, strategy) for strategy in STRATEGIES},
        'expected_part_frozen': plain_norm(part_frozen, rows),
        'measured_part_frozen': sharded_norm(part_frozen, rows, 'FULL_SHARD'),
    }


def plain_norm(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """Returns the norm of the gradient without FSDP."""
    plain = copy.deepcopy(model)
    loss = plain(rows).square().sum()
    loss.backward()
    gradients = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def sharded_norm(model: torch.nn.Sequential, rows: torch.Tensor, strategy: str) -> float:
    """Returns the norm of the gradient. The second layer is a separate unit inside the outer one."""
    options: dict[str, Any] = {
        'sharding_strategy': ShardingStrategy[strategy],
        'use_orig_params': True,
        'device_id': torch.device('cpu'),
    }
    inner = copy.deepcopy(model)
    inner[1] = FullyShardedDataParallel(inner[1], **options)
    outer = FullyShardedDataParallel(inner, **options)
    loss = outer(rows).square().sum()
    loss.backward()

    norm = GradientNorm()
    state: Any = SimpleNamespace(model=outer)
    logger: Any = None
    norm.apply(Event.AFTER_TRAIN_BATCH, state, logger)
    squared_norm = torch.tensor(norm.square_on_rank())
    dist.all_reduce(squared_norm)
    return float(squared_norm.sqrt())
