# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Exact token accumulation: what a token of an optimizer step weighs depends on no cut."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger

from composer_tokacc.algorithm.functional import sample_weight, token_weight
from composer_tokacc.algorithm.loss_terms import SplitLoss, check_units
from composer_tokacc.algorithm.microbatch import (
    HiddenEntries,
    check_added_rows,
    record_of,
    replace_empty,
    scales_of,
    watch_tokens,
)
from composer_tokacc.algorithm.router_balance import check_router_balance
from composer_tokacc.algorithm.setup import Fit, begin_fit, check_microbatches
from composer_tokacc.batch import Batch, sample_name
from composer_tokacc.checks.step import StepCheck, TokenChoice
from composer_tokacc.collectives import RankSum, all_gather_object, get_world_size
from composer_tokacc.counting import check_rule
from composer_tokacc.data_spec.reduction import check_reduced, check_sharding
from composer_tokacc.layout import microbatches_of
from composer_tokacc.metadata import (
    annotate,
    loss_weight,
    num_loss_tokens,
    num_microbatches,
    num_rows,
    num_samples,
    with_metadata,
)
from composer_tokacc.sampling.rank_assignment import num_repeated
from composer_tokacc.weights import LOSS_WEIGHTS, TOKEN_WEIGHTS

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
        check_loss: bool = True,
    ) -> None:
        check_units(loss_units)
        check_router_balance(router_balance, loss_units)
        _check_arguments(loss_tokens, loss_units, token_weights, check_loss)
        self.loss_tokens, self.token_weights, self.check_loss = loss_tokens, token_weights, check_loss
        self.loss_units, self.router_balance = dict(loss_units) if loss_units else None, router_balance
        self.num_empty_steps, self._reduces_once = 0, False
        self._fit: Fit | None = None
        self._measuring = TokenChoice()
        self._step = StepCheck(num_tokens=0, num_samples=0, loss_weight=0)
        self._totals: Any = None
        """RankSum of the step: loss-generating tokens, samples, weight, and how many ranks have rows of each kind."""
        self._device_batch: Batch = {}
        self._hidden: HiddenEntries | None = None
        self._token_sums: list[torch.Tensor] = []
        self._raw_loss: Any = None
        self._actions = {
            Event.FIT_START: self._start_fit,
            Event.BATCH_START: self._count,
            Event.BEFORE_TRAIN_BATCH: self._start_attempt,
            Event.BEFORE_FORWARD: self._hide_metadata,
            Event.AFTER_LOSS: self._replace_loss,
            Event.BEFORE_BACKWARD: self._scale,
            Event.AFTER_BACKWARD: self._restore,
            Event.AFTER_TRAIN_BATCH: self._finish,
            Event.EPOCH_END: self._end_epoch,
            Event.FIT_END: self._end_fit,
        }

    def __repr__(self) -> str:
        """As it would be written."""
        names = ('loss_tokens', 'loss_units', 'token_weights', 'router_balance', 'check_loss')
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
        self.num_empty_steps = state['num_empty_steps']
        self._reduces_once = state.get('reduces_once', False)

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
        if num_copies := num_repeated(state.dataloader, int(state.timestamp.batch_in_epoch)):
            samples = [1] * (num_rows(state.batch) - num_copies) + [0] * num_copies
            state.batch = with_metadata(state.batch, samples=samples)
        self._measuring.begin_step(microbatches)
        fit, kinds = self._fit_of(state)
        assert fit.check.rule is not None
        # The batch brings its counts, so that split_batch hands each microbatch its own.
        state.batch = self._device_batch = annotate(state.batch, fit.check.rule, self.token_weights)
        local = (num_loss_tokens(state.batch), num_samples(state.batch), loss_weight(state.batch))
        self._step = StepCheck(*local, is_weighted=self.is_weighted, has_bypass=fit.has_bypass)
        dtype = torch.float64 if self.is_weighted else torch.int64
        self._totals = RankSum(state.device.tensor_to_device(torch.tensor([*local, *kinds], dtype=dtype)))

    def _fit_of(self, state: State) -> tuple[Fit, Sequence[int]]:
        """Returns what is known of the fit, and the kinds of rows of a batch; the first batch is looked at."""
        if self._fit is not None:
            return self._fit, self._fit.kinds_of(state.batch)
        fit = self._fit = begin_fit(
            state, loss_units=self.loss_units, loss_tokens=self.loss_tokens, token_weights=self.token_weights,
            router_balance=self.router_balance, check_loss=self.check_loss,
        )  # fmt: skip
        self._reduces_once = self._reduces_once and fit.reductions.may_meet_once
        kinds = fit.kinds_of(state.batch)
        fit.prove(state.batch, all_gather_object(kinds), reduces_once=self._reduces_once)
        return fit, kinds

    def _start_attempt(self, state: State, logger: Logger) -> None:
        """BEFORE_TRAIN_BATCH: fires once per attempt (an OOM retry or a closure called again starts afresh)."""
        fit = self._fit
        assert fit is not None, 'BATCH_START comes before BEFORE_TRAIN_BATCH'
        fit.check_norms()
        fit.reductions.start_attempt()
        self._step.records, self._token_sums = [], []
        if state.scaler is not None and state.scaler.is_enabled():
            self._step.gradient_scale = state.scaler.get_scale()
        if fit.split is not None:
            fit.split.copies_microbatches = lambda: bool(state.train_metrics)
        if fit.balance is not None:
            fit.balance.count()

    def _hide_metadata(self, state: State, logger: Logger) -> None:
        """BEFORE_FORWARD: totals are read, as Composer has just waited for its own; the model sees its own batch."""
        fit = self._fit
        assert fit is not None
        unequal = fit.split is not None and fit.split.options.equal_counts is False
        fit.reductions.see(num_microbatches(state.batch), has_unequal_counts=unequal, reduced_once=self._reduces_once)
        tokens, _, weight = self._totals.read()[:3]
        if weight == 0 and tokens:
            raise RuntimeError(
                f'The weights of a step must not all be 0, got: 0 for each of its {tokens:.0f} loss-generating '
                f'tokens, {sample_name(self._device_batch, 0)} among them. Fix `{LOSS_WEIGHTS}`, or leave samples of '
                'no weight out of the data (docs/errors.md#counts).'
            )
        self._hidden = HiddenEntries(
            state.batch, is_weighted=self.is_weighted, is_of_tokens=set(fit.terms.units.values()) <= {'tokens'}
        )
        state.batch = self._hidden.batch

    def _replace_loss(self, state: State, logger: Logger) -> None:
        """AFTER_LOSS: the loss of a microbatch without tokens is zero; callbacks see the batch's metadata again."""
        fit, step = self._fit, self._measuring.step
        assert fit is not None
        assert self._hidden is not None
        state.batch = self._hidden.put_back(state.batch)
        # Again now and then: schedules may change it.
        if step & (step - 1) == 0 and (self.check_loss or fit.terms.router_coefficient is not None):
            fit.terms.check_coefficient(state.loss, state.outputs)
        state.loss = fit.terms.split(state.loss, state.outputs)
        if isinstance(state.loss, SplitLoss) and fit.balance is None and not (step or self._step.records):
            log.warning(
                'The mean over tokens is exact. The load-balancing loss of the router is a statistic of each '
                "microbatch; the step's is the mean of its microbatches', and depends on how the batch is cut. With "
                '`router_balance=step` it does not.'
            )
        state.loss = replace_empty(state, fit.terms)

    def _scale(self, state: State, logger: Logger) -> None:
        """BEFORE_BACKWARD: the last point where ``state.loss`` matters, so nothing may rescale it afterwards."""
        fit, world_size = self._fit, get_world_size()
        assert fit is not None
        assert self._hidden is not None
        batch = state.batch = self._hidden.put_back(state.batch)  # whatever an algorithm took out after the loss
        _, step_samples, step_weight = self._totals.read()[:3]
        composers_weight = sample_weight(num_samples(batch), int(step_samples), world_size=world_size)
        record = record_of(state, fit, self._step, composers_weight)
        check_added_rows(state, fit, record)
        if self.is_weighted and record.num_tokens:
            tokens = torch.stack([term.detach().float().mean() for term in fit.terms.of_unit(state.loss, 'tokens')])
            self._token_sums.append(tokens.sum() * record.num_tokens)
        share = token_weight(record.loss_weight, step_weight, world_size=world_size)
        is_chosen = self.is_weighted or self._measuring.has(len(self._step.records) - 1)
        if record.loss_weight and record.num_samples and is_chosen:
            scaled, is_whole = share * self._step.gradient_scale, self._measuring.is_whole()
            watch_tokens(state, record, fit, share=scaled, is_weighted=self.is_weighted, is_whole=is_whole)
        self._raw_loss = sum(state.loss.values()) if isinstance(state.loss, SplitLoss) else state.loss
        if fit.balance is not None:
            count = record.num_microbatches or 1
            state.loss = fit.balance.applied(state.loss, state.outputs, len(self._step.records) - 1, count)
        state.loss = fit.terms.scaled(state.loss, scales_of(record, share), observe=record.observe)

    def _restore(self, state: State, logger: Logger) -> None:
        """AFTER_BACKWARD: callbacks read ``state.loss`` at the end of the batch and expect the model's own."""
        fit, records = self._fit, self._step.records
        assert fit is not None
        fit.reductions.reach_all()
        has_all = sum(record.num_samples for record in records) == self._step.num_samples
        if has_all and (fit.split is None or len(records) == len(fit.split.made)):
            fit.reductions.reach_all_by_hand()
        state.loss, self._raw_loss = self._raw_loss, None

    def _finish(self, state: State, logger: Logger) -> None:
        """AFTER_TRAIN_BATCH: gradients are whole, the optimizer has not moved yet."""
        fit, step, number = self._fit, self._step, self._measuring.step
        assert fit is not None
        check_reduced(state.model)
        if number == 0 and not (self.is_weighted or step.is_measured):
            why = 'no gradient comes by the logits' if fit.check.token_scale else 'the loss is no plain mean of them'
            log.info('What tokens weigh is not measured in training, as %s. All are counted in every step.', why)
        step.check()
        fit.has_bypass = step.has_bypass
        if fit.balance is not None:
            fit.balance.check()
        kinds = [int(count > 0) for count in self._totals.read()[3:]]
        if fit.check.is_due(kinds, number):
            fit.prove(self._device_batch, [kinds], reduces_once=self._reduces_once)
        if fit.split is not None:
            fit.split.made = []  # nobody waits for them while the next batch is read
            if (reduced_once := fit.reductions.reduced_once()) is not None:
                self._reduces_once = reduced_once
                fit.split.adopt(fit.split.rules, reduces_once=reduced_once)
        self._device_batch = {}
        self._measuring.end_step(len(step.records))
        self._log(state, logger)

    def _log(self, state: State, logger: Logger) -> None:
        tokens = int(self._totals.read()[0])
        units = self._fit.terms.units.values() if self._fit is not None else ()
        if tokens == 0 and (not units or 'tokens' in units):
            # Zero gradients would still decay weights and move momentum; no gradients move nothing.
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)
            self.num_empty_steps += 1
        metrics: dict[str, float] = {
            'token_accumulation/loss_generating_tokens': tokens,
            'token_accumulation/empty_microbatches': sum(one.num_tokens == 0 for one in self._step.records),
            'token_accumulation/empty_steps': self.num_empty_steps,
        }
        if self.is_weighted:
            sums = torch.stack(self._token_sums).double().sum() if self._token_sums else torch.zeros(()).double()
            total = RankSum(state.device.tensor_to_device(sums.cpu()[None])).read()[0]
            metrics['token_accumulation/token_mean_loss'] = total / max(tokens, 1)
        logger.log_metrics(metrics)


def _check_arguments(loss_tokens: Any, loss_units: dict[str, str] | None, token_weights: Any, check_loss: Any) -> None:
    if token_weights not in tuple(TOKEN_WEIGHTS):
        raise ValueError(f'`token_weights` must be one of {tuple(TOKEN_WEIGHTS)}, got: {token_weights!r}.')
    if token_weights != 'token' and loss_units and 'tokens' not in loss_units.values():
        raise ValueError(
            "`token_weights` must be 'token' where no term of `loss_units` is a mean over tokens, got: "
            f'{token_weights!r}.'
        )
    if check_rule(loss_tokens, allow_auto=True) == 'auto' and not check_loss:
        raise ValueError(
            "`loss_tokens` must be an explicit rule with `check_loss=False`, got: 'auto'. The rule is found by the "
            "check; give 'causal' (most decoders), 'causal_attended' or 'unshifted' (docs/errors.md#loss-rule)."
        )
    if not isinstance(check_loss, bool):
        raise ValueError(f'`check_loss` must be True or False, got: {check_loss!r}.')
