# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

r"""What each token weighs in a loss, read off the gradient of that loss by the logits.

The gradient of a sum of cross-entropies, of which that of token t is multiplied by ``w_t``, is at the logits ``z_t``
that predict it, and at no others,

.. math:: g_t = w_t (\mathrm{softmax}(z_t) - \mathrm{onehot}(y_t))

So the weight of a token follows by projection, what else the loss holds is what is left over, and a factor on ``g_t``
is a factor on ``w_t``. Everything is computed a few positions at a time, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from composer_tokacc.batch import IGNORE_INDEX, Batch, labels_of
from composer_tokacc.counting import loss_mask

CHUNK = 2**23
"""Logits that are turned to float32 at a time: 32 MiB, 56 positions for a vocabulary of 150,000."""
ALIKE = 1e-3
"""Relative difference of two entries of a float32 gradient that may be round-off, where 1 - p is 1e-3 and more."""
SKETCH_WIDTH = 64
"""Random sums of a gradient that stand for it in a comparison. Differences keep their size to 18 % (Johnson and
Lindenstrauss); what is compared lies two to five orders of magnitude apart."""
SKETCH_BLOCK = 128
"""Entries that one kernel sums: of 1 to 3 positions a CPU sums all in one go, and is 5e-6 (a vocabulary of 32,000) to
1e-5 off (262,144), as the label's entry is near -1 and the others are tiny; in blocks 4e-7."""
TINY = torch.finfo(torch.float32).tiny


class MeasuredTokens(NamedTuple):
    """What the tokens of one forward weigh: float32 ``(rows, width)`` each, at the positions that predict."""

    weights: torch.Tensor  # 0 where the loss does not look
    targets: torch.Tensor  # int64, the token that each position is held to; -100: none
    sizes: torch.Tensor  # norms of the gradient of a pure cross-entropy: near 0 where the model is sure of the token
    rests: torch.Tensor  # norms of what no cross-entropy explains of the gradient

    @property
    def norms(self) -> torch.Tensor:
        """Norms of the gradient: what is explained is orthogonal to the rest."""
        return torch.hypot(self.weights * self.sizes, self.rests)

    @property
    def residual(self) -> torch.Tensor:
        """The part of the gradient, over all positions, that no cross-entropy explains; ``()``, 0 of a zero one."""
        return self.rests.norm() / self.norms.norm().clamp(min=TINY)


def logits_of(outputs: Any) -> torch.Tensor | None:
    """Returns the logits in a model's outputs, ``(rows, width, vocabulary)``, or None where it gives none."""
    logits = entry_of(outputs, 'logits')
    logits = outputs if logits is None and isinstance(outputs, torch.Tensor) else logits
    return logits if isinstance(logits, torch.Tensor) and logits.dim() == 3 else None


def router_loss_of(outputs: Any) -> torch.Tensor | None:
    """Returns the load-balancing loss of a mixture of experts in a model's outputs."""
    found = entry_of(outputs, 'aux_loss')
    return found if isinstance(found, torch.Tensor) else None


def entry_of(outputs: Any, name: str) -> Any:
    """Returns an entry of a model's outputs by its name, or None."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def tolerance_of(dtype: torch.dtype) -> float:
    """Returns how far from its weight a token may be measured, of gradients of this type."""
    return 1e-5 + 4 * (torch.finfo(dtype).eps if dtype != torch.float64 else 0.0)


def at_predictions(values: torch.Tensor, rule: str) -> torch.Tensor:
    """Moves a value of each label, ``(rows, width)``, to the position whose logits predict it."""
    return values if rule == 'unshifted' else values.roll(-1, dims=1)  # column 0 never counts


def targets_of(batch: Batch, rule: str) -> torch.Tensor:
    """Returns the token that the logits of each position are held to, ``(rows, width)``; -100: none."""
    return at_predictions(labels_of(batch).masked_fill(~loss_mask(batch, rule), IGNORE_INDEX), rule)


def measure(logits: torch.Tensor, gradient: torch.Tensor, targets: torch.Tensor | None = None) -> MeasuredTokens:
    """Measures what each token weighs in the loss whose gradient by the logits ``(rows, width, vocabulary)`` this is.

    ``targets`` are as of :func:`targets_of`; None: read off the gradient, see :func:`_read_targets`.
    """
    found = []
    for z, g, y in _chunks(logits, gradient, targets):
        if y is None:
            y = _read_targets(g, alike=ALIKE + 2.5 * torch.finfo(gradient.dtype).eps)
        direction = _plain_gradient(z, y)
        square = direction.square().sum(dim=-1)  # norm() of 32,000 numbers is 3e-6 off on a CPU
        weight = torch.linalg.vecdot(g, direction) / square.clamp(min=TINY)
        rest = torch.addcmul(g, weight[:, None], direction, value=-1).norm(dim=-1)
        found.append((weight, y, square.sqrt(), rest))
    return MeasuredTokens(*(torch.cat(parts).view(logits.shape[:2]) for parts in zip(*found, strict=True)))


def deviations(
    unit: float, logits: torch.Tensor, gradient: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Returns how far each position's gradient is from that of a token of ``unit`` times its weight, over unit."""
    found = []
    for z, g, y, w in _chunks(logits, gradient, targets, weights):
        rest = _plain_gradient(z, y)
        rest = rest if w is None else rest.mul_(w[:, None])
        found.append(rest.sub_(g, alpha=1 / unit).norm(dim=-1))
    return torch.cat(found).view(targets.shape)


