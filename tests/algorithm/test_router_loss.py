# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Mixtures of experts that add the load-balancing loss of their router to the loss that they return.

The mean over tokens must be exact. The router's term must be the mean of the router losses of the microbatches, which
are computed here one by one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from composer.callbacks import NaNMonitor
from composer.core import Callback, DataSpec, Event

from composer_tokacc import token_data_spec
from composer_tokacc.algorithm.loss_terms import LossTerms
from composer_tokacc.row_counts import num_samples
from tests.matrix.harness import measure
from tests.matrix.native_models import NativeModel
from tests.matrix.subjects import SUBJECTS
from tests.support.text import ONE_UNLABELLED, ragged_batch
from tests.support.training import On, fit, gradients_of, in_double, loader, relative_error
from tests.support.weights import weighted_losses


def subject_with_router(name, coefficient):
    """Returns a mixture of experts of the matrix that adds the load-balancing loss of its router to its loss."""
    model = SUBJECTS[name].model('large')
    model.model.config.update({'output_router_logits': True, 'router_aux_loss_coef': coefficient})
    model.model.router_aux_loss_coef = coefficient
    return model


class Microbatches(Callback):
    """Keeps the microbatches with samples, and the loss that callbacks see at the end of a batch."""

    def __init__(self):
        self.inputs = []
        self.loss = None

    def before_backward(self, state, logger):
        if num_samples(state.batch) == 0:
            return
        inputs = {}
        for key in ('input_ids', 'attention_mask', 'position_ids'):
            if key in state.batch:
                inputs[key] = state.batch[key].clone()
        self.inputs.append(inputs)

    def batch_end(self, state, logger):
        self.loss = state.loss


def expected_step(model, batch, microbatches_of_ranks, token_weights='token'):
    """Computes a step in float64: one forward over the batch for the tokens, one of each microbatch for the router.

    The router's term is averaged over the microbatches of a rank, and then over the ranks.

    Returns:
        The gradients, the weighted mean over the tokens, and the router's term.
    """
    reference = in_double(model.model)
    reference.zero_grad(set_to_none=True)
    outputs = reference(
        input_ids=batch['input_ids'],
        attention_mask=batch['attention_mask'],
        use_cache=False,
    )
    mean_over_tokens, _ = weighted_losses(outputs.logits, batch, token_weights)
    means_of_ranks = []
    for microbatches in microbatches_of_ranks:
        router_losses = []
        for microbatch in microbatches:
            outputs = reference(**microbatch, use_cache=False)
            router_losses.append(outputs.aux_loss)
        mean_of_rank = torch.stack(router_losses).mean()
        means_of_ranks.append(mean_of_rank)
    mean_over_ranks = torch.stack(means_of_ranks).mean()
    router_term = reference.config.router_aux_loss_coef * mean_over_ranks
    gradients = gradients_of(reference, mean_over_tokens + router_term)
    return gradients, mean_over_tokens.item(), router_term.item()


def split_in_order(data):
    return token_data_spec(data, regroup=False)


@pytest.mark.parametrize(
    ('subject', 'coefficient', 'microbatch_size', 'make_spec', 'token_weights'),
    [
        ('mixtral', 0.1, 1, DataSpec, 'token'),
        ('mixtral', 0.1, 2, token_data_spec, 'token'),
        ('mixtral', 0.001, 2, token_data_spec, 'sqrt'),
        ('qwen3_moe', 0.1, 3, split_in_order, 'token'),
        ('qwen3_moe', 1.0, 6, DataSpec, 'sqrt'),
    ],
)
def test_routers_of_microbatches_weigh_the_same(subject, coefficient, microbatch_size, make_spec, token_weights):
    model = subject_with_router(subject, coefficient)
    batch = ragged_batch(ONE_UNLABELLED)
    microbatches = Microbatches()

    recorder = fit(
        model,
        make_spec(loader(batch)),
        callbacks=[NaNMonitor(), microbatches],
        token_weights=token_weights,
        microbatch_size=microbatch_size,
    )

    expected, mean_over_tokens, router_term = expected_step(model, batch, [microbatches.inputs], token_weights)
    assert relative_error(recorder.gradients, expected) < 1e-6
    assert_logged(recorder, 'tokens', mean_over_tokens)
    assert_logged(recorder, 'router', router_term)
    assert_logged(recorder, 'total', mean_over_tokens + router_term)
    assert isinstance(microbatches.loss, torch.Tensor)


