# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""When gradients are reduced: real DDP and FSDP on a process group of one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from composer.algorithms import GradientClipping
from composer.core import Algorithm, Event
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from composer_tokacc import TokenAccumulation
from composer_tokacc.algorithm.loss_terms import LossTerms
from composer_tokacc.algorithm.reduction import (
    ReductionWatch,
    check_clipping,
    check_unsharded_are_frozen,
    excess_of_reduction,
    unsharded_parameters,
)
from composer_tokacc.data_spec.split import split_of
from tests.support.process_group import group_of_one_rank
from tests.support.text import one_layer_model, ragged_batch
from tests.support.training import TOLERANCE, On, fit, relative_error, weights_unchanged
from tests.support.weights import weighted_reference

HEADS = ['first', 'second']
"""The names of the heads of TwoHeads."""
FIRST = ['first']
SECOND = ['second']


class TwoHeads(torch.nn.Module):
    """A model with two heads. A batch may use both of them, one, or none."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 1)
        self.second = torch.nn.Linear(2, 1)

    def forward(self, inputs, heads):
        zero = torch.zeros((), requires_grad=True)
        total = inputs.sum() * zero  # has a gradient also without heads
        for name in heads:
            head = getattr(self, name)
            total = total + head(inputs).sum()
        return total


@pytest.fixture(autouse=True)
def process_group(tmp_path):
    with group_of_one_rank(tmp_path):
        yield


def with_ignored_head():
    """Returns a model whose second head DDP ignores."""
    model = TwoHeads()
    names = ['second.weight', 'second.bias']
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


def watch_of(model, **options):
    """Wraps a model in DDP with these options. Returns the watch of its reductions, and the wrapped model."""
    model = DistributedDataParallel(model, **options)
    state = SimpleNamespace(model=model, auto_microbatching=False)
    return ReductionWatch(state, may_gather=False), model


def backward(watch, model, heads, *, num_microbatches=1, reduces=True, must_reduce_once=False):
    """Computes one microbatch of a step, with inputs of 1. ``reduces``: whether DDP reduces the gradients in it."""
    model.require_backward_grad_sync = reduces
    loss = model(torch.ones(1, 2), heads)
    watch.begin_microbatch(num_microbatches, must_reduce_once=must_reduce_once)
    loss.backward()
    watch.end_microbatch()


@pytest.mark.parametrize('heads', [FIRST, SECOND, [], HEADS])
def test_unused_parameters_get_zeros(heads):
    """DDP itself would raise at the second forward if it still waited for a gradient."""
    watch, model = watch_of(TwoHeads())
    for _ in range(2):
        backward(watch, model, heads)
        watch.start_attempt()

    for name in HEADS:
        head = getattr(model.module, name)
        expected = [[0.0, 0.0]]
        if name in heads:
            expected = [[2.0, 2.0]]  # 1 from each backward
        assert head.weight.grad.tolist() == expected


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        ({}, {'first', 'second'}),
        ({'find_unused_parameters': True}, set()),
        ({'static_graph': True}, set()),
    ],
)
def test_ddp_that_finds_unused_parameters(options, expected):
    """It reduces them itself, so ReductionWatch must not give them a gradient too."""
    watch, model = watch_of(TwoHeads(), **options)
    reached_heads = set()
    for name in HEADS:
        head = getattr(model.module, name)
        head.weight.register_hook(lambda gradient, name=name: reached_heads.add(name))

    backward(watch, model, [])

    assert reached_heads == expected


def test_microbatches_before_the_last_reach_nothing():
    watch, model = watch_of(TwoHeads())
    unused_weight = model.module.second.weight

    backward(watch, model, FIRST, num_microbatches=2, reduces=False)
    assert unused_weight.grad is None

    backward(watch, model, FIRST, num_microbatches=2)
    assert unused_weight.grad.tolist() == [[0.0, 0.0]]
    assert watch.has_reduced_once() is True


def test_early_reduction_is_refused():
    watch, model = watch_of(TwoHeads())
    options = {'num_microbatches': 2, 'must_reduce_once': True}
    backward(watch, model, FIRST, reduces=False, **options)
    backward(watch, model, FIRST, **options)  # the last microbatch may
    watch.start_attempt()
    with pytest.raises(RuntimeError, match=r'microbatch 1 of 2.*`equal_counts`.*ddp_sync_strategy'):
        backward(watch, model, FIRST, **options)


def test_last_microbatch_must_reduce():
    """Composer would reduce the gradients that a rank has, even after an error. Other ranks may have other ones."""
    watch, model = watch_of(TwoHeads())
    backward(watch, model, FIRST, num_microbatches=2, reduces=False)
    with pytest.raises(RuntimeError, match='must have reduced'):
        backward(watch, model, FIRST, num_microbatches=2, reduces=False)
    for parameter in model.parameters():
        assert parameter.grad is None


def watch_of_one_backward(*, reduces=True, ends_microbatch=True):
    """Computes a microbatch, and returns the watch.

    The number of microbatches is not known, so only the end of the step shows whether all gradients are reduced.
    """
    watch, model = watch_of(TwoHeads())
    model.require_backward_grad_sync = reduces
    loss = model(torch.ones(1, 2), FIRST)
    watch.begin_microbatch(0, must_reduce_once=False)
    loss.backward()
    if ends_microbatch:
        watch.end_microbatch()
    return watch


def test_all_gradients_are_reduced_at_the_end():
    watch = watch_of_one_backward()
    watch.check_reduced()


@pytest.mark.parametrize(
    'options',
    [
        pytest.param({'reduces': False}, id='last microbatch did not reduce'),
        pytest.param({'ends_microbatch': False}, id='DDP still waits for the unused head'),
    ],
)
def test_gradients_not_reduced_at_the_end(options):
    watch = watch_of_one_backward(**options)
    with pytest.raises(RuntimeError, match='must have reduced every gradient'):
        watch.check_reduced()


def test_early_reduction_of_equal_counts():
    watch, model = watch_of(TwoHeads())
    for _ in range(2):
        backward(watch, model, FIRST, num_microbatches=2)
    assert watch.has_reduced_once() is False


@pytest.mark.parametrize('freezes_others', [False, True])
@pytest.mark.parametrize('options', [{}, {'find_unused_parameters': True}])
def test_unfrozen_parameters_are_refused(options, freezes_others):
    inner = TwoHeads()
    inner.second.requires_grad_(False)
    watch, model = watch_of(inner, **options)
    backward(watch, model, HEADS)

    inner.second.requires_grad_(True)
    if freezes_others:
        inner.first.requires_grad_(False)  # DDP and the model then have equally many trained parameters

    # In a microbatch that does not reduce, nothing is wrong yet.
    backward(watch, model, HEADS, reduces=False)
    # The two are the weight and the bias of the second head.
    with pytest.raises(RuntimeError, match='2 others that are trained now'):
        backward(watch, model, HEADS)


def watch_of_sparse_embedding():
    """Returns a watch, and its model with a frozen second head. DDP tells only how many parameters it reduces."""
    inner = TwoHeads()
    inner.embedding = torch.nn.Embedding(2, 2, sparse=True)
    inner.second.requires_grad_(False)
    watch, model = watch_of(inner, find_unused_parameters=True)
    return watch, model, inner


def test_unfrozen_parameters_beside_a_sparse_embedding():
    watch, model, inner = watch_of_sparse_embedding()
    inner.second.requires_grad_(True)
    with pytest.raises(RuntimeError, match='2 others that are trained now'):
        backward(watch, model, FIRST)


def test_equally_many_parameters_are_frozen_and_unfrozen():
    watch, model, inner = watch_of_sparse_embedding()
    inner.second.requires_grad_(True)
    inner.first.requires_grad_(False)
    with pytest.raises(RuntimeError, match='2 others that are trained now'):
        backward(watch, model, HEADS)


def test_unfrozen_parameters_that_ddp_ignores():
    inner = with_ignored_head()
    inner.second.requires_grad_(False)
    watch, model = watch_of(inner)
    inner.second.requires_grad_(True)
    backward(watch, model, HEADS)


def test_backward_reaches_only_ignored_parameters():
    """DDP still waits for the others, and ranks that reach them would wait for this one."""
    inner = with_ignored_head()
    watch, model = watch_of(inner)
    backward(watch, model, SECOND)
    assert inner.first.weight.grad.tolist() == [[0.0, 0.0]]
    assert inner.second.weight.grad.tolist() == [[1.0, 1.0]]


def test_ignored_parameters_get_no_zeros():
    """The model reduces them itself. A gradient of zero would let the optimizer decay unused experts."""
    inner = with_ignored_head()
    watch, model = watch_of(inner)
    backward(watch, model, [])
    assert inner.first.weight.grad.tolist() == [[0.0, 0.0]]
    assert inner.second.weight.grad is None


class WrapsInDDP(Algorithm):
    """Wraps the model at the start of a fit, as Composer does on several ranks, and may then freeze a layer."""

    def __init__(self, *, freezes_head=False, **options):
        self.freezes_head = freezes_head
        self.options = options  # of DDP

    def match(self, event, state):
        return event == Event.FIT_START

    def apply(self, event, state, logger):
        head = state.model.model.lm_head
        state.model = DistributedDataParallel(state.model, **self.options)
        if self.freezes_head:
            head.requires_grad_(False)


@pytest.fixture
def launcher(monkeypatch):
    """Sets the variables that Composer reads if there is a process group."""
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '1')
    monkeypatch.setenv('LOCAL_RANK', '0')
    monkeypatch.setenv('NODE_RANK', '0')


@pytest.mark.usefixtures('launcher')
@pytest.mark.parametrize(
    ('freezes_head', 'options'),
    [
        pytest.param(True, {}, id='frozen later'),
        pytest.param(False, {'ddp_sync_strategy': 'forced_sync'}, id='reduced by Composer'),
    ],
)
def test_ddp_must_reduce_all_gradients(freezes_head, options):
    """DDP waits for the gradients of frozen parameters. Composer reduces only gradients that are not None."""
    model = one_layer_model()
    batch = ragged_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    algorithms = [WrapsInDDP(freezes_head=freezes_head), TokenAccumulation()]
    with weights_unchanged(model), pytest.raises(RuntimeError, match='DDP must have reduced every gradient'):
        fit(model, batch, algorithms=algorithms, optimizer=optimizer, **options)


class DropsGradient(Algorithm):
    """Sets the gradient of the head to None as soon as it is reduced, so that the optimizer leaves the head out."""

    def match(self, event, state):
        return event == Event.AFTER_BACKWARD

    def apply(self, event, state, logger):
        state.model.module.model.lm_head.weight.grad = None


@pytest.mark.usefixtures('launcher')
def test_dropped_gradients_get_no_zeros():
    """DDP has reduced them. With a gradient of zero the optimizer would decay the weight."""
    model = one_layer_model()
    head = model.lm_head.weight
    weight_before = head.detach().clone()
    # Composer runs algorithms in reverse order at an `after_` event, so TokenAccumulation comes after the drop.
    algorithms = [WrapsInDDP(), TokenAccumulation(), DropsGradient()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    fit(model, ragged_batch(), algorithms=algorithms, optimizer=optimizer)
    assert torch.equal(head, weight_before)


@pytest.mark.usefixtures('launcher')
@pytest.mark.parametrize('token_weights', ['token', 'sqrt'])
def test_tokens_are_weighted_before_the_sink_of_ddp(token_weights):
    """Composer's LayerFreezing sets this option of DDP, which then returns copies of loss and logits."""
    model = one_layer_model()
    batch = ragged_batch()
    expected, _, _ = weighted_reference(model, batch, token_weights)
    wrapper = WrapsInDDP(find_unused_parameters=True)
    algorithm = TokenAccumulation(token_weights=token_weights)

    recorder = fit(model, batch, algorithms=[wrapper, algorithm])

    assert relative_error(recorder.gradients, expected) < TOLERANCE
    assert algorithm._run.step.is_measured


