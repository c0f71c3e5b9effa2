# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Weights, targets and the residual of a loss, read off its gradient by the logits, compared with plain losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from composer_tokacc.checks import logits as measured
from composer_tokacc.checks.logits import (
    deviations,
    measure,
    sketch,
    targets_of,
    token_losses,
    tolerance_of,
    weigh_tokens,
)
from composer_tokacc.checks.step import NUM_SAMPLED, MicrobatchRecord
from composer_tokacc.row_counts import count_rows

LABELS = torch.tensor([[5, 6, -100, 2], [-100, -100, 7, 0], [1, 1, 1, 1]])
WEIGHTS = torch.tensor([[0.5, 2.0, 0.0, 1.0], [0.0, 3.0, 0.25, 0.0], [1.0, 1.5, 4.0, 0.0]])
"""At the positions that predict."""


@pytest.fixture(autouse=True, params=[2**23, 20], ids=['at once', 'two positions at a time'])
def chunk(request, monkeypatch):
    monkeypatch.setattr(measured, 'CHUNK', request.param)


def written_out(logits, weights, shift=1):
    """The weighted sum of the tokens' losses, one position after the other."""
    losses = []
    for row in range(3):
        for column in range(shift, 4):
            label = int(LABELS[row, column])
            if label != -100:
                log_probabilities = logits[row, column - shift].log_softmax(dim=-1)
                losses.append(-log_probabilities[label] * weights[row, column - shift])
    return torch.stack(losses).sum()


def gradient_of(function, dtype=torch.float32):
    torch.manual_seed(0)
    logits = (3 * torch.randn(3, 4, 9)).to(dtype).requires_grad_()
    return logits.detach(), *torch.autograd.grad(function(logits), logits)


def test_weights_and_targets_of_the_loss():
    logits, gradient = gradient_of(lambda z: written_out(z, WEIGHTS))
    targets = targets_of({'labels': LABELS}, 'causal')
    measured_tokens = measure(logits, gradient)
    has_weight = (targets != -100) & (WEIGHTS > 0)
    torch.testing.assert_close(measured_tokens.weights[has_weight], WEIGHTS[has_weight])
    assert not measured_tokens.weights[~has_weight].any()
    assert torch.equal(measured_tokens.targets[has_weight], targets[has_weight])
    assert measured_tokens.residual < 1e-6


def test_targets_of_negative_weights():
    logits, gradient = gradient_of(lambda z: written_out(z, -WEIGHTS))
    measured_tokens = measure(logits, gradient)
    targets = targets_of({'labels': LABELS}, 'causal')
    has_weight = (targets != -100) & (WEIGHTS > 0)
    assert torch.equal(measured_tokens.targets[has_weight], targets[has_weight])
    torch.testing.assert_close(measured_tokens.weights[has_weight], -WEIGHTS[has_weight])


def test_residual_of_another_loss():
    def z_loss(logits):
        return 1e-5 * logits.logsumexp(dim=-1).square().sum()

    logits, gradient = gradient_of(lambda z: written_out(z, WEIGHTS) + z_loss(z))
    _, added = gradient_of(z_loss)
    # The part along the gradient of a token is taken for a part of its weight, so the residual is smaller.
    assert 0 < measure(logits, gradient).residual <= added.norm() / gradient.norm()


def watched_deviations(logits, gradient, rule):
    """Deviation of each token by its position, as the hook of a microbatch measures it."""
    record = MicrobatchRecord(batch={'labels': LABELS}, rows=count_rows({'labels': LABELS}, rule))
    watched_logits = logits.requires_grad_() * 1
    record.watch(watched_logits, WEIGHTS, 0.01, is_whole=False)
    watched_logits.backward(gradient)
    assert record.count == record.counts.loss_tokens <= NUM_SAMPLED
    return dict(zip(record.positions.tolist(), record.deviations.tolist(), strict=True))


