# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

r"""What each token weighs in a loss, read off the gradient of that loss by the logits.

The gradient of a sum of cross-entropies, of which that of token t is multiplied by ``w_t``, is at the logits ``z_t``
that predict it, and at no others,

.. math:: g_t = w_t (\mathrm{softmax}(z_t) - \mathrm{onehot}(y_t))

So the weight of a token follows by projection, what the loss holds besides is what is left over, and a factor on
``g_t`` is a factor on ``w_t``. Everything is computed a few positions at a time, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from composer_tokacc.batch import IGNORE_INDEX, Batch, labels_of
from composer_tokacc.counting import loss_mask

__all__ = [
    'LabelEntries',
    'MeasuredTokens',
    'counted_labels',
    'deviation',
    'label_entries',
    'logits_of',
    'measure',
    'node_of',
    'on_gradient',
    'sketch',
    'targets_of',
    'token_losses',
    'tolerance_of',
    'weigh_tokens',
]

CHUNK = 2**23
"""Logits that are turned to float32 at a time: 32 MiB, 56 positions for a vocabulary of 150,000."""
ALIKE = 1e-3
"""Relative difference of two entries of a float32 gradient that may be round-off, where 1 - p is 1e-3 and more."""
SKETCH_WIDTH = 64
"""Random sums of a gradient that stand for it in a comparison. Differences keep their size to 18 % (Johnson and
Lindenstrauss); what is compared lies two to five orders of magnitude apart."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTokens:
    """What the tokens of one forward weigh.

    Args:
        weights: float32 ``(rows, width)``, at the positions that predict; 0 where the loss does not look.
        targets: int64 ``(rows, width)``, the token that each position is held to; -100: none.
        sizes: float32 ``(rows, width)``, norm of the gradient of a plain cross-entropy: near 0 where the model is sure,
            and where its weight therefore hardly matters and is hardly known.
        residual: Norm of what no token's cross-entropy explains, over that of the gradient; ``()``; 0 of a zero one.
        residuals: The same of each position's own gradient, ``(rows, width)``.
        dtype: Of the gradient that was measured.
    """

    weights: torch.Tensor
    targets: torch.Tensor
    sizes: torch.Tensor
    residual: torch.Tensor
    residuals: torch.Tensor
    dtype: torch.dtype


class LabelEntries(NamedTuple):
    """What the gradient by the logits says of a few tokens, each ``(tokens,)``."""

    entries: torch.Tensor
    """Of the gradient, those of the labels: of a token of weight w, ``w * (exp(-loss) - 1)``."""
    losses: torch.Tensor
    """Their cross-entropies."""
    positions: torch.Tensor
    """Where they are predicted, counted through all rows."""
    count: torch.Tensor
    """How many tokens count in all, ``()``."""


def logits_of(outputs: Any) -> torch.Tensor | None:
    """Returns the logits in a model's outputs, ``(rows, width, vocabulary)``, or None where it gives none."""
    logits = outputs.get('logits') if isinstance(outputs, Mapping) else getattr(outputs, 'logits', None)
    if logits is None and isinstance(outputs, torch.Tensor):
        logits = outputs
    return logits if isinstance(logits, torch.Tensor) and logits.dim() == 3 else None


def tolerance_of(dtype: torch.dtype) -> float:
    """Returns how far from its weight a token may be measured, of gradients of this type."""
    return 1e-5 + 4 * (torch.finfo(dtype).eps if dtype != torch.float64 else 0.0)


def targets_of(batch: Batch, rule: str) -> torch.Tensor:
    """Returns the token that the logits of each position are held to, ``(rows, width)``; -100: none.

    Args:
        batch: A batch with ``labels``.
        rule: Which labels carry loss, see :func:`.loss_mask`.
    """
    labels, shift = counted_labels(batch, rule)
    if not shift:
        return labels
    targets = labels.roll(-1, dims=1)  # F.pad takes ten times as long
    targets[:, -1:] = IGNORE_INDEX
    return targets


