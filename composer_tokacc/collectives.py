# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Collectives, which every rank must call, and functions about ranks, which a rank may call by itself.

A single rank needs no process group. If it has one, it makes no collective nevertheless.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed

from composer_tokacc.refusals import NotExactError, RefusalError

T = TypeVar('T')


def get_world_size() -> int:
    """Returns the number of ranks. Without a process group it is the number that the launcher set, or 1."""
    if _has_group():
        return torch.distributed.get_world_size()
    return int(os.environ.get('WORLD_SIZE', 1))


def get_global_rank() -> int:
    """Returns the number of this rank. Without a process group it is the number that the launcher set, or 0."""
    if _has_group():
        return torch.distributed.get_rank()
    return int(os.environ.get('RANK', 0))


def _has_group() -> bool:
    """Returns whether the default process group exists."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _has_other_ranks() -> bool:
    """Returns whether there are other ranks, with which values must be exchanged.

    A single rank makes no collective, even in a process group, because gloo needs 0.15 ms to gather an object.

    Raises NotExactError if several ranks were launched without a group, because sums would cover only this rank.
    """
    num_ranks = get_world_size()
    if num_ranks > 1 and not _has_group():
        raise NotExactError(
            f'{num_ranks} ranks were launched, but they have no process group to exchange values. Call '
            '`torch.distributed.init_process_group` first (with Composer: `dist.initialize_dist`).'
        )
    return num_ranks > 1


def all_gather_object(value: T) -> list[T]:
    """Returns the values of all ranks, in the order of the ranks; a collective."""
    values = [value] * get_world_size()  # the gather overwrites them. With one rank this is the result
    if _has_other_ranks():
        torch.distributed.all_gather_object(values, value)
    return values


def gather_if_grouped(value: T) -> list[T]:
    """Returns the values of all ranks; a collective. Without a process group it returns only the value of this rank.

    It is for measurements of any training loop. A loop of several ranks without a process group is measured on each
    rank by itself, whereas :func:`all_gather_object` raises.
    """
    return all_gather_object(value) if _has_group() else [value]


class Gather(Protocol):
    """A function that gathers values, such as :func:`all_gather_object` or :func:`gather_this_rank_only`."""

    def __call__(self, value: T, /) -> list[T]:
        """Returns the values of all ranks."""
        ...


def gather_this_rank_only(value: T) -> list[T]:
    """Returns only the value of this rank. Replaces a gather in code that a rank runs without the others."""
    return [value]


def from_first_rank_with_value(value: T | None) -> T | None:
    """Returns the value of the lowest rank whose value is not None, or None if there is no such rank; a collective."""
    num_ranks = get_world_size()
    # The first rank with a value is the smallest of these numbers, or `num_ranks` if no rank has a value.
    rank_with_value = num_ranks if value is None else get_global_rank()
    # min(x) = -max(-x), because there is only a maximum over ranks.
    (negative_first,) = max_over_ranks([-rank_with_value])
    first_rank = -negative_first
    values = [value]
    if _has_other_ranks() and first_rank < num_ranks:
        # Not a gather, because every rank that has a value would send it.
        torch.distributed.broadcast_object_list(values, src=first_rank)
    return values[0]


def run_on_rank_0(compute: Callable[[], T]) -> T:
    """Calls a function on rank 0 and returns its result, which is not None, on all ranks; a collective.

    If the function raises a refusal, all ranks raise it. Any other error is raised on rank 0 only. The others then
    raise a refusal that names it, so that only rank 0 prints a traceback. A SystemExit of status 0 counts as an error,
    too, because the others would wait for a result. So does a result that cannot be pickled, if there are other ranks.

    ``compute`` must make no collective, so it must not call this function either. The other ranks already wait for the
    result of ``compute``, and would take the result of an inner call for it.
    """
    outcome: T | RefusalError | None = None
    if get_global_rank() == 0:
        try:
            outcome = compute()
            if _has_other_ranks():
                # Raises an error if the result cannot be pickled. The broadcast would raise it on rank 0 only, while
                # the others wait for the result.
                pickle.dumps(outcome)
        except RefusalError as error:
            outcome = error  # raised below on all ranks, because the others wait for the outcome
        except (Exception, SystemExit) as error:  # not a KeyboardInterrupt, because Ctrl-C reaches all ranks
            # The error itself is not sent, because not every error can be pickled.
            from_first_rank_with_value(
                NotExactError(f'Rank 0 has failed, read its output: {type(error).__name__}: {error}')
            )
            raise
    outcome = from_first_rank_with_value(outcome)  # the outcome of rank 0, because the others have None
    assert outcome is not None, 'rank 0 has an outcome'
    if isinstance(outcome, RefusalError):
        raise outcome
    return outcome


def raise_on_all_ranks(refusal: RefusalError | None) -> None:
    """Raises the refusal of a rank on that rank, and an error with the same text on the others; a collective.

    Otherwise the other ranks would wait, and end with an error of the backend that does not name the cause.

    Args:
        refusal: The refusal of this rank. None: it has none. If no rank has one, nothing is raised.
    """
    message = from_first_rank_with_value(None if refusal is None else str(refusal))
    if refusal is not None:
        raise refusal
    if message is not None:
        raise NotExactError(f'Another rank has refused its batch: {message}')


def max_over_ranks(values: Sequence[int]) -> list[int]:
    """Returns the maximum over the ranks of each integer, in one all-reduce."""
    integers = [int(value) for value in values]
    if not _has_other_ranks():
        return integers
    device = torch.device('cpu')
    # NCCL reduces only tensors on a GPU.
    if torch.distributed.get_backend() == 'nccl':
        device = torch.device('cuda', torch.cuda.current_device())
    tensor = torch.tensor(integers, device=device)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return tensor.tolist()


def are_equal_on_ranks(total: float, total_of_squares: float, num_ranks: int) -> bool:
    """Returns whether a number is the same on all ranks. Not a collective: the sums over the ranks are arguments.

    Numbers are all equal if and only if the mean of their squares is the square of their mean (Cauchy-Schwarz). For
    example 3 and 3 have the sums 6 and 18, and 2 * 18 = 6 * 6. But 2 and 4 have the sums 6 and 20.

    That holds only without rounding or overflow, so the numbers must be integers. If they were added as int64, and the
    sums are ints, ``total_of_squares`` must be below 2**63. If they were added as floats, or the sums are floats,
    ``num_ranks * total_of_squares`` must be below 2**53, because larger floats do not hold every integer.

    Args:
        total: Sum over the ranks of the number.
        total_of_squares: Sum over the ranks of its square.
        num_ranks: Number of ranks.
    """
    return num_ranks * total_of_squares == total**2


def sum_over_ranks(values: torch.Tensor) -> tuple[float, ...]:
    """Returns the sum over all ranks of each number, in one all-reduce.

    Args:
        values: int64 or float64 ``(n,)``, with the same n on all ranks, on the device on which the process group
            reduces. They are overwritten.
    """
    add_over_ranks(values)
    return tuple(values.tolist())


def add_over_ranks(values: torch.Tensor) -> None:
    """Overwrites a tensor with its sum over all ranks; a collective. The host does not wait for a GPU."""
    if _has_other_ranks():
        torch.distributed.all_reduce(values)
