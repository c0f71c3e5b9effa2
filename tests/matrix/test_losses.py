# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Losses other than the own loss of a family: exact, or refused with a cause and a remedy."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from itertools import product
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from composer_tokacc import TokenAccumulation
from tests.matrix.harness import measure
from tests.matrix.native_models import (
    LLAMA,
    LOSSES,
    MEANS_OVER_TOKENS,
    NativeModel,
    Terms,
    by_row,
    by_token,
    causal,
    has_loss,
    squares,
)
from tests.matrix.subjects import SUBJECTS, has_labels
from tests.support.text import ragged_batch
from tests.support.training import COMPOSERS_FLAG, fit, loader

# One row without loss tokens, one whose label at position 0 only an unshifted loss counts.
SHAPE = [(4, 2), (9, 0), (5, 5), (14, 11), (6, 1), (3, 2)]
LABELLED = [(4, 2), (9, 3), (5, 4), (14, 11), (6, 1), (3, 2)]


def outcome_of(model, *, rows=LABELLED, microbatch_size=2, side='right', **options):
    """Returns the outcome of a step on rows of text. Takes the options of :func:`.measure_steps`."""
    batch = ragged_batch(rows, side=side)
    return measure(model, batch, microbatch_size, **options)


@pytest.mark.parametrize(
    ('logits', 'init', 'microbatch_size'),
    [
        ('always', 'large', 1),
        ('eval', 'fresh', 2),
        ('never', 'large', 2),
    ],
)
@pytest.mark.parametrize('loss', LOSSES)
def test_loss_is_exact_or_refused(loss, logits, init, microbatch_size):
    model = NativeModel(loss, logits=logits, init=init)

    outcome = outcome_of(model, rows=SHAPE, microbatch_size=microbatch_size)

    assert outcome.kind in ('exact', 'refused'), outcome
    if loss in ('causal', 'unshifted', 'fused'):
        assert outcome.kind == 'exact', outcome
    if loss in ('all positions', 'per row'):
        assert outcome.kind == 'refused', outcome
        assert 'times as much' in outcome.message


@pytest.mark.parametrize('loss', MEANS_OVER_TOKENS)
def test_explicit_rule_of_token_means(loss):
    rule = 'unshifted' if loss == 'unshifted' else 'causal'
    algorithm = TokenAccumulation(loss_tokens=rule, check_loss=False)
    model = NativeModel(loss, logits='never')

    outcome = outcome_of(model, rows=SHAPE, algorithms=[algorithm])

    assert outcome.kind == 'exact', outcome


def test_flag_without_logits():
    """Composer's own flag counts the first labels of an unshifted loss, too."""
    model = NativeModel('unshifted', logits='never')
    batch = SUBJECTS['llama'].batch(0, side='right')
    batch['labels'][:, 0] = batch['input_ids'][:, 0]

    outcome = measure(
        model,
        batch,
        2,
        model=model,
        algorithms=[],
        trainer_options=COMPOSERS_FLAG,
    )

    assert outcome.kind == 'exact', outcome


def test_empty_microbatches_of_fused_loss():
    """A microbatch is one row. At least two rows of each batch have no labels."""
    model = NativeModel('fused', logits='never')
    num_batches = 0
    for seed in range(5):
        batch = SUBJECTS['llama'].batch(seed, side='right')
        num_rows = len(batch['labels'])
        empty_rows = random.Random(seed).sample(range(num_rows), 2)
        batch['labels'][empty_rows] = -100
        if has_labels(batch):
            outcome = measure(model, batch, 1)
            assert outcome.kind == 'exact', outcome
            num_batches += 1

    assert num_batches > 2


# Losses that differ in training, and losses of several terms.


def sum_in_training(losses, counted, training):
    if training:
        return losses.sum()
    return by_token(losses, counted)


def mean_of_rows_in_training(losses, counted, training):
    if training:
        return by_row(losses, counted)
    return by_token(losses, counted)


