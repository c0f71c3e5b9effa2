# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the probe finds out of a model by asking it, without a Trainer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from composer_tokacc.algorithm.probe import Probe, find_loss_rule, token_losses

from tests.support.text import text_model, text_row


def causal(logits, batch):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch['labels'][:, 1:].flatten())


def attended(logits, batch):
    labels = batch['labels'].masked_fill(batch['attention_mask'] == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def unshifted(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch['labels'].flatten())


def smoothed(logits, batch):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch['labels'][:, 1:].flatten(), label_smoothing=0.1)


def over_all_positions(logits, batch):
    labels = batch['labels'][:, 1:]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction='sum') / labels.numel()


def summed(logits, batch):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch['labels'][:, 1:].flatten(), reduction='sum')


def probe_of(loss, *, with_logits: bool, model=None):
    model = model or text_model()

    def forward(batch):
        logits = model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
        return {'loss': loss(logits, batch), **({'logits': logits} if with_logits else {})}

    return Probe(forward, lambda outputs, batch: outputs['loss'], model)


@pytest.mark.parametrize('with_logits', [True, False])
@pytest.mark.parametrize(
    ('loss', 'rule'),
    [(causal, 'causal'), (attended, 'causal_attended'), (unshifted, 'unshifted'), (smoothed, 'causal')],
)
def test_rule_is_found_from_logits_or_from_losses_alone(loss, rule, with_logits):
    assert find_loss_rule(probe_of(loss, with_logits=with_logits), text_row(12, 6)) == rule


@pytest.mark.parametrize('with_logits', [True, False])
@pytest.mark.parametrize('loss', [over_all_positions, summed])
def test_loss_that_is_no_mean_over_its_tokens_is_refused(loss, with_logits):
    with pytest.raises(RuntimeError, match=r'must be the mean over its loss-generating tokens, got: .*for two labels'):
        find_loss_rule(probe_of(loss, with_logits=with_logits), text_row(12, 6))


@pytest.mark.parametrize('with_logits', [True, False])
def test_rule_that_is_not_the_models_is_refused_with_the_right_one(with_logits):
    with pytest.raises(RuntimeError, match=r"Set `loss_tokens='unshifted'`"):
        find_loss_rule(probe_of(unshifted, with_logits=with_logits), text_row(12, 6), loss_tokens='causal')


def test_noise_is_of_the_order_of_the_models_precision():
    row = text_row(40, 30)
    noises = []
    for dtype in (torch.float32, torch.bfloat16):
        model = text_model().to(dtype)
        probe = probe_of(causal, with_logits=True, model=model)
        noises.append(probe.noise(row, 'causal', probe.ask(row)))
    assert 1e-8 < noises[0] < 1e-5
    assert 1e-4 < noises[1] < 1e-1


def test_float32_weights_are_probed_in_float32_whatever_the_autocast():
    row = text_row(40, 30)
    probe = probe_of(causal, with_logits=True)
    expected = probe.ask(row)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        found = probe.ask(row)
    assert found.own == expected.own
    assert found.logits is not None
    assert found.logits.dtype == torch.float32


def test_kernel_that_knows_half_precision_only_is_probed_in_the_runs_own():
    model = text_model()

    def forward(batch):
        if not torch.is_autocast_enabled('cpu'):
            raise RuntimeError('FlashAttention only support fp16 and bf16 data type')
        logits = model(input_ids=batch['input_ids']).logits
        return {'loss': causal(logits, batch), 'logits': logits}

    probe = Probe(
        forward, lambda outputs, batch: outputs['loss'], model, lambda: torch.autocast('cpu', dtype=torch.bfloat16)
    )
    assert find_loss_rule(probe, text_row(12, 6)) == 'causal'


def test_asking_leaves_mode_and_random_numbers_alone():
    model = text_model(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    probe = probe_of(causal, with_logits=True, model=model)
    row = text_row(12, 6)
    assert probe.ask(row).own == probe.ask(row).own  # dropout is off
    probe.noise(row, 'causal', probe.ask(row))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


def test_token_losses_are_those_of_plain_cross_entropy_row_by_row():
    batch = {'labels': torch.tensor([[5, 6, -100], [-100, -100, 7]])}
    logits = torch.randn(2, 3, 9)
    log_probabilities = logits.log_softmax(dim=-1)
    expected = torch.stack([-log_probabilities[0, 0, 6], -log_probabilities[1, 1, 7]])
    torch.testing.assert_close(token_losses(logits, batch, 'causal'), expected)
    expected = torch.stack([-log_probabilities[0, 0, 5], -log_probabilities[0, 1, 6], -log_probabilities[1, 2, 7]])
    torch.testing.assert_close(token_losses(logits, batch, 'unshifted'), expected)
