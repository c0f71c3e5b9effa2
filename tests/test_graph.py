# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Walks over the graph of autograd, from a loss to the tensors and parameters that it is made of."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer_tokacc.graph import edge_of, edges_of, edges_of_graph, empty_sum, gradient_of, has_bypass
from tests.support.process_group import group_of_one_rank


def test_edges_of_nested_values():
    """A value without tensors, such as the missing loss of a router, has no edge."""
    logits = torch.nn.Linear(3, 5)(torch.ones(2, 3))
    loss = {'lm': logits.sum(), 'others': [logits.mean(), None]}
    assert edges_of(loss) == {edge_of(loss['lm']), edge_of(loss['others'][0])}
    assert edges_of(None) == set()


def test_walk_passes_copies_and_stops():
    """A loss may be made of the tensor before a copy, as those of accelerate."""
    layer, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 5)
    hidden_states = layer(torch.ones(2, 3))
    logits = head(hidden_states)
    copied_logits = logits.double()
    loss = logits.square().mean()
    assert edge_of(copied_logits) == edge_of(logits)
    assert edges_of(hidden_states) <= edges_of_graph(loss)
    edges_up_to_logits = edges_of_graph(loss, edges_of(copied_logits))
    assert edge_of(logits) in edges_up_to_logits
    assert edge_of(hidden_states) not in edges_up_to_logits


def test_penalty_bypasses_the_logits():
    head = torch.nn.Linear(3, 5)
    logits = head(torch.ones(2, 3))
    edges = edges_of(logits)
    loss = logits.square().mean()
    assert not has_bypass([loss, logits.sum()], edges)
    assert has_bypass({'lm': loss, 'penalty': head.weight.norm()}, edges)


def test_gradient_before_a_copy():
    logits = torch.nn.Linear(3, 5)(torch.ones(2, 3))
    assert torch.equal(gradient_of(logits.sum(), logits.double()), torch.ones(2, 5))
    assert gradient_of(logits.sum(), torch.ones(2, 5, requires_grad=True)) is None


def test_empty_sum_of_sharded_parameters(tmp_path):
    """A step of text under FSDP2 adds it to a loss without a gradient, if only layers of an encoder are trained."""
    layer = torch.nn.Linear(3, 5)
    with group_of_one_rank(tmp_path):
        fully_shard(layer, mesh=init_device_mesh('cpu', (1,)))
        loss = torch.tensor(1.5) + empty_sum(layer.weight)
        loss.backward()
    assert type(loss) is torch.Tensor
    assert torch.equal(layer.weight.grad.to_local(), torch.zeros(5, 3))