class WithRouterLoss(torch.nn.Module):
    """Adds a router's loss times a coefficient to its loss."""

    def __init__(self, coefficient):
        super().__init__()
        self.coefficient = coefficient
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, inputs):
        token_mean, router_loss = self.layer(inputs)
        loss = token_mean + self.coefficient * router_loss
        return {'loss': loss, 'aux_loss': router_loss}


def router_model_with_sink(coefficient):
    """Returns a model with a router. DDP returns copies of its loss and its router's loss."""
    return DistributedDataParallel(WithRouterLoss(coefficient), find_unused_parameters=True)


@pytest.mark.parametrize(
    ('coefficient_of_model', 'coefficient_of_config'),
    [
        (0.5, 0.5),
        (0.0, None),
    ],
)
def test_router_coefficient_before_ddps_sink(coefficient_of_model, coefficient_of_config):
    model = router_model_with_sink(coefficient_of_model)
    outputs = model(torch.ones(2))
    terms = LossTerms(None, coefficient_of_config)
    terms.check_coefficient(outputs['loss'], outputs)
    outputs['loss'].backward()


@pytest.mark.parametrize('coefficient_of_config', [0.4, None])
def test_wrong_router_coefficient_before_ddps_sink(coefficient_of_config):
    model = router_model_with_sink(0.5)
    outputs = model(torch.ones(2))
    terms = LossTerms(None, coefficient_of_config)
    with pytest.raises(RuntimeError, match='load-balancing loss'):
        terms.check_coefficient(outputs['loss'], outputs)
    outputs['loss'].backward()


