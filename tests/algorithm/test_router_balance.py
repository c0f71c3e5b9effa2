# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""With ``router_balance='step'`` the load-balancing loss of the router also does not depend on the cut.

The reference is the model's own loss of the whole batch in float64.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from composer.core import Event
from composer.devices import DeviceCPU
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.algorithm import router_balance
from composer_tokacc.algorithm.loss_terms import LossTerms, SplitLoss
from composer_tokacc.algorithm.router_balance import StepBalance, counted_positions
from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.counting import LossRule
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.row_counts import RowCounts, attach_row_counts, row_counts_of, with_counts
from tests.algorithm.test_token_accumulation import without_waiting
from tests.matrix.native_models import NativeModel
from tests.support.mixtures import COEFFICIENT, mixture_of_experts
from tests.support.text import ONE_UNLABELLED, one_layer_model, ragged_batch, text_attention
from tests.support.training import (
    On,
    assert_exact,
    fit,
    hugging_face,
    in_double,
    loader,
    reference_gradients,
    relative_error,
    weights_unchanged,
)


@pytest.mark.parametrize(
    ('model_type', 'packing', 'microbatch_size'),
    [
        ('mixtral', False, 1),
        ('mixtral', True, 3),
        ('qwen3_moe', False, 2),
        ('qwen3_5_moe_text', True, 2),
        ('qwen3_next', False, 2),
        pytest.param('olmoe', False, 2, marks=pytest.mark.slow),
        pytest.param('gpt_oss', False, 2, marks=pytest.mark.slow),
    ],
)
def test_gradient_is_that_of_one_forward(model_type, packing, microbatch_size):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f'transformers {transformers.__version__} has no such model')
    model = mixture_of_experts(model_type)
    if model_type == 'qwen3_next':
        # The error of one forward in float32 is already 1.4e-6.
        model = in_double(model)
    batch = ragged_batch(ONE_UNLABELLED)
    assert_exact(model, batch, router_balance='step', packing=packing, microbatch_size=microbatch_size)


def test_mean_over_microbatches_differs():
    """The default is another loss, so the tests here can fail."""
    model = mixture_of_experts()
    batch = ragged_batch(ONE_UNLABELLED)
    expected, _ = reference_gradients(model, batch)
    recorder = fit(model, batch)
    assert relative_error(recorder.gradients, expected) > 1e-2


@pytest.mark.parametrize('settings', [{'router_jitter_noise': 0.3}, {'attention_dropout': 0.4}])
def test_random_numbers_are_those_of_training(settings):
    """The additional forward must not draw from the random numbers of the run.

    The router's term has no gradient by the output embedding. So the gradient there must be the same as without
    the additional forward.
    """
    model = mixture_of_experts(**settings)
    batch = ragged_batch(ONE_UNLABELLED)

    def gradient_of_head(balance):
        recorder = fit(model, batch, router_balance=balance, seed=7)
        return recorder.gradients['model.lm_head.weight']

    gradient = gradient_of_head('step')
    expected = gradient_of_head('microbatch')
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_other_random_numbers_are_refused():
    model = mixture_of_experts(router_jitter_noise=0.9)
    batch = ragged_batch([(40, 20)] * 6)
    draw_numbers = On(Event.BEFORE_FORWARD, lambda state: torch.rand(3))  # as augmentations draw numbers
    with pytest.raises(RuntimeError, match='same experts'):
        fit(model, batch, router_balance='step', callbacks=[draw_numbers])


def with_other_router_loss(router_loss):
    """Returns a model with another load-balancing loss, a function of its outputs."""
    model = hugging_face(mixture_of_experts())
    forward = model.model.forward

    def changed(**inputs):
        outputs = forward(**inputs)
        aux_loss = router_loss(outputs)
        added_loss = aux_loss - outputs.aux_loss
        outputs.loss = outputs.loss + COEFFICIENT * added_loss
        outputs.aux_loss = aux_loss
        return outputs

    model.model.forward = changed
    return model


def with_z_loss(outputs):
    """Returns the load-balancing loss plus a z-loss of each router."""
    total = outputs.aux_loss
    for logits in outputs.router_logits:
        z_loss = logits.logsumexp(-1).square().mean()
        total = total + 0.1 * z_loss
    return total


