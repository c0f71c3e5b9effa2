# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The parts that TokenAccumulation sets up at the first batch of a fit.

:class:`AlgorithmOptions` checks the arguments of the algorithm. :class:`RunContext` is built from them, from the model
and from the first batch. It refuses a run that cannot be exact, and decides whether the model computes logits only at
labels. It holds the split, the terms of the loss and the first-batch check. :func:`check_labels_and_ids` checks every
batch before its tokens are counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from composer.core import State
from composer.core.precision import get_precision_context
from composer.models import HuggingFaceModel

from composer_tokacc.algorithm.closures import ClosureHooks, check_sees_gradients
from composer_tokacc.algorithm.loss_terms import LOSS_UNITS, LossTerms, router_coefficient
from composer_tokacc.algorithm.reduction import (
    ReductionWatch,
    check_clipping,
    check_unsharded_are_frozen,
    excess_of_reduction,
    unsharded_parameters,
)
from composer_tokacc.algorithm.router_balance import OR_LEAVE_MICROBATCH, ROUTER_BALANCES, StepBalance
from composer_tokacc.arguments import check_choice
from composer_tokacc.batch import Batch, check_batch, check_vocabulary
from composer_tokacc.checks.first_batch import FirstBatchCheck, LossFacts, check_gradient_hooks
from composer_tokacc.checks.probe import Probe
from composer_tokacc.checks.step import Step, TokenChoice
from composer_tokacc.collectives import all_gather_object, get_world_size
from composer_tokacc.compat import BatchNorm, hook_numbers, inner_model, is_compiled, is_encoder_decoder
from composer_tokacc.counting import LossRule
from composer_tokacc.data_spec.rank_widths import RankWidth
from composer_tokacc.data_spec.split import MicrobatchSplit, layout_without_split, split_of
from composer_tokacc.labelled import LabelSelector
from composer_tokacc.layout import BatchLayout
from composer_tokacc.layout.placeholders import all_placeholders, modality_of
from composer_tokacc.model_structure import input_embedding, media_modules, output_embedding, shard_again
from composer_tokacc.plan_agreement import optimizer_settings_of
from composer_tokacc.refusals import InvalidInputError, NotExactError
from composer_tokacc.repeated_samples import warn_of_unknown_copies
from composer_tokacc.row_counts import CountSums
from composer_tokacc.weights import TOKEN_WEIGHTS, check_weights_are_used, with_weights_of_positions

log = logging.getLogger(__name__)

