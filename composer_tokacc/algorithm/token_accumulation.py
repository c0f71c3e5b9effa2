# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""TokenAccumulation: the weight of a token in an optimizer step does not depend on how its batch is cut.

Four objects hold the knowledge of the algorithm:

- :class:`.RunContext`, for a fit: the split, the first-batch check and the like. It is made at the first batch.
- :class:`.Step`, for an optimizer step: the counts of its rows, and a record of each microbatch.
- :class:`.MicrobatchRecord`: the counts of a microbatch, and the facts that its backward has shown. The step check
  reads it.
- :class:`.CurrentMicrobatch`, for the microbatch that is computed now: it weights the loss. It holds what is not needed
  after the backward, such as the model's outputs.

Three words:

- Rows are *new* if the first-batch check has seen no such rows, for example longer ones, or the first with an image.
  They are checked before they are cut.
- A token is *measured* if a hook on the logits reads its weight off the gradient.
- A *bypass* is a part of the model's loss that is made neither of the logits nor of the router's loss, such as a
  penalty on weights. The measured weights say nothing about it. Terms of a dict loss to which ``loss_units`` gives
  another unit than ``'tokens'`` do not count as a bypass.
"""

from __future__ import annotations

import copy
import logging
import sys
from dataclasses import replace
from typing import Any, NoReturn

import torch
from composer.core import Algorithm, Event, Precision, State
from composer.loggers import Logger

from composer_tokacc.algorithm.microbatch import CurrentMicrobatch
from composer_tokacc.algorithm.rank_report import RankFlags, RankReport, summed_over_ranks
from composer_tokacc.algorithm.setup import (
    AlgorithmOptions,
    RunContext,
    arguments_to_compare,
    check_labels_and_ids,
    microbatch_size_of,
)
from composer_tokacc.arguments import check_state
from composer_tokacc.batch import Batch, labels_of, sample_name
from composer_tokacc.checks.step import MicrobatchRecord, Step, check_step
from composer_tokacc.collectives import max_over_ranks, raise_on_all_ranks, sum_over_ranks
from composer_tokacc.data_spec.rank_widths import WidthSums, check_widths
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.labelled import LabelSelector
from composer_tokacc.layout import describe_all, microbatches_of
from composer_tokacc.plan_agreement import (
    PlanRecord,
    PlanSums,
    check_equal_on_ranks,
    check_plans,
    learning_rates_of,
    plan_record_of,
)
from composer_tokacc.refusals import InvalidInputError, NotExactError, RefusalError
from composer_tokacc.repeated_samples import announce_marking, first_batch_of, num_repeated
from composer_tokacc.row_counts import (
    ROWS_KEY,
    attach_row_counts,
    check_loss_shares,
    num_rows,
    row_counts_of,
    with_counts,
)
from composer_tokacc.weights import LOSS_WEIGHTS, with_weights_of_positions

log = logging.getLogger(__name__)


class TokenAccumulation(Algorithm):
    r"""Gives every loss-generating token of an optimizer step the same weight, or a weight that you choose.

    Composer weights the mean loss of a microbatch by its samples, so a token in a microbatch of few tokens weighs more.
    For microbatch :math:`m` on rank :math:`r` this algorithm multiplies the loss by

    .. math::
        s_{rm} = \frac{t_{rm}}{T} \cdot \frac{N}{n_{rm}}

    Here :math:`t` is the number of loss-generating tokens of the microbatch, and :math:`n` the number of its samples as
    Composer counts them. :math:`T` and :math:`N` are the sums of these over all microbatches and ranks of the step. If
    tokens have weights (``token_weights``), :math:`t` and :math:`T` are sums of their weights. Together with Composer's
    weight this gives the gradient of one forward over the whole global batch, for any microbatch size, number of ranks
    and padding.

    Its main events are ``Event.BATCH_START`` (counts, and sums over the ranks), ``BEFORE_FORWARD``, ``AFTER_LOSS``,
    ``BEFORE_BACKWARD`` (scales), ``AFTER_BACKWARD`` (restores the raw loss), ``AFTER_TRAIN_BATCH`` (checks the weights
    of the tokens, before the optimizer steps) and ``BATCH_END`` (frees the batch).

    Args:
        loss_tokens (str): Which labels the model's loss averages over: ``'causal'``, ``'causal_attended'``,
            ``'unshifted'`` (see :func:`.loss_mask`), or ``'auto'``: a probe before the first step finds the rule.
            Default: ``'auto'``.
        loss_units (dict[str, str], optional): For dict losses, the denominator of each term: ``'tokens'``,
            ``'samples'``, ``'coupled_samples'`` (rows of a microbatch see each other, as in a contrastive loss) or
            ``'microbatches'`` (router statistics). Terms of the last two kinds depend on which rows share a
            microbatch. A run with such terms is refused if its split regroups rows. Default: ``None``, all terms are
            means over tokens.
        token_weights (str): The weight of a token. ``'token'``: all weigh the same. With ``n`` loss-generating tokens
            in its sample, a token weighs ``1 / sqrt(n)`` for ``'sqrt'``, and ``1 / n`` for ``'sample'``, so that all
            samples weigh the same. ``'column'``: the batch has the weights, ``batch['loss_weights']``, a float per row
            or per position of the labels. Unless all weigh the same, the loss must be made of the logits that the
            model returns. Default: ``'token'``.
        router_balance (str): How the load-balancing loss of a Hugging Face mixture of experts is computed.
            ``'microbatch'``: for each microbatch by itself, and all microbatches weigh the same. ``'step'``: as in one
            forward over the whole global batch. This takes one more forward of each microbatch. Default:
            ``'microbatch'``.
        logits (str): The positions at which the model computes logits in training: ``'labels'``, only at positions that
            predict a label, which saves most of the time and memory of the output embedding; ``'all'``, at all
            positions, for callbacks that read ``outputs.logits``; or ``'auto'``, only at labels if the first-batch
            check shows that loss and gradient stay the same. With logits at labels ``outputs.logits`` has one row, in
            the order of the labels. Default: ``'auto'``.
        check_loss (bool): Whether to check the model's loss. The first-batch check compares it with the rule, tokens
            are measured in each step, and the run is refused if somebody adds a term to the loss, or if a BatchNorm is
            in training mode. ``False`` needs an explicit ``loss_tokens``. If tokens have weights, the first-batch check
            and the measuring remain. Default: ``True``.

    Raises:
        ValueError: If an argument is not one of the above.
        RuntimeError: Before the optimizer moves, if the step is not exact. The message says why, and what to do.

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
        self.options = AlgorithmOptions(
            loss_tokens=loss_tokens,
            loss_units=copy.copy(loss_units),  # because the caller may change it later
            token_weights=token_weights,
            router_balance=router_balance,
            logits=logits,
            check_loss=check_loss,
        )
        self.num_empty_steps = 0  # steps without loss-generating tokens, of all fits
        self._num_batches_read = 0  # from the start of the loader's epoch, even if the run was resumed within it
        # The number of batches after which only some ranks end the epoch. None: all end it together.
        self._num_batches_of_shortest_rank: int | None = None
        # Whether DDP has reduced gradients only in the last microbatch of earlier steps. Then the split may give ranks
        # unequal numbers of microbatches.
        self._reduces_once = False
        self._context: RunContext | None = None  # set at the first batch of a fit, after its check
        self._microbatch: CurrentMicrobatch | None = None  # from BEFORE_FORWARD to AFTER_BACKWARD

    def __repr__(self) -> str:
        """Returns the call that makes this algorithm."""
        arguments = [f'{name}={value!r}' for name, value in vars(self.options).items()]
        return f'TokenAccumulation({", ".join(arguments)})'

    def __str__(self) -> str:
        """Returns a short name, because Composer writes it into its trace at every event."""
        return type(self).__name__

    @property
    def is_weighted(self) -> bool:
        """Whether tokens may have unequal weights."""
        return self.options.is_weighted

    @property
    def rule(self) -> str | None:
        """The loss rule. None: it is not known before the first batch."""
        return None if self._context is None else self._context.loss_facts.rule.value

    @property
    def _run(self) -> RunContext:
        """The context of this fit. It is not None after the first batch was set up, see :meth:`_set_up`."""
        assert self._context is not None, 'BATCH_START comes first'
        return self._context

    @property
    def _current(self) -> CurrentMicrobatch:
        """The microbatch that is computed now, for events from AFTER_LOSS to AFTER_BACKWARD: there it is not None."""
        assert self._microbatch is not None, 'BEFORE_FORWARD comes first'
        return self._microbatch

    @property
    def has_logits(self) -> bool:
        """Whether the model returns logits. If not, it returns hidden states, and its loss computes the logits.

        True before the first batch.
        """
        return self._context is None or self._context.loss_facts.has_logits

    @property
    def why_all_logits(self) -> str | None:
        """Why the arguments need logits at all positions; None: they allow logits only at labels."""
        return self.options.why_all_logits

    def selects_logits(self, state: State) -> bool:
        """Returns whether microbatches compute logits only at labels. Before the first batch it returns False."""
        return self._selector_for(state) is not None

    def select_logits(self, state: State, batch: Batch, num_labels: int) -> None:
        """Makes the model compute logits only at labels in its next forward, if :meth:`selects_logits` returns True.

        The rehearsal of a run also calls it, because it makes forwards without the Trainer.

        Args:
            state: The trainer's state.
            batch: The microbatch.
            num_labels: How many of its labels count.
        """
        selector = self._selector_for(state)
        if selector is not None:
            num_positions = labels_of(batch).numel()
            # If no label counts, CurrentMicrobatch gives the model one. With some `loss_units` it does not, but then
            # there is no selector.
            num_labels = max(num_labels, 1)
            selector.begin_forward(self._run.loss_facts.rule, num_labels, num_positions)

    def _selector_for(self, state: State) -> LabelSelector | None:
        """Returns the selector that makes the model compute logits only at labels; None: it computes all logits."""
        # Metrics of training read all logits. They may be set at any time.
        if self._context is None or state.train_metrics:
            return None
        return self._context.selector  # prove() sets it to None if logits at labels would change the loss

    # A method for an event has the name of the event with an underscore in front, such as `_batch_start`. It may return
    # metrics to log. Methods of Composer's callbacks have the same names without the underscore.

    def match(self, event: Event, state: State) -> bool:
        """Returns whether there is a method for an event."""
        return hasattr(self, f'_{event.value}')

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Calls the method for the event, and logs the metrics that it returns."""
        method = getattr(self, f'_{event.value}')
        metrics = method(state)
        if metrics:
            logger.log_metrics(metrics)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for a copy or a pickle. Those that hold the model or the graph become None."""
        return {**vars(self), '_context': None, '_microbatch': None}

    def state_dict(self) -> dict[str, Any]:
        """Returns only plain values, because Composer's next release loads checkpoints with ``weights_only=True``."""
        state = super().state_dict()
        state['rule'] = self.rule  # for a reader of the checkpoint. A resumed run finds it again
        state['num_empty_steps'] = self.num_empty_steps
        state['reduces_once'] = self._reduces_once
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the values that make a resumed run give the same bits and metrics. It finds the rule again."""
        check_state(state, keys={'num_empty_steps'}, counts=('num_empty_steps',))
        self.num_empty_steps = state['num_empty_steps']
        self._reduces_once = state.get('reduces_once', False)

    def _fit_start(self, state: State) -> None:
        """Forgets an earlier fit, and compares the lengths of the ranks' loaders (a collective).

        Refuses a second TokenAccumulation.
        """
        self._fit_end(state)  # because FIT_END does not come after an error
        self._context = None
        # Not 0 if a RegroupingBatchSampler resumes within an epoch.
        self._num_batches_read = first_batch_of(state.train_dataloader)
        announce_marking(state.train_dataloader)
        self._num_batches_of_shortest_rank = _length_of_shortest_loader(state)
        if sum(isinstance(algorithm, TokenAccumulation) for algorithm in state.algorithms) > 1:
            raise InvalidInputError(
                '`algorithms` must hold TokenAccumulation only once, because each of them would scale the loss.'
            )

    def _epoch_start(self, state: State) -> None:
        """Compares the lengths of the loaders again, because a callback may have changed the loader; a collective."""
        self._num_batches_of_shortest_rank = _length_of_shortest_loader(state)
        announce_marking(state.train_dataloader)

    def _before_dataloader(self, state: State) -> None:
        """Counts the batches that are read, also those that Composer discards in a resumed run.

        The number tells which samples of the batch are repeated, and which batch of a plan it is.
        ``timestamp.batch_in_epoch`` is not this number: with ``Trainer(spin_dataloaders=False)`` it goes on from the
        checkpoint or from the last fit, although the loader is read from its start.

        Raises RuntimeError if only some ranks are at the end of the epoch, because the others would wait for them. All
        ranks raise it, because Composer runs this event on all of them before it sees the end.
        """
        if self._num_batches_read == self._num_batches_of_shortest_rank:
            raise NotExactError(
                f'`len(dataset)` must give all ranks equally many batches, but some ranks end the epoch after '
                f'{self._num_batches_read} batches, and the others would wait for them. Return the largest number of '
                'samples of a rank on all ranks (ranks may read fewer), or set `train_subset_num_batches`.'
            )
        self._num_batches_read += 1

    def _iteration_end(self, state: State) -> None:
        """Counts from 0 again, as at the end of an epoch, because Composer restarts the loader.

        An iteration whose length is in tokens may end within an epoch.
        """
        self._num_batches_read = 0

    def _epoch_end(self, state: State) -> None:
        """Refuses an epoch without batches, and warns of an epoch that has ended too early.

        Without batches a run whose `max_duration` is in batches would never end.
        """
        self._num_batches_read = 0
        # `state.timestamp` already belongs to the next epoch. Composer sets the previous one just before this event.
        assert state.previous_timestamp is not None
        num_batches = state.previous_timestamp.batch_in_epoch
        if num_batches == 0:
            raise NotExactError(
                'The train dataloader must give at least one batch on every rank, but an epoch has ended without any.'
            )
        if state.dataloader_len is not None and num_batches < state.dataloader_len:
            log.warning(
                'An epoch has ended after %d batches, but the length of the train dataloader is %d: the dataset or the '
                'collator has raised StopIteration, another rank has fewer batches, or the length is not exact.',
                num_batches.value,
                state.dataloader_len.value,
            )

    def _eval_start(self, state: State) -> None:
        """Gives the eval loader's split the model, for its layout, and the loss rule by which batches are counted."""
        split = split_of(state.dataloader)
        if split is None:
            return
        rule = self.options.rule
        if self._context is not None:
            rule = self._context.loss_facts.rule  # the rule of the model
        split.start_evaluation(state.model, rule)

    def _fit_end(self, state: State) -> None:
        """Removes our hooks from the model, and makes the split forget it."""
        self._microbatch = None
        if self._context is not None:
            self._context.end()  # it is kept, because `rule` is read after a fit

    # Before the step.

    def _batch_start(self, state: State) -> None:
        """Counts the tokens of the step, sums the counts over the ranks, and checks new rows before they are cut.

        The batch is still on the CPU, so counting does not wait for the GPU.
        """
        refusal = self._refusal_of_batch(state)
        if self._context is None:
            raise_on_all_ranks(refusal)  # before the collectives of the first-batch check
            self._set_up(state)
        elif refusal is not None:
            self._refuse(state, refusal)
        run = self._run
        batch_index = self._num_batches_read - 1
        plan = _plan_of(state, batch_index)
        microbatch_size = microbatch_size_of(state)  # a callback, or too little memory, may have changed it
        run.token_choice.begin_step(microbatch_size)
        try:
            step = self._count_batch(state, batch_index)
            # Facts about rows are found when they are first read, so these may refuse the batch, too.
            width = run.width_of(step)
            has_new_rows = run.row_check.has_new_rows(step.facts, microbatch_size)
        except RefusalError as refusal_of_counts:
            self._refuse(state, refusal_of_counts)
        # Everything that ranks must know of each other before the batch is cut.
        report = RankReport(
            counts=step.counts,
            widths=WidthSums.of(width),
            plan=PlanSums.of(plan),
            flags=RankFlags(has_new_rows=has_new_rows, reduces_once=self._reduces_once),
        )
        sums = self._sum_reports(state, report)
        step.totals = sums.counts
        # If one rank has seen that DDP reduces once, it holds for all. A rank that makes only one microbatch cannot see
        # it, but with `equal_counts=False` another rank may make several.
        self._reduces_once = sums.flags.reduces_once > 0
        step.reduces_once = self._reduces_once
        check_plans(sums.plan, plan)
        _check_has_weight(step, state.batch)
        # A callback may have replaced the optimizers since the last step. After the sums over the ranks, because a rank
        # that raises an error before them would leave the others waiting.
        run.closure_hooks.update(state)
        # In steps 16, 32, 64 and so on a check is due even without new rows, because a model may begin to treat known
        # rows in another way. In the first step none is due, because _set_up() has just checked its rows.
        run.row_check.note_step(run.step_number)
        needs_check = run.row_check.is_due or sums.flags.has_new_rows > 0
        if needs_check:
            run.prove(state.batch, microbatch_size)  # new rows are cut only by rules that were proven for them
        # Each rank pads to its own longest row. One forward over all rows would pad some of them more. More padding on
        # the left may change a row. So may a greater width, if it is over the limit of a rotary embedding.
        check_widths(
            sums.widths,
            lambda: run.width_of(step),  # not `width`, because prove() may have changed the rules
            are_sums_outdated=needs_check,
            is_trimmed=run.split is not None,
        )
        run.begin_step(step)
        # Not counted when the step is computed, because an optimizer may compute it several times.
        self.num_empty_steps += run.is_step_empty

    def _refusal_of_batch(self, state: State) -> RefusalError | None:
        """Returns why this rank's batch cannot be counted. The caller tells the other ranks, too."""
        vocabulary = None if self._context is None else self._context.loss_facts.vocabulary
        try:
            check_labels_and_ids(state.model, microbatches_of(state.batch), vocabulary)
            if self._context is None and self.options.token_weights == 'column':
                # Only to see whether it refuses the weights. In the first-batch check, which is a collective, a refusal
                # of one rank would leave the others waiting.
                with_weights_of_positions(state.batch)
        except RefusalError as refusal:
            return refusal
        return None

    def _sum_reports(self, state: State, report: RankReport, refusal: RefusalError | None = None) -> RankReport:
        """Adds up the reports of all ranks in one all-reduce. Raises on all ranks if one of them refuses its batch.

        Args:
            state: The trainer's state.
            report: The report of this rank.
            refusal: Why this rank refuses its batch. If it does, ``report`` must have the flag ``refuses_batch``.
        """
        sums = summed_over_ranks(report, state.device.tensor_to_device, is_weighted=self.is_weighted)
        if sums.flags.refuses_batch:
            raise_on_all_ranks(refusal)
        return sums

    def _refuse(self, state: State, refusal: RefusalError) -> NoReturn:
        """Raises the refusal of this rank's batch, on the other ranks, too. They wait for this rank's report."""
        report = RankReport(flags=RankFlags(refuses_batch=1))
        self._sum_reports(state, report, refusal)
        raise refusal  # never reached, because the line above raises it

    def _set_up(self, state: State) -> None:
        """Sets up the fit at its first batch, and runs the first-batch check, which finds the loss rule."""
        check_equal_on_ranks(arguments_to_compare(state, self.options))
        context = RunContext(state, self.options)
        if not context.reductions.waits_only_in_reduction:
            # It may be True from a checkpoint or an earlier fit, but now ranks may wait for each other in every
            # microbatch. So they must make equally many.
            self._reduces_once = False
        context.prove(state.batch, microbatch_size_of(state))
        self._context = context

    def _count_batch(self, state: State, batch_index: int) -> Step:
        """Adds the counts of the rows to ``state.batch``, and returns the record of the step.

        Rows of a repeated sample of another rank are first marked as 0 samples. Counting keeps this mark.
        """
        run = self._run
        rule = run.loss_facts.rule
        batch: Batch = state.batch
        num_repeated_rows = num_repeated(state.dataloader, batch_index, num_rows(batch))
        if num_repeated_rows > 0:
            # The rows of a repeated sample are the last ones.
            rows = list(row_counts_of(batch))  # they have no other counts yet
            for number in range(len(rows) - num_repeated_rows, len(rows)):
                rows[number] = replace(rows[number], samples=0)
            batch = attach_row_counts(batch, rows)
        # The counts become an entry of the batch, so that the split cuts them together with the rows. Rows of 0 samples
        # lose their labels.
        counted_batch = with_counts(batch, rule, self.options.token_weights)
        tokens_of_rows = [row.loss_tokens for row in row_counts_of(counted_batch)]
        # A sampler with `loss_shares` has planned the batch with numbers of loss tokens, which must be right.
        check_loss_shares(batch, self.options.token_weights, rule, tokens_of_rows)
        state.batch = self._with_new_labels_marked(counted_batch)
        return Step(
            rows=row_counts_of(state.batch),
            facts=describe_all(run.row_check.layout, state.batch),
            is_weighted=self.is_weighted,
        )

    def _with_new_labels_marked(self, batch: Batch) -> Batch:
        """Marks the rows of a counted batch that have a label whose id counts for the first time in the run.

        The microbatches of these rows are measured, because a loss may treat some labels in another way.
        """
        run = self._run
        has_new_label = run.token_choice.rows_with_new_labels(batch, run.loss_facts.rule)
        if not any(has_new_label):
            return batch
        marked_rows = []
        for row, is_new in zip(row_counts_of(batch), has_new_label, strict=True):
            marked_row = replace(row, has_new_label=is_new)
            marked_rows.append(marked_row)
        return attach_row_counts(batch, marked_rows)

    def _before_train_batch(self, state: State) -> None:
        """Prepares an attempt to compute the step: forgets an earlier one, and repeats the checks of the model.

        Composer computes a step again if memory ran out, or if the optimizer takes a closure.
        """
        run = self._run
        step = run.step
        _check_not_repeated_in_another_size(step, state.device_train_microbatch_size)
        run.model_checks.check()
        run.reductions.start_attempt()
        step.microbatches = []
        self._microbatch = None  # the graph of a microbatch that failed would stay in memory
        # On a GPU Composer always has a scaler, but it scales the loss only in this precision.
        if state.precision == Precision.AMP_FP16 and state.scaler is not None:
            step.gradient_scale = state.scaler.get_scale()
        if run.balance is not None:
            # One more forward of each microbatch that the split has made (`step.planned`), to count how often each
            # expert is chosen in the step.
            run.balance.count(step.planned, is_weighted=step.is_weighted)

    # A microbatch.

    def _before_forward(self, state: State) -> None:
        """Begins the record of a microbatch, and hides our entries of the batch from the model."""
        run = self._run
        step = run.step
        # If ranks have unequal numbers of microbatches, a rank that reduces before its last microbatch may wait forever
        # for a rank that has no such microbatch. The split makes unequal numbers if DDP reduced only once in earlier
        # steps, or if the user asks for it.
        allows_unequal_counts = run.split is not None and run.split.options.equal_counts is False
        must_reduce_once = step.reduces_once or allows_unequal_counts
        run.reductions.begin_microbatch(len(step.planned), must_reduce_once=must_reduce_once)
        batch: Batch = state.batch
        _check_carries_counts(batch, is_weighted=step.is_weighted)
        record = MicrobatchRecord(batch=batch, rows=row_counts_of(batch))
        step.microbatches.append(record)
        self._microbatch = CurrentMicrobatch(run, record)
        state.batch = self._microbatch.batch_for_model
        self.select_logits(state, batch, record.counts.loss_tokens)

    def _before_loss(self, state: State) -> None:
        """Notes the loss in the outputs, because the loss of the step may be changed before :meth:`_after_loss`."""
        self._current.note_loss(state.outputs)

    def _after_loss(self, state: State) -> None:
        """Puts our entries back into the batch, and prepares the loss for :meth:`_before_backward`, which scales it."""
        microbatch = self._current
        state.batch = microbatch.put_back(state.batch)
        state.loss = microbatch.prepare_loss(state.loss, state.outputs, state.batch)

    def _before_backward(self, state: State) -> None:
        """Scales the loss, so that its tokens get their weight in the step, and adds hooks that measure this weight.

        This algorithm must be the last one, because later changes of the loss are not scaled.
        """
        microbatch = self._current
        # Called a second time, because algorithms may have taken our entries or the labels out of the batch since.
        state.batch = microbatch.put_back(state.batch)
        state.loss = microbatch.scale_loss(state.loss, state.batch, microbatch_size_of(state))

    def _after_backward(self, state: State) -> None:
        """Adds the gradients that a reduction waits for, and puts the unscaled loss back.

        Callbacks read the loss at the end of the batch.
        """
        microbatch = self._current
        microbatch.check_no_added_term(state.loss)  # a term that is added now is not scaled, whatever its unit is
        self._run.reductions.end_microbatch()
        state.loss = microbatch.raw_loss
        self._microbatch = None

    # After the step.

    def _after_train_batch(self, state: State) -> dict[str, float]:
        """Checks the step before the optimizer moves, drops the gradients of an empty step, and returns the metrics."""
        run = self._run
        step = run.step
        run.reductions.check_reduced()
        if run.step_number == 0 and not (step.is_weighted or step.is_measured):
            log.info('The weights of tokens are not measured in training. All tokens are counted in every step.')
        # A bypass that was in the loss from the first step on is a part of the loss. One that begins later is new.
        forbids_bypass = self.options.needs_loss_check and run.first_step_has_bypass is False
        check_step(step, forbids_bypass=forbids_bypass)
        if run.first_step_has_bypass is None and step.counts.loss_weight:
            run.first_step_has_bypass = step.has_bypass
        if run.balance is not None:
            run.balance.check()
        if run.split is not None:  # only our split makes unequal numbers of microbatches if DDP has reduced once
            reduced_once = run.reductions.has_reduced_once()
            if reduced_once is not None:  # None: this step does not show it
                self._reduces_once = reduced_once
        if run.is_step_empty:
            # One forward over the whole batch would have the loss NaN, so the step must change no weight. If other
            # terms, such as a router's loss, have a gradient, it is dropped. Gradients become None, not 0, so that the
            # optimizer neither decays weights nor moves by its momentum.
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)
        # From here on the optimizer may move, see _check_not_repeated_in_another_size().
        step.completed_size = state.device_train_microbatch_size
        return self._metrics(state, step)

    def _batch_end(self, state: State) -> None:
        """Ends the step. Before this event an optimizer may compute the step several times (LBFGS, SAM)."""
        run = self._run
        step = run.step
        run.token_choice.end_step(len(step.microbatches))
        run.step_number += 1
        # Otherwise the batch would stay in memory while the next one is read.
        step.facts = ()
        step.planned = ()

    def _metrics(self, state: State, step: Step) -> dict[str, float]:
        """Returns the metrics of a step. A collective if tokens have weights."""
        tokens = step.totals.loss_tokens
        num_empty_on_rank = sum(record.is_empty for record in step.microbatches)
        metrics: dict[str, float] = {
            'token_accumulation/loss_generating_tokens': tokens,
            'token_accumulation/empty_microbatches': num_empty_on_rank,
            'token_accumulation/empty_steps': self.num_empty_steps,
        }
        if step.is_weighted:
            # The loss that Composer logs is weighted. This metric is the mean in which all tokens weigh the same.
            zero = torch.zeros(1, dtype=torch.float64)
            loss_sum = state.device.tensor_to_device(zero)
            for record in step.microbatches:
                if record.token_loss is not None:
                    loss_sum += record.token_loss.to(loss_sum)
            (loss_sum_of_ranks,) = sum_over_ranks(loss_sum)
            metrics['token_accumulation/token_mean_loss'] = loss_sum_of_ranks / max(tokens, 1)
        return metrics