def counted_labels(batch: Batch, rule: str) -> tuple[torch.Tensor, int]:
    """Returns the labels, -100 where the rule does not count them, and by how many columns they are shifted.

    What is shifted out, of column 0, does not count either.
    """
    labels = labels_of(batch)
    if rule == 'causal_attended':
        labels = labels.masked_fill(~loss_mask(batch, rule), IGNORE_INDEX)
    return labels, int(rule != 'unshifted')


def measure(logits: torch.Tensor, gradient: torch.Tensor, targets: torch.Tensor | None = None) -> MeasuredTokens:
    """Measures what each token weighs in the loss whose gradient this is.

    Args:
        logits: ``(rows, width, vocabulary)``, those that the loss was computed of.
        gradient: Of the loss by them, of their shape.
        targets: As of :func:`targets_of`. None: read off the gradient, see :func:`_read_targets`.
    """
    weights, found, sizes, left, whole = [], [], [], [], []
    tiny = torch.finfo(torch.float32).tiny
    for z, g, y in _chunks(logits, gradient, targets):
        if y is None:
            y = _read_targets(g, alike=ALIKE + 2.5 * torch.finfo(gradient.dtype).eps)
        r = _direction(z, y)
        size = r.square().sum(dim=-1)
        weight = (g * r).sum(dim=-1) / size.clamp(min=tiny)
        left.append((g - weight[:, None] * r).square().sum(dim=-1))
        whole.append(g.square().sum(dim=-1))
        weights.append(weight)
        found.append(y)
        sizes.append(size.sqrt())
    weights, found, sizes, left, whole = (
        torch.cat(parts).view(logits.shape[:2]) for parts in (weights, found, sizes, left, whole)
    )
    return MeasuredTokens(
        weights=weights, targets=found, sizes=sizes, residual=(left.sum() / whole.sum().clamp(min=tiny)).sqrt(),
        residuals=(left / whole.clamp(min=tiny)).sqrt(), dtype=gradient.dtype,
    )  # fmt: skip


def deviation(
    logits: torch.Tensor, gradient: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, unit: float
) -> torch.Tensor:
    """Returns how far the gradient of each position is from what it must be, float32 ``(rows x width,)``.

    In parts of a plain token's weight: one that the model is sure of, of which only round-off is left, is not far off.

    Args:
        logits: ``(rows, width, vocabulary)``.
        gradient: Of the loss by them, of their shape.
        targets: As of :func:`targets_of`.
        weights: What tokens must weigh beside a plain one, ``(rows, width)``; None: the same.
        unit: What a plain one must weigh.
    """
    norms, start = [], 0
    for z, g, y in _chunks(logits, gradient, targets):
        expected = _direction(z, y)
        if weights is not None:
            expected *= weights.flatten()[start : start + len(z), None]
        norms.append((g / unit - expected).square().sum(dim=-1).sqrt())
        start += len(z)
    return torch.cat(norms)


def label_entries(
    logits: torch.Tensor, gradient: torch.Tensor, labels: torch.Tensor, shift: int, numbers: Sequence[int]
) -> LabelEntries:
    """Returns what the gradient says of a few tokens, whose label's own entry is enough to see a weight.

    A step has room for a few operations a microbatch, and none that waits for the device: so tokens are chosen by their
    numbers among those that count, which the host knows.

    Args:
        logits: ``(rows, width, vocabulary)``.
        gradient: Of the loss by them, of their shape.
        labels: As of :func:`counted_labels`.
        shift: Likewise.
        numbers: Of tokens, from 1.
    """
    ranks = (labels[:, shift:] != IGNORE_INDEX).flatten().cumsum(dim=0)
    # Within bounds also where there are fewer labels than the host knows, which the count tells.
    positions = torch.searchsorted(ranks, torch.tensor(numbers, device=ranks.device)).clamp_(max=len(ranks) - 1)
    if shift:
        positions += positions // (labels.shape[1] - 1)
    targets = labels.flatten().index_select(0, positions + shift)
    z = _whole(logits.flatten(0, 1).index_select(0, positions)).float()
    gradient = _whole(gradient) if isinstance(gradient, DTensor) else gradient
    entries = gradient.flatten(0, 1)[positions, targets.clamp(min=0)]
    losses = F.cross_entropy(z, targets, reduction='none')
    return LabelEntries(entries=entries, losses=losses, positions=positions, count=ranks[-1])


