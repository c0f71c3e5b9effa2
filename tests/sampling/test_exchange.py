# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The exchanging loader on real ranks, with datasets that need no mosaicml-streaming."""

from __future__ import annotations

import math
import os
import resource
from itertools import chain

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from composer_tokacc import token_data_spec
from composer_tokacc.planning import CostModel
from composer_tokacc.sampling import ExchangingDataLoader, exchange
from tests.ranks.exchange import BATCH, EPOCH, READ
from tests.support.launch import launch_json
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples
from tests.support.sampler_steps import sample_numbers


def build(num_samples=20, dataset_class=LengthDataset, **options):
    """Returns an exchanging loader on one rank."""
    options = {'batch_size': 8, 'collate_fn': collate_samples, 'max_tokens': 2 * LONGEST, **options}
    dataset = dataset_class(num_samples)
    return ExchangingDataLoader(dataset, **options)


def test_one_rank_cuts_its_own_samples():
    loader = build(max_tokens=LONGEST)
    spec = token_data_spec(loader, slot_tokens=LONGEST)
    batches = list(loader)
    samples_of_batches = [sorted(samples) for samples in sample_numbers(batches)]
    assert samples_of_batches == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    for batch in batches:
        samples_of_microbatches = sample_numbers(batch.microbatches)
        assert len(samples_of_microbatches) > 1
        for microbatch, samples in zip(batch.microbatches, samples_of_microbatches, strict=True):
            longest_sample = loader.dataset.lengths[samples].max()
            assert microbatch['input_ids'].shape[1] == longest_sample
        split_microbatches = spec.split_batch(spec.batch_transforms(batch), 1)
        assert sample_numbers(split_microbatches) == samples_of_microbatches
    assert len(loader) == 3
    assert loader.batch_size == 8


@pytest.mark.parametrize('patches_per_token', [10, 10.0])
def test_patches_decide_the_encoder_cost(monkeypatch, patches_per_token):
    planned_rows = []
    plan_checked_rows = exchange.plan_checked_rows

    def record_rows(rows, num_ranks):
        planned_rows.append(rows)
        return plan_checked_rows(rows, num_ranks)

    def count_patches(sample):
        return patches_per_token * sample['input_ids'].shape[1]

    monkeypatch.setattr(exchange, 'plan_checked_rows', record_rows)
    cost = CostModel(vision_per_image=2.0, vision_per_patch=0.5)
    loader = build(8, cost=cost, patches=count_patches)
    list(loader)

    (rows,) = planned_rows
    # Ten patches of 0.5 for each token, and 2 for an image.
    expected = [2.0 + 5.0 * length for length in rows.lengths]
    assert rows.vision_cost.tolist() == expected


def test_pinning_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    (batch,) = build(8, pin_memory=True)
    for microbatch in batch.microbatches:
        assert not microbatch['input_ids'].is_pinned()  # if this machine has a GPU; otherwise pinning raises an error


