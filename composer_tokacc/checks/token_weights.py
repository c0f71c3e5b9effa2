# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures the weight of each token in the gradient of a step, in any trainer or loop.

A token that carries loss has a weight at the position whose logits predict it. `logits.py` reads it off the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.checks.logits import logits_of, measure, tolerance_of
from composer_tokacc.collectives import gather_if_grouped, get_world_size
from composer_tokacc.compat import inner_model, is_in_backward
from composer_tokacc.counting import LossRule, with_one_label
from composer_tokacc.graph import edge_of
from composer_tokacc.refusals import NotExactError

SURE = 1e-3
"""If the norm of softmax - onehot is smaller than this, the model is sure of the label, and the gradient is mostly
round-off. The norm is about 1 - p, where p is the probability of the label."""
OTHER = 0.5
"""If more than this share of the gradient's norm at a position is not explained by a label, the gradient comes from
something else: from a z-loss at a position without a label, or from soft labels."""
MOST_LISTED = 8
"""Number of unequal tokens that a line names at most."""


@dataclass(eq=False)
class _WatchedForward:
    """A forward whose logits are watched, and the measurements of the gradients that the logits got.

    The tensors stay on the device until the report is read, because the host would wait for the device to copy them.
    """

    in_backward: bool
    """Whether it ran inside a backward, because an activation checkpoint has run a forward again. Then its logits may
    get no gradient."""
    num_labels: Tensor | None
    """See :func:`_num_labels`. An int64 ``()`` on the device of the labels."""
    weights: Tensor
    """Weights of its positions, float32 ``(positions,)``: 0 without loss, and added over its backwards, as gradients
    are. A single 0 until a gradient comes."""
    is_unclear: Tensor
    """True at positions whose gradient does not tell the weight of the token, bool ``(positions,)``. A single False
    until a gradient comes."""
    residual: Tensor
    """Share of the gradient's norm that no token's cross-entropy explains, float32 ``()``."""
    has_gradient: bool = False
    """Whether its logits got a gradient."""

    @classmethod
    def without_gradient(cls, num_labels: Tensor | None, device: torch.device) -> _WatchedForward:
        """Makes the record of a forward whose logits have no gradient yet. ``device`` is the one of the logits."""
        zero = torch.zeros((), device=device)
        return cls(
            in_backward=is_in_backward(),
            num_labels=num_labels,
            weights=zero,
            is_unclear=zero.bool(),
            residual=zero,
        )

    @property
    def reliable_weights(self) -> Tensor:
        """Weights of its tokens, ``(tokens,)``, without those that could not be measured."""
        return self.weights[(self.weights != 0) & ~self.is_unclear]

    def add_gradient(self, logits: Tensor, gradient: Tensor) -> None:
        """Adds the weights that the gradient by the logits shows."""
        measured = measure(logits, gradient)
        # The weight cannot be read off the gradient if the model is sure of the label, or if there is another loss. A
        # weight of NaN fulfils neither condition, so the report shows it.
        is_sure = measured.plain_norms < SURE
        is_unexplained = measured.residual_norms > OTHER * measured.norms
        has_label = measured.targets != IGNORE_INDEX
        is_unclear = has_label & (is_sure | is_unexplained)
        self.has_gradient = True
        self.weights = self.weights + measured.weights.flatten()
        self.is_unclear = self.is_unclear | is_unclear.flatten()
        self.residual = torch.maximum(self.residual, measured.residual)

    def add_gradient_of_log_probs(self, mask: Tensor, gradient: Tensor) -> None:
        """Adds the weights that the gradient by the log-probabilities of labels shows.

        It is the weight itself, negated. ``mask`` is False where a label is ignored.
        """
        weights = -gradient.float().flatten()
        self.has_gradient = True
        self.weights = self.weights + weights.where(mask.flatten(), 0)

    def fault(self, name: str) -> str | None:
        """Returns a sentence if the forward adds nothing to the gradient, or not enough; None: it adds enough.

        ``name`` is what the sentence calls the forward.
        """
        if self.in_backward:
            return None  # it repeats another forward, which is judged by itself
        has_loss = (self.weights != 0) | self.is_unclear
        num_tokens = int(has_loss.sum())
        num_labels = 1 if self.num_labels is None else int(self.num_labels)
        if num_tokens < num_labels:
            if num_tokens > 0:
                return (
                    f'{name} adds only {num_tokens} of its {num_labels} labels to the gradient. Set labels that '
                    'the loss leaves out to -100, or let the loss use all of them.'
                )
            if self.has_gradient:
                return f'{name} adds nothing to the gradient: its gradient is 0.'
            return f'{name} adds nothing to the gradient: `backward` did not reach its logits.'
        if num_tokens > 0 and not len(self.reliable_weights):
            return (
                f'{name} has no token whose weight can be measured: the model is sure of all labels (1 - p below '
                f'{SURE}), or most of the gradient is not of a cross-entropy. Test with a fresh model and '
                'without the other loss.'
            )
        return None

    def columns(self) -> str:
        """Returns the line of the report about this forward, without its number."""
        weights = self.reliable_weights
        low = mean = high = torch.nan  # there may be no reliable weight
        if len(weights):
            low = float(weights.min())
            mean = float(weights.mean())
            high = float(weights.max())
        return f'{len(weights):>10,}{low:>15.7g}{mean:>15.7g}{high:>15.7g}{float(self.residual):>10.1e}'


