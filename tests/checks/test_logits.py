# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Weights, targets and the residual of a loss, read off its gradient by the logits, compared with plain losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from composer_tokacc.checks import logits as logits_module
from composer_tokacc.checks.logits import (
    measure,
    sketch,
    targets_of,
    token_losses_at,
    tolerance_of,
    weigh_tokens,
)
from composer_tokacc.checks.step import NUM_SAMPLED, MicrobatchRecord
from composer_tokacc.row_counts import count_rows

BATCH = {'labels': torch.tensor([[5, 6, -100, 2], [-100, -100, 7, 0], [1, 1, 1, 1]])}
TARGETS = targets_of(BATCH, 'causal')
WEIGHTS = torch.tensor([[0.5, 2.0, 0.0, 1.0], [0.0, 3.0, 0.25, 0.0], [1.0, 1.5, 4.0, 0.0]])
"""The weight of each token, at the position that predicts it."""
VOCABULARY = 9
UNIT = 0.01
"""The weight of a token in the loss whose relative weight is 1."""


@pytest.fixture(params=[logits_module.CHUNK, 2 * VOCABULARY], ids=['at once', 'a few positions at a time'])
def in_parts(request, monkeypatch):
    """Large tensors are read some positions at a time."""
    monkeypatch.setattr(logits_module, 'CHUNK', request.param)


def weighted_loss(logits, weights=WEIGHTS, shift=1):
    """Sums the weighted losses of the tokens, one position after the other."""
    loss = torch.zeros(())
    for row, labels in enumerate(BATCH['labels'].tolist()):
        for column in range(shift, len(labels)):
            if labels[column] != -100:
                position = (row, column - shift)
                log_probabilities = logits[position].float().log_softmax(dim=-1)
                loss = loss - log_probabilities[labels[column]] * weights[position]
    return loss


def random_logits(dtype=torch.float32):
    torch.manual_seed(0)
    return (3 * torch.randn(3, 4, VOCABULARY)).to(dtype)


def gradient_by(logits, loss_of, *arguments):
    """Returns the gradient of ``loss_of(logits, *arguments)`` by the logits."""
    leaf = logits.clone().requires_grad_()
    loss_of(leaf, *arguments).backward()
    return leaf.grad


@pytest.mark.parametrize('sign', [1, -1])
def test_weights_and_targets_of_the_loss(sign, in_parts):
    logits = random_logits()
    weights = sign * WEIGHTS
    tokens = measure(logits, gradient_by(logits, weighted_loss, weights))
    has_weight = (TARGETS != -100) & (WEIGHTS > 0)
    torch.testing.assert_close(tokens.weights[has_weight], weights[has_weight])
    assert not tokens.weights[~has_weight].any()
    assert torch.equal(tokens.targets[has_weight], TARGETS[has_weight])
    assert tokens.residual < 1e-6


def deviations(logits, gradient, targets):
    return measure(logits, gradient, targets).deviations(UNIT, WEIGHTS)


def deviations_in_hook(logits, gradient, rule):
    """Returns the deviation of each token by its position, as the hook of a microbatch measures it."""
    record = MicrobatchRecord(batch=BATCH, rows=count_rows(BATCH, rule))
    assert record.counts.loss_tokens <= NUM_SAMPLED  # so every token is measured
    watched_logits = logits.clone().requires_grad_() * 1
    record.watch(watched_logits, WEIGHTS, UNIT, batch=BATCH, measures_all=False)
    watched_logits.backward(gradient)
    return dict(zip(record.measured_positions.tolist(), record.deviations.tolist(), strict=True))


for_each_shift = pytest.mark.parametrize(('rule', 'shift'), [('causal', 1), ('unshifted', 0)])


@for_each_shift
def test_no_deviation_of_right_weights(rule, shift, in_parts):
    logits = random_logits()
    gradient = UNIT * gradient_by(logits, weighted_loss, WEIGHTS, shift)
    assert deviations(logits, gradient, targets_of(BATCH, rule)).max() < 1e-6
    assert max(deviations_in_hook(logits, gradient, rule).values()) < 1e-6


