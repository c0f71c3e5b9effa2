# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The loader by itself, and resumption of real runs at every batch: bitwise equal, and nothing read twice."""

from __future__ import annotations

import json

import pytest
import torch
from composer import Trainer
from composer.core import Event
from torch.utils.data import DataLoader

from composer_tokacc import token_data_spec
from composer_tokacc.row_counts import num_samples, rows_of, with_counts
from composer_tokacc.sampling import RegroupingBatchSampler
from composer_tokacc.sampling.loader import RegroupingDataLoader, SkippedBatch
from tests.ranks.last_steps import CASES
from tests.support.launch import launch_json
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples
from tests.support.text import text_model
from tests.support.training import hugging_face

SCRIPT = 'tests/ranks/resume.py'
NUM_STEPS, STEPS_PER_EPOCH = 11, 6


def build(num_samples=30, *, ranks=2, rank=1, num_workers=0, **kwargs):
    dataset = LengthDataset(num_samples)
    sampler = RegroupingBatchSampler(
        dataset, lengths=dataset.lengths, global_batch_size=8, max_tokens=2 * LONGEST, num_replicas=ranks, rank=rank
    )
    return RegroupingDataLoader(
        dataset, batch_sampler=sampler, collate_fn=collate_samples, num_workers=num_workers, **kwargs
    )


def samples(batches):
    return [[int(name) for name in batch['sample_ids']] for batch in batches]


@pytest.mark.parametrize('num_workers', [0, 2])
def test_every_planned_microbatch_is_collated_by_itself(num_workers):
    loader = build(num_workers=num_workers)
    planned = list(loader.batch_sampler)
    batches = list(loader)
    assert samples(batches) == list(map(list, planned))
    for batch, share in zip(batches, planned, strict=True):
        assert batch.indices == share.microbatches
        assert [list(map(int, one['sample_ids'])) for one in batch.microbatches] == share.microbatches
        for microbatch in batch.microbatches:
            alone = collate_samples([loader.dataset[int(name)] for name in microbatch['sample_ids']])
            assert microbatch.keys() == alone.keys()
            for key in ('input_ids', 'attention_mask', 'labels'):
                assert torch.equal(microbatch[key], alone[key]), 'as wide as its longest row'
    assert len(loader) == len(batches) == 4
    assert loader.batch_size == 4


def test_split_makes_the_microbatches_that_were_planned():
    loader = build(ranks=1, rank=0)
    spec = token_data_spec(loader, slot_tokens=LONGEST)
    for step, batch in enumerate(loader):
        names = [microbatch['sample_ids'] for microbatch in spec.split_batch(spec.batch_transforms(batch), 2)]
        window = loader.batch_sampler.window(step)
        plan = loader.batch_sampler.plan(step).ranks[0]
        assert names == [[str(window[index]) for index in microbatch.indices] for microbatch in plan]


def test_plain_loaders_do_without_the_plan():
    loader = build()
    plain = DataLoader(LengthDataset(30), batch_sampler=loader.batch_sampler, collate_fn=collate_samples)
    assert samples(plain) == samples(loader)


def test_dataset_that_reads_many_at_once_is_asked_once_a_batch():
    class Reader(LengthDataset):
        calls = 0

        def __getitems__(self, indices):
            self.calls += 1
            return [self[index] for index in indices]

    dataset = Reader(30)
    sampler = build(ranks=1, rank=0).batch_sampler
    loader = RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate_samples)
    assert samples(loader) == list(map(list, sampler))
    assert dataset.calls == 4


@pytest.mark.parametrize('num_workers', [0, 2])
def test_iterating_takes_no_random_numbers(num_workers):
    before = torch.get_rng_state()
    list(build(num_workers=num_workers))
    assert torch.equal(before, torch.get_rng_state())


def test_worker_seeds_differ_between_ranks_and_epochs_but_not_between_runs():
    class Seeds(LengthDataset):
        def __getitem__(self, index):
            return {'seed': str(torch.initial_seed())}

    def seeds(rank, epoch):
        sampler = build(rank=rank).batch_sampler
        sampler.set_epoch(epoch)
        loader = RegroupingDataLoader(Seeds(30), batch_sampler=sampler, num_workers=1)
        return {seed for batch in loader for seed in batch['seed']}

    assert seeds(0, 0) == seeds(0, 0)
    assert len(seeds(0, 0) | seeds(1, 0) | seeds(0, 1)) == 3


