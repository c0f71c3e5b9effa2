# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""When gradients are reduced: real DDP and FSDP2 on a process group of one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from composer_tokacc.algorithm.reduction import ReductionWatch, check_sharding


class TwoHeads(torch.nn.Module):
    """A batch may use one head only, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 1)
        self.second = torch.nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor, heads: tuple[str, ...]) -> torch.Tensor:
        outputs = inputs.sum() * torch.zeros((), requires_grad=True)
        for name in heads:
            outputs = outputs + getattr(self, name)(inputs).sum()
        return outputs


KEPT_GROUPS = []
"""Until the process ends: gloo's destructor may wait forever for a thread that wants the interpreter's lock."""


@pytest.fixture
def process_group(tmp_path):
    if distributed.is_initialized():  # a program that ran in this process leaves its group of one rank
        yield
        return
    distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/ranks', rank=0, world_size=1)
    yield
    KEPT_GROUPS.append(distributed.group.WORLD)
    distributed.destroy_process_group()


def watch_of(model, **options):
    model = DistributedDataParallel(model, **options)
    state = SimpleNamespace(model=model, auto_microbatching=False)
    return ReductionWatch(state, is_coupled=False), model


def backward(watch, model, heads, *, num_microbatches=1, reduces=True, must_reduce_once=False):
    model.require_backward_grad_sync = reduces
    loss = model(torch.ones(1, 2), heads)
    watch.see(num_microbatches, must_reduce_once=must_reduce_once)
    loss.backward()
    watch.reach_all()


@pytest.mark.parametrize('heads', [('first',), ('second',), (), ('first', 'second')])
def test_unused_parameters_get_zeros(process_group, heads):
    """DDP itself would raise at the second forward if it still waited for a gradient."""
    watch, model = watch_of(TwoHeads())
    for _ in range(2):
        backward(watch, model, heads)
        watch.start_attempt()
    for name in ('first', 'second'):
        gradient = getattr(model.module, name).weight.grad
        assert gradient.tolist() == [[2.0, 2.0] if name in heads else [0.0, 0.0]]


@pytest.mark.parametrize(
    ('options', 'is_left_alone'),
    [
        ({}, False),
        ({'find_unused_parameters': True}, True),
        ({'static_graph': True}, True),
    ],
)
def test_ddp_that_finds_unused_parameters(process_group, options, is_left_alone):
    """It reduces them by itself, so that no parameter is reached a second time."""
    watch, model = watch_of(TwoHeads(), **options)
    reached = set()
    for name in ('first', 'second'):
        getattr(model.module, name).weight.register_hook(lambda _, name=name: reached.add(name))
    backward(watch, model, ())
    assert reached == (set() if is_left_alone else {'first', 'second'})


def test_microbatches_before_the_last_reach_nothing(process_group):
    watch, model = watch_of(TwoHeads())
    backward(watch, model, ('first',), num_microbatches=2, reduces=False)
    assert model.module.second.weight.grad is None
    backward(watch, model, ('first',), num_microbatches=2)
    assert model.module.second.weight.grad.tolist() == [[0.0, 0.0]]
    assert watch.reduced_once() is True


def test_early_reduction_is_refused(process_group):
    watch, model = watch_of(TwoHeads())
    options = {'num_microbatches': 2, 'must_reduce_once': True}
    backward(watch, model, ('first',), reduces=False, **options)
    backward(watch, model, ('first',), **options)  # the last microbatch may
    watch.start_attempt()
    with pytest.raises(RuntimeError, match=r'microbatch 1 of 2.*`equal_counts`.*ddp_sync_strategy'):
        backward(watch, model, ('first',), **options)


def test_early_reduction_of_equal_counts(process_group):
    watch, model = watch_of(TwoHeads())
    for _ in range(2):
        backward(watch, model, ('first',), num_microbatches=2)
    assert watch.reduced_once() is False


@pytest.mark.parametrize('sharded', [(), ('first',), ('first', 'second')])
def test_fsdp_shards_all_or_nothing(process_group, sharded):
    model = TwoHeads()
    for name in sharded:
        fully_shard(getattr(model, name))
    if len(sharded) != 1:
        check_sharding(model)
        return
    with pytest.raises(RuntimeError, match=r'got: 2 .*second'):
        check_sharding(model)
    model.second.requires_grad_(False)  # what is not trained may stay whole
    check_sharding(model)
