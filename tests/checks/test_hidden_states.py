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
from composer_tokacc.checks.logits import are_logits, targets_of
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
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY).requires_grad_(not frozen_head)

    def forward(self, batch: Any) -> torch.Tensor:
        return torch.tanh(self.layer(self.embedding(batch['input_ids'])))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        state_chunks = outputs[:, :-1].flatten(0, 1).chunk(2)
        labels = batch['labels'][:, 1:].flatten()
        loss = torch.zeros(())
        for states, chunk_labels in zip(state_chunks, labels.chunk(2), strict=True):
            loss = loss + F.cross_entropy(self.head(states), chunk_labels, reduction='sum')
        return loss / (labels != -100).sum()

    def eval_forward(self, batch, outputs=None):
        return outputs if outputs is not None else self(batch)


def with_small_labels():
    """Returns a batch whose labels are smaller than the hidden size, so that states could be logits."""
    batch = ragged_batch(SHAPE)
    labels = batch['labels']
    batch['labels'] = torch.where(labels == -100, labels, labels % HIDDEN)
    return batch


@pytest.mark.parametrize('frozen_head', [False, True])
@pytest.mark.parametrize('microbatch_size', [1, 2])
def test_every_step_is_exact(frozen_head, microbatch_size):
    """Labels of the second batch are larger than the hidden size, which must not be taken for the vocabulary."""
    batches = [with_small_labels(), ragged_batch(SHAPE[::-1])]
    assert int(batches[1]['labels'].max()) >= HIDDEN
    model = FusedHead(frozen_head=frozen_head)
    recorder = fit(model, *batches, microbatch_size=microbatch_size)
    for batch, gradients in zip(batches, recorder.steps, strict=True):
        assert relative_error(gradients, plain_gradients(model, batch)) < 1e-6


@for_each_split
def test_monitor_logs_no_loss_of_states(data_of):
    """A cross-entropy of the states would be a number that means nothing."""
    batch = {**with_small_labels(), 'source': ['a', 'b', 'a', 'b']}
    recorder = fit(FusedHead(), data_of(batch), callbacks=[TokenMonitor()])
    assert recorder.logged('token_monitor/source/a/tokens') == [9]
    assert recorder.logged('token_monitor/source/a/weight') == [9 / 23]
    assert recorder.logged('token_monitor/source/b/tokens') == [14]
    assert 'token_monitor/source/a/loss' not in recorder.memory.data


@pytest.mark.parametrize('frozen_head', [False, True])
@for_each_split
def test_token_weights_are_refused(frozen_head, data_of):
    data = data_of(ragged_batch(SHAPE))
    with pytest.raises(RuntimeError, match='must be made of the logits that it returns'):
        fit(FusedHead(frozen_head=frozen_head), data, token_weights='sqrt')


# Losses of logits and labels at the positions that have a label.


def smoothed(logits, labels):
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def focal(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction='none')
    return ((1 - (-losses).exp()).square() * losses).mean()


def with_z_loss(logits, labels):
    return F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(dim=-1).square().mean()


def binary(logits, labels):
    targets = F.one_hot(labels, VOCABULARY).to(logits)
    return F.binary_cross_entropy_with_logits(logits, targets)


def distilled(logits, labels):
    teacher = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)).to(logits)
    log_probabilities = logits.log_softmax(dim=-1)
    return F.kl_div(log_probabilities, teacher.log_softmax(dim=-1)[None], log_target=True, reduction='sum')


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('loss_of', [F.cross_entropy, smoothed, focal, with_z_loss, binary, distilled])
def test_losses_tell_logits_from_states(loss_of, dtype):
    """A gradient of zero does not tell."""
    targets = targets_of(ragged_batch(SHAPE), 'causal')
    torch.manual_seed(0)
    states = torch.randn(*targets.shape, 96).requires_grad_()
    logits = (states @ torch.randn(96, VOCABULARY) / 10).to(dtype)
    has_target = targets != -100
    loss = loss_of(logits[has_target], targets[has_target])
    state_gradient, logit_gradient = torch.autograd.grad(loss, (states, logits))
    assert are_logits(logit_gradient, targets) is True
    assert are_logits(state_gradient, targets) is False
    assert are_logits(torch.zeros_like(logit_gradient), targets) is None