def without_router_logits(outputs):
    """Returns the load-balancing loss. Removes the logits that it is made of."""
    outputs.router_logits = ()
    return outputs.aux_loss


@pytest.mark.parametrize(
    ('router_loss', 'words'),
    [(with_z_loss, 'must be the number of experts'), (without_router_logits, 'outputs')],
)
def test_other_router_losses_are_refused(router_loss, words):
    """Before the optimizer moves."""
    model = with_other_router_loss(router_loss)
    batch = ragged_batch(ONE_UNLABELLED)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    remedy = 'router_balance=.microbatch.'
    with weights_unchanged(model), pytest.raises(RuntimeError, match=f'{words}.*{remedy}'):
        fit(model, batch, router_balance='step', optimizer=optimizer)


@pytest.mark.parametrize(
    'make_model',
    [
        pytest.param(one_layer_model, id='dense'),
        pytest.param(partial(mixture_of_experts, output_router_logits=False), id='no router logits'),
        pytest.param(partial(NativeModel, 'causal'), id='other class'),
    ],
)
def test_model_without_router_loss_is_refused(make_model):
    model = make_model()
    batch = ragged_batch(ONE_UNLABELLED)
    with pytest.raises(RuntimeError, match=r'router_aux_loss_coef|output_router_logits=True'):
        fit(model, batch, router_balance='step')


@pytest.mark.parametrize('container', [tuple, torch.stack])
def test_logits_of_stacked_layers(container):
    """A model may return one tensor for all layers in place of a tuple."""
    positions = torch.randn(10, 4)
    layer = positions.view(2, 5, 4)  # (rows, width, experts)
    outputs = {'router_logits': container([layer, -layer])}
    logits_of_layers = router_balance._router_logits(outputs)
    torch.testing.assert_close(logits_of_layers, [positions, -positions], rtol=0, atol=0)


def test_logits_of_no_layers():
    outputs = {'router_logits': ()}
    assert router_balance._router_logits(outputs) == []


def test_stock_loader_is_refused():
    data = loader(ragged_batch(ONE_UNLABELLED))
    with pytest.raises(RuntimeError, match=r'Use token_data_spec\(\)'):
        fit(mixture_of_experts(), data, router_balance='step')


def test_token_weights_leave_the_routers_term():
    # Each sample has the same number of labels, so the weighted mean is the plain one.
    batch = ragged_batch([(8, 4)] * 4 + [(12, 4)] * 2)
    assert_exact(mixture_of_experts(), batch, token_weights='sample', router_balance='step')


@pytest.mark.slow
def test_compiled_forward_is_exact():
    batch = ragged_batch(ONE_UNLABELLED)
    assert_exact(mixture_of_experts(), batch, router_balance='step', compile_config={'backend': 'aot_eager'})


@pytest.mark.parametrize('next_length', [6, 1])
def test_label_on_padding_counts_no_position(next_length):
    """A packed row keeps the padding position. With a next row of one token, its real tokens would end at an edge."""
    batch = ragged_batch([(4, 3), (next_length, 0), (8, 4), (8, 4)])
    batch['labels'][0, 4] = 5  # behind the last token, which predicts it
    assert_exact(mixture_of_experts(), batch, router_balance='step', packing=True, microbatch_size=2)


def test_dummy_row_and_padding_are_not_counted():
    """A packed row of 4 tokens with a label behind them, 2 tokens, and a dummy row of 5."""
    batch = ragged_batch([(4, 3), (2, 1), (5, 2)])
    batch['labels'][0, 4] = 5
    first, second, _ = row_counts_of(with_counts(batch))
    dummy = RowCounts(samples=0, rule=LossRule.CAUSAL)
    batch = attach_row_counts(batch, [first, second, dummy])
    layout = BatchLayout.for_model(one_layer_model())
    packed = pack_rows(layout, batch, text_attention())
    assert 'attention_mask' in packed, 'documents are told by masks'

    expected = [True] * 4 + [False] + [True] * 2 + [False] * 5
    assert counted_positions(packed).tolist() == [expected]
    del packed['attention_mask']
    assert counted_positions(packed).tolist() == [expected], 'documents are told by positions'