def _length_of_shortest_loader(state: State) -> int | None:
    """Returns after how many batches some ranks end the epoch, and others would wait for them; a collective.

    None: all ranks end it together, or their loaders do not wait for other ranks. No error is raised here, because the
    run may end before this batch. The caller raises it when it would read a further batch.
    """
    # No limit if the loader does not wait for other ranks. Nor if its length is not known: such a loader gives batches
    # until no rank has samples.
    num_batches = sys.maxsize
    if getattr(state.dataloader, 'waits_for_ranks', False) and state.dataloader_len is not None:
        num_batches = int(state.dataloader_len)
    # A maximum over the ranks gives the smallest length, too, as the negative of the largest negative.
    longest, largest_negative = max_over_ranks([num_batches, -num_batches])
    shortest = -largest_negative
    return shortest if shortest < longest else None


def _plan_of(state: State, batch_index: int) -> PlanRecord:
    """Returns how the loader has assigned the samples of the global batch to the ranks, and the learning rates.

    Both must be the same on all ranks. The record of a loader without a plan has only the learning rates.
    """
    plan = plan_record_of(state.batch, state.dataloader, batch_index)
    if plan is None:
        plan = PlanRecord()
    return replace(plan, learning_rates=learning_rates_of(state.optimizers))


def _check_has_weight(step: Step, batch: Batch) -> None:
    """Raises RuntimeError if the step has loss-generating tokens, but all of them have weight 0."""
    if step.totals.loss_weight == 0 and step.totals.loss_tokens:
        raise NotExactError(
            f'The weights of a step must not all be 0, got: 0 for each of its {step.totals.loss_tokens} '
            f'loss-generating tokens, {sample_name(batch, 0)} among them. Fix `{LOSS_WEIGHTS}` (docs/errors.md#counts).'
        )


