# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a run brings to the algorithm: how its batches belong to rows, and its model as the first check runs it."""

from __future__ import annotations

from typing import Any

from composer.core import State
from composer.core.precision import get_precision_context
from composer.models import HuggingFaceModel

from composer_tokacc.algorithm.loss_terms import LossTerms
from composer_tokacc.checks.first_batch import FirstBatchCheck
from composer_tokacc.checks.probe import Probe
from composer_tokacc.counting import Batch
from composer_tokacc.data_spec.split import MicrobatchSplit
from composer_tokacc.layout import BatchLayout

__all__ = ['first_batch_check', 'vocabulary_of']


def first_batch_check(
    state: State,
    model: Any,
    layout: BatchLayout | None,
    split: MicrobatchSplit | None,
    terms: LossTerms,
    **given: Any,
) -> FirstBatchCheck:
    """Returns the check of a trainer's model, with ``loss_tokens`` and ``check_loss`` among those given."""
    probe = Probe(
        model,
        model.loss,
        model,
        lambda: get_precision_context(state.precision, state.precision_config),
        terms.by_unit,
    )

    def to_device(batch: Batch) -> Any:
        moved = state.device.batch_to_device(batch)
        return moved if split is None else split.as_the_model_takes_it(moved)

    return FirstBatchCheck(probe, layout, to_device, microbatch_size=state.device_train_microbatch_size or 1, **given)


def vocabulary_of(model: Any) -> int | None:
    """Returns how many ids a label may have, by the last layer of a Hugging Face model; None: that is not known."""
    model = getattr(model, 'module', model)
    if not isinstance(model, HuggingFaceModel):
        return None
    try:
        return getattr(model.model.get_output_embeddings(), 'out_features', None)
    except (AttributeError, NotImplementedError):
        return None
