# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Refusal of what changes gradients microbatch by microbatch: hooks on parameters that are not linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composer_tokacc.compat import gradient_hooks, steps_after_gradients

SCALES = (1e-4, 1.0, 1e4)
"""Sizes of the gradients that a hook is tried on: clamps show at one of them."""


def check_gradient_hooks(model: torch.nn.Module) -> None:
    """Checks that hooks on parameters are linear, as a step's gradient is the sum of its microbatches'.

    Raises:
        RuntimeError: If one is not (clipping, quantising), or a parameter is stepped as soon as it has a gradient.
    """
    for name, parameter in model.named_parameters():
        if steps_after_gradients(parameter):
            raise RuntimeError(
                f'Optimizers must step once a batch, got: a hook that runs as soon as {name!r} has a gradient, in '
                'every microbatch (`register_post_accumulate_grad_hook`). Give the optimizer to the Trainer '
                '(docs/errors.md#gradient-hooks).'
            )
        for hook in gradient_hooks(parameter):
            if not _is_linear(hook, parameter):
                raise RuntimeError(
                    f'Gradient hooks must be linear, got: {getattr(hook, "__qualname__", hook)} on {name!r}, which '
                    'makes another gradient of the sum of microbatches than of each. Clip in the algorithm '
                    '`gradient_clipping`, which sees the whole step (docs/errors.md#gradient-hooks).'
                )


def _is_linear(hook: Callable[[torch.Tensor], Any], parameter: torch.Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    for scale in SCALES:
        first, second = (torch.randn(local.shape, generator=generator).to(local) * scale for _ in range(2))
        together, apart = _changed(hook, first + second), _changed(hook, first) + _changed(hook, second)
        tolerance = max(1e-4, 8 * torch.finfo(first.dtype).eps)
        if float((together - apart).float().norm()) > tolerance * float(apart.float().norm()):
            return False
    return True


def _changed(hook: Callable[[torch.Tensor], Any], gradient: torch.Tensor) -> torch.Tensor:
    changed = hook(gradient.clone())
    return gradient if changed is None else changed
