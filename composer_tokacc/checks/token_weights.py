# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures the weight of each token in the gradient that was computed, in any trainer or loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.checks.logits import logits_of, measure, node_of, tolerance_of
from composer_tokacc.collectives import get_world_size, values_of_ranks
from composer_tokacc.compat import inner_model, is_in_backward
from composer_tokacc.counting import with_one_label
from composer_tokacc.refusals import NotExactError

SURE = 1e-3
"""The model is sure of a label if the norm of softmax - onehot is smaller than this. (The norm is about 1 - p of the
label.) Then the gradient is mostly round-off."""
OTHER = 0.5
"""If more than this part of the gradient at a position is not explained by a label, the gradient comes from something
else: from a z-loss at a position without a label, or from soft labels."""
MOST_LISTED = 8
"""Number of unequal tokens that a line names."""


class _Backward(NamedTuple):
    """Measurements of one gradient of logits. They stay on the device, because the host would wait to read them."""

    weights: Tensor  # float32 (positions,)
    is_reliable: Tensor  # bool (positions,), whether the weight at a position was measured well enough to count
    num_left_out: Tensor  # number of positions with a loss whose weight does not count
    residual: Tensor  # part of the gradient that no token's cross-entropy explains
    forward: int  # number of its forward, from 0
    has_weight: Tensor  # bool (), whether any token adds to the gradient


@dataclass
class _WatchedForward:
    """A forward whose logits are watched."""

    in_backward: bool
    """Whether it runs in a backward, as activation checkpoints compute a forward again. Then it may get no gradient."""
    has_labels: Tensor | None
    """Whether it has a label that counts by every rule, bool ``()`` on its device. None: the forward gets no labels."""


