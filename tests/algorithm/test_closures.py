# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Optimizers that evaluate a step themselves, compared with the same optimizer in a plain loop over whole batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias
from unittest.mock import Mock

import pytest
import torch
from composer import Algorithm
from composer.algorithms import SAM
from composer.algorithms.sam import SAMOptimizer
from composer.core import Event
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from composer_tokacc import TokenAccumulation
from composer_tokacc.algorithm import closures
from tests.support.launch import launch_json
from tests.support.text import one_layer_model, ragged_batch
from tests.support.training import (
    TOTAL,
    Gradients,
    On,
    fit,
    full,
    hugging_face,
    largest,
    num_hooks,
    relative_error,
    unwrapped,
)

SAM_INTERVAL = 2
FIRST_RANK_UNLABELLED = [(4, 0), (9, 0), (5, 3), (14, 11)]
RAGGED = [(4, 2), (9, 7), (5, 3), (14, 1)]
STEPS = (FIRST_RANK_UNLABELLED, RAGGED, FIRST_RANK_UNLABELLED, RAGGED)
"""Length and number of labels of each row of each step. Of two ranks each has two rows."""
TOLERANCE = 1e-4
"""More than round-off, because LBFGS divides by the change of the gradient."""


Parameters: TypeAlias = Iterable[torch.Tensor]
MakeOptimizer: TypeAlias = Callable[[Parameters], Optimizer]


def sgd(parameters: Parameters) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def lbfgs(parameters: Parameters) -> Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3, line_search_fn='strong_wolfe')


class PassesClosureOn(torch.optim.LBFGS):
    """Gives its closure to the base class, whose step has the same hooks, by position."""

    def step(self, closure):
        return super().step(closure)


class CallsClosureItself(torch.optim.SGD):
    """Requires a closure, calls it, and gives the base class none."""

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


def lbfgs_subclass(parameters: Parameters) -> Optimizer:
    return PassesClosureOn(parameters, lr=0.5, max_iter=3, line_search_fn='strong_wolfe')


def sgd_subclass(parameters: Parameters) -> Optimizer:
    return CallsClosureItself(parameters, lr=0.1)


def patched_lbfgs(parameters: Parameters) -> Optimizer:
    """Has a step that was replaced on the object, and that passes the closure on by position."""
    optimizer = lbfgs(parameters)
    step = optimizer.step
    optimizer.step = lambda closure: step(closure)
    return optimizer


def algorithms_with(*, with_sam: bool) -> list[Algorithm]:
    """Returns TokenAccumulation, with or without SAM before it."""
    if with_sam:
        return [SAM(interval=SAM_INTERVAL), TokenAccumulation()]
    return [TokenAccumulation()]


def weights_of_plain_loop(
    batches: Sequence[Any],
    make_optimizer: MakeOptimizer,
    *,
    with_sam: bool,
) -> tuple[Gradients, list[float]]:
    """Returns the changes of the weights, and the loss at the start of each step."""
    model = one_layer_model().double()
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer = make_optimizer(model.parameters())
    if with_sam:
        optimizer = SAMOptimizer(optimizer, interval=SAM_INTERVAL)
    first_losses = []
    for batch in batches:
        losses = []

        def closure(batch: Any = batch, losses: list[float] = losses, **_: Any) -> float:
            model.zero_grad()
            outputs = model(**batch)
            outputs.loss.backward()
            loss = outputs.loss.item()
            losses.append(loss)
            return loss

        optimizer.step(closure)
        first_losses.append(losses[0])

    changes = {}
    for name, weight in model.named_parameters():
        changes[f'model.{name}'] = weight.detach() - before[name]
    return changes, first_losses


def errors_of_training(
    batches: Sequence[Any],
    batches_of_rank: Sequence[Any],
    make_optimizer: MakeOptimizer,
    *,
    with_sam: bool,
    wrap: Callable[[torch.nn.Module], Any] = hugging_face,
    **options: Any,
) -> list[float]:
    """Returns the relative errors of the change of the weights and of the logged losses."""
    expected, expected_losses = weights_of_plain_loop(batches, make_optimizer, with_sam=with_sam)
    model = wrap(one_layer_model())
    before = {}
    for name, weight in model.named_parameters():
        before[name] = weight.detach().clone()

    recorder = fit(
        model,
        *batches_of_rank,
        algorithms=algorithms_with(with_sam=with_sam),
        optimizer=make_optimizer(model.parameters()),
        microbatch_size=1,
        **options,
    )

    trained_model = unwrapped(recorder.trainer.state.model)
    changes = {}
    for name, weight in trained_model.named_parameters():
        changes[name] = full(weight).detach() - before[name]
    errors = [relative_error(changes, expected)]
    for loss, expected_loss in zip(recorder.logged(TOTAL), expected_losses, strict=True):
        errors.append(abs(loss / expected_loss - 1))
    return errors


