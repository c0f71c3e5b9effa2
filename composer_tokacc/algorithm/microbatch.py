# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the algorithm does with one microbatch: hides its entries, sets and watches what its tokens weigh."""

from __future__ import annotations

from typing import Any

import torch
from composer.core import State

from composer_tokacc.algorithm.loss_terms import LOSS_UNITS, LossTerms, attached_zero
from composer_tokacc.algorithm.setup import Fit
from composer_tokacc.batch import Batch
from composer_tokacc.checks.logits import (
    at_predictions,
    has_bypass,
    logits_of,
    router_loss_of,
    targets_of,
    token_losses,
    weigh_tokens,
)
from composer_tokacc.checks.step import MicrobatchRecord, StepCheck
from composer_tokacc.counting import with_one_label
from composer_tokacc.metadata import (
    METADATA_PREFIX,
    is_annotated,
    loss_weight,
    num_loss_tokens,
    num_microbatches,
    num_samples,
    samples_of,
    without_metadata,
)
from composer_tokacc.weights import LOSS_WEIGHTS


class HiddenEntries:
    """Entries of ours that a model does not see: a compiled one would be compiled again for each list among them.

    A microbatch without loss-generating tokens gets one label for the forward: a loss that divides by their number, and
    computes its gradient in the forward as fused ones do, would make NaNs that no weight of zero takes out again.
    Only where the loss is means over tokens alone (``is_of_tokens``): a term over samples would see the label.
    """

    def __init__(self, batch: Batch, *, is_weighted: bool, is_of_tokens: bool) -> None:
        self.batch = without_metadata(batch)
        """What the model sees."""
        if not is_annotated(batch) or (is_weighted and self.batch.pop(LOSS_WEIGHTS, None) is None):
            lacking = f'`{LOSS_WEIGHTS}`' if is_annotated(batch) else f'counts ({METADATA_PREFIX}...)'
            raise RuntimeError(
                f'Microbatches must carry the {lacking} written at BATCH_START, got: {sorted(batch)}. A custom '
                '`split_batch` or `microbatch_transforms` drops them; keep lists with one entry per row, cut weights '
                'as labels are cut, or use token_data_spec() (docs/errors.md#counts).'
            )
        if is_of_tokens and is_empty(batch):
            self.batch = with_one_label(self.batch)
        self._hidden = {key: value for key, value in batch.items() if key not in self.batch}
        self._made_up, self._labels = self.batch.get('labels'), batch.get('labels')

    def put_back(self, batch: Batch) -> dict[str, Any]:
        """Returns the batch with them; what others have changed meanwhile stays changed, for the check to see."""
        whole = {'labels': self._labels, **batch, **self._hidden}  # a model may take labels out of its batch
        if self._labels is not None and whole.get('labels') is self._made_up:
            whole['labels'] = self._labels
        return whole


def is_empty(batch: Any) -> bool:
    """Returns whether a microbatch is without loss-generating tokens, or without samples."""
    return num_loss_tokens(batch) == 0 or num_samples(batch) == 0


def replace_empty(state: State, terms: LossTerms) -> Any:
    """Returns the loss, of which terms over tokens are zero, and no mean over none, where there are no tokens."""
    if not is_empty(state.batch):
        return state.loss
    zero = attached_zero(state.outputs, state.loss)
    return terms.changed(state.loss, lambda name, unit, term: zero if unit == 'tokens' else term)


def record_of(state: State, fit: Fit, step: StepCheck, composers_weight: float) -> MicrobatchRecord:
    """Returns what is to be checked of the microbatch that the trainer has, which is one more of the step."""
    batch: Any = state.batch
    count = None
    if fit.terms.of_unit(state.loss, 'microbatches'):
        # Composer's own split makes microbatches of a fixed number of rows; ours says how many it made.
        count = num_microbatches(batch) or -(-step.num_samples // int(state.device_train_microbatch_size or 1))
    record = MicrobatchRecord(
        batch=batch,
        rule=fit.check.rule or '',
        num_tokens=num_loss_tokens(batch),
        loss_weight=loss_weight(batch),
        num_samples=num_samples(batch),
        num_microbatches=count,
        composers_weight=composers_weight,
    )
    step.records.append(record)
    return record


def check_added_rows(state: State, fit: Fit, record: MicrobatchRecord) -> None:
    """Refuses means over samples that have a loss where a row is no sample, and has no labels: it fills up a rank."""
    samples = samples_of(record.batch)
    if all(samples) or not record.num_samples:
        return
    terms, logits = fit.terms.of_unit(state.loss, 'samples'), logits_of(state.outputs)
    if not terms or logits is None or not logits.requires_grad:
        return
    total = torch.stack([term.sum() for term in terms]).sum()
    (found,) = torch.autograd.grad(total, logits, retain_graph=True, allow_unused=True)
    added = [row for row, number in enumerate(samples) if number == 0]
    if found is not None and len(found) == len(samples) and found[added].any():
        raise RuntimeError(
            f'Terms over samples must be 0 for rows without labels, which fill up ranks, got: a gradient in '
            f'{len(added)} of {len(samples)} rows. Multiply what a row adds by `(labels != -100).any(dim=1)`, or give '
            'every rank as many samples (`drop_last=True`).'
        )


def scales_of(record: MicrobatchRecord, share: float) -> dict[str, float]:
    """Returns the factor of the terms of each unit, on top of Composer's weight; ``share``: of the mean over tokens."""
    if not record.num_samples:
        return dict.fromkeys(LOSS_UNITS, 0.0)
    samples, composers_weight = samples_of(record.batch), record.composers_weight
    return {
        'tokens': share / composers_weight,
        # Rows that are no samples have no labels, and loss 0 in a term's mean.
        'samples': len(samples) / sum(map(bool, samples)),
        'coupled_samples': 1.0,
        'microbatches': 1.0 / ((record.num_microbatches or 1) * composers_weight),
    }


def watch_tokens(
    state: State, record: MicrobatchRecord, fit: Fit, *, share: float, is_weighted: bool, is_whole: bool
) -> None:
    """Sets what a microbatch's tokens weigh beside each other, and listens to what they weigh in its gradient.

    ``share`` is what the mean over them is to weigh in the step, times the loss scale; that loss becomes the weighted
    mean where tokens have their own weights.
    """
    logits, batch, terms = logits_of(state.outputs), record.batch, fit.terms
    if logits is None or logits.grad_fn is None or logits.shape[:2] != batch['labels'].shape:
        return
    router = router_loss_of(state.outputs)
    losses = terms.of_unit(state.loss, 'tokens')
    record.has_bypass = has_bypass(losses, [logits] if router is None else [logits, router])
    weights = None
    if is_weighted:
        weights = at_predictions(batch[LOSS_WEIGHTS] * (record.num_tokens / record.loss_weight), record.rule)
        weigh_tokens(logits, weights)
        added = (token_losses(logits, targets_of(batch, record.rule)) * (weights - 1)).sum() / record.num_tokens
        first = next(name for name, (unit, _) in terms.named(state.loss).items() if unit == 'tokens')
        state.loss = terms.changed(
            state.loss, lambda name, unit, term: term + added if name in (first, 'total') else term
        )
    # Where the loss is not one mean over tokens alone, other terms may go through the logits as well.
    scale = fit.check.token_scale if list(terms.units.values()) in ([], ['tokens']) else None
    record.watch(logits, weights, None if scale is None else scale * share / record.num_tokens, is_whole=is_whole)
