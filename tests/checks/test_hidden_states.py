# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Models whose forward returns hidden states, and whose loss holds the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composer.models import ComposerModel

from composer_tokacc import TokenMonitor
from composer_tokacc.checks.logits import are_logits, targets_of
from tests.matrix.harness import plain_gradients
from tests.support.text import collate, text_rows
from tests.support.training import fit, loader, relative_error

HIDDEN = 16
VOCABULARY = 64
SHAPE = [(4, 2), (5, 3), (9, 7), (14, 11)]


class FusedHead(ComposerModel):
    """Returns hidden states, which are narrower than the vocabulary. Its loss applies the head in two chunks."""

    def __init__(self, *, frozen_head: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layer = torch.nn.Linear(HIDDEN, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY).requires_grad_(not frozen_head)

    def forward(self, batch: Any) -> torch.Tensor:
        return torch.tanh(self.layer(self.embedding(batch['input_ids'])))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        states = outputs[:, :-1].flatten(0, 1)
        labels = batch['labels'][:, 1:].flatten()
        sums = []
        for state_chunk, label_chunk in zip(states.chunk(2), labels.chunk(2), strict=True):
            sums.append(F.cross_entropy(self.head(state_chunk), label_chunk, reduction='sum'))
        return torch.stack(sums).sum() / (labels != -100).sum()

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return outputs if outputs is not None else self(batch)


@pytest.mark.parametrize('frozen_head', [False, True])
@pytest.mark.parametrize('microbatch_size', [1, 2])
def test_every_step_is_exact(frozen_head, microbatch_size):
    """Labels of the second batch are larger than the hidden size, which must not be taken for the vocabulary."""
    first = collate(text_rows(SHAPE))
    second = collate(text_rows(SHAPE[::-1]))
    is_label = first['labels'] != -100
    first['labels'][is_label] = first['labels'][is_label] % HIDDEN
    assert int(second['labels'].max()) >= HIDDEN
    model = FusedHead(frozen_head=frozen_head)
    expected = [plain_gradients(model, batch) for batch in (first, second)]
    recorder = fit(model, first, second, microbatch_size=microbatch_size)
    for gradients, expected_gradients in zip(recorder.steps, expected, strict=True):
        assert relative_error(gradients, expected_gradients) < 1e-6


@pytest.mark.parametrize('has_spec', [True, False])
def test_monitor_logs_no_loss_of_states(has_spec):
    """A cross-entropy of the states would be a number that means nothing."""
    batch = {**collate(text_rows(SHAPE)), 'source': ['a', 'b', 'a', 'b']}
    is_label = batch['labels'] != -100
    batch['labels'][is_label] = batch['labels'][is_label] % HIDDEN
    data = batch if has_spec else loader(batch)
    recorder = fit(FusedHead(), data, callbacks=[TokenMonitor()], max_duration='1ba')
    assert recorder.logged('token_monitor/source/a/tokens') == [9]
    assert recorder.logged('token_monitor/source/a/weight') == [9 / 23]
    assert recorder.logged('token_monitor/source/b/tokens') == [14]
    assert 'token_monitor/source/a/loss' not in recorder.memory.data


@pytest.mark.parametrize('frozen_head', [False, True])
@pytest.mark.parametrize('has_spec', [True, False])
def test_token_weights_are_refused(frozen_head, has_spec):
    batch = collate(text_rows(SHAPE))
    data = batch if has_spec else loader(batch)
    with pytest.raises(RuntimeError, match='must be made of the logits that it returns'):
        fit(FusedHead(frozen_head=frozen_head), data, token_weights='sqrt')


def losses(kind, logits, labels):
    counted = labels != -100
    if kind == 'cross-entropy':
        return F.cross_entropy(logits[counted], labels[counted])
    if kind == 'smoothed':
        return F.cross_entropy(logits[counted], labels[counted], label_smoothing=0.2)
    if kind == 'focal':
        token_losses = F.cross_entropy(logits[counted], labels[counted], reduction='none')
        return ((1 - (-token_losses).exp()).square() * token_losses).mean()
    if kind == 'with z-loss':
        return F.cross_entropy(logits[counted], labels[counted]) + 1e-2 * logits[counted].logsumexp(-1).square().mean()
    if kind == 'binary':
        targets = F.one_hot(labels[counted], logits.shape[-1]).to(logits)
        return F.binary_cross_entropy_with_logits(logits[counted], targets)
    teacher = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(1)).to(logits)
    return F.kl_div(logits[counted].log_softmax(-1), teacher.log_softmax(-1)[None], log_target=True, reduction='sum')


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('kind', ['cross-entropy', 'smoothed', 'focal', 'with z-loss', 'binary', 'distilled'])
def test_losses_tell_logits_from_states(kind, dtype):
    batch = collate(text_rows(SHAPE))
    targets = targets_of(batch, 'causal')
    torch.manual_seed(0)
    states = torch.randn(*targets.shape, 96).requires_grad_()
    logits = (states @ torch.randn(96, VOCABULARY) / 10).to(dtype)
    loss = losses(kind, logits, targets)
    state_gradient, logit_gradient = torch.autograd.grad(loss, (states, logits))
    assert are_logits(logit_gradient, targets) is True
    assert are_logits(state_gradient, targets) is False
    assert are_logits(torch.zeros_like(logit_gradient), targets) is None
