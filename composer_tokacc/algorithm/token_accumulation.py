# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Exact token accumulation: what a token of an optimizer step weighs depends on no cut."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.core.precision import get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composer_tokacc.algorithm.filler_rows import filler_rows
from composer_tokacc.algorithm.first_batch import FirstBatchCheck, check_sharding, kinds_of, split_of
from composer_tokacc.algorithm.functional import RankSum
from composer_tokacc.algorithm.loss_terms import LossTerms, attached_zero, router_coefficient
from composer_tokacc.algorithm.probe import Probe, logits_of, mean_token_loss, vocabulary_of
from composer_tokacc.algorithm.row_coupling import check_rows_are_independent
from composer_tokacc.algorithm.step_guard import MicrobatchWeight, StepGuard
from composer_tokacc.algorithm.weighted_labels import Weighing, weigh_labels
from composer_tokacc.counting import (
    CARRIED,
    LOSS_WEIGHTS,
    TOKEN_WEIGHTS,
    Batch,
    carry,
    check_batch,
    check_rule,
    is_counted,
    loss_weight,
    num_loss_tokens,
    num_microbatches,
    num_rows,
    num_samples,
    sample_name,
    with_carried,
    with_one_label,
    without_carried,
)
from composer_tokacc.layout import BatchLayout, microbatches_of

__all__ = ['TokenAccumulation']

log = logging.getLogger(__name__)