def sketch(gradient: torch.Tensor) -> torch.Tensor:
    """Returns random sums of the last dimension, by which gradients too large to keep are compared; on the CPU."""
    size = gradient.shape[-1]
    if size <= SKETCH_WIDTH:
        return gradient.float().cpu()
    generator = torch.Generator().manual_seed(size)
    signs = torch.randint(2, (size, SKETCH_WIDTH), generator=generator).mul_(2).sub_(1).to(gradient.device).float()
    parts = [g @ signs for _, g, _ in _chunks(gradient, gradient, None)]
    return torch.cat(parts).view(*gradient.shape[:2], SKETCH_WIDTH).cpu() / SKETCH_WIDTH**0.5


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy at each position, float32 ``(rows, width)``, 0 where there is no target."""
    parts = [
        F.cross_entropy(z, y, reduction='none', ignore_index=IGNORE_INDEX) for z, _, y in _chunks(logits, None, targets)
    ]
    return torch.cat(parts).view(targets.shape)


def weigh_tokens(logits: torch.Tensor, weights: torch.Tensor) -> None:
    """Multiplies what each token weighs in any loss of the logits that is computed, now or before.

    Args:
        logits: As the model returned them, ``(rows, width, vocabulary)``, in the graph of the loss.
        weights: Factor of each position that predicts, ``(rows, width)``, as of :func:`targets_of`.
    """
    on_gradient(logits, lambda gradient: gradient * weights[..., None].to(gradient))


def on_gradient(logits: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Has a function see, and change if it likes, the gradient by the logits; not called where none comes.

    Args:
        logits: As a model returned them, not a leaf.
        hook: Gives another gradient, or None.
    """
    node, index = node_of(logits)
    if node is logits.grad_fn:  # before whatever looks at the node
        logits.register_hook(lambda gradient: None if gradient is None else hook(gradient))
        return

    def change(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        gradient = gradients[index]
        changed = None if gradient is None else hook(gradient)
        return None if changed is None else (*gradients[:index], changed, *gradients[index + 1 :])

    node.register_prehook(change)


def node_of(logits: torch.Tensor) -> tuple[Any, int]:
    """Returns where the graph makes the logits, and which output they are there.

    accelerate and FSDP hand out a copy in another type; the loss is of what it was made of.
    """
    node, index = logits.grad_fn, logits.output_nr
    while node is not None and node.name() == 'ToCopyBackward0':
        node, index = node.next_functions[0]
    return node, index


def _read_targets(g: torch.Tensor, *, alike: float) -> torch.Tensor:
    """Returns the label at each position, read off the gradient: its entry is the largest, as the others sum up to it.

    Where one other token has nearly all of the rest, both entries are alike but for round-off, and either could be the
    label. The negative one is taken, that of a positive weight: the other way round, equal weights would look unlike.
    """
    low, high = g.min(dim=-1), g.max(dim=-1)
    labels = torch.where(high.values > -low.values * (1 + alike), high.indices, low.indices)
    return labels.masked_fill(~g.any(dim=-1), IGNORE_INDEX)


def _direction(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradient of the plain cross-entropies, ``(positions, vocabulary)``; 0 where there is no target."""
    direction = z.softmax(dim=-1)
    direction.scatter_add_(1, y.clamp(min=0)[:, None], direction.new_full((len(z), 1), -1.0))
    return direction * (y != IGNORE_INDEX)[:, None]


def _chunks(logits: torch.Tensor, gradient: Any, targets: Any) -> Iterator[tuple[torch.Tensor, Any, Any]]:
    """Some positions at a time: their logits and gradients in float32, and targets."""
    step = max(CHUNK // logits.shape[-1], 1)
    flat = logits.detach().flatten(0, 1)
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        yield (
            _whole(flat[part]).float(),
            None if gradient is None else _whole(gradient.detach().flatten(0, 1)[part]).float(),
            None if targets is None else targets.flatten()[part],
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the vocabulary, where ranks hold parts of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
