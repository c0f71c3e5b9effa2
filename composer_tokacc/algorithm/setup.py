# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a fit brings to the algorithm: how its batches belong to rows, and its model as the first check runs it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from composer.core import State
from composer.core.precision import get_precision_context
from composer.models import HuggingFaceModel
from torch.nn.parallel import DistributedDataParallel

from composer_tokacc.algorithm.loss_terms import LOSS_UNITS, LossTerms, router_coefficient
from composer_tokacc.algorithm.router_balance import OTHERWISE, ROUTER_BALANCES, StepBalance
from composer_tokacc.batch import IGNORE_INDEX, Batch, check_batch, check_vocabulary
from composer_tokacc.checks.first_batch import FirstBatchCheck, check_gradient_hooks
from composer_tokacc.checks.probe import Probe
from composer_tokacc.collectives import get_world_size
from composer_tokacc.compat import BatchNorm
from composer_tokacc.counting import check_rule
from composer_tokacc.data_spec.reduction import ReductionWatch
from composer_tokacc.data_spec.split import layout_of, split_of
from composer_tokacc.layout import microbatches_of
from composer_tokacc.layout.placeholders import all_placeholders
from composer_tokacc.planning import check_choice
from composer_tokacc.weights import LOSS_WEIGHTS, check_token_weights

log = logging.getLogger(__name__)


class Fit:
    """What is known of model and loader from the first batch of a fit on; to make one is a collective.

    Args:
        state: The trainer's, with that batch.
        given: The algorithm, for its arguments.
    """

    def __init__(self, state: State, given: Any) -> None:
        _warn(state, given.token_weights)
        model: Any = state.model.module if isinstance(state.model, DistributedDataParallel) else state.model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise RuntimeError('The model must have a parameter to train, got: all frozen. Let one require a gradient.')
        check_gradient_hooks(model)
        self.terms = LossTerms(given.loss_units, None if given.loss_units else router_coefficient(model))
        self.reductions = ReductionWatch(state, is_coupled=bool(self.terms.coupled))
        self.split = split = split_of(state.dataloader)
        layout, microbatch_size = layout_of(state, split), state.device_train_microbatch_size or 1
        if split is not None:
            if self.terms.coupled and (split.options.regroup or split.options.packing):
                raise RuntimeError(
                    f'Rows must be independent to be regrouped, got: the terms {self.terms.coupled} of `loss_units`, '
                    'whose value depends on which rows share a microbatch. Set `token_data_spec(..., regroup=False)` '
                    '(docs/errors.md#row-coupling).'
                )
            # What another model has left there says nothing of this one.
            split.start(model, layout, state.batch, microbatch_size)

        def to_device(batch: Batch) -> Any:
            moved = state.device.batch_to_device(batch)
            return moved if split is None else split.as_the_model_takes_it(moved)

        precision = partial(get_precision_context, state.precision, state.precision_config)
        self.balance = None
        if given.router_balance == 'step':
            self.balance = StepBalance(state, split, self.terms, to_device, precision)
        self.check = FirstBatchCheck(
            Probe(model, model.loss, model, precision, self.terms.probed), layout, to_device,
            loss_tokens=given.loss_tokens, check_loss=given.check_loss or given.is_weighted,
            microbatch_size=microbatch_size,
        )  # fmt: skip
        # Whoever switches the check off accepts that the run depends on how batches are cut.
        modules = model.named_modules() if given.check_loss else ()
        self._norms = {name: module for name, module in modules if isinstance(module, BatchNorm)}
        self.world_size = get_world_size()
        self.has_bypass: bool | None = None
        """Whether the loss has a term that is not made of the logits; None: no step has told yet."""
        self.check_norms()

    def prove(self, batch: Batch, *, reduces_once: bool) -> None:
        """Has the check look at rows of every kind that is new on any rank, and the split cut by what it finds."""
        try:
            rules = self.check.prove(batch, self.split)
        except BaseException:
            self.end()
            raise
        if self.split is not None and rules is not None:
            self.split.layout = self.check.layout
            self.split.adopt(rules, reduces_once=reduces_once)

    def end(self) -> None:
        """Gives the user the model back."""
        if self.split is not None:
            self.split.attend_as_before()

    def check_norms(self) -> None:
        """Raises RuntimeError if one is in training mode: evaluation puts the whole model back into it."""
        training = [name for name, module in self._norms.items() if module.training]
        if training:
            raise RuntimeError(
                f'Rows must be independent of the rows beside them, got: {len(training)} BatchNorm in training mode, '
                f'such as {training[0]!r}, which normalises by the statistics of its microbatch. Freeze it in eval '
                'mode, again after each evaluation (docs/errors.md#row-coupling).'
            )


