# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Exact token accumulation: what a token of an optimizer step weighs depends on no cut."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger

from composer_tokacc.algorithm.functional import sample_weight, token_weight
from composer_tokacc.algorithm.loss_terms import LOSS_UNITS, LossTerms, SplitLoss, attached_zero, tensors_in
from composer_tokacc.algorithm.reduction import check_reduced, check_sharding
from composer_tokacc.algorithm.setup import AlgorithmOptions, RunContext, check_microbatches
from composer_tokacc.batch import Batch, labels_of, sample_name
from composer_tokacc.checks.logits import (
    at_predictions,
    has_bypass,
    logits_of,
    router_loss_of,
    targets_of,
    token_losses,
    weigh_tokens,
)
from composer_tokacc.checks.step import MicrobatchRecord, StepCheck, TokenChoice
from composer_tokacc.collectives import RankSum
from composer_tokacc.counting import with_one_label
from composer_tokacc.labelled import batch_at_logits
from composer_tokacc.layout import microbatches_of
from composer_tokacc.metadata import (
    METADATA_PREFIX,
    annotate,
    is_annotated,
    loss_weight,
    num_loss_tokens,
    num_microbatches,
    num_rows,
    num_samples,
    samples_of,
    with_metadata,
    without_metadata,
)
from composer_tokacc.plan_agreement import NUM_SUMS, PlanRecord, check_plans, numbers_to_sum, plan_record_of
from composer_tokacc.planning import check_choice, check_state
from composer_tokacc.repeated_samples import num_repeated
from composer_tokacc.weights import LOSS_WEIGHTS

log = logging.getLogger(__name__)