NUM_FIRST_STEPS, LOOK_EVERY = 10, 16
"""In which steps the loss of a microbatch is held to the losses of its tokens."""


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

    Runs on ``Event.BATCH_START`` (counts; starts the one all-reduce of a step), ``Event.BEFORE_FORWARD`` (has
    its result), ``Event.AFTER_LOSS``, ``Event.BEFORE_BACKWARD`` (scales), ``Event.AFTER_BACKWARD``
    (restores the raw loss) and ``Event.AFTER_TRAIN_BATCH`` (checks the weights that Composer really applied,
    before the optimizer steps).

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
            (``'column'``: ``batch['loss_weights']``, a float per row or per position of the labels). The model's loss
            becomes the weighted mean, which must be made of torch's cross-entropy. Default: ``'token'``.
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
        check_loss: bool = True,
    ) -> None:
        if token_weights not in tuple(TOKEN_WEIGHTS):
            raise ValueError(f'`token_weights` must be one of {tuple(TOKEN_WEIGHTS)}, got: {token_weights!r}.')
        self.token_weights = token_weights
        self.loss_tokens = check_rule(loss_tokens, allow_auto=True)
        if loss_tokens == 'auto' and not check_loss:
            raise ValueError(
                "`loss_tokens` must be an explicit rule with `check_loss=False`, got: 'auto'. The rule is found by the "
                "check; give 'causal' (most decoders), 'causal_attended' or 'unshifted'."
            )
        if not isinstance(check_loss, bool):
            raise ValueError(f'`check_loss` must be True or False, got: {check_loss!r}.')
        self.check_loss = check_loss
        self.loss_terms = LossTerms(loss_units)
        self.num_empty_steps = 0
        self._num_steps = 0
        self._check: FirstBatchCheck | None = None
        self._layout: BatchLayout | None = None
        self._guard: StepGuard | None = None
        self._device_batch: Batch = {}
        self._hidden: tuple[dict[str, Any], Any, Any] = ({}, None, None)
        self._weighing: Weighing | None = None
        self._raw_loss: Any = None
        self._reduces_once = self._can_reduce_once = False
        self._reduces: list[bool] = []
        """For each microbatch of an attempt, whether DDP reduces gradients in its backward."""
        self._actions = {
            Event.FIT_START: self._start_fit,
            Event.BATCH_START: self._count,
            Event.BEFORE_TRAIN_BATCH: self._start_attempt,
            Event.BEFORE_FORWARD: self._hide_carried,
            Event.AFTER_LOSS: self._replace_empty,
            Event.BEFORE_BACKWARD: self._scale,
            Event.AFTER_BACKWARD: self._restore,
            Event.AFTER_TRAIN_BATCH: self._finish,
            Event.FIT_END: self._end_fit,
        }

    def __repr__(self) -> str:
        """As it would be written."""
        units = self.loss_terms.loss_units
        return (
            f'TokenAccumulation(loss_tokens={self.loss_tokens!r}, loss_units={units}, '
            f'token_weights={self.token_weights!r}, check_loss={self.check_loss})'
        )

    def __str__(self) -> str:
        """Its name in the engine's traces, which Composer writes anew at every event."""
        return 'TokenAccumulation'

    @property
    def is_weighted(self) -> bool:
        """Whether tokens may weigh unlike."""
        return self.token_weights != 'token'

    @property
    def rule(self) -> str | None:
        """The counting rule, once it is known."""
        return self._check.rule if self._check is not None else None

    def match(self, event: Event, state: State) -> bool:
        """Runs on the events named above."""
        return event in self._actions

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Dispatches on the event."""
        self._actions[event](state, logger)

    def state_dict(self) -> dict[str, Any]:
        """Plain values only: Composer's next release loads checkpoints with ``weights_only=True``."""
        return {'rule': self.rule, 'num_empty_steps': self.num_empty_steps, 'reduces_once': self._reduces_once}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the count of empty steps; rule and rows are checked afresh, since versions may have changed.

        A resumed run must add the very rows that the unbroken one would, to end with the same bits.
        """
        self.num_empty_steps = state['num_empty_steps']
        self._reduces_once = state.get('reduces_once', False)

    def _start_fit(self, state: State, logger: Logger) -> None:
        """FIT_START: the model is wrapped now. A second fit may bring another loader, so rows are checked again."""
        check_sharding(state.model)
        self._check = None

    def _end_fit(self, state: State, logger: Logger) -> None:
        """FIT_END: the model is the user's again."""
        split = split_of(state.dataloader)
        if split is not None:
            split.attend_as_before()

    def _count(self, state: State, logger: Logger) -> None:
        """BATCH_START: ``state.batch`` is the whole device batch, still on the CPU, so counting syncs nothing."""
        vocabulary = vocabulary_of(state.model) if self._check is None else self._check.vocabulary
        for microbatch in microbatches_of(state.batch):
            check_batch(microbatch, vocabulary)
        fillers = filler_rows(state.dataloader, int(state.timestamp.batch_in_epoch))
        if fillers:
            rows = num_rows(state.batch)
            state.batch = with_carried(state.batch, samples=[1] * (rows - fillers) + [0] * fillers)
        kinds = None
        if self._check is None:
            self._check = self._new_check(state)
            kinds = kinds_of(self._layout, state.batch)
            self._check.prove(state.batch, split_of(state.dataloader), kinds, dist.all_gather_object(kinds))
            if self.loss_terms.is_split:
                log.warning(
                    'The mean over tokens is exact. The load-balancing loss of the router is a statistic of each '
                    "microbatch; the step's is the mean of its microbatches', and depends on how the batch is cut."
                )
        kinds = kinds or kinds_of(self._layout, state.batch)
        assert self.rule is not None
        # Carried by the batch, so that split_batch hands each microbatch its own counts.
        state.batch = self._device_batch = carry(state.batch, self.rule, self.token_weights)
        local_tokens, local_samples = num_loss_tokens(state.batch), num_samples(state.batch)
        local_weight = loss_weight(state.batch)
        dtype = torch.float64 if self.is_weighted else torch.int64
        totals = torch.tensor([local_tokens, local_samples, local_weight, *kinds], dtype=dtype)
        self._guard = StepGuard(
            rule=self.rule,
            totals=RankSum(state.device.tensor_to_device(totals)),
            local_tokens=local_tokens,
            local_samples=local_samples,
            local_weight=local_weight,
            world_size=dist.get_world_size(),
        )

    def _new_check(self, state: State) -> FirstBatchCheck:
        """The questions to this model, and the layout that it shares with the split."""
        split = split_of(state.dataloader)
        if self.token_weights != 'column' and any(LOSS_WEIGHTS in one for one in microbatches_of(state.batch)):
            log.warning(
                'The data have `%s`, of which no use is made. Set `token_weights=column` to weigh tokens by them.',
                LOSS_WEIGHTS,
            )
        regroups = split is not None and split.regroups
        check_rows_are_independent(state.model, self.loss_terms.coupled if regroups else [], strict=self.check_loss)
        if split is not None:  # what another model has left there says nothing of this one
            split.layout, split.checked = split.given_layout, False
        self._layout = _layout_of(state, split)
        self._can_reduce_once = self._ranks_may_meet_once(state)
        self._reduces_once = self._reduces_once and self._can_reduce_once
        if split is not None:
            split.layout, split.reduces_once = self._layout, self._reduces_once
        model: Any = state.model.module if isinstance(state.model, DistributedDataParallel) else state.model
        terms = self.loss_terms
        if terms.given_units is None:
            terms.router_coefficient = router_coefficient(model)
        probe = Probe(
            model,
            model.loss,
            model,
            lambda: get_precision_context(state.precision, state.precision_config),
            terms,
        )
        transforms = split.microbatch_transforms if split is not None else None

        def to_device(batch: Batch) -> Any:
            moved = state.device.batch_to_device(batch)
            return moved if transforms is None else transforms(moved)

        return FirstBatchCheck(
            probe,
            self._layout,
            to_device,
            loss_tokens=self.loss_tokens,
            check_loss=self.check_loss,
            microbatch_size=state.device_train_microbatch_size or 1,
            is_weighted=self.is_weighted,
        )

    def _start_attempt(self, state: State, logger: Logger) -> None:
        """BEFORE_TRAIN_BATCH: fires once per attempt (an OOM retry or a closure called again starts afresh)."""
        assert self._guard is not None, 'BATCH_START comes before BEFORE_TRAIN_BATCH'
        self._guard.start_attempt()
        self._reduces = []
        split = split_of(state.dataloader)
        if split is not None:
            split.state = state

    def _hide_carried(self, state: State, logger: Logger) -> None:
        """BEFORE_FORWARD: the totals are read, as Composer has just waited for its own; the model sees its own batch.

        A compiled forward would be compiled anew for each list that the batch carries. A microbatch without
        loss-generating tokens gets one label for the forward: a loss that divides by their number, and computes its
        gradient in the forward as fused ones do, would make NaNs that no weight of zero takes out again.
        """
        guard = self._guard
        assert guard is not None
        self._see_whether_reduced(state)
        if guard.loss_weight == 0 and guard.tokens:
            raise RuntimeError(
                f'The weights of a step must not all be 0, got: 0 for each of its {guard.tokens} loss-generating '
                f'tokens, {sample_name(self._device_batch, 0)} among them. Mend `{LOSS_WEIGHTS}`, or leave '
                'samples of no weight out of the data.'
            )
        batch, has_counts = state.batch, is_counted(state.batch)
        state.batch, self._weighing = without_carried(batch), None
        if has_counts and self._is_empty(batch):
            state.batch = with_one_label(state.batch)
        elif has_counts and self.is_weighted:
            if LOSS_WEIGHTS not in batch:
                raise RuntimeError(
                    f'Microbatches must carry the `{LOSS_WEIGHTS}` written at BATCH_START, got: {sorted(batch)}. A '
                    'custom `split_batch` or `microbatch_transforms` drops them; cut them as labels are cut, or use '
                    'token_data_spec().'
                )
            state.batch, self._weighing = weigh_labels(
                state.batch, batch[LOSS_WEIGHTS], num_tokens=num_loss_tokens(batch), total=loss_weight(batch)
            )
        hidden = {key: value for key, value in batch.items() if key not in state.batch}
        self._hidden = (hidden, state.batch.get('labels'), batch.get('labels'))

    def _replace_empty(self, state: State, logger: Logger) -> None:
        """AFTER_LOSS: the loss of a microbatch without tokens is zero; callbacks see what the batch carries again."""
        # What other algorithms have changed meanwhile stays changed, for the guard to see.
        hidden, made_up, labels = self._hidden
        # A model may take labels out of its batch.
        state.batch = {'labels': labels, **state.batch, **hidden}
        if labels is not None and state.batch.get('labels') is made_up:
            state.batch['labels'] = labels
        if self._weighing is not None:
            self._weighing.check_used()
        if self._num_steps == 0:
            self.loss_terms.check_coefficient(state.loss, state.outputs)
        state.loss = self.loss_terms.split(state.loss, state.outputs)
        if is_counted(state.batch) and self._is_empty(state.batch):
            state.loss = self.loss_terms.replace_empty(state.loss, attached_zero(state.outputs, state.loss))

    def _is_empty(self, batch: Batch) -> bool:
        return num_loss_tokens(batch) == 0 or num_samples(batch) == 0

    def _scale(self, state: State, logger: Logger) -> None:
        """BEFORE_BACKWARD: the last point where ``state.loss`` matters, so nothing may rescale it afterwards."""
        guard, batch = self._guard, state.batch
        assert guard is not None
        if not is_counted(batch):
            raise RuntimeError(
                f'Microbatches must carry the counts written at BATCH_START ({CARRIED}...), got: {sorted(batch)}. '
                'A custom `split_batch` or `microbatch_transforms` drops them; keep lists with one entry per row, or '
                'use token_data_spec().'
            )
        microbatch = MicrobatchWeight(
            num_tokens=num_loss_tokens(batch),
            loss_weight=loss_weight(batch),
            num_samples=num_samples(batch),
            # Composer's own split makes microbatches of a fixed number of rows; ours says how many it made.
            num_microbatches=num_microbatches(batch)
            or -(-guard.local_samples // int(state.device_train_microbatch_size or 1)),
            labelled={key: batch[key] for key in ('labels', 'attention_mask') if key in batch},
            step=guard,
        )
        guard.add_microbatch(microbatch)
        if self._weighing is not None:
            guard.weighings.append(self._weighing)
            guard.add_mean(self.loss_terms.token_term(state.loss), self._weighing.mean)
        self._look_at_loss(state, guard)
        self._raw_loss = self.loss_terms.joined(state.loss)
        guard.add_losses(self.loss_terms.terms(state.loss))
        state.loss = self.loss_terms.scale(state.loss, microbatch.scales(), observe=guard.observe)

    def _look_at_loss(self, state: State, guard: StepGuard) -> None:
        """Now and then holds a microbatch's loss to the losses of its tokens: later batches may have what none had yet.

        In the first steps and in one of sixteen, one microbatch each, another one every time: for a small model with a
        large vocabulary reading the logits once more costs a tenth of a microbatch.
        """
        assert self._check is not None
        assert self.rule is not None
        step, microbatch = self._num_steps, guard.latest
        if not (self._is_look_due() and self._check.is_plain and microbatch.loss_weight):
            return
        turn = step if step < NUM_FIRST_STEPS else step // LOOK_EVERY
        if guard.num_added - 1 != turn % max(microbatch.num_microbatches, 1):
            return
        logits = logits_of(state.outputs)
        if logits is not None and logits.shape[:2] == state.batch['labels'].shape:
            with torch.no_grad():
                weights = state.batch[LOSS_WEIGHTS] if self.is_weighted else None
                mean = mean_token_loss(logits.detach(), state.batch, self.rule, microbatch.loss_weight, weights)
            guard.add_mean(self.loss_terms.token_term(state.loss), mean)

    def _ranks_may_meet_once(self, state: State) -> bool:
        """Whether ranks may meet in the last microbatch of a step alone, where DDP reduces gradients.

        In automatic microbatching they ask each other after every forward whether memory ran out, synchronized batch
        norms meet within it, and losses of coupled rows may gather those of other ranks.
        """
        if not isinstance(state.model, DistributedDataParallel) or state.auto_microbatching or self.loss_terms.coupled:
            return False
        return not any(isinstance(module, torch.nn.SyncBatchNorm) for module in state.model.modules())

    def _see_whether_reduced(self, state: State) -> None:
        """BEFORE_FORWARD: whether DDP reduces gradients in the backward of this microbatch."""
        if not isinstance(state.model, DistributedDataParallel):
            return
        self._reduces.append(state.model.require_backward_grad_sync)
        count, split = num_microbatches(state.batch), split_of(state.dataloader)
        if not self._reduces[-1] or len(self._reduces) >= count:
            return
        if split is not None and split.options.equal_counts is False:
            raise RuntimeError(
                'Ranks must make equally many microbatches where gradients are reduced in each, or they wait for each '
                f'other without end, got: a reduction in microbatch {len(self._reduces)} of {count} with '
                "`equal_counts=False`. Leave it at 'auto', or `Trainer(ddp_sync_strategy=)` as it is by default."
            )
        if self._reduces_once:
            raise RuntimeError(
                'Gradients must be reduced in the last microbatch of a step alone, as they were in the steps before, '
                f'got: a reduction in microbatch {len(self._reduces)} of {count}. Leave `Trainer(ddp_sync_strategy=)` '
                'as it was when the checkpoint was written.'
            )

    def _is_look_due(self) -> bool:
        """The first steps of a run, and then one of some."""
        return self._num_steps < NUM_FIRST_STEPS or self._num_steps % LOOK_EVERY == 0

    def _restore(self, state: State, logger: Logger) -> None:
        """AFTER_BACKWARD: callbacks read ``state.loss`` at the end of the batch and expect the model's own."""
        state.loss = self._raw_loss
        self._raw_loss = None

    def _finish(self, state: State, logger: Logger) -> None:
        """AFTER_TRAIN_BATCH: gradients are whole, the optimizer has not moved yet."""
        guard = self._guard
        assert guard is not None
        _check_reduced(state.model)
        scaler = state.scaler
        is_scaled = scaler is not None and scaler.is_enabled()
        # Of all that a cut does, only a microbatch without tokens makes NaNs (0 / 0). Those that the model makes by
        # itself a forward over the whole batch would make too, and reading every gradient costs a hundredth of a step.
        is_due = guard.num_empty > 0 or self._is_look_due()
        guard.check(
            # Infinities under a loss scale are the scaler's own business: it skips the step.
            gradients=_gradients(state.optimizers) if is_due and not is_scaled else [],
            gradient_scale=scaler.get_scale() if is_scaled and scaler is not None else 1.0,
            by_microbatch=self.loss_terms.needs_microbatches,
        )
        assert self._check is not None
        kinds = [int(count > 0) for count in guard.totals.read()[3:]]
        split = split_of(state.dataloader)
        if self._check.is_new(kinds):
            had_companions = split is None or split.rules.companions
            own = kinds_of(self._layout, self._device_batch)
            self._check.prove(self._device_batch, split, own, [kinds])
            if split is not None and split.rules.companions and not had_companions:
                raise RuntimeError(
                    'Rows without media must have the same loss beside rows with media and without, got: another one, '
                    'seen first in this step, which was cut without regard to it. Start again with such rows in the '
                    'first batch; then every microbatch gets a row with media.'
                )
        if split is not None and len(self._reduces) > 1 and self._can_reduce_once:
            self._reduces_once = split.reduces_once = not any(self._reduces[:-1])
        self._device_batch = {}
        self._num_steps += 1
        if guard.tokens == 0:
            # Zero gradients would still decay weights and move momentum; no gradients move nothing.
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)
            self.num_empty_steps += 1
        metrics = {
            'token_accumulation/loss_generating_tokens': guard.tokens,
            'token_accumulation/empty_microbatches': guard.num_empty,
            'token_accumulation/empty_steps': self.num_empty_steps,
        }
        if self.is_weighted:
            metrics['token_accumulation/token_mean_loss'] = guard.token_mean(state.device.tensor_to_device)
        logger.log_metrics(metrics)