def assert_logged(recorder, term, expected):
    """Compares the logged value of a term of a run of one step."""
    logged = recorder.logged(f'loss/train/{term}')
    assert logged == pytest.approx([expected], rel=1e-6)


def test_row_of_padding_is_a_microbatch_without_router_loss():
    """The model's own router loss of such a microbatch is 0 / 0. It counts as a microbatch whose router loss is 0."""
    model = subject_with_router('mixtral', 0.6)
    batch = ragged_batch(ONE_UNLABELLED)
    batch['attention_mask'][1] = 0
    microbatches = Microbatches()

    recorder = fit(model, loader(batch), callbacks=[microbatches], microbatch_size=1)

    microbatches_with_tokens = []
    for inputs in microbatches.inputs:
        if inputs['attention_mask'].any():
            microbatches_with_tokens.append(inputs)
    assert len(microbatches.inputs) == 6
    assert len(microbatches_with_tokens) == 5
    # The reference averages over the five microbatches with tokens.
    model.model.config.router_aux_loss_coef = 0.6 * 5 / 6
    expected, _, router_term = expected_step(model, batch, [microbatches_with_tokens])
    assert relative_error(recorder.gradients, expected) < 1e-6
    assert_logged(recorder, 'router', router_term)


def test_warning_that_router_depends_on_cut(caplog):
    """Once, also if each step is one microbatch, because the rows of a step are on several ranks."""
    model = subject_with_router('mixtral', 0.01)
    batch = ragged_batch(ONE_UNLABELLED)
    fit(model, batch, batch, microbatch_size=6)
    assert caplog.text.count('depends on how the batch is cut') == 1


def replace_coefficient(model, coefficient, other_coefficient):
    """Lets the model add its load-balancing loss with another coefficient than its config says."""
    forward = model.model.forward
    difference = other_coefficient - coefficient

    def changed(**inputs):
        outputs = forward(**inputs)
        outputs.loss = outputs.loss + difference * outputs.aux_loss
        return outputs

    model.model.forward = changed


def test_model_with_other_coefficient_than_config():
    """The model's own coefficient counts. If its loss has another one, the run is refused."""
    model = subject_with_router('mixtral', 0.1)
    batch = ragged_batch(ONE_UNLABELLED)
    model.model.router_aux_loss_coef = 0.3
    fit(model, batch)

    replace_coefficient(model, 0.3, 0.1)
    with pytest.raises(RuntimeError, match='router'):
        fit(model, batch)


def test_router_loss_that_is_not_added():
    model = subject_with_router('mixtral', 1e-9)
    replace_coefficient(model, 1e-9, 0.0)
    batch = ragged_batch(ONE_UNLABELLED)
    with pytest.raises(RuntimeError, match=r'must add its load-balancing loss times 1e-09.* got: times 0'):
        fit(model, batch)


@pytest.mark.parametrize(
    ('dtype', 'is_copied', 'num_elements'),
    [
        (torch.float32, False, 1),
        (torch.float32, False, 2),
        (torch.float16, False, 1),
        (torch.bfloat16, False, 1),
        (torch.bfloat16, True, 1),
    ],
)
def test_coefficient_is_measured(dtype, is_copied, num_elements):
    """Autograd rounds it to the type of the router's loss, before a copy. One that is 10 % off is still refused."""
    router_loss = 2 * torch.tensor(1.25, requires_grad=True, dtype=dtype)
    if is_copied:
        router_loss = router_loss.float()
    outputs = {'aux_loss': router_loss}
    terms = LossTerms(None, 0.001)

    def loss_with(coefficient):
        """Returns a loss with the router's loss times a coefficient, as ``num_elements`` equal elements."""
        loss = torch.tensor(2.0) + coefficient * router_loss
        return loss.expand(num_elements)

    terms.check_coefficient(loss_with(0.001), outputs)
    with pytest.raises(RuntimeError, match='load-balancing loss times'):
        terms.check_coefficient(loss_with(0.0011), outputs)


