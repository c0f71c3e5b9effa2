# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

r"""Reads the weight of each token in a loss off the gradient of that loss by the logits.

A loss is a sum of cross-entropies, in which token t has the weight ``w_t``. Its gradient by the logits ``z_t`` that
predict the token is

.. math:: g_t = w_t (\mathrm{softmax}(z_t) - \mathrm{onehot}(y_t))

and the gradient by all other logits is zero. So the weight of a token follows by projection. The remainder of the
gradient comes from other terms of the loss. :func:`weigh_tokens` multiplies ``g_t``, and with it ``w_t``.

Gradients by logits are large, so they are read for a few positions at a time. Nothing here waits for the device, except
:func:`sketch` and :func:`are_logits`, which only the first-batch check uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.graph import on_gradient

CHUNK = 2**23
"""Logits that are converted to float32 at a time: 32 MiB, 55 positions for a vocabulary of 150,000."""
ENTRY_TOLERANCE = 1e-3
"""Largest relative difference that round-off makes between two entries of equal size in a float32 gradient, if the
probability of the label is at most 0.999."""
ZERO_SUM_TOLERANCE = 1e-3
"""If the entries of a float32 gradient sum to less than this part of their absolute sum, it is the gradient by logits.
The entries of a gradient by a hidden state of size n sum to about 1.25 / sqrt(n) of their absolute sum, 2e-2 for
n = 4096."""
SKETCH_WIDTH = 64
"""Number of random sums that stand for a gradient in a comparison. Differences keep their size to 18 % (Johnson and
Lindenstrauss). That is enough, because a fault is 100 to 100,000 times as large as the round-off."""
SKETCH_BLOCK = 128
"""Number of entries that one kernel sums. For 1 to 3 positions a CPU sums all entries in one pass, which is wrong by
5e-6 (a vocabulary of 32,000) to 1e-5 (262,144), because the label's entry is near -1 and the others are tiny. With
blocks the error is 4e-7."""
TINY = torch.finfo(torch.float32).tiny
"""The least divisor, so that nothing is divided by 0."""


class MeasuredTokens(NamedTuple):
    """Measurements at each position of a forward, ``(rows, width)``, float32 if not said otherwise.

    The values of a token are at the position whose logits predict it.
    """

    weights: Tensor  # 0 at positions that the loss does not use
    targets: Tensor  # int64, the token that each position should predict; -100 without a token
    plain_norms: Tensor  # norm of softmax - onehot, the gradient at weight 1: near 0 if the model is sure of the token
    residual_norms: Tensor  # norm of the part of the gradient that no cross-entropy explains

    @property
    def norms(self) -> Tensor:
        """Norms of the gradient, by Pythagoras: the part that a weight explains is orthogonal to the rest."""
        return torch.hypot(self.weights * self.plain_norms, self.residual_norms)

    @property
    def residual(self) -> Tensor:
        """The part of the gradient's norm, over all positions, that no cross-entropy explains, ``()``."""
        return self.residual_norms.norm() / self.norms.norm().clamp(min=TINY)

    def deviations(self, unit: float, expected: Tensor | float) -> Tensor:
        """Returns how far the gradient at each position is from the expected one, as a multiple of ``unit``.

        Args:
            unit: The weight in the loss of a token whose relative weight is 1.
            expected: The relative weight that each token should have.
        """
        explained = (self.weights / unit - expected) * self.plain_norms
        return torch.hypot(explained, self.residual_norms / unit)


# The outputs of a model.


def logits_of(outputs: Any) -> Tensor | None:
    """Returns the logits in a model's outputs, ``(rows, width, vocabulary)``. None: the outputs hold no logits.

    They are found by name and shape. A model may return hidden states in the same place: see :func:`are_logits`.
    """
    logits = entry_of(outputs, 'logits')
    if logits is None:
        logits = outputs
    if isinstance(logits, Tensor) and logits.dim() == 3:
        return logits
    return None