@pytest.mark.usefixtures('launcher')
def test_ranks_differ_after_a_step_that_reduced_once():
    """In the first step ranks must make equally many microbatches, because DDP may reduce in each of them."""
    batch = ragged_batch()
    algorithms = [WrapsInDDP(), TokenAccumulation()]

    def step_reduces_once(state):
        split = split_of(state.train_dataloader)
        return split.step.reduces_once

    reduces_once = On(Event.BEFORE_TRAIN_BATCH, step_reduces_once)

    fit(one_layer_model(), batch, batch, algorithms=algorithms, callbacks=[reduces_once])

    assert reduces_once.values == [False, True]


def shard_by_fsdp1(head: str, model: torch.nn.Module) -> None:
    layer = getattr(model, head)
    cpu = torch.device('cpu')
    sharded_layer = FullyShardedDataParallel(layer, use_orig_params=True, device_id=cpu)
    setattr(model, head, sharded_layer)


def shard_by_fsdp2(head: str, model: torch.nn.Module) -> None:
    layer = getattr(model, head)
    fully_shard(layer)


@pytest.fixture(params=[shard_by_fsdp1, shard_by_fsdp2])
def shard(request, monkeypatch):
    """Shards one head of a model. There seems to be a second rank, because a single one may leave parameters out."""
    monkeypatch.setattr('composer_tokacc.algorithm.reduction.get_world_size', lambda: 2)
    return request.param