class TokenWeightsReport:
    """The measurements of :func:`.measure_token_weights` so far. Printed as a table."""

    def __init__(self) -> None:
        self._backwards: list[_Backward] = []
        self._had_forward = False
        self._is_open = True
        self._forwards: list[_WatchedForward] = []
        self._tolerance = 0.0

    @property
    def weights(self) -> list[Tensor]:
        """Weights of tokens, float32 ``(tokens,)``: one tensor for each gradient of logits, in the order they came."""
        return [backward.weights[backward.is_reliable] for backward in self._backwards]

    @property
    def spread(self) -> float:
        """Largest weight divided by the smallest, without signs, of all backwards and ranks; NaN without a weight.

        If ``torch.distributed`` is initialised, every rank must read it.
        """
        extremes = torch.tensor(values_of_ranks(self._extremes()))
        largest = extremes[:, 0].max()
        smallest = extremes[:, 1].min()
        return float(largest / smallest)

    @property
    def residual(self) -> float:
        """Largest part of a gradient of logits that no token's cross-entropy explains (of its norm), on this rank."""
        residuals = [backward.residual for backward in self._backwards]
        if not residuals:
            return float('nan')
        return float(torch.stack(residuals).max())

    @property
    def known_to(self) -> float:
        """By how much round-off may lift the spread of equal weights above 1.

        Twice the error of a weight, because round-off may enlarge one weight and shrink another.
        """
        return 2 * (self._tolerance + self.residual)

    def forwards_without_weight(self) -> list[str]:
        """Returns a sentence for each forward of this rank that adds nothing to the gradient although it has labels."""
        reached = {backward.forward for backward in self._backwards}
        weighed = {backward.forward for backward in self._backwards if backward.has_weight}
        sentences = []
        for number, forward in enumerate(self._forwards):
            is_empty = forward.has_labels is not None and not forward.has_labels
            if number in weighed or forward.in_backward or is_empty:
                continue
            reason = '`backward` did not reach its logits'
            if number in reached:
                reason = 'its gradient is 0'
            sentences.append(f'Forward {number + 1} of {len(self._forwards)} adds nothing to the gradient: {reason}.')
        return sentences

    def unequal_tokens(self) -> str:
        """Returns a line for each backward of this rank that has tokens with another weight than the median."""
        # Most tokens have about the median weight, so a few wrong tokens stand out.
        median = torch.cat(self.weights).median().cpu()
        lines = []
        for number, weights in enumerate(self.weights, start=1):
            line = self._line_of_unequal(weights.cpu() / median)
            if line:
                lines.append(f'backward {number}: {line}')
        return '\n'.join(lines)

    def _line_of_unequal(self, ratios: Tensor) -> str:
        """Names the tokens with another weight than the median, and the range of their weights; empty if none has."""
        is_unequal = (ratios - 1).abs() > self.known_to
        unequal = is_unequal.nonzero().flatten()
        if not len(unequal):
            return ''
        tokens = 'all'
        if len(unequal) < len(ratios):
            numbers = (unequal[:MOST_LISTED] + 1).tolist()
            tokens = f'number {", ".join(map(str, numbers))}'
        low = float(ratios[unequal].min())
        high = float(ratios[unequal].max())
        span = f'{high:.4g}'
        if high - low > self.known_to:
            span = f'{low:.4g} to {high:.4g}'
        return f'{tokens} of {len(ratios):,} tokens with loss: {span} times the median'

    def __deepcopy__(self, memo: object) -> TokenWeightsReport:
        # A copy of the model, such as an average of weights, has copies of the hooks. They must write into this report,
        # and stop when it is closed.
        return self

    def __str__(self) -> str:
        lines = ['backward    tokens       smallest           mean        largest  residual']
        for number, backward in enumerate(self._backwards, start=1):
            weights = backward.weights[backward.is_reliable]
            # There may be no weight that counts.
            low = mean = high = torch.nan
            if len(weights):
                low = float(weights.min())
                mean = float(weights.mean())
                high = float(weights.max())
            columns = f'{number:>8}{len(weights):>10,}{low:>15.7g}{mean:>15.7g}{high:>15.7g}'
            lines.append(f'{columns}{float(backward.residual):>10.1e}')
        # Only of this rank, without a collective, because a loop may print only on rank 0.
        largest, smallest = self._extremes()
        if smallest != torch.inf:
            are_equal = largest <= smallest * (1 + self.known_to)
            verb = 'weigh' if are_equal else 'do NOT weigh'
            place = ''
            if get_world_size() > 1:
                place = ' on this rank (`.spread` asks all)'
            ratio = f'largest over smallest weight {largest / smallest:.7f}'
            lines.append(f'tokens {verb} the same, to {self.known_to:.0e}{place}: {ratio}')
        num_left_out = sum(int(backward.num_left_out) for backward in self._backwards)
        if num_left_out:
            lines.append(
                f'{num_left_out:,} left out: 1 - p of the label below {SURE}, or a gradient that is of no label'
            )
        num_unread = len(self._forwards) - len(self._backwards)
        if num_unread > 0:
            lines.append(f'{num_unread:,} of {len(self._forwards):,} forwards had no gradient at their logits')
        return '\n'.join(lines)

    def _extremes(self) -> tuple[float, float]:
        """Returns the largest and the smallest size of a weight on this rank; -inf and inf without a weight."""
        sizes_of_backwards = [weights.abs().cpu() for weights in self.weights]
        # An empty tensor comes first, because `cat` needs at least one.
        sizes = torch.cat([torch.zeros(0), *sizes_of_backwards])
        if not len(sizes):
            return -torch.inf, torch.inf
        return float(sizes.max()), float(sizes.min())

    def _watch(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: Any,
        *,
        is_outer: bool,
    ) -> None:
        """A forward hook that finds the logits and adds a hook that measures their gradient."""
        if not torch.is_grad_enabled() or not self._is_open:
            return
        self._had_forward = True
        logits = _logits_in(outputs, is_outer=is_outer)
        mask = None
        if logits is None:
            # TRL's fused head returns only log-probabilities of the labels.
            logits = getattr(outputs, 'log_probs', None)
            mask = getattr(outputs, 'label_mask', None)
        if logits is None:
            return
        node, index = node_of(logits)
        if node is None:
            return
        batch = kwargs
        if 'labels' not in kwargs:
            batch = next(iter(args), None)
        has_labels = _has_labels(batch)
        # A module around this one may return the same logits again. The number of their forward is noted at their node.
        forward_numbers: Any = node.metadata
        if (self, index) in forward_numbers:
            forward = self._forwards[forward_numbers[self, index]]
            if forward.has_labels is None:
                forward.has_labels = has_labels
            return
        number = len(self._forwards)
        forward_numbers[self, index] = number
        self._forwards.append(_WatchedForward(is_in_backward(), has_labels))
        # Detached, because a graph whose hook holds its own logits is never freed.
        node.register_prehook(
            partial(
                self._measure,
                logits=logits.detach(),
                mask=mask,
                index=index,
                number=number,
            )
        )

    def _measure(
        self,
        gradients: Sequence[Tensor | None],
        *,
        logits: Tensor,
        mask: Tensor | None,
        index: int,
        number: int,
    ) -> None:
        """A hook of the graph that measures a gradient of logits and does not change it."""
        gradient = gradients[index]
        if gradient is None or not self._is_open:
            return
        self._tolerance = max(self._tolerance, tolerance_of(gradient.dtype))
        if mask is not None:
            # The gradient by a log-probability is the weight itself, negated.
            weights = -gradient.float().flatten()
            zero = gradient.new_zeros(())
            is_reliable = mask.flatten() & (weights != 0)
            self._backwards.append(
                _Backward(
                    weights,
                    is_reliable,
                    num_left_out=zero.long(),
                    residual=zero,
                    forward=number,
                    has_weight=is_reliable.any(),
                )
            )
            return
        measured = measure(logits, gradient)
        has_loss = measured.targets != IGNORE_INDEX
        # Positions of these two kinds say nothing about weights.
        is_sure = measured.plain_norms < SURE
        is_other = measured.residual_norms > OTHER * measured.norms
        is_reliable = has_loss & ~is_sure & ~is_other  # a NaN is in neither kind, so it is shown
        self._backwards.append(
            _Backward(
                measured.weights.flatten(),
                is_reliable.flatten(),
                num_left_out=has_loss.sum() - is_reliable.sum(),
                residual=measured.residual,
                forward=number,
                has_weight=has_loss.any(),
            )
        )

    def _why_empty(self) -> str:
        """Returns why nothing was measured."""
        if not self._had_forward:
            return 'it made no forward with gradients. Give the module that is trained, whose forward makes the logits'
        if not self._forwards:
            return 'its outputs hold no logits (rows, width, vocabulary). Turn a fused loss off; call `model()` itself'
        return 'no gradient came to its logits. Call `backward` inside, of a loss of the logits that it returns'


