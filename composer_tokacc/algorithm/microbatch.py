# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the algorithm does with one microbatch: hides its entries, sets and watches what its tokens weigh."""

from __future__ import annotations

from typing import Any

from composer.core import State

from composer_tokacc.algorithm.functional import at_predictions
from composer_tokacc.algorithm.loss_terms import LossTerms
from composer_tokacc.batch import Batch
from composer_tokacc.checks.first_batch import FirstBatchCheck
from composer_tokacc.checks.logits import logits_of, targets_of, token_losses, weigh_tokens
from composer_tokacc.checks.probe import router_loss_of
from composer_tokacc.checks.step import MicrobatchRecord, StepCheck, WatchedTokens, has_bypass
from composer_tokacc.counting import with_one_label
from composer_tokacc.metadata import (
    is_annotated,
    loss_weight,
    num_loss_tokens,
    num_microbatches,
    num_samples,
    without_metadata,
)
from composer_tokacc.weights import LOSS_WEIGHTS

__all__ = ['HiddenEntries', 'is_empty', 'record_of', 'watch_tokens']


class HiddenEntries:
    """Entries of ours that a model does not see: a compiled one would be compiled anew for each list among them.

    A microbatch without loss-generating tokens gets one label for the forward: a loss that divides by their number, and
    computes its gradient in the forward as fused ones do, would make NaNs that no weight of zero takes out again.

    Args:
        batch: A microbatch on its device.
        is_weighted: Whether it must say what its tokens weigh.
    """

    def __init__(self, batch: Batch, *, is_weighted: bool) -> None:
        self.batch = without_metadata(batch)
        """What the model sees."""
        if is_weighted and is_annotated(batch) and self.batch.pop(LOSS_WEIGHTS, None) is None:
            raise RuntimeError(
                f'Microbatches must carry the `{LOSS_WEIGHTS}` written at BATCH_START, got: {sorted(batch)}. A '
                'custom `split_batch` or `microbatch_transforms` drops them; cut them as labels are cut, or use '
                'token_data_spec().'
            )
        if is_annotated(batch) and is_empty(batch):
            self.batch = with_one_label(self.batch)
        self._hidden = {key: value for key, value in batch.items() if key not in self.batch}
        self._made_up, self._labels = self.batch.get('labels'), batch.get('labels')

    def put_back(self, batch: Batch) -> dict[str, Any]:
        """Returns the batch with them; what others have changed meanwhile stays changed, for the check to see."""
        whole = {'labels': self._labels, **batch, **self._hidden}  # a model may take labels out of its batch
        if self._labels is not None and whole.get('labels') is self._made_up:
            whole['labels'] = self._labels
        return whole


def is_empty(batch: Batch) -> bool:
    """Whether a microbatch is without loss-generating tokens, or without samples."""
    return num_loss_tokens(batch) == 0 or num_samples(batch) == 0


def record_of(
    state: State, step: StepCheck, terms: LossTerms, composers_weight: float, *, is_weighted: bool
) -> MicrobatchRecord:
    """Returns what is to be checked of the microbatch that the trainer has, which is one more of the step."""
    batch: Any = state.batch
    # Composer's own split makes microbatches of a fixed number of rows; ours says how many it made.
    count = num_microbatches(batch) or -(-step.local_samples // int(state.device_train_microbatch_size or 1))
    record = MicrobatchRecord(
        batch=batch,
        num_tokens=num_loss_tokens(batch),
        loss_weight=loss_weight(batch),
        num_samples=num_samples(batch),
        num_microbatches=count,
        composers_weight=composers_weight,
        losses=[loss.detach() for loss in terms.terms(state.loss)],
        is_weighted=is_weighted,
    )
    step.records.append(record)
    return record


def watch_tokens(
    state: State, record: MicrobatchRecord, terms: LossTerms, check: FirstBatchCheck, *, share: float, is_whole: bool
) -> None:
    """Sets what a microbatch's tokens weigh beside each other, and listens to what they weigh in its gradient.

    Args:
        state: The trainer's, before backward; its loss becomes the weighted mean where tokens weigh unlike.
        record: Of the microbatch; it keeps what is heard.
        terms: Those of its loss.
        check: Knows the rule, and what tokens weigh in the loss of one forward.
        share: What the mean over its tokens is to weigh in the step, times the loss scale.
        is_whole: Whether every token is measured.
    """
    assert check.rule is not None
    logits, labels = logits_of(state.outputs), state.batch['labels']
    if logits is None or logits.grad_fn is None or logits.shape[:2] != labels.shape:
        return
    router = router_loss_of(state.outputs)
    record.bypass = has_bypass(terms.token_terms(state.loss), [logits] if router is None else [logits, router])
    weights = None
    if record.is_weighted:
        weights = at_predictions(state.batch[LOSS_WEIGHTS] * (record.num_tokens / record.loss_weight), check.rule)
        weigh_tokens(logits, weights)
        losses = token_losses(logits, targets_of(state.batch, check.rule))
        state.loss = terms.add(state.loss, (losses * (weights - 1)).sum() / record.num_tokens)
    # Other terms may go through the logits as well.
    scale = check.token_scale if terms.is_one_mean else None
    unit = None if scale is None else scale * share / record.num_tokens
    record.watched = WatchedTokens(
        logits, state.batch, check.rule, weights, unit, num_tokens=record.num_tokens, is_whole=is_whole
    )