def variance_in_training(losses, counted, training):
    loss = by_token(losses, counted)
    if training:
        means_of_rows = losses.mean(dim=1)
        loss = loss + means_of_rows.var(unbiased=False)
    return loss


@pytest.mark.parametrize('loss', [sum_in_training, mean_of_rows_in_training, variance_in_training])
def test_other_loss_in_training_is_refused(loss):
    outcome = outcome_of(Terms(loss))
    assert outcome.kind == 'refused'


def test_dropout_hides_no_training_loss():
    def loss(losses, counted, training):
        losses = F.dropout(losses, 0.0, training)
        return mean_of_rows_in_training(losses, counted, training)

    model = Terms(loss)
    model.model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.1), model.model.lm_head)

    outcome = outcome_of(model)

    assert outcome.kind == 'refused'


def rows_in_tuple(losses, counted, training):
    return by_token(losses, counted), by_row(losses, counted)


def rows_in_total(losses, counted, training):
    mean_of_tokens = by_token(losses, counted)
    mean_of_rows = by_row(losses, counted)
    return {'lm': mean_of_tokens, 'total': mean_of_tokens + mean_of_rows}


def rows_as_term(losses, counted, training):
    return {'lm': by_token(losses, counted), 'other': by_row(losses, counted)}


def squares_as_term(losses, counted, training):
    return {'lm': by_token(losses, counted), 'other': squares(losses, counted)}


@pytest.mark.parametrize(
    ('loss', 'units'),
    [
        (rows_in_tuple, None),
        (rows_in_total, None),
        (rows_in_total, {'lm': 'tokens'}),
        (rows_as_term, {'lm': 'tokens', 'other': 'tokens'}),
        (squares_as_term, {'lm': 'tokens', 'other': 'samples'}),
    ],
)
def test_terms_of_another_unit_are_refused(loss, units):
    algorithm = TokenAccumulation(loss_units=units)
    outcome = outcome_of(Terms(loss), algorithms=[algorithm])
    assert outcome.kind == 'refused'


# Small terms in a model's own loss: refused if they are over other positions than its loss tokens.


def entropy(logits, labels):
    probabilities = logits.softmax(dim=-1)
    log_probabilities = logits.log_softmax(dim=-1)
    return -(probabilities * log_probabilities).sum(dim=-1)


def z_loss(logits, labels):
    return logits.logsumexp(dim=-1).square()


def uniform(logits, labels):
    """Returns the term of label smoothing for each position."""
    return -logits.log_softmax(dim=-1).mean(dim=-1)


def of_reference(logits, labels):
    """Returns the distance to the probabilities of a frozen model."""
    vocabulary = logits.shape[-1]
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(vocabulary, generator=generator).log_softmax(dim=-1)
    differences = reference - logits.log_softmax(dim=-1)
    return (reference.exp() * differences).sum(dim=-1)


def square(logits, labels):
    return logits.square().mean(dim=-1)


TERMS = {
    'entropy': entropy,
    'z-loss': z_loss,
    'smoothing': uniform,
    'reference': of_reference,
    'square': square,
}


# Means of such values over some positions.


def over_all(values, labels):
    return values.mean()


def over_padding(values, labels):
    """Returns the mean over the positions without a label, or 0."""
    is_unlabelled = ~has_loss(labels)
    values_on_padding = values[:, 1:][is_unlabelled]
    return values_on_padding.mean().nan_to_num()


def over_rows(values, labels):
    """Returns the mean of the means of the rows over their loss tokens."""
    counted = has_loss(labels)
    counted_values = values[:, :-1] * counted
    return by_row(counted_values, counted)


def over_tokens(values, labels):
    """Returns the mean over the loss tokens."""
    counted = has_loss(labels)
    counted_values = values[:, :-1] * counted
    return by_token(counted_values, counted)


def with_term(term: str, over: Callable[..., torch.Tensor], weight: float) -> Callable[..., torch.Tensor]:
    """Returns a causal loss with a term.

    Args:
        term: A key of :data:`TERMS`.
        over: ``over(values, labels)`` returns the mean of the term over some positions.
        weight: The weight of the term.
    """

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = TERMS[term](logits, labels)
        return causal(logits, labels) + weight * over(values, labels)

    return loss


