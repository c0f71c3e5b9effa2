# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The loader by itself, and real runs that are resumed: bitwise equal, and nothing is read twice."""

from __future__ import annotations

import contextlib
import json
import os
from types import SimpleNamespace

import pytest
import torch
from composer import Trainer
from composer.core import Event, Timestamp
from torch.utils.data import DataLoader

from composer_tokacc import token_data_spec
from composer_tokacc.row_counts import num_samples, row_counts_of, with_counts
from composer_tokacc.sampling import ExchangingDataLoader, SkipReadBatches
from composer_tokacc.sampling.loader import RegroupingDataLoader, SkippedBatch
from tests.ranks.last_steps import CASES
from tests.support.launch import launch_json
from tests.support.length_dataset import LONGEST, LengthDataset, Reversed, collate_samples, regrouping_loader
from tests.support.sampler_steps import joined, sample_numbers
from tests.support.text import text_model
from tests.support.training import hugging_face, largest

SCRIPT = 'tests/ranks/resume.py'
NUM_STEPS = 11
STEPS_PER_EPOCH = 6


def build(num_samples=30, *, ranks=2, rank=1, num_workers=0, persistent_workers=False):
    """Returns the loader of one rank. Global batches have 8 samples, so an epoch of 30 samples has 4 of them."""
    return regrouping_loader(
        LengthDataset(num_samples),
        global_batch_size=8,
        num_replicas=ranks,
        rank=rank,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
    )


def loader_over(dataset, loader_class=RegroupingDataLoader, collate_fn=collate_samples, **options):
    """Returns a loader on one rank over a dataset of 30 samples."""
    if loader_class is ExchangingDataLoader:
        options = {'batch_size': 8, 'max_tokens': 2 * LONGEST, **options}
    else:
        options['batch_sampler'] = build(ranks=1, rank=0).batch_sampler
    return loader_class(dataset, collate_fn=collate_fn, **options)


@pytest.mark.parametrize('num_workers', [0, 2])
def test_planned_microbatches_are_collated_separately(num_workers):
    loader = build(num_workers=num_workers)
    assignments = list(loader.batch_sampler)

    batches = list(loader)

    assert len(batches) == 4
    assert len(loader) == 4
    assert loader.batch_size == 4
    assert sample_numbers(batches) == [list(assignment) for assignment in assignments]
    for batch, assignment in zip(batches, assignments, strict=True):
        assert batch.indices == assignment.microbatches
        assert sample_numbers(batch.microbatches) == assignment.microbatches
        for microbatch, indices in zip(batch.microbatches, assignment.microbatches, strict=True):
            expected = collate_samples([loader.dataset[index] for index in indices])
            assert microbatch.keys() == expected.keys()
            for key in ('input_ids', 'attention_mask', 'labels'):
                assert torch.equal(microbatch[key], expected[key]), 'as wide as its longest row'


def test_accelerate_prepares_nothing(monkeypatch):
    accelerate = pytest.importorskip('accelerate')
    loader = build()
    accelerator = accelerate.Accelerator(cpu=True)

    prepared = accelerator.prepare(loader)
    monkeypatch.setattr(type(accelerator), 'multi_device', True)
    monkeypatch.setattr('accelerate.accelerator.Join', lambda *_, **__: contextlib.nullcontext())
    with accelerator.join_uneven_inputs([], even_batches=False):
        batches = list(loader)

    assert prepared is loader
    assert len(batches) == len(loader)


def test_widths_stay_within_the_budget():
    """Both the plan and the collated rows are rounded up, but not beyond the budget of a microbatch."""
    dataset = LengthDataset(30)
    longest = int(dataset.lengths.max())
    loader = regrouping_loader(dataset, global_batch_size=8, max_tokens=longest, width_multiple=longest - 1)

    all_widths = set()
    for step, batch in enumerate(loader):
        (planned_microbatches,) = loader.batch_sampler.plan(step).ranks
        planned_widths = [microbatch.width for microbatch in planned_microbatches]
        widths = [microbatch['input_ids'].shape[1] for microbatch in batch.microbatches]
        assert widths == planned_widths
        all_widths.update(widths)

    assert all_widths == {longest - 1, longest}


