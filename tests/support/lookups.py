# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Shortens slow lookups and waits of Composer and torch, so that tests take less time."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.utils.data import _utils


def shorten_lookups_and_waits() -> None:
    """Changes three functions of Composer, if it is loaded, and a function and a time of torch.

    Each Trainer searches all files of the installation for a commit, a tenth of the time of a small test. Now only the
    first one does. The first Trainer of a process takes 1 s to find the name of the CPU, which it only logs. The first
    model of a process imports all causal models of transformers, which takes 2 s. Now their names are compared.

    Each forward of Transformers asks whether CUDA captures it. Without a GPU torch needs half a millisecond to fail.

    Torch waits five seconds for each worker of a loader that only the garbage collector ends, and then kills it. Now it
    waits half a second.
    """
    _utils.MP_STATUS_CHECK_INTERVAL = 0.5
    if not torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing = lambda: False
    if module := sys.modules.get('composer.utils.collect_env'):
        module.get_composer_commit_hash = functools.cache(module.get_composer_commit_hash)
        module.get_cpu_model = lambda: 'CPU'
    if module := sys.modules.get('composer.models.huggingface'):
        module._is_registered_causal_lm = functools.partial(_is_registered, module.maybe_get_underlying_model)


def _is_registered(underlying: Any, model: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return any(base.__name__ in NAMES.values() for base in type(underlying(model)).__mro__)
