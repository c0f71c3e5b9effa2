# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Repeated samples of torch's DistributedSampler, which fill up the ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Subset
from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

from composer_tokacc import repeated_samples
from composer_tokacc.algorithm import token_accumulation
from composer_tokacc.repeated_samples import announce_marking, num_repeated, warn_of_unknown_copies
from tests.support.sampler_steps import samplers_of_ranks
from tests.support.text import ragged_batch, text_model
from tests.support.training import fit, reference_gradients, relative_error


@settings(deadline=None, max_examples=150)
@given(
    num_samples=st.integers(1, 60),
    ranks=st.integers(1, 9),
    batch_size=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last_batch=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 2),
    has_batch_sampler=st.booleans(),
)
def test_repeated_samples_are_left_out(
    num_samples, ranks, batch_size, shuffle, drop_last_batch, drop_last, epoch, has_batch_sampler
):
    trained = Counter()
    left_out = Counter()
    for rank in range(ranks):
        sampler = DistributedSampler(range(num_samples), ranks, rank, shuffle, drop_last=drop_last)
        sampler.set_epoch(epoch)
        if has_batch_sampler:
            options = {'batch_sampler': BatchSampler(sampler, batch_size, drop_last_batch)}
        else:
            options = {'sampler': sampler, 'batch_size': batch_size, 'drop_last': drop_last_batch}
        loader = DataLoader(range(num_samples), collate_fn=list, **options)
        for batch_index, batch in enumerate(loader):
            num_copies = num_repeated(loader, batch_index, len(batch))
            is_last = batch_index == len(loader) - 1
            assert 0 <= num_copies <= is_last
            num_trained = len(batch) - num_copies
            trained.update(batch[:num_trained])
            left_out.update(batch[num_trained:])

    assert set(trained.values()) <= {1}, 'a sample is trained twice'
    if drop_last:
        assert not left_out
    elif not drop_last_batch:
        assert sorted(trained) == list(range(num_samples))
        assert sum(left_out.values()) == -num_samples % ranks


def test_sampler_of_a_part():
    # Rank 2 of 3 gets positions 2 and 5. The dataset has five samples, so position 5 repeats one.
    dataset = Subset(range(100), [0, 1, 2, 3, 4])
    sampler = DistributedSampler(dataset, num_replicas=3, rank=2)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=list)
    assert num_repeated(loader, 0, num_rows=2) == 1
    assert num_repeated(loader, 1, num_rows=2) == 0


def test_last_batch_of_unknown_number(caplog):
    """The third batch that is read may not be the third one of the epoch, so no row is taken for the repeated one."""
    sampler = DistributedSampler(range(11), num_replicas=2, rank=1)
    in_order, out_of_order = [
        DataLoader(range(11), batch_size=2, sampler=sampler, num_workers=2, in_order=in_order)
        for in_order in (True, False)
    ]
    assert num_repeated(in_order, 2, num_rows=2) == 1
    assert not caplog.records
    assert num_repeated(out_of_order, 2, num_rows=2) == 0
    assert 'in_order' in caplog.text
    del in_order.in_order  # as in an older StatefulDataLoader, which does not call torch's `__init__`
    assert num_repeated(in_order, 2, num_rows=2) == 1


@pytest.mark.parametrize('ranks', [1, 2, 3, 4])
def test_ranks_without_a_sample(ranks):
    # Two samples are left for the last of three steps.
    num_samples = 26
    lengths = [5] * num_samples
    copies_of_steps = [0, 0, 0]
    for sampler in samplers_of_ranks(lengths, ranks, global_batch_size=12, max_tokens=20):
        loader = DataLoader(range(num_samples), batch_sampler=sampler, collate_fn=list)
        for step in range(3):
            copies_of_steps[step] += num_repeated(loader, step, num_rows=1)
    assert copies_of_steps == [0, 0, max(ranks - 2, 0)]


def test_plain_loader_of_unmarked_copies_is_refused(caplog):
    """Five samples are one step of three, and one of two. So the last rank gets a copy in the second step.

    In a loop of the user's own nothing marks it. All ranks are warned before the first step.
    """
    batches_of_ranks = []
    for sampler in samplers_of_ranks([5] * 5, 3, global_batch_size=3, max_tokens=20):
        caplog.clear()
        loader = DataLoader(range(5), batch_sampler=sampler, collate_fn=list)
        batches = iter(loader)
        batches_of_ranks.append([next(batches)])
        assert 'epoch 0 has fewer samples than ranks' in caplog.text
        if sampler.rank < 2:
            batches_of_ranks[-1] += batches
        else:
            with pytest.raises(ValueError, match=r"copy of another rank's sample.* RegroupingDataLoader"):
                next(batches)
    assert [len(batches) for batches in batches_of_ranks] == [2, 2, 1]


def test_plain_loader_of_marked_copies_is_read(caplog):
    num_batches = 0
    for sampler in samplers_of_ranks([5] * 5, 3, global_batch_size=3, max_tokens=20):
        loader = DataLoader(range(5), batch_sampler=sampler, collate_fn=list)
        announce_marking(loader)
        num_batches += len(list(loader))
    assert num_batches == 6
    assert not caplog.records


