# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Global batches by tokens or by a schedule, compared with loops over torch's own order, and trained by Composer."""

from __future__ import annotations

import itertools
import json
import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from torch.utils.data import DistributedSampler

from composer_tokacc.sampling import Mixture
from tests.ranks.windows import NUM_SAMPLES, run
from tests.support.launch import launch_json
from tests.support.length_dataset import LengthDataset
from tests.support.sampler_steps import (
    LONGEST_SAMPLE,
    build_sampler,
    joined,
    lognormal_lengths,
    samplers_of_ranks,
    samples_of_steps,
)
from tests.support.training import largest

NUMBERS_OF_RANKS = (1, 2, 8)
RISING = [(0, 8), (5, 16), (9, 24)]
"""A schedule: global batches of 8 samples, from step 5 on 16 samples, from step 9 on 24 samples."""
BY_TOKENS = [(0, 8), ('250tok', 16), ('1_000tok', 24)]
"""A schedule whose stages begin after 250 and after 1,000 trained tokens."""


def random_table(rng, least=1):
    """Returns the lengths of ``least`` to 79 samples."""
    num_samples = rng.integers(least, 80)
    return lognormal_lengths(rng, num_samples)


def windows_of(sampler, epoch):
    """Returns the samples of each global batch of an epoch, in order."""
    sampler.set_epoch(epoch)
    return [sampler.window(batch) for batch in range(sampler.num_batches)]


def sizes_of(windows):
    """Returns the number of samples of each window."""
    return [len(window) for window in windows]


