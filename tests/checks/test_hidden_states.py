# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Models that return hidden states, and apply the head in their loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composer.models import ComposerModel

from composer_tokacc import TokenMonitor
from composer_tokacc.checks.logits import are_logits
from composer_tokacc.counting import LossRule
from tests.matrix.harness import plain_gradients
from tests.support.text import RAGGED, VOCABULARY, ragged_batch
from tests.support.training import fit, loader, relative_error

HIDDEN = 16
SHAPE = RAGGED[:4]
# `fit` splits a plain batch with `token_data_spec`. Composer itself splits the batch of a loader.
for_each_split = pytest.mark.parametrize('data_of', [dict, loader], ids=['our split', 'stock split'])


class FusedHead(ComposerModel):
    """Returns hidden states, which are narrower than the vocabulary. Its loss applies the head in two chunks."""

    def __init__(self, *, frozen_head: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layer = torch.nn.Linear(HIDDEN, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)
        self.head.requires_grad_(not frozen_head)

    def forward(self, batch: Any) -> torch.Tensor:
        embeddings = self.embedding(batch['input_ids'])
        states = self.layer(embeddings)
        return states.tanh()

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        next_labels = batch['labels'][:, 1:].flatten()
        predicting_states = outputs[:, :-1].flatten(0, 1)
        chunks_of_labels = next_labels.chunk(2)
        chunks_of_states = predicting_states.chunk(2)
        total = torch.zeros(())
        for states, labels in zip(chunks_of_states, chunks_of_labels, strict=True):
            logits = self.head(states)
            total = total + F.cross_entropy(logits, labels, reduction='sum')
        num_labels = (next_labels != -100).sum()
        return total / num_labels

    def eval_forward(self, batch, outputs=None):
        return outputs if outputs is not None else self(batch)


def with_small_labels():
    """Returns a batch whose labels are smaller than the hidden size, so that states could be logits."""
    batch = ragged_batch(SHAPE)
    labels = batch['labels']
    has_label = labels != -100
    batch['labels'] = torch.where(has_label, labels % HIDDEN, -100)
    return batch


@pytest.mark.parametrize('frozen_head', [False, True])
@pytest.mark.parametrize('microbatch_size', [1, 2])
def test_every_step_is_exact(frozen_head, microbatch_size):
    """Labels of the second batch are larger than the hidden size, which must not be taken for the vocabulary."""
    first = with_small_labels()
    second = ragged_batch(SHAPE[::-1])
    assert int(second['labels'].max()) >= HIDDEN
    model = FusedHead(frozen_head=frozen_head)

    recorder = fit(model, first, second, microbatch_size=microbatch_size)

    for batch, gradients in zip([first, second], recorder.steps, strict=True):
        expected = plain_gradients(model, batch)
        assert relative_error(gradients, expected) < 1e-6


@for_each_split
def test_monitor_logs_no_loss_of_states(data_of):
    """A cross-entropy of the states would be a number that means nothing."""
    batch = with_small_labels()
    batch['source'] = ['a', 'b', 'a', 'b']
    data = data_of(batch)

    recorder = fit(FusedHead(), data, callbacks=[TokenMonitor()])

    # The four rows have 2, 3, 7 and 11 labels.
    assert recorder.logged('token_monitor/source/a/tokens') == [9]
    assert recorder.logged('token_monitor/source/a/weight') == [9 / 23]
    assert recorder.logged('token_monitor/source/b/tokens') == [14]
    assert 'token_monitor/source/a/loss' not in recorder.memory.data


@pytest.mark.parametrize('frozen_head', [False, True])
@for_each_split
def test_token_weights_are_refused(frozen_head, data_of):
    model = FusedHead(frozen_head=frozen_head)
    data = data_of(ragged_batch(SHAPE))

    with pytest.raises(RuntimeError, match='must be made of the logits that it returns'):
        fit(model, data, token_weights='sqrt')


# Losses of logits and labels at the positions that have a label.


def smoothed(logits, labels):
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def focal(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction='none')
    probabilities = (-losses).exp()
    weights = (1 - probabilities).square()
    return (weights * losses).mean()


def with_z_loss(logits, labels):
    z_losses = logits.logsumexp(dim=-1).square()
    return F.cross_entropy(logits, labels) + 1e-2 * z_losses.mean()


def binary(logits, labels):
    targets = F.one_hot(labels, VOCABULARY).to(logits)
    return F.binary_cross_entropy_with_logits(logits, targets)


def distilled(logits, labels):
    generator = torch.Generator().manual_seed(1)
    teacher_logits = torch.randn(1, VOCABULARY, generator=generator).to(logits)
    teacher = teacher_logits.log_softmax(dim=-1)
    student = logits.log_softmax(dim=-1)
    return F.kl_div(student, teacher, log_target=True, reduction='sum')


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    'loss_of',
    [
        F.cross_entropy,
        smoothed,
        focal,
        with_z_loss,
        binary,
        distilled,
    ],
)
def test_losses_tell_logits_from_states(loss_of, dtype):
    """In the gradient by logits the label stands out, or the entries sum to 0. A gradient of 0 tells nothing."""
    batch = ragged_batch(SHAPE)
    targets = LossRule.CAUSAL.targets(batch)
    has_target = targets != -100
    hidden_size = 96  # wider than the vocabulary, so every label could be an entry of a state
    torch.manual_seed(0)
    states = torch.randn(*targets.shape, hidden_size).requires_grad_()
    head = torch.randn(hidden_size, VOCABULARY) / 10
    logits = (states @ head).to(dtype)
    loss = loss_of(logits[has_target], targets[has_target])

    state_gradient, logit_gradient = torch.autograd.grad(loss, (states, logits))

    assert are_logits(logit_gradient, targets) is True
    assert are_logits(state_gradient, targets) is False
    assert are_logits(torch.zeros_like(logit_gradient), targets) is None
