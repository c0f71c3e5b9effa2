# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Steps of a real Trainer, held to plain autograd: exact, refused, or wrong."""

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
from tests.support.training import GradientRecorder, Gradients, in_double, loader, relative_error, train

__all__ = ['TOLERANCE', 'Outcome', 'kinds_of_steps', 'measure', 'measure_steps', 'plain_gradients', 'quiet']

TOLERANCE = 1e-6
LARGEST_ROUND_OFF = 3e-6
"""Up to here an error may be twice what rounding alone does to the whole forward: Mllama's gradients with large weights
are 1.4e-6 off those in double precision."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one batch.

    Args:
        kind: ``'exact'``, ``'refused'`` (before any optimizer step, by the package, with a cause), ``'wrong'`` or
            ``'crashed'``.
        error: Relative error of the gradient; NaN if there is none.
        message: The error that was raised.
        where: Microbatch size and first weights, to find the batch again.
    """

    kind: str
    error: float = float('nan')
    message: str = ''
    where: str = ''

    def __str__(self) -> str:
        return f'{self.where}: {self.kind} {self.message or format(self.error, ".1e")}'


def measure(model: Any, batch: dict[str, Any], microbatch_size: int, /, **options: Any) -> Outcome:
    """One step on one batch: see :func:`measure_steps`."""
    return measure_steps(model, [batch], microbatch_size, **options)[0]


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
    """A step on each batch, at learning rate 0, until one is refused.

    Args:
        model: A Composer model.
        batches: As the loader makes them.
        microbatch_size: Of the Trainer.
        where: To find the batch again.
        algorithms: Those of the Trainer; None: a fresh TokenAccumulation.
        trainer_options: Further options of the Trainer.
        reference: Makes the gradients of a model and a batch; None: :func:`plain_gradients`.
        **options: Those of ``token_data_spec``.

    Returns:
        The outcome of each step that was taken, and of the one that was not.
    """
    recorder = GradientRecorder()
    optimizer = CountingSGD(model.parameters(), lr=0.0)
    stopped = []
    try:
        with quiet():
            train(
                model,
                token_data_spec(loader(*batches), **options),
                optimizer=optimizer,
                callbacks=[recorder],
                algorithms=[TokenAccumulation()] if algorithms is None else algorithms,
                microbatch_size=microbatch_size,
                max_duration=f'{len(batches)}ba',
                **(trainer_options or {}),
            )
    except Exception as error:
        kind = 'refused' if _is_refusal(error) and optimizer.num_steps == len(recorder.steps) else 'crashed'
        stopped = [Outcome(kind=kind, message=f'{type(error).__name__}: {error}', where=where)]
    finally:
        model.zero_grad(set_to_none=True)
    taken = []
    for found, batch in zip(recorder.steps, batches, strict=False):
        gradients_of = reference or plain_gradients
        expected = gradients_of(model, batch)
        error = relative_error(found, expected)
        is_exact = error < TOLERANCE or (
            error < LARGEST_ROUND_OFF and error < 2 * round_off(model, batch, expected, gradients_of)
        )
        taken.append(Outcome(kind='exact' if is_exact else 'wrong', error=error, where=where))
    return taken + stopped


def kinds_of_steps(model: Any, batches: Sequence[dict[str, Any]], /, **options: Any) -> list[str]:
    """What became of each step with microbatches of two rows: each must be ``'exact'`` or ``'refused'``."""
    outcomes = measure_steps(model, batches, 2, **options)
    assert all(outcome.kind in ('exact', 'refused') for outcome in outcomes), [str(outcome) for outcome in outcomes]
    return [outcome.kind for outcome in outcomes]


def round_off(model: Any, batch: dict[str, Any], gradients: Gradients, gradients_of: Any) -> float:
    """How far the gradients in float32 are from those in double precision, over one whole forward."""
    doubles = {
        key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in batch.items()
    }
    try:
        return relative_error(gradients, gradients_of(in_double(model), doubles))
    except RuntimeError:  # it takes no doubles
        return 0.0


def plain_gradients(model: Any, batch: dict[str, Any]) -> Gradients:
    """Of one forward over the whole batch, by the model's own loss."""
    model.zero_grad(set_to_none=True)
    loss = model.loss(model(batch), batch)
    torch.stack(list(loss.values())).sum().backward() if isinstance(loss, dict) else loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


class CountingSGD(torch.optim.SGD):
    """Knows whether it ever moved."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        # The Trainer's closure computes the gradients: what it raises is before the step.
        loss = super().step(closure)
        self.num_steps += 1
        return loss


def _is_refusal(error: Exception) -> bool:
    """Returns whether the package refused something, with the value in its message."""
    return isinstance(error, RefusalError) and 'got:' in str(error)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log lines and no warnings of hundreds of small runs."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.disable(before)