class TokenWeightsReport:
    """The measurements of :func:`.measure_token_weights` so far. Printed as a table."""

    def __init__(self) -> None:
        self._forwards: list[_WatchedForward] = []  # forwards that made logits
        self._had_forward = False  # whether there was any forward with gradients
        self._is_open = True  # False after the end of the context: nothing is measured any more
        self._tolerance = 0.0  # largest error of a weight, of all types of gradients

    @property
    def weights(self) -> list[Tensor]:
        """Weights of tokens, float32 ``(tokens,)``: one tensor for each forward whose logits got a gradient, in order.

        If several backwards reach the logits of a forward, their weights are added, as their gradients are.
        """
        return [forward.reliable_weights for forward in self._forwards if forward.has_gradient]

    @property
    def spread(self) -> float:
        """Largest absolute weight divided by the smallest, of all forwards and ranks. NaN if there is no weight.

        If ``torch.distributed`` is initialised, every rank must read it.
        """
        extremes = torch.tensor(gather_if_grouped(self._extremes()))  # (ranks, 2)
        largest = extremes[:, 0].max()
        smallest = extremes[:, 1].min()
        return float(largest / smallest)

    @property
    def residual(self) -> float:
        """Share of a gradient's norm that no token's cross-entropy explains. The largest share on this rank."""
        residuals = [forward.residual for forward in self._forwards if forward.has_gradient]
        if not residuals:
            return float('nan')
        return float(torch.stack(residuals).max())

    @property
    def known_to(self) -> float:
        """The most by which round-off may lift the spread of equal weights above 1.

        It is twice the error of a weight, because round-off may enlarge one weight and shrink another. If it leaves a
        residual in the gradient, it may change the weight by as much.
        """
        return 2 * (self._tolerance + self.residual)

    def forwards_without_weight(self) -> list[str]:
        """Returns a sentence for each forward of this rank that adds nothing to the gradient, or not enough.

        All labels of a forward should add to it, unless they are ignored. If a forward gets no labels, some token
        should. A forward is also named if none of its weights could be measured, because then :attr:`spread` says
        nothing about it.
        """
        sentences = []
        for number, forward in enumerate(self._forwards, start=1):
            sentence = forward.fault(f'Forward {number} of {len(self._forwards)}')
            if sentence is not None:
                sentences.append(sentence)
        return sentences

    def unequal_tokens(self) -> str:
        """Returns a line for each forward of this rank that has tokens with another weight than the median.

        The median is over the tokens of all forwards of this rank.
        """
        if not self.weights:
            return ''
        # Most tokens have about the median weight, so a few wrong tokens stand out.
        median = torch.cat(self.weights).nanmedian().cpu()
        lines = []
        for number, forward in enumerate(self._forwards, start=1):
            ratios = forward.reliable_weights.cpu() / median
            # NaN in one weight makes `known_to` NaN. Then only the tokens without a number are unequal.
            is_unequal = ratios.isnan() | ((ratios - 1).abs() > self.known_to)
            if is_unequal.any():
                unequal = ratios[is_unequal]
                numbers = is_unequal.nonzero().flatten() + 1
                lines.append(
                    f'forward {number}: {len(unequal):,} of {len(ratios):,} tokens with loss weigh {unequal.min():.4g} '
                    f'to {unequal.max():.4g} times the median, such as {numbers[:MOST_LISTED].tolist()}'
                )
        return '\n'.join(lines)

    def __deepcopy__(self, memo: object) -> TokenWeightsReport:
        # A copy of the model, such as an average of weights, has copies of the hooks. They must write into this report,
        # and stop at the end of the context.
        return self

    def __str__(self) -> str:
        lines = [' forward    tokens       smallest           mean        largest  residual']
        num_unclear = 0
        num_without_gradient = 0
        for number, forward in enumerate(self._forwards, start=1):
            if not forward.has_gradient:
                num_without_gradient += 1
                continue
            num_unclear += int(forward.is_unclear.sum())
            lines.append(f'{number:>8}{forward.columns()}')
        smallest = self._extremes()[1]
        if smallest != torch.inf:  # no token has a weight, or all weights are inf
            lines.append(self._verdict())
        if num_unclear:
            lines.append(
                f'{num_unclear:,} left out: 1 - p of the label below {SURE}, or a gradient that no label explains'
            )
        if num_without_gradient:
            lines.append(
                f'{num_without_gradient:,} of {len(self._forwards):,} forwards had no gradient at their logits'
            )
        return '\n'.join(lines)

    def _verdict(self) -> str:
        """Returns a line that says whether all tokens of this rank weigh the same. There must be a weight.

        Only of this rank, because a loop may print on rank 0 only, and a collective would wait for the other ranks.
        """
        largest, smallest = self._extremes()
        are_equal = largest <= smallest * (1 + self.known_to)
        verb = 'weigh' if are_equal else 'do NOT weigh'
        place = ''
        if get_world_size() > 1:
            place = ' on this rank (`.spread` asks all)'
        ratio = f'largest over smallest weight {largest / smallest:.7f}'
        return f'tokens {verb} the same, to {self.known_to:.0e}{place}: {ratio}'

    def _extremes(self) -> tuple[float, float]:
        """Returns the largest and the smallest absolute weight on this rank; -inf and inf if there is no weight."""
        sizes_of_forwards = [weights.abs().cpu() for weights in self.weights]
        # An empty tensor comes first, because `cat` needs at least one.
        sizes = torch.cat([torch.zeros(0), *sizes_of_forwards])
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
        """Finds the logits of a forward, and adds a hook that measures their gradient. It is a forward hook of torch.

        ``is_outer`` says whether the module is the whole model, and not a part of it.
        """
        if not torch.is_grad_enabled() or not self._is_open:
            return
        self._had_forward = True
        watched = _output_to_watch(outputs, is_outer=is_outer)
        if watched is None:
            return
        node, index = edge_of(watched.values)
        if node is None:  # they depend on no parameter that is trained
            return
        batch = kwargs
        if 'labels' not in kwargs:
            batch = next(iter(args), None)
        num_labels = _num_labels(batch)
        # The hook may run twice for the same logits: for a part of the model, and for the whole model around it. They
        # are measured once. So the forward is noted in the node of the graph that made the logits, and the second call
        # finds it there. If the part got no labels, the labels of the whole model count.
        metadata_of_node: Any = node.metadata
        earlier: _WatchedForward | None = metadata_of_node.get((self, index))
        if earlier is not None:
            if earlier.num_labels is None:
                earlier.num_labels = num_labels
            return
        forward = _WatchedForward.without_gradient(num_labels, watched.values.device)
        metadata_of_node[self, index] = forward
        self._forwards.append(forward)
        if watched.mask is not None:
            add_gradient = partial(forward.add_gradient_of_log_probs, watched.mask)
        else:
            # Detached, because a graph whose hook holds its own logits is never freed.
            add_gradient = partial(forward.add_gradient, watched.values.detach())
        node.register_prehook(partial(self._measure, index=index, add_gradient=add_gradient))

    def _measure(
        self,
        gradients: Sequence[Tensor | None],
        *,
        index: int,
        add_gradient: Callable[[Tensor], None],
    ) -> None:
        """Measures a gradient of logits and does not change it. It is a hook at the node that made the logits.

        Args:
            gradients: The gradients with respect to all outputs of the node.
            index: Number of the logits among the outputs.
            add_gradient: Reads the weights off the gradient, and adds them to those of the forward.
        """
        gradient = gradients[index]
        if gradient is None or not self._is_open:
            return
        self._tolerance = max(self._tolerance, tolerance_of(gradient.dtype))
        add_gradient(gradient)

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
        # A trainer may call only a part of the model. If it is a Hugging Face model, it has this method.
        if part is inner or hasattr(part, 'get_output_embeddings'):
            watch = partial(report._watch, is_outer=part is inner)
            hooks.append(part.register_forward_hook(watch, with_kwargs=True))
    try:
        # If a compiled forward computes the loss, its logits get no gradient, so the model runs eagerly.
        with torch.compiler.set_stance('force_eager'):
            yield report
    finally:
        report._is_open = False
        for hook in hooks:
            hook.remove()
    if not report.weights:
        name = type(inner).__name__
        raise NotExactError(f'No token weight was measured of {name}: {report._why_empty()}. See docs/token_weights.md')


