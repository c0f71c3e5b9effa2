# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds the devices that a run trains on."""

from __future__ import annotations

import psutil
import torch
from composer.utils import dist

from composer_tokacc.programs.schema import TrainConfig
from composer_tokacc.sizing import GIB


def runs_on_gpu(config: TrainConfig) -> bool:
    """Returns whether the Trainer of a run takes a GPU."""
    return config.trainer.get('device') != 'cpu' and torch.cuda.is_available()


def device_memory_gib(config: TrainConfig) -> float:
    """Returns the memory of this rank's device in GiB, from the config, or else measured on this machine.

    On CPU it is the host's memory divided by its ranks.
    """
    if config.microbatching.device_memory_gib is not None:
        return config.microbatching.device_memory_gib
    if runs_on_gpu(config):
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB
    return psutil.virtual_memory().total / GIB / dist.get_local_world_size()