LOGITS = ('auto', 'all', 'labels')
"""``'auto'``: only at labels if that is proven exact, otherwise at all positions. ``'all'``: at all positions.
``'labels'``: only at labels, or an error."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmOptions:
    """The arguments of :class:`.TokenAccumulation`; its docstring explains them.

    Raises:
        ValueError: If one of them has an unknown value, or two do not go together.
    """

    loss_tokens: str
    loss_units: Mapping[str, str] | None
    token_weights: str
    router_balance: str
    logits: str
    check_loss: bool

    def __post_init__(self) -> None:
        self._check_units()
        check_choice('router_balance', self.router_balance, ROUTER_BALANCES)
        check_choice('logits', self.logits, LOGITS)
        check_choice('check_loss', self.check_loss, (True, False))
        check_choice('token_weights', self.token_weights, tuple(TOKEN_WEIGHTS))
        rule = self.rule  # refuses an unknown one
        units = self.loss_units or {}
        if self.router_balance == 'step' and units:
            raise InvalidInputError(
                "`router_balance='step'` must go with the one number that a Hugging Face mixture of experts returns, "
                f'got: the terms {sorted(units)} of `loss_units`. {OR_LEAVE_MICROBATCH}'
            )
        if self.is_weighted and units and 'tokens' not in units.values():
            raise InvalidInputError(
                "`token_weights` must be 'token' if no term of `loss_units` is a mean over tokens, got: "
                f'{self.token_weights!r}.'
            )
        if rule is None and not self.check_loss:
            raise InvalidInputError(
                "`loss_tokens` must be an explicit rule with `check_loss=False`, got: 'auto'. Only the check finds the "
                "rule. Give 'causal' (most decoders), 'causal_attended' or 'unshifted' (docs/errors.md#loss-rule)."
            )

    @property
    def rule(self) -> LossRule | None:
        """The loss rule that the user has named; None: it is to be found."""
        return LossRule.named(self.loss_tokens)

    @property
    def is_weighted(self) -> bool:
        """Whether tokens may have unequal weights."""
        return self.token_weights != 'token'

    @property
    def needs_loss_check(self) -> bool:
        """Whether the first-batch check compares the model's loss with its rule.

        Token weights always need this, so with them it is True even if ``check_loss`` is False.
        """
        return self.check_loss or self.is_weighted

    @property
    def why_all_logits(self) -> str | None:
        """Why these arguments need logits at all positions; None: they allow logits only at labels."""
        if self.logits == 'all':
            return '`logits` is set to all'
        if self.loss_units:
            return '`loss_units` names terms, which may be made of any logits'
        if not self.needs_loss_check:
            return 'with `check_loss=False` nothing is known about the loss'
        return None

    def _check_units(self) -> None:
        """Raises ValueError if ``loss_units`` is not a mapping from terms to units."""
        if self.loss_units is None:
            return
        if not isinstance(self.loss_units, Mapping):
            raise InvalidInputError(
                f"`loss_units` must be a mapping from the terms of the loss to units, such as {{'lm': 'tokens'}}, got: "
                f'{self.loss_units!r}.'
            )
        if 'total' in self.loss_units:
            raise InvalidInputError(
                "`loss_units` must name terms, got: 'total', which Composer reserves for their sum."
            )
        for name, unit in self.loss_units.items():
            check_choice(f'loss_units[{name!r}]', unit, LOSS_UNITS)


class ModelChecks:
    """Checks of the model that are repeated in every step, because the model may change in training.

    Args:
        state: The trainer's state.
        forbids_batch_norms: Whether no BatchNorm may be in training mode.
    """

    def __init__(self, state: State, *, forbids_batch_norms: bool) -> None:
        self._model: torch.nn.Module = inner_model(state.model)
        # These are collected once for a fit. A mixture of experts may have thousands of modules.
        self._unsharded = unsharded_parameters(state.model)
        self._parameters = list(self._model.parameters())
        self._batch_norms: dict[str, torch.nn.Module] = {}  # by name
        if forbids_batch_norms:
            for name, module in self._model.named_modules():
                if isinstance(module, BatchNorm):
                    self._batch_norms[name] = module
        self._checked_hooks: list[int] | None = None  # numbers of the gradient hooks that were checked

    def check(self) -> None:
        """Raises RuntimeError if the model cannot be trained exactly in its present state."""
        check_unsharded_are_frozen(self._unsharded)  # a parameter may have been unfrozen
        self._check_batch_norms()
        self._check_new_hooks()

    def _check_batch_norms(self) -> None:
        """Raises RuntimeError if a BatchNorm is in training mode.

        Composer puts the model into training mode after each evaluation.
        """
        training = [name for name, module in self._batch_norms.items() if module.training]
        if training:
            raise NotExactError(
                f'Rows must be independent of the rows beside them, got: {len(training)} BatchNorm in training mode, '
                f'such as {training[0]!r}, which normalises by the statistics of its microbatch. Freeze it in eval '
                'mode, again after each evaluation (docs/errors.md#row-coupling).'
            )

    def _check_new_hooks(self) -> None:
        """Raises RuntimeError if a hook on a parameter is not linear, or if an optimizer steps in the backward.

        A hook runs once for each microbatch. The results add up to the result for the whole step only if it is linear.
        The hooks are only tried if some were added or removed since the last call.
        """
        numbers = hook_numbers(self._parameters)
        if numbers != self._checked_hooks:
            check_gradient_hooks(self._model)
            self._checked_hooks = numbers


class RunContext:
    """The parts that the algorithm needs during a fit, set up at its first batch.

    Building it is a collective, for example to agree on the layout. It starts the split, and adds hooks to the model,
    and to optimizers that take a closure. :meth:`end` removes them.

    Args:
        state: The trainer's state, which holds the first batch.
        options: The arguments of the algorithm.

    Raises:
        ValueError: If weights of the data or ``equal_counts`` do not fit the run.
        RuntimeError: If the run cannot be exact, or cannot have ``logits='labels'``.
    """

    step: Step
    """The record of the step that runs now; set by :meth:`begin_step`."""
    loss_facts: LossFacts
    """What the first-batch check has found out about the loss; set by :meth:`prove`."""

    def __init__(self, state: State, options: AlgorithmOptions) -> None:
        check_weights_are_used(state.dataloader, state.batch, options.token_weights)
        _warn_of_inexactness(state)
        self.options = options
        model: Any = inner_model(state.model)
        self.model: Any = model
        """The model without the wrappers of DDP and torch.compile."""

        # The model and its optimizers. No hooks are added before these checks, so that a refused model stays as it was.
        check_trains_something(model)
        shard_again(state.model)  # an earlier evaluation may have left weights gathered
        # With `check_loss=False` the user accepts that rows depend on each other, so BatchNorm may train. This holds
        # with token weights, too, although they need the first-batch check.
        self.model_checks = ModelChecks(state, forbids_batch_norms=options.check_loss)
        """Checks that are repeated in every step."""
        self.model_checks.check()
        check_clipping(state)
        check_sees_gradients(state)

        # The loss, and the reduction of its gradients over the ranks.
        self.world_size = get_world_size()
        self.terms = LossTerms(options.loss_units)
        """The terms of the loss."""
        self.read_router_coefficient()
        # A contrastive term may gather the rows of other ranks. With `check_loss=False` a SyncBatchNorm may train,
        # which gathers statistics in every forward.
        may_gather = bool(self.terms.coupled_terms) or not options.check_loss
        self.reductions = ReductionWatch(state, may_gather=may_gather)
        """Watches which gradients the backward of each microbatch writes."""
        self.excess_of_reduction = excess_of_reduction(state.model)
        """By which factor FSDP2 on CPUs makes the reduced gradient too large; 1 otherwise."""

        # The steps.
        self.token_choice = TokenChoice()
        """Chooses which tokens to measure."""
        self.step_number = 0
        """The number of the step that runs now, counted from 0 at the start of the fit."""
        self.first_step_has_bypass: bool | None = None
        """Whether the loss of the first step had a bypass. None: there was no such step yet. The first step is the one
        in which this rank first had tokens of a weight above 0."""

        # The split, and the layout of its batches.
        self.split = split_of(state.dataloader)
        """Cuts batches into microbatches. None: another split cuts them."""
        if self.split is None:
            layout = layout_without_split(model, state.batch)  # None: rows cannot be told apart
        else:
            self._check_equal_counts(state, self.split)
            self._check_coupled_terms(self.split)
            # The split may have served another model before, and must forget it.
            self.split.start(model, state.batch, microbatch_size_of(state))
            layout = self.split.layout

        # The parts that run forwards of their own, or change the forward of the model.
        precision = partial(get_precision_context, state.precision, state.precision_config)
        to_device = partial(_to_device, state, self.split)
        self.balance: StepBalance | None = None
        """Computes the load-balancing loss over the whole step. None: it is computed for each microbatch."""
        if options.router_balance == 'step':
            self.balance = StepBalance(state, self.split, self.terms, to_device, precision)
        self.selector = self._new_selector(state, layout)
        """Makes the model compute logits only at labels. None: the model computes all logits."""
        self.row_check = self._new_check(state, layout, to_device, precision)
        """The first-batch check, which checks rows of later batches, too."""
        self.closure_hooks = ClosureHooks()
        """Give optimizers that evaluate a step themselves its loss over all ranks."""
        self.closure_hooks.update(state)

    def _new_check(
        self,
        state: State,
        layout: BatchLayout | None,
        to_device: Callable[[Batch], Any],
        precision: Callable[[], AbstractContextManager[object]],
    ) -> FirstBatchCheck:
        """Returns the first-batch check, which has checked no rows yet."""
        probe = Probe(
            forward=self.model,
            loss=self.model.loss,
            model=self.model,
            precision=precision,
            terms=self.terms.losses_to_compare,
            gather=all_gather_object,
        )
        return FirstBatchCheck(
            probe,
            layout,
            to_device,
            cutter=self.split,
            named_rule=self.options.rule,
            check_loss=self.options.needs_loss_check,
            selector=self.selector,
            forward_arguments=_forward_arguments(self.model),
        )

    def _new_selector(self, state: State, layout: BatchLayout | None) -> LabelSelector | None:
        """Adds the hooks for logits at labels to the model. If the run needs all logits, returns None, or raises."""
        why_all_logits = _why_all_logits(state, layout, self.options, self.model)
        if why_all_logits is not None:
            self._accept_all_logits(why_all_logits)
            return None
        return LabelSelector(self.model.model)

    def read_router_coefficient(self) -> None:
        """Reads the factor of the load-balancing loss from the model, because a schedule may change it."""
        if not self.options.loss_units:  # `loss_units` may name the load-balancing loss as a term
            self.terms.router_coefficient = router_coefficient(self.model)

    def begin_step(self, step: Step) -> None:
        """Begins a step. The split gets the record of the step, too, because it will note the microbatches there."""
        self.step = step
        if self.split is not None:
            self.split.step = step

    def samples_for_composer(self, counts: CountSums) -> int:
        """Returns how many samples Composer counts in some rows. It weights the loss of their microbatch by them.

        With our split, Composer asks the CountingDataSpec, which leaves out dummy rows and repeated samples. Any other
        DataSpec counts all rows.
        """
        if self.split is None:
            return counts.num_rows
        return counts.samples

    @property
    def is_step_empty(self) -> bool:
        """Whether the loss, or a term of it, is a mean over tokens, but no rank has a loss-generating token.

        One forward over the whole batch would have a loss of NaN, so such a step changes no weight.
        """
        if self.step.totals.loss_tokens > 0:
            return False
        units = self.terms.units.values()
        # Without `loss_units` the loss is one mean over tokens.
        return not units or 'tokens' in units

    def width_of(self, step: Step) -> RankWidth:
        """Returns the width of this rank's rows, which is compared over the ranks."""
        if self.world_size == 1:
            return RankWidth.of((), rules=None, rule=None)  # the width 0, because nothing is compared
        rules = None  # without a split no row is trimmed
        if self.split is not None:
            rules = self.split.rules
        return RankWidth.of(step.facts, rules, self.loss_facts.rule)

    def prove(self, batch: Batch, microbatch_size: float) -> None:
        """Runs the first-batch check; a collective.

        It checks rows of each rank that has new rows, such as longer ones than all before. If no rank has new rows, but
        a check is due, it checks some known rows. Afterwards the split cuts by the rules that the check has found. If
        logits at labels fail the check, the model computes all logits from now on.
        """
        if self.options.token_weights == 'column':
            # The data may have one weight for each row. In training, batches have a weight for each position, so the
            # check gets the same.
            batch = with_weights_of_positions(batch)
        self.read_router_coefficient()
        try:
            self.loss_facts = self.row_check.prove(batch, microbatch_size)
            why_all_logits = self.loss_facts.selection_failure
            if why_all_logits is not None and self.selector is not None:
                self._remove_selector()
                self._accept_all_logits(why_all_logits)
        except BaseException:
            # FIT_END does not come after an error, so the hooks are removed here.
            self.end()
            raise

    def end(self) -> None:
        """Removes the hooks from the model and the optimizer, and makes the split forget the model."""
        self._remove_selector()
        self.closure_hooks.remove()
        if self.split is not None:
            self.split.stop()

    def _remove_selector(self) -> None:
        """Removes the hooks for logits at labels. From now on the model computes all logits."""
        if self.selector is not None:
            self.selector.remove()
            self.selector = None

    def _accept_all_logits(self, why: str) -> None:
        """Logs why all logits are computed. Raises RuntimeError if the user does not accept it: `logits='labels'`."""
        if self.options.logits == 'labels':
            raise NotExactError(
                f"`logits='labels'` must leave loss and gradient the same, got: {why}. Set `logits='auto'`, which "
                'computes all logits in this case (docs/errors.md#logits-at-labels).'
            )
        log.info('Logits are computed at all positions: %s.', why)

    # Checks of the split.

    def _check_equal_counts(self, state: State, split: MicrobatchSplit) -> None:
        """Raises ValueError if ranks may make unequal numbers of microbatches, but wait for each other in every one."""
        waits_in_each = state.fsdp_enabled or state.auto_microbatching
        if self.world_size > 1 and waits_in_each and split.options.equal_counts is False:
            raise InvalidInputError(
                "`equal_counts` must be True or 'auto' with FSDP or automatic microbatching, got: False. A rank with "
                'more microbatches would wait forever for the others (docs/errors.md#ranks).'
            )

    def _check_coupled_terms(self, split: MicrobatchSplit) -> None:
        """Raises RuntimeError if the split regroups or packs rows, but a term depends on the rows of its microbatch."""
        if self.terms.coupled_terms and (split.options.regroup or split.options.packing):
            raise NotExactError(
                f'Rows must be independent to be regrouped or packed, but the terms {self.terms.coupled_terms} of '
                '`loss_units` depend on which rows share a microbatch. Set '
                '`token_data_spec(..., regroup=False, packing=False)` (docs/errors.md#row-coupling).'
            )


