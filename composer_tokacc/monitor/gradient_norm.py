# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The norm of a step's gradient before it is clipped."""

from __future__ import annotations

import math

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch.distributed.tensor import DTensor, Replicate


class GradientNorm(Algorithm):
    """Measures the gradient after the last backward of a step.

    It is an algorithm, because Composer clips the gradient in an algorithm, and callbacks run after all algorithms. For
    an event whose name begins with ``AFTER_`` Composer runs the list of algorithms backwards. This one is appended at
    the end, so it measures before the gradient is clipped.
    """

    def __init__(self) -> None:
        self._norms: list[tuple[torch.Tensor, int]] = []
        """Norms of this rank's part of the gradient, each with the number of ranks that hold the same part."""

    @classmethod
    def of_run(cls, state: State) -> GradientNorm:
        """Returns the ``GradientNorm`` among the algorithms of a run. Appends one if there is none."""
        for algorithm in state.algorithms:
            if isinstance(algorithm, cls):
                return algorithm
        algorithm = cls()
        state.algorithms.append(algorithm)
        return algorithm

    def match(self, event: Event, state: State) -> bool:
        """Returns whether to run: before the optimizer's step, when gradients are already unscaled."""
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Computes the norms on the device, without waiting for it."""
        # Gradients of which equally many ranks hold the same part are measured together.
        gradients: dict[int, list[torch.Tensor]] = {}
        for parameter in state.model.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            num_copies = _num_copies(gradient)
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            gradients.setdefault(num_copies, []).append(gradient)
        self._norms = []
        for num_copies, tensors in gradients.items():
            self._norms.append((torch.nn.utils.get_total_norm(tensors), num_copies))

    def square_on_rank(self) -> float:
        """Returns this rank's share of the squared norm; NaN without a gradient. The shares of all ranks add up to it.

        If several ranks hold the same part of the gradient, each takes an equal share of it. Waits for the device.
        """
        if not self._norms:
            return math.nan
        return sum(float(norm) ** 2 / num_copies for norm, num_copies in self._norms)


def _num_copies(gradient: torch.Tensor) -> int:
    """Returns how many ranks hold the same part of a gradient."""
    num_ranks = dist.get_world_size()
    if not isinstance(gradient, DTensor):
        return num_ranks  # DDP has made it the same on all ranks
    mesh = gradient.device_mesh
    num_copies = num_ranks // mesh.size()
    for dimension, placement in enumerate(gradient.placements):
        if isinstance(placement, Replicate):
            num_copies *= mesh.size(dimension)
    return num_copies
