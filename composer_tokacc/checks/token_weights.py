# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What each token weighed in the gradient that was really computed: in any trainer, any loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.checks.logits import logits_of, measure, node_of, tolerance_of
from composer_tokacc.collectives import get_world_size
from composer_tokacc.compat import inner_model, is_in_backward
from composer_tokacc.counting import with_one_label

SURE = 1e-3
"""Size of softmax - onehot, 1 - p of the label or a little more, below which a gradient is mostly round-off."""
OTHER = 0.5
"""Residual of a position whose gradient is that of no label: of a z-loss where there is none, of soft labels."""


class _Backward(NamedTuple):
    """What one gradient of logits told, left on its device: to read it in the hook would make the host wait."""

    weights: torch.Tensor  # float32 (positions,)
    tells: torch.Tensor  # bool (positions,)
    num_left_out: torch.Tensor
    residual: torch.Tensor
    forward: int
    has_weight: torch.Tensor


@dataclass
class _WatchedForward:
    """A forward whose logits are watched."""

    in_backward: bool
    """Activation checkpoints compute a forward again in the backward. It may have no gradient."""
    has_labels: torch.Tensor | None
    """Bool ``()``, left on its device: whether a label counts by every rule. None: the forward sees no labels."""


class TokenWeightsReport:
    """What :func:`.measure_token_weights` has measured so far; printed as a table."""

    def __init__(self) -> None:
        self._backwards: list[_Backward] = []
        self._had_forward, self._is_open, self._tolerance = False, True, 0.0
        self._watched: list[_WatchedForward] = []

    @property
    def weights(self) -> list[torch.Tensor]:
        """What tokens weighed, float32 ``(tokens,)``: a tensor for each gradient of logits, in the order they came."""
        return [backward.weights[backward.tells] for backward in self._backwards]

    @property
    def spread(self) -> float:
        """Largest over smallest weight, signs apart, of all backwards and ranks; NaN where no token tells.

        Where ``torch.distributed`` is initialised, every rank must ask for it.
        """
        extremes = self._extremes()
        if dist.is_available() and dist.is_initialized():
            extremes = extremes.to('cuda' if 'nccl' in dist.get_backend() else 'cpu')
            dist.all_reduce(extremes, dist.ReduceOp.MAX)
        return float(extremes[0] / -extremes[1])

    @property
    def residual(self) -> float:
        """Largest share of a gradient of logits that no token's cross-entropy explains (of its norm); of this rank."""
        residuals = [backward.residual for backward in self._backwards]
        return float(torch.stack(residuals).max()) if residuals else float('nan')

    @property
    def known_to(self) -> float:
        """How far above 1 round-off may bring the spread of equal weights: one too large and another too small."""
        return 2 * (self._tolerance + self.residual)

    def forwards_without_weight(self) -> list[str]:
        """Names the forwards of this rank that have labels, as far as they show, and add nothing to the gradient."""
        reached = {backward.forward for backward in self._backwards}
        weighed = {backward.forward for backward in self._backwards if backward.has_weight}
        sentences = []
        for number, forward in enumerate(self._watched):
            is_empty = forward.has_labels is not None and not forward.has_labels
            if number in weighed or forward.in_backward or is_empty:
                continue
            reason = 'its gradient is 0' if number in reached else '`backward` did not reach its logits'
            sentences.append(f'Forward {number + 1} of {len(self._watched)} adds nothing to the gradient: {reason}.')
        return sentences

    def unequal_tokens(self) -> str:
        """Says of each backward of this rank which of its tokens weigh other than the median of all of them."""
        median, lines = torch.cat(self.weights).median().cpu(), []
        for number, weights in enumerate(self.weights, start=1):
            shares = weights.cpu() / median
            off = ((shares - 1).abs() > self.known_to).nonzero().flatten()
            if len(off):
                which = 'all' if len(off) == len(shares) else f'number {", ".join(map(str, (off[:8] + 1).tolist()))}'
                low, high = float(shares[off].min()), float(shares[off].max())
                span = f'{high:.4g}' if high - low <= self.known_to else f'{low:.4g} to {high:.4g}'
                lines.append(f'backward {number}: {which} of {len(shares):,} tokens with loss: {span} times the median')
        return '\n'.join(lines)

    def __deepcopy__(self, memo: Any) -> TokenWeightsReport:
        return self  # a copy of the model (an average of weights) keeps its hooks: they must end with these

    def __str__(self) -> str:
        lines = ['backward    tokens       smallest           mean        largest  residual']
        for number, (weights, backward) in enumerate(zip(self.weights, self._backwards, strict=True), start=1):
            low, mean, high = (weights.min(), weights.mean(), weights.max()) if len(weights) else [torch.nan] * 3
            lines.append(
                f'{number:>8}{len(weights):>10,}{low:>15.7g}{mean:>15.7g}{high:>15.7g}{backward.residual:>10.1e}'
            )
        # Of this rank alone: whoever prints on rank 0 only must not wait for the others.
        where = ' on this rank (`.spread` asks all)' if get_world_size() > 1 else ''
        largest, smallest = self._extremes().abs().tolist()
        if smallest != torch.inf:
            verb = 'weigh' if largest <= smallest * (1 + self.known_to) else 'do NOT weigh'
            known = f'the same, to {self.known_to:.0e}{where}'
            lines.append(f'tokens {verb} {known}: largest over smallest weight {largest / smallest:.7f}')
        if left_out := sum(int(backward.num_left_out) for backward in self._backwards):
            lines.append(f'{left_out:,} left out: 1 - p of the label below {SURE}, or a gradient that is of no label')
        if (unread := len(self._watched) - len(self._backwards)) > 0:
            lines.append(f'{unread:,} of {len(self._watched):,} forwards had no gradient at their logits')
        return '\n'.join(lines)

    def _extremes(self) -> torch.Tensor:
        """Returns the largest size of a weight and the smallest, negated, so that both are the largest over ranks."""
        sizes = torch.cat([weights.abs().cpu() for weights in self.weights] or [torch.empty(0)])
        return torch.stack([sizes.max(), -sizes.min()]) if len(sizes) else torch.full((2,), -torch.inf)

    def _watch(self, module: torch.nn.Module, args: Any, kwargs: Any, outputs: Any, *, is_outer: bool) -> None:
        """Has the gradient of a forward's logits measured when it comes; a forward hook."""
        if not torch.is_grad_enabled() or not self._is_open:
            return
        self._had_forward = True
        logits, mask = _logits_in(outputs, is_outer=is_outer), None
        if logits is None:  # TRL's fused head hands out log-probabilities of the labels alone
            logits, mask = getattr(outputs, 'log_probs', None), getattr(outputs, 'label_mask', None)
        if logits is None or logits.grad_fn is None:
            return
        node, index = node_of(logits)
        has_labels = _has_labels(kwargs if 'labels' in kwargs else next(iter(args), None))
        if (self, index) in node.metadata:  # the same logits again, from a module around that one
            forward = self._watched[node.metadata[self, index]]
            forward.has_labels = has_labels if forward.has_labels is None else forward.has_labels
            return
        number = node.metadata[self, index] = len(self._watched)
        self._watched.append(_WatchedForward(is_in_backward(), has_labels))
        # Detached: a graph whose hook holds its own logits is never freed.
        node.register_prehook(partial(self._measure, logits.detach(), mask, index, number))

    def _measure(
        self, logits: torch.Tensor, mask: torch.Tensor | None, index: int, number: int, gradients: Any
    ) -> None:
        """Measures, and leaves the gradients as they are; a hook of the graph."""
        gradient = gradients[index]
        if gradient is None or not self._is_open:
            return
        self._tolerance = max(self._tolerance, tolerance_of(gradient.dtype))
        if mask is not None:  # the gradient by a log-probability is the weight itself, negated
            weights, nothing = -gradient.float().flatten(), gradient.new_zeros(())
            tells = mask.flatten() & (weights != 0)
            self._backwards.append(_Backward(weights, tells, nothing.long(), nothing, number, tells.any()))
            return
        found = measure(logits, gradient)
        carries_loss = found.targets != IGNORE_INDEX
        tells = carries_loss & ~(found.sizes < SURE) & ~(found.rests > OTHER * found.norms)  # NaN tells
        left_out = carries_loss.sum() - tells.sum()
        self._backwards.append(
            _Backward(found.weights.flatten(), tells.flatten(), left_out, found.residual, number, carries_loss.any())
        )

    def _why_empty(self) -> str:
        if not self._had_forward:
            return 'it made no forward with gradients. Give the module that is trained, whose forward makes the logits'
        if not self._watched:
            return 'its outputs hold no logits (rows, width, vocabulary). Turn a fused loss off; call `model()` itself'
        return 'no gradient came to its logits. Call `backward` inside, of a loss of the logits that it returns'