def arguments_to_compare(state: State, options: AlgorithmOptions) -> dict[str, object]:
    """Returns the arguments of this rank that must be the same on all ranks, by name.

    Otherwise ranks could weight tokens or move weights in unlike ways, or only some of them could take part in a
    collective. The caps and the ``width_multiple`` of ``token_data_spec`` are left out, because steps are exact even if
    each rank has its own.
    """
    units = options.loss_units or {}
    split = split_of(state.dataloader)
    arguments: dict[str, object] = {
        **vars(options),
        'loss_units': dict(sorted(units.items())),
        'token_data_spec': 'not used' if split is None else 'used',
        'precision': state.precision.value,
        **optimizer_settings_of(state.optimizers),
    }
    for name in ('regroup', 'equal_counts', 'packing'):
        arguments[name] = None if split is None else getattr(split.options, name)
    return arguments


def microbatch_size_of(state: State) -> int | float:
    """Returns the microbatch size; 1 if Composer has none.

    Without a size from the user Composer takes the batch size of the loader, which is None with a batch sampler.
    """
    return state.device_train_microbatch_size or 1


def _why_all_logits(
    state: State,
    layout: BatchLayout | None,
    options: AlgorithmOptions,
    model: torch.nn.Module,
) -> str | None:
    """Returns why a run needs logits at all positions; None: there is no reason before the first-batch check."""
    if options.why_all_logits is not None:
        return options.why_all_logits
    if state.train_metrics:
        return 'metrics of training compare all logits with all labels'
    if layout is None:
        return 'rows of the batch cannot be told apart, so nothing can be proven about them'
    if not isinstance(model, HuggingFaceModel):
        return 'the model is not a HuggingFaceModel'
    if output_embedding(model.model) is None:
        return 'the model names no output embedding'
    if is_compiled(model):
        return 'the model is compiled, and would be compiled again for each number of labels'
    return None


