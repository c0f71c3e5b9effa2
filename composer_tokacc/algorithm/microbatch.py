# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The loss of one microbatch: from the loss that the model returns to the one that Composer differentiates.

:class:`CurrentMicrobatch` gives each term of the loss its weight in the step. It also adds hooks to the graph. In the
backward they write into the :class:`.MicrobatchRecord` which weights were really applied, and the step check compares
these with the right ones.

This module takes and returns batches and losses. ``token_accumulation.py`` puts them into Composer's state, and
explains the words *measured* and *bypass*.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from composer_tokacc.algorithm.functional import sample_weight, token_weight
from composer_tokacc.algorithm.loss_terms import LOSS_UNITS, SplitLoss, Term, attached_zero, sum_of_means
from composer_tokacc.algorithm.setup import RunContext, check_trains_something, loss_in_outputs, takes_media
from composer_tokacc.batch import Batch, BatchDict
from composer_tokacc.checks.logits import logits_of, router_loss_of, weigh_tokens
from composer_tokacc.checks.step import MicrobatchRecord, trained_added_rows
from composer_tokacc.counting import real_tokens, with_one_label
from composer_tokacc.graph import (
    Edge,
    edge_of,
    edges_of,
    edges_of_graph,
    empty_sum,
    gradient_of,
    has_bypass,
    tensors_in,
)
from composer_tokacc.labelled import batch_at_logits
from composer_tokacc.refusals import NotExactError
from composer_tokacc.row_counts import num_samples, without_row_counts
from composer_tokacc.weights import LOSS_WEIGHTS

log = logging.getLogger(__name__)