def _layout_of(state: State, split: Any) -> BatchLayout | None:
    """The layout that the user gave, else the model's own, else that of the batch; None: rows cannot be told apart."""
    if split is not None and split.layout is not None:
        return split.layout
    try:
        layout = BatchLayout.for_model(state.model)
    except (AttributeError, ValueError):  # no config, or a vision model of no known family
        found = None
        try:
            found = BatchLayout.infer(state.batch)
        except (KeyError, ValueError):
            if split is not None:
                raise
        inferred = [one for one in dist.all_gather_object(found) if one is not None]
        if len(inferred) < dist.get_world_size():
            return None
        layout = max(inferred, key=lambda one: len(one.family.entries))  # a rank without media sees a text model
    if split is None:
        try:
            layout = layout.with_row_entries(state.batch)
            layout.select(state.batch, [0])
            layout.media_per_row(state.batch)
        except (KeyError, ValueError):  # only the user's own split knows
            return None
    return layout


def _check_reduced(model: torch.nn.Module) -> None:
    """Raises RuntimeError if DDP left gradients unreduced, which it says itself only at the next forward."""
    if not isinstance(model, DistributedDataParallel):
        return
    try:
        model._check_reducer_finalized()  # private: DDP asks itself this at the start of its next forward
    except RuntimeError as error:
        without = [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
        raise RuntimeError(
            'Every trained parameter must be reached by the last microbatch of each rank, or DDP does not reduce the '
            f'gradients, got: {len(without)} that no microbatch of this rank reaches, such as {without[:3]}. Freeze '
            'what no loss reaches, and let token_data_spec() with a `layout` that knows the media of the model give '
            'every microbatch a row with media.'
        ) from error


def _gradients(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """This rank's gradients of all that moves, of sharded parameters its shards; quicker than a walk of the model."""
    moved = [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group['params']]
    gradients = [parameter.grad for parameter in moved if parameter.grad is not None]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    return [grad for grad in local if not grad.is_sparse and grad.numel()]