def test_router_loss_without_parameters():
    """A model without a layer of experts may return it. It changes no weight, so its coefficient is not checked."""
    router_loss = torch.tensor(0.0, requires_grad=True)
    loss = torch.tensor(2.0) + 0.3 * router_loss
    terms = LossTerms(None, 0.001)
    terms.check_coefficient(loss, {'aux_loss': router_loss})


class WithUnnamedCoefficient(NativeModel):
    """Adds a load-balancing loss with a coefficient that is neither in a config nor in the model."""

    def __init__(self):
        super().__init__('causal')
        del self.model.config

    def forward(self, batch):
        outputs = super().forward(batch)
        probabilities = outputs['logits'].softmax(dim=-1)
        mean_probabilities = probabilities.mean(dim=(0, 1))
        aux_loss = mean_probabilities.square().sum()
        total = outputs['loss'] + 0.1 * aux_loss
        return {**outputs, 'aux_loss': aux_loss, 'loss': total}


def test_unnamed_coefficient_is_refused():
    batch = ragged_batch(ONE_UNLABELLED)
    outcome = measure(WithUnnamedCoefficient(), batch, 2)
    assert outcome.kind == 'refused', outcome
    assert 'router_aux_loss_coef' in outcome.message

    outcome_without_router = measure(NativeModel('causal'), batch, 2)
    assert outcome_without_router.kind == 'exact'


class WithEarlyRouter(NativeModel):
    """Its load-balancing loss is made of the embeddings, so that its gradient does not pass the last layers."""

    def forward(self, batch):
        outputs = super().forward(batch)
        embed = self.model.get_input_embeddings()
        embeddings = embed(batch['input_ids'])
        aux_loss = embeddings.square().mean()
        total = outputs['loss'] + 0.1 * aux_loss
        return {**outputs, 'aux_loss': aux_loss, 'loss': total}


def test_wrong_coefficient_is_refused_unchecked():
    """The split of the loss would be wrong, so the coefficient is checked even if the loss is not."""
    model = WithEarlyRouter('causal')
    options = {'check_loss': False, 'loss_tokens': 'causal'}

    model.model.router_aux_loss_coef = 0.1
    recorder = fit(model, ragged_batch(), **options)
    assert len(recorder.steps) == 1

    model.model.router_aux_loss_coef = 0.2
    with pytest.raises(RuntimeError, match='load-balancing loss times'):
        fit(model, ragged_batch(), **options)


@pytest.mark.parametrize('use_reentrant', [True, False])
def test_router_loss_without_gradient_is_named(use_reentrant, caplog):
    """Transformers collects the router's logits in the first forward of a reentrant checkpoint, which has no graph."""
    model = subject_with_router('qwen3_moe', 0.1)
    model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': use_reentrant})
    model.model.enable_input_require_grads()
    model.model.train()

    fit(model, ragged_batch(), ragged_batch())

    lines = [line for line in caplog.messages if 'has no gradient, so it changes no weight' in line]
    assert len(lines) == int(use_reentrant)


@pytest.mark.parametrize('type_of_number', [float, np.float32, torch.tensor])
def test_coefficient_of_a_schedule(type_of_number):
    """The coefficient changes between the steps that check it, which are 0, 1, 2 and 4."""
    model = subject_with_router('mixtral', 0.5)
    batch = ragged_batch()
    microbatches = Microbatches()

    def anneal(state):
        if state.timestamp.batch == 3:
            model.model.router_aux_loss_coef = type_of_number(0.05)
            microbatches.inputs.clear()

    four_batches = [batch] * 4
    callbacks = [On(Event.BATCH_START, anneal), microbatches]
    recorder = fit(model, *four_batches, callbacks=callbacks, microbatch_size=1)

    model.model.config.update({'router_aux_loss_coef': 0.05})  # for the reference
    expected, _, _ = expected_step(model, batch, [microbatches.inputs])
    assert relative_error(recorder.gradients, expected) < 1e-6
