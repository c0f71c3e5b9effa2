# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Labels that know what each of them weighs: torch's own cross-entropy of them is a weighted mean.

A model computes its loss where it likes: it shifts the labels, pads, flattens or selects them, and hands them to
``cross_entropy``. So the weights go along with the labels. Each label remembers its place in the batch through all of
that, and when its loss is computed, that of every token is multiplied by its weight before it is summed. Nothing of the
size of the logits is made that the plain mean does not make as well, and nothing is computed twice; the plain mean is
the case in which every weight is 1, and needs none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

from composer_tokacc.counting import IGNORE_INDEX, LOSS_WEIGHTS, labels_of, token_weights_of

__all__ = ['Weighing', 'weigh_labels', 'with_token_weights']

WEIGHED = (F.cross_entropy, F.nll_loss)


class Weighing:
    """Weights of the labels of one microbatch, and what they have been used for.

    Args:
        weights: ``(rows, width)``, 0 where no loss is generated.
        num_tokens: Loss-generating tokens.
        total: Sum of the weights.
    """

    def __init__(self, weights: torch.Tensor, *, num_tokens: int, total: float) -> None:
        self.num_tokens = num_tokens
        # Place 0 is that of whatever a model puts among its labels; it weighs nothing. The weights are 1 on average, so
        # a model that divides by its number of tokens divides by the right number.
        self.factors = F.pad(weights.flatten() * (num_tokens / (total or 1)), (1, 0))
        self.expected_sum = num_tokens if total else 0
        self.num_calls = 0
        self.weighted_sum = self.plain_sum = self.factor_sum = torch.zeros((), device=weights.device)

    @property
    def mean(self) -> torch.Tensor:
        """Weighted mean of the losses, float32 (): what the model's own loss must be."""
        return self.weighted_sum / self.num_tokens

    def check_used(self) -> None:
        """Raises RuntimeError if no loss of the labels was computed where it could be weighed."""
        if self.num_calls == 0:
            raise RuntimeError(
                "The model's own loss must be torch's cross-entropy of its labels for `token_weights`, got: a loss of "
                'another kind (a fused kernel, class weights, labels copied into another tensor). Switch the kernel '
                "off, or set `token_weights='token'`, which is exact for it."
            )

    def apply(self, losses: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The losses of some tokens, each times its weight."""
        factors = self.factors.to(losses.device)[places.clamp(0, len(self.factors) - 1)]
        weighted = losses.float() * factors if losses.dtype != torch.float64 else losses * factors
        with torch.no_grad():
            self.num_calls += 1
            self.weighted_sum = self.weighted_sum.to(losses.device) + weighted.sum()
            self.plain_sum = self.plain_sum.to(losses.device) + (losses * (places > 0)).sum()
            self.factor_sum = self.factor_sum.to(losses.device) + factors.sum()
        return weighted


class WeighedLabels(torch.Tensor):
    """Labels whose places in the batch go through every operation that moves labels."""

    places: torch.Tensor
    """Integers of the labels' shape: 1 + the label's number in the flattened batch; 0: not of the batch."""
    weighing: Weighing

    @classmethod
    def of(cls, labels: torch.Tensor, places: torch.Tensor, weighing: Weighing) -> WeighedLabels:
        """The labels with their places."""
        labels = labels.as_subclass(cls)
        labels.places, labels.weighing = places, weighing
        return labels

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """As torch's own, but a loss of the labels is weighed, and the places follow where integers come out."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in WEIGHED and (weighed := _weighed(func, *args, **kwargs)) is not None:
                return weighed
            result = func(*args, **kwargs)
            # Written into a tensor of others, labels are lost sight of: their places must not be written there as well.
            is_written = result is None or (args and result is args[0]) or 'out' in kwargs
            if (is_written and not isinstance(args[0], cls)) or not (result is None or _has_integers(result)):
                return result
            found = next(one for one in tree_leaves([args, kwargs]) if isinstance(one, cls))
            try:
                places = func(*tree_map(_places, args), **tree_map(_places, kwargs))
                return _with_places(result, places, found.weighing)
            except (RuntimeError, IndexError, TypeError):  # it does not move labels, but reads them (one_hot)
                return result


def weigh_labels(
    batch: Mapping[str, Any], weights: torch.Tensor, *, num_tokens: int, total: float
) -> tuple[dict[str, Any], Weighing]:
    """The batch with labels that weigh, without its ``loss_weights``.

    Args:
        batch: Labels of shape ``(rows, width)``.
        weights: Of the same shape, 0 where no loss is generated.
        num_tokens: Loss-generating tokens; more than 0.
        total: Sum of the weights.
    """
    labels = labels_of(batch)
    places = torch.arange(1, labels.numel() + 1, device=labels.device).view_as(labels)
    # Where no loss is generated a label is of no concern, whatever a model makes of it.
    places = places * (labels != IGNORE_INDEX)
    weighing = Weighing(weights, num_tokens=num_tokens, total=total)
    inputs = {key: value for key, value in batch.items() if key != LOSS_WEIGHTS}
    return {**inputs, 'labels': WeighedLabels.of(labels, places, weighing)}, weighing


def with_token_weights(batch: Mapping[str, Any], token_weights: str, *, loss_tokens: str = 'causal') -> dict[str, Any]:
    """The batch with labels of which torch's own cross-entropy is the weighted mean; for a loop without a Trainer.

    Args:
        batch: A microbatch with ``labels`` of shape ``(rows, width)``, and ``loss_weights`` for ``'column'``.
        token_weights: ``'token'``, ``'sqrt'``, ``'sample'`` or ``'column'``, see :class:`.TokenAccumulation`.
        loss_tokens: By which rule the model averages, see :func:`.counting.loss_mask`.
    """
    weights, counted = token_weights_of(batch, token_weights, loss_tokens)
    total = float(weights.sum(dtype=torch.float64))
    if total == 0:
        return dict(batch)
    return weigh_labels(batch, weights, num_tokens=int(counted.sum()), total=total)[0]


def _weighed(
    func: Callable[..., Any], input: torch.Tensor, target: torch.Tensor, weight: Any = None, *args: Any, **kwargs: Any
) -> torch.Tensor | None:
    """The loss with its tokens weighed; None where it is none of labels, or has weights of its own."""
    if args or weight is not None or not isinstance(target, WeighedLabels):
        return None
    reduction = kwargs.pop('reduction', 'mean')
    losses = func(input, target.as_subclass(torch.Tensor), reduction='none', **kwargs)
    weighted = target.weighing.apply(losses, target.places)
    if reduction == 'none':
        return weighted
    if reduction == 'sum':
        return weighted.sum()
    return weighted.sum() / (target.as_subclass(torch.Tensor) != kwargs.get('ignore_index', IGNORE_INDEX)).sum()


def _places(value: Any) -> Any:
    return value.places if isinstance(value, WeighedLabels) else value


def _has_integers(result: Any) -> bool:
    tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
    return bool(tensors) and not any(one.is_floating_point() or one.dtype == torch.bool for one in tensors)


def _with_places(result: Any, places: Any, weighing: Weighing) -> Any:
    if isinstance(result, torch.Tensor):
        return WeighedLabels.of(result.as_subclass(torch.Tensor), places, weighing)
    if isinstance(result, (tuple, list)):
        return type(result)([_with_places(one, place, weighing) for one, place in zip(result, places, strict=True)])
    return result
