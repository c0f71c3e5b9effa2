# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The norm of a step's gradient, as it was before it was clipped."""

from __future__ import annotations

import math
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch.distributed.tensor import DTensor, Replicate


class GradientNorm(Algorithm):
    """Measures the gradient behind the last backward.

    An algorithm, because Composer clips in one: callbacks come behind it. Of the algorithms of an ``AFTER_`` event the
    last of the list is the first.
    """

    def __init__(self) -> None:
        self._norms: list[tuple[torch.Tensor, int]] = []

    @classmethod
    def first_of(cls, state: State) -> GradientNorm:
        """Returns the run's own, which measures before all other algorithms."""
        found = next((one for one in state.algorithms if isinstance(one, cls)), None)
        if found is None:
            state.algorithms.append(found := cls())
        return found

    def match(self, event: Event, state: State) -> bool:
        """Before the optimizer's step, gradients unscaled."""
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Takes the norms; nothing waits for the device."""
        groups: dict[int, list[torch.Tensor]] = {}
        for parameter in state.model.parameters():
            if (gradient := parameter.grad) is not None:
                groups.setdefault(_num_copies(gradient), []).append(_local(gradient))
        self._norms = [(torch.nn.utils.get_total_norm(some), copies) for copies, some in groups.items()]

    def squares(self) -> float:
        """This rank's part of the squared norm: all ranks' add up to it. Reads the device."""
        return sum(float(norm) ** 2 / copies for norm, copies in self._norms) if self._norms else math.nan


def _num_copies(gradient: Any) -> int:
    """Returns how many ranks hold the same part of a gradient."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size()  # as DDP has reduced it
    mesh, placements = gradient.device_mesh, gradient.placements
    held = [mesh.size(dim) for dim, placement in enumerate(placements) if isinstance(placement, Replicate)]
    return math.prod(held) * dist.get_world_size() // mesh.size()


def _local(gradient: Any) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
