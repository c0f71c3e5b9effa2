# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Weights, targets and the residual of a loss, read off its gradient by the logits, compared with plain losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from composer_tokacc.checks import logits as logits_module
from composer_tokacc.checks.logits import (
    measure,
    sketch,
    token_losses_at,
    tolerance_of,
    weigh_tokens,
)
from composer_tokacc.checks.step import NUM_SAMPLED, MicrobatchRecord
from composer_tokacc.counting import LossRule
from composer_tokacc.row_counts import count_rows
from tests.support.process_group import group_of_one_rank

LABELS = torch.tensor(
    [
        [5, 6, -100, 2],
        [-100, -100, 7, 0],
        [1, 1, 1, 1],
    ]
)
BATCH = {'labels': LABELS}
TARGETS = LossRule.CAUSAL.targets(BATCH)
WEIGHTS = torch.tensor(
    [
        [0.5, 2.0, 0.0, 1.0],
        [0.0, 3.0, 0.25, 0.0],
        [1.0, 1.5, 4.0, 0.0],
    ]
)
"""The weight of each token, at the position that predicts it."""
VOCABULARY = 9
UNIT = 0.01
"""The weight of a token in the loss whose relative weight is 1."""


@pytest.fixture(
    params=[
        pytest.param(logits_module.CHUNK, id='at once'),
        pytest.param(2 * VOCABULARY, id='a few positions at a time'),
    ]
)
def in_parts(request, monkeypatch):
    """Large tensors are read some positions at a time."""
    monkeypatch.setattr(logits_module, 'CHUNK', request.param)


def weighted_loss(logits, weights=WEIGHTS, shift=1):
    """Sums the weighted losses of the tokens, one position after the other."""
    loss = torch.zeros(())
    for row, labels in enumerate(LABELS.tolist()):
        for column in range(shift, len(labels)):
            label = labels[column]
            if label == -100:
                continue
            position = (row, column - shift)
            log_probabilities = logits[position].float().log_softmax(dim=-1)
            loss = loss - log_probabilities[label] * weights[position]
    return loss


def random_logits(dtype=torch.float32):
    torch.manual_seed(0)
    logits = 3 * torch.randn(3, 4, VOCABULARY)
    return logits.to(dtype)


def gradient_by(logits, loss_of, *arguments):
    """Returns the gradient of ``loss_of(logits, *arguments)`` by the logits."""
    leaf = logits.clone().requires_grad_()
    loss = loss_of(leaf, *arguments)
    loss.backward()
    return leaf.grad


@pytest.mark.parametrize('sign', [1, -1])
def test_weights_and_targets_of_the_loss(sign, in_parts):
    logits = random_logits()
    weights = sign * WEIGHTS
    gradient = gradient_by(logits, weighted_loss, weights)

    tokens = measure(logits, gradient)

    has_weight = (TARGETS != -100) & (WEIGHTS > 0)
    torch.testing.assert_close(tokens.weights[has_weight], weights[has_weight])
    assert not tokens.weights[~has_weight].any()
    assert torch.equal(tokens.targets[has_weight], TARGETS[has_weight])
    assert tokens.residual < 1e-6


def deviations(logits, gradient, targets):
    """Returns the deviation of each position from the weights that it should have."""
    tokens = measure(logits, gradient, targets)
    return tokens.deviations(UNIT, WEIGHTS)


def deviations_in_hook(logits, gradient, rule):
    """Returns the deviation of each token by its position, as the hook of a microbatch measures it."""
    record = MicrobatchRecord(batch=BATCH, rows=count_rows(BATCH, rule))
    assert record.counts.loss_tokens <= NUM_SAMPLED  # so every token is measured
    leaf = logits.clone().requires_grad_()
    watched_logits = leaf * 1  # as in a model, the logits are not a leaf of the graph
    record.watch(watched_logits, WEIGHTS, UNIT, batch=BATCH, measures_all=False)
    watched_logits.backward(gradient)

    positions = record.measured_positions.tolist()
    deviations_of_positions = record.deviations.tolist()
    return dict(zip(positions, deviations_of_positions, strict=True))


for_each_shift = pytest.mark.parametrize(
    ('rule', 'shift'),
    [
        (LossRule.CAUSAL, 1),
        (LossRule.UNSHIFTED, 0),
    ],
)


