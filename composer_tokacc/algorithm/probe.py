# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a run's own model answers to a few rows: the loss of every token, and the loss it would train on."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from composer.models import HuggingFaceModel
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from composer_tokacc.algorithm.loss_terms import LossTerms, router_loss_of
from composer_tokacc.algorithm.weighted_labels import Weighing, weigh_labels
from composer_tokacc.counting import (
    IGNORE_INDEX,
    LOSS_RULES,
    LOSS_WEIGHTS,
    Batch,
    labels_of,
    loss_mask,
    with_own_tensors,
)

__all__ = [
    'Answer',
    'Probe',
    'confirm_in_training',
    'find_loss_rule',
    'logits_of',
    'mean_token_loss',
    'predicting',
    'vocabulary_of',
]

NOISE_FACTOR = 8
"""Tolerance over the measured round-off: kernels for other shapes round every sum, the measurement only its result."""
FLOOR = 64 * torch.finfo(torch.float32).eps
"""Tolerance of a loss of size 1 where rounding moves nothing. Independent rows of 13 text families differ by at most
3e-6, the weakest leak (BERT, freshly initialised, packed) by 2e-3."""
MAX_TOKENS = 2048
"""Tokens whose logits are turned to float32 at a time: 1.2 GiB for a vocabulary of 150,000."""
LARGE_LOGITS = 4.0
"""Standard deviation of logits with which a few tokens of a vocabulary stand out, and losses stay small."""
NUM_LABELS = 4
"""Labels of a row that is asked for the rule: few, so that one of them moves the mean."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model says of a batch.

    Args:
        own: The model's own loss, the term that is a mean over tokens.
        logits: ``(rows, width, vocabulary)``, or None where the model gives none.
        by_sample: The terms of its loss that are declared as means over samples.
        has_router_loss: Whether it returns the load-balancing loss of a mixture of experts as well.
        weighted: The weighted mean of its tokens' losses, as they were when they were weighed; None: none were.
        eps: Machine epsilon of the loss as the model returned it; not less than that of float32.
        gradient: Of the loss by the output of the layer that makes the logits, of their shape; None: not asked for, or
            not there.
    """

    own: float
    logits: torch.Tensor | None
    by_sample: float | None = None
    has_router_loss: bool = False
    weighted: float | None = None
    eps: float = torch.finfo(torch.float32).eps
    gradient: torch.Tensor | None = None


