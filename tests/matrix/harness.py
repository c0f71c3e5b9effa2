# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Steps of a real Trainer, compared with plain autograd: exact, refused, wrong or crashed."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc.refusals import RefusalError
from tests.support.training import (
    GradientRecorder,
    Gradients,
    in_double,
    loader,
    relative_error,
    take_gradients,
    tensors_in,
    train,
)

__all__ = ['TOLERANCE', 'Outcome', 'kinds_of_steps', 'measure', 'measure_steps', 'plain_gradients', 'quiet']

TOLERANCE = 1e-6
LARGEST_ROUND_OFF = 3e-6
"""An error between TOLERANCE and this value is still exact if it is below twice the error of one forward in float32.
The latter is 1.4e-6 for Mllama with large weights."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a step.

    Args:
        kind: ``'exact'``, ``'refused'`` (by the package, with a reason, before the optimizer moves), ``'wrong'`` or
            ``'crashed'``.
        error: Relative error of the gradient. Without a gradient it is not a number.
        message: The error that was raised.
        where: Tells the reader of a failed test which batch it was.
    """

    kind: str
    error: float = float('nan')
    message: str = ''
    where: str = ''

    def __str__(self) -> str:
        return f'{self.where}: {self.kind} {self.message or format(self.error, ".1e")}'


def measure(model: Any, batch: dict[str, Any], microbatch_size: int, /, **options: Any) -> Outcome:
    """Runs one step on one batch; see :func:`measure_steps`."""
    (outcome,) = measure_steps(model, [batch], microbatch_size, **options)
    return outcome


def measure_steps(
    model: Any,
    batches: Sequence[dict[str, Any]],
    microbatch_size: int,
    /,
    *,
    where: str = '',
    algorithms: Sequence[Any] | None = None,
    trainer_options: dict[str, Any] | None = None,
    reference: Callable[[Any, dict[str, Any]], Gradients] | None = None,
    **options: Any,
) -> list[Outcome]:
    """Runs a step on each batch, until one raises an error.

    The learning rate is 0, so that the references can be computed with the same weights afterwards.

    Args:
        model: A Composer model.
        batches: The batches of the loader.
        microbatch_size: Option of the Trainer.
        where: See :class:`Outcome`.
        algorithms: Algorithms of the Trainer. None: a new TokenAccumulation.
        trainer_options: Further options of the Trainer.
        reference: Returns the expected gradients of a model and a batch. None: :func:`plain_gradients`.
        **options: Options of ``token_data_spec``.

    Returns:
        The outcome of each step. If a step raised an error, its outcome is the last one.
    """
    if algorithms is None:
        algorithms = [TokenAccumulation()]
    recorder = GradientRecorder()
    optimizer = CountingSGD(model.parameters(), lr=0.0)
    outcome_of_error = []
    try:
        with quiet():
            train(
                model,
                token_data_spec(loader(*batches), **options),
                optimizer=optimizer,
                callbacks=[recorder],
                algorithms=algorithms,
                microbatch_size=microbatch_size,
                max_duration=f'{len(batches)}ba',
                **(trainer_options or {}),
            )
    except Exception as error:
        # If both numbers are equal, the optimizer moved only in recorded steps, which are compared below.
        is_before_move = optimizer.num_steps == len(recorder.steps)
        kind = 'refused' if _is_refusal(error) and is_before_move else 'crashed'
        outcome_of_error = [Outcome(kind=kind, message=f'{type(error).__name__}: {error}', where=where)]
    finally:
        model.zero_grad(set_to_none=True)

    gradients_of = reference or plain_gradients
    outcomes = []
    for gradients, batch in zip(recorder.steps, batches, strict=False):
        expected = gradients_of(model, batch)
        error = relative_error(gradients, expected)
        limit = TOLERANCE
        if TOLERANCE <= error < LARGEST_ROUND_OFF:
            error_of_one_forward = round_off(model, batch, expected, gradients_of)
            limit = max(TOLERANCE, 2 * error_of_one_forward)
        kind = 'exact' if error < limit else 'wrong'
        outcomes.append(Outcome(kind=kind, error=error, where=where))
    return outcomes + outcome_of_error


def kinds_of_steps(model: Any, batches: Sequence[dict[str, Any]], /, **options: Any) -> list[str]:
    """Returns the kind of each outcome with microbatches of two rows. Fails unless all are exact or refused."""
    kinds = []
    for outcome in measure_steps(model, batches, 2, **options):
        assert outcome.kind in ('exact', 'refused'), str(outcome)
        kinds.append(outcome.kind)
    return kinds


def round_off(model: Any, batch: dict[str, Any], gradients: Gradients, gradients_of: Any) -> float:
    """Returns the relative error of gradients in float32. The reference is one forward in float64."""
    batch_in_double = {**batch, **tensors_in(batch, torch.float64)}
    try:
        expected = gradients_of(in_double(model), batch_in_double)
    except RuntimeError:  # the model does not compute in float64, so TOLERANCE is the limit
        return 0.0
    return relative_error(gradients, expected)


def plain_gradients(model: Any, batch: dict[str, Any]) -> Gradients:
    """Returns the gradients of one forward over the whole batch, by the model's own loss."""
    model.zero_grad(set_to_none=True)
    loss = model.loss(model(batch), batch)
    if isinstance(loss, dict):
        loss = torch.stack(list(loss.values())).sum()
    loss.backward()
    return take_gradients(model)


class CountingSGD(torch.optim.SGD):
    """Counts its steps."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        # The Trainer computes the gradients in the closure. If that raises, no step is counted.
        loss = super().step(closure)
        self.num_steps += 1
        return loss


def _is_refusal(error: Exception) -> bool:
    """Returns whether the package refused something, with the value in its message."""
    return isinstance(error, RefusalError) and 'got:' in str(error)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences logs and warnings, because tests make hundreds of small runs."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.disable(before)
