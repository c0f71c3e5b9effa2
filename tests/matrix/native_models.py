# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Composer models that compute their loss themselves, with and without logits in their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from composer.models import ComposerModel
from torch import Tensor

from tests.matrix.subjects import text_subject
from tests.support.text import next_token_loss

Loss = Callable[[Tensor, Tensor], Tensor]
LLAMA = text_subject('llama', num_hidden_layers=1)
SMOOTHING = 0.1
Z_WEIGHT = 0.01


class NativeModel(ComposerModel):
    """A Llama with another loss.

    Args:
        loss: ``loss(logits, labels)``, or its name in :data:`LOSSES`.
        logits: When the outputs have logits: ``'always'``, ``'eval'`` (as with fused losses, which save the memory of
            the logits in training) or ``'never'``.
        init: Initial weights; see :meth:`.Subject.model`.
    """

    def __init__(self, loss: str | Loss, *, logits: str = 'always', init: str = 'large') -> None:
        super().__init__()
        self.model = LLAMA.model(init).model
        self.loss_of: Loss = LOSSES[loss] if isinstance(loss, str) else loss
        self.logits = logits

    def states_of(self, batch: Mapping[str, Any]) -> Tensor:
        """Returns the states before the head."""
        outputs = self.model.model(batch['input_ids'], batch['attention_mask'])
        return outputs.last_hidden_state

    def logits_of(self, batch: Mapping[str, Any]) -> Tensor:
        outputs = self.model(
            input_ids=batch['input_ids'],
            attention_mask=batch.get('attention_mask'),
            position_ids=batch.get('position_ids'),
        )
        return outputs.logits

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        logits = self.logits_of(batch).float()
        loss = self.loss_of(logits, batch['labels'])
        has_logits = self.logits == 'always'
        if self.logits == 'eval':
            has_logits = not self.training
        if has_logits:
            return {'loss': loss, 'logits': logits}
        return {'loss': loss}

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return outputs['loss']

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return self(batch) if outputs is None else outputs


class Terms(ComposerModel):
    """A Llama whose loss is a function of the losses of its tokens.

    Args:
        loss_of: ``loss_of(losses, counted, training)``, with the results of :func:`losses_of_tokens` and
            :func:`has_loss`, and whether the model is in training mode.
    """

    def __init__(self, loss_of: Callable[..., Any]) -> None:
        super().__init__()
        self.model = LLAMA.model('large').model
        self.loss_of = loss_of

    def forward(self, batch: Mapping[str, Any]) -> Any:
        outputs = self.model(batch['input_ids'], batch['attention_mask'])
        return outputs.logits

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        labels = batch['labels']
        losses = losses_of_tokens(outputs, labels)
        counted = has_loss(labels)
        return self.loss_of(losses, counted, self.training)

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return self(batch) if outputs is None else outputs


def has_loss(labels: Tensor) -> Tensor:
    """Returns whether the next token has a label, bool of shape ``(rows, width - 1)``."""
    return labels[:, 1:] != -100


def losses_of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of each next token, 0 without a label, of shape ``(rows, width - 1)``."""
    losses = next_token_loss(logits, labels, reduction='none')
    return losses.view(len(labels), -1)


# Losses of `Terms`.


def by_token(losses, counted, training=True):
    """Returns the mean over all tokens."""
    count = counted.sum().clamp(min=1)
    return losses.sum() / count


def by_row(losses, counted, training=True):
    """Returns the mean of the means of the rows."""
    sums = losses.sum(dim=1)
    counts = counted.sum(dim=1).clamp(min=1)
    means = sums / counts
    return means.mean()


def squares(losses, counted, training=True):
    return by_token(losses.square(), counted)


# Losses of `NativeModel`.


def causal(logits: Tensor, labels: Tensor) -> Tensor:
    return next_token_loss(logits, labels)


def unshifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def all_positions(logits: Tensor, labels: Tensor) -> Tensor:
    """Divides by the number of all positions, also padding."""
    total = next_token_loss(logits, labels, reduction='sum')
    return total / labels.numel()


def per_row(logits: Tensor, labels: Tensor) -> Tensor:
    """Averages the means of the rows, so that rows with few labels weigh as much as others."""
    losses = losses_of_tokens(logits, labels)
    counted = has_loss(labels)
    return by_row(losses, counted)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return next_token_loss(logits, labels, label_smoothing=SMOOTHING)


def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Averages two terms over the same tokens."""
    is_counted = has_loss(labels)
    predictions = logits[:, :-1][is_counted]
    z_losses = predictions.logsumexp(dim=-1).square()
    return causal(logits, labels) + Z_WEIGHT * z_losses.mean()


def fused(logits: Tensor, labels: Tensor) -> Tensor:
    return _Fused.apply(logits, labels)  # pyright: ignore[reportReturnType]


class _Fused(torch.autograd.Function):
    """Computes the gradients in the forward, and divides them by the number of its tokens, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            total = next_token_loss(leaf, labels, reduction='sum')
            (gradient,) = torch.autograd.grad(total, leaf)
        count = has_loss(labels).sum()
        ctx.save_for_backward(gradient / count)
        return total.detach() / count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (gradient_of_logits,) = ctx.saved_tensors
        (gradient_of_loss,) = grad_outputs
        return gradient_of_logits * gradient_of_loss, None


MEANS_OVER_TOKENS: Mapping[str, Loss] = {
    'causal': causal,
    'unshifted': unshifted,
    'label smoothing': smoothed,
    'z-loss': with_z_loss,
    'fused': fused,
}
LOSSES: Mapping[str, Loss] = {
    **MEANS_OVER_TOKENS,
    'all positions': all_positions,
    'per row': per_row,
}