def _forward_arguments(model: torch.nn.Module) -> set[str] | None:
    """Returns the keys that Composer passes on to the model. The first-batch check refuses media under other keys.

    Returns None if the user's own forward or loss gets the whole batch.
    """
    if not isinstance(model, HuggingFaceModel):
        return None
    if type(model).forward is not HuggingFaceModel.forward or type(model).loss is not HuggingFaceModel.loss:
        return None
    return model.model_forward_args


def loss_in_outputs(model: Any, outputs: Any) -> Any:
    """Returns the loss that a model has returned in its outputs; None if it may compute the loss in another way."""
    # Not `type(model).loss`: an instance may have a loss of its own, `model.loss = ...`.
    if getattr(model.loss, '__func__', None) is HuggingFaceModel.loss:
        return model.loss(outputs, None)
    return None


def takes_media(model: torch.nn.Module) -> bool:
    """Returns whether the model may take images, videos or audio. True if its arguments are not known."""
    arguments = _forward_arguments(inner_model(model))
    if arguments is None or media_modules(model):
        return True
    return any(modality_of(argument) is not None for argument in arguments)


def check_trains_something(model: torch.nn.Module) -> None:
    """Raises RuntimeError if all parameters of the model are frozen."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise NotExactError('No parameter of the model requires a gradient, so nothing is trained. Unfreeze one.')


def _to_device(state: State, split: MicrobatchSplit | None, batch: Batch) -> Any:
    """Moves a batch to the device, and prepares it for the model as the split prepares microbatches."""
    on_device = state.device.batch_to_device(batch)
    return on_device if split is None else split.for_model(on_device)


def _warn_of_inexactness(state: State) -> None:
    """Warns of noise that depends on the cut, and of samples that count twice. No check refuses such runs."""
    warn_of_unknown_copies(state.dataloader)
    if any(getattr(module, 'neftune_noise_alpha', None) for module in state.model.modules()):
        log.warning('NEFTune scales its noise by the width of its batch, which is trimmed (docs/limits.md).')


def check_labels_and_ids(model: torch.nn.Module, microbatches: Sequence[Batch], vocabulary: int | None) -> None:
    """Raises ValueError if tokens cannot be counted, or if labels or ids lie outside of the model's vocabulary.

    Args:
        model: The model, in DDP or not.
        microbatches: The microbatches of one device batch, on the CPU.
        vocabulary: The number of logits of a position. None: no forward has shown it yet, and it is taken from the
            output embedding of a Hugging Face model.
    """
    model = inner_model(model)
    # Whether labels must have the shape of the ids. This is certain only for Hugging Face models without an encoder. A
    # decoder behind an encoder may have labels of another shape, and nothing is known of other models.
    labels_are_at_ids = False
    embedding = None
    if isinstance(model, HuggingFaceModel):
        labels_are_at_ids = not is_encoder_decoder(model.config)
        embedding = input_embedding(model.model)
        if vocabulary is None:
            head = output_embedding(model.model)
            # Another module, such as a wrapper of PEFT, may return another number of logits.
            if isinstance(head, torch.nn.Linear):
                vocabulary = head.out_features
    for microbatch in microbatches:
        # This repeats checks of token_data_spec(), because an algorithm may have changed the batch since.
        check_batch(microbatch, labels_are_at_ids=labels_are_at_ids)
        check_vocabulary(microbatch, 'labels', vocabulary)
        # A class derived from Embedding may have more ids than `num_embeddings`.
        if type(embedding) is torch.nn.Embedding and microbatch.get('input_ids') is not None:
            check_vocabulary(
                microbatch,
                'input_ids',
                embedding.num_embeddings,
                # Ids of placeholders may be out of the vocabulary, because models replace them.
                further_ids=partial(all_placeholders, model.config),
            )