@pytest.mark.parametrize(('rule', 'shift'), [('causal', 1), ('unshifted', 0)])
def test_deviation_of_a_wrong_weight(rule, shift):
    targets = targets_of({'labels': LABELS}, rule)
    logits, gradient = gradient_of(lambda z: 0.01 * written_out(z, WEIGHTS, shift))
    assert deviations(0.01, logits, gradient, targets, WEIGHTS).max() < 1e-6
    assert max(watched_deviations(logits, gradient, rule).values()) < 1e-6
    wrong_weights = WEIGHTS.clone()
    wrong_weights[2, 1] += 1
    logits, gradient = gradient_of(lambda z: 0.01 * written_out(z, wrong_weights, shift))
    plain_gradient = logits[2, 1].softmax(dim=-1) - F.one_hot(torch.tensor(1), logits.shape[-1])
    by_position = watched_deviations(logits, gradient, rule)
    assert set(by_position) == set((targets != -100).flatten().nonzero()[:, 0].tolist())
    assert max(by_position, key=by_position.get) == 9
    assert by_position[9] == pytest.approx(float(plain_gradient.norm()), rel=1e-4)
    assert int(deviations(0.01, logits, gradient, targets, WEIGHTS).argmax()) == 9


def test_round_off_is_within_tolerance():
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        logits, gradient = gradient_of(lambda z: written_out(z.float(), WEIGHTS), dtype)
        targets = targets_of({'labels': LABELS}, 'causal')
        assert deviations(1.0, logits, gradient, targets, WEIGHTS).max() < tolerance_of(dtype) * 4


def test_weights_of_a_large_vocabulary():
    logits = torch.randn(1, 8, 32_000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(8)[None]
    torch.nn.functional.cross_entropy(logits[0], labels[0]).backward()
    torch.testing.assert_close(
        measure(logits.detach(), logits.grad).weights, torch.full((1, 8), 1 / 8), rtol=5e-7, atol=0
    )


def test_sketches_keep_sizes_of_differences():
    torch.manual_seed(0)
    first = torch.randn(3, 4, 5000)
    second = torch.randn(3, 4, 5000)
    expected = float((first - second).norm())
    assert (sketch(first) - sketch(second)).norm() == pytest.approx(expected, rel=0.1)
    assert torch.equal(sketch(first[..., :9]), first[..., :9])


@pytest.mark.parametrize('size', [32_000, pytest.param(262_143, marks=pytest.mark.slow)])
def test_sketches_of_few_positions(size):
    """For up to three positions a CPU may sum a vocabulary in one pass, with an error of 1e-5 in float32."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(1, 24, size, generator=generator).softmax(dim=-1)
    gradient[0, torch.arange(24), torch.arange(24)] -= 1
    sketch_of_all = sketch(gradient)
    for start, count in ((0, 1), (1, 2), (3, 3), (6, 5)):
        sketch_of_few = sketch(gradient[:, start : start + count])
        expected = sketch_of_all[:, start : start + count]
        relative_errors = (sketch_of_few - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert relative_errors.max() < 1e-6


def test_token_losses_are_plain_cross_entropy():
    logits, _ = gradient_of(lambda z: z.sum())
    losses = token_losses(logits, targets_of({'labels': LABELS}, 'causal'))
    assert float((losses * WEIGHTS).sum()) == pytest.approx(float(written_out(logits, WEIGHTS)), rel=1e-6)
    assert losses[:, -1].tolist() == [0, 0, 0]


def test_factors_on_the_gradient_are_weights():
    def smoothed(logits, factors):
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), LABELS[:, 1:], reduction='none', label_smoothing=0.1)
        return (losses * factors[:, :-1]).sum()

    _, expected = gradient_of(lambda z: smoothed(z, WEIGHTS))

    def hooked(logits):
        weighted_logits = logits * 1
        weigh_tokens(weighted_logits, WEIGHTS)
        return smoothed(weighted_logits, torch.ones_like(WEIGHTS))

    _, gradient = gradient_of(hooked)
    torch.testing.assert_close(gradient, expected)
