# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: FSDP1, for which Composer asks for a GPU. Returns errors of gradients."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from composer.core import Event, State
from composer.utils import dist
from torch.distributed.fsdp import FullyShardedDataParallel

from composer_tokacc.compat import name_in_state_dict
from tests.support.fsdp import sharded
from tests.support.text import collate, text_model, text_rows
from tests.support.training import Gradients, On, fit, rank_share, reference_gradients, relative_error

CASES: dict[str, dict[str, Any]] = {
    'all shards': {'strategy': 'FULL_SHARD'},
    'shards of gradients': {'strategy': 'SHARD_GRAD_OP'},
    'half of each unit is frozen': {'strategy': 'FULL_SHARD', 'frozen': 'mlp'},
}
ROWS = [(4, 0), (14, 0), (9, 9), (5, 1), (6, 2)]
SHARES = (2, 3)
"""Rows of each rank. The first rank has no labels."""


def whole_gradients(state: State) -> Gradients:
    """Returns the gradients of all weights. Each rank has only its shards of them."""
    gradients = {}
    with FullyShardedDataParallel.summon_full_params(state.model, with_grads=True):
        for name, parameter in state.model.named_parameters():
            if parameter.grad is not None:
                gradients[name_in_state_dict(name)] = parameter.grad.clone()
    return gradients


def error(strategy: str, frozen: str | None = None) -> float:
    model = text_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)
    rows = text_rows(ROWS)
    expected, _ = reference_gradients(model, collate(rows))
    gradients = On(Event.AFTER_TRAIN_BATCH, whole_gradients)
    fsdp_config = {'sharding_strategy': strategy, 'mixed_precision': 'PURE', 'state_dict_type': 'full'}
    with patch.dict('os.environ', FSDP_VERSION='1'), patch('torch.cuda.current_device', lambda: torch.device('cpu')):
        fit(
            sharded(model),
            collate(rank_share(rows, SHARES)),
            microbatch_size=1,
            callbacks=[gradients],
            parallelism_config={'fsdp': fsdp_config},
        )
    return relative_error(gradients.values[-1], expected)


def main() -> dict[str, list[float]]:
    return {name: dist.all_gather_object(error(**case)) for name, case in CASES.items()}