class CurrentMicrobatch:
    """The microbatch that is computed now, from before its forward to after its backward.

    It holds the graph of the loss, so it must not be kept longer. :class:`.TokenAccumulation` uses it in this order:

    1. Before the forward: it makes the object, and gives :attr:`batch_for_model` to the model.
    2. After the forward: :meth:`note_loss`.
    3. After the loss: :meth:`put_back`, then :meth:`prepare_loss`.
    4. Before the backward: :meth:`put_back` again, then :meth:`scale_loss`.
    5. After the backward: :meth:`check_no_added_term`. Then callbacks get :attr:`raw_loss`.

    Args:
        run: The parts of the fit. The step must be the one that is computed now.
        record: The record of the microbatch, which is already in the step. Its batch is the whole microbatch.
    """

    def __init__(self, run: RunContext, record: MicrobatchRecord) -> None:
        self._run = run
        self._step = run.step
        self._record = record
        self._batch = record.batch
        counts = record.counts
        totals = run.step.totals
        # Composer will multiply the loss by this number. _scales() divides by it.
        record.composers_weight = sample_weight(
            run.samples_for_composer(counts),
            run.samples_for_composer(totals),
            world_size=run.world_size,
        )
        # The factor that a mean over the samples of the microbatch must have in the step, and the factor of a mean over
        # its tokens. They may be over 1, because gradients are averaged over the ranks.
        self._weight_of_sample_mean = sample_weight(counts.samples, totals.samples, world_size=run.world_size)
        self._weight_of_token_mean = token_weight(counts.loss_weight, totals.loss_weight, world_size=run.world_size)
        self._outputs: Any = None
        """The outputs of the model, between :meth:`prepare_loss` and :meth:`scale_loss`. They are kept here, because
        Composer's FreeOutputs empties ``state.outputs`` in between."""
        self._edges_of_loss: Collection[Edge] = ()
        """The edges of the last loss that this object has noted or returned, one for each of its tensors. See
        :meth:`check_no_added_term`. Empty: the model may compute its loss from its outputs."""
        self.raw_loss: Any = None
        """The loss before it was scaled; set by :meth:`scale_loss`."""
        self.batch_for_model: BatchDict = self._without_our_entries()
        """The batch that the model gets."""
        if record.is_empty and run.terms.are_over_tokens:
            # A fused loss computes its gradient in the forward. Without labels it divides by 0, and its gradient stays
            # NaN even if it is multiplied by 0. No label may be added if some terms are not means over tokens, because
            # they would see the label.
            self.batch_for_model = with_one_label(self.batch_for_model)

    def _without_our_entries(self) -> BatchDict:
        """Returns the batch without entries of this package.

        A compiled model would be compiled again whenever their values change.
        """
        batch = without_row_counts(self._batch)
        if self._step.is_weighted:
            # This package has written the weights of tokens. Without token weights a column of this name belongs to the
            # user, and the model may read it.
            del batch[LOSS_WEIGHTS]
        return batch

    def put_back(self, batch: Batch) -> BatchDict:
        """Returns the batch with our entries and its own labels.

        An entry that somebody has changed since stays changed, so that the checks see it.

        Args:
            batch: The batch that the model got, perhaps changed since.
        """
        complete = dict(batch)
        for key, original in self._batch.items():
            if key in batch:
                # Undoes the label that may have been added for the model.
                is_as_given = batch[key] is self.batch_for_model.get(key)
                if is_as_given:
                    complete[key] = original
            else:
                # The model did not get our entries. It may have taken the labels out of its batch.
                is_ours = key not in self.batch_for_model
                if is_ours or key == 'labels':
                    complete[key] = original
        return complete

    # After the forward.

    def note_loss(self, outputs: Any) -> None:
        """Notes the loss that the model returns in its outputs, so that :meth:`prepare_loss` sees an added term.

        At AFTER_LOSS Composer runs the list of algorithms from the last to the first. So an algorithm that is listed
        after this one adds its term before :meth:`prepare_loss`, and it would seem to be a part of the model's loss.
        """
        self._edges_of_loss = edges_of(loss_in_outputs(self._run.model, outputs))

    # After the loss.

    def prepare_loss(self, loss: Any, outputs: Any, batch: Batch) -> Any:
        """Returns the model's loss in the form that :meth:`scale_loss` needs.

        A router's loss is split off, a mean over no tokens becomes 0, and a loss without a gradient gets one.

        Args:
            loss: The loss that the model has returned.
            outputs: The outputs of the model.
            batch: The microbatch with all its entries, see :meth:`put_back`.
        """
        self._outputs = outputs
        if self._edges_of_loss and not self._run.options.loss_units:  # with units a term may be added
            self.check_no_added_term(loss)
        loss = self._split_router_loss(loss)
        if self._record.is_empty:
            loss = self._zero_empty_terms(loss, batch)
        loss = self._attach_gradient(loss, batch)
        self._edges_of_loss = edges_of(loss)
        return loss

    def _split_router_loss(self, loss: Any) -> Any:
        """Splits the loss of a mixture of experts into the mean over tokens and the load-balancing loss."""
        if router_loss_of(self._outputs) is None:
            return loss
        run = self._run
        run.read_router_coefficient()
        # Not only in step 0, because a loss may change, and then use another coefficient than the config says.
        is_check_due = (run.step_number & (run.step_number - 1)) == 0  # steps 0, 1, 2, 4, 8 and so on
        # With a wrong coefficient the split would be wrong, so it is checked even with `check_loss=False`. Without a
        # coefficient nothing is split, and the check only makes sure that the loss has no such term.
        needs_check = run.options.check_loss or run.terms.router_coefficient is not None
        if is_check_due and needs_check:
            run.terms.check_coefficient(loss, self._outputs)
        loss = run.terms.split(loss, self._outputs)
        if isinstance(loss, SplitLoss) and self._is_first:
            self._warn_of_router_loss(loss)
        return loss

    @property
    def _is_first(self) -> bool:
        """Whether it is the first microbatch of this rank in the fit."""
        return self._run.step_number == 0 and len(self._step.microbatches) == 1

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

    def _zero_empty_terms(self, loss: Any, batch: Batch) -> Any:
        """Sets the means over tokens of a microbatch without tokens to 0, and other terms that would be NaN.

        The means over tokens are NaN, or the loss of the label that was added for the model.
        """
        terms = self._run.terms
        statistics = terms.of_unit(loss, 'microbatches')  # raises for a loss without tensors, before attached_zero()
        # The router's loss does not count padding. If all positions are padding, it is 0 / 0.
        is_all_padding = bool(statistics) and not any(real_tokens(batch))
        has_samples = self._record.counts.samples > 0
        zero = attached_zero(self._outputs, loss)

        def zero_if_empty(term: Term) -> torch.Tensor:
            is_empty = term.unit == 'tokens' or (term.unit == 'microbatches' and is_all_padding)
            if not is_empty and not has_samples:
                # No row has labels. A term that averages over the rows with labels is then NaN. _scales() multiplies it
                # by 0, but a gradient of NaN times 0 is NaN.
                is_empty = bool(term.value.isnan().any())
            return zero if is_empty else term.value

        return terms.map_terms(loss, zero_if_empty)

    def _attach_gradient(self, loss: Any, batch: Batch) -> Any:
        """Makes the backward possible if the loss has no gradient: adds a zero, whose gradient is 0.

        The loss of a microbatch may have no gradient although others have one. For example, only an encoder of images
        is trained, and this microbatch has no image. Or only some experts are trained, and its tokens chose others. But
        if the microbatch has media, or if this is not known because there is no layout, the loss stays as it is, and
        the backward raises.
        """
        if any(term.requires_grad for term in tensors_in(loss)):
            return loss
        run = self._run
        check_trains_something(run.model)  # all may have been frozen during training
        layout = run.row_check.layout
        if layout is None or layout.media_of(batch):
            return loss
        if self._is_first:
            _check_first_loss_without_gradient(run.model)
        first_parameter = next(parameter for parameter in run.model.parameters() if parameter.requires_grad)
        zero = empty_sum(first_parameter)
        self._record.has_weight = False  # so check_step() expects no gradient at its logits
        return run.terms.map_terms(loss, lambda term: term.value + zero)

    # Before the backward.

    def scale_loss(self, loss: Any, batch: Batch, microbatch_size: float) -> Any:
        """Returns the loss times the factors that give its terms their weight in the step.

        Also adds hooks, which measure the weights in the backward.

        Args:
            loss: The loss of :meth:`prepare_loss`, perhaps changed by other algorithms since.
            batch: The microbatch with all its entries, see :meth:`put_back`.
            microbatch_size: How many rows Composer's own split puts into a microbatch. Not read if our split has cut
                the batch.
        """
        run = self._run
        record = self._record
        record.batch = _checked_entries(batch)
        if not run.options.loss_units:  # with units a term may be added, because its unit tells its factor
            self.check_no_added_term(loss)
        # scaled() drops the entry 'total' of a dict loss. If an algorithm has added a term only there, it would be lost
        # without a word. So check_step() refuses a total that is not the sum of the terms.
        record.total_error = run.terms.total_error(loss)
        record.num_microbatches = self._num_microbatches_with_samples(loss, microbatch_size)
        self._check_other_terms(loss)
        loss = self._weight_and_measure_tokens(loss)
        self.raw_loss = loss
        if isinstance(loss, SplitLoss):  # callbacks get one number again, as the model returned it
            self.raw_loss = sum(loss.values())
        if run.balance is not None:
            assert isinstance(loss, SplitLoss)  # balance.count() refuses models without a router's loss
            loss = run.balance.with_part_of_step(loss, self._outputs, self._divisor_of_microbatch_terms)
        self._outputs = None  # the backward needs the memory
        # The backward tells the record which weight Composer has applied. FSDP2 on CPUs makes the reduced gradient too
        # large by a factor, `excess`, and scaled() divides by it.
        loss = run.terms.scaled(loss, self._scales(), observe=record.observe, excess=run.excess_of_reduction)
        self._edges_of_loss = edges_of(loss)
        return loss

    def check_no_added_term(self, loss: Any) -> None:
        """Raises RuntimeError if a term was added since this object returned the loss. Its weight would be wrong.

        Such a term adds a path to the graph: from the new loss to a parameter, but not through the returned loss.
        """
        if self._run.options.check_loss and has_bypass(loss, self._edges_of_loss):
            raise NotExactError(
                "The loss of a step must be the model's own loss, got: another term, which an algorithm or a callback "
                'has added. Its weight in the step would be wrong. Put TokenAccumulation last, have the model return '
                'it as a term of a dict and name the units of all terms in `loss_units`, or set `check_loss=False` '
                '(docs/errors.md#model-loss).'
            )

    def _num_microbatches_with_samples(self, loss: Any, microbatch_size: float) -> int | None:
        """Returns how many microbatches of this rank in the step have samples, and not only dummy rows.

        Terms of the unit ``'microbatches'`` are divided by this number. None: there are no such terms.
        """
        step = self._step
        if not self._run.terms.of_unit(loss, 'microbatches'):
            return None
        if step.planned:
            return sum(num_samples(microbatch) > 0 for microbatch in step.planned)
        # Composer's own split makes microbatches of a fixed number of rows. Each row is a sample, except that the last
        # one may be repeated. A microbatch with only this row does not count: 5 rows, of which 4 are samples, are 2
        # microbatches of 2 rows, and a third one without samples. So samples are divided, not rows.
        return math.ceil(step.counts.samples / int(microbatch_size))

    @property
    def _divisor_of_microbatch_terms(self) -> int:
        """The divisor of terms of the unit ``'microbatches'``: the number of microbatches with samples, at least 1."""
        # The number is None if there are no such terms. It is 0 if this rank has only dummy rows. Then any divisor is
        # right, because _scales() returns 0.
        return self._record.num_microbatches or 1

    def _check_other_terms(self, loss: Any) -> None:
        """Makes sure that the step is refused if a term that is not a mean over tokens would have a wrong gradient."""
        other_terms = []
        for term in self._run.terms.terms_of(loss):
            if term.unit != 'tokens' and term.value.requires_grad:
                other_terms.append(term)
        if not other_terms:
            return
        if self._step.is_weighted:
            self._check_not_weighted(other_terms)
        self._watch_added_rows(other_terms)

    def _check_not_weighted(self, other_terms: Sequence[Term]) -> None:
        """Raises RuntimeError if terms have a gradient at the logits, because the token weights would change it."""
        logits = logits_of(self._outputs)
        if logits is None:
            return
        gradient = gradient_of(sum_of_means(term.value for term in other_terms), logits)
        if gradient is not None and gradient.any():  # a term may be 0 times the logits
            raise NotExactError(
                '`token_weights` must apply to means over tokens only, got: another term of `loss_units` that is '
                'made of the logits, so that the weights would change its gradient. Make it of the hidden states, '
                "or set `token_weights='token'` (docs/errors.md#model-loss)."
            )

    def _watch_added_rows(self, other_terms: Sequence[Term]) -> None:
        """Makes sure that the step is refused if terms have a gradient in added rows, which must not count.

        Added rows are dummy rows and repeated samples. Means over tokens leave them out, because they have no labels.
        Other terms may not. In the backward, hooks on the outputs note the gradient in added rows, and check_step()
        refuses it. Raises RuntimeError at once if the first-batch check has shown that there will be such a gradient.
        """
        record = self._record
        added_rows = [number for number, row in enumerate(record.rows) if row.samples == 0]
        if not added_rows or len(added_rows) == len(record.rows):
            return  # if all rows are added ones, _scales() multiplies all terms by 0
        record.added_rows = added_rows
        # A mean over samples need not be made of the outputs, so the gradient by the outputs may not show that it sees
        # the added rows. The first-batch check has seen whether it has a gradient in rows without labels.
        has_means_over_samples = any(term.unit == 'samples' for term in other_terms)
        if has_means_over_samples and self._run.loss_facts.trains_unlabelled_rows:
            raise trained_added_rows(record)
        # The gradient is read in the backward of the step. A backward of its own would run the hooks of FSDP, which
        # communicate, and only on this rank.
        for output in _outputs_to_watch(self._outputs, other_terms, len(record.rows)):
            record.watch_added_rows(output)

    def _weight_and_measure_tokens(self, loss: Any) -> Any:
        """Applies the token weights, if there are any, and adds hooks that measure tokens in the backward.

        Returns the loss. With token weights its means over tokens have become weighted means.
        """
        run = self._run
        record = self._record
        num_tokens = record.counts.loss_tokens
        is_weighted = self._step.is_weighted
        if is_weighted and num_tokens:
            # For a metric. Here the loss is still the plain mean.
            mean_loss = sum_of_means(run.terms.of_unit(loss, 'tokens'))
            record.token_loss = mean_loss.detach() * num_tokens
        if not self._needs_logits:
            return loss
        logits = logits_of(self._outputs)
        # Without logits that fit the labels, nothing is weighted or measured. If tokens have weights, check_step() then
        # refuses the step, because no gradient has come to the logits of this record.
        if logits is None:
            return loss
        at_logits = batch_at_logits(record.batch, logits, record.rule, num_tokens)
        if at_logits is None:
            return loss
        record.positions_of_logits = at_logits.positions
        weights = None
        if is_weighted:
            weights = self._relative_weights(at_logits.batch)
            targets = record.rule.targets(at_logits.batch)
            # Weights the value of the loss. weigh_tokens() will weight its gradient.
            loss = run.terms.with_weighted_values(loss, logits, targets, weights, factor=run.loss_facts.token_scale)
        # The logits have no gradient if no parameter before them is trained, for example if only an encoder of media is
        # trained, and there are no media. The value of the loss is weighted nevertheless, because it is logged.
        if logits.grad_fn is None:
            return loss
        if weights is not None:
            weigh_tokens(logits, weights)  # before the hook that measures, which must see the weighted gradient
        self._measure_tokens(loss, logits, weights, at_logits.batch)
        return loss

    @property
    def _needs_logits(self) -> bool:
        """Whether tokens are weighted or measured at the logits.

        With token weights this is done in every microbatch, without them only in those that :class:`.TokenChoice`
        chooses.
        """
        counts = self._record.counts
        if counts.loss_weight == 0 or not self._run.loss_facts.has_logits:
            return False  # there is no token with a gradient at the logits
        if self._step.is_weighted:
            return True
        place = len(self._step.microbatches) - 1
        return self._run.token_choice.chooses(place, self._record.rows, len(self._step.planned))

    def _relative_weights(self, batch: Batch) -> torch.Tensor:
        """Returns how much more a token weighs than in the plain mean, at the position that predicts it.

        The plain mean is ``sum(loss) / loss_tokens``, the weighted mean is ``sum(weight * loss) / loss_weight``. So a
        token weighs ``weight * loss_tokens / loss_weight`` times as much as in the plain mean. For example, tokens of
        the weights 1, 1 and 4 get 0.5, 0.5 and 2. ``batch`` has labels and weights in the shape of the logits.
        """
        counts = self._record.counts
        tokens_per_weight = counts.loss_tokens / counts.loss_weight
        weights_of_labels = batch[LOSS_WEIGHTS] * tokens_per_weight
        return self._record.rule.at_predictions(weights_of_labels)

    def _measure_tokens(
        self,
        loss: Any,
        logits: torch.Tensor,
        weights: torch.Tensor | None,
        batch: Batch,
    ) -> None:
        """Notes whether the loss has a bypass, and adds a hook that measures tokens when the gradient comes."""
        run = self._run
        # A bypass is a part of the mean over tokens that comes neither from the logits nor from the router.
        edges = edges_of([logits, router_loss_of(self._outputs)])
        self._record.has_bypass = has_bypass(run.terms.of_unit(loss, 'tokens'), edges)
        self._record.watch(
            logits,
            weights,
            self._plain_token_weight(),
            batch=batch,
            measures_all=run.token_choice.draws_all(),  # if False, only some tokens of this microbatch are measured
        )

    def _plain_token_weight(self) -> float | None:
        """Returns the weight that a plain token must have in the gradient by the logits; None: it cannot be measured.

        A plain token is one with the relative weight 1. Its weight can be measured only if ``loss_units`` is None or
        names one mean over tokens and no other term, because several terms may use the logits.
        """
        run = self._run
        units_of_terms = list(run.terms.units.values())
        # The weight of a token in the loss of a forward, times the number of tokens: 1 for a mean of cross-entropies.
        # The first-batch check has measured it. None: tokens weigh differently, or the loss is not checked.
        scale = run.loss_facts.token_scale
        if scale is None or units_of_terms not in ([], ['tokens']):
            return None
        weight_in_microbatch = scale / self._record.counts.loss_tokens
        weight_in_step = weight_in_microbatch * self._weight_of_token_mean
        # The backward multiplies all gradients by the scale of mixed precision. LossTerms.scaled() divides them by the
        # excess of the reduction.
        return weight_in_step * self._step.gradient_scale / run.excess_of_reduction

    def _scales(self) -> dict[str, float]:
        """Returns the factor of the terms of each unit.

        Afterwards Composer multiplies the loss by its own weight. The factors are divided by it, so that it cancels.
        """
        record = self._record
        if record.counts.samples == 0:
            # Only rows that must not count. With our split, Composer's weight is 0, too, and must not be divided by.
            return dict.fromkeys(LOSS_UNITS, 0.0)
        num_with_samples = sum(row.samples > 0 for row in record.rows)
        scale_of_samples = self._weight_of_sample_mean / record.composers_weight
        return {
            'tokens': self._weight_of_token_mean / record.composers_weight,
            # The model divides a mean over samples by all rows of the microbatch. Dummy rows and repeated samples add 0
            # to the sum, so the mean must be over the other rows only.
            'samples': scale_of_samples * len(record.rows) / num_with_samples,
            'coupled_samples': scale_of_samples,  # such a term must leave out dummy rows and repeated samples itself
            # The mean over the microbatches of this rank. The reduction averages it over the ranks.
            'microbatches': 1.0 / (self._divisor_of_microbatch_terms * record.composers_weight),
        }


