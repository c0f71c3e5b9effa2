# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Real runs on shards: the steps of StreamingDataLoader, exact gradients, and resumption."""

from __future__ import annotations

import json
from itertools import accumulate, chain

import pytest

pytest.importorskip('streaming')

from composer_tokacc.data.to_mds import write_shards
from tests.support.launch import launch, launch_json
from tests.support.llava_folder import write_llava_folder

SCRIPT = 'tests/ranks/streaming_runs.py'
NUM_SAMPLES = 44
GLOBAL_BATCH = 8
SIZES_OF_EPOCH = [8, 8, 8, 8, 8, 4]
NUM_STEPS = 11
"""The runs end one step before the end of the second epoch."""


@pytest.fixture(scope='module')
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp('shards')
    path = write_llava_folder(folder / 'in', NUM_SAMPLES)
    write_shards(path, folder / 'in' / 'images', folder / 'out', size_limit='16kb')
    return str(folder / 'out')


def run_all(shards, *arguments, ranks):
    """Returns the record of each run, whose keyword arguments are given."""
    return launch_json(SCRIPT, shards, json.dumps(arguments), ranks=ranks)


def samples_of_steps(run):
    """Returns the names of the samples of each step, over all ranks."""
    names = {}
    for step, record in run['steps'].items():
        names[step] = sorted(chain.from_iterable(record['samples']))
    return names


def num_samples_of_steps(run):
    return [len(names) for names in samples_of_steps(run).values()]


def steps_from(run, start):
    return {step: record for step, record in run['steps'].items() if int(step) >= start}


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [1, 2, 4])
def test_exchange_changes_no_step(shards, ranks):
    exact = {'learn': False, 'dropout': 0.0}
    exchanged, rank_local, in_order, with_workers, dropping_last = run_all(
        shards,
        exact,
        {**exact, 'exchange': False},
        {'exchange': False, 'shuffle': False, 'duration': '1ep'},
        {'num_workers': 2},
        {'drop_last': True, 'duration': '2ep'},
        ranks=ranks,
    )
    sizes = (SIZES_OF_EPOCH * 2)[:NUM_STEPS]
    for run in (exchanged, rank_local):
        errors = run['errors']
        assert len(errors) == NUM_STEPS
        assert all(error < 1e-6 for error in chain.from_iterable(errors)), errors  # not a number fails too
        assert run['length'] == len(SIZES_OF_EPOCH)
        assert run['batch_size'] == GLOBAL_BATCH // ranks
        assert num_samples_of_steps(run) == sizes
        counted = [record['counted'] for record in run['steps'].values()]
        assert counted == list(accumulate(sizes))
    samples = samples_of_steps(exchanged)
    assert samples_of_steps(rank_local) == samples
    assert samples_of_steps(with_workers) == samples
    assert samples_of_steps(in_order) != samples
    first_epoch = list(samples.values())[: len(SIZES_OF_EPOCH)]
    names = list(chain.from_iterable(first_epoch))
    assert len(names) == NUM_SAMPLES
    assert set(names) == {f's{index}' for index in range(NUM_SAMPLES)}
    assert num_samples_of_steps(dropping_last) == [8] * 10
    if ranks > 1:
        assert_ranks_compute_unequal_numbers(exchanged)


def assert_ranks_compute_unequal_numbers(run):
    has_unequal_ranks = False
    for record in run['steps'].values():
        numbers = [len(samples_of_rank) for samples_of_rank in record['samples']]
        assert min(numbers) > 0
        has_unequal_ranks = has_unequal_ranks or min(numbers) < max(numbers)
    assert has_unequal_ranks


@pytest.mark.slow
@pytest.mark.parametrize('exchange', [True, False], ids=['exchange', 'rank-local'])
def test_resumed_runs_are_bitwise_equal(shards, tmp_path, exchange):
    steps = (1, 3, 5, 6, 7, 10, 8)
    saving = {'folder': str(tmp_path), 'exchange': exchange}
    resuming = [{'load_path': f'{tmp_path}/ba{step}.pt', 'exchange': exchange} for step in steps]
    resuming[-1]['num_workers'] = 2
    unbroken, *resumed = run_all(shards, saving, *resuming, ranks=2)
    parameters = {record['parameters'] for record in unbroken['steps'].values()}
    assert len(parameters) == NUM_STEPS, 'nothing was learnt'
    for step, run in zip(steps, resumed, strict=True):
        assert run['steps'] == steps_from(unbroken, step), step


@pytest.mark.slow
def test_run_resumed_between_two_epochs(shards, tmp_path):
    one_epoch = {'folder': str(tmp_path), 'duration': '1ep'}
    first, unbroken = run_all(shards, one_epoch, {}, ranks=2)
    (second,) = run_all(shards, {'load_path': f'{tmp_path}/latest-rank0.pt'}, ranks=2)
    steps = {**first['steps'], **second['steps']}
    assert steps == unbroken['steps']


@pytest.mark.slow
def test_other_ranks_resume_the_same_steps(shards, tmp_path):
    saving = {'dropout': 0.0, 'folder': str(tmp_path)}
    from_step_4 = {'dropout': 0.0, 'load_path': f'{tmp_path}/ba4.pt'}
    unbroken, without_exchange = run_all(shards, saving, {**from_step_4, 'exchange': False}, ranks=2)
    (on_one_rank,) = run_all(shards, from_step_4, ranks=1)
    (on_four_ranks,) = run_all(shards, from_step_4, ranks=4)
    expected = steps_from(unbroken, 4)
    for run in (without_exchange, on_one_rank, on_four_ranks):
        assert samples_of_steps(run) == samples_of_steps({'steps': expected})
        for step, record in run['steps'].items():
            assert record['norm'] == pytest.approx(expected[step]['norm'], rel=1e-3), step


@pytest.mark.slow
def test_killed_rank_and_resumption(shards, tmp_path):
    run_and_killed_run = [
        {'folder': str(tmp_path / 'unbroken')},
        {'folder': str(tmp_path / 'killed'), 'kill_at': 8},
    ]
    result = tmp_path / 'result.json'
    arguments = [SCRIPT, shards, json.dumps(run_and_killed_run), str(result)]
    done = launch(arguments, ranks=2)
    assert done.returncode != 0
    assert 'Rank 1 crashed with exit code -9' in done.stderr
    (unbroken,) = json.loads(result.read_text())
    (resumed,) = run_all(shards, {'load_path': f'{tmp_path}/killed/ba8.pt'}, ranks=2)
    assert resumed['steps'] == steps_from(unbroken, 8)
