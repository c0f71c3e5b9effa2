# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Token weights for shares of every step, compared with a plain count and with plain autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader

from composer_tokacc import (
    RegroupingBatchSampler,
    RegroupingDataLoader,
    TokenMonitor,
    step_loss_weights,
    token_data_spec,
    weighted_microbatches,
)
from composer_tokacc.sampling import LossShares, Mixture
from tests.support.exactness import loss_tokens
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples
from tests.support.text import next_token_loss, text_model
from tests.support.training import COMPOSERS_FLAG, fit, gradients_of, hugging_face, relative_error

SHARES = (0.15, 0.25, 0.6)
"""The share of each of three datasets in the loss of a step."""
SIZES = {'a': 20, 'b': 12, 'c': 8}
"""Names and numbers of samples of the three datasets."""


def test_weights_add_up_to_shares():
    rng = np.random.default_rng(0)
    sizes = [30, 200, 7]
    tokens = rng.integers(0, 90, 237)
    shares = LossShares(sizes, SHARES, tokens)
    dataset_of_sample = np.repeat([0, 1, 2], sizes)
    one_of_each_dataset = [2, 60, 232]
    for _ in range(50):
        random_samples = rng.integers(0, 237, 40)
        window = np.concatenate([random_samples, one_of_each_dataset])
        weights_of_samples = shares.weights(window) * tokens[window]
        weights_of_datasets = np.bincount(dataset_of_sample[window], weights=weights_of_samples)
        total = weights_of_datasets.sum()
        assert total == pytest.approx(tokens[window].sum(), rel=1e-12)
        assert weights_of_datasets / total == pytest.approx(SHARES, rel=1e-12)


def test_dataset_without_tokens_in_a_step(caplog):
    shares = LossShares([2, 1, 1], SHARES, [3, 5, 4, 0])
    # Datasets 0 and 1 divide the share of dataset 2: 0.15 / 0.4 and 0.25 / 0.4 of the seven tokens.
    expected = [0.375 * 7 / 3, 0.625 * 7 / 4, 0]
    window = np.array([0, 2, 3])
    for _ in range(2):
        weights = shares.weights(window)
        assert weights.tolist() == pytest.approx(expected)
    (message,) = caplog.messages  # once, although two steps have no such tokens
    assert 'no loss tokens of dataset 2' in message


@pytest.mark.parametrize(
    ('shares', 'message'),
    [
        ((0.5, 0.6), 'add up to 1'),
        ((1.0, 0.0), 'positive, one for each dataset, and add up to 1'),
        ((1.0,), r'shape \(1,\) for 2'),
        ((1.2, -0.2), 'at least 0, got: -0.2'),
    ],
)
def test_bad_loss_shares_are_refused(shares, message):
    with pytest.raises(ValueError, match=f'`shares` .*{message}'):
        LossShares([2, 2], shares, [1, 1, 1, 1])


@pytest.mark.parametrize('make', [LossShares, Mixture.from_loss_shares])
@pytest.mark.parametrize('sizes', [[1.5, 1.5], [4, -1]])
def test_bad_sizes_are_refused(make, sizes):
    with pytest.raises(ValueError, match='`sizes`'):
        make(sizes, [0.5, 0.5], [1, 1, 1])


class NamedDataset(LengthDataset):
    """Its samples name the dataset as their source."""

    def __init__(self, name, num_samples, seed):
        super().__init__(num_samples, seed=seed)
        self.name = name

    def __getitem__(self, index):
        return {**super().__getitem__(index), 'source': [self.name]}


def collate_named(samples):
    sources = [sample['source'][0] for sample in samples]
    return {**collate_samples(samples), 'source': sources}


def token_losses(model, sample):
    """Returns the loss of each loss token of a sample."""
    logits = model(input_ids=sample['input_ids']).logits
    labels = sample['labels']
    losses = next_token_loss(logits, labels, reduction='none')
    return losses[labels[0, 1:] != -100]


def gradient_of_shared_means(model, samples):
    """Returns the gradient of the sum over the datasets: the mean loss of their tokens, times their share."""
    total = 0.0
    for name, share in zip(SIZES, SHARES, strict=True):
        losses = [token_losses(model, sample) for sample in samples if sample['source'] == [name]]
        mean_loss = torch.cat(losses).mean()
        total = total + share * mean_loss
    return gradients_of(model, total)


def shared_data(packing=False, missing_tokens=0):
    """Returns samples of three datasets with shares, their sampler, and a data spec.

    ``missing_tokens`` is the number of tokens by which the table is wrong for each sample.
    """
    datasets = []
    for seed, (name, num_samples) in enumerate(SIZES.items()):
        datasets.append(NamedDataset(name, num_samples, seed))
    dataset = ConcatDataset(datasets)
    samples = [dataset[index] for index in range(40)]
    tokens = [loss_tokens(sample) - missing_tokens for sample in samples]
    sampler = RegroupingBatchSampler(
        dataset,
        lengths=[sample['input_ids'].shape[1] for sample in samples],
        global_batch_size=20,
        max_tokens=2 * LONGEST,
        num_replicas=1,
        rank=0,
        loss_shares=LossShares(list(SIZES.values()), SHARES, tokens),
    )
    loader = RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate_named)
    return samples, sampler, token_data_spec(loader, slot_tokens=LONGEST, packing=packing)