@for_each_shift
def test_no_deviation_of_right_weights(rule, shift, in_parts):
    logits = random_logits()
    targets = rule.targets(BATCH)
    gradient = UNIT * gradient_by(logits, weighted_loss, WEIGHTS, shift)

    of_all_positions = deviations(logits, gradient, targets)
    assert of_all_positions.max() < 1e-6

    by_position = deviations_in_hook(logits, gradient, rule)
    assert max(by_position.values()) < 1e-6


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
    targets = rule.targets(BATCH)
    gradient = UNIT * gradient_by(logits, weighted_loss, wrong_weights, shift)

    worst_position = deviations(logits, gradient, targets).argmax()
    assert int(worst_position) == wrong_position

    by_position = deviations_in_hook(logits, gradient, rule)
    has_target = targets.flatten() != -100
    positions_with_target = has_target.nonzero().flatten().tolist()
    assert sorted(by_position) == positions_with_target
    assert max(by_position, key=by_position.get) == wrong_position

    # The gradient of a cross-entropy is the softmax minus 1 at the label.
    gradient_of_token = logits[row, column].softmax(dim=-1)
    gradient_of_token[label] -= 1
    expected_deviation = float(gradient_of_token.norm())
    assert by_position[wrong_position] == pytest.approx(expected_deviation, rel=1e-4)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_round_off_is_within_tolerance(dtype, in_parts):
    logits = random_logits(dtype)
    gradient = gradient_by(logits, weighted_loss)

    tokens = measure(logits, gradient, TARGETS)

    largest_deviation = tokens.deviations(1.0, WEIGHTS).max()
    assert largest_deviation < tolerance_of(dtype) * WEIGHTS.max()


def test_weights_of_a_large_vocabulary(in_parts):
    """The norm of so many numbers has an error of 3e-6 on a CPU."""
    num_tokens = 8
    labels = torch.arange(num_tokens)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, num_tokens, 32_000, generator=generator)

    def mean_loss(logits):
        return F.cross_entropy(logits[0], labels)

    gradient = gradient_by(logits, mean_loss)
    weights = measure(logits, gradient).weights

    expected_weights = torch.full((1, num_tokens), 1 / num_tokens)
    torch.testing.assert_close(weights, expected_weights, rtol=5e-7, atol=0)


def test_sketches_keep_sizes_of_differences(in_parts):
    """The gradient of a small vocabulary is kept as it is."""
    torch.manual_seed(0)
    first = torch.randn(3, 4, 5000)
    second = torch.randn(3, 4, 5000)
    small = first[..., :9]

    difference_of_sketches = sketch(first) - sketch(second)

    expected_norm = float((first - second).norm())
    assert difference_of_sketches.norm() == pytest.approx(expected_norm, rel=0.1)
    assert torch.equal(sketch(small), small)


@pytest.mark.parametrize('size', [9, 5000])
def test_sketch_of_a_sharded_vocabulary(size, tmp_path):
    gradient = torch.randn(3, 4, size)
    expected = sketch(gradient)

    with group_of_one_rank(tmp_path):
        mesh = init_device_mesh('cpu', (1,))
        sketch_of_sharded = sketch(distribute_tensor(gradient, mesh, [Shard(2)]))

    assert type(sketch_of_sharded) is torch.Tensor
    torch.testing.assert_close(sketch_of_sharded, expected)


@pytest.mark.parametrize('size', [32_000, pytest.param(262_143, marks=pytest.mark.slow)])
def test_sketches_of_few_positions(size, in_parts):
    """For up to three positions a CPU may sum a vocabulary in one pass, with an error of 1e-5 in float32."""
    num_positions = 12
    labels = torch.arange(num_positions)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, num_positions, size, generator=generator)
    gradient = logits.softmax(dim=-1)
    gradient[0, labels, labels] -= 1  # the gradient of a cross-entropy
    sketch_of_all = sketch(gradient)

    for start, end in [(0, 1), (1, 3), (3, 6), (6, 11)]:
        sketch_of_some = sketch(gradient[:, start:end])
        expected = sketch_of_all[:, start:end]
        differences = sketch_of_some - expected
        relative_errors = differences.norm(dim=-1) / expected.norm(dim=-1)
        assert relative_errors.max() < 1e-6, (start, end)


def test_token_losses_are_plain_cross_entropy(in_parts):
    """The last position of a row predicts nothing."""
    logits = random_logits()
    all_positions = torch.arange(TARGETS.numel())

    losses = token_losses_at(logits, all_positions, TARGETS.flatten())

    losses_of_rows = losses.view(TARGETS.shape)
    weighted_losses = losses_of_rows * WEIGHTS
    expected_sum = float(weighted_loss(logits))
    assert float(weighted_losses.sum()) == pytest.approx(expected_sum, rel=1e-6)
    assert losses_of_rows[:, -1].tolist() == [0, 0, 0]


@pytest.mark.parametrize('weight', [0.6035, 1.37])
def test_weights_unrounded_in_half_precision(weight):
    """In bfloat16 the weights would be 0.4 % and 0.2 % too small. 1,000 positions show it above the round-off."""
    num_positions = 1000
    torch.manual_seed(0)
    logits = torch.randn(1, num_positions, 50).bfloat16()
    labels = torch.randint(50, (num_positions,))
    weights = torch.full((1, num_positions), weight)

    def plain_loss(logits):
        return F.cross_entropy(logits[0].float(), labels)

    def weighted_by_hook(logits):
        logits = logits * 1
        weigh_tokens(logits, weights)
        return plain_loss(logits)

    plain = gradient_by(logits.double(), plain_loss).flatten()
    weighted = gradient_by(logits, weighted_by_hook).double().flatten()

    # The projection on the plain gradient averages the round-off out.
    projection = torch.dot(weighted, plain)
    measured_weight = projection / torch.dot(plain, plain)
    assert float(measured_weight) == pytest.approx(weight, rel=5e-4)