class TokenAccumulation(Algorithm):
    r"""Gives every loss-generating token of an optimizer step the same weight, or the one that you want.

    With microbatches :math:`m` on ranks :math:`r`, Composer weights a microbatch's mean loss by its samples, so a token
    in a microbatch of few tokens weighs more. This algorithm multiplies the loss by

    .. math::
        s_{rm} = \frac{t_{rm}}{T} \cdot \frac{N}{n_{rm}}

    where :math:`t` and :math:`n` are the microbatch's loss-generating tokens and samples, :math:`T` and :math:`N` those
    of the step over all ranks. Where tokens do not all weigh the same (``token_weights``), :math:`t` and :math:`T` are
    sums of their weights. Together with Composer's weight the gradient is that of one forward over the whole global
    batch, whatever the microbatch size, the number of ranks or the padding.

    Runs on ``Event.BATCH_START`` (counts; starts the one all-reduce of a step), ``BEFORE_FORWARD``, ``AFTER_LOSS``,
    ``BEFORE_BACKWARD`` (scales), ``AFTER_BACKWARD`` (restores the raw loss) and ``AFTER_TRAIN_BATCH`` (checks what
    tokens really weighed, before the optimizer steps).

    Args:
        loss_tokens (str): Which labels the model's loss averages over: ``'causal'``, ``'causal_attended'``,
            ``'unshifted'`` (see :func:`.loss_mask`), or ``'auto'``: found by a probe forward before the
            first step. Default: ``'auto'``.
        loss_units (dict[str, str], optional): For dict losses, the denominator of each term: ``'tokens'``,
            ``'samples'``, ``'coupled_samples'`` (rows of a microbatch see each other, as in a contrastive loss) or
            ``'microbatches'`` (router statistics). The last two depend on which rows share a microbatch, so they are
            refused with a split that regroups rows. Default: ``None``, all terms are means over tokens.
        token_weights (str): What a token weighs: the loss-generating tokens of its sample to the power 0 (``'token'``:
            all weigh the same), -1/2 (``'sqrt'``) or -1 (``'sample'``: samples weigh the same), or what the batch says
            (``'column'``: ``batch['loss_weights']``, a float per row or per position of the labels). The loss must be
            made of the logits that the model returns. Default: ``'token'``.
        router_balance (str): Of what the load-balancing loss of a Hugging Face mixture of experts is a statistic: of
            each ``'microbatch'`` by itself, evenly weighed, or of the ``'step'``, as one forward over the whole global
            batch would have it, which takes a further forward of each microbatch. Default: ``'microbatch'``.
        logits (str): Where the model computes logits in training: ``'labels'``, only at positions that predict a label,
            which saves most of the time and memory of the output embedding; ``'all'``, at all positions, for callbacks
            that read ``outputs.logits``; or ``'auto'``, only at labels if the first-batch check shows that loss and
            gradient stay the same. With logits at labels ``outputs.logits`` has one row, in the order of the labels.
            Default: ``'auto'``.
        check_loss (bool): Whether to hold the rule to the model's own loss by the probe. Default: ``True``.

    Raises:
        ValueError: If an argument is not one of the above.
        RuntimeError: Before any optimizer step, if the step would not be exact, naming cause and remedy.

    Example:
        .. code-block:: python

            from composer_tokacc import TokenAccumulation

            trainer = Trainer(..., algorithms=[TokenAccumulation()])
    """

    def __init__(
        self,
        *,
        loss_tokens: str = 'auto',
        loss_units: dict[str, str] | None = None,
        token_weights: str = 'token',
        router_balance: str = 'microbatch',
        logits: str = 'auto',
        check_loss: bool = True,
    ) -> None:
        self.loss_tokens, self.token_weights, self.check_loss = loss_tokens, token_weights, check_loss
        self.loss_units, self.router_balance, self.logits = loss_units, router_balance, logits
        self._options = AlgorithmOptions(
            loss_tokens=loss_tokens,
            loss_units=loss_units,
            token_weights=token_weights,
            router_balance=router_balance,
            logits=logits,
            check_loss=check_loss,
        )
        self.loss_units = dict(loss_units) if loss_units else None  # the caller's may change
        self.num_empty_steps, self._reduces_once = 0, False
        self._measuring = TokenChoice()
        self._fit: Any = None
        """RunContext, from the first batch on."""
        self._step = StepCheck(num_tokens=0, num_samples=0, loss_weight=0)
        self._totals: Any = None
        """RankSum of the step: loss-generating tokens, samples, weight, how many ranks have new rows, and what tells
        whether the ranks planned alike."""
        self._plan: PlanRecord | None = None
        self._device_batch: Batch = {}
        self._hidden: Any = None
        """HiddenEntries of a microbatch."""
        self._raw_loss: Any = None
        self._actions = {
            Event.FIT_START: self._start_fit,
            Event.BATCH_START: self._count,
            Event.BEFORE_TRAIN_BATCH: self._start_attempt,
            Event.BEFORE_FORWARD: self._hide_metadata,
            Event.AFTER_FORWARD: self._end_forward,
            Event.AFTER_LOSS: self._replace_loss,
            Event.BEFORE_BACKWARD: self._scale,
            Event.AFTER_BACKWARD: self._restore,
            Event.AFTER_TRAIN_BATCH: self._finish,
            Event.EPOCH_END: self._end_epoch,
            Event.FIT_END: self._end_fit,
        }

    def __repr__(self) -> str:
        """As it would be written."""
        names = inspect.signature(TokenAccumulation).parameters
        return f'TokenAccumulation({", ".join(f"{name}={getattr(self, name)!r}" for name in names)})'

    def __str__(self) -> str:
        """Its name in the engine's traces, which Composer writes again at every event."""
        return type(self).__name__

    @property
    def is_weighted(self) -> bool:
        """Whether tokens may have weights of their own."""
        return self.token_weights != 'token'

    @property
    def rule(self) -> str | None:
        """The counting rule, once it is known."""
        return None if self._fit is None else self._fit.check.rule

    @property
    def has_logits(self) -> bool:
        """Whether the model returns logits. If not, it returns hidden states, and its loss has the head."""
        return self._fit is None or self._fit.check.has_logits

    def match(self, event: Event, state: State) -> bool:
        """Runs on the events named above."""
        return event in self._actions

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Dispatches on the event."""
        self._actions[event](state, logger)

    def state_dict(self) -> dict[str, Any]:
        """As Composer's; plain values only, since its next release loads checkpoints with ``weights_only=True``."""
        own = {'rule': self.rule, 'num_empty_steps': self.num_empty_steps, 'reduces_once': self._reduces_once}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what makes a resumed run end with the same bits; rule and rows are checked again."""
        check_state(state, {'num_empty_steps'}, counts=('num_empty_steps',))
        check_choice('reduces_once', state.get('reduces_once', False), (True, False))
        self.num_empty_steps, self._reduces_once = state['num_empty_steps'], state.get('reduces_once', False)

    def _start_fit(self, state: State, logger: Logger) -> None:
        """FIT_START: the model is wrapped now. A second fit may bring another loader, so rows are checked again."""
        check_sharding(state.model)
        if sum(isinstance(one, TokenAccumulation) for one in state.algorithms) > 1:
            raise ValueError('`algorithms` must hold TokenAccumulation once, got: twice. The second would weigh again.')
        self._fit = None

    def _end_epoch(self, state: State, logger: Logger) -> None:
        """EPOCH_END: Composer goes on to the next epoch for ever where none has a batch and batches are counted."""
        if state.previous_timestamp is not None and state.previous_timestamp.batch_in_epoch == 0:
            raise RuntimeError(
                'The train dataloader must give at least one batch on every rank, got: an epoch of none.'
            )

    def _end_fit(self, state: State, logger: Logger) -> None:
        """FIT_END: the model is the user's again."""
        if self._fit is not None:
            self._fit.end()

    def _count(self, state: State, logger: Logger) -> None:
        """BATCH_START: ``state.batch`` is the whole device batch, still on the CPU, so counting syncs nothing."""
        microbatches = microbatches_of(state.batch)
        check_microbatches(state.model, microbatches, None if self._fit is None else self._fit.check.vocabulary)
        if self._fit is None:
            self._fit = RunContext(state, self._options)
            self._reduces_once = self._reduces_once and self._fit.reductions.may_meet_once
            self._fit.prove(state.batch, reduces_once=self._reduces_once)
        self._measuring.begin_step(microbatches)
        self._plan = plan_record_of(state.batch, state.dataloader, int(state.timestamp.batch_in_epoch))
        if num_copies := num_repeated(state.dataloader, int(state.timestamp.batch_in_epoch)):
            samples = [1] * (num_rows(state.batch) - num_copies) + [0] * num_copies
            state.batch = with_metadata(state.batch, samples=samples)
        # The batch brings its counts, so that split_batch hands each microbatch its own.
        state.batch = self._device_batch = annotate(state.batch, self.rule or '', self.token_weights)
        local = (num_loss_tokens(state.batch), num_samples(state.batch), loss_weight(state.batch))
        self._step = StepCheck(*local, is_weighted=self.is_weighted, has_bypass=self._fit.has_bypass)
        has_new_rows = self._fit.check.has_new_rows(state.batch, self._fit.split)
        dtype = torch.float64 if self.is_weighted else torch.int64
        numbers = torch.tensor([*local, has_new_rows, *numbers_to_sum(self._plan)], dtype=dtype)
        self._totals = RankSum(state.device.tensor_to_device(numbers))
        # Read before the batch is cut, so that rows of a new size are cut by rules that were shown for them. One rank
        # need not wait for the device.
        is_any_new = has_new_rows if self._fit.world_size == 1 else self._totals.read()[3] > 0
        if self._fit.check.is_due(self._measuring.step, has_new_rows=is_any_new):
            self._fit.prove(state.batch, reduces_once=self._reduces_once)

    def _start_attempt(self, state: State, logger: Logger) -> None:
        """BEFORE_TRAIN_BATCH: fires once per attempt (an OOM retry or a closure called again starts afresh)."""
        fit: RunContext = self._fit
        fit.check_norms()
        fit.reductions.start_attempt()
        self._step.records = []
        if state.scaler is not None and state.scaler.is_enabled():
            self._step.gradient_scale = state.scaler.get_scale()
        if fit.split is not None:
            fit.split.begin_step(copies_microbatches=lambda: bool(state.train_metrics))
        if fit.balance is not None:
            fit.balance.count()

    def _hide_metadata(self, state: State, logger: Logger) -> None:
        """BEFORE_FORWARD: totals are read, as Composer has just waited for its own; the model sees its own batch."""
        fit: RunContext = self._fit
        unequal = fit.split is not None and fit.split.options.equal_counts is False
        fit.reductions.see(num_microbatches(state.batch), has_unequal_counts=unequal, reduced_once=self._reduces_once)
        tokens, _, weight = self._totals.read()[:3]
        check_plans(self._totals.read()[-NUM_SUMS:], self._plan)
        if weight == 0 and tokens:
            raise RuntimeError(
                f'The weights of a step must not all be 0, got: 0 for each of its {tokens:.0f} loss-generating tokens, '
                f'{sample_name(self._device_batch, 0)} among them. Fix `{LOSS_WEIGHTS}` (docs/errors.md#counts).'
            )
        batch = state.batch
        self._hidden = HiddenEntries(
            batch, is_weighted=self.is_weighted, is_of_tokens=set(fit.terms.units.values()) <= {'tokens'}
        )
        state.batch = self._hidden.batch
        # Metrics of training, which may be set at any time, read all logits.
        if fit.logits.selector is not None and not state.train_metrics:
            num_labels = max(num_loss_tokens(batch), 1)  # without any, the model is given one
            fit.logits.begin_forward(fit.check.rule or '', num_labels, labels_of(batch).numel())

    def _end_forward(self, state: State, logger: Logger) -> None:
        """AFTER_FORWARD: forwards of others, as in evaluation, compute all logits."""
        self._fit.logits.end_forward()

    def _replace_loss(self, state: State, logger: Logger) -> None:
        """AFTER_LOSS: the loss of a microbatch without tokens is zero; callbacks see the batch's metadata again."""
        fit: RunContext = self._fit
        step = self._measuring.step
        state.batch = self._hidden.put_back(state.batch)
        # Again now and then: schedules may change it.
        if step & (step - 1) == 0 and (self.check_loss or fit.terms.router_coefficient is not None):
            fit.terms.check_coefficient(state.loss, state.outputs)
        state.loss = fit.terms.split(state.loss, state.outputs)
        if isinstance(state.loss, SplitLoss) and fit.balance is None and not (step or self._step.records):
            log.warning(
                'The mean over tokens is exact. The load-balancing loss of the router is a statistic of microbatches, '
                'and depends on how the batch is cut; with `router_balance=step` it does not.'
            )
        if _is_empty(state.batch):  # no mean over none
            zero = attached_zero(state.outputs, state.loss)
            state.loss = fit.terms.changed(state.loss, lambda name, unit, term: zero if unit == 'tokens' else term)
        layout, has_gradient = fit.check.layout, any(term.requires_grad for term in tensors_in(state.loss))
        if not (has_gradient or layout is None or layout.media_of(state.batch)):
            # Text alone beside a frozen language model: an encoder learns nothing of it, and backward would raise.
            nothing = next(one for one in state.model.parameters() if one.requires_grad).flatten()[:0].sum()
            state.loss = fit.terms.changed(state.loss, lambda name, unit, term: term + nothing)

    def _scale(self, state: State, logger: Logger) -> None:
        """BEFORE_BACKWARD: the last point where ``state.loss`` matters, so nothing may rescale it afterwards."""
        fit: RunContext = self._fit
        step, world_size = self._step, fit.world_size
        batch = state.batch = self._hidden.put_back(state.batch)  # whatever an algorithm took out after the loss
        _, step_samples, step_weight = self._totals.read()[:3]
        count = None
        if fit.terms.of_unit(state.loss, 'microbatches'):
            # Composer's own split makes microbatches of a fixed number of rows; ours says how many it made.
            count = num_microbatches(batch) or -(-step.num_samples // int(state.device_train_microbatch_size or 1))
        record = MicrobatchRecord(
            batch=batch, rule=fit.check.rule or '', num_tokens=num_loss_tokens(batch), loss_weight=loss_weight(batch),
            num_samples=num_samples(batch), num_microbatches=count,
            composers_weight=sample_weight(num_samples(batch), int(step_samples), world_size=world_size),
        )  # fmt: skip
        step.records.append(record)
        share = token_weight(record.loss_weight, step_weight, world_size=world_size)
        _check_added_rows(state, fit.terms)
        if self.is_weighted and record.num_tokens:
            tokens = torch.stack([term.detach().float().mean() for term in fit.terms.of_unit(state.loss, 'tokens')])
            record.token_loss = tokens.sum() * record.num_tokens
        index = len(step.records) - 1
        made = [] if fit.split is None else fit.split.made
        on_cpu = made[index]['labels'] if len(made) > index else None
        is_chosen = self.is_weighted or self._measuring.has(index, on_cpu)
        if record.loss_weight and record.num_samples and is_chosen:
            scaled, is_whole = share * step.gradient_scale, self._measuring.is_whole()
            _watch_tokens(state, record, fit, share=scaled, is_weighted=self.is_weighted, is_whole=is_whole)
        self._raw_loss = sum(state.loss.values()) if isinstance(state.loss, SplitLoss) else state.loss
        if fit.balance is not None:
            assert isinstance(state.loss, SplitLoss)  # the count has refused models without a router's loss
            state.loss = fit.balance.applied(state.loss, state.outputs, index, count or 1)
        state.loss = fit.terms.scaled(state.loss, _scales_of(record, share), observe=record.observe)

    def _restore(self, state: State, logger: Logger) -> None:
        """AFTER_BACKWARD: callbacks read ``state.loss`` at the end of the batch and expect the model's own."""
        fit: RunContext = self._fit
        records = self._step.records
        fit.reductions.reach_all()
        has_all = sum(record.num_samples for record in records) == self._step.num_samples
        if has_all and (fit.split is None or len(records) == len(fit.split.made)):
            fit.reductions.reach_all_by_hand()
        state.loss, self._raw_loss = self._raw_loss, None

    def _finish(self, state: State, logger: Logger) -> None:
        """AFTER_TRAIN_BATCH: gradients are whole, the optimizer has not moved yet."""
        fit: RunContext = self._fit
        step, number = self._step, self._measuring.step
        check_reduced(state.model)
        if number == 0 and not (self.is_weighted or step.is_measured):
            why = 'no gradient comes by the logits' if fit.check.token_scale else 'the loss is no plain mean of them'
            log.info('What tokens weigh is not measured in training, as %s. All are counted in every step.', why)
        step.check()
        fit.has_bypass = step.has_bypass
        if fit.balance is not None:
            fit.balance.check()
        if fit.split is not None:
            fit.split.end_step()
            if (reduced_once := fit.reductions.reduced_once()) is not None:
                self._reduces_once = reduced_once
                fit.split.adopt(fit.split.rules, reduces_once=reduced_once)
        self._device_batch = {}
        self._measuring.end_step(len(step.records))
        tokens = int(self._totals.read()[0])
        if tokens == 0 and (not fit.terms.units or 'tokens' in fit.terms.units.values()):
            # Zero gradients would still decay weights and move momentum; no gradients move nothing.
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)
            self.num_empty_steps += 1
        self._log(state, logger, tokens)

    def _log(self, state: State, logger: Logger, tokens: int) -> None:
        metrics: dict[str, float] = {
            'token_accumulation/loss_generating_tokens': tokens,
            'token_accumulation/empty_microbatches': sum(one.num_tokens == 0 for one in self._step.records),
            'token_accumulation/empty_steps': self.num_empty_steps,
        }
        if self.is_weighted:
            losses = [one.token_loss for one in self._step.records if one.token_loss is not None]
            sums = torch.stack(losses).double().sum() if losses else torch.zeros(()).double()
            total = RankSum(state.device.tensor_to_device(sums.cpu()[None])).read()[0]
            metrics['token_accumulation/token_mean_loss'] = total / max(tokens, 1)
        logger.log_metrics(metrics)