@pytest.mark.filterwarnings('ignore:.*FullyShardedDataParallel|.*NO_SHARD')
@pytest.mark.parametrize('is_first_frozen', [False, True])
def test_fsdp_shards_all_or_nothing(shard, is_first_frozen):
    model = TwoHeads()
    model.first.requires_grad_(not is_first_frozen)
    check_unsharded_are_frozen(unsharded_parameters(model))
    shard('first', model)
    with pytest.raises(RuntimeError, match=r'got: 2 .*second'):
        check_unsharded_are_frozen(unsharded_parameters(model))
    shard('second', model)
    check_unsharded_are_frozen(unsharded_parameters(model))


@pytest.mark.filterwarnings('ignore:.*FullyShardedDataParallel|.*NO_SHARD')
def test_fsdp_need_not_shard_frozen_parameters(shard):
    model = TwoHeads()
    shard('first', model)
    model.second.requires_grad_(False)
    check_unsharded_are_frozen(unsharded_parameters(model))


def state_under_fsdp2(clipping_type):
    """Returns the state of a run that clips gradients of a sharded model."""
    model = TwoHeads()
    fully_shard(model.first)
    clipping = GradientClipping(clipping_type, 0.1)
    return SimpleNamespace(model=model, algorithms=[clipping])


def test_clipping_under_fsdp2():
    """Composer takes the norms of shards for adaptive clipping."""
    check_clipping(state_under_fsdp2('norm'))
    with pytest.raises(RuntimeError, match="'adaptive'"):
        check_clipping(state_under_fsdp2('adaptive'))


def test_one_rank_may_leave_parameters_out():
    model = TwoHeads()
    fully_shard(model.first)
    check_unsharded_are_frozen(unsharded_parameters(model))


@pytest.fixture
def sum_unless_half(monkeypatch):
    """Lets FSDP2 seem to sum the gradients of two ranks, except those in float16. Gloo of torch 2.7 does so."""

    def excess(parameter, precision):
        reduce_type = precision.reduce_dtype or parameter.dtype
        return 1.0 if reduce_type == torch.float16 else 2.0

    monkeypatch.setattr('composer_tokacc.algorithm.reduction._measured_excess', excess)


def heads_of_two_types(**precision):
    """Returns a model with a head in float16 and one in float32, each a unit of FSDP2."""
    model = TwoHeads()
    model.first.half()
    for head in (model.first, model.second):
        fully_shard(head, mp_policy=MixedPrecisionPolicy(**precision))
    return model


@pytest.mark.usefixtures('sum_unless_half')
@pytest.mark.parametrize(
    ('frozen_head', 'excess'),
    [
        ('first', 2.0),
        ('second', 1.0),
    ],
)
def test_frozen_weights_decide_no_excess(frozen_head, excess):
    model = heads_of_two_types()
    head = getattr(model, frozen_head)
    head.requires_grad_(False)
    assert excess_of_reduction(model) == excess


@pytest.mark.usefixtures('sum_unless_half')
def test_gradients_must_be_reduced_alike():
    with pytest.raises(RuntimeError, match=r'alike, got: .*torch.float16: 1.0, torch.float32: 2.0'):
        excess_of_reduction(heads_of_two_types())
    assert excess_of_reduction(heads_of_two_types(reduce_dtype=torch.float32)) == 2.0


def test_no_excess_without_fsdp2():
    """A tensor-parallel model may have DTensors, too."""
    model = TwoHeads()
    assert excess_of_reduction(model) == 1.0
    mesh = init_device_mesh('cpu', (1,))
    weight = model.first.weight.detach()
    distributed_weight = distribute_tensor(weight, mesh)
    model.first.weight = torch.nn.Parameter(distributed_weight)
    assert excess_of_reduction(model) == 1.0