def test_samples_with_other_labels_than_in_the_table():
    """Shares by a table of other labels would not be the shares of the loss."""
    _, _, data = shared_data(missing_tokens=1)
    with pytest.raises(ValueError, match=r"`loss_shares` .* got: \d+ for sample '\d+', which has \d+"):
        fit(text_model(), data, token_weights='column', max_duration='1ba')


def test_loop_with_other_labels_than_in_the_table():
    _, _, data = shared_data(missing_tokens=1)
    batch = next(iter(data.dataloader))
    for passed in (batch, batch.microbatches, [batch]):
        with pytest.raises(ValueError, match='`loss_shares` must know the loss tokens of each sample'):
            step_loss_weights(passed, token_weights='column')


def test_shares_that_a_loop_does_not_apply():
    _, _, data = shared_data()
    batch = next(iter(data.dataloader))
    for passed in (batch, batch.microbatches, [batch]):
        assert step_loss_weights(passed, token_weights='column')
        with pytest.raises(ValueError, match=r"need `token_weights='column'`.* got: 'sqrt'"):
            step_loss_weights(passed, token_weights='sqrt')
        with pytest.raises(ValueError, match=r"need `token_weights='column'`.* got: 'token'"):
            next(weighted_microbatches(passed))


def test_loop_moves_microbatches_to_a_device():
    """accelerate makes each list again. The shares are still known, but not the numbers of the table."""
    accelerate = pytest.importorskip('accelerate')
    _, _, data = shared_data()
    batch = next(iter(data.dataloader))
    moved = [accelerate.utils.send_to_device(microbatch, 'cpu') for microbatch in batch.microbatches]
    assert step_loss_weights(moved, token_weights='column') == step_loss_weights(batch, token_weights='column')
    with pytest.raises(ValueError, match=r"need `token_weights='column'`"):
        step_loss_weights(moved, token_weights='sqrt')


@pytest.mark.parametrize('num_workers', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_plain_loop_without_the_shares_is_refused(num_workers):
    """A plain DataLoader does not write the weights into its batches."""
    _, sampler, _ = shared_data()
    options = {'num_workers': num_workers}
    if num_workers:
        options['multiprocessing_context'] = 'forkserver'
    loader = DataLoader(sampler.dataset, batch_sampler=sampler, collate_fn=collate_named, **options)
    with pytest.raises(ValueError, match=r'`loss_shares` of the sampler need .* RegroupingDataLoader'):
        next(iter(loader))


@pytest.mark.parametrize('packing', [False, True])
def test_gradient_of_the_shared_means(packing):
    samples, sampler, data = shared_data(packing)
    samples_of_step = [samples[index] for index in sampler.window(0)]
    expected = gradient_of_shared_means(text_model(), samples_of_step)

    recorder = fit(text_model(), data, token_weights='column', callbacks=[TokenMonitor()], max_duration='1ba')

    assert relative_error(recorder.gradients, expected) < 1e-6
    for name, share in zip(SIZES, SHARES, strict=True):
        logged_shares = recorder.logged(f'token_monitor/source/{name}/weight')
        assert logged_shares == pytest.approx([share], rel=1e-6)


def collate_weighted(samples):
    batch = collate_samples(samples)
    return {**batch, 'loss_weights': torch.ones(len(samples))}


@pytest.mark.parametrize(
    ('loader_class', 'collate', 'options'),
    [
        (DataLoader, collate_samples, {}),
        (DataLoader, collate_samples, {'algorithms': [], **COMPOSERS_FLAG}),
        (DataLoader, collate_weighted, {'token_weights': 'column'}),
        (RegroupingDataLoader, collate_samples, {}),
        (RegroupingDataLoader, collate_samples, {'algorithms': [], **COMPOSERS_FLAG}),
    ],
)
def test_unused_loss_shares_are_refused(loader_class, collate, options):
    """A plain DataLoader does not write the weights, so without this refusal the shares would be lost silently."""
    model = hugging_face(text_model())
    dataset = LengthDataset(4)
    sampler = RegroupingBatchSampler(
        dataset,
        lengths=dataset.lengths,
        global_batch_size=4,
        max_tokens=2 * LONGEST,
        num_replicas=1,
        rank=0,
        loss_shares=LossShares([2, 2], [0.5, 0.5], [4, 8, 3, 6]),
    )
    data = token_data_spec(loader_class(dataset, batch_sampler=sampler, collate_fn=collate), model=model)

    with pytest.raises(ValueError, match=r'`loss_shares` of the sampler need .* RegroupingDataLoader'):
        fit(model, data, **options)
