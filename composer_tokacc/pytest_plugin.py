# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The fixture ``token_exact`` for tests of a training step; pytest finds it where the package is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from composer_tokacc.checks.token_weights import TokenWeightsReport


@pytest.fixture
def token_exact() -> Callable[[torch.nn.Module], AbstractContextManager[TokenWeightsReport]]:
    """A context around one optimizer step that fails the test unless all tokens weigh the same in the gradient.

    Example:
        .. code-block:: python

            def test_my_loop(token_exact):
                with token_exact(model):
                    train_one_step(model, microbatches)
    """
    return _weighs_the_same


@contextmanager
def _weighs_the_same(model: torch.nn.Module) -> Iterator[TokenWeightsReport]:
    from composer_tokacc.checks.token_weights import measure_token_weights

    with measure_token_weights(model) as report:
        yield report
    spread = report.spread  # of all ranks
    if not spread <= 1 + report.known_to:
        pytest.fail(
            f'Every token of an optimizer step must weigh the same, got: the heaviest weighs {spread:.4f} times the '
            f'lightest.\n{report.unequal_tokens()}\n{report}\nDivide by the loss tokens of the whole step, over all '
            'microbatches and ranks.',
            pytrace=False,
        )