class HiddenEntries:
    """Entries of ours that a model does not see: a compiled one would be compiled again for each list among them.

    A microbatch without loss-generating tokens gets one label for the forward: a loss that divides by their number, and
    computes its gradient in the forward as fused ones do, would make NaNs that no weight of zero takes out again.
    Only where the loss is means over tokens alone (``is_of_tokens``): a term over samples would see the label.
    """

    def __init__(self, batch: Batch, *, is_weighted: bool, is_of_tokens: bool) -> None:
        self.batch = without_metadata(batch)
        """What the model sees."""
        if not is_annotated(batch) or (is_weighted and self.batch.pop(LOSS_WEIGHTS, None) is None):
            lacking = f'`{LOSS_WEIGHTS}`' if is_annotated(batch) else f'counts ({METADATA_PREFIX}...)'
            raise RuntimeError(
                f'Microbatches must carry the {lacking} written at BATCH_START, got: {sorted(batch)}. A custom '
                '`split_batch` or `microbatch_transforms` drops them: use token_data_spec() (docs/errors.md#counts).'
            )
        if is_of_tokens and _is_empty(batch):
            self.batch = with_one_label(self.batch)
        self._hidden = {key: value for key, value in batch.items() if key not in self.batch}
        self._made_up, self._labels = self.batch.get('labels'), batch.get('labels')

    def put_back(self, batch: Batch) -> dict[str, Any]:
        """Returns the batch with them; what others have changed meanwhile stays changed, for the check to see."""
        whole = {'labels': self._labels, **batch, **self._hidden}  # a model may take labels out of its batch
        if self._labels is not None and whole.get('labels') is self._made_up:
            whole['labels'] = self._labels
        return whole


