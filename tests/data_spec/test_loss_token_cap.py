# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``max_loss_tokens`` wherever a cut is made: labels of every microbatch are counted again, from its tensors."""

from __future__ import annotations

import pytest
from composer.core import Callback, Event

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader, token_data_spec
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.sampling import ExchangingDataLoader
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples
from tests.support.text import collate, text_model, text_rows
from tests.support.training import assert_exact, fit

SHAPE = [(14, 11), (12, 2), (9, 7), (6, 5), (6, 1), (5, 3), (4, 2), (3, 2)]
"""Length and loss tokens of each row."""
CAP = 11
"""That of the row with most, so that none is over it by itself."""


def labels_in(batch):
    return int((batch['labels'] != -100).sum())


def batch_of(shape=SHAPE):
    return {**collate(text_rows(shape)), 'sample_ids': [str(row) for row in range(len(shape))]}


def ids_of(microbatches):
    return sorted(name for microbatch in microbatches for name in microbatch['sample_ids'])


class Reached(Callback):
    """Loss tokens of every microbatch that reaches the model."""

    def __init__(self):
        self.counts = []

    def run_event(self, event, state, logger):
        if event == Event.BEFORE_FORWARD and state.model.training:
            self.counts.append(labels_in(state.batch))


@pytest.mark.parametrize('regroup', [True, False])
def test_batch_is_cut_under_cap(regroup):
    free, capped = (
        token_data_spec([], max_loss_tokens=cap, regroup=regroup).split_batch(batch_of(), len(SHAPE))
        for cap in (None, CAP)
    )
    assert max(map(labels_in, free)) > CAP
    assert max(map(labels_in, capped)) <= CAP
    assert ids_of(capped) == ids_of(free)


@pytest.mark.parametrize('packing', [False, True])
@pytest.mark.parametrize('logits', ['all', 'labels'])
def test_capped_microbatches_are_exact(packing, logits):
    reached = Reached()
    assert_exact(
        text_model(), batch_of(), max_loss_tokens=CAP, packing=packing, logits=logits, microbatch_size=len(SHAPE),
        callbacks=[reached],
    )  # fmt: skip
    assert sum(reached.counts) == sum(labels for _, labels in SHAPE)
    assert max(reached.counts) <= CAP


def test_ready_microbatches_are_cut_again():
    batch = PreSplitBatch([batch_of(SHAPE[:4]), batch_of(SHAPE[4:])], max_tokens=10_000)
    microbatches = token_data_spec([], slot_tokens=14, max_loss_tokens=CAP).split_batch(batch, len(SHAPE))
    assert len(microbatches) > 2
    assert max(map(labels_in, microbatches)) <= CAP
    assert ids_of(microbatches) == ids_of(batch.microbatches)


@pytest.mark.parametrize('objective', ['ddp', 'fsdp'])
def test_planned_microbatches_keep_the_cap(objective):
    dataset = LengthDataset(40)
    labels = [labels_in(dataset[index]) for index in range(40)]
    cap = max(labels)
    sampler = RegroupingBatchSampler(
        dataset,
        lengths=dataset.lengths,
        loss_tokens=labels,
        max_loss_tokens=cap,
        global_batch_size=20,
        max_tokens=20 * LONGEST,
        objective=objective,
    )
    loader = RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate_samples)
    reached = Reached()
    data = token_data_spec(loader, slot_tokens=LONGEST, max_loss_tokens=cap)
    fit(text_model(), data, callbacks=[reached], microbatch_size=20, max_duration='1ep')
    assert sum(reached.counts) == sum(labels)
    assert max(reached.counts) <= cap
    # As many as were planned: none had to be cut again.
    assert len(reached.counts) == sum(len(sampler.plan(batch).ranks[0]) for batch in range(2))
    with pytest.raises(ValueError, match=rf'`max_loss_tokens` must be at least the longest sample, got: {cap - 1} < '):
        RegroupingBatchSampler(
            dataset,
            lengths=dataset.lengths,
            loss_tokens=labels,
            max_loss_tokens=cap - 1,
            global_batch_size=20,
            max_tokens=20 * LONGEST,
        )


def test_exchanged_microbatches_keep_the_cap():
    dataset = LengthDataset(24)
    cap = max(labels_in(sample) for sample in dataset)
    options = {'batch_size': 12, 'collate_fn': collate_samples, 'max_tokens': 12 * LONGEST}
    free = list(ExchangingDataLoader(dataset, **options))
    capped = list(ExchangingDataLoader(dataset, max_loss_tokens=cap, **options))
    assert max(labels_in(microbatch) for batch in free for microbatch in batch.microbatches) > cap
    for batch, other in zip(capped, free, strict=True):
        assert max(map(labels_in, batch.microbatches)) <= cap
        assert ids_of([batch]) == ids_of([other])


def test_row_over_cap_is_refused():
    with pytest.raises(ValueError, match=r"'0'.* of 11 loss tokens, over the cap of 10 \(`max_loss_tokens`\)"):
        token_data_spec([], max_loss_tokens=CAP - 1).split_batch(batch_of(), 4)
    microbatches = token_data_spec([], max_loss_tokens=CAP - 1, on_oversize='warn').split_batch(batch_of(), 4)
    over = [microbatch for microbatch in microbatches if labels_in(microbatch) > CAP - 1]
    assert ids_of(over) == ['0']