def test_later_batches_tell_the_order_of_samples():
    """Not only the first batch of a run has the checksum: a resumed run that reads all batches discards the first one.

    So the second epoch is compared, of datasets that hold the same samples in another order.
    """

    equal_lengths = [LONGEST] * 30  # so that only the samples show their order

    def checksums_of_second_epoch(dataset):
        """Returns the checksum of each batch."""
        loader = regrouping_loader(dataset, lengths=equal_lengths, global_batch_size=8, num_replicas=2, rank=0)
        next(iter(loader))
        loader.set_epoch(1)
        return [batch.plan.checksum for batch in loader]

    checksums = checksums_of_second_epoch(LengthDataset(30))
    checksums_of_same = checksums_of_second_epoch(LengthDataset(30))
    checksums_of_reversed = checksums_of_second_epoch(Reversed(LengthDataset(30)))

    assert checksums_of_same == checksums
    for checksum, checksum_of_reversed in zip(checksums, checksums_of_reversed, strict=True):
        assert checksum != checksum_of_reversed


def test_split_makes_the_planned_microbatches():
    loader = build(ranks=1, rank=0)
    spec = token_data_spec(loader, slot_tokens=LONGEST)
    for step, batch in enumerate(loader):
        window = loader.batch_sampler.window(step)
        (planned_microbatches,) = loader.batch_sampler.plan(step).ranks
        expected = []
        for microbatch in planned_microbatches:
            samples = [window[index] for index in microbatch.indices]
            expected.append(samples)

        microbatches = spec.split_batch(spec.batch_transforms(batch), 2)

        assert sample_numbers(microbatches) == expected


def test_plain_loaders_do_without_the_plan():
    """A user may keep the DataLoader of torch. It collates the same samples, as one batch."""
    loader = build()
    plain = DataLoader(LengthDataset(30), batch_sampler=loader.batch_sampler, collate_fn=collate_samples)
    assert sample_numbers(plain) == sample_numbers(loader)


def test_batched_reads_happen_once_a_batch():
    class Reader(LengthDataset):
        calls = 0

        def __getitems__(self, indices):
            self.calls += 1
            return [self[index] for index in indices]

    dataset = Reader(30)
    loader = loader_over(dataset)
    assignments = list(loader.batch_sampler)

    numbers = sample_numbers(loader)

    assert numbers == [list(assignment) for assignment in assignments]
    assert dataset.calls == 4


@pytest.mark.parametrize(
    ('loader_class', 'is_read_at_once'),
    [
        pytest.param(RegroupingDataLoader, False, id='planned, one by one'),
        pytest.param(RegroupingDataLoader, True, id='planned, at once'),
        pytest.param(ExchangingDataLoader, False, id='exchanged'),
    ],
)
def test_stopped_iteration_ends_no_epoch(loader_class, is_read_at_once):
    """A processor raises it for a text with too many image tokens (`next(image_sizes)` of LLaVA-NeXT)."""

    class Reader(LengthDataset):
        def __getitem__(self, index):
            if index == 11:
                raise StopIteration
            return super().__getitem__(index)

    dataset = Reader(30)
    if is_read_at_once:
        dataset.__getitems__ = lambda indices: [dataset[index] for index in indices]
    loader = loader_over(dataset, loader_class)
    with pytest.raises(RuntimeError, match='StopIteration'):
        list(loader)


def test_batched_reads_must_be_complete():
    """A dataset that leaves out bad samples is refused by the number, also if its batches have no text."""

    class Reader(LengthDataset):
        def __getitems__(self, indices):
            return [self[index] for index in indices if index != 11]

    loader = loader_over(Reader(30), collate_fn=lambda samples: {})
    with pytest.raises(ValueError, match=r'7 samples for the indices \['):
        list(loader)


@pytest.mark.parametrize('num_workers', [0, 2])
@pytest.mark.parametrize('loader_class', [RegroupingDataLoader, ExchangingDataLoader])
def test_iterating_takes_no_random_numbers(loader_class, num_workers):
    """A plain DataLoader draws the seed of its workers from the generator that also draws the model's dropout."""
    loader = loader_over(LengthDataset(30), loader_class, num_workers=num_workers)
    state_before = torch.get_rng_state()

    list(loader)

    state_after = torch.get_rng_state()
    assert torch.equal(state_after, state_before)