def check_arguments(given: Any) -> None:
    """Raises ValueError unless the arguments of :class:`.TokenAccumulation`, its attributes, are valid."""
    units = {} if given.loss_units is None else given.loss_units
    if not isinstance(units, Mapping):
        raise ValueError(
            f"`loss_units` must be a mapping from the terms of the loss to units, such as {{'lm': 'tokens'}}, got: "
            f'{units!r}.'
        )
    if 'total' in units:
        raise ValueError("`loss_units` must name terms, got: 'total', which Composer reserves for their sum.")
    for name, unit in units.items():
        if unit not in LOSS_UNITS:
            raise ValueError(f'`loss_units[{name!r}]` must be one of {LOSS_UNITS}, got: {unit!r}.')
    check_choice('router_balance', given.router_balance, ROUTER_BALANCES)
    check_choice('check_loss', given.check_loss, (True, False))
    if given.router_balance == 'step' and units:
        raise ValueError(
            "`router_balance='step'` must go with the one number that a Hugging Face mixture of experts returns, got: "
            f'the terms {sorted(units)} of `loss_units`. {OTHERWISE}'
        )
    check_token_weights(given.token_weights)
    if given.token_weights != 'token' and units and 'tokens' not in units.values():
        raise ValueError(
            "`token_weights` must be 'token' where no term of `loss_units` is a mean over tokens, got: "
            f'{given.token_weights!r}.'
        )
    if check_rule(given.loss_tokens, allow_auto=True) == 'auto' and not given.check_loss:
        raise ValueError(
            "`loss_tokens` must be an explicit rule with `check_loss=False`, got: 'auto'. The rule is found by the "
            "check; give 'causal' (most decoders), 'causal_attended' or 'unshifted' (docs/errors.md#loss-rule)."
        )


def _warn(state: State, token_weights: str) -> None:
    """Says what is exact, and perhaps not what was meant."""
    if token_weights != 'column' and any(LOSS_WEIGHTS in one for one in microbatches_of(state.batch)):
        log.warning('The data have `%s`, of which no use is made without `token_weights=column`.', LOSS_WEIGHTS)
    if any(getattr(module, 'neftune_noise_alpha', None) for module in state.model.modules()):
        log.warning('NEFTune scales its noise by the width of its batch, which is trimmed (docs/limits.md).')


def check_microbatches(model: Any, microbatches: Sequence[Batch], vocabulary: int | None) -> None:
    """Raises ValueError where ids or labels are none of the model's; ``vocabulary``: by its logits, if any came yet."""
    model = getattr(model, 'module', model)
    # Labels of a custom model need not stand at the positions of the ids.
    is_decoder = isinstance(model, HuggingFaceModel) and not getattr(model.config, 'is_encoder_decoder', False)
    embedding = None
    if isinstance(model, HuggingFaceModel):
        with suppress(AttributeError, NotImplementedError):
            vocabulary = vocabulary or getattr(model.model.get_output_embeddings(), 'out_features', None)
            embedding = model.model.get_input_embeddings()
    for microbatch in microbatches:
        check_batch(microbatch, is_decoder=is_decoder)
        check_vocabulary(microbatch, 'labels', vocabulary, lambda: (IGNORE_INDEX,))
        # Another class may hold further ids; placeholders may lie outside, as models replace them.
        if type(embedding) is torch.nn.Embedding and microbatch.get('input_ids') is not None:
            check_vocabulary(microbatch, 'input_ids', embedding.num_embeddings, partial(all_placeholders, model.config))