class Probe:
    """The model's own forward and loss, without gradients, dropout or autocast.

    Args:
        forward: The model's forward, as the trainer calls it.
        loss: Its loss, of outputs and batch.
        model: The module, for its mode and its weights' precision.
        precision: Context in which the trainer runs the forward. Weights in float32 are probed without it, because in
            float32 a leak of 2e-3 is plain to see and in bfloat16 it is not.
        terms: What the terms of its loss are means over; None: all over tokens.
    """

    def __init__(
        self,
        forward: Callable[[Any], Any],
        loss: Callable[[Any, Any], Any],
        model: torch.nn.Module,
        precision: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        terms: LossTerms | None = None,
    ) -> None:
        self._forward = forward
        self._loss = loss
        self._terms = terms or LossTerms(None)
        self.model = model
        self._precision = precision
        self._asks_in_training = False
        self._asks_gradients_of: int | None = None
        self._last_layers: list[torch.nn.Module] = []
        """The last two whose output has a vector for every position: most often a norm, and what makes logits."""
        self.weighing_rule: str | None = None
        """The rule of the labels, once batches with ``loss_weights`` are to be weighed by them."""
        parameter = next(model.parameters(), None)
        self._in_full = parameter is not None and parameter.dtype == torch.float32
        self._device_type = parameter.device.type if parameter is not None else 'cpu'

    @classmethod
    def of_model(cls, model: Any) -> Probe:
        """Of a ComposerModel, or of a Hugging Face model that computes its own loss."""
        if hasattr(model, 'eval_forward'):
            return cls(model, lambda outputs, batch: model.loss(outputs, batch), model)
        named = inspect.signature(model.forward).parameters

        def forward(batch: Batch) -> Any:
            return model(**{key: value for key, value in batch.items() if key in named})

        return cls(forward, lambda outputs, batch: outputs['loss'], model)

    def ask(self, batch: Batch) -> Answer:
        """The model's answer to a batch on its device; eager, in eval mode, leaving random numbers as they were."""
        undisturbed = _undisturbed(self.model, training=self._asks_in_training)
        with torch.no_grad(), undisturbed, torch.compiler.set_stance('force_eager'):
            answer = self._in_full_precision(batch) if self._in_full else None
            if answer is None:
                answer = self._answer(batch, self._precision())
        if answer.logits is not None:
            _check_width(answer.logits, batch)
        return answer

    @contextlib.contextmanager
    def with_gradients(self, answer: Answer) -> Iterator[None]:
        """Answers with the gradient of the loss by logits like those of an answer, but for sharded models.

        FSDP gathers and frees parameters in hooks on the outputs of a forward, for one backward each.
        """
        is_sharded = any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in self.model.modules())
        if answer.logits is not None and not is_sharded:
            self._asks_gradients_of = answer.logits.shape[-1]
        try:
            yield
        finally:
            self._asks_gradients_of = None

    @contextlib.contextmanager
    def in_training(self) -> Iterator[None]:
        """Answers as in training mode, but for dropout."""
        self._asks_in_training = True
        try:
            yield
        finally:
            self._asks_in_training = False

    def is_random_in_training(self, batch: Batch) -> bool:
        """Whether the model's own loss differs, asked twice in training mode, even without dropout."""
        full = torch.autocast(self._device_type, enabled=False)
        losses = []
        with torch.no_grad(), _undisturbed(self.model, training=True), torch.compiler.set_stance('force_eager'):
            for seed in range(2):
                torch.manual_seed(seed)
                losses.append(self._answer(batch, full if self._in_full else self._precision()).own)
        return losses[0] != losses[1]

    def _in_full_precision(self, batch: Batch) -> Answer | None:
        """None where a kernel knows half precision only, as flash attention does."""
        try:
            return self._answer(batch, torch.autocast(self._device_type, enabled=False))
        except RuntimeError:
            self._in_full = False
            return None

    def _answer(self, batch: Batch, precision: contextlib.AbstractContextManager[Any]) -> Answer:
        # A copy, the same for forward and loss as in training: models that write into it change no other answer.
        batch, weighing = self._weighed(with_own_tensors(batch))
        given = dict(batch)
        leaves: list[torch.Tensor] = []

        def begin_graph(module: torch.nn.Module, args: Any, output: Any) -> Any:
            if not _is_of_positions(output, batch) or output.shape[-1] != self._asks_gradients_of:
                return None
            torch.set_grad_enabled(True)  # of what follows; the layers before keep nothing
            leaves[:] = [output.detach().requires_grad_()]
            return leaves[0]

        with precision, _hooked(_leaves(self.model) if self._asks_gradients_of else [], begin_graph), torch.no_grad():
            outputs = self._forward(given)
            every = self._loss(outputs, given)  # once, as what it weighs is added up
            loss = self._terms.token_term(self._terms.split(every, outputs))
            by_sample = self._terms.sample_term(every)
        gradient = None
        if leaves and loss.requires_grad:
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad(loss.float().mean(), leaves, allow_unused=True)
        if weighing is not None:
            weighing.check_used()
        return Answer(
            own=loss.float().mean().item(),
            logits=_detached(logits_of(outputs)),
            by_sample=None if by_sample is None else by_sample.item(),
            has_router_loss=router_loss_of(outputs) is not None,
            weighted=None if weighing is None else weighing.mean.item(),
            eps=max(torch.finfo(loss.dtype).eps, torch.finfo(torch.float32).eps),
            gradient=gradient,
        )

    def _weighed(self, batch: Batch) -> tuple[Batch, Weighing | None]:
        """The batch whose labels weigh what its ``loss_weights`` say."""
        if self.weighing_rule is None or LOSS_WEIGHTS not in batch:
            return batch, None
        counted = loss_mask(batch, self.weighing_rule)
        weights = batch[LOSS_WEIGHTS].masked_fill(~counted, 0)
        num_tokens, total = int(counted.sum()), float(weights.sum())
        return weigh_labels(batch, weights, num_tokens=num_tokens, total=total) if total else (batch, None)

    @contextlib.contextmanager
    def other_words(self, positions: torch.Tensor) -> Iterator[None]:
        """Answers as if other words stood at some positions, ``(rows, width)`` bool; images stay."""

        def change(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return torch.where(positions[..., None], output.roll(1, dims=-1), output)

        model: Any = next(module for module in self.model.modules() if hasattr(module, 'get_input_embeddings'))
        with _hooked([model.get_input_embeddings()], change):
            yield

    @contextlib.contextmanager
    def varied(self) -> Iterator[None]:
        """Answers as of other weights: every channel of a norm is scaled by a factor of its own.

        The weights of fresh norms are all alike, and hide from the loss, not from the gradient, that a norm behind the
        rotary embedding (HunYuan) makes attention depend on absolute positions, which trimming on the left moves.
        """

        def scale(module: torch.nn.Module, args: Any, output: Any) -> Any:
            weight = getattr(module, 'weight', None)
            if not isinstance(weight, torch.Tensor) or not isinstance(output, torch.Tensor):
                return output
            if weight.dim() != 1 or output.dim() == 0 or output.shape[-1] != len(weight):
                return output
            draws = torch.rand(len(weight), generator=torch.Generator().manual_seed(len(weight)))
            return output * (0.75 + 0.5 * draws).to(output)

        with _hooked(_leaves(self.model), scale):
            yield

    @contextlib.contextmanager
    def unlike_rows(self, batch: Batch, answer: Answer, is_large: Sequence[bool]) -> Iterator[None]:
        """Answers as of rows that differ more: some with nearly equal logits, and some where a few stand out.

        What stands on padding differs from what stands in the row, so that a mean over columns shows as well.

        Args:
            batch: Rows like those of which :meth:`noise` was asked before.
            answer: To those rows.
            is_large: Of each row, whether its logits are large; rows behind these stay as they are.
        """
        high = logit_factor(answer)
        rest = [1.0] * (len(labels_of(batch)) - len(is_large))
        states = torch.tensor([*(2.0 if large else 1.0 for large in is_large), *rest])[:, None, None]
        logits = torch.tensor([*(high / 2 if large else high / 16 for large in is_large), *rest])[:, None, None]
        # The mask of an encoder may be as wide as its decoder's labels, until its rows are trimmed.
        mask = batch.get('decoder_attention_mask' if 'decoder_input_ids' in batch else 'attention_mask')
        if isinstance(mask, torch.Tensor) and mask.shape == labels_of(batch).shape:
            logits = logits * torch.where(mask.cpu() == 0, 4.0, 1.0)[..., None]
        vocabulary = None if answer.logits is None else answer.logits.shape[-1]

        def scale(module: torch.nn.Module, args: Any, output: Any) -> Any:
            if not _is_of_positions(output, batch):
                return output
            if output.shape[-1] == vocabulary or module is self._last_layers[-1]:
                return output * logits.to(output)
            return output * states.to(output) if module in self._last_layers else output

        with _hooked(_leaves(self.model), scale):
            yield

    @contextlib.contextmanager
    def rounded_otherwise(self) -> Iterator[None]:
        """Answers with every layer's output moved by its last digit, up or down."""
        generators: dict[torch.device, torch.Generator] = {}

        def move(module: torch.nn.Module, args: Any, output: Any) -> Any:
            if not isinstance(output, torch.Tensor) or not output.dtype.is_floating_point:
                return output
            if output.device not in generators:
                generators[output.device] = torch.Generator(output.device).manual_seed(0)
            up = torch.rand(output.shape, generator=generators[output.device], device=output.device) < 0.5
            eps = torch.finfo(output.dtype).eps
            return output * torch.where(up, 1 + eps, 1 - eps).to(output.dtype)

        with _hooked(_leaves(self.model), move):
            yield

    def noise(self, batch: Batch, rule: str, answer: Answer) -> float:
        """How far one rounding at every layer moves a token's loss (the whole loss, where the model gives no logits).

        Running the same rows in another order or number would not do: kernels then make the very same sums, and the
        difference is 0.
        """

        def note(module: torch.nn.Module, args: Any, output: Any) -> None:
            if _is_of_positions(output, batch):
                self._last_layers = [*self._last_layers[-1:], module]

        with self.rounded_otherwise(), _hooked(_leaves(self.model), note):
            moved = self.ask(batch)
        if answer.logits is None or moved.logits is None:
            return abs(moved.own - answer.own)
        difference = token_losses(moved.logits, batch, rule) - token_losses(answer.logits, batch, rule)
        return difference.abs().max().item() if len(difference) else 0.0

    def besides(self, batch: Batch, rule: str, answer: Answer) -> float | None:
        """What the model's own loss holds besides the mean of its tokens' cross-entropies, of the very same logits.

        The round-off of all layers is in both, and so in neither: a term of a millionth of the loss shows. None: the
        model gives no logits, or no token is counted.
        """
        if answer.weighted is not None:
            return answer.own - answer.weighted
        if answer.logits is None or not len(losses := token_losses(answer.logits, batch, rule)):
            return None
        return answer.own - losses.double().mean().item()


def logit_factor(answer: Answer) -> float:
    """What logits are multiplied by to be large; where there are none, what goes into a fused loss."""
    size = 0.5 if answer.logits is None else answer.logits.float().std().nan_to_num(nan=0.0).item()
    return 2.0 ** round(math.log2(LARGE_LOGITS / min(max(size, 1e-3), 1e3)))


def tolerance(size: float, noise: float) -> float:
    """By how much two losses of about ``size`` may differ and be the same."""
    return NOISE_FACTOR * noise + FLOOR * (1 + abs(size))


def tolerance_besides(size: float, noise: float, eps: float) -> float:
    """The same of :meth:`Probe.besides`, which sees no round-off but that of the loss itself, of machine epsilon."""
    return NOISE_FACTOR * (noise + eps * (1 + abs(size)))


def logits_of(outputs: Any) -> torch.Tensor | None:
    """The logits in a model's outputs, ``(rows, width, vocabulary)``, or None where it gives none."""
    logits = outputs.get('logits') if isinstance(outputs, Mapping) else getattr(outputs, 'logits', None)
    if logits is None and isinstance(outputs, torch.Tensor):
        logits = outputs
    return logits if isinstance(logits, torch.Tensor) and logits.dim() == 3 else None


def vocabulary_of(model: Any) -> int | None:
    """How many ids a label may have, by the last layer of a Hugging Face model; None where that is not known."""
    model = getattr(model, 'module', model)
    if not isinstance(model, HuggingFaceModel):
        return None
    try:
        return getattr(model.model.get_output_embeddings(), 'out_features', None)
    except (AttributeError, NotImplementedError):
        return None


def predicting(batch: Batch, rule: str) -> torch.Tensor:
    """At which positions the logits are those that labels are held to, ``(rows, width)`` bool."""
    counted = loss_mask(batch, rule)
    return counted if rule == 'unshifted' else counted.roll(-1, dims=1)  # column 0 never counts


def token_losses(logits: torch.Tensor, batch: Batch, rule: str) -> torch.Tensor:
    """Cross-entropy of every loss-generating token, row by row, float32 (number of tokens,) on the CPU."""
    labels = labels_of(batch).to(logits.device)
    counted = loss_mask({**batch, 'labels': labels}, rule).to(logits.device)
    if rule != 'unshifted':
        logits, labels, counted = logits[:, :-1], labels[:, 1:], counted[:, 1:]
    # A few tokens at a time: in float32 the logits of whole documents would take more than a step does.
    chunks = zip(logits[counted].split(MAX_TOKENS), labels[counted].split(MAX_TOKENS), strict=True)
    losses = [F.cross_entropy(chunk.float(), targets, reduction='none').cpu() for chunk, targets in chunks]
    return torch.cat(losses)


def mean_token_loss(
    logits: torch.Tensor, batch: Batch, rule: str, total: float, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean cross-entropy of the loss-generating tokens, float32 () on the device; no host sync.

    Args:
        logits: ``(rows, width, vocabulary)``.
        batch: The microbatch, on the same device.
        rule: Which labels carry loss.
        total: How many do, or the sum of their weights.
        weights: ``(rows, width)``; None: all are 1.
    """
    targets = labels_of(batch).masked_fill(~loss_mask(batch, rule), IGNORE_INDEX)
    weights = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights
    if rule != 'unshifted':
        logits, targets, weights = logits[:, :-1], targets[:, 1:], weights[:, 1:]
    flat = (logits.flatten(0, 1), targets.flatten(), weights.flatten())
    chunks = zip(*(each.split(MAX_TOKENS) for each in flat), strict=True)
    sums = [
        (F.cross_entropy(chunk.float(), labels, reduction='none') * weight).sum() for chunk, labels, weight in chunks
    ]
    return torch.stack(sums).sum() / total


def find_loss_rule(probe: Probe, row: Batch, *, loss_tokens: str = 'auto') -> str:
    """Finds, or confirms, the rule by which the model averages its loss.

    The rule depends on the model class and the transformers version, and a wrong one is silent. So one row is given
    labels that make the rules differ (at position 0 and on an unattended position), and the rule whose mean equals the
    model's own loss is the model's. Where there are no logits to take a mean of, or the loss of a token is not its
    plain cross-entropy (label smoothing, z-loss), the rule follows from losses alone: see :func:`_rule_from_losses`.

    Args:
        probe: The model.
        row: One row, on the model's device.
        loss_tokens: ``'auto'``, or the rule that must be confirmed.

    Raises:
        RuntimeError: If no rule, or not the given one, is the model's.
    """
    # Labels do not change the logits, so the first forward may choose the labels of the second. The mask does.
    first = probe.ask(_with_telling_labels(row))
    numbers = ''
    matching: list[str] = []
    if first.logits is not None:
        probed = _with_telling_labels(row, first.logits)
        answer = probe.ask(probed)
        assert answer.logits is not None, 'the same model gave logits a moment ago'
        means = {rule: token_losses(answer.logits, probed, rule).mean().item() for rule in LOSS_RULES}
        allowed = 1e-4 * abs(answer.own) if answer.logits.dtype == torch.float32 else 1e-2 * abs(answer.own)
        matching = [rule for rule in LOSS_RULES if abs(means[rule] - answer.own) <= allowed]
        matching.sort(key=lambda rule: abs(means[rule] - answer.own))
        if len(matching) > 1:  # in half precision several means are near enough, but zeros are zeros
            with probe.with_gradients(answer):
                gradient = probe.ask(probed).gradient
            if gradient is not None:
                moving = gradient.abs().amax(dim=-1) > 0
                matching = [rule for rule in matching if torch.equal(moving, predicting(probed, rule))] or matching
        numbers = f'{answer.own:.6f} where the rules give ' + ', '.join(f'{r} {mean:.6f}' for r, mean in means.items())
    matching = matching or _rule_from_losses(probe, row, numbers)
    if loss_tokens == 'auto':
        # Rules that agree even here (no attention mask) count the same, and the sort is stable.
        return matching[0]
    if loss_tokens not in matching:
        raise RuntimeError(
            f'`loss_tokens` must be the rule by which the model averages its loss, got: {loss_tokens!r}, but the model '
            f'averages by {matching[0]!r} ({numbers or "found from its losses"}). Set `loss_tokens={matching[0]!r}`.'
        )
    return loss_tokens


def confirm_in_training(probe: Probe, row: Batch, rule: str) -> None:
    """Holds the rule to the losses of a model that gives no logits in training: fused ones may be another loss there.

    Args:
        probe: The model.
        row: One row, on the model's device.
        rule: As found in evaluation.

    Raises:
        RuntimeError: If the model averages by another rule in training.
    """
    with probe.in_training():
        first = probe.ask(row)
        # Random even without dropout: no two answers could be compared.
        if first.logits is not None or probe.is_random_in_training(row):
            return
        found = _rule_from_losses(probe, row, '')
    if rule not in found:
        raise RuntimeError(
            f'The model must average its loss by the same rule in training and in evaluation, got: {found[0]!r} in '
            f'training, where it gives no logits, and {rule!r} in evaluation. Set `loss_tokens={found[0]!r}` with '
            '`check_loss=False`, or switch the fused loss off.'
        )


def _with_telling_labels(row: Batch, logits: torch.Tensor | None = None) -> dict[str, Any]:
    """The row with labels that make the rules differ.

    Position 0 gets a label, and the row's last labelled position loses its attention but keeps its label. With
    ``logits`` these two labels are the least likely tokens, so that the rules' means lie far apart.
    """
    old = labels_of(row)
    labels = torch.full_like(old, IGNORE_INDEX)
    probed = {**row, 'labels': labels}
    places = _labelled_places(row)
    for place in (0, *places):
        labels[0, place] = _token_at(row, place)
    mask = row.get('attention_mask')
    if mask is not None and mask.shape == labels.shape and len(places) > 1:
        probed['attention_mask'] = mask.clone()
        probed['attention_mask'][0, places[-1]] = 0
    if logits is not None:
        labels[0, 0] = logits[0, 0].argmin()
        labels[0, places[-1]] = logits[0, max(places[-1] - 1, 0)].argmin()
    return probed


def _labelled_places(row: Batch) -> list[int]:
    """The row's last few labelled positions, but for position 0; its last attended ones where it has too few."""
    old = labels_of(row)
    places = [place for place in (old[0] != IGNORE_INDEX).nonzero().flatten().tolist() if place > 0]
    if len(places) < 2:
        mask = row.get('attention_mask')
        attended = mask[0] if mask is not None and mask.shape == old.shape else torch.ones_like(old[0])
        places = [place for place in (attended != 0).nonzero().flatten().tolist() if place > 0] or [old.shape[1] - 1]
    return places[-NUM_LABELS:]


def _token_at(row: Batch, place: int) -> int:
    """A label for the position: its own, else its token."""
    labels, ids = labels_of(row), row.get('input_ids')
    if labels[0, place] != IGNORE_INDEX:
        return int(labels[0, place])
    return int(ids[0, place]) if isinstance(ids, torch.Tensor) and ids.shape == labels.shape else 0


def _rule_from_losses(probe: Probe, row: Batch, numbers: str) -> list[str]:
    """The rules that agree with the model's own losses of one row under chosen labels; no logits are needed.

    If the loss is a mean over the labels that count, the loss of two labels is the mean of their losses alone, and a
    label that does not count changes nothing. So three questions are asked, of two labelled positions p < q:

    - is L(p, q) the mean of L(p) and L(q)? A mean over all positions, or a sum, is not;
    - is L(0, p) equal to L(p) (position 0 does not count), or the mean of L(0) and L(p) (it does)?
    - with q unattended, is L(p, q) equal to L(p) (it does not count), or the mean of both (it does)?
    """
    places = [place for place in _labelled_places(row) if place > 0]
    if len(places) < 2:
        raise RuntimeError(
            "The model's own loss must be the mean over its loss-generating tokens, got: a batch without a row of two "
            'labels to find out by. Put longer answers first, or give `loss_tokens` with `check_loss=False`.'
        )
    p, q = places[-2:]
    token, mask = _token_at(row, p), row.get('attention_mask')
    has_mask = isinstance(mask, torch.Tensor) and mask.shape == labels_of(row).shape

    def labelled(*places: int, attended: bool = True) -> dict[str, Any]:
        """The row with one and the same token as the label of some positions, with q attended or not."""
        labels = torch.full_like(labels_of(row), IGNORE_INDEX)
        labels[0, list(places)] = token
        probed = {**row, 'labels': labels}
        if not attended:
            probed['attention_mask'] = row['attention_mask'].clone()
            probed['attention_mask'][0, q] = 0
        return probed

    def own(*places: int, attended: bool = True) -> float:
        return probe.ask(labelled(*places, attended=attended)).own

    answer = probe.ask(labelled(p))
    alone, last, both = answer.own, own(q), own(p, q)
    noise = probe.noise(labelled(p), 'causal', dataclasses.replace(answer, logits=None))
    allowed = tolerance(max(abs(alone), abs(last)), noise)
    told_apart = abs(alone - last) > 4 * allowed
    if not (math.isfinite(both) and told_apart and _is(both, (alone + last) / 2, allowed)):
        raise RuntimeError(
            "The model's own loss must be the mean over its loss-generating tokens, got: "
            f'{numbers + "; and " if numbers else ""}{both:.6f} for two labels whose losses alone are {alone:.6f} and '
            f'{last:.6f}. The model changes labels inside forward, adds a term, or does not average over tokens. A '
            'model that returns a dict of terms can name them in `loss_units`; `check_loss=False` with an explicit '
            '`loss_tokens` skips this check.'
        )
    with_first = own(p, 0)
    if _is(with_first, alone, allowed):
        rules = ['causal', 'causal_attended']
    else:
        if _is(with_first, (alone + own(0)) / 2, allowed):
            return ['unshifted']
        raise RuntimeError(
            f"The model's own loss must count a label at position 0 or not, got: {with_first:.6f} with one beside a "
            f'label whose loss is {alone:.6f}. `check_loss=False` with an explicit `loss_tokens` skips this check.'
        )
    if not has_mask:
        return rules
    counted = not _is(own(p, q, attended=False), own(p, attended=False), allowed)
    return ['causal'] if counted else ['causal_attended']


def _is(found: float, expected: float, allowed: float) -> bool:
    return math.isfinite(found) and abs(found - expected) <= allowed


def _check_width(logits: torch.Tensor, batch: Batch) -> None:
    labels = labels_of(batch)
    if logits.shape[:2] != labels.shape:
        raise RuntimeError(
            f"The model's logits must be as wide as the labels, got: {tuple(logits.shape[:2])} for labels of "
            f'{tuple(labels.shape)}. The model expands or truncates the sequence inside forward, so a count of the '
            "batch's labels is not its own. Expand image placeholders in the processor instead (transformers >= 4.51)."
        )


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()


def _is_of_positions(output: Any, batch: Batch) -> bool:
    """Whether a layer's output has a vector for every position of the labels."""
    if not isinstance(output, torch.Tensor) or not output.dtype.is_floating_point or output.dim() != 3:
        return False
    return output.shape[:2] == labels_of(batch).shape


def _leaves(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if next(module.children(), None) is None]


@contextlib.contextmanager
def _hooked(modules: Iterable[torch.nn.Module], change: Callable[..., Any]) -> Iterator[None]:
    """Has ``change`` make what the modules return, of ``(module, inputs, output)``."""
    hooks = [module.register_forward_hook(change) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _undisturbed(model: torch.nn.Module, *, training: bool = False) -> Iterator[None]:
    """Eval mode and a forked random state: the run is the same with and without the probe.

    With ``training`` modules stay in the mode they are in, but for dropout and BatchNorm, and buffers are put back.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if training else []
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            for module, was_training in modes:
                is_noise = isinstance(module, (_DropoutNd, _BatchNorm))
                module.training = training and was_training and not is_noise
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training
        for buffer, kept in buffers:
            buffer.copy_(kept)
        for module, _ in modes:
            if isinstance(module, FSDPModule):  # a forward leaves the root whole, without gradients, until a backward
                module.reshard()
