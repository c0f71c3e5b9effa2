# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures the memory that a forward keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def watch_saved(model: torch.nn.Module, report: Callable[[int], None]) -> list[Any]:
    """Registers hooks that report how many bytes each forward keeps for its backward, without the weights.

    Returns:
        The handles of the hooks.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}
    contexts: list[Any] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # Held until the forward ends, so that its address is not used again.
            storages[storage.data_ptr()] = storage
        return tensor

    def before_forward(module: Any, args: Any) -> None:
        context = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        context.__enter__()
        contexts.append(context)

    def after_forward(module: Any, args: Any, output: Any) -> None:
        contexts.pop().__exit__(None, None, None)
        report(sum(storage.nbytes() for storage in storages.values()))
        storages.clear()

    return [
        model.register_forward_pre_hook(before_forward),
        model.register_forward_hook(after_forward),
    ]