def _checked_entries(batch: Batch) -> BatchDict:
    """Returns the entries that check_step() reads. Others, such as images, need not stay on the device until then."""
    checked_keys = ('labels', 'attention_mask', 'sample_ids', LOSS_WEIGHTS)
    return {key: batch[key] for key in checked_keys if key in batch}


def _check_first_loss_without_gradient(model: torch.nn.Module) -> None:
    """Refuses a first loss without a gradient if the model takes no media. Otherwise there is only a warning.

    If even the first microbatch of a fit has such a loss, probably all have. But if the model takes media, it may be
    that only an encoder is trained, and later microbatches have media.
    """
    if not takes_media(model):
        raise NotExactError(
            'The loss must depend on a trained parameter, got: a loss without a gradient. The parameters that '
            f'are trained ({_name_trained(model)}) take no part in it, or the forward '
            'runs without a graph. A reentrant checkpoint does so if its inputs have no gradient: set '
            '`use_reentrant=False` (docs/errors.md#model-loss).'
        )
    log.warning(
        'The loss of the first microbatch, which has no media, depends on no trained parameter. Such '
        'microbatches change no weight.'
    )


def _name_trained(model: torch.nn.Module) -> str:
    """Returns the name of the first trained parameter, and how many others there are."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return f'{names[0]!r} and {len(names) - 1} more'


def _outputs_to_watch(outputs: Any, terms: Sequence[Term], num_rows: int) -> list[torch.Tensor]:
    """Returns the outputs of the model whose gradient shows which rows the terms see.

    They are the outputs ``(rows, width, ...)`` or ``(rows, entries)`` that the terms are made of, see
    :func:`_made_of`. Outputs that a router's loss is made of are left out, except for the logits. This loss has a
    gradient in the hidden states of all rows, also of added ones.
    """
    outputs_of_rows = []
    for output in tensors_in(outputs):
        if output.requires_grad and output.dim() in (2, 3) and len(output) == num_rows:
            outputs_of_rows.append(output)
    watched = _made_of(terms, outputs_of_rows)
    logits = logits_of(outputs)
    if all(output is logits for output in watched):
        return watched  # the logits stay in any case, so the graph need not be followed again
    statistics = [term.value for term in terms if term.unit == 'microbatches']
    edges_of_statistics = edges_of_graph(statistics)
    return [output for output in watched if output is logits or edge_of(output) not in edges_of_statistics]


def _made_of(terms: Sequence[Term], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the outputs that the terms are made of.

    From each term the graph is followed to the first output of three dimensions, ``(rows, width, ...)``, and not beyond
    it. Such an output may be made of another one that has as many entries as there are rows only by chance, such as the
    states of as many images.

    The graph is followed beyond an output of two dimensions. It may hold similarities, ``(rows, rows)``, as in a
    contrastive loss. An added row is also a column there, and a term may see only this column. Then the gradient by the
    row itself is 0, but not the gradient by the output that the similarities are made of.
    """
    ends = {edge_of(output) for output in outputs if output.dim() == 3}
    edges = edges_of_graph([term.value for term in terms], ends)
    return [output for output in outputs if edge_of(output) in edges]
