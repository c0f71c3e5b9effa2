# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Mixtures of experts that add their router's load-balancing loss to the one number that they return.

The mean over tokens is exact; the router's term is the mean of the microbatches' own, each computed here by itself.
"""

from __future__ import annotations

import pytest
import torch
from composer.callbacks import NaNMonitor
from composer.core import Callback

from composer_tokacc import token_data_spec
from composer_tokacc.row_counts import num_samples
from tests.matrix.harness import measure
from tests.matrix.native_models import NativeModel
from tests.matrix.subjects import SUBJECTS
from tests.support.text import collate, text_rows
from tests.support.training import fit, in_double, loader, relative_error
from tests.support.weights import weighted_losses

SHAPE = [(4, 2), (9, 0), (5, 3), (14, 11), (6, 1), (3, 2)]


def mixture(family, weight, **settings):
    model = SUBJECTS[family].model('large')
    for name, value in {'output_router_logits': True, 'router_aux_loss_coef': weight, **settings}.items():
        setattr(model.model.config, name, value)
    model.model.router_aux_loss_coef = weight
    return model


class Microbatches(Callback):
    """Keeps the microbatches with samples, and the loss that callbacks see at the end of a batch."""

    def __init__(self):
        self.inputs, self.loss = [], None

    def before_backward(self, state, logger):
        keys = ('input_ids', 'attention_mask', 'position_ids')
        if num_samples(state.batch):
            self.inputs.append({key: state.batch[key].clone() for key in keys if key in state.batch})

    def batch_end(self, state, logger):
        self.loss = state.loss


def expected_gradients(model, batch, ranks, token_weights='token'):
    """In double precision: the whole batch's mean over tokens, and the router loss of each microbatch by itself.

    ``ranks`` are their microbatches.
    """
    double = in_double(model.model)
    double.zero_grad(set_to_none=True)
    whole = double(input_ids=batch['input_ids'], attention_mask=batch['attention_mask'], use_cache=False)
    tokens, _ = weighted_losses(whole.logits, batch, token_weights)
    means = [torch.stack([double(**one, use_cache=False).aux_loss for one in of_rank]).mean() for of_rank in ranks]
    router = double.config.router_aux_loss_coef * torch.stack(means).mean()
    (tokens + router).backward()
    return {f'model.{n}': p.grad.clone() for n, p in double.named_parameters() if p.grad is not None}, tokens, router


@pytest.mark.parametrize(
    ('family', 'weight', 'microbatch_size', 'split', 'token_weights'),
    [
        ('mixtral', 0.1, 1, 'stock', 'token'),
        ('mixtral', 0.1, 2, 'regrouped', 'token'),
        ('mixtral', 0.001, 2, 'regrouped', 'sqrt'),
        ('qwen3_moe', 0.1, 3, 'ordered', 'token'),
        ('qwen3_moe', 1.0, 6, 'stock', 'sqrt'),
    ],
)
def test_routers_of_microbatches_weigh_the_same(family, weight, microbatch_size, split, token_weights):
    model, batch = mixture(family, weight), collate(text_rows(SHAPE))
    data = loader(batch) if split == 'stock' else token_data_spec(loader(batch), regroup=split == 'regrouped')
    seen = Microbatches()
    recorder = fit(
        model, data, token_weights=token_weights, microbatch_size=microbatch_size, callbacks=[NaNMonitor(), seen]
    )
    expected, tokens, router = expected_gradients(model, batch, [seen.inputs], token_weights)
    assert relative_error(recorder.gradients, expected) < 1e-6
    assert recorder.logged('loss/train/tokens') == pytest.approx([tokens.item()], rel=1e-6)
    assert recorder.logged('loss/train/router') == pytest.approx([router.item()], rel=1e-6)
    assert recorder.logged('loss/train/total') == pytest.approx([(tokens + router).item()], rel=1e-6)
    assert isinstance(seen.loss, torch.Tensor)


def test_what_is_not_exact_is_said(caplog):
    model, batch = mixture('mixtral', 0.01), collate(text_rows(SHAPE))
    fit(model, batch)
    assert 'depends on how the batch is cut' in caplog.text


def add_another(model, own, added):
    """Has the model add another multiple of its load-balancing loss than its own."""
    forward = model.model.forward

    def changed(**inputs):
        outputs = forward(**inputs)
        outputs.loss = outputs.loss + (added - own) * outputs.aux_loss
        return outputs

    model.model.forward = changed


def test_coefficient_of_another_value():
    model, batch = mixture('mixtral', 0.1), collate(text_rows(SHAPE))
    vars(model.model)['router_aux_loss_coef'] = 0.3
    fit(model, batch)
    add_another(model, 0.3, 0.1)
    with pytest.raises(RuntimeError, match='router'):
        fit(model, batch)


def test_router_loss_that_is_not_added():
    model, batch = mixture('mixtral', 1e-9), collate(text_rows(SHAPE))
    add_another(model, 1e-9, 0.0)
    with pytest.raises(RuntimeError, match=r'must add its load-balancing loss times 1e-09.* got: times 0'):
        fit(model, batch)


class Unnamed(NativeModel):
    """Adds a balance whose coefficient stands nowhere."""

    def __init__(self):
        super().__init__('causal')
        del self.model.config

    def forward(self, batch):
        outputs = super().forward(batch)
        outputs['aux_loss'] = outputs['logits'].softmax(dim=-1).mean(dim=(0, 1)).square().sum()
        return {**outputs, 'loss': outputs['loss'] + 0.1 * outputs['aux_loss']}


def test_unnamed_coefficient_is_refused():
    model, batch = NativeModel('causal'), collate(text_rows(SHAPE))
    outcome = measure(Unnamed(), batch, 2)
    assert outcome.kind == 'refused', outcome
    assert 'router_aux_loss_coef' in outcome.message
    assert measure(model, batch, 2).kind == 'exact'