def test_empty_repeated_sample_is_no_document():
    """A packed row of 4 and 5 tokens. A repeated sample between them has no token."""
    batch = ragged_batch([(4, 3), (2, 1), (5, 2)])
    batch['attention_mask'][1] = 0
    batch['labels'][1] = IGNORE_INDEX
    repeated = RowCounts(samples=0)
    batch = with_counts(attach_row_counts(batch, [RowCounts(), repeated, RowCounts()]))
    packed = pack_rows(BatchLayout.for_model(one_layer_model()), batch, text_attention())
    assert counted_positions(packed).tolist() == [[True] * 9]


def balance_of(model):
    """Returns the StepBalance of a run on the CPU in full precision."""
    return StepBalance(
        state=SimpleNamespace(model=model, device=DeviceCPU(), auto_microbatching=False),
        split=token_data_spec(loader()).split_batch,
        terms=LossTerms(None, COEFFICIENT),
        to_device=lambda batch: batch,
        precision=nullcontext,
    )


def test_first_microbatch_without_tokens():
    """Its loss is NaN, so it does not show how many experts a position has."""
    model = hugging_face(mixture_of_experts())
    balance = balance_of(model)
    batch = with_counts(ragged_batch([(6, 4)]))
    empty_mask = torch.zeros_like(batch['attention_mask'])
    empty = {**batch, 'attention_mask': empty_mask}
    balance.count([empty], is_weighted=False)
    balance.count([batch], is_weighted=False)
    balance.check()


ANY_LOSS = SplitLoss(tokens=torch.tensor(1.0), router=torch.tensor(1.0))


class OneRouter(torch.nn.Module):
    """The outputs of a mixture of four experts with one router, which chooses one expert for each position."""

    def __init__(self, num_positions):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(num_positions, 4, generator=generator)

    def forward(self, batch):
        router_logits = (self.logits,)
        aux_loss = load_balancing_loss_func(router_logits, num_experts=4, top_k=1)
        return {'router_logits': router_logits, 'aux_loss': aux_loss}


def test_nothing_waits_for_the_count():
    """The first training forward is queued while the device still counts. Only the first count of a run is read."""
    batch = with_counts(ragged_batch([(6, 4)]))
    model = OneRouter(6)
    balance = balance_of(model)
    balance.count([batch], is_weighted=False)
    outputs = model(batch)
    calls = []
    count_again = without_waiting(balance.count, calls, 'count')
    add_part_of_step = without_waiting(balance.with_part_of_step, calls, 'part')

    count_again([batch], is_weighted=False)
    add_part_of_step(ANY_LOSS, outputs, num_microbatches=1)

    assert calls == ['count', 'part']


@pytest.mark.parametrize(('num_changed', 'is_refused'), [(3, False), (5, True)])
def test_few_choices_may_change(num_changed, is_refused):
    """Between the count and training, 1 of 1,000 choices may change by rounding."""
    batch = with_counts(ragged_batch([(1000, 1)] * 4))
    model = OneRouter(4000)
    balance = balance_of(model)
    balance.count([batch], is_weighted=False)

    # In training, some positions choose the second expert in place of the first one.
    logits = model.logits.clone()
    experts = logits.argmax(dim=1)
    positions_of_first_expert = (experts == 0).nonzero().flatten()
    changed_positions = positions_of_first_expert[:num_changed]
    logits[changed_positions, 1] = 100.0
    outputs = {'router_logits': (logits,)}
    balance.with_part_of_step(ANY_LOSS, outputs, num_microbatches=1)

    expectation = nullcontext()
    if is_refused:
        expectation = pytest.raises(RuntimeError, match='more choices differ')
    with expectation:
        balance.check()


def test_users_column_reaches_the_model():
    """Without token weights, a column `loss_weights` is the user's. A model may need it."""
    model = hugging_face(mixture_of_experts())
    forward = model.forward
    has_column = []

    def forward_with_column(batch):
        has_column.append('loss_weights' in batch)
        return forward(batch)

    model.forward = forward_with_column
    batch = ragged_batch(ONE_UNLABELLED)
    batch['loss_weights'] = torch.ones(len(ONE_UNLABELLED))

    fit(model, batch, router_balance='step')

    assert has_column
    assert all(has_column)