def _check_not_repeated_in_another_size(step: Step, microbatch_size: float | None) -> None:
    """Raises RuntimeError if Composer computes a step again, but the optimizer may have moved weights already.

    With automatic microbatching Composer halves the microbatch size and repeats the batch if memory runs out, even in
    the optimizer. It also does so if the memory allocator had to retry in two steps in a row. An optimizer that
    evaluates the step several times (LBFGS, SAM) is not refused, because it does so with one microbatch size.
    """
    if step.completed_size not in (None, microbatch_size):
        raise NotExactError(
            'The optimizer must move once a batch, got: a batch that Composer computes again, because memory was short '
            f'in the step of the optimizer, which may have moved weights. Set `device_train_microbatch_size` to a '
            f"number instead of 'auto', such as {microbatch_size}, and go on from the last checkpoint "
            '(docs/errors.md#ranks).'
        )


def _check_carries_counts(batch: Batch, *, is_weighted: bool) -> None:
    """Raises RuntimeError if a microbatch has lost the entries that its batch got at BATCH_START."""
    keys = [ROWS_KEY, LOSS_WEIGHTS] if is_weighted else [ROWS_KEY]
    missing = [f'`{key}`' for key in keys if batch.get(key) is None]
    if missing:
        raise NotExactError(
            f'Microbatches must carry the {" and ".join(missing)} written at BATCH_START, got only: {sorted(batch)}. A '
            'custom `split_batch` or `microbatch_transforms` drops them: use token_data_spec() (docs/errors.md#counts).'
        )