@contextmanager
def measure_token_weights(model: torch.nn.Module) -> Iterator[TokenWeightsReport]:
    """Measures the weight of each token in the gradient, in any code that trains the model inside of the context.

    A token of weight w adds ``w * (softmax(logits) - onehot(label))`` to the gradient by its logits. Hooks read w off
    this gradient, without labels. Compiled models run eagerly inside of the context. Nothing else changes. Enter it for
    one optimizer step, because steps with different numbers of tokens rightly have different weights. A deep copy that
    is made of the model inside of the context is measured as well, because it has the same hooks.

    Args:
        model: A module whose forward returns logits ``(rows, width, vocabulary)``: as they are, in a tuple or as
            ``.logits``. It may also wrap a Hugging Face model (Composer, PEFT, Lightning), or be wrapped in DDP or
            ``torch.compile``.

    Yields:
        ``weights``, ``spread`` and ``residual`` so far.

    Raises:
        TypeError: The model is not a module.
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
        raise TypeError(f'`model` must be a torch.nn.Module, got: {model!r}. Pass the module that is trained.')
    report = TokenWeightsReport()
    inner = inner_model(model)
    hooks = []
    for part in inner.modules():
        # A trainer may call only a part of the model. Parts of Hugging Face models with a head have this method.
        if part is inner or hasattr(part, 'get_output_embeddings'):
            watch = partial(report._watch, is_outer=part is inner)
            hooks.append(part.register_forward_hook(watch, with_kwargs=True))
    try:
        # No gradient comes to the logits of a compiled forward that also computes the loss.
        with torch.compiler.set_stance('force_eager'):
            yield report
    finally:
        report._is_open = False
        for hook in hooks:
            hook.remove()
    if not report._backwards:
        name = type(inner).__name__
        raise NotExactError(f'No token weight was measured of {name}: {report._why_empty()}. See docs/token_weights.md')


def _logits_in(outputs: Any, *, is_outer: bool) -> Tensor | None:
    """Returns the logits in outputs. Only the outermost module may return them without a name."""
    if is_outer and isinstance(outputs, (tuple, list)):
        for entry in outputs:
            logits = logits_of(entry)
            if logits is not None:
                return logits
        return None
    if not is_outer and isinstance(outputs, Tensor):
        return None
    return logits_of(outputs)


def _has_labels(batch: Any) -> Tensor | None:
    """Returns whether a batch has a label that counts by every rule, bool ``()``; None if it shows no labels.

    The label that :func:`.with_one_label` gives to an empty microbatch does not count, because its factor is 0. A batch
    has it if that function would not change the batch. A real label 0 at the same place cannot be told from it.
    """
    if not isinstance(batch, Mapping):
        return None
    labels = batch.get('labels')
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        return None
    has_label = labels != IGNORE_INDEX
    mask = batch.get('attention_mask')
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        has_label = has_label & (mask != 0)
    with_written_label = with_one_label(batch)['labels']
    return has_label[:, 1:].any() & (labels != with_written_label).any()