def torchs_own_order(num_samples, epoch, seed=0):
    """Returns the samples of an epoch, shuffled by torch's sampler for one rank."""
    sampler = DistributedSampler(range(num_samples), 1, 0, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def closed_by_tokens(order, lengths, tokens, drop_last=False):
    """Returns the windows. Each ends before the sample that would exceed the next multiple of `tokens`."""
    windows = []
    window = []
    trained = 0
    target = tokens
    for sample in order:
        if trained + lengths[sample] > target:
            windows.append(window)
            window = []
            target += tokens
        window.append(sample)
        trained += lengths[sample]
    if trained == target or not drop_last:
        windows.append(window)
    return windows


def size_of_step(schedule, steps, tokens):
    """Returns the size of the last stage that has begun. A start is in steps, such as 5 or '5ba', or in tokens: '5tok'.

    ``steps`` and ``tokens`` are trained before the step.
    """
    for start, size_of_stage in schedule:
        text = str(start).replace('_', '')
        if text.endswith('tok'):
            has_begun = tokens >= int(text.removesuffix('tok'))
        else:
            has_begun = steps >= int(text.removesuffix('ba'))
        if has_begun:
            size = size_of_stage
    return size


def closed_by_schedule(lengths, schedule, num_epochs, drop_last=False):
    """Returns the windows of each epoch. Steps and tokens are counted through the whole run."""
    steps = 0
    tokens = 0
    epochs = []
    for epoch in range(num_epochs):
        windows = []
        remaining = torchs_own_order(len(lengths), epoch)
        while remaining:
            size = size_of_step(schedule, steps, tokens)
            window = remaining[:size]
            remaining = remaining[size:]
            if drop_last and len(window) < size:
                break
            windows.append(window)
            steps += 1
            tokens += sum(lengths[sample] for sample in window)
        epochs.append(windows)
    return epochs


def test_windows_of_random_tables():
    rng = np.random.default_rng(0)
    for table in range(400):
        is_tenth_table = table % 10 == 0
        lengths = random_table(rng)
        drop_last = bool(rng.integers(2))
        epoch = int(rng.integers(4))
        tokens = int(lengths.max() + rng.integers(0, 150))
        if drop_last and tokens > lengths.sum():
            continue
        order = torchs_own_order(len(lengths), epoch)
        expected = closed_by_tokens(order, lengths, tokens, drop_last)
        expected_tokens = [lengths[window].sum() for window in expected]
        expected_steps = [sorted(window) for window in expected]
        options = {'global_batch_tokens': tokens, 'drop_last': drop_last}

        for ranks in NUMBERS_OF_RANKS:
            sampler = build_sampler(lengths, ranks=ranks, **options)
            assert windows_of(sampler, epoch) == expected
            assert len(sampler) == len(expected), 'as many in every epoch'
            assert sampler.window_tokens().tolist() == expected_tokens
            if is_tenth_table:  # not for each table, because it takes long
                samplers = samplers_of_ranks(lengths, ranks, epoch=epoch, **options)
                assert samples_of_steps(samplers) == expected_steps

        # The reference itself keeps the order, and loses nothing.
        trained_samples = joined(expected)
        assert trained_samples == order[: len(trained_samples)]
        if not drop_last:
            assert len(trained_samples) == len(lengths), 'every sample once'
            assert len(expected) == math.ceil(lengths.sum() / tokens)


@pytest.mark.parametrize(
    'schedule',
    [
        pytest.param(RISING, id='rising'),
        pytest.param(BY_TOKENS, id='by tokens'),
        pytest.param([(0, 24), (3, 8)], id='falling'),
        pytest.param([('0ba', 8)], id='one stage'),
    ],
)
@pytest.mark.parametrize('drop_last', [False, True])
def test_scheduled_windows_match_a_loop(schedule, drop_last):
    for seed in range(40):
        rng = np.random.default_rng(seed)
        lengths = random_table(rng, least=24)
        expected = closed_by_schedule(lengths, schedule, num_epochs=5, drop_last=drop_last)
        for ranks in NUMBERS_OF_RANKS:
            sampler = build_sampler(lengths, ranks=ranks, global_batch_size=schedule, drop_last=drop_last)
            # The last epoch first: its windows depend on all epochs before it.
            for epoch in (4, 0, 2, 1, 3):
                assert windows_of(sampler, epoch) == expected[epoch]


@dataclass(kw_only=True)
class Stages:
    """A schedule for 22 samples of 10 tokens, and the sizes of the windows of two epochs."""

    schedule: list[tuple[int | str, int]]
    drop_last: bool = False
    first_epoch: list[int]
    second_epoch: list[int]


STAGES = {
    'second stage in step 2': Stages(
        schedule=[(0, 3), (2, 5)],
        first_epoch=[3, 3, 5, 5, 5, 1],
        second_epoch=[5, 5, 5, 5, 2],
    ),
    'last window dropped': Stages(
        schedule=[(0, 3), (2, 5)],
        drop_last=True,
        first_epoch=[3, 3, 5, 5, 5],
        second_epoch=[5, 5, 5, 5],
    ),
    'second stage with the epoch': Stages(
        schedule=[(0, 11), (2, 22)],
        drop_last=True,
        first_epoch=[11, 11],
        second_epoch=[22],
    ),
    # Two global batches of 3 samples have 60 tokens.
    'tokens are passed': Stages(
        schedule=[(0, 3), ('59tok', 5)],
        first_epoch=[3, 3, 5, 5, 5, 1],
        second_epoch=[5, 5, 5, 5, 2],
    ),
    'tokens are reached': Stages(
        schedule=[(0, 3), ('60tok', 5)],
        first_epoch=[3, 3, 5, 5, 5, 1],
        second_epoch=[5, 5, 5, 5, 2],
    ),
    'tokens are not reached': Stages(
        schedule=[(0, 3), ('61tok', 5)],
        first_epoch=[3, 3, 3, 5, 5, 3],
        second_epoch=[5, 5, 5, 5, 2],
    ),
    # The first epoch has 220 tokens if none is dropped, and otherwise 200.
    'tokens of the first epoch': Stages(
        schedule=[(0, 20), ('220tok', 11)],
        first_epoch=[20, 2],
        second_epoch=[11, 11],
    ),
    'dropped tokens are not trained': Stages(
        schedule=[(0, 20), ('220tok', 11)],
        drop_last=True,
        first_epoch=[20],
        second_epoch=[20],
    ),
    'a token more than is trained': Stages(
        schedule=[(0, 20), ('201tok', 11)],
        drop_last=True,
        first_epoch=[20],
        second_epoch=[20],
    ),
    'trained tokens of the first epoch': Stages(
        schedule=[(0, 20), ('200tok', 11)],
        drop_last=True,
        first_epoch=[20],
        second_epoch=[11, 11],
    ),
}


@pytest.mark.parametrize('name', STAGES)
def test_stages_begin_at_their_very_start(name):
    stages = STAGES[name]
    lengths = np.full(22, 10)

    sampler = build_sampler(lengths, global_batch_size=stages.schedule, drop_last=stages.drop_last)
    first_windows = windows_of(sampler, 0)
    second_windows = windows_of(sampler, 1)

    assert sizes_of(first_windows) == stages.first_epoch
    assert sizes_of(second_windows) == stages.second_epoch


def test_scheduled_epochs_have_no_length():
    sampler = build_sampler(np.full(48, 5), global_batch_size=RISING)

    sizes_of_epochs = [sizes_of(windows_of(sampler, epoch)) for epoch in range(3)]

    assert sizes_of_epochs == [
        [8, 8, 8, 8, 8, 8],
        [16, 16, 16],
        [24, 24],
    ]
    with pytest.raises(TypeError, match='unequal numbers of global batches'):
        len(sampler)
    assert sampler.global_batch_size == 24


TWO_PASSES_AND_ONE = {
    'global_batch_tokens': 120,
    'mixture': Mixture([30, 30], epochs=[2, 1]),
}
THREE_TO_ONE = {
    'global_batch_tokens': 120,
    'mixture': Mixture([30, 30], weights=[3, 1]),
}
ONE_MODALITY_A_STEP = {
    'global_batch_tokens': 120,
    'modality': 'per_step',
    'media': [0, 1, 0] * 20,
}
WINDOWS = {
    'size': {'global_batch_size': 8},
    'size, mixture': {'global_batch_size': 8, 'mixture': Mixture([20, 40])},
    'tokens': {'global_batch_tokens': 120},
    'tokens, drop_last': {'global_batch_tokens': 120, 'drop_last': True},
    'schedule': {'global_batch_size': RISING},
    'schedule by tokens': {'global_batch_size': BY_TOKENS},
    'schedule, mixture': {'global_batch_size': RISING, 'mixture': Mixture([30, 30], epochs=[0.5, 1])},
    'whole passes': TWO_PASSES_AND_ONE,
    'parts of passes': THREE_TO_ONE,
    'one modality a step': ONE_MODALITY_A_STEP,
}


def state_after(sampler, epoch, num_batches):
    """Returns the state of a sampler after some batches of an epoch, as it is read from a checkpoint."""
    sampler.set_epoch(epoch)
    iterator = iter(sampler)
    for _ in range(num_batches):
        next(iterator)
    saved = json.dumps(sampler.state_dict())
    return json.loads(saved)


@pytest.mark.parametrize('name', WINDOWS)
@pytest.mark.parametrize('epoch', [0, 2])
def test_state_continues_on_other_ranks(name, epoch):
    options = WINDOWS[name]
    lengths = lognormal_lengths(np.random.default_rng(5), 60)
    unbroken = build_sampler(lengths, **options)
    expected = [sorted(window) for window in windows_of(unbroken, epoch)]
    numbers_of_ranks = itertools.cycle([8, 1, 2])

    for position in range(len(expected)):
        saving = build_sampler(lengths, ranks=2, rank=1, **options)
        state = state_after(saving, epoch, position)

        resumed = samplers_of_ranks(lengths, next(numbers_of_ranks), **options)
        for sampler in resumed:
            sampler.load_state_dict(state)

        assert samples_of_steps(resumed) == expected[position:]


@pytest.fixture
def sixty_lengths():
    rng = np.random.default_rng(2)
    return random_table(rng, least=60)[:60]


@pytest.mark.parametrize(
    ('options', 'passes_of_first', 'passes_of_others'),
    [
        pytest.param(TWO_PASSES_AND_ONE, 2, 1, id='two passes and one'),
        pytest.param(ONE_MODALITY_A_STEP, 1, 1, id='one modality a step'),
    ],
)
def test_whole_passes_give_equal_epochs(sixty_lengths, options, passes_of_first, passes_of_others):
    """An epoch has each of the first 30 samples ``passes_of_first`` times."""
    expected_samples = 30 * [passes_of_first] + 30 * [passes_of_others]
    sampler = build_sampler(sixty_lengths, **options)
    for epoch in range(4):
        windows = windows_of(sampler, epoch)
        assert len(windows) == len(sampler)
        counts = np.bincount(joined(windows), minlength=60)
        assert counts.tolist() == expected_samples

        # The last window of each of the two modalities may be small.
        _, _, *full_windows = sorted(sampler.window_tokens())
        for tokens in full_windows:
            assert abs(tokens - 120) < LONGEST_SAMPLE


def test_parts_of_passes_give_unequal_epochs(sixty_lengths):
    sampler = build_sampler(sixty_lengths, **THREE_TO_ONE)
    with pytest.raises(TypeError, match='unequal numbers'):
        len(sampler)


FORTY_LENGTHS = np.arange(1, 41)
OTHER_LENGTHS = np.arange(40, 0, -1)


@dataclass(kw_only=True)
class OtherWindows:
    """A saved run, and a resumed run whose sampler has other options."""

    saved: dict[str, Any]
    changes: dict[str, Any]
    """The options that differ."""
    message: str


BY_SIZE = {'global_batch_size': 8}
BY_NUMBER_OF_TOKENS = {'global_batch_tokens': 100}
MIXED = {**BY_SIZE, 'mixture': Mixture([20, 20])}
MIXED_BY_WEIGHTS = {**BY_SIZE, 'mixture': Mixture([10, 30], weights=[1, 1])}
ONE_MODALITY = {**BY_SIZE, 'modality': 'per_step', 'media': [0, 1] * 20}
OTHER_WINDOWS = {
    'seed': OtherWindows(
        saved=BY_SIZE,
        changes={'seed': 1},
        message='`seed` must be that of the saved run',
    ),
    'shuffle': OtherWindows(
        saved=BY_SIZE,
        changes={'shuffle': False},
        message='`shuffle` must be that of the saved run',
    ),
    'drop_last': OtherWindows(
        saved=BY_SIZE,
        changes={'drop_last': True},
        message='`drop_last` must be that of the saved run',
    ),
    'size': OtherWindows(
        saved=BY_SIZE,
        changes={'global_batch_size': 24},
        message='`global_batch_size` .*, got: 24, saved: 8',
    ),
    'tokens': OtherWindows(
        saved=BY_NUMBER_OF_TOKENS,
        changes={'global_batch_tokens': 101},
        message='`global_batch_tokens` must be that of the saved',
    ),
    'lengths': OtherWindows(
        saved=BY_NUMBER_OF_TOKENS,
        changes={'lengths': OTHER_LENGTHS},
        message='`checksum_of_lengths` must be that of the saved run',
    ),
    'size, not tokens': OtherWindows(
        saved=BY_NUMBER_OF_TOKENS,
        changes={'global_batch_tokens': None, 'global_batch_size': 8},
        message='`checksum_of_lengths` .*, got: None, saved: ',
    ),
    'weights': OtherWindows(
        saved=MIXED,
        changes={'mixture': Mixture([20, 20], weights=[1, 3])},
        message='`quotas` must be that of the saved run',
    ),
    'sizes of datasets': OtherWindows(
        saved=MIXED_BY_WEIGHTS,
        changes={'mixture': Mixture([30, 10], weights=[1, 1])},
        message='`sizes` must be that of the saved run',
    ),
    'media': OtherWindows(
        saved=ONE_MODALITY,
        changes={'media': [1, 0] * 20},
        message='`checksum_of_media` must be that of the saved run',
    ),
    'schedule': OtherWindows(
        saved={'global_batch_size': RISING},
        changes={'global_batch_size': [*RISING, (20, 32)]},
        message='`global_batch_size` must be that of the saved run',
    ),
}


@pytest.mark.parametrize('name', OTHER_WINDOWS)
def test_state_of_other_windows_is_refused(name):
    case = OTHER_WINDOWS[name]
    options = {'lengths': FORTY_LENGTHS, **case.saved}
    changed_options = {**options, **case.changes}
    saved = build_sampler(**options)
    resumed = build_sampler(**changed_options)
    state = saved.state_dict()

    with pytest.raises(ValueError, match=case.message):
        resumed.load_state_dict(state)


def test_state_of_earlier_version_continues():
    """Earlier versions saved neither the sizes of a mixture nor a checksum of the modalities."""
    sampler = build_sampler(FORTY_LENGTHS, **ONE_MODALITY)
    state = sampler.state_dict()
    state['batch'] = 3
    earlier_state = dict(state)
    del earlier_state['sizes']
    del earlier_state['checksum_of_media']

    sampler.load_state_dict(earlier_state)

    assert sampler.state_dict() == state


def test_state_of_this_version_is_loaded_later():
    """A later version may save more, and must still load this state: see `_as_saved_today` of `sampler.py`."""
    state = {
        'epoch': 1,
        'batch': 3,
        'drop_last': False,
        'global_batch_size': 8,
        'num_samples': 40,
        'seed': 0,
        'shuffle': True,
    }
    sampler = build_sampler(FORTY_LENGTHS, global_batch_size=8)

    sampler.load_state_dict(state)

    assert (sampler.epoch, sampler.first_batch) == (1, 3)


@pytest.mark.parametrize(
    'stages',
    [
        pytest.param(8, id='size'),
        pytest.param([(0, 8)], id='in steps'),
        pytest.param([('0tok', 8)], id='in tokens'),
        pytest.param(OmegaConf.create([[0, 8]]), id='from YAML'),
    ],
)
def test_saved_schedule_of_one_stage(stages):
    """Such a schedule is saved as its size. Earlier versions saved a list."""
    saved = build_sampler(FORTY_LENGTHS, global_batch_size=stages)
    # The lengths do not matter, because the global batches are not cut by tokens.
    resumed = build_sampler(OTHER_LENGTHS, global_batch_size=stages)
    resumed_earlier = build_sampler(OTHER_LENGTHS, global_batch_size=stages)
    state = {**saved.state_dict(), 'batch': 3}
    state_of_earlier_version = {**state, 'global_batch_size': [['0ba', 8]]}
    state_of_other_size = {**state, 'global_batch_size': [['0ba', 16]]}

    resumed.load_state_dict(state)
    resumed_earlier.load_state_dict(state_of_earlier_version)

    assert state['global_batch_size'] == 8
    assert resumed.state_dict() == state
    assert resumed_earlier.state_dict() == state
    with pytest.raises(ValueError, match=r"`global_batch_size` .*, got: 8, saved: \[\['0ba', 16\]\]"):
        saved.load_state_dict(state_of_other_size)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        pytest.param(
            {},
            'Exactly one of `global_batch_size` and `global_batch_tokens`',
            id='neither size nor tokens',
        ),
        pytest.param(
            {'global_batch_size': 8, 'global_batch_tokens': 80},
            'Exactly one of',
            id='size and tokens',
        ),
        pytest.param(
            {'global_batch_tokens': 0},
            '`global_batch_tokens` must be a positive integer',
            id='no tokens',
        ),
        pytest.param(
            {'global_batch_tokens': 19},
            r'`global_batch_tokens` must be at least the size of the largest sample, got: 19 < 20 ',
            id='fewer tokens than a sample',
        ),
        pytest.param(
            {'global_batch_tokens': 1000, 'drop_last': True},
            'at most the tokens of an epoch .* got: 1000 > 210',
            id='more tokens than an epoch',
        ),
        pytest.param(
            {'global_batch_size': [(0, 8), (4, 0)]},
            '`global_batch_size` must be a positive integer',
            id='a stage of size 0',
        ),
        pytest.param(
            {'global_batch_size': [(0, 8), (4, 9)], 'ranks': 2},
            'multiple of the number of ranks, got: 9 on 2 ranks',
            id='a stage that ranks cannot share',
        ),
        pytest.param(
            {'global_batch_size': [(0, 8), (4, 24)], 'drop_last': True},
            'got: 24 > 20 samples',
            id='a stage larger than the dataset',
        ),
        pytest.param(
            {'global_batch_size': [(0, 8), (4, 16)], 'modality': 'per_step', 'media': [0, 1] * 10},
            'per_step',
            id='schedule and modality',
        ),
    ],
)
def test_bad_windows_are_refused(options, message):
    """20 samples of 1 to 20 tokens, 210 in total."""
    lengths = np.arange(1, 21)
    with pytest.raises(ValueError, match=message) as caught:
        build_sampler(lengths, **options)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    'schedule',
    [
        pytest.param([], id='empty'),
        pytest.param([(1, 8)], id='does not start at 0'),
        pytest.param([(0, 8), (4, 16), (4, 24)], id='does not rise'),
        pytest.param([(0, 8), ('4ba', 16), ('90tok', 24)], id='steps and tokens'),
        pytest.param([(0, 8), ('4ep', 16)], id='epochs'),
        pytest.param([(0, 8), ('10_ba', 16)], id='underscore before the unit'),
        pytest.param([0, 8], id='no pairs'),
    ],
)
def test_bad_schedules_are_refused(schedule):
    lengths = np.arange(1, 21)
    with pytest.raises(ValueError, match=r'list of \(start, size\)') as caught:
        build_sampler(lengths, global_batch_size=schedule)
    assert '\n' not in str(caught.value)