def are_logits(gradient: Tensor, targets: Tensor) -> bool | None:
    """Returns whether a loss treats a tensor as logits. The gradient of the loss by that tensor tells.

    If the tensor holds logits, the gradient at more than half of its positions has one of two properties: the entry of
    the label is its largest or its smallest one, or the entries sum to zero, as in every loss that is computed from a
    softmax. (It is the largest one if the token has a negative weight.) If the tensor holds hidden states, because the
    loss contains the head, the gradient has neither property.

    Args:
        gradient: The gradient of the loss by the tensor, ``(rows, width, entries)``.
        targets: As returned by :meth:`.LossRule.targets`.

    Returns:
        None if the gradient is zero at all labels that were looked at, so that nothing can be said.
    """
    size = gradient.shape[-1]
    if int(targets.max()) >= size:
        return False
    flat_targets = targets.flatten()
    # The first labels are enough, at most CHUNK entries. The gradients at all labels could take much memory.
    positions = (flat_targets != IGNORE_INDEX).nonzero().flatten()[: max(CHUNK // size, 1)]
    gradients = whole_vocabulary(gradient).flatten(0, 1).index_select(0, positions).float()
    label_entries = gradients.gather(1, flat_targets[positions, None])[:, 0]
    is_smallest = label_entries == gradients.amin(dim=-1)
    is_largest = label_entries == gradients.amax(dim=-1)
    absolute_sums = gradients.abs().sum(dim=-1)
    sums_to_zero = gradients.sum(dim=-1).abs() <= (ZERO_SUM_TOLERANCE + torch.finfo(gradient.dtype).eps) * absolute_sums
    # A model that is sure of a token has no gradient there.
    has_gradient = absolute_sums > 0
    if not has_gradient.any():
        return None
    is_like_logits = (is_smallest | is_largest | sums_to_zero)[has_gradient]
    return int(is_like_logits.sum()) > len(is_like_logits) / 2


def router_loss_of(outputs: Any) -> Tensor | None:
    """Returns the load-balancing loss of a mixture of experts in a model's outputs."""
    router_loss = entry_of(outputs, 'aux_loss')
    return router_loss if isinstance(router_loss, Tensor) else None


def entry_of(outputs: Any, name: str) -> Any:
    """Returns an entry of a model's outputs by its name, or None."""
    if isinstance(outputs, Mapping):
        return outputs.get(name)
    return getattr(outputs, name, None)


# Measurements.


def tolerance_of(dtype: torch.dtype) -> float:
    """Returns the largest relative error of a measured weight, for gradients of this type."""
    # The measurement is computed in float32, with an error of 1e-5. The entries of the gradient were rounded before.
    return 1e-5 + 4 * torch.finfo(dtype).eps


def measure(
    logits: Tensor,
    gradient: Tensor,
    targets: Tensor | None = None,
) -> MeasuredTokens:
    """Measures the weight of each token in a loss.

    Args:
        logits: ``(rows, width, vocabulary)``.
        gradient: The gradient of the loss by the logits.
        targets: As returned by :meth:`.LossRule.targets`. None: the targets are read off the gradient, too.
    """
    parts: list[MeasuredTokens] = []
    for positions, (part_logits, part_gradient) in _float_parts(logits, gradient):
        if targets is None:
            part_targets = _read_targets(part_gradient, gradient.dtype)
        else:
            part_targets = targets.flatten()[positions]
        parts.append(_measure_positions(part_logits, part_gradient, part_targets))
    shape = logits.shape[:2]
    return MeasuredTokens(
        weights=torch.cat([part.weights for part in parts]).view(shape),
        targets=torch.cat([part.targets for part in parts]).view(shape),
        plain_norms=torch.cat([part.plain_norms for part in parts]).view(shape),
        residual_norms=torch.cat([part.residual_norms for part in parts]).view(shape),
    )


def _measure_positions(logits: Tensor, gradient: Tensor, targets: Tensor) -> MeasuredTokens:
    """Measures some positions: projects the gradient on the gradient of a plain cross-entropy.

    Takes float32 ``(positions, vocabulary)`` and the targets ``(positions,)``. The measurements are ``(positions,)``.
    """
    direction = _plain_gradient(logits, targets)
    square = direction.square().sum(dim=-1)  # norm() of 32,000 numbers has an error of 3e-6 on a CPU
    products = torch.linalg.vecdot(gradient, direction)
    weights = products / square.clamp(min=TINY)
    remainder = torch.addcmul(gradient, weights[:, None], direction, value=-1)
    return MeasuredTokens(
        weights,
        targets,
        plain_norms=square.sqrt(),
        residual_norms=remainder.norm(dim=-1),
    )


def sketch(gradient: Tensor) -> Tensor:
    """Returns random sums of the entries at each position, float32 ``(rows, width, sums)`` on the CPU.

    They stand for a gradient that is too large to keep, see :data:`SKETCH_WIDTH`. A small gradient is only copied.
    """
    size = gradient.shape[-1]
    if size <= SKETCH_WIDTH:
        return whole_vocabulary(gradient).float().cpu()
    num_missing = -size % SKETCH_BLOCK  # entries of the last block
    num_blocks = (size + num_missing) // SKETCH_BLOCK
    # The same numbers for every gradient of this size.
    generator = torch.Generator().manual_seed(size)
    factors = torch.randn(num_blocks, SKETCH_BLOCK, SKETCH_WIDTH, generator=generator).to(gradient.device)
    parts = []
    for _, (part_gradient,) in _float_parts(gradient):
        padded = F.pad(part_gradient, (0, num_missing))
        blocks = padded.unflatten(1, (-1, SKETCH_BLOCK)).transpose(0, 1)  # (blocks, positions, entries)
        sums_of_blocks = blocks @ factors
        parts.append(sums_of_blocks.sum(dim=0))
    rows, width = gradient.shape[:2]
    sums = torch.cat(parts).view(rows, width, SKETCH_WIDTH)
    return sums.cpu() / SKETCH_WIDTH**0.5


def token_losses_at(logits: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy at some positions, float32 ``(positions,)``. It is 0 at positions without a target.

    Only these positions are computed, so it takes no longer in a larger batch.

    Args:
        logits: ``(rows, width, vocabulary)``.
        positions: Indices of the positions in the flattened batch, int64 ``(positions,)``.
        targets: The token that each of them should predict, ``(positions,)``; -100 without a target.
    """
    flat_logits = whole_vocabulary(logits.detach()).flatten(0, 1)
    size = max(CHUNK // flat_logits.shape[-1], 1)
    parts = []
    for part_positions, part_targets in zip(positions.split(size), targets.split(size), strict=True):
        part_logits = flat_logits.index_select(0, part_positions).float()
        parts.append(F.cross_entropy(part_logits, part_targets, reduction='none'))
    return torch.cat(parts)


# The weights of tokens.


def weigh_tokens(logits: Tensor, weights: Tensor) -> None:
    """Adds a hook that multiplies the gradient of each token by its weight. The value of the loss stays the same.

    It holds for any loss that is made of these logits. ``weights`` are ``(rows, width)``, each at the position that
    predicts the token.
    """

    def weighted(gradient: Tensor) -> Tensor:
        # The product is computed in float32, and rounded once. A weight in bfloat16 would be off by the same 0.4 % at
        # every token, while the errors of rounded products differ and cancel.
        weights_on_device = weights.to(gradient.device)
        product = gradient * weights_on_device[..., None]
        return product.to(gradient.dtype)

    on_gradient(logits, weighted)


# Helpers.


def whole_vocabulary(tensor: Tensor) -> Tensor:
    """Returns the tensor, or if ranks hold parts of its vocabulary, the whole tensor.

    In the second case all these ranks must call it.
    """
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def _read_targets(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the label at each position, read off the gradient ``(positions, vocabulary)``.

    The label's entry is the largest in absolute value, because the others sum to its negative. It is the lowest entry
    if the token has a positive weight, and the highest one if the weight is negative.

    If one other token has nearly all of the remaining probability, its entry has the same absolute value up to
    round-off, and each of the two tokens could be the label. Then the lowest entry is taken, so that the weight is
    positive. Otherwise weights that are equal would have different signs.

    ``dtype`` is the type to which the gradient was rounded before it was converted to float32.
    """
    # Two entries are compared, and both were rounded.
    tolerance = ENTRY_TOLERANCE + 2.5 * torch.finfo(dtype).eps
    lowest = gradient.min(dim=-1)
    highest = gradient.max(dim=-1)
    is_weight_negative = highest.values > -lowest.values * (1 + tolerance)
    labels = torch.where(is_weight_negative, highest.indices, lowest.indices)
    return labels.masked_fill(~gradient.any(dim=-1), IGNORE_INDEX)


def _plain_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns softmax - onehot, the gradient of the cross-entropy at each position; 0 without a target."""
    direction = logits.softmax(dim=-1)
    direction.scatter_(
        1,
        targets.clamp(min=0)[:, None],
        -1.0,
        reduce='add',
    )
    # The softmax is NaN if padding has logits of -inf, and a product of NaN with 0 would stay NaN.
    has_no_target = targets == IGNORE_INDEX
    return direction.masked_fill_(has_no_target[:, None], 0.0)


def _float_parts(*tensors: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yields some positions at a time: a slice, and the float32 values of each tensor there.

    The tensors are ``(rows, width, entries)``, and the values ``(positions, entries)``. The slice is an index into the
    ``rows * width`` positions.
    """
    flat = [tensor.detach().flatten(0, 1) for tensor in tensors]
    size = max(CHUNK // tensors[0].shape[-1], 1)
    for start in range(0, len(flat[0]), size):
        positions = slice(start, start + size)
        yield positions, [whole_vocabulary(tensor[positions]).float() for tensor in flat]
