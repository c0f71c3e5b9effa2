# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The graph of autograd: which tensors and parameters a loss is made of, and the gradients in between.

Each node of the graph computes one or more tensors from others, and has an edge to each of these others. A walk along
the edges goes from a loss to everything that it is made of, and ends at the parameters. It reads no values, so it does
not wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.tensor import DTensor

from composer_tokacc.compat import DDP_SINK, edge_before_sink

Edge: TypeAlias = tuple[Node | None, int]
"""A node of the graph of autograd, and the number of one of its outputs.

An edge keeps the graph that makes its tensor in memory, so edges must not be kept beyond the backward."""
Tensors: TypeAlias = Tensor | Mapping[Any, Any] | Sequence[Any] | None
"""A value in which :func:`tensors_in` finds tensors: a tensor, nested mappings and sequences of tensors, or None.

Not an iterator. No tensors would be found in it."""


# The walk.


def tensors_in(value: Any) -> list[Tensor]:
    """Returns all tensors in a value, which may be a tensor or nested mappings and sequences of tensors."""
    if isinstance(value, Tensor):
        return [value]
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = value
    tensors = []
    for item in items:
        tensors += tensors_in(item)
    return tensors


def edge_of(tensor: Tensor) -> Edge:
    """Returns the node of the graph that makes a tensor, such as the logits, and its number among the node's outputs.

    If the tensor is a copy, the node makes the tensor before the copy.
    """
    return _before_copies((tensor.grad_fn, tensor.output_nr))


def edges_of(value: Tensors) -> set[Edge]:
    """Returns the edge of each tensor in a value, see :func:`tensors_in` and :func:`edge_of`."""
    return {edge_of(tensor) for tensor in tensors_in(value)}


def edges_of_graph(losses: Tensors, ends: Collection[Edge] = ()) -> set[Edge]:
    """Returns the edges of all tensors that the tensors in ``losses`` are made of, up to the ``ends``.

    Unlike a backward to these tensors, it runs no hooks. Hooks of FSDP would communicate.
    """
    edges = edges_of(losses)
    for node in nodes_of_graph(losses, ends):
        edges.update(_before_copies(edge) for edge in node.next_functions)
    return edges


def has_bypass(losses: Tensors, ends: Collection[Edge]) -> bool:
    """Returns whether losses depend on parameters in another way than through the tensors of ``ends``.

    For example, a penalty on the weights does not go through the logits. For ``ends`` see :func:`edges_of`.
    """
    # The node at which a parameter enters the graph holds it as `variable`.
    return any(hasattr(node, 'variable') for node in nodes_of_graph(losses, ends))


def nodes_of_graph(losses: Tensors, ends: Collection[Edge] = ()) -> Iterator[Node]:
    """Yields the nodes of the graph that makes the tensors in ``losses``. Does not follow it beyond the ``ends``."""
    visited: set[Node] = set()
    pending: list[Edge] = list(edges_of(losses))
    while pending:
        edge = _before_copies(pending.pop())
        node, _ = edge
        # An end is only one output of its node. Other outputs are followed: one `split` may make the logits and the
        # values of a second head.
        if node is None or node in visited or edge in ends:
            continue
        visited.add(node)
        yield node
        pending += node.next_functions


def _before_copies(edge: Edge) -> Edge:
    """Follows an edge back to the node that makes the values, past nodes that only copy them.

    accelerate and FSDP return a copy of the logits in another type, and DDP may return copies of all outputs. The loss
    may use the tensor before the copy.
    """
    node, index = edge
    while node is not None:
        name = node.name()
        if name == 'ToCopyBackward0':
            node, index = node.next_functions[0]
        elif name == DDP_SINK:
            node, index = edge_before_sink(node, index)
        else:
            break
    return node, index