# Trained by Composer.

TOKENS = {
    'windows': {'global_batch_tokens': 100},
    'duration': '2ep',
}
STEPS = {
    'windows': {'global_batch_size': [[0, 4], ['6ba', 8]]},
    'duration': '11ba',
}
MEASURED = {
    'windows': {'global_batch_size': [[0, 4], ['150tok', 8]]},
    'duration': '700tok',
}
CASES = {'tokens': TOKENS, 'steps': STEPS, 'measured': MEASURED}


def runs(*cases, ranks):
    """Trains the cases under the launcher. Returns their results, as ``tests.ranks.windows.run`` does."""
    return launch_json('tests/ranks/windows.py', json.dumps(cases), ranks=ranks)


def check_run(result, num_epochs):
    """Checks that every sample of an epoch is trained once, and that every gradient is exact."""
    assert largest(result['errors']) < 1e-6
    windows = list(result['windows'].values())
    ends_of_epochs = result['ends_of_epochs']
    assert len(ends_of_epochs) == num_epochs
    every_sample = list(range(NUM_SAMPLES))
    for start, end in itertools.pairwise([0, *ends_of_epochs]):
        samples_of_epoch = joined(windows[start:end])
        assert sorted(samples_of_epoch) == every_sample


def check_resumed_run(resumed, unbroken, first_step):
    """Checks that a resumed run trains the later windows of the unbroken run, with exact gradients."""
    remaining_windows = {}
    for step, window in unbroken['windows'].items():
        if int(step) >= first_step:
            remaining_windows[step] = window
    assert resumed['windows'] == remaining_windows
    # A checkpoint after the last step of an epoch is written before the epoch ends.
    remaining_ends = [end for end in unbroken['ends_of_epochs'] if end >= first_step]
    assert resumed['ends_of_epochs'] == remaining_ends
    assert largest(resumed['errors']) < 1e-6