class Wrapper:
    """Passes on the attributes of a loader, as a loader that copies batches to the GPU ahead."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)

    def __getattr__(self, name):
        return getattr(self.loader, name)


def test_copies_of_a_wrapped_loader_are_refused():
    """Nothing marks them, because the wrapper is no DataLoader."""
    sampler = list(samplers_of_ranks([5] * 5, 3, global_batch_size=3, max_tokens=20))[2]
    loader = Wrapper(DataLoader(range(5), batch_sampler=sampler, collate_fn=list))
    assert num_repeated(loader, 1, num_rows=1) == 0
    announce_marking(loader)
    with pytest.raises(ValueError, match=r"copy of another rank's sample"):
        list(loader)


def test_plain_loader_of_no_copies_is_read():
    read = []
    for sampler in samplers_of_ranks([5] * 5, 3, global_batch_size=3, max_tokens=20, drop_last=True):
        read += list(DataLoader(range(5), batch_sampler=sampler, collate_fn=list))
    assert len(read) == 3


def test_copy_that_only_the_plan_shows_is_refused():
    """Under FSDP a rank may get a copy although there are as many samples as ranks: one of two has an image."""
    options = {'global_batch_size': 2, 'max_tokens': 20, 'objective': 'fsdp', 'image_tokens': [1, 0]}
    first, second = samplers_of_ranks([5, 5], 2, **options)
    assert len(list(DataLoader(range(2), batch_sampler=first, collate_fn=list))) == 1
    with pytest.raises(ValueError, match=r"copy of another rank's sample"):
        list(DataLoader(range(2), batch_sampler=second, collate_fn=list))


def test_copy_in_several_rows():
    """A collator may make several rows of a sample. The copy is the only sample of its rank, so all of them are its."""
    last_of_three = list(samplers_of_ranks([5, 5], 3, global_batch_size=3, max_tokens=20))[2]
    loader = DataLoader(range(2), batch_sampler=last_of_three, collate_fn=list)
    assert num_repeated(loader, 0, num_rows=1) == 1
    assert num_repeated(loader, 0, num_rows=2) == 2


def test_no_row_of_a_copy_is_trained(monkeypatch):
    """The gradient is that of the first row, if the other two rows are of a sample that another rank has."""
    monkeypatch.setattr(token_accumulation, 'num_repeated', lambda *_: 2)
    batch = ragged_batch([(4, 2), (9, 7), (6, 1)])
    model = text_model()

    recorder = fit(model, batch, slot_tokens=9)

    first_row = {key: value[:1, :4] for key, value in batch.items()}
    expected, _ = reference_gradients(model, first_row)
    assert recorder.logged('token_accumulation/loss_generating_tokens') == [2]
    assert relative_error(recorder.steps[0], expected) < 1e-6


def test_other_samplers_repeat_nothing():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    class FixedOrder(DistributedSampler):
        def __iter__(self):
            return iter([0, 1])

    dataset = range(5)
    fixed_order = FixedOrder(dataset, 2, 1)
    loaders = [
        DataLoader(dataset, batch_size=2),
        DataLoader(dataset, batch_size=None),
        DataLoader(dataset, batch_sampler=[[0, 1], [2]]),
        DataLoader(dataset, batch_size=2, sampler=fixed_order),
        DataLoader(Stream(), batch_size=2),
        [[0, 1], [2]],
    ]
    for loader in loaders:
        for batch_index in range(3):
            assert num_repeated(loader, batch_index, num_rows=2) == 0


class Backwards(DistributedSampler):
    """Has an order of its own, as the length-grouped sampler of Hugging Face."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


class BackwardsBatches(BatchSampler):
    """Makes batches of its own."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize('num_samples', [5, 6])
@pytest.mark.parametrize(
    ('sampler_class', 'batch_sampler_class', 'is_known'),
    [
        (DistributedSampler, BatchSampler, True),
        (Backwards, BatchSampler, False),
        (DistributedSampler, BackwardsBatches, False),
    ],
)
def test_copies_in_another_order(sampler_class, batch_sampler_class, is_known, num_samples, caplog):
    dataset = range(num_samples)
    sampler = sampler_class(dataset, 3, 2)
    loader = DataLoader(dataset, batch_sampler=batch_sampler_class(sampler, 2, drop_last=False))
    warn_of_unknown_copies(loader)
    is_warned = 'got: 1 in each epoch' in caplog.text
    assert is_warned == (num_samples == 5 and not is_known)


class WithoutInit(DistributedSampler):
    """Does not call the ``__init__`` of its base class, so it has none of its attributes."""

    def __init__(self, num_samples):
        self.samples_of_rank = num_samples

    def __iter__(self):
        return iter(range(self.samples_of_rank))

    def __len__(self):
        return self.samples_of_rank


def test_sampler_without_attributes_is_accepted(caplog, monkeypatch):
    loader = DataLoader(range(5), sampler=WithoutInit(3))
    warn_of_unknown_copies(loader)
    assert caplog.text == ''
    monkeypatch.setattr(repeated_samples, 'get_world_size', lambda: 2)
    warn_of_unknown_copies(loader)
    assert 'got: 1 in each epoch' in caplog.text


@pytest.mark.parametrize('error', [AttributeError, NotImplementedError, TypeError])
def test_sampler_without_a_length_is_accepted(error, caplog):
    """Batches may be filled by tokens, so that their number is not known. Composer accepts such a loader, too."""

    class WithoutLength(Backwards):
        def __len__(self):
            raise error

    warn_of_unknown_copies(DataLoader(range(5), sampler=WithoutLength(range(5), 3, 2)))
    assert caplog.text == ''


@pytest.mark.parametrize(('drops', 'is_warned'), [(False, True), (True, False)])
def test_copies_of_length_grouped_sampler(drops, is_warned, caplog):
    lengths = [3, 5, 2, 8, 6]
    sampler = DistributedLengthGroupedSampler(2, num_replicas=3, rank=1, lengths=lengths, drop_last=drops)
    warn_of_unknown_copies(DataLoader(lengths, sampler=sampler, batch_size=2))
    assert ('DistributedLengthGroupedSampler' in caplog.text) == is_warned