class _WatchedOutput(NamedTuple):
    """The logits of a forward, or the log-probabilities of its labels."""

    values: Tensor
    mask: Tensor | None
    """None for logits. For log-probabilities bool in their shape, False where a label is ignored."""


def _output_to_watch(outputs: Any, *, is_outer: bool) -> _WatchedOutput | None:
    """Returns the output whose gradient tells the weights of tokens. For ``is_outer`` see :func:`_logits_in`."""
    logits = _logits_in(outputs, is_outer=is_outer)
    if logits is not None:
        return _WatchedOutput(logits, mask=None)
    # TRL's fused head returns only log-probabilities of the labels, and a mask of them.
    log_probs = getattr(outputs, 'log_probs', None)
    mask = getattr(outputs, 'label_mask', None)
    if log_probs is not None and mask is not None:
        return _WatchedOutput(log_probs, mask)
    return None


def _logits_in(outputs: Any, *, is_outer: bool) -> Tensor | None:
    """Returns the logits in the outputs of a module.

    If the module is a part of the model, its logits need the name ``logits``, because its other tensors may be hidden
    states. The whole model (``is_outer``) may also return them without a name, by themselves or in a tuple.
    """
    if not is_outer:
        if isinstance(outputs, Tensor):
            return None
        return logits_of(outputs)
    entries = [outputs]
    if isinstance(outputs, (tuple, list)):
        entries = outputs
    for entry in entries:
        logits = logits_of(entry)
        if logits is not None:
            return logits
    return None


def _num_labels(batch: Any) -> Tensor | None:
    """Returns how many labels of a batch count by every loss rule, int64 ``()``. None: it has no 2D ``labels``.

    These are the labels that the strictest rule counts, ``'causal_attended'``. The label that TokenAccumulation writes
    into a batch without labels, see :func:`.with_one_label`, does not count, because it multiplies the loss by 0. If
    a user's only label has the same place and id, it cannot be told apart, and does not count either.
    """
    if not isinstance(batch, Mapping):
        return None
    labels = batch.get('labels')
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
        return None
    if not isinstance(batch.get('attention_mask'), Tensor):  # some models take other objects as masks
        batch = {**batch, 'attention_mask': None}
    num_labels = LossRule.CAUSAL_ATTENDED.counted(batch).sum()
    # If the batch has the written label, writing it again changes nothing.
    has_written_label = (labels == with_one_label(batch)['labels']).all()
    is_empty = (num_labels == 1) & has_written_label
    return num_labels.masked_fill(is_empty, 0)
