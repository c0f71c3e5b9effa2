# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The place of a run with several iterators, compared with the batches of an unbroken run."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.length_dataset import LengthDataset, regrouping_loader
from tests.support.sampler_steps import sample_numbers

NUM_EPOCHS = 3
NUM_SAMPLES = 30
BATCHES = 4
"""Global batches of an epoch: three of eight samples, and one of six."""
LOOPS = ['sampler', 'loader', 'worker', 'persistent workers']
"""A loop iterates over the sampler, or over a loader: without workers, with a new one each epoch, or with the same."""
NUM_WORKERS = {'worker': 1, 'persistent workers': 2}
AROUND_END_OF_EPOCH = (3, 4, 5)
"""Steps before which loops with workers look, or resume. Workers start slowly."""


class Run:
    """A training loop over a loader, or over its sampler, that can be stopped and resumed at any batch.

    Between steps it may *look*: take the first batch of another iterator, as Composer and users do to see the data.
    """

    def __init__(self, loop):
        dataset = LengthDataset(NUM_SAMPLES)
        loader = regrouping_loader(
            dataset,
            global_batch_size=8,
            num_workers=NUM_WORKERS.get(loop, 0),
            persistent_workers=loop == 'persistent workers',
        )
        self.sampler: Any = loader.batch_sampler
        self.loader: Any = loader
        if loop == 'sampler':
            self.loader = self.sampler

    def samples(self, batch):
        """Returns the samples of a batch of the loop."""
        if self.loader is self.sampler:
            return list(batch)
        (samples,) = sample_numbers([batch])
        return samples

    def look(self):
        """Returns the samples of the first batch of another iterator."""
        first_batch = next(iter(self.loader))
        return self.samples(first_batch)

    def steps(self, first_epoch=0):
        """Yields epoch and samples of each step."""
        for epoch in range(first_epoch, NUM_EPOCHS):
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                yield epoch, self.samples(batch)


def steps_after(loop, state):
    """Returns the steps of a new run that loads a saved state."""
    saved_state = pickle.dumps(state)
    run = Run(loop)
    run.loader.load_state_dict(pickle.loads(saved_state))
    assert run.loader.state_dict() == state
    return list(run.steps(first_epoch=state['epoch']))


def places_to_look(loop):
    """Returns the steps before which a test looks at the data, or resumes."""
    if loop in NUM_WORKERS:
        return AROUND_END_OF_EPOCH
    return range(NUM_EPOCHS * BATCHES)


@pytest.fixture(scope='module')
def unbroken():
    """Epoch and samples of each step of an unbroken run. No two batches are equal."""
    run = Run('sampler')
    steps = list(run.steps())
    assert len(steps) == NUM_EPOCHS * BATCHES
    different_batches = {tuple(samples) for _, samples in steps}
    assert len(different_batches) == len(steps)
    return steps


@pytest.mark.parametrize(
    ('loop', 'looks'),
    [('sampler', 0), ('sampler', 3), ('loader', 0), ('loader', 3), ('worker', 1), ('persistent workers', 1)],
)
def test_looks_after_resumption_keep_the_place(loop, looks, unbroken):
    for position in places_to_look(loop):
        epoch, batch = divmod(position, BATCHES)
        _, next_samples = unbroken[position]
        run = Run(loop)
        state = run.loader.state_dict()
        state.update(epoch=epoch, batch=batch)
        run.loader.load_state_dict(state)

        for _ in range(looks):
            assert run.look() == next_samples

        steps = list(run.steps(first_epoch=epoch))
        assert steps == unbroken[position:]


@pytest.mark.parametrize('loop', ['loader', 'persistent workers'])
def test_older_iterator_takes_no_batch_of_a_resumed_run(loop, unbroken):
    run = Run(loop)
    older = iter(run.loader)
    next(older)
    run.loader.load_state_dict(run.loader.state_dict())
    newer = iter(run.loader)
    samples_of_steps = [run.samples(next(newer))]
    next(older)
    samples_of_steps += [run.samples(batch) for batch in newer]
    assert samples_of_steps == [samples for _, samples in unbroken[1:BATCHES]]


def test_other_epoch_than_the_saved_one(unbroken):
    """A user may load a state in the middle of an epoch, and begin the next epoch nevertheless."""
    run = Run('sampler')
    state = run.loader.state_dict()
    state.update(epoch=0, batch=2)
    run.loader.load_state_dict(state)
    steps = list(run.steps(first_epoch=1))
    assert steps == unbroken[BATCHES:]


@pytest.mark.parametrize('loop', LOOPS)
@pytest.mark.parametrize('stays_open', [False, True])
def test_looks_in_mid_epoch(stays_open, loop, unbroken):
    """Looks after steps, or one look that began before the run and goes on."""
    run = Run(loop)
    open_look = iter(run.loader)
    if stays_open:
        next(open_look)
    position = 0
    for step in run.steps():
        assert step == unbroken[position]
        position += 1
        if not stays_open and position in places_to_look(loop):
            run.look()
        state = run.loader.state_dict()
        assert steps_after('sampler', state) == unbroken[position:]
        assert state == run.loader.state_dict()
    assert position == len(unbroken)


@pytest.mark.parametrize('loop', ['sampler', 'loader', 'persistent workers'])
def test_epoch_set_too_early(loop, unbroken):
    run = Run(loop)
    position = 0
    for epoch in range(NUM_EPOCHS):
        run.sampler.set_epoch(epoch)
        for batch in run.loader:
            assert (epoch, run.samples(batch)) == unbroken[position]
            position += 1
            next_epoch = epoch + 1
            run.sampler.set_epoch(next_epoch)
            assert steps_after('sampler', run.loader.state_dict()) == unbroken[position:]
            if next_epoch < NUM_EPOCHS and position in places_to_look(loop):
                _, first_samples = unbroken[next_epoch * BATCHES]
                assert run.look() == first_samples
            assert steps_after('sampler', run.loader.state_dict()) == unbroken[position:]


@pytest.mark.parametrize('loop', LOOPS)
def test_epoch_that_is_left_early(loop, unbroken):
    run = Run(loop)
    in_second_epoch = BATCHES + 2
    steps = run.steps()
    for _ in range(in_second_epoch):
        next(steps)
    steps.close()
    run.look()
    assert steps_after(loop, run.loader.state_dict()) == unbroken[in_second_epoch:]
    run.sampler.set_epoch(2)
    assert steps_after(loop, run.loader.state_dict()) == unbroken[2 * BATCHES :]


@pytest.mark.parametrize('loop', LOOPS)
def test_epoch_repeats_without_set_epoch(loop, unbroken):
    run = Run(loop)
    for _ in range(3):
        for position, batch in enumerate(run.loader):
            _, expected_samples = unbroken[position]
            assert run.samples(batch) == expected_samples
            state = run.loader.state_dict()
            assert state['epoch'] == 0
            assert state['batch'] == position + 1


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_order_of_steps_and_looks(unbroken, data):
    """A run that looks, sets epochs early, stops and resumes still trains every batch once, in order."""
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
            epoch, _ = trained[-1]
            run.sampler.set_epoch(epoch + 1)
        elif action == 'step':
            if steps is None:
                steps = run.steps(first_epoch=run.sampler.epoch)
            step = next(steps, None)
            if step is not None:
                trained.append(step)
    assert trained == unbroken[: len(trained)]
