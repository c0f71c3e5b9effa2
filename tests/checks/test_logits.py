# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Weights, targets and the rest of a loss, read off its gradient by the logits, beside losses written out by hand."""

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
    places = [(row, place) for row in range(3) for place in range(shift, 4) if int(LABELS[row, place]) != -100]
    losses = [
        -logits[row, p - shift].log_softmax(dim=-1)[LABELS[row, p]] * weights[row, p - shift] for row, p in places
    ]
    return torch.stack(losses).sum()


def gradient_of(function, dtype=torch.float32):
    torch.manual_seed(0)
    logits = (3 * torch.randn(3, 4, 9)).to(dtype).requires_grad_()
    return logits.detach(), *torch.autograd.grad(function(logits), logits)


def test_weights_and_targets_of_the_loss():
    logits, gradient = gradient_of(lambda z: written_out(z, WEIGHTS))
    targets = targets_of({'labels': LABELS}, 'causal')
    found = measure(logits, gradient)
    carried = (targets != -100) & (WEIGHTS > 0)
    torch.testing.assert_close(found.weights[carried], WEIGHTS[carried])
    assert not found.weights[~carried].any()
    assert torch.equal(found.targets[carried], targets[carried])
    assert found.residual < 1e-6


def test_targets_of_negative_weights():
    logits, gradient = gradient_of(lambda z: written_out(z, -WEIGHTS))
    found, targets = measure(logits, gradient), targets_of({'labels': LABELS}, 'causal')
    carried = (targets != -100) & (WEIGHTS > 0)
    assert torch.equal(found.targets[carried], targets[carried])
    torch.testing.assert_close(found.weights[carried], -WEIGHTS[carried])


def test_residual_of_another_loss():
    def z_loss(logits):
        return 1e-5 * logits.logsumexp(dim=-1).square().sum()

    logits, gradient = gradient_of(lambda z: written_out(z, WEIGHTS) + z_loss(z))
    _, added = gradient_of(z_loss)
    found = measure(logits, gradient)
    # What lies along the tokens' own gradients is taken for a part of their weights.
    assert 0 < found.residual <= added.norm() / gradient.norm()


def changes(logits, gradient, rule):
    """How far each token is off, by its position."""
    record = MicrobatchRecord(batch={'labels': LABELS}, rows=count_rows({'labels': LABELS}, rule))
    given = logits.requires_grad_() * 1
    record.watch(given, WEIGHTS, 0.01, is_whole=False)
    given.backward(gradient)
    assert record.count == record.counts.loss_tokens <= NUM_SAMPLED
    return dict(zip(record.positions.tolist(), record.deviations.tolist(), strict=True))


@pytest.mark.parametrize(('rule', 'shift'), [('causal', 1), ('unshifted', 0)])
def test_deviation_is_that_of_wrong_weights(rule, shift):
    targets = targets_of({'labels': LABELS}, rule)
    logits, gradient = gradient_of(lambda z: 0.01 * written_out(z, WEIGHTS, shift))
    assert deviations(0.01, logits, gradient, targets, WEIGHTS).max() < 1e-6
    assert max(changes(logits, gradient, rule).values()) < 1e-6
    wrong = WEIGHTS.clone()
    wrong[2, 1] += 1
    logits, gradient = gradient_of(lambda z: 0.01 * written_out(z, wrong, shift))
    own = logits[2, 1].softmax(dim=-1) - F.one_hot(torch.tensor(1), logits.shape[-1])
    found = changes(logits, gradient, rule)
    assert set(found) == set((targets != -100).flatten().nonzero()[:, 0].tolist())
    assert max(found, key=found.__getitem__) == 9
    assert found[9] == pytest.approx(float(own.norm()), rel=1e-4)
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
    one, other = torch.randn(3, 4, 5000), torch.randn(3, 4, 5000)
    whole = (one - other).norm()
    assert (sketch(one) - sketch(other)).norm() == pytest.approx(float(whole), rel=0.1)
    assert torch.equal(sketch(one[..., :9]), one[..., :9])


@pytest.mark.parametrize('size', [32_000, pytest.param(262_143, marks=pytest.mark.slow)])
def test_sketches_of_few_positions(size):
    """Of three positions a CPU may sum a whole vocabulary in one go, which is 1e-5 off in float32."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(1, 24, size, generator=generator).softmax(dim=-1)
    gradient[0, torch.arange(24), torch.arange(24)] -= 1
    together = sketch(gradient)
    for start, count in ((0, 1), (1, 2), (3, 3), (6, 5)):
        alone = sketch(gradient[:, start : start + count])
        expected = together[:, start : start + count]
        assert ((alone - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-6


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
        given = logits * 1
        weigh_tokens(given, WEIGHTS)
        return smoothed(given, torch.ones_like(WEIGHTS))

    _, found = gradient_of(hooked)
    torch.testing.assert_close(found, expected)
