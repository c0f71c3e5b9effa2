# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a run brings to the algorithm: how its batches belong to rows, and its model as the first check runs it."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

from composer.core import State
from composer.core.precision import get_precision_context
from composer.models import HuggingFaceModel
from torch.nn.parallel import DistributedDataParallel

from composer_tokacc.algorithm.loss_terms import LossTerms, router_coefficient
from composer_tokacc.batch import Batch
from composer_tokacc.checks.first_batch import FirstBatchCheck
from composer_tokacc.checks.probe import Probe
from composer_tokacc.checks.row_coupling import check_rows_are_independent
from composer_tokacc.data_spec.reduction import ReductionWatch
from composer_tokacc.data_spec.registry import layout_of
from composer_tokacc.data_spec.split import MicrobatchSplit
from composer_tokacc.layout import BatchLayout, microbatches_of
from composer_tokacc.weights import LOSS_WEIGHTS

__all__ = ['set_up', 'vocabulary_of']

log = logging.getLogger(__name__)


def set_up(
    state: State,
    split: MicrobatchSplit | None,
    terms: LossTerms,
    *,
    loss_tokens: str,
    token_weights: str,
    check_loss: bool,
) -> tuple[FirstBatchCheck, BatchLayout | None, ReductionWatch]:
    """Returns what a fit begins with, of its first batch; a collective.

    Args:
        state: The trainer's, with the whole device batch.
        split: That of the loader; it gets to know the model.
        terms: The loss; it gets to know the coefficient of a router.
        loss_tokens: As given to the algorithm.
        token_weights: Likewise.
        check_loss: Likewise.
    """
    if token_weights != 'column' and any(LOSS_WEIGHTS in one for one in microbatches_of(state.batch)):
        log.warning(
            'The data have `%s`, of which no use is made. Set `token_weights=column` to weigh tokens by them.',
            LOSS_WEIGHTS,
        )
    regroups = split is not None and (split.options.regroup or split.options.packing)
    check_rows_are_independent(state.model, terms.coupled if regroups else [], strict=check_loss)
    layout, microbatch_size = layout_of(state, split), state.device_train_microbatch_size or 1
    model: Any = state.model.module if isinstance(state.model, DistributedDataParallel) else state.model
    if split is not None:  # what another model has left there says nothing of this one
        split.start(model, layout, state.batch, microbatch_size)
    if terms.given_units is None:
        terms.router_coefficient = router_coefficient(model)

    def to_device(batch: Batch) -> Any:
        moved = state.device.batch_to_device(batch)
        return moved if split is None else split.as_the_model_takes_it(moved)

    def precision() -> AbstractContextManager[Any]:
        return get_precision_context(state.precision, state.precision_config)

    check = FirstBatchCheck(
        Probe(model, model.loss, model, precision, terms.by_unit),
        layout,
        to_device,
        loss_tokens=loss_tokens,
        check_loss=check_loss or token_weights != 'token',
        microbatch_size=microbatch_size,
    )
    return check, layout, ReductionWatch(state, is_coupled=bool(terms.coupled))


def vocabulary_of(model: Any) -> int | None:
    """Returns how many ids a label may have, by the last layer of a Hugging Face model; None: that is not known."""
    model = getattr(model, 'module', model)
    if not isinstance(model, HuggingFaceModel):
        return None
    try:
        return getattr(model.model.get_output_embeddings(), 'out_features', None)
    except (AttributeError, NotImplementedError):
        return None