@pytest.mark.parametrize('loader_class', [RegroupingDataLoader, ExchangingDataLoader])
def test_batches_out_of_order_are_refused(loader_class):
    """The place of a run is a number of batches. A resumed run would leave out those that came late."""
    dataset = LengthDataset(30)
    loader_over(dataset, loader_class, in_order=False)  # without workers the order stays
    with pytest.raises(ValueError, match='`in_order` must be True'):
        loader_over(dataset, loader_class, in_order=False, num_workers=2)


def test_worker_seeds_of_ranks_and_epochs():
    class Seeds(LengthDataset):
        def __getitem__(self, index):
            return {'seed': str(torch.initial_seed())}

    def seed_of_worker(rank, epoch):
        sampler = build(rank=rank).batch_sampler
        sampler.set_epoch(epoch)
        loader = RegroupingDataLoader(Seeds(30), batch_sampler=sampler, num_workers=1)
        seeds = set()
        for batch in loader:
            seeds.update(batch['seed'])
        (seed,) = seeds
        return seed

    seed = seed_of_worker(rank=0, epoch=0)
    same_seed = seed_of_worker(rank=0, epoch=0)
    seed_of_other_rank = seed_of_worker(rank=1, epoch=0)
    seed_of_other_epoch = seed_of_worker(rank=0, epoch=1)

    assert same_seed == seed
    assert len({seed, seed_of_other_rank, seed_of_other_epoch}) == 3


def test_persistent_workers_read_every_epoch():
    class ProcessIds(LengthDataset):
        def __getitem__(self, index):
            return {'process': str(os.getpid())}

    sampler = build().batch_sampler
    loader = RegroupingDataLoader(ProcessIds(30), batch_sampler=sampler, num_workers=1, persistent_workers=True)
    workers_of_epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        workers = set()
        for batch in loader:
            workers.update(batch['process'])
        workers_of_epochs.append(workers)
    first_workers, second_workers = workers_of_epochs
    assert len(first_workers) == 1
    assert second_workers == first_workers


def are_skipped(batches):
    """Says of each batch whether it was skipped."""
    return [isinstance(batch, SkippedBatch) for batch in batches]


@pytest.mark.parametrize('num_workers', [0, 2])
def test_skipped_batches_are_not_read(num_workers):
    """After a skip to batch 2 of epoch 1: epoch 0 is skipped, epoch 1 is read in part, and later ones completely."""
    loader = build(num_workers=num_workers, persistent_workers=num_workers > 0)
    samples_of_epochs = []
    for epoch in range(3):
        loader.batch_sampler.set_epoch(epoch)
        samples_of_epochs.append(sample_numbers(loader))
    dataset = loader.dataset.dataset
    dataset.read.clear()

    loader.skip_to(1, 2)
    expected_reads = []
    for epoch, num_skipped in ((0, 4), (1, 2), (1, 0), (2, 0)):
        loader.batch_sampler.set_epoch(epoch)
        batches = list(loader)
        skipped_batches = batches[:num_skipped]
        read_batches = batches[num_skipped:]
        expected = samples_of_epochs[epoch][num_skipped:]
        assert are_skipped(skipped_batches) == [True] * num_skipped
        assert are_skipped(read_batches) == [False] * (4 - num_skipped)
        assert sample_numbers(read_batches) == expected
        expected_reads += joined(expected)

    if num_workers == 0:  # workers read copies of the dataset
        assert dataset.read == expected_reads


@pytest.mark.parametrize('first', [2, 4])
def test_skipped_batches_move_the_place(first):
    """A state that is saved before the first batch that is read must not lead back to the start of the epoch."""
    loader = build()
    loader.skip_to(0, first)
    places = [loader.state_dict()['batch'] for _ in loader]
    assert places == [1, 2, 3, 4]
    assert loader.state_dict()['batch'] == 4


def test_callback_skips_to_the_place_of_the_run():
    loader = build()
    place = Timestamp(epoch=0, batch_in_epoch=2)
    state = SimpleNamespace(train_dataloader=loader, timestamp=place)

    SkipReadBatches().fit_start(state, logger=None)

    assert are_skipped(loader) == [True, True, False, False]