@contextmanager
def measure_token_weights(model: torch.nn.Module) -> Iterator[TokenWeightsReport]:
    """Measures what each token weighs in the gradient, in whatever trains the model inside of the context.

    A token that weighs w adds ``w * (softmax(logits) - onehot(label))`` to the gradient by its logits: hooks there read
    w off it, without labels. Compiled models run eagerly meanwhile; nothing else changes. Enter it for one optimizer
    step: between steps of unlike numbers of tokens, weights differ rightly.

    Args:
        model: Whose forward returns logits ``(rows, width, vocabulary)``: alone, in a tuple or as ``.logits``. Also
            what wraps a Hugging Face model (Composer's, PEFT's, Lightning's), DDP and ``torch.compile``.

    Yields:
        ``weights``, ``spread`` and ``residual`` so far.

    Raises:
        TypeError: The model is no module.
        RuntimeError: At the end, if no gradient of logits came.

    Example:
        >>> import torch
        >>> from composer_tokacc import measure_token_weights
        >>> model = torch.nn.Embedding(9, 9)
        >>> with measure_token_weights(model) as report:  # a mean of means, over four targets and over one
        ...     for ids in torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[6, 7]]):
        ...         (torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:]) / 2).backward()
        >>> [round(weight, 4) for weight in torch.cat(report.weights).tolist()]
        [0.125, 0.125, 0.125, 0.125, 0.5]
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f'`model` must be a torch.nn.Module, got: {model!r}. Pass what the loss is computed by.')
    report, inner = TokenWeightsReport(), inner_model(model)
    # Trainers may call a part of what they were given. Parts of Hugging Face models that have a head have this method.
    parts = [part for part in inner.modules() if part is inner or hasattr(part, 'get_output_embeddings')]
    hooks = [
        part.register_forward_hook(partial(report._watch, is_outer=part is inner), with_kwargs=True) for part in parts
    ]
    try:
        # A compiled forward that returns the loss, too, has no gradient at its logits.
        with torch.compiler.set_stance('force_eager'):
            yield report
    finally:
        report._is_open = False
        for hook in hooks:
            hook.remove()
    if not report._backwards:
        name = type(inner).__name__
        raise RuntimeError(f'No token weight was measured of {name}: {report._why_empty()}. See docs/token_weights.md')


def _logits_in(outputs: Any, *, is_outer: bool) -> torch.Tensor | None:
    """Returns the logits in outputs; only the outermost module may return them without their name."""
    if isinstance(outputs, (tuple, list)) and is_outer:
        return next((logits for each in outputs if (logits := logits_of(each)) is not None), None)
    return logits_of(outputs) if is_outer or not isinstance(outputs, torch.Tensor) else None


def _has_labels(batch: Any) -> torch.Tensor | None:
    """Returns whether a batch has a label that counts by every rule, bool ``()``; None if it shows no labels.

    The label that :func:`.with_one_label` gives to an empty microbatch, whose factor is 0, is not one.
    """
    labels = batch.get('labels') if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        return None
    has_label = labels != IGNORE_INDEX
    mask = batch.get('attention_mask')
    if isinstance(mask, torch.Tensor) and mask.shape == labels.shape:
        has_label = has_label & (mask != 0)
    placeholder = with_one_label(batch)['labels']
    return has_label[:, 1:].any() & (labels != placeholder).any()