def share_of_term(model, term, over, weight):
    """Returns the size of the gradient of the term by the logits, divided by the size without the term."""
    batch = ragged_batch(LABELLED)
    labels = batch['labels']
    logits = model.logits_of(batch).detach().requires_grad_()
    values = TERMS[term](logits, labels)
    mean_of_term = over(values, labels)
    (gradient_of_term,) = torch.autograd.grad(weight * mean_of_term, logits)
    (gradient_of_loss,) = torch.autograd.grad(causal(logits, labels), logits)
    return float(gradient_of_term.norm() / gradient_of_loss.norm())


SMALL_WEIGHT = 1e-4


@pytest.mark.parametrize('over', [over_all, over_padding, over_rows])
@pytest.mark.parametrize(('term', 'init'), [*product(TERMS, ['fresh']), ('entropy', 'large')])
def test_small_term_elsewhere_is_refused(term, over, init):
    model = NativeModel(with_term(term, over, SMALL_WEIGHT), init=init)

    outcome = outcome_of(model)

    # A smaller share is less than the promised exactness, so it may be refused or not.
    if share_of_term(model, term, over, SMALL_WEIGHT) > 3e-6:
        assert outcome.kind == 'refused', outcome
    else:
        assert outcome.kind == 'refused' or outcome.error < 5e-6, outcome


@pytest.mark.parametrize('over', [over_all, over_padding, over_rows])
@pytest.mark.parametrize('term', ['entropy', 'smoothing', 'square'])
def test_larger_term_elsewhere_is_refused(term, over):
    """With the small weight the share of these terms is too small to be refused for certain."""
    model = NativeModel(with_term(term, over, 1e-2), init='fresh')
    outcome = outcome_of(model)
    assert outcome.kind == 'refused'


@pytest.mark.parametrize('term', TERMS)
def test_term_over_loss_tokens_is_exact(term):
    model = NativeModel(with_term(term, over_tokens, 1.0), init='fresh')
    outcome = outcome_of(model)
    assert outcome.kind == 'exact', outcome


terms_and_kinds = pytest.mark.parametrize(
    ('over', 'kind'),
    [
        (over_all, 'refused'),
        (over_rows, 'refused'),
        (over_tokens, 'exact'),
    ],
)
NEARLY_AS_MANY_LABELS = [(12, 9), (11, 9), (12, 10), (10, 9)]


@pytest.mark.parametrize(
    ('rows', 'side'),
    [
        pytest.param([(14, 8)], 'right', id='one row'),
        pytest.param([(9, 8), (9, 4), (9, 7), (9, 2)], 'right', id='no padding'),
        pytest.param([(9, 8)] * 4, 'right', id='all labelled'),
        pytest.param(NEARLY_AS_MANY_LABELS, 'right', id='nearly as many labels'),
        pytest.param(NEARLY_AS_MANY_LABELS, 'left', id='nearly as many labels, padded on the left'),
    ],
)
@terms_and_kinds
def test_whatever_the_first_batch_is_like(over, kind, rows, side):
    loss = with_term('entropy', over, 1e-3)
    outcome = outcome_of(NativeModel(loss), rows=rows, side=side)
    assert outcome.kind == kind, outcome


@pytest.mark.parametrize('logits', ['eval', 'never'])
@pytest.mark.parametrize('init', ['large', 'fresh'])
@terms_and_kinds
def test_terms_of_loss_without_logits(over, kind, logits, init):
    """Without logits the loss has the round-off of all layers, which may hide a term below a thousandth of it."""
    loss = with_term('entropy', over, 1e-2)
    model = NativeModel(loss, logits=logits, init=init)
    outcome = outcome_of(model)
    assert outcome.kind == kind, outcome