def test_epoch_set_while_skipping():
    """The iterator goes on in its epoch, as it does if the next epoch is set later."""
    loader = build(ranks=1, rank=0)
    expected = sample_numbers(loader)

    loader.skip_to(0, 2)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(1)
    next(batches)

    assert sample_numbers(batches) == expected[2:]


def test_witnesses_of_an_epoch_set_while_skipping():
    """The first batch that is read tells what this rank has read of two samples, so that ranks compare their data."""
    loader = build(ranks=2, rank=0)
    loader.skip_to(0, 2)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(1)
    next(batches)
    first_read = next(batches)
    assert first_read.plan.witness


def test_collate_function_must_name_its_entries():
    loader = build()
    tuples = RegroupingDataLoader(LengthDataset(30), batch_sampler=loader.batch_sampler, collate_fn=tuple)
    with pytest.raises(ValueError, match='`collate_fn` must return a mapping, got: tuple'):
        next(iter(tuples))


def test_other_samplers_are_refused():
    with pytest.raises(ValueError, match=r'must be a RegroupingBatchSampler, got: \[\[0, 1\]\]'):
        RegroupingDataLoader(LengthDataset(4), batch_sampler=[[0, 1]])


def test_composer_reads_the_batch_size():
    """The default of `device_train_microbatch_size` is the batch size of the loader."""
    loader = build(ranks=1, rank=0)
    trainer = Trainer(
        model=hugging_face(text_model()),
        train_dataloader=token_data_spec(loader),
        device='cpu',
        max_duration='1ba',
        progress_bar=False,
    )
    assert trainer.state.device_train_microbatch_size == 8
    trainer.fit()
    assert trainer.state.timestamp.sample == 8
    trainer.engine.run_event(Event.FIT_END)


def runs(*arguments, ranks):
    """Returns the results of several runs under the launcher, as ``tests/ranks/resume.py`` returns them."""
    return launch_json(SCRIPT, json.dumps(arguments), ranks=ranks)


def num_reads(first, last=NUM_STEPS):
    """Samples of the steps from `first` on. An epoch has 44 samples: five steps of eight, and one of four."""
    num_samples = 0
    for step in range(first, last):
        step_of_epoch = step % STEPS_PER_EPOCH
        if step_of_epoch == STEPS_PER_EPOCH - 1:
            num_samples += 4
        else:
            num_samples += 8
    return num_samples


def num_witness_reads(ranks):
    """Samples that ranks read once in a run to compare their datasets. Each rank reads two samples three times."""
    return 6 * ranks


def steps_from(run, first):
    """Returns the steps of a run from `first` on, by their number."""
    return {number: step for number, step in run['steps'].items() if int(number) >= first}


@pytest.mark.slow
def test_resumed_runs_are_bitwise_equal(tmp_path):
    durations = [f'{NUM_STEPS}ba']
    first_steps = (1, 3, 5, 6, 7, 10)  # an epoch ends before step 6
    unbroken = {'folder': str(tmp_path), 'durations': durations}
    resumed = [{'load_path': f'{tmp_path}/ba{step}.pt', 'durations': durations} for step in first_steps]
    reading = {'load_path': f'{tmp_path}/ba8.pt', 'durations': durations, 'skip': False}

    unbroken_result, *resumed_results, reading_result = runs(unbroken, *resumed, reading, ranks=2)

    witness_reads = num_witness_reads(2)
    assert unbroken_result['reads'] == num_reads(0) + witness_reads
    states = {step['parameters'] for step in unbroken_result['steps'].values()}
    assert len(states) == NUM_STEPS, 'nothing was learnt'
    for first_step, result in zip(first_steps, resumed_results, strict=True):
        assert result['steps'] == steps_from(unbroken_result, first_step), first_step
        assert result['reads'] == num_reads(first_step) + witness_reads, first_step
    # Without SkipReadBatches Composer reads one batch of epoch 0, and all batches of epoch 1.
    assert reading_result['steps'] == steps_from(unbroken_result, 8)
    assert reading_result['reads'] == 8 + num_reads(STEPS_PER_EPOCH) + witness_reads


