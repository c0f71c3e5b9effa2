# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The algorithm as plain functions, for a training loop without a Trainer; the class is built on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed

from composer_tokacc.counting import count_tokens

__all__ = ['RankSum', 'sample_weight', 'step_loss_weights', 'token_weight']


def token_weight(num_tokens: int, step_tokens: int, *, world_size: int = 1) -> float:
    """What a microbatch's mean loss must weigh, so that the step's gradient is that of one mean over all its tokens.

    .. math:: w_{rm} = W t_{rm} / T

    A mean over ``t`` tokens is a sum divided by ``t``, and the step's mean is that sum divided by ``T``. DDP and FSDP
    average gradients over the ``W`` ranks, which the factor ``W`` takes back.

    Args:
        num_tokens: Loss-generating tokens of the microbatch.
        step_tokens: Those of the step, over all ranks and microbatches.
        world_size: Ranks that average their gradients.
    """
    return num_tokens * world_size / max(step_tokens, 1)


def sample_weight(num_samples: int, step_samples: int, *, world_size: int = 1) -> float:
    """What a microbatch's mean loss weighs in Composer, ``W n / N``: the arguments are samples in place of tokens."""
    return num_samples * world_size / max(step_samples, 1)


def step_loss_weights(
    microbatches: Sequence[Mapping[str, Any]],
    *,
    loss_tokens: str = 'causal',
    device: torch.device | str = 'cpu',
) -> list[float]:
    """The factor of each microbatch's mean loss in one optimizer step; a collective where there are several ranks.

    A microbatch without loss-generating tokens has factor 0, and in most models a loss of NaN: it must not be computed,
    or where DDP waits for it, be given a label.

    Args:
        microbatches: This rank's part of the step; each has ``labels`` of shape ``(rows, width)``.
        loss_tokens: By which rule the model averages, see :func:`.counting.loss_mask`.
        device: Where the process group reduces.

    Returns:
        list[float]: One factor a microbatch.

    Example:
        .. code-block:: python

            for microbatch, weight in zip(microbatches, step_loss_weights(microbatches)):
                (model(**microbatch).loss * weight).backward()
    """
    counts = [count_tokens(microbatch, loss_tokens).num_loss_generating for microbatch in microbatches]
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    (step_tokens,) = RankSum(torch.tensor([sum(counts)], device=device)).read()
    return [token_weight(count, step_tokens, world_size=world_size) for count in counts]


class RankSum:
    """Starts one all-reduce of integers; :meth:`read` waits for it the first time.

    Composer's own ``dist.all_reduce`` waits at once, for a rank that may be late. Here the waiting is left to whichever
    collective the host needs first, so it is never paid twice.

    Args:
        values: This rank's integers, int64, equally many on all ranks, where the process group reduces.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values: tuple[int, ...] | None = None
        self._tensor = values
        self._work = None
        if torch.distributed.is_initialized():
            self._work = torch.distributed.all_reduce(self._tensor, async_op=True)

    def read(self) -> tuple[int, ...]:
        """The sums over all ranks."""
        if self._values is None:
            if self._work is not None:
                self._work.wait()
            self._values = tuple(self._tensor.tolist())
        return self._values