def _is_empty(batch: Any) -> bool:
    return num_loss_tokens(batch) == 0 or num_samples(batch) == 0


def _check_added_rows(state: State, terms: LossTerms) -> None:
    """Refuses means over samples that have a loss where a row is no sample, and has no labels: it fills up a rank."""
    samples, logits = samples_of(state.batch), logits_of(state.outputs)
    if all(samples) or not any(samples) or logits is None or not logits.requires_grad:
        return
    if not (of_samples := terms.of_unit(state.loss, 'samples')):
        return
    total = torch.stack([term.sum() for term in of_samples]).sum()
    (found,) = torch.autograd.grad(total, logits, retain_graph=True, allow_unused=True)
    added = [row for row, number in enumerate(samples) if number == 0]
    if found is not None and len(found) == len(samples) and found[added].any():
        raise RuntimeError(
            f'Terms over samples must be 0 for rows without labels, which fill up ranks, got: a gradient in '
            f'{len(added)} of {len(samples)} rows. Multiply what a row adds by `(labels != -100).any(dim=1)`, or give '
            'every rank as many samples (`drop_last=True`).'
        )


def _scales_of(record: MicrobatchRecord, share: float) -> dict[str, float]:
    """Returns the factor of the terms of each unit, on top of Composer's weight; ``share``: of the mean over tokens."""
    if not record.num_samples:
        return dict.fromkeys(LOSS_UNITS, 0.0)
    samples, composers_weight = samples_of(record.batch), record.composers_weight
    return {
        'tokens': share / composers_weight,
        # Rows that are no samples have no labels, and loss 0 in a term's mean.
        'samples': len(samples) / sum(map(bool, samples)),
        'coupled_samples': 1.0,
        'microbatches': 1.0 / ((record.num_microbatches or 1) * composers_weight),
    }


