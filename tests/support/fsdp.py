# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""FSDP2 on gloo. For FSDP1 Composer needs a GPU, or the patches of ``tests/ranks/fsdp1.py``."""

from __future__ import annotations

import copy
import os
from typing import Any

os.environ['FSDP_VERSION'] = '2'

import torch

from tests.support.training import hugging_face

FSDP: dict[str, Any] = {'parallelism_config': {'fsdp': {'state_dict_type': 'full'}}}
"""Options of the Trainer."""


def sharded(model: torch.nn.Module) -> Any:
    """Returns a copy in which FSDP shards each vision and text block separately. A rank that skips one hangs others."""
    wrapped = hugging_face(copy.deepcopy(model))
    blocks = ('DecoderLayer', 'EncoderLayer', 'VisionBlock')
    wrapped.model.fsdp_wrap_fn = lambda module: type(module).__name__.endswith(blocks)
    return wrapped