@for_each_shift
def test_deviation_of_a_wrong_weight(rule, shift, in_parts):
    """A weight that is 1 too large deviates by the gradient of that token."""
    row = 2
    column = 1
    label = 1  # of every token of this row
    wrong_position = row * WEIGHTS.shape[1] + column
    wrong_weights = WEIGHTS.clone()
    wrong_weights[row, column] += 1
    logits = random_logits()
    gradient = UNIT * gradient_by(logits, weighted_loss, wrong_weights, shift)
    targets = targets_of(BATCH, rule)
    assert int(deviations(logits, gradient, targets).argmax()) == wrong_position

    by_position = deviations_in_hook(logits, gradient, rule)
    has_target = targets.flatten() != -100
    assert sorted(by_position) == has_target.nonzero().flatten().tolist()
    assert max(by_position, key=by_position.get) == wrong_position
    gradient_of_token = logits[row, column].softmax(dim=-1)
    gradient_of_token[label] -= 1
    assert by_position[wrong_position] == pytest.approx(float(gradient_of_token.norm()), rel=1e-4)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_round_off_is_within_tolerance(dtype, in_parts):
    logits = random_logits(dtype)
    gradient = gradient_by(logits, weighted_loss)
    measured = measure(logits, gradient, TARGETS)
    assert measured.deviations(1.0, WEIGHTS).max() < tolerance_of(dtype) * WEIGHTS.max()


def test_weights_of_a_large_vocabulary(in_parts):
    """The norm of so many numbers has an error of 3e-6 on a CPU."""
    logits = torch.randn(1, 8, 32_000, generator=torch.Generator().manual_seed(0))
    gradient = gradient_by(logits, lambda logits: F.cross_entropy(logits[0], torch.arange(8)))
    weights = measure(logits, gradient).weights
    torch.testing.assert_close(weights, torch.full((1, 8), 1 / 8), rtol=5e-7, atol=0)


def test_sketches_keep_sizes_of_differences(in_parts):
    torch.manual_seed(0)
    first = torch.randn(3, 4, 5000)
    second = torch.randn(3, 4, 5000)
    expected = float((first - second).norm())
    assert (sketch(first) - sketch(second)).norm() == pytest.approx(expected, rel=0.1)
    assert torch.equal(sketch(first[..., :9]), first[..., :9])


@pytest.mark.parametrize('size', [32_000, pytest.param(262_143, marks=pytest.mark.slow)])
def test_sketches_of_few_positions(size, in_parts):
    """For up to three positions a CPU may sum a vocabulary in one pass, with an error of 1e-5 in float32."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(1, 12, size, generator=generator).softmax(dim=-1)
    labels = torch.arange(12)
    gradient[0, labels, labels] -= 1
    sketch_of_all = sketch(gradient)
    for start, end in [(0, 1), (1, 3), (3, 6), (6, 11)]:
        expected = sketch_of_all[:, start:end]
        differences = sketch(gradient[:, start:end]) - expected
        assert (differences.norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-6, (start, end)


def test_token_losses_are_plain_cross_entropy(in_parts):
    logits = random_logits()
    losses = token_losses_at(logits, torch.arange(12), TARGETS.flatten()).view(TARGETS.shape)
    assert float((losses * WEIGHTS).sum()) == pytest.approx(float(weighted_loss(logits)), rel=1e-6)
    assert losses[:, -1].tolist() == [0, 0, 0]


@pytest.mark.parametrize('weight', [0.6035, 1.37])
def test_weights_are_not_rounded_in_half_precision(weight):
    """In bfloat16 the weights would be 0.4 % and 0.2 % too small. 1,000 positions show it above the round-off."""
    torch.manual_seed(0)
    logits = torch.randn(1, 1000, 50).bfloat16()
    labels = torch.randint(50, (1000,))
    weights = torch.full((1, 1000), weight)

    def plain_loss(logits):
        return F.cross_entropy(logits[0].float(), labels)

    def weighted_by_hook(logits):
        logits = logits * 1
        weigh_tokens(logits, weights)
        return plain_loss(logits)

    plain = gradient_by(logits.double(), plain_loss).flatten()
    weighted = gradient_by(logits, weighted_by_hook).double().flatten()
    measured = torch.dot(weighted, plain) / torch.dot(plain, plain)
    assert float(measured) == pytest.approx(weight, rel=5e-4)
