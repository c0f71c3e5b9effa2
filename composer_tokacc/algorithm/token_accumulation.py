# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""TokenAccumulation: the weight of a token in an optimizer step does not depend on how its batch is cut.

Four objects hold the knowledge of the algorithm:

- :class:`.RunContext`, for a fit: the split, the first-batch check and the like. It is made at the first batch.
- :class:`.Step`, for an optimizer step: the counts of its rows, and a record of each microbatch.
- :class:`.MicrobatchRecord`: the counts of a microbatch, and the facts that its backward has shown. The step check
  reads it.
- :class:`CurrentMicrobatch`: objects that only the computation of a microbatch needs, such as the model's outputs.

Three words:

- Rows are *new* if the first-batch check has seen no such rows, for example longer ones, or the first with an image.
  They are checked before they are cut.
- A token is *measured* if a hook on the logits reads its weight off the gradient.
- A *bypass* is a part of the model's loss that depends on parameters neither through the logits nor through the
  router's loss, such as a penalty on weights. The measured weights say nothing about it. A term that ``loss_units``
  gives another unit is not a bypass.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from composer.core import Algorithm, Event, Precision, State
from composer.loggers import Logger

from composer_tokacc.algorithm.functional import sample_weight, token_weight
from composer_tokacc.algorithm.loss_terms import (
    LOSS_UNITS,
    SplitLoss,
    Term,
    attached_zero,
    empty_sum,
    sum_of_means,
    tensors_in,
)
from composer_tokacc.algorithm.rank_report import RankFlags, RankReport, summed_over_ranks
from composer_tokacc.algorithm.setup import (
    AlgorithmOptions,
    RunContext,
    check_labels_and_ids,
    check_trains_something,
    takes_media,
)
from composer_tokacc.arguments import check_state
from composer_tokacc.batch import Batch, BatchDict, labels_of, sample_name
from composer_tokacc.checks.logits import (
    Edge,
    at_predictions,
    edge_of,
    edges_of_graph,
    gradient_by_logits,
    has_bypass,
    logits_of,
    router_loss_of,
    targets_of,
    weigh_tokens,
)
from composer_tokacc.checks.step import (
    MicrobatchRecord,
    Step,
    TokenChoice,
    check_step,
    trained_added_rows,
)
from composer_tokacc.collectives import max_over_ranks, raise_on_all_ranks, sum_over_ranks
from composer_tokacc.counting import real_tokens, with_one_label
from composer_tokacc.data_spec.rank_widths import WidthSums, check_widths
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.labelled import LabelSelector, batch_at_logits
from composer_tokacc.layout import describe_all, microbatches_of
from composer_tokacc.plan_agreement import PlanRecord, PlanSums, check_plans, learning_rates_of, plan_record_of
from composer_tokacc.refusals import InvalidInputError, NotExactError, RefusalError
from composer_tokacc.repeated_samples import first_batch_of, num_repeated
from composer_tokacc.row_counts import (
    ROWS_KEY,
    attach_row_counts,
    check_loss_shares,
    num_rows,
    num_samples,
    row_counts_of,
    with_counts,
    without_row_counts,
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
        self._token_choice = TokenChoice()  # which tokens to measure
        self._context: RunContext | None = None  # made at the first batch of a fit
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
        return None if self._context is None else self._context.check.rule

    @property
    def _run(self) -> RunContext:
        """The parts that were set up at the first batch."""
        assert self._context is not None, 'BATCH_START comes first'
        return self._context

    @property
    def _current(self) -> CurrentMicrobatch:
        """The microbatch that is computed now."""
        assert self._microbatch is not None, 'BEFORE_FORWARD comes first'
        return self._microbatch

    @property
    def _known_rule(self) -> str:
        """The loss rule. Read it only after the first-batch check, which sets it even if the user has named it."""
        rule = self.rule
        assert rule is not None
        return rule

    @property
    def has_logits(self) -> bool:
        """Whether the model returns logits. If not, it returns hidden states, and its loss computes the logits.

        True before the first batch.
        """
        return self._context is None or self._context.check.has_logits

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
            # At least 1, because CurrentMicrobatch adds a label if none counts. With `loss_units` it may add none, but
            # then there is no selector.
            num_labels = max(num_labels, 1)
            selector.begin_forward(self._known_rule, num_labels, num_positions)

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
        self._token_choice = TokenChoice()
        # Not 0 if a RegroupingBatchSampler resumes within an epoch.
        self._num_batches_read = first_batch_of(state.train_dataloader)
        self._num_batches_of_shortest_rank = _compare_lengths(state)
        if sum(isinstance(algorithm, TokenAccumulation) for algorithm in state.algorithms) > 1:
            raise InvalidInputError(
                '`algorithms` must hold TokenAccumulation only once, because each of them would scale the loss.'
            )

    def _epoch_start(self, state: State) -> None:
        """Compares the lengths of the loaders again, because a callback may have changed the loader; a collective."""
        self._num_batches_of_shortest_rank = _compare_lengths(state)

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
        rule = self.rule
        if rule is None and self.options.loss_tokens != 'auto':  # no batch was trained yet, but the user named the rule
            rule = self.options.loss_tokens
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
            self._refuse(state, refusal)  # tells the other ranks, which wait in the all-reduce below
        run = self._run
        batch_index = self._num_batches_read - 1
        # How the loader has assigned the samples of the global batch to the ranks. All ranks must have the same plan
        # and the same learning rates.
        plan = plan_record_of(state.batch, state.dataloader, batch_index) or PlanRecord()
        plan = replace(plan, learning_rates=learning_rates_of(state.optimizers))
        run.read_microbatch_size(state)  # a callback, or too little memory, may have changed it
        self._token_choice.begin_step(run.check.microbatch_size)
        try:
            step = self._count_batch(state, batch_index)
            # Facts about rows are found when they are first read, so these may refuse the batch, too.
            width = run.width_of(step)
            has_new_rows = run.check.has_new_rows(step.facts)
        except RefusalError as refusal_of_counts:
            self._refuse(state, refusal_of_counts)
        # One all-reduce for everything that ranks must know of each other before the batch is cut.
        report = RankReport(
            counts=step.counts,
            widths=WidthSums.of(width),
            plan=PlanSums.of(plan),
            flags=RankFlags(has_new_rows=has_new_rows, reduces_once=self._reduces_once),
        )
        sums = summed_over_ranks(report, state.device.tensor_to_device)
        if sums.flags.refuses_batch:
            raise_on_all_ranks(None)  # raises the refusal of the other rank, see _refuse()
        step.totals = sums.counts
        # If one rank has seen that DDP reduces once, it holds for all. A rank that makes only one microbatch cannot see
        # it, but with `equal_counts=False` another rank may make several.
        self._reduces_once = sums.flags.reduces_once > 0
        step.reduces_once = self._reduces_once
        check_plans(sums.plan, plan)
        _check_has_weight(step, state.batch)
        # In the first step no check is due, because prove() has just checked its rows. In steps 16, 32, 64 and so on it
        # is due even without new rows, because a model may begin to treat known rows in another way.
        is_check_due = run.check.is_due(run.step_number, has_new_rows=sums.flags.has_new_rows > 0)
        if is_check_due:
            run.prove(state.batch)  # new rows are cut only by rules that were proven for them
        # Each rank pads to its own longest row. One forward over all rows would pad some of them more. More padding on
        # the left may change a row. So may a greater width, if it is over the limit of a rotary embedding.
        check_widths(
            sums.widths,
            lambda: run.width_of(step),  # not `width`, because prove() may have changed the rules
            was_checked=is_check_due,
            is_trimmed=run.split is not None,
        )
        run.begin_step(step)
        # Not counted when the step is computed, because an optimizer may compute it several times.
        self.num_empty_steps += run.is_step_empty

    def _refusal_of_batch(self, state: State) -> RefusalError | None:
        """Returns why this rank's batch cannot be counted. The caller tells the other ranks, too."""
        vocabulary = None if self._context is None else self._context.check.vocabulary
        try:
            check_labels_and_ids(state.model, microbatches_of(state.batch), vocabulary)
            if self._context is None and self.options.token_weights == 'column':
                # Only to see whether it refuses the weights. In the first-batch check, which is a collective, a refusal
                # of one rank would leave the others waiting.
                with_weights_of_positions(state.batch)
        except RefusalError as refusal:
            return refusal
        return None

    def _refuse(self, state: State, refusal: RefusalError) -> NoReturn:
        """Raises the refusal of this rank's batch, and tells it to the ranks that wait in :meth:`_batch_start`."""
        report = RankReport(flags=RankFlags(refuses_batch=1))
        summed_over_ranks(report, state.device.tensor_to_device)  # the other ranks wait for this all-reduce
        raise_on_all_ranks(refusal)
        raise refusal  # never reached, because the line above raises it

    def _set_up(self, state: State) -> None:
        """Sets up the fit at its first batch, and runs the first-batch check, which finds the loss rule."""
        self._context = RunContext(state, self.options)
        # It may be True from a checkpoint or an earlier fit, but now ranks may wait for each other in every microbatch.
        self._reduces_once &= self._context.reductions.waits_only_to_reduce
        self._context.prove(state.batch)

    def _count_batch(self, state: State, batch_index: int) -> Step:
        """Adds the counts of the rows to ``state.batch``, and returns the record of the step.

        If a row repeats a sample of another rank, it is first marked as 0 samples. Counting keeps this mark.
        """
        run = self._run
        batch: Batch = state.batch
        if num_repeated(state.dataloader, batch_index, num_rows(batch)):
            # At most one row is a copy of another rank's sample, and it is the last one.
            *rows, repeated_row = row_counts_of(batch)  # each row is one sample, and has no other counts yet
            batch = attach_row_counts(batch, [*rows, replace(repeated_row, samples=0)])
        # The counts become an entry of the batch, so that the split cuts them together with the rows. Rows of 0 samples
        # lose their labels.
        counted_batch = with_counts(batch, self._known_rule, self.options.token_weights)
        tokens_of_rows = [row.loss_tokens for row in row_counts_of(counted_batch)]
        check_loss_shares(batch, self.options.token_weights, self._known_rule, tokens_of_rows)
        state.batch = self._with_new_labels_marked(counted_batch)
        return Step(
            rows=row_counts_of(state.batch),
            facts=describe_all(run.check.layout, state.batch),
            is_weighted=self.is_weighted,
        )

    def _with_new_labels_marked(self, batch: Batch) -> Batch:
        """Marks the rows of a counted batch that have a label whose id counts for the first time in the run.

        The microbatches of these rows are measured, because a loss may treat some labels in another way.
        """
        has_new_label = self._token_choice.rows_with_new_labels(batch, self._known_rule)
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
        _check_is_not_repeated(step, state.device_train_microbatch_size)
        run.check_sharding()
        run.check_batch_norms()
        run.check_gradient_hooks()
        run.reductions.start_attempt()
        step.microbatches = []
        self._microbatch = None  # the graph of a microbatch that failed would stay in memory
        # On a GPU Composer always has a scaler, but it scales the loss only in this precision.
        if state.precision == Precision.AMP_FP16 and state.scaler is not None:
            step.gradient_scale = state.scaler.get_scale()
        if run.balance is not None:
            # One more forward of each microbatch that the split has made (`step.planned`), to count how often each
            # expert is chosen in the step.
            run.balance.count(step.planned, hides_weights=step.is_weighted)

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
        adds_label = record.is_empty and run.terms.are_over_tokens
        microbatch = CurrentMicrobatch(batch, record, hides_weights=step.is_weighted, adds_label=adds_label)
        self._microbatch = microbatch
        state.batch = microbatch.entries
        self.select_logits(state, batch, record.counts.loss_tokens)

    def _after_loss(self, state: State) -> None:
        """Puts our entries back into the batch, and prepares the loss for :meth:`_before_backward`, which scales it.

        A router's loss is split off, a mean over no tokens becomes 0, and a loss without a gradient gets one.
        """
        microbatch = self._current
        state.batch = microbatch.put_back(state.batch)
        microbatch.outputs = state.outputs
        self._split_router_loss(state)
        if microbatch.record.is_empty:
            self._zero_token_terms(state)
        self._attach_gradient(state)
        microbatch.edges_of_loss = _edges_of(state.loss)

    def _zero_token_terms(self, state: State) -> None:
        """Sets the means over tokens of a microbatch without tokens to 0. They are NaN, or of the added label."""
        terms = self._run.terms
        empty_units = ['tokens']
        if terms.of_unit(state.loss, 'microbatches') and not any(real_tokens(state.batch)):
            # All positions are padding, which the router's loss does not count. So it is 0 / 0.
            empty_units.append('microbatches')
        zero = attached_zero(state.outputs, state.loss)
        has_samples = self._current.record.counts.samples > 0

        def value_without_tokens(term: Term) -> torch.Tensor:
            if term.unit in empty_units:
                return zero
            # If there are no samples, no row has labels. A term that averages over the rows with labels is then NaN.
            # _scales_of() multiplies it by 0, but a gradient of NaN times 0 is NaN.
            if not has_samples and term.value.isnan().any():
                return zero
            return term.value

        state.loss = terms.changed(state.loss, value_without_tokens)

    def _split_router_loss(self, state: State) -> None:
        """Splits the loss of a mixture of experts into the mean over tokens and the load-balancing loss."""
        if router_loss_of(state.outputs) is None:
            return
        run = self._run
        run.read_router_coefficient()
        # Not only in step 0, because a loss may change, and then use another coefficient than the config says.
        is_check_due = (run.step_number & (run.step_number - 1)) == 0  # steps 0, 1, 2, 4, 8 and so on
        # With a wrong coefficient the split would be wrong, so it is checked even with `check_loss=False`. Without a
        # coefficient nothing is split, and the check only makes sure that the loss has no such term.
        needs_check = self.options.check_loss or run.terms.router_coefficient is not None
        if is_check_due and needs_check:
            run.terms.check_coefficient(state.loss, state.outputs)
        state.loss = run.terms.split(state.loss, state.outputs)
        if isinstance(state.loss, SplitLoss) and self._is_first_microbatch:
            self._warn_of_router_loss(state.loss)

    @property
    def _is_first_microbatch(self) -> bool:
        """Whether the microbatch that is computed now is the first one of this rank in the fit."""
        return self._run.step_number == 0 and len(self._run.step.microbatches) == 1

    def _warn_of_router_loss(self, loss: SplitLoss) -> None:
        """Warns if the load-balancing loss has no gradient, or if it depends on how the batch is cut."""
        if loss['tokens'].requires_grad and not loss['router'].requires_grad:
            # A reentrant checkpoint computes its forward without a graph, and Transformers collects the router's logits
            # there. One plain forward and backward over the batch loses this gradient, too.
            log.warning(
                'The load-balancing loss of the router has no gradient, so it changes no weight. If the model has '
                'activation checkpointing, set `use_reentrant=False`. Otherwise all weights before the last router '
                'are frozen, or the model detaches this loss.'
            )
        if self._run.balance is None:
            log.warning(
                'The mean over tokens is exact. The load-balancing loss of the router is a statistic of microbatches, '
                'and depends on how the batch is cut; with `router_balance=step` it does not.'
            )

    def _attach_gradient(self, state: State) -> None:
        """Makes the backward possible if the loss has no gradient: adds a zero, whose gradient is 0.

        A microbatch may have such a loss if other microbatches train. For example, only an encoder of images is
        trained, and it has no image. Or only some experts are trained, and its tokens chose others. If the microbatch
        has media, or no layout finds media, the loss is left as it is, and the backward raises.

        If the first microbatch of a fit has such a loss, probably all have one. Then a model that takes no media is
        refused. One that takes media only gets a warning.
        """
        if any(term.requires_grad for term in tensors_in(state.loss)):
            return
        check_trains_something(state.model)  # all may have been frozen during training
        layout = self._run.check.layout
        if layout is None or layout.media_of(state.batch):
            return
        if self._is_first_microbatch:
            if not takes_media(state.model):
                raise NotExactError(
                    'The loss must depend on a trained parameter, got: a loss without a gradient. The parameters that '
                    f'are trained ({_name_trained(state.model)}) take no part in it, or the forward '
                    'runs without a graph. A reentrant checkpoint does so if its inputs have no gradient: set '
                    '`use_reentrant=False` (docs/errors.md#model-loss).'
                )
            log.warning(
                'The loss of the first microbatch, which has no media, depends on no trained parameter. Such '
                'microbatches change no weight.'
            )
        first_parameter = next(parameter for parameter in state.model.parameters() if parameter.requires_grad)
        zero = empty_sum(first_parameter)
        self._current.record.has_weight = False  # so check_step() expects no gradient at its logits
        state.loss = self._run.terms.changed(state.loss, lambda term: term.value + zero)

    def _before_backward(self, state: State) -> None:
        """Scales the loss, so that its tokens get their weight in the step, and adds hooks that measure this weight.

        This algorithm must be the last one, because later changes of the loss are not scaled.
        """
        run = self._run
        microbatch = self._current
        record = microbatch.record
        # Called a second time, because algorithms may have taken our entries or the labels out of the batch since.
        state.batch = microbatch.put_back(state.batch)
        record.batch = _checked_entries(state.batch)
        if not self.options.loss_units:  # with units a term may be added, because its unit tells its factor
            self._check_no_added_term(state)
        # scaled() drops the entry 'total' of a dict loss. If an algorithm has added a term only there, it would be lost
        # without a word. So check_step() refuses a total that is not the sum of the terms.
        record.total_error = run.terms.total_error(state.loss)
        record.num_microbatches = self._num_microbatches_with_samples(state)
        totals = run.step.totals
        # Composer will multiply the loss by this number. _scales_of() divides by it.
        record.composers_weight = sample_weight(
            run.samples_for_composer(record.counts),
            run.samples_for_composer(totals),
            world_size=run.world_size,
        )
        # The factors that a mean over the samples, and the mean over the tokens, of the microbatch must have in the
        # step. They may be over 1, because gradients are averaged over the ranks.
        weight_of_samples = sample_weight(
            record.counts.samples,
            totals.samples,
            world_size=run.world_size,
        )
        weight_of_mean = token_weight(
            record.counts.loss_weight,
            totals.loss_weight,
            world_size=run.world_size,
        )
        self._watch_other_terms(state, microbatch)
        self._weigh_and_measure_tokens(state, microbatch, weight_of_mean)
        microbatch.raw_loss = state.loss
        if isinstance(state.loss, SplitLoss):  # callbacks get one number again, as the model returned it
            microbatch.raw_loss = sum(state.loss.values())
        if run.balance is not None:
            assert isinstance(state.loss, SplitLoss)  # balance.count() refuses models without a router's loss
            num_microbatches = record.num_microbatches or 1  # 0 if this rank has only dummy rows
            state.loss = run.balance.with_part_of_step(state.loss, microbatch.outputs, num_microbatches)
        microbatch.outputs = None  # the backward needs the memory
        scales = _scales_of(record, weight_of_mean, weight_of_samples)
        # The backward tells the record which weight Composer has applied. FSDP2 on CPUs makes the reduced gradient too
        # large by a factor, `excess`, and scaled() divides by it.
        state.loss = run.terms.scaled(state.loss, scales, observe=record.observe, excess=run.excess_of_reduction)
        microbatch.edges_of_loss = _edges_of(state.loss)

    def _watch_other_terms(self, state: State, microbatch: CurrentMicrobatch) -> None:
        """Makes sure that the step is refused if a term that is not a mean over tokens would have a wrong gradient.

        There are two cases:

        - Tokens have weights, and such a term has a gradient at the logits. The weights would change it, too. This
          raises RuntimeError.
        - Such a term has a gradient in added rows, which are dummy rows and repeated samples. They should not count.
          Means over tokens leave them out, because they have no labels. If it cannot be told now, the backward shows
          it: hooks on the outputs note such a gradient, and check_step() refuses it.
        """
        run = self._run
        record = microbatch.record
        added_rows = [number for number, row in enumerate(record.rows) if row.samples == 0]
        # If all rows are added ones, _scales_of() multiplies all terms by 0.
        are_some_added = 0 < len(added_rows) < len(record.rows)
        is_weighted = run.step.is_weighted
        if not (are_some_added or is_weighted):
            return
        other_terms = []
        for term in run.terms.terms_of(state.loss):
            if term.unit != 'tokens' and term.value.requires_grad:
                other_terms.append(term)
        if not other_terms:
            return
        logits = logits_of(microbatch.outputs)
        gradient = None
        if is_weighted and logits is not None:
            gradient = gradient_by_logits(sum_of_means(term.value for term in other_terms), logits)
        if gradient is not None and gradient.any():  # a term may be 0 times the logits
            raise NotExactError(
                '`token_weights` must apply to means over tokens only, got: another term of `loss_units` that is '
                'made of the logits, so that the weights would change its gradient. Make it of the hidden states, '
                "or set `token_weights='token'` (docs/errors.md#model-loss)."
            )
        if not are_some_added:
            return
        record.added_rows = added_rows
        # Means over samples need not be made of the outputs, so the gradient by them may not show that they see the
        # added rows. The first-batch check has seen whether they have a gradient in rows without labels.
        if run.check.trains_unlabelled_rows and run.terms.of_unit(state.loss, 'samples'):
            raise trained_added_rows(record)
        # The gradient is read in the backward of the step. A backward of its own would run the hooks of FSDP, which
        # communicate, and only on this rank.
        for output in _outputs_to_watch(microbatch.outputs, other_terms, len(record.rows)):
            record.watch_added_rows(output)

    def _check_no_added_term(self, state: State) -> None:
        """Raises RuntimeError if a term was added to the loss since its edges were noted. Its weight would be wrong.

        Such a term makes a path in the graph from the new loss to a parameter that passes none of these edges.
        """
        if self.options.check_loss and has_bypass(tensors_in(state.loss), self._current.edges_of_loss):
            raise NotExactError(
                "The loss of a step must be the model's own loss, got: another term, which an algorithm or a callback "
                'has added. Its weight in the step would be wrong. Put TokenAccumulation last, have the model return '
                'it as a term of a dict and name the units of all terms in `loss_units`, or set `check_loss=False` '
                '(docs/errors.md#model-loss).'
            )

    def _weigh_and_measure_tokens(
        self,
        state: State,
        microbatch: CurrentMicrobatch,
        weight_of_mean: float,
    ) -> None:
        """Applies the token weights, if there are any, and adds hooks that measure tokens in the backward.

        With token weights all microbatches are measured, without them only those that :class:`.TokenChoice` chooses.

        ``weight_of_mean`` is the factor that the mean over the tokens must have in the step.
        """
        run = self._run
        step = run.step
        record = microbatch.record
        num_tokens = record.counts.loss_tokens
        if step.is_weighted and num_tokens:
            # Here the loss is still the plain mean. _weigh_mean() changes it below.
            mean_loss = sum_of_means(run.terms.of_unit(state.loss, 'tokens'))
            record.token_loss = mean_loss.detach() * num_tokens
        place = len(step.microbatches) - 1
        is_measured = step.is_weighted or self._token_choice.includes(place, record.rows, len(step.planned))
        if not (record.counts.loss_weight and is_measured and run.check.has_logits):
            return
        logits = logits_of(microbatch.outputs)
        # Without logits that fit the labels, nothing is weighted or measured. If tokens have weights, check_step() then
        # refuses the step, because no gradient has come to the logits of this record.
        if logits is None:
            return
        at_logits = batch_at_logits(record.batch, logits, record.rule, num_tokens)
        if at_logits is None:
            return
        selected = at_logits.batch
        record.positions_of_logits = at_logits.positions
        weights = None
        if step.is_weighted:
            weights = self._weigh_mean(state, record, logits, selected)
        # The logits have no gradient if no parameter before them is trained, for example if only an encoder of media is
        # trained, and there are no media. The value of the loss is weighted nevertheless, because it is logged.
        if logits.grad_fn is None:
            return
        if weights is not None:
            weigh_tokens(logits, weights)  # before watch(), whose hook must see the weighted gradient
        # A bypass is a part of the mean over tokens that comes neither from the logits nor from the router.
        edges = _edges_of([logits, router_loss_of(microbatch.outputs)])
        record.has_bypass = has_bypass(run.terms.of_unit(state.loss, 'tokens'), edges)
        plain_token_weight = self._plain_token_weight(weight_of_mean, num_tokens)
        measures_all = self._token_choice.draws_all()  # if False, only some tokens of this microbatch are measured
        record.watch(logits, weights, plain_token_weight, batch=selected, measures_all=measures_all)

    def _plain_token_weight(self, weight_of_mean: float, num_tokens: int) -> float | None:
        """Returns the weight that a plain token must have in the gradient by the logits; None: it cannot be measured.

        A plain token is one with the relative weight 1. Its weight can be measured only if ``loss_units`` is None or
        names one mean over tokens and no other term, because several terms may use the logits.
        """
        run = self._run
        units_of_terms = list(run.terms.units.values())
        # The weight of a token in the loss of a forward, times the number of tokens: 1 for a mean of cross-entropies.
        # The first-batch check has measured it. None: tokens weigh differently, or the loss is not checked.
        scale = run.check.token_scale
        if scale is None or units_of_terms not in ([], ['tokens']):
            return None
        weight = scale * weight_of_mean * run.step.gradient_scale / num_tokens
        # LossTerms.scaled() divides the gradient by this factor.
        return weight / run.excess_of_reduction

    def _weigh_mean(
        self,
        state: State,
        record: MicrobatchRecord,
        logits: torch.Tensor,
        selected: Batch,
    ) -> torch.Tensor:
        """Turns the value of the mean over tokens into the weighted mean, and returns the weights for its gradient.

        The weights are relative to their mean. Each is at the position whose logits predict the token.

        Args:
            state: The trainer's state.
            record: The record of the microbatch.
            logits: Its logits, ``(rows, width, vocabulary)``.
            selected: The labels and weights in the shape of the logits, see :func:`.batch_at_logits`.
        """
        rule = record.rule
        # The plain mean is sum(loss) / loss_tokens, the weighted mean is sum(weight * loss) / loss_weight. So a token
        # weighs weight * loss_tokens / loss_weight times as much as in the plain mean.
        weights_of_labels = selected[LOSS_WEIGHTS] * (record.counts.loss_tokens / record.counts.loss_weight)
        weights = at_predictions(weights_of_labels, rule)
        # weigh_tokens() will weight the gradient.
        run = self._run
        state.loss = run.terms.with_weighted_values(
            state.loss,
            logits,
            targets_of(selected, rule),
            weights,
            factor=run.check.token_scale,
        )
        return weights

    def _num_microbatches_with_samples(self, state: State) -> int | None:
        """Returns how many microbatches of this rank in the step have samples, and not only dummy rows.

        Terms of the unit ``'microbatches'`` are divided by this number. None: there are no such terms.
        """
        step = self._run.step
        if not self._run.terms.of_unit(state.loss, 'microbatches'):
            return None
        if step.planned:
            return sum(num_samples(microbatch) > 0 for microbatch in step.planned)
        # Composer's own split makes microbatches of a fixed number of rows. Each row is a sample, except that the last
        # one may be repeated. A microbatch with only this row does not count. So samples are divided, not rows.
        microbatch_size = int(state.device_train_microbatch_size or 1)
        return -(-step.counts.samples // microbatch_size)  # rounded up, because the last one may have fewer rows

    def _after_backward(self, state: State) -> None:
        """Adds the gradients that a reduction waits for, and puts the unscaled loss back.

        Callbacks read the loss at the end of the batch.
        """
        self._check_no_added_term(state)  # a term that is added now is not scaled, whatever its unit is
        self._run.reductions.end_microbatch()
        state.loss = self._current.raw_loss
        self._microbatch = None

    # After the step.

    def _after_train_batch(self, state: State) -> dict[str, float]:
        """Checks the step before the optimizer moves, drops the gradients of an empty step, and returns the metrics."""
        run = self._run
        step = run.step
        run.reductions.check_gradients()
        if run.step_number == 0 and not (step.is_weighted or step.is_measured):
            log.info('The weights of tokens are not measured in training. All tokens are counted in every step.')
        check_step(step, forbids_bypass=self.options.needs_loss_check and run.has_bypass is False)
        if run.has_bypass is None and step.counts.loss_weight:
            run.has_bypass = step.has_bypass
        if run.balance is not None:
            run.balance.check()
        reduced_once = run.reductions.reduced_once()
        # Only our split uses this. If DDP reduced once, ranks may make unequal numbers of microbatches from now on.
        if run.split is not None and reduced_once is not None:
            self._reduces_once = reduced_once
        if run.is_step_empty:
            # One forward over the whole batch would have the loss NaN, so the step must change no weight. If other
            # terms, such as a router's loss, have a gradient, it is dropped. Gradients become None, not 0, so that the
            # optimizer neither decays weights nor moves by its momentum.
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)
        # From here on the optimizer may move, see _check_is_not_repeated().
        step.completed_size = state.device_train_microbatch_size
        return self._metrics(state, step)

    def _batch_end(self, state: State) -> None:
        """Ends the step. Before this event an optimizer may compute the step several times (LBFGS, SAM)."""
        run = self._run
        step = run.step
        self._token_choice.end_step(len(step.microbatches))
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


class CurrentMicrobatch:
    """The microbatch that is computed now.

    The model gets it without our entries, because a compiled model would be compiled again whenever their values
    change.

    Args:
        batch: The microbatch.
        record: Its record in the step.
        hides_weights: Whether to take out the weights of tokens, because this package has written them. If it has not,
            a column of this name belongs to the user, and the model may read it.
        adds_label: Whether to add a label, because the microbatch has none. A fused loss computes its gradient in the
            forward. Without labels it divides by 0, and its gradient stays NaN even if it is multiplied by 0. No label
            may be added if some terms are not means over tokens, because they would see the label.
    """

    def __init__(
        self,
        batch: Batch,
        record: MicrobatchRecord,
        *,
        hides_weights: bool,
        adds_label: bool,
    ) -> None:
        self._batch = batch
        self.record = record
        self.outputs: Any = None
        """The outputs of the model, from AFTER_LOSS to BEFORE_BACKWARD. They are kept here, because Composer's
        FreeOutputs empties ``state.outputs`` in between."""
        self.edges_of_loss: Collection[Edge] = ()
        """The edges of the loss, one for each of its tensors. Set at AFTER_LOSS, and at BEFORE_BACKWARD for the scaled
        loss. A term that is added later has a path to a parameter that passes none of these edges."""
        self.raw_loss: Any = None
        """The loss before it was scaled; set at BEFORE_BACKWARD."""
        self.entries = without_row_counts(batch)
        """The batch that the model gets."""
        if hides_weights:
            del self.entries[LOSS_WEIGHTS]
        if adds_label:
            self.entries = with_one_label(self.entries)

    def put_back(self, batch: Batch) -> BatchDict:
        """Returns the batch with the hidden entries and its own labels.

        Entries that somebody has changed since stay changed, so that the checks see it.

        Args:
            batch: The batch that the model got, perhaps changed since.
        """
        # The model may have taken the labels out of its batch.
        complete = {'labels': self._batch.get('labels'), **batch}
        for key, value in self._batch.items():
            # The original replaces an entry that is still the one that the model got. Hidden entries come back as well:
            # they are in neither of the two dicts, so both get() return None.
            if complete.get(key) is self.entries.get(key):
                complete[key] = value
        return complete


def _checked_entries(batch: Batch) -> BatchDict:
    """Returns the entries that check_step() reads. Others, such as images, need not stay on the device until then."""
    checked_keys = ('labels', 'attention_mask', 'sample_ids', LOSS_WEIGHTS)
    return {key: batch[key] for key in checked_keys if key in batch}


def _name_trained(model: torch.nn.Module) -> str:
    """Returns the name of the first trained parameter, and how many others there are."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return f'{names[0]!r} and {len(names) - 1} more'


def _compare_lengths(state: State) -> int | None:
    """Returns the number of batches after which some ranks end the epoch, and others would wait for them; a collective.

    None: all ranks end it together, or their loaders do not wait for other ranks. A run that ends earlier is not
    refused, so the caller raises an error only before the next batch is read.
    """
    # No limit if the loader does not wait for other ranks. Nor if its length is not known: such a loader gives batches
    # until no rank has samples.
    num_batches = sys.maxsize
    if getattr(state.dataloader, 'waits_for_ranks', False) and state.dataloader_len is not None:
        num_batches = int(state.dataloader_len)
    most_batches, negative_fewest = max_over_ranks([num_batches, -num_batches])
    fewest_batches = -negative_fewest
    return fewest_batches if fewest_batches < most_batches else None


def _check_has_weight(step: Step, batch: Batch) -> None:
    """Raises RuntimeError if the step has loss-generating tokens, but all of them have weight 0."""
    if step.totals.loss_weight == 0 and step.totals.loss_tokens:
        raise NotExactError(
            f'The weights of a step must not all be 0, got: 0 for each of its {step.totals.loss_tokens} '
            f'loss-generating tokens, {sample_name(batch, 0)} among them. Fix `{LOSS_WEIGHTS}` (docs/errors.md#counts).'
        )


def _check_is_not_repeated(step: Step, microbatch_size: float | None) -> None:
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


def _edges_of(value: Any) -> set[Edge]:
    """Returns the edge of each tensor in a value, see :func:`.tensors_in` and :func:`.edge_of`.

    An edge keeps the graph that makes its tensor in memory, so edges must not be kept beyond the backward.
    """
    return {edge_of(tensor) for tensor in tensors_in(value)}


def _outputs_to_watch(outputs: Any, terms: Sequence[Term], num_rows: int) -> list[torch.Tensor]:
    """Returns the outputs of the model whose gradient shows which rows the terms see.

    They are those that a term is made of, down to the first output ``(rows, width, ...)``, which is one of them.
    """
    outputs_of_rows = []
    for output in tensors_in(outputs):
        if output.requires_grad and output.dim() in (2, 3) and len(output) == num_rows:
            outputs_of_rows.append(output)
    # The graph is not followed beyond outputs ``(rows, width, ...)``. They may be made of other outputs of this length
    # whose entries are not the rows, such as states of as many images. Outputs of two dimensions may hold similarities,
    # ``(rows, rows)``. There an added row is also a column of all other rows, and the gradient of its own row may not
    # show that a term sees it. So what they are made of is watched as well.
    ends = {edge_of(output) for output in outputs_of_rows if output.dim() == 3}
    edges = edges_of_graph((term.value for term in terms), ends)
    watched = [output for output in outputs_of_rows if edge_of(output) in edges]
    logits = logits_of(outputs)
    if all(output is logits for output in watched):
        return watched  # the logits stay in any case, so the graph need not be followed again
    # A router's loss has a gradient in the hidden states of all rows, also of added ones. So what it is made of is not
    # watched, except for the logits.
    edges_of_statistics = edges_of_graph(term.value for term in terms if term.unit == 'microbatches')
    return [output for output in watched if output is logits or edge_of(output) not in edges_of_statistics]


def _scales_of(record: MicrobatchRecord, weight_of_mean: float, weight_of_samples: float) -> dict[str, float]:
    """Returns the factor of the terms of each unit.

    Afterwards Composer multiplies the loss by its own weight. The factors are divided by it, so that it cancels.

    Args:
        record: The record of the microbatch.
        weight_of_mean: The factor that the mean over the tokens of the microbatch must have in the step.
        weight_of_samples: The factor that a mean over its samples must have.
    """
    if record.counts.samples == 0:
        # Only rows that must not count. With our split, Composer's weight is 0, too, and must not be divided by.
        return dict.fromkeys(LOSS_UNITS, 0.0)
    num_with_samples = sum(row.samples > 0 for row in record.rows)
    num_microbatches = record.num_microbatches or 1  # None if no term has the unit 'microbatches'
    scale_of_samples = weight_of_samples / record.composers_weight
    return {
        'tokens': weight_of_mean / record.composers_weight,
        # The model divides a mean over samples by all rows of the microbatch. Dummy rows and repeated samples add 0 to
        # the sum, so the mean must be over the other rows only.
        'samples': scale_of_samples * len(record.rows) / num_with_samples,
        'coupled_samples': scale_of_samples,  # such a term must leave out dummy rows and repeated samples itself
        # The mean over the microbatches of this rank. The reduction averages it over the ranks.
        'microbatches': 1.0 / (num_microbatches * record.composers_weight),
    }
