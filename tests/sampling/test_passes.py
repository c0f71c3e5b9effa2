# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The place of a run with several iterators, compared with the batches of an unbroken run."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_tokacc.sampling import RegroupingBatchSampler
from composer_tokacc.sampling.loader import RegroupingDataLoader
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples

NUM_EPOCHS = 3
NUM_SAMPLES = 30
BATCHES = 4
"""Global batches of an epoch: three of eight samples, and one of six."""
KINDS = ['sampler', 'loader', 'workers', 'persistent workers']


class Run:
    """A training loop over a loader, or over its sampler, that can be stopped and resumed at any batch."""

    def __init__(self, kind):
        dataset = LengthDataset(NUM_SAMPLES)
        self.sampler = RegroupingBatchSampler(
            dataset,
            lengths=dataset.lengths,
            global_batch_size=8,
            max_tokens=2 * LONGEST,
            num_replicas=1,
            rank=0,
        )
        self.loader = self.sampler
        if kind != 'sampler':
            self.loader = RegroupingDataLoader(
                dataset,
                batch_sampler=self.sampler,
                collate_fn=collate_samples,
                num_workers=2 * ('workers' in kind),
                persistent_workers=kind.startswith('persistent'),
            )

    def names(self, batch):
        if self.loader is self.sampler:
            return list(batch)
        return [int(name) for name in batch['sample_ids']]

    def look(self):
        return self.names(next(iter(self.loader)))

    def steps(self, first_epoch=0):
        """Yields epoch and samples of each step."""
        for epoch in range(first_epoch, NUM_EPOCHS):
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                yield epoch, self.names(batch)


def steps_after(kind, state):
    run = Run(kind)
    run.loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    return list(run.steps(first_epoch=state['epoch']))


@pytest.fixture(scope='module')
def unbroken():
    steps = list(Run('sampler').steps())
    assert len(steps) == NUM_EPOCHS * BATCHES
    assert len({tuple(samples) for _, samples in steps}) == len(steps)
    return steps


@pytest.mark.parametrize(
    ('kind', 'looks'),
    [('sampler', 0), ('sampler', 3), ('loader', 0), ('loader', 3), ('workers', 1), ('persistent workers', 1)],
)
def test_looks_after_resumption_keep_the_place(kind, looks, unbroken):
    for position in (3, 4, 5) if 'workers' in kind else range(12):
        run = Run(kind)
        state = {**run.loader.state_dict(), 'epoch': position // BATCHES, 'batch': position % BATCHES}
        run.loader.load_state_dict(state)
        for _ in range(looks):
            assert run.look() == unbroken[position][1]
        assert list(run.steps(first_epoch=state['epoch'])) == unbroken[position:]


@pytest.mark.parametrize('kind', KINDS)
def test_looks_in_mid_epoch(kind, unbroken):
    run = Run(kind)
    for position, step in enumerate(run.steps(), start=1):
        assert step == unbroken[position - 1]
        run.look()
        state = run.loader.state_dict()
        assert steps_after('sampler', state) == unbroken[position:]
        assert state == run.loader.state_dict()
    assert position == len(unbroken)


@pytest.mark.parametrize('kind', ['sampler', 'loader', 'persistent workers'])
def test_epoch_set_too_early(kind, unbroken):
    run = Run(kind)
    position = 0
    for epoch in range(NUM_EPOCHS):
        run.sampler.set_epoch(epoch)
        for batch in run.loader:
            position += 1
            assert (epoch, run.names(batch)) == unbroken[position - 1]
            run.sampler.set_epoch(epoch + 1)
            assert steps_after('sampler', run.loader.state_dict()) == unbroken[position:]
            if epoch + 1 < NUM_EPOCHS:
                assert run.look() == unbroken[(epoch + 1) * BATCHES][1]
            assert steps_after('sampler', run.loader.state_dict()) == unbroken[position:]


@pytest.mark.parametrize('kind', KINDS)
def test_look_that_stays_open(kind, unbroken):
    run = Run(kind)
    kept_open = iter(run.loader)
    next(kept_open)
    for position, step in enumerate(run.steps(), start=1):
        assert step == unbroken[position - 1]
        assert steps_after('sampler', run.loader.state_dict()) == unbroken[position:]


@pytest.mark.parametrize('kind', KINDS)
def test_epoch_that_is_left_early(kind, unbroken):
    run = Run(kind)
    for position, _ in enumerate(run.steps(), start=1):
        if position == 6:
            break
    run.look()
    assert steps_after(kind, run.loader.state_dict()) == unbroken[6:]
    run.sampler.set_epoch(2)
    assert steps_after(kind, run.loader.state_dict()) == unbroken[8:]


@pytest.mark.parametrize('kind', KINDS)
def test_epoch_repeats_without_set_epoch(kind, unbroken):
    run = Run(kind)
    for _ in range(3):
        for batch, samples in enumerate(run.loader, start=1):
            assert run.names(samples) == unbroken[batch - 1][1]
            state = run.loader.state_dict()
            assert (state['epoch'], state['batch']) == (0, batch)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_order_of_steps_and_looks(data):
    """A run that looks, sets epochs early, stops and resumes still trains every batch once, in order."""
    expected = list(Run('sampler').steps())
    actions = st.sampled_from(['step', 'step', 'look', 'early', 'restart'])
    trained = []
    run = Run('loader')
    steps = None
    for action in data.draw(st.lists(actions, max_size=40)):
        if action == 'restart':
            state = run.loader.state_dict()
            run = Run('loader')
            steps = None
            run.loader.load_state_dict(state)
        elif action == 'look' and steps is not None:  # before the first step a look cannot be told from a step
            run.look()
        elif action == 'early' and steps is not None:
            run.sampler.set_epoch(trained[-1][0] + 1)
        elif action == 'step':
            if steps is None:
                steps = run.steps(first_epoch=run.sampler.epoch)
            step = next(steps, None)
            if step is not None:
                trained.append(step)
    assert trained == expected[: len(trained)]
