# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``router_balance='step'``: the gradient of one forward over the whole batch with its router's loss, however cut.

The reference is the model's own loss on the whole batch, in float64, with a coefficient at which the router is a large
part of it.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from composer.core import Event
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from composer_tokacc import TokenAccumulation
from composer_tokacc.algorithm import router_balance
from tests.matrix.native_models import NativeModel
from tests.model_types.tiny import tiny_config, tiny_model
from tests.support.text import collate, text_model, text_rows
from tests.support.training import (
    On,
    assert_exact,
    fit,
    hugging_face,
    in_double,
    loader,
    reference_gradients,
    relative_error,
)

SHAPE = [(4, 2), (9, 0), (5, 3), (14, 11), (6, 1), (3, 2)]
COEFFICIENT = 0.5


def mixture(model_type='mixtral', **settings):
    config = tiny_config(model_type)
    config.output_router_logits, config.router_aux_loss_coef = True, COEFFICIENT
    for name, value in settings.items():
        setattr(config, name, value)
    return tiny_model(config, getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])).train()


@pytest.mark.parametrize(
    ('model_type', 'packing'),
    [
        ('mixtral', False),
        ('mixtral', True),
        ('qwen3_moe', False),
        ('qwen3_5_moe_text', True),
        ('qwen3_next', False),
        ('olmoe', False),
        ('gpt_oss', False),
    ],
)
def test_gradient_is_that_of_the_batch(model_type, packing):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f'transformers {transformers.__version__} has no such model')
    model, batch = mixture(model_type), collate(text_rows(SHAPE))
    if model_type == 'qwen3_next':  # one forward of it in float32 is 1.4e-6 off doubles
        model = in_double(model)
    for microbatch_size in (1, 3) if model_type == 'mixtral' else (2,):
        assert_exact(model, batch, packing=packing, microbatch_size=microbatch_size, router_balance='step')


def test_mean_of_microbatches_is_another():
    model, batch = mixture(), collate(text_rows(SHAPE))
    expected, _ = reference_gradients(model, batch)
    recorder = fit(model, batch)
    assert relative_error(recorder.gradients, expected) > 1e-2


@pytest.mark.parametrize('settings', [{'router_jitter_noise': 0.3}, {'attention_dropout': 0.4}])
def test_random_numbers_are_those_of_training(settings):
    model, batch = mixture(**settings), collate(text_rows(SHAPE))

    def gradients(balance):
        algorithm = TokenAccumulation(router_balance=balance)
        recorder = fit(model, batch, algorithms=[algorithm], seed=7)
        return recorder.gradients

    # With another statistic all else is the same: what the router's term cannot reach.
    found, plain = gradients('step'), gradients('microbatch')
    head = 'model.lm_head.weight'
    torch.testing.assert_close(found[head], plain[head], rtol=1e-5, atol=1e-7)


def test_other_random_numbers_are_refused():
    model, batch = mixture(router_jitter_noise=0.9), collate(text_rows([(40, 20)] * 6))
    draws = On(Event.BEFORE_FORWARD, lambda state: torch.rand(3))  # as augmentations draw numbers
    with pytest.raises(RuntimeError, match='choose the same experts with and without a graph'):
        fit(model, batch, router_balance='step', callbacks=[draws])


def another_loss(change):
    model = hugging_face(mixture())
    forward = model.model.forward

    def changed(**inputs):
        outputs = forward(**inputs)
        aux_loss = change(outputs)
        outputs.loss = outputs.loss + COEFFICIENT * (aux_loss - outputs.aux_loss)
        outputs.aux_loss = aux_loss
        return outputs

    model.model.forward = changed
    return model


def z_loss(outputs):
    return (
        outputs.aux_loss + 0.1 * torch.stack([one.logsumexp(-1).square().mean() for one in outputs.router_logits]).sum()
    )


def without_logits(outputs):
    outputs.router_logits = ()
    return outputs.aux_loss


@pytest.mark.parametrize(
    ('change', 'message'), [(z_loss, 'must be the number of experts'), (without_logits, 'outputs')]
)
def test_other_load_balancing_losses_are_refused(change, message):
    model, batch = another_loss(change), collate(text_rows(SHAPE))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=f'{message}.*router_balance=.microbatch.'):
        fit(model, batch, router_balance='step', optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_what_has_no_router_is_refused():
    batch = collate(text_rows(SHAPE))
    for model in (text_model(), mixture(output_router_logits=False), NativeModel('causal')):
        with pytest.raises(RuntimeError, match=r'router_aux_loss_coef|output_router_logits=True'):
            fit(model, batch, router_balance='step')
    with pytest.raises(RuntimeError, match=r'Use token_data_spec\(\)'):
        fit(mixture(), loader(batch), router_balance='step')


def test_token_weights_leave_the_routers_term():
    model, batch = mixture(), collate(text_rows([(8, 4)] * 4 + [(12, 4)] * 2))  # as many tokens in each sample
    assert_exact(model, batch, token_weights='sample', router_balance='step')


@pytest.mark.slow
def test_compiled_forward_is_exact():
    model, batch = mixture(), collate(text_rows(SHAPE))
    assert_exact(model, batch, router_balance='step', compile_config={'backend': 'aot_eager'})


@pytest.mark.parametrize(('end', 'is_refused'), [(3, False), (4, True), (5, True), (6, False)])
def test_packed_row_that_took_in_padding(end, is_refused):
    """Two documents of three positions; the real tokens end before the row, or between its documents."""
    packed = {'input_ids': torch.ones(1, 6, dtype=torch.long), 'position_ids': torch.tensor([[0, 1, 2, 0, 1, 2]])}
    if is_refused:
        with pytest.raises(RuntimeError, match='got: a label on padding'):
            router_balance._check_document_ends(packed, end=end)
    else:
        router_balance._check_document_ends(packed, end=end)