def test_workers_need_few_files():
    """A worker sends each tensor through a separate file. 600 samples of three tensors would need too many."""
    loader = build(600, batch_size=100, num_workers=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir('/proc/self/fd'))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 60, hard))
    try:
        batches = sample_numbers(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for number, samples in enumerate(batches):
        first_sample = 100 * number
        assert sorted(samples) == list(range(first_sample, first_sample + 100))
    assert len(batches) == 6


def test_sampler_without_a_length():
    class Sampler:
        def __iter__(self):
            return iter(range(20))

    loader = build(20, sampler=Sampler())
    assert len(list(loader)) == 3


def test_samples_of_lists():
    """A dataset of Hugging Face gives lists, unless `with_format('torch')` was called."""
    dataset = []
    for length in (2, 5, 3, 4):
        ones = [1] * length
        dataset.append({'input_ids': ones, 'labels': ones})

    def collate(samples):
        rows = [torch.tensor(sample['input_ids']) for sample in samples]
        return {'input_ids': pad_sequence(rows, batch_first=True)}

    loader = ExchangingDataLoader(dataset, batch_size=4, collate_fn=collate, max_tokens=20, max_loss_tokens=7)
    (batch,) = loader

    # Every token is 1 and has a label, and padding is 0. So the sum of the tokens is the number of labels.
    labels_of_microbatches = [int(microbatch['input_ids'].sum()) for microbatch in batch.microbatches]
    assert sum(labels_of_microbatches) == 14
    assert max(labels_of_microbatches) <= 7


def test_views_are_sent_without_their_base():
    """Torch saves the whole storage of a view, here the ids of all samples."""
    ids = torch.arange(100_000)[None]
    samples = []
    for start in (0, 10, 20, 30):
        view = ids[:, start : start + 10]
        samples.append({'input_ids': view})

    sent_bytes = exchange.to_bytes(samples)
    received_samples = exchange.from_bytes(sent_bytes)

    assert len(sent_bytes) < ids.nbytes / 100
    for sample, received_sample in zip(samples, received_samples, strict=True):
        assert torch.equal(received_sample['input_ids'], sample['input_ids'])


def test_state_counts_samples_of_all_ranks():
    class Resumable(LengthDataset):
        loaded = None

        def state_dict(self, num_samples, from_beginning):
            return {'num_samples': num_samples, 'from_beginning': from_beginning}

        def load_state_dict(self, state):
            self.loaded = state

    loader = build(20, Resumable, num_workers=1)
    iterator = iter(loader)
    for num_samples in (8, 16, 20):
        next(iterator)
        assert loader.state_dict() == {'num_samples': num_samples, 'from_beginning': False}
    loader.load_state_dict({'a': 1})
    assert loader.dataset.loaded == {'a': 1}
    assert build().state_dict() is None


@pytest.mark.parametrize(
    ('options', 'message'),
    [({'max_image_tokens': 9}, '`image_token_ids` must be given'), ({'batch_size': None}, '`batch_size` must be')],
)
def test_missing_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.slow
@pytest.mark.parametrize(('ranks', 'epochs'), [(2, ('sampler', 'workers', 'drop_last')), (4, ('sampler',))])
def test_ranks_exchange_what_they_read(ranks, epochs):
    results = launch_json('tests/ranks/exchange.py', ranks=ranks)
    samples_read = samples_of_steps(READ[ranks])

    # Ranks that read unequal numbers of samples.
    check_steps(results['uneven'], samples_read)
    first_step = results['uneven'][0]
    names_by_rank = [rank['names'] for rank in first_step]
    assert list(chain.from_iterable(names_by_rank)) != samples_read[0], 'samples should move between ranks'
    if ranks == 2:
        assert results['amid training'] == names_by_rank

    # Two epochs.
    for case in epochs:
        first_epoch, second_epoch = results[case]
        for epoch in (first_epoch, second_epoch):
            check_epoch(epoch, full_batch=ranks * BATCH, drop_last=case == 'drop_last')
        assert first_epoch['read'] != second_epoch['read']
    first_epoch, _ = results['sampler']
    sizes_of_steps = [len(samples) for samples in first_epoch['read']]
    assert sizes_of_steps[-1] < BATCH * ranks, 'the last batch should be a smaller one'
    assert sum(sizes_of_steps) == EPOCH

    # Gradients of training.
    for objective in ('ddp', 'fsdp'):
        for step, samples in zip(results[objective], samples_read, strict=True):
            assert step['error'] < 1e-6, results[objective]
            assert step['loss_error'] < 1e-6
            assert step['num_samples'] == len(samples)


def samples_of_steps(counts):
    """Returns the samples that all ranks read in each step. Rank 0 has the first `counts[0]` samples, and so on."""
    num_steps = math.ceil(max(counts) / BATCH)
    steps = [[] for _ in range(num_steps)]
    first_of_rank = 0
    for count in counts:
        for number in range(count):
            steps[number // BATCH].append(first_of_rank + number)
        first_of_rank += count
    return steps


def check_epoch(epoch, *, full_batch, drop_last):
    """Checks that all steps that were read are computed. With ``drop_last``, only steps of a full batch are."""
    expected = epoch['read']
    if drop_last:
        expected = [step for step in expected if len(step) == full_batch]
    assert epoch['length'] == len(expected)
    check_steps(epoch['steps'], expected)


def check_steps(steps, expected):
    """Checks that each sample that was read is computed once and complete, and that every rank computes something."""
    assert len(steps) == len(expected)
    for ranks, samples_read in zip(steps, expected, strict=True):
        computed_samples = []
        num_copies = 0
        for rank in ranks:
            assert rank['whole']
            assert rank['names']
            if rank['num_samples']:
                computed_samples += rank['names']
            else:
                num_copies += 1
        assert sorted(computed_samples) == sorted(samples_read)
        assert num_copies == max(len(ranks) - len(samples_read), 0)
