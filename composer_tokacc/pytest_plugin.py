# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The fixture ``token_exact`` for tests of a training step. Pytest loads it if the package is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from composer_tokacc.checks.token_weights import TokenWeightsReport


@pytest.fixture
def token_exact() -> Callable[[torch.nn.Module], AbstractContextManager[TokenWeightsReport]]:
    """Makes a context for one optimizer step, which fails the test unless all tokens weigh the same in the gradient.

    The test also fails if a forward adds nothing to the gradient, or leaves out some of its labels; if parameters or
    gradients change between two backwards; if gradients are lost before the step, NaN or infinite at the step, or not
    averaged over the ranks; and if a forward writes state on which the next one depends. Run an evaluation inside of
    the context under ``torch.no_grad()``. Otherwise its forwards count as forwards that add nothing to the gradient.

    Example:
        .. code-block:: python

            def test_my_loop(token_exact):
                with token_exact(model):
                    train_one_step(model, microbatches)
    """
    return _exact_step


@contextmanager
def _exact_step(model: torch.nn.Module) -> Iterator[TokenWeightsReport]:
    """Measures the step inside of the context. Fails the test on every rank if the step of any rank has a fault."""
    # Imported here, because pytest loads this module in every run, also in those that do not need torch.
    from composer_tokacc.checks.token_weights import measure_token_weights
    from composer_tokacc.collectives import gather_if_grouped
    from composer_tokacc.step_watch import StepWatch, listed, unequal_on_ranks

    with measure_token_weights(model) as report, StepWatch(model) as watch:
        yield report
    # `spread` and `gather_if_grouped` are collectives, so nothing may fail between them on one rank only.
    spread = report.spread
    signs_by_rank = gather_if_grouped(_signs_of(report.weights))
    gradients_by_rank = gather_if_grouped(watch.gradients_at_step)
    sentences_by_rank = gather_if_grouped([*report.forwards_without_weight(), *watch.faults])
    faults = []
    # `known_to` is the round-off of the measured weights. Not written with `>`, which would be False for NaN.
    if not spread <= 1 + report.known_to:
        faults.append(
            f'Every token of an optimizer step must weigh the same, got: the heaviest weighs {spread:.4f} times the '
            f'lightest.\n{report.unequal_tokens()}\n{report}\nDivide by the loss tokens of the whole step, over all '
            'microbatches and ranks.'
        )
    # The spread compares only the absolute values of the weights.
    signs = set().union(*signs_by_rank)
    if len(signs) > 1:
        faults.append('Every token of an optimizer step must weigh the same, got: positive and negative weights.')
    unequal_names = unequal_on_ranks(gradients_by_rank)
    if unequal_names:
        faults.append(
            'Each rank has other gradients at the step of the optimizer, or at the end if there was no step: '
            f'{listed(unequal_names)}. Average them over the ranks. With DDP, the last backward must not be in '
            '`no_sync`.'
        )
    for rank, sentences in enumerate(sentences_by_rank):
        prefix = f'Rank {rank}: ' if len(sentences_by_rank) > 1 else ''
        for sentence in sentences:
            faults.append(prefix + sentence)
    if faults:
        pytest.fail('\n'.join(faults), pytrace=False)


def _signs_of(weights_of_forwards: Iterable[torch.Tensor]) -> set[str]:
    """Returns the signs that the weights have: ``'negative'``, ``'positive'`` (also for 0), or both."""
    signs = set()
    for weights in weights_of_forwards:
        is_negative = weights < 0
        if is_negative.any():
            signs.add('negative')
        if not is_negative.all():
            signs.add('positive')
    return signs