def sketch(gradient: torch.Tensor) -> torch.Tensor:
    """Returns random sums of the last dimension, by which gradients too large to keep are compared; on the CPU."""
    size = gradient.shape[-1]
    if size <= SKETCH_WIDTH:
        return gradient.float().cpu()
    generator = torch.Generator().manual_seed(size)
    signs = torch.randint(2, (size, SKETCH_WIDTH), generator=generator).mul_(2).sub_(1).to(gradient.device).float()
    missing = -size % SKETCH_BLOCK
    signs = F.pad(signs, (0, 0, 0, missing)).unflatten(0, (-1, SKETCH_BLOCK))  # (blocks, entries, sums)
    parts = []
    for g, *_ in _chunks(gradient, None):
        blocks = F.pad(g, (0, missing)).unflatten(1, (-1, SKETCH_BLOCK)).transpose(0, 1)
        parts.append((blocks @ signs).sum(dim=0))
    return torch.cat(parts).view(*gradient.shape[:2], SKETCH_WIDTH).cpu() / SKETCH_WIDTH**0.5


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy at each position, float32 ``(rows, width)``, 0 where there is no target."""
    parts = [F.cross_entropy(z, y, reduction='none') for z, _, y in _chunks(logits, None, targets)]
    return torch.cat(parts).view(targets.shape)


def weigh_tokens(logits: torch.Tensor, weights: torch.Tensor) -> None:
    """Multiplies what each token weighs, ``(rows, width)`` where predicted, in any loss that is computed of logits."""
    on_gradient(logits, lambda gradient: gradient * weights[..., None].to(gradient))


def on_gradient(logits: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Has a function see the gradient by the logits where one comes, and return another one if it likes."""
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


def has_bypass(losses: Iterable[torch.Tensor], through: Iterable[torch.Tensor]) -> bool:
    """Returns whether losses reach parameters by another way than through some tensors; by the graph, no host sync."""
    seen: set[Any] = {None, *(node_of(tensor)[0] for tensor in through)}
    pending: list[Any] = [loss.grad_fn for loss in losses]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        if hasattr(node, 'variable'):  # a parameter
            return True
        seen.add(node)
        pending += [other for other, _ in node.next_functions]
    return False


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all of the vocabulary, where ranks hold parts of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _read_targets(g: torch.Tensor, *, alike: float) -> torch.Tensor:
    """Returns the label at each position, read off the gradient: its entry is the largest, as the others sum up to it.

    Where one other token has nearly all of the rest, both entries are alike but for round-off, and either could be the
    label. The negative one is taken, that of a positive weight: the other way round, equal weights would look unlike.
    """
    low, high = g.min(dim=-1), g.max(dim=-1)
    labels = torch.where(high.values > -low.values * (1 + alike), high.indices, low.indices)
    return labels.masked_fill(~g.any(dim=-1), IGNORE_INDEX)


def _plain_gradient(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns softmax - onehot, the gradient of each position's cross-entropy; 0 where there is no target."""
    direction = z.softmax(dim=-1)
    direction.scatter_(1, y.clamp(min=0)[:, None], -1.0, reduce='add')
    return direction.mul_((y != IGNORE_INDEX)[:, None])


def _chunks(logits: torch.Tensor, gradient: Any, *others: Any) -> Iterator[tuple[Any, ...]]:
    """Gives some positions at a time: their logits and gradients in float32, and what else there is of each."""
    step = max(CHUNK // logits.shape[-1], 1)
    flat = logits.detach().flatten(0, 1)
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        yield (
            whole(flat[part]).float(),
            None if gradient is None else whole(gradient.detach().flatten(0, 1)[part]).float(),
            *(None if other is None else other.flatten()[part] for other in others),
        )
