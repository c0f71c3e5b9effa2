# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Token weights for shares of every step, compared with a plain count and with plain autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset

from composer_tokacc import (
    RegroupingBatchSampler,
    RegroupingDataLoader,
    TokenMonitor,
    token_data_spec,
)
from composer_tokacc.sampling import LossShares
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples
from tests.support.text import text_model
from tests.support.training import fit, relative_error

SHARES = (0.15, 0.25, 0.6)


def test_weights_add_up_to_shares():
    rng = np.random.default_rng(0)
    sizes = [30, 200, 7]
    tokens = rng.integers(0, 90, 237)
    shares = LossShares(sizes, SHARES, tokens)
    datasets = np.repeat([0, 1, 2], sizes)
    for _ in range(50):
        window = np.concatenate([rng.integers(0, 237, 40), [2, 60, 232]])
        weights = shares.weights(window)
        weight_of_dataset = [0.0, 0.0, 0.0]
        for weight, sample in zip(weights, window, strict=True):
            weight_of_dataset[datasets[sample]] += weight * tokens[sample]
        total = sum(weight_of_dataset)
        assert total == pytest.approx(tokens[window].sum(), rel=1e-12)
        for weight, share in zip(weight_of_dataset, SHARES, strict=True):
            assert weight / total == pytest.approx(share, rel=1e-12)


def test_dataset_without_tokens_in_a_step(caplog):
    shares = LossShares([2, 1, 1], SHARES, [3, 5, 4, 0])
    # Datasets 0 and 1 divide the share of dataset 2: 0.15 / 0.4 and 0.25 / 0.4 of the seven tokens.
    expected = [0.375 * 7 / 3, 0.625 * 7 / 4, 0]
    for _ in range(2):
        assert shares.weights(np.array([0, 2, 3])).tolist() == pytest.approx(expected)
    assert len(caplog.messages) == 1
    assert 'no loss tokens of dataset 2' in caplog.text


@pytest.mark.parametrize(
    ('shares', 'message'),
    [
        ((0.5, 0.6), 'be positive, one for each dataset, and add up to 1'),
        ((1.0,), r'have one entry .* shape \(1,\) for 2'),
        ((1.2, -0.2), 'be finite and at least 0, got: -0.2 at sample 1'),
    ],
)
def test_bad_loss_shares_are_refused(shares, message):
    with pytest.raises(ValueError, match=f'`shares` must {message}'):
        LossShares([2, 2], shares, [1, 1, 1, 1])


class Named(LengthDataset):
    """Names its source."""

    def __init__(self, name, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.name = name

    def __getitem__(self, index):
        return {**super().__getitem__(index), 'source': [self.name]}


def collate_named(samples):
    return {**collate_samples(samples), 'source': [sample['source'][0] for sample in samples]}


@pytest.mark.parametrize('packing', [False, True])
def test_gradient_of_the_shared_means(packing):
    dataset = ConcatDataset([Named('a', 20), Named('b', 12, seed=1), Named('c', 8, seed=2)])
    samples = [dataset[index] for index in range(40)]
    tokens = [int((sample['labels'][:, 1:] != -100).sum()) for sample in samples]
    lengths = [sample['input_ids'].shape[1] for sample in samples]
    sampler = RegroupingBatchSampler(
        dataset,
        lengths=lengths,
        global_batch_size=20,
        max_tokens=2 * LONGEST,
        num_replicas=1,
        rank=0,
        loss_shares=LossShares([20, 12, 8], SHARES, tokens),
    )
    loader = RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate_named)
    model = text_model()
    terms = []
    for name, share in zip('abc', SHARES, strict=True):
        losses = []
        for index in sampler.window(0):
            if samples[index]['source'] == [name]:
                logits = model(input_ids=samples[index]['input_ids']).logits[0, :-1]
                labels = samples[index]['labels'][0, 1:]
                losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction='none')[labels != -100])
        terms.append(share * torch.cat(losses).mean())
    torch.stack(terms).sum().backward()
    expected = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            expected[name] = parameter.grad.clone()
    recorder = fit(
        text_model(),
        token_data_spec(loader, slot_tokens=LONGEST, packing=packing),
        token_weights='column',
        callbacks=[TokenMonitor()],
        max_duration='1ba',
    )
    gradients = {name.removeprefix('model.'): gradient for name, gradient in recorder.gradients.items()}
    assert relative_error(gradients, expected) < 1e-6
    for name, share in zip('abc', SHARES, strict=True):
        assert recorder.logged(f'token_monitor/source/{name}/weight') == pytest.approx([share], rel=1e-6)