@pytest.mark.parametrize(
    ('make_optimizer', 'with_sam'),
    [
        (lbfgs, False),
        (sgd, True),
        (lbfgs_subclass, False),
        (sgd_subclass, False),
        (patched_lbfgs, False),
    ],
)
def test_optimizer_gets_the_loss_of_each_evaluation(make_optimizer, with_sam):
    """Composer adds the losses of all evaluations of a step, which misleads a line search."""
    batches = [ragged_batch(step) for step in STEPS[:2]]
    errors = errors_of_training(batches, batches, make_optimizer, with_sam=with_sam)
    assert largest(errors) < TOLERANCE


@pytest.mark.parametrize(
    ('unit', 'make_optimizer', 'with_sam'),
    [
        pytest.param(torch.nn.Linear, lbfgs, False, id='FSDP1 LBFGS'),
        pytest.param(torch.nn.Linear, sgd, True, id='FSDP1 SAM'),
        pytest.param(FSDPModule, lbfgs, False, id='FSDP2 LBFGS'),
    ],
)
def test_optimizer_must_see_whole_gradients(unit, make_optimizer, with_sam, monkeypatch):
    monkeypatch.setattr(closures, 'fsdp_units', lambda _: [Mock(spec=unit)])
    model = hugging_face(one_layer_model())
    algorithms = algorithms_with(with_sam=with_sam)
    optimizer = make_optimizer(model.parameters())

    with pytest.raises(RuntimeError, match='must see the gradients of all weights'):
        fit(model, ragged_batch(), algorithms=algorithms, optimizer=optimizer)

    assert num_hooks(model) == 0


def test_hooked_step_without_a_closure():
    """torch calls `step(closure=None)` before it saves a sharded checkpoint. The hook must not change it."""
    model = hugging_face(one_layer_model())
    optimizer = lbfgs(model.parameters())
    results_of_hook = []

    def call_hook_without_closure(state):
        (hook,) = optimizer._optimizer_step_pre_hooks.values()
        for arguments in ({'closure': None}, {}):
            result = hook(optimizer, (optimizer,), arguments)
            results_of_hook.append(result)

    callback = On(Event.BATCH_END, call_hook_without_closure)
    fit(model, ragged_batch(), optimizer=optimizer, callbacks=[callback])
    assert results_of_hook == [None, None]


def test_one_rank_sums_no_losses(monkeypatch):
    """Sums are in float64, which Apple's GPUs do not have."""
    monkeypatch.setattr(closures, 'sum_over_ranks', Mock(side_effect=AssertionError))
    model = hugging_face(one_layer_model())
    fit(model, ragged_batch(), optimizer=lbfgs(model.parameters()))


def test_optimizer_that_a_callback_puts_in():
    """LBFGS evaluates the second step several times. The logged loss is the one before it moves weights."""
    model = hugging_face(one_layer_model())
    batch = ragged_batch()
    later_optimizer = lbfgs(model.parameters())

    def put_in(state):
        state.optimizers = [later_optimizer]

    recorder = fit(model, batch, batch, callbacks=[On(Event.BATCH_END, put_in)])

    first_loss, second_loss = recorder.logged(TOTAL)
    assert second_loss == pytest.approx(first_loss, rel=1e-6)  # the first step has a learning rate of 0
    assert not later_optimizer._optimizer_step_pre_hooks


def test_hooks_end_with_the_fit():
    model = hugging_face(one_layer_model())
    optimizer = lbfgs(model.parameters())
    fit(model, ragged_batch(), optimizer=optimizer)
    assert num_hooks(model) == 0
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.slow
def test_ranks_move_alike():
    """Some steps have labels only on the second rank, so that the loss of the first one is 0."""
    errors = launch_json('tests/ranks/closures.py', ranks=2)
    assert errors.keys() == {'SAM under DDP', 'SAM under FSDP2', 'LBFGS under DDP'}
    for name, errors_of_ranks in errors.items():
        assert largest(errors_of_ranks) < TOLERANCE, name