@pytest.mark.parametrize('num_workers', [0, 2])
def test_skipped_batches_are_counted_but_not_read(num_workers):
    loader = build(num_workers=num_workers, persistent_workers=num_workers > 0)
    whole = {}
    for epoch in range(3):
        loader.batch_sampler.set_epoch(epoch)
        whole[epoch] = samples(loader)
    dataset = loader.dataset.dataset
    dataset.read.clear()
    loader.skip_to(1, 2)
    for epoch, num_skipped in ((0, 4), (1, 2), (1, 0), (2, 0)):
        loader.batch_sampler.set_epoch(epoch)
        batches = list(loader)
        assert [isinstance(batch, SkippedBatch) for batch in batches] == [k < num_skipped for k in range(4)]
        assert samples(batches[num_skipped:]) == whole[epoch][num_skipped:]
    if num_workers == 0:
        expected = whole[1][2:] + whole[1] + whole[2]
        assert dataset.read == [index for batch in expected for index in batch]


@pytest.mark.parametrize('num_workers', [0, 2])
@pytest.mark.parametrize('position', range(5))
def test_state_is_that_of_the_batch_yielded_last(position, num_workers):
    whole = samples(build())
    loader = build(num_workers=num_workers)
    iterator = iter(loader)
    for _ in range(position):
        next(iterator)
    state = loader.state_dict()
    assert state['batch'] == position
    resumed = build()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert samples(resumed) == whole[position:]
    resumed.batch_sampler.set_epoch(1)
    assert resumed.state_dict()['batch'] == 0
    assert len(samples(resumed)) == 4


def test_collate_function_must_name_its_entries():
    loader = build()
    tuples = RegroupingDataLoader(LengthDataset(30), batch_sampler=loader.batch_sampler, collate_fn=tuple)
    with pytest.raises(ValueError, match='`collate_fn` must return a mapping, got: tuple'):
        next(iter(tuples))


def test_what_the_sampler_decides_is_refused():
    with pytest.raises(ValueError, match='batch_sampler option is mutually exclusive with batch_size, shuffle'):
        build(shuffle=True)


def test_other_samplers_are_refused():
    with pytest.raises(ValueError, match=r'must be a RegroupingBatchSampler, got: \[\[0, 1\]\]'):
        RegroupingDataLoader(LengthDataset(4), batch_sampler=[[0, 1]])


def test_composer_takes_the_batch_size_for_the_microbatch_size():
    trainer = Trainer(
        model=hugging_face(text_model()),
        train_dataloader=token_data_spec(build(ranks=1, rank=0)),
        device='cpu',
        max_duration='1ba',
        progress_bar=False,
    )
    assert trainer.state.device_train_microbatch_size == 8
    trainer.fit()
    assert trainer.state.timestamp.sample == 8
    trainer.engine.run_event(Event.FIT_END)


def runs(*arguments, ranks):
    return launch_json(SCRIPT, json.dumps(arguments), ranks=ranks)


def num_reads(first, last=NUM_STEPS):
    """Samples of the steps from `first` on: 44 an epoch, the last step of each has four."""
    return sum(4 if step % STEPS_PER_EPOCH == STEPS_PER_EPOCH - 1 else 8 for step in range(first, last))


def num_witness_reads(ranks):
    """Samples that ranks read to compare their datasets: each reads two of them twice, once in a run."""
    return 4 * ranks


@pytest.mark.slow
def test_resumed_runs_are_bitwise_equal_and_read_what_remains(tmp_path):
    unbroken = {'folder': str(tmp_path), 'durations': [f'{NUM_STEPS}ba']}
    points = range(1, NUM_STEPS)
    resumed = [{'load_path': f'{tmp_path}/ba{step}.pt', 'durations': [f'{NUM_STEPS}ba']} for step in points]
    reading = {'load_path': f'{tmp_path}/ba8.pt', 'durations': [f'{NUM_STEPS}ba'], 'skip': False}
    first, *others = runs(unbroken, *resumed, reading, ranks=2)
    more = num_witness_reads(2)
    assert first['reads'] == num_reads(0) + more
    assert len({step['parameters'] for step in first['steps'].values()}) == NUM_STEPS, 'nothing was learnt'
    for step, other in zip(points, others[:-1], strict=True):
        assert other['steps'] == {str(k): first['steps'][str(k)] for k in range(step, NUM_STEPS)}, step
        assert other['reads'] == num_reads(step) + more, step
    # Composer's own way, to see what is saved: one batch of epoch 0, and all batches of epoch 1.
    assert others[-1]['steps'] == others[list(points).index(8)]['steps']
    assert others[-1]['reads'] == 8 + num_reads(STEPS_PER_EPOCH) + more


