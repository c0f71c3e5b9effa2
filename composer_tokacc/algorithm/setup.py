# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a fit brings to the algorithm: how its batches belong to rows, and its model as the first check runs it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from composer.core import State
from composer.core.precision import get_precision_context
from composer.models import HuggingFaceModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composer_tokacc.algorithm.loss_terms import LossTerms, router_coefficient
from composer_tokacc.algorithm.router_balance import StepBalance
from composer_tokacc.batch import Batch, check_batch
from composer_tokacc.checks.first_batch import FirstBatchCheck, check_gradient_hooks
from composer_tokacc.checks.probe import Probe
from composer_tokacc.compat import BatchNorm
from composer_tokacc.data_spec.reduction import ReductionWatch
from composer_tokacc.data_spec.split import MicrobatchSplit, layout_of, split_of
from composer_tokacc.layout import describe_all, kinds_of, microbatches_of
from composer_tokacc.weights import LOSS_WEIGHTS

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Fit:
    """What is known of model and loader from the first batch of a fit on."""

    check: FirstBatchCheck
    split: MicrobatchSplit | None
    terms: LossTerms
    reductions: ReductionWatch
    norms: Mapping[str, nn.Module]
    """Layers that normalise by the statistics of their microbatch while they are in training mode."""
    balance: StepBalance | None = None
    """Of the router over the step, where that was asked for."""
    has_bypass: bool | None = None
    """Whether the loss has a term that is not made of the logits; None: no step has told yet."""

    def kinds_of(self, batch: Batch) -> Sequence[int]:
        """Returns the kinds of rows that a batch has."""
        return kinds_of(describe_all(self.check.layout, batch))

    def prove(self, batch: Batch, of_ranks: Sequence[Sequence[int]], *, reduces_once: bool) -> None:
        """Has the check look at rows of every kind that is new on any rank, and the split cut by what it finds."""
        try:
            rules = self.check.prove(batch, self.split, self.kinds_of(batch), of_ranks)
        except BaseException:
            self.end()
            raise
        if self.split is not None:
            self.split.adopt(rules, reduces_once=reduces_once)

    def end(self) -> None:
        """Gives the user the model back."""
        if self.split is not None:
            self.split.attend_as_before()

    def check_norms(self) -> None:
        """Raises RuntimeError if one is in training mode: evaluation puts the whole model back into it."""
        training = [name for name, module in self.norms.items() if module.training]
        if training:
            raise RuntimeError(
                f'Rows must be independent of the rows beside them, got: {len(training)} BatchNorm in training mode, '
                f'such as {training[0]!r}, which normalises by the statistics of its microbatch. Freeze it in eval '
                'mode, again after each evaluation (docs/errors.md#row-coupling).'
            )


def begin_fit(
    state: State,
    *,
    loss_units: Mapping[str, str] | None,
    loss_tokens: str,
    token_weights: str,
    router_balance: str,
    check_loss: bool,
) -> Fit:
    """Returns what a fit begins with, of its first batch, with the arguments of the algorithm; a collective."""
    _warn(state, token_weights)
    split, model = split_of(state.dataloader), state.model
    model: Any = model.module if isinstance(model, DistributedDataParallel) else model
    check_gradient_hooks(model)
    terms = LossTerms(loss_units, None if loss_units else router_coefficient(model))
    _check_coupling(terms, split)
    layout, microbatch_size = layout_of(state, split), state.device_train_microbatch_size or 1
    if split is not None:  # what another model has left there says nothing of this one
        split.start(model, layout, state.batch, microbatch_size)

    def to_device(batch: Batch) -> Any:
        moved = state.device.batch_to_device(batch)
        return moved if split is None else split.as_the_model_takes_it(moved)

    def precision() -> AbstractContextManager[Any]:
        return get_precision_context(state.precision, state.precision_config)

    fit = Fit(
        check=FirstBatchCheck(
            Probe(model, model.loss, model, precision, terms.probed),
            layout,
            to_device,
            loss_tokens=loss_tokens,
            check_loss=check_loss or token_weights != 'token',
            microbatch_size=microbatch_size,
        ),
        split=split,
        terms=terms,
        reductions=ReductionWatch(state, is_coupled=bool(terms.coupled)),
        # Whoever switches the check off accepts that the run depends on how batches are cut.
        norms={name: one for name, one in model.named_modules() if isinstance(one, BatchNorm)} if check_loss else {},
        balance=StepBalance(state, split, terms, to_device, precision) if router_balance == 'step' else None,
    )
    fit.check_norms()
    return fit


def _warn(state: State, token_weights: str) -> None:
    """Says what is exact, and perhaps not what was meant."""
    if token_weights != 'column' and any(LOSS_WEIGHTS in one for one in microbatches_of(state.batch)):
        log.warning('The data have `%s`, of which no use is made without `token_weights=column`.', LOSS_WEIGHTS)
    if any(getattr(module, 'neftune_noise_alpha', None) for module in state.model.modules()):
        log.warning('NEFTune scales its noise by the width of its batch, which is trimmed (docs/limits.md).')


def _check_coupling(terms: LossTerms, split: Any) -> None:
    if terms.coupled and split is not None and (split.options.regroup or split.options.packing):
        raise RuntimeError(
            f'Rows must be independent to be regrouped, got: the terms {terms.coupled} of `loss_units`, whose value '
            'depends on which rows share a microbatch. Set `token_data_spec(..., regroup=False)` '
            '(docs/errors.md#row-coupling).'
        )


def check_microbatches(model: Any, microbatches: Sequence[Batch], vocabulary: int | None) -> None:
    """Raises ValueError where ids or labels are none of the model's; ``vocabulary``: by its logits, if any came yet."""
    model = getattr(model, 'module', model)
    # Labels of a custom model need not stand at the positions of the ids.
    is_decoder = isinstance(model, HuggingFaceModel) and not getattr(model.config, 'is_encoder_decoder', False)
    if vocabulary is None and isinstance(model, HuggingFaceModel):
        with suppress(AttributeError, NotImplementedError):
            vocabulary = getattr(model.model.get_output_embeddings(), 'out_features', None)
    for microbatch in microbatches:
        check_batch(microbatch, vocabulary, is_decoder=is_decoder)