def _watch_tokens(
    state: State, record: MicrobatchRecord, fit: RunContext, *, share: float, is_weighted: bool, is_whole: bool
) -> None:
    """Sets what a microbatch's tokens weigh beside each other, and listens to what they weigh in its gradient.

    ``share`` is what the mean over them is to weigh in the step, times the loss scale; that loss becomes the weighted
    mean where tokens have their own weights.
    """
    logits, terms = logits_of(state.outputs), fit.terms
    if not fit.check.has_logits:
        return  # the output holds hidden states, and the loss holds the head
    if logits is None or logits.grad_fn is None:
        return
    compared = batch_at_logits(record.batch, logits, record.rule, record.num_tokens)
    if compared is None:
        return
    batch, record.positions_of_logits = compared
    router = router_loss_of(state.outputs)
    losses = terms.of_unit(state.loss, 'tokens')
    record.has_bypass = has_bypass(losses, [logits] if router is None else [logits, router])
    weights = None
    if is_weighted:
        weights = at_predictions(batch[LOSS_WEIGHTS] * (record.num_tokens / record.loss_weight), record.rule)
        weigh_tokens(logits, weights)
        token_loss_changes = token_losses(logits, targets_of(batch, record.rule)) * (weights - 1)
        added = token_loss_changes.sum() / record.num_tokens
        first = next(name for name, term in terms.named(state.loss).items() if term.unit == 'tokens')
        state.loss = terms.changed(
            state.loss, lambda name, unit, term: term + added if name in (first, 'total') else term
        )
    # Where the loss is not one mean over tokens alone, other terms may go through the logits as well.
    scale = fit.check.token_scale if list(terms.units.values()) in ([], ['tokens']) else None
    token_size = None if scale is None else scale * share / record.num_tokens
    record.watch(logits, weights, token_size, is_whole=is_whole, selected=batch)