@pytest.mark.slow
def test_a_second_fit_goes_on_where_the_first_one_stopped(tmp_path):
    first, resumed, workers = runs(
        {'folder': str(tmp_path), 'durations': ['2ba', '2ba', '5ba']},
        {'load_path': f'{tmp_path}/ba3.pt', 'durations': ['4ba', '3ba', '2ba']},
        {'durations': ['2ba', '7ba'], 'num_workers': 2},
        ranks=2,
    )
    assert [len(run['steps']) for run in (first, resumed, workers)] == [9, 6, 9]
    for run in (resumed, workers):
        for step, seen in run['steps'].items():
            assert seen['samples'] == first['steps'][step]['samples']
    # The ranks compare their datasets at the start of each fit that begins in the first epoch.
    assert first['reads'] == num_reads(0, 9) + 3 * num_witness_reads(2)
    assert resumed['reads'] == num_reads(3, 9) + 2 * num_witness_reads(2)


# Of the session, as tests of other files lie between those of two and of four ranks.
@pytest.fixture(scope='session')
def eight_steps(tmp_path_factory):
    """Of two ranks: the folder of their checkpoints, and what they saw."""
    folder = tmp_path_factory.mktemp('eight_steps')
    return folder, runs({'durations': ['8ba'], 'random': False, 'folder': str(folder)}, ranks=2)[0]


@pytest.mark.slow
@pytest.mark.parametrize(('ranks', 'stock'), [(2, True), (4, False)])
def test_other_numbers_of_ranks_and_the_stock_sampler_go_on_with_the_same_steps(ranks, stock, eight_steps):
    folder, unbroken = eight_steps
    again = {'durations': ['8ba'], 'random': False, 'load_path': f'{folder}/ba4.pt', 'stock': stock}
    (other,) = runs(again, ranks=ranks)
    assert sorted(map(int, other['steps'])) == list(range(4, 8))
    for step, seen in other['steps'].items():
        expected = unbroken['steps'][step]
        assert seen['samples'] == expected['samples'], step
        assert seen['norm'] == pytest.approx(expected['norm'], rel=1e-4), step
    assert other['reads'] == (num_reads(0, 8) if stock else num_reads(4, 8) + num_witness_reads(ranks))


def test_rank_without_a_sample_gets_a_row_without_weight():
    # 25 samples in global batches of 8 leave one for two ranks; which of them computes it the plan says.
    found = []
    for rank in range(2):
        loader = build(25, rank=rank)
        last = list(loader)[-1]
        copied = num_samples(last) == 0
        assert samples([last]) == [loader.batch_sampler.window(3)]
        num_tokens = sum(row.loss_tokens for row in rows_of(with_counts(last)))
        assert (num_tokens == 0) == copied
        found.append((copied, token_data_spec([last]).get_num_samples_in_batch(last)))
    assert sorted(found) == [(False, 1), (True, 0)]


@pytest.mark.slow
def test_last_step_of_an_epoch_on_two_ranks():
    # With torch's repetition one and two ranks trained other last steps, and odd numbers of samples were one too high.
    results = launch_json('tests/ranks/last_steps.py', ranks=2)
    assert len(results) == 4 * len(CASES)
    for name, run in results.items():
        num_samples, global_batch = CASES[name.split(', ')[0]]
        assert run['epochs'] == [num_samples, 2 * num_samples], name
        counts = [*range(global_batch, num_samples, global_batch), num_samples]
        assert run['batches'] == counts + [num_samples + count for count in counts], name
        assert len(run['errors']) == 2
        assert max(run['errors'] + run['loss_errors']) < 1e-6, name
