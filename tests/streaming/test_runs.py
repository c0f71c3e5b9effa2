# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Real runs on shards: the steps of StreamingDataLoader, exact gradients, and resumption as StreamingDataset has it."""

from __future__ import annotations

import json
from itertools import chain

import pytest

pytest.importorskip('streaming')

from composer_tokacc.data.to_mds import write_shards
from tests.support.launch import launch, launch_json
from tests.support.llava_folder import write_llava_folder

SCRIPT = 'tests/ranks/streaming_runs.py'
NUM_SAMPLES, GLOBAL_BATCH, STEPS_PER_EPOCH, NUM_STEPS = 44, 8, 6, 11
"""The last step of an epoch has four samples."""


@pytest.fixture(scope='module')
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp('shards')
    path = write_llava_folder(folder / 'in', NUM_SAMPLES)
    write_shards(path, folder / 'in' / 'images', folder / 'out', size_limit='16kb')
    return str(folder / 'out')


def runs(shards, *arguments, ranks):
    return launch_json(SCRIPT, shards, json.dumps(arguments), ranks=ranks)


def samples(run):
    """Of every step, over all ranks."""
    return {step: sorted(chain.from_iterable(seen['samples'])) for step, seen in run['steps'].items()}


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [1, 2, 4])
def test_exchange_changes_no_step(shards, ranks):
    exact = {'learn': False, 'dropout': 0.0}
    exchanged, rank_local, in_order, workers, dropping = runs(
        shards,
        exact,
        {**exact, 'exchange': False},
        {'exchange': False, 'shuffle': False, 'duration': '1ep'},
        {'num_workers': 2},
        {'drop_last': True, 'duration': '2ep'},
        ranks=ranks,
    )
    for run in (exchanged, rank_local):
        assert len(run['errors']) == NUM_STEPS
        assert max(map(max, run['errors'])) < 1e-6, run['errors']
        assert run['length'] == STEPS_PER_EPOCH
        assert run['batch_size'] == GLOBAL_BATCH // ranks
        sizes = [len(step) for step in samples(run).values()]
        assert sizes == [8] * 5 + [4] + [8] * 5
        counted = [seen['counted'] for seen in run['steps'].values()]
        assert counted == [sum(sizes[: k + 1]) for k in range(NUM_STEPS)]
    assert samples(exchanged) == samples(rank_local) == samples(workers)
    assert samples(exchanged) != samples(in_order)
    first_epoch = [samples(exchanged)[str(step)] for step in range(STEPS_PER_EPOCH)]
    assert sorted(chain.from_iterable(first_epoch)) == sorted(f's{k}' for k in range(NUM_SAMPLES))
    assert [len(step) for step in samples(dropping).values()] == [8] * 10
    if ranks > 1:
        shares = [[len(rank) for rank in seen['samples']] for seen in exchanged['steps'].values()]
        assert any(len(set(share)) > 1 for share in shares), 'ranks should compute unequal numbers of samples'
        assert all(min(share) > 0 for share in shares)


@pytest.mark.slow
@pytest.mark.parametrize('exchange', [True, False], ids=['exchange', 'rank-local'])
def test_resumed_runs_are_bitwise_equal(shards, tmp_path, exchange):
    first, *others = runs(
        shards,
        {'folder': str(tmp_path), 'exchange': exchange},
        *({'load_path': f'{tmp_path}/ba{step}.pt', 'exchange': exchange} for step in (1, 3, 5, 6, 7, 10)),
        {'load_path': f'{tmp_path}/ba8.pt', 'exchange': exchange, 'num_workers': 2},
        ranks=2,
    )
    assert len({seen['parameters'] for seen in first['steps'].values()}) == NUM_STEPS, 'nothing was learnt'
    for step, other in zip((1, 3, 5, 6, 7, 10, 8), others, strict=True):
        assert other['steps'] == {str(k): first['steps'][str(k)] for k in range(step, NUM_STEPS)}, step


@pytest.mark.slow
def test_run_resumed_between_two_epochs(shards, tmp_path):
    first, whole = runs(shards, {'folder': str(tmp_path), 'duration': '1ep'}, {}, ranks=2)
    (resumed,) = runs(shards, {'load_path': f'{tmp_path}/latest-rank0.pt'}, ranks=2)
    assert samples({'steps': {**first['steps'], **resumed['steps']}}) == samples(whole)
    assert {**first['steps'], **resumed['steps']} == whole['steps']


@pytest.mark.slow
def test_other_ranks_resume_the_same_steps(shards, tmp_path):
    run = {'dropout': 0.0}
    from_4 = {**run, 'load_path': f'{tmp_path}/ba4.pt'}
    unbroken, local = runs(shards, {**run, 'folder': str(tmp_path)}, {**from_4, 'exchange': False}, ranks=2)
    resumed = {'without': local, **{str(ranks): runs(shards, from_4, ranks=ranks)[0] for ranks in (1, 4)}}
    for name, other in resumed.items():
        assert sorted(map(int, other['steps'])) == list(range(4, NUM_STEPS))
        for step, names in samples(other).items():
            assert names == samples(unbroken)[step], (name, step)
            assert other['steps'][step]['norm'] == pytest.approx(unbroken['steps'][step]['norm'], rel=1e-3), name


@pytest.mark.slow
def test_killed_rank_and_resumption(shards, tmp_path):
    killed = [{'folder': str(tmp_path / 'unbroken')}, {'folder': str(tmp_path / 'killed'), 'kill_at': 8}]
    result = tmp_path / 'result.json'
    done = launch([SCRIPT, shards, json.dumps(killed), str(result)], ranks=2)
    assert done.returncode != 0
    assert 'Rank 1 crashed with exit code -9' in done.stderr
    (expected,) = json.loads(result.read_text())
    (resumed,) = runs(shards, {'load_path': f'{tmp_path}/killed/ba8.pt'}, ranks=2)
    assert resumed['steps'] == {step: seen for step, seen in expected['steps'].items() if int(step) >= 8}