@pytest.mark.slow
def test_second_fit_continues_the_first_one(tmp_path):
    first, resumed, workers = runs(
        {'folder': str(tmp_path), 'durations': ['2ba', '2ba', '5ba']},
        {'load_path': f'{tmp_path}/ba3.pt', 'durations': ['4ba', '3ba', '2ba']},
        {'durations': ['2ba', '7ba'], 'num_workers': 2},
        ranks=2,
    )
    assert len(first['steps']) == 9
    assert len(resumed['steps']) == 6
    assert len(workers['steps']) == 9
    for run in (resumed, workers):
        for number, step in run['steps'].items():
            assert step['samples'] == first['steps'][number]['samples']
    # The ranks compare their datasets at the start of each fit that begins in the first epoch.
    assert first['reads'] == num_reads(0, 9) + 3 * num_witness_reads(2)
    assert resumed['reads'] == num_reads(3, 9) + 2 * num_witness_reads(2)


# It is kept for the session, because tests of other files run between the tests on two and on four ranks.
@pytest.fixture(scope='session')
def eight_steps(tmp_path_factory):
    """Eight steps on two ranks: the folder of the checkpoints, and the result of the run."""
    folder = tmp_path_factory.mktemp('eight_steps')
    (result,) = runs({'durations': ['8ba'], 'random': False, 'folder': str(folder)}, ranks=2)
    return folder, result


@pytest.mark.slow
@pytest.mark.parametrize(('ranks', 'stock'), [(2, True), (4, False)])
def test_other_ranks_and_samplers_continue(ranks, stock, eight_steps):
    folder, unbroken = eight_steps
    case = {'durations': ['8ba'], 'random': False, 'load_path': f'{folder}/ba4.pt', 'stock': stock}
    (resumed,) = runs(case, ranks=ranks)
    assert sorted(map(int, resumed['steps'])) == list(range(4, 8))
    for number, step in resumed['steps'].items():
        expected = unbroken['steps'][number]
        assert step['samples'] == expected['samples'], number
        assert step['norm'] == pytest.approx(expected['norm'], rel=1e-4), number
    if stock:
        assert resumed['reads'] == num_reads(0, 8)
    else:
        assert resumed['reads'] == num_reads(4, 8) + num_witness_reads(ranks)


def test_rank_without_samples_gets_a_copy():
    """25 samples in global batches of 8 leave one sample for two ranks. The plan decides which rank computes it."""
    counts = []
    for rank in range(2):
        loader = build(25, rank=rank)
        *_, last_batch = loader
        assert sample_numbers([last_batch]) == [loader.batch_sampler.window(3)]

        count = num_samples(last_batch)
        counts.append(count)
        is_counted = count > 0
        rows = row_counts_of(with_counts(last_batch))
        num_tokens = sum(row.loss_tokens for row in rows)
        assert (num_tokens > 0) == is_counted
        # Metrics of an evaluation read the labels, too.
        has_labels = (last_batch['labels'] != -100).any()
        assert has_labels == is_counted
        # Composer leaves out the last sample of some ranks if torch's sampler would repeat samples.
        assert loader.batch_sampler.total_size == 25
        spec = token_data_spec([last_batch])
        assert spec.get_num_samples_in_batch(last_batch) == count
    assert sorted(counts) == [0, 1]


@pytest.mark.slow
def test_last_steps_on_two_ranks():
    # Once, two ranks also trained torch's repeated samples. So their last step differed from the step on one rank.
    results = launch_json('tests/ranks/last_steps.py', ranks=2)
    assert len(results) == 5 * len(CASES)
    for name, run in results.items():
        assert len(run['errors']) == 2
        assert largest(run['errors'] + run['loss_errors']) < 1e-6, name
        case, build, *_ = name.split(', ')
        if build == 'plain':
            continue  # Composer's time counts the repeated sample twice
        num_samples, global_batch = CASES[case]
        assert run['epochs'] == [num_samples, 2 * num_samples], name
        first_epoch = [*range(global_batch, num_samples, global_batch), num_samples]
        second_epoch = [num_samples + count for count in first_epoch]
        assert run['batches'] == first_epoch + second_epoch, name