def in_forward(term: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    """Returns a Hugging Face model that adds ``term(outputs, labels)`` to its loss."""
    model = LLAMA.model('fresh')
    plain_forward = model.model.forward

    def forward(self, *args: Any, labels: torch.Tensor, **kwargs: Any) -> Any:
        outputs = plain_forward(*args, labels=labels, **kwargs)
        outputs['loss'] = outputs.loss + term(outputs, labels)
        return outputs

    # So that `inspect.signature` still shows the arguments of the plain forward.
    functools.update_wrapper(forward, plain_forward.__func__)
    model.model.forward = MethodType(forward, model.model)
    return model


@pytest.mark.parametrize(
    'options',
    [
        pytest.param({}, id='padded'),
        pytest.param({'regroup': False}, id='in order'),
        pytest.param({'packing': True}, id='packed'),
    ],
)
@pytest.mark.parametrize(
    ('over', 'kind'),
    [
        (over_all, 'refused'),
        (over_tokens, 'exact'),
    ],
)
def test_term_in_hugging_face_forward(over, kind, options):
    def term(outputs, labels):
        values = entropy(outputs.logits, labels)
        return 1e-3 * over(values, labels)

    outcome = outcome_of(in_forward(term), **options)

    assert outcome.kind == kind


@pytest.mark.parametrize(
    ('over', 'kind'),
    [
        (over_all, 'refused'),
        (over_tokens, 'exact'),
    ],
)
def test_size_of_last_states(over, kind):
    """After a norm they have the same size in all rows, until the weights of the norm are trained."""

    class WithSize(NativeModel):
        def forward(self, batch):
            labels = batch['labels']
            states = self.states_of(batch)
            logits = self.model.lm_head(states)
            sizes = states.square().mean(dim=-1)
            loss = causal(logits, labels) + 1e-3 * over(sizes, labels)
            return {'loss': loss, 'logits': logits}

    model = WithSize('causal', init='fresh')
    outcome = outcome_of(model)
    assert outcome.kind == kind


def without_value(value):
    """Returns 0 with the gradient of the value."""
    return value - value.detach()


def hidden_entropy_over_all(logits, labels):
    values = entropy(logits, labels)
    return without_value(1e-3 * over_all(values, labels))


def hidden_entropy_over_tokens(logits, labels):
    values = entropy(logits, labels)
    return without_value(1e-3 * over_tokens(values, labels))


def hidden_factor_of_rows(logits, labels):
    """Returns a term that multiplies the gradient of the causal loss by the number of rows."""
    num_rows = len(logits)
    return without_value(causal(logits, labels)) * (num_rows - 1)


def hidden_factor(logits, labels):
    """Returns a term that multiplies the gradient of the causal loss by eight."""
    return without_value(causal(logits, labels)) * 7


@pytest.mark.parametrize('packing', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize(
    ('hidden_term', 'kind'),
    [
        pytest.param(hidden_entropy_over_all, 'refused', id='term over all'),
        pytest.param(hidden_entropy_over_tokens, 'exact', id='term over tokens'),
        pytest.param(hidden_factor_of_rows, 'refused', id='times rows'),
        pytest.param(hidden_factor, 'exact', id='times eight'),
    ],
)
def test_gradient_of_another_loss(hidden_term, kind, packing):
    """The value of the loss is the causal one. Its gradient is not."""

    def term(outputs, labels):
        return hidden_term(outputs.logits, labels)

    outcome = outcome_of(in_forward(term), packing=packing)

    assert outcome.kind == kind


class RandomTerm(NativeModel):
    """Has a dropout, and a term only in training."""

    def __init__(self, over):
        super().__init__('causal')
        self.over = over

    def forward(self, batch):
        labels = batch['labels']
        logits = F.dropout(self.logits_of(batch), 0.1, self.training)
        loss = causal(logits, labels)
        if self.training:
            values = entropy(logits, labels)
            loss = loss + 1e-3 * self.over(values, labels)
        return {'loss': loss, 'logits': logits}


def test_random_term_in_training():
    batch = ragged_batch(LABELLED)

    recorder = fit(RandomTerm(over_tokens), loader(batch))
    assert recorder.gradients

    with pytest.raises(RuntimeError, match='a mean over other positions in the loss'):
        fit(RandomTerm(over_all), loader(batch))


@pytest.mark.parametrize('place', ['forward', 'loss'])
def test_model_pops_labels_from_batch(place):
    class Popping(NativeModel):
        def forward(self, batch: Any):
            outputs = {'logits': self.logits_of(batch)}
            if place == 'forward':
                labels = batch.pop('labels')
                outputs['loss'] = causal(outputs['logits'], labels)
            return outputs

        def loss(self, outputs, batch):
            if place == 'forward':
                return outputs['loss']
            labels = batch.pop('labels')
            return causal(outputs['logits'], labels)

    outcome = outcome_of(Popping('causal'))

    assert outcome.kind == 'exact'


@pytest.mark.parametrize('over', ['columns', 'tokens of each row'])
def test_term_of_samples_keeps_padding(over):
    class TwoTerms(NativeModel):
        def loss(self, outputs, batch):
            values = entropy(outputs['logits'], None)
            mask = batch['attention_mask']
            if over == 'columns':
                mask = torch.ones_like(mask)
            sums_of_rows = (values * mask).sum(dim=1)
            means_of_rows = sums_of_rows / mask.sum(dim=1)
            plain_loss = causal(outputs['logits'], batch['labels'])
            return {'lm': plain_loss, 'entropy': 1e-3 * means_of_rows.mean()}

    model = TwoTerms('causal', init='fresh')
    algorithm = TokenAccumulation(loss_units={'lm': 'tokens', 'entropy': 'samples'})

    outcome = outcome_of(model, algorithms=[algorithm])

    assert outcome.kind == 'exact', outcome


def test_penalty_on_weights_is_exact():
    def penalty(outputs, labels):
        return 1e-3 * model.model.lm_head.weight.square().sum()

    model = in_forward(penalty)
    outcome = outcome_of(model)
    assert outcome.kind == 'exact'


def test_rule_in_half_precision():
    """A loss that is rounded to bfloat16 is near the means by several rules."""
    subject = SUBJECTS['bert']
    for seed in range(2):
        model = subject.model('fresh').to(torch.bfloat16)
        batch = subject.batch(seed, side='right')
        algorithm = TokenAccumulation()

        fit(model, batch, algorithms=[algorithm])

        assert algorithm.rule == 'unshifted', seed


# BERT in bfloat16 is above. The kernel of Mixtral's experts takes no float64 on torch 2.15.
@pytest.mark.parametrize(
    ('family', 'dtype'),
    [
        ('llama', torch.bfloat16),
        ('llama', torch.float64),
        ('t5', torch.bfloat16),
        ('t5', torch.float64),
        ('bert', torch.float64),
        ('gpt2', torch.bfloat16),
        ('mixtral', torch.bfloat16),
    ],
)
def test_healthy_weights_of_other_precision(family, dtype):
    subject = SUBJECTS[family]
    model = subject.model('fresh').to(dtype)
    batch = subject.batch(0, side='right')

    recorder = fit(model, batch)

    assert recorder.gradients


@pytest.mark.parametrize('num_terms', [1, 2])
def test_reference_without_gradients(num_terms):
    """A reference that is still equal to the model, as with a new adapter, has only round-off as its gradient."""

    class WithReference(NativeModel):
        def loss(self, outputs, batch):
            has_label = batch['labels'] != -100
            loss = outputs['loss']
            for _ in range(num_terms):
                with torch.no_grad():
                    reference_logits = self.logits_of(batch)[has_label]
                logits = outputs['logits'][has_label]
                divergence = F.kl_div(
                    logits.log_softmax(dim=-1),
                    reference_logits.softmax(dim=-1),
                    reduction='batchmean',
                )
                loss = loss + divergence
            return loss

    model = WithReference('unshifted')

    outcome = outcome_of(model, rows=SHAPE)

    assert outcome.kind == 'exact', outcome