def test_composer_ends_epochs_by_tokens():
    tokens_of_epoch = LengthDataset(NUM_SAMPLES).lengths.sum()
    num_batches = math.ceil(tokens_of_epoch / 100)

    result = run(**TOKENS)

    check_run(result, num_epochs=2)
    assert result['ends_of_epochs'] == [num_batches, 2 * num_batches]
    assert result['tokens'] == 2 * tokens_of_epoch


def test_composer_ends_epochs_of_a_schedule(tmp_path):
    result = run(**STEPS, folder=str(tmp_path))

    check_run(result, num_epochs=1)
    assert result['ends_of_epochs'] == [9]
    sizes = sizes_of(result['windows'].values())
    first_epoch = [4, 4, 4, 4, 4, 4, 8, 8, 4]  # 44 samples
    assert sizes == [*first_epoch, 8, 8]

    for step in (9, 10):
        resumed = run(**STEPS, load_path=f'{tmp_path}/ba{step}.pt')
        check_resumed_run(resumed, result, step)


@pytest.fixture(scope='session')
def unbroken_runs(tmp_path_factory):
    """Trains every case on two ranks. Returns the folder of its checkpoints, and its result, by the case's name."""
    unbroken = {}
    for name, case in CASES.items():
        folder = str(tmp_path_factory.mktemp(name))
        (result,) = runs({**case, 'folder': folder}, ranks=2)
        unbroken[name] = (folder, result)
    return unbroken


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [1, 4])
@pytest.mark.parametrize(('name', 'num_epochs'), [('tokens', 2), ('steps', 1), ('measured', 1)])
def test_composer_resumes_windows_on_other_ranks(name, num_epochs, ranks, unbroken_runs):
    folder, unbroken = unbroken_runs[name]
    check_run(unbroken, num_epochs=num_epochs)
    first_steps = (2, len(unbroken['windows']) - 2)
    resumed_cases = []
    for step in first_steps:
        resumed_case = {**CASES[name], 'load_path': f'{folder}/ba{step}.pt'}
        resumed_cases.append(resumed_case)

    if ranks == 1:
        results = [run(**case) for case in resumed_cases]
    else:
        results = runs(*resumed_cases, ranks=ranks)

    for step, result in zip(first_steps, results, strict=True):
        check_resumed_run(result, unbroken, step)


def test_composer_refuses_epochs_with_schedule(caplog):
    message = 'max_duration cannot be specified in epochs'
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match=message):
        run(windows=STEPS['windows'], duration='1ep')