# Gradients by a tensor in the graph.


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Registers a hook that gets the gradient by a tensor in a backward, and may return one to use instead.

    If the tensor is a copy, it is the gradient by the tensor before the copy, see :func:`edge_of`.
    """
    node, index = edge_of(tensor)
    if node is tensor.grad_fn:
        # The tensor is no copy. A hook of the tensor runs before those of its node, so measure_token_weights() sees the
        # gradient that this one returns. The gradient is None if the loss uses only other outputs of the node.
        tensor.register_hook(lambda gradient: None if gradient is None else hook(gradient))
        return
    assert node is not None, 'a copy is made by a node'
    _on_gradient_of_output(node, index, hook)


def _on_gradient_of_output(node: Node, index: int, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Registers a hook that gets the gradient by one output of a node, and may return one to use instead."""

    def change_output(gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        """Gets the gradients by all outputs of the node, and may return others to use instead."""
        gradient = gradients[index]
        if gradient is None:
            return None
        new_gradient = hook(gradient)
        if new_gradient is None:
            return None
        new_gradients = list(gradients)
        new_gradients[index] = new_gradient
        return tuple(new_gradients)

    node.register_prehook(change_output)


def raise_if_bypassed(logits: Tensor, refusal: Exception) -> None:
    """Makes a backward raise an error if its loss is not made of the logits.

    Hooks on the logits would not run in such a backward, so they could not notice it. The hooks of this function are on
    the nodes from which the logits are made, back to the output embedding. Which of them run depends on the loss,
    because the logits may be a part or a copy of the tensor that the loss uses.

    Autograd runs a node only after all nodes that use its outputs. So a backward that reaches the logits runs their
    node first, and then the earlier nodes. If an earlier node runs and the node of the logits has not run, the backward
    has gone around the logits.
    """
    node, index = edge_of(logits)
    has_reached_logits = False

    def note_logits(gradients: Sequence[Tensor | None]) -> None:
        nonlocal has_reached_logits
        # A compiled forward has one node for loss and logits. The gradient by the logits is None if only the loss was
        # used.
        if gradients[index] is None:
            raise refusal
        has_reached_logits = True

    def check_logits_were_reached(gradients: Sequence[Tensor | None]) -> None:
        if not has_reached_logits:
            raise refusal

    if node is not None:
        node.register_prehook(note_logits)
    while node is not None:
        inputs = _inputs_of(node)
        for source in inputs:
            source.register_prehook(check_logits_were_reached)
        # A node with one input may be a view, a cast or a cap of the logits, so the walk goes on behind it. Any other
        # node is the output embedding, or the graph begins here.
        node = inputs[0] if len(inputs) == 1 else None


def _inputs_of(node: Node) -> list[Node]:
    """Returns the nodes whose outputs a node uses.

    Nodes of parameters (`variable`) are left out, because they outlive the graph, and so would hooks on them.
    """
    inputs = []
    for source, _ in node.next_functions:
        if source is not None and not hasattr(source, 'variable'):
            inputs.append(source)
    return inputs


def gradient_of(loss: Tensor, tensor: Tensor) -> Tensor | None:
    """Returns the gradient of a loss by a tensor, and keeps the graph.

    None: the loss is not made of the tensor, or the tensor is not made of a trained parameter. If the tensor is a copy,
    the gradient is the one by the tensor before the copy, see :func:`edge_of`.

    This backward runs the hooks of FSDP, which communicate, so under FSDP all ranks must call it.
    """
    node, index = edge_of(tensor)
    if node is None:
        return None
    (gradient,) = torch.autograd.grad(loss, GradientEdge(node, index), retain_graph=True, allow_unused=True)
    return gradient


def empty_sum(tensor: Tensor) -> Tensor:
    """Returns the sum of no elements of a tensor. It is 0, and its backward adds 0 to the gradient of the tensor.

    Unlike ``0 * tensor`` it is 0 even if the tensor is NaN.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()  # because a DTensor cannot be added to a loss that is a plain tensor
    return torch.atleast_1d(tensor)[:0].sum()
