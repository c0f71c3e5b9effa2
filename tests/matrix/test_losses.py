# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Losses other than the family's own: exact, or refused with a cause and a remedy."""

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
from tests.matrix.harness import kinds_of_steps, measure, plain_gradients
from tests.matrix.native_models import LOSSES, NativeModel, Terms, by_row, by_token, causal, squares
from tests.matrix.subjects import SUBJECTS
from tests.support.text import collate, text_rows
from tests.support.training import fit, loader, relative_error

# One row without loss tokens, one whose label at position 0 only an unshifted loss counts.
SHAPE = [(4, 2), (9, 0), (5, 5), (14, 11), (6, 1), (3, 2)]
LABELLED = [(4, 2), (9, 3), (5, 4), (14, 11), (6, 1), (3, 2)]
MEANS_OVER_TOKENS = ('causal', 'unshifted', 'fused', 'label smoothing', 'z-loss')


@pytest.fixture(scope='module')
def batch():
    return collate(text_rows(SHAPE))


def test_oracle_tells_the_losses_apart(batch):
    """Were two of them the same on this batch, the wrong rule would pass."""
    causal = plain_gradients(NativeModel('causal'), batch)
    for name in ('unshifted', 'all positions', 'per row', 'label smoothing', 'z-loss'):
        assert relative_error(plain_gradients(NativeModel(name), batch), causal) > 1e-3, name


@pytest.mark.parametrize(
    ('logits', 'init', 'microbatch_size'), [('always', 'large', 1), ('eval', 'fresh', 2), ('never', 'large', 2)]
)
@pytest.mark.parametrize('loss', LOSSES)
def test_loss_is_exact_or_refused(loss, logits, init, microbatch_size, batch):
    outcome = measure(NativeModel(loss, logits=logits, init=init), batch, microbatch_size)
    assert outcome.kind in ('exact', 'refused'), outcome
    if loss in ('causal', 'unshifted', 'fused'):
        assert outcome.kind == 'exact', outcome
    if loss in ('all positions', 'per row'):
        assert outcome.kind == 'refused', outcome


@pytest.mark.parametrize('loss', MEANS_OVER_TOKENS)
def test_explicit_rule_of_token_means(loss, batch):
    rule = 'unshifted' if loss == 'unshifted' else 'causal'
    algorithm = TokenAccumulation(loss_tokens=rule, check_loss=False)
    outcome = measure(NativeModel(loss, logits='never'), batch, 2, algorithms=[algorithm])
    assert outcome.kind == 'exact', outcome


def test_router_loss_changes_the_gradient():
    """Were it nothing, being exact without it would prove nothing."""
    subject = SUBJECTS['mixtral']
    batch = subject.batch(0, side='right')
    without = plain_gradients(subject.model('large'), batch)
    model = subject.model('large')
    model.model.config.output_router_logits = True
    assert relative_error(plain_gradients(model, batch), without) > 1e-4


def test_empty_microbatches_of_fused_loss():
    outcomes = []
    for seed in range(8):
        rows = SUBJECTS['llama'].batch(seed, side='right')
        empty = random.Random(seed).sample(range(len(rows['labels'])), 2)
        rows['labels'][empty] = -100
        if (rows['labels'][:, 1:] != -100).any():
            outcomes.append(measure(NativeModel('fused', logits='never'), rows, 1))
    assert len(outcomes) > 4
    assert all(outcome.kind == 'exact' for outcome in outcomes), list(map(str, outcomes))


def test_matrix_models_have_no_dropout():
    for name, subject in SUBJECTS.items():
        rates = [module.p for module in subject.model('fresh').modules() if isinstance(module, torch.nn.Dropout)]
        assert not any(rates), name


# Losses that are another one in training, and dicts of terms.


@pytest.mark.parametrize(
    'of',
    [
        lambda losses, counted, training: losses.sum() if training else by_token(losses, counted),
        lambda losses, counted, training: (by_row if training else by_token)(losses, counted),
        lambda losses, counted, training: by_token(losses, counted) + training * losses.mean(dim=1).var(unbiased=False),
    ],
    ids=['sum', 'mean of rows', 'variance over rows'],
)
def test_other_loss_in_training_is_refused(of):
    assert kinds_of_steps(Terms(of), [collate(text_rows(LABELLED))]) == ['refused']


def test_dropout_hides_no_training_loss():
    def of(losses, counted, training):
        dropped = F.dropout(losses, 0.0, training)
        return by_row(dropped, counted) if training else by_token(losses, counted)

    model = Terms(of)
    model.model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.1), model.model.lm_head)
    assert kinds_of_steps(model, [collate(text_rows(LABELLED))]) == ['refused']


def summed(loss):
    if isinstance(loss, dict):
        return loss['total'] if 'total' in loss else torch.stack(list(loss.values())).sum()
    return torch.stack(list(loss)).sum()


@pytest.mark.parametrize(
    ('of', 'units', 'is_exact'),
    [
        (lambda *a: (by_token(*a), squares(*a)), None, True),
        (lambda *a: (by_token(*a), by_row(*a)), None, False),
        (lambda *a: {'lm': by_token(*a), 'total': by_token(*a) + by_row(*a)}, None, False),
        (lambda *a: {'lm': by_token(*a), 'total': by_token(*a) + by_row(*a)}, {'lm': 'tokens'}, False),
        (lambda *a: {'lm': by_token(*a), 'squares': squares(*a)}, {'lm': 'tokens', 'squares': 'tokens'}, True),
        (lambda *a: {'lm': by_token(*a), 'rows': by_row(*a)}, {'lm': 'tokens', 'rows': 'tokens'}, False),
        (lambda *a: {'lm': by_token(*a), 'rows': by_row(*a)}, {'lm': 'tokens', 'rows': 'samples'}, True),
        (lambda *a: {'lm': by_token(*a), 'squares': squares(*a)}, {'lm': 'tokens', 'squares': 'samples'}, False),
    ],
)
def test_terms_have_their_declared_unit(of, units, is_exact):
    model, batch = Terms(of), collate(text_rows(LABELLED))
    summed(model.loss(model(batch), batch)).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)

    def run():
        return fit(model, batch, loss_units=units)

    if is_exact:
        assert relative_error(run().gradients, expected) < 1e-6
    else:
        with pytest.raises(RuntimeError, match='got:'):
            run()


# Small terms in a model's own loss: over other positions than its loss tokens they are refused, over these exact.


def entropy(logits, labels):
    return -(logits.softmax(dim=-1) * logits.log_softmax(dim=-1)).sum(dim=-1)


def z_loss(logits, labels):
    return logits.logsumexp(dim=-1).square()


def uniform(logits, labels):
    """What label smoothing adds to the loss of a position."""
    return -logits.log_softmax(dim=-1).mean(dim=-1)


def of_reference(logits, labels):
    """Distance to a frozen model's probabilities."""
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(logits.shape[-1], generator=generator).log_softmax(dim=-1)
    return (reference.exp() * (reference - logits.log_softmax(dim=-1))).sum(dim=-1)


def square(logits, labels):
    return logits.square().mean(dim=-1)


TERMS = {'entropy': entropy, 'z-loss': z_loss, 'smoothing': uniform, 'reference': of_reference, 'square': square}


def over_all(values, labels):
    return values.mean()


def over_padding(values, labels):
    return values[:, 1:][labels[:, 1:] == -100].mean().nan_to_num()


def over_rows(values, labels):
    """The mean of the rows' means over their loss tokens."""
    counted = labels[:, 1:] != -100
    return ((values[:, :-1] * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)).mean()


def over_tokens(values, labels):
    counted = labels[:, 1:] != -100
    return (values[:, :-1] * counted).sum() / counted.sum().clamp(min=1)


def with_term(term: str, over: Callable[..., torch.Tensor], weight: float) -> Callable[..., torch.Tensor]:
    return lambda logits, labels: causal(logits, labels) + weight * over(TERMS[term](logits, labels), labels)


def outcome_of(model, *, rows=LABELLED, microbatch_size=2, side='right', **options):
    return measure(model, collate(text_rows(rows), side=side), microbatch_size, **options)


def share_of_term(model, term, over, weight):
    """Of the gradient by the logits of the whole batch."""
    batch = collate(text_rows(LABELLED))
    logits = model.model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits.detach()
    logits.requires_grad_()
    losses = weight * over(TERMS[term](logits, batch['labels']), batch['labels']), causal(logits, batch['labels'])
    added, plain = (torch.autograd.grad(loss, logits)[0].norm() for loss in losses)
    return float(added / plain)


WEIGHTS = (1e-2, 1e-4)
FIRST_BATCHES = {
    'one row': [(14, 8)],
    'no padding': [(9, 8), (9, 4), (9, 7), (9, 2)],
    'all labelled': [(9, 8)] * 4,
    'nearly as many labels': [(12, 9), (11, 9), (12, 10), (10, 9)],
}


@pytest.mark.parametrize('over', [over_all, over_padding, over_rows])
@pytest.mark.parametrize(('term', 'init'), [*((term, 'fresh') for term in TERMS), ('entropy', 'large')])
def test_small_term_elsewhere_is_refused(term, over, init):
    for weight in WEIGHTS:
        model = NativeModel(with_term(term, over, weight), init=init)
        outcome = outcome_of(model)
        # What moves the gradient by the logits by less than that is below what is promised.
        expected = 'refused' if share_of_term(model, term, over, weight) > 3e-6 else outcome.kind
        assert outcome.kind == expected, (weight, outcome)
        assert outcome.kind == 'refused' or outcome.error < 5e-6, (weight, outcome)


@pytest.mark.parametrize('term', TERMS)
def test_term_over_loss_tokens_is_exact(term):
    for weight in (1.0, 1e-3):
        outcome = outcome_of(NativeModel(with_term(term, over_tokens, weight), init='fresh'))
        assert outcome.kind == 'exact', (weight, outcome)


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('rows', FIRST_BATCHES.values(), ids=FIRST_BATCHES)
def test_whatever_the_first_batch_is_like(rows, side):
    for over, kind in ((over_all, 'refused'), (over_rows, 'refused'), (over_tokens, 'exact')):
        outcome = outcome_of(NativeModel(with_term('entropy', over, 1e-3)), rows=rows, side=side)
        assert outcome.kind == kind, (over, outcome)


@pytest.mark.parametrize('logits', ['eval', 'never'])
@pytest.mark.parametrize('init', ['large', 'fresh'])
def test_terms_of_loss_without_logits(logits, init):
    """Round-off of all layers is in it, so what is smaller than a thousandth of the loss may not show."""
    for over, kind in ((over_all, 'refused'), (over_rows, 'refused'), (over_tokens, 'exact')):
        outcome = outcome_of(NativeModel(with_term('entropy', over, 1e-2), logits=logits, init=init))
        assert outcome.kind == kind, (over, outcome)


def in_forward(name: str, term: Callable[[Any, torch.Tensor], torch.Tensor], init: str = 'fresh') -> Any:
    """A Hugging Face model that adds a term to the loss that it returns, of its outputs and labels."""
    model = SUBJECTS[name].model(init)
    plain = model.model.forward

    def forward(self, *args: Any, labels: torch.Tensor, **kwargs: Any) -> Any:
        outputs = plain(*args, labels=labels, **kwargs)
        outputs['loss'] = outputs.loss + term(outputs, labels)
        return outputs

    model.model.forward = MethodType(forward, model.model)
    functools.update_wrapper(model.model.forward.__func__, plain.__func__)
    return model


@pytest.mark.parametrize('options', [{}, {'regroup': False}, {'packing': True}], ids=['padded', 'in order', 'packed'])
def test_term_in_hugging_face_forward(options):
    model = in_forward('llama', lambda outputs, labels: 1e-3 * entropy(outputs.logits, labels).mean())
    assert outcome_of(model, **options).kind == 'refused'
    model = in_forward('llama', lambda outputs, labels: 1e-3 * over_tokens(entropy(outputs.logits, labels), labels))
    assert outcome_of(model, **options).kind == 'exact'


def test_size_of_last_states_is_refused():
    """Behind a norm they are of one size in all rows, until the weights of the norm are trained."""

    class Sized(NativeModel):
        over: Any = staticmethod(over_all)

        def forward(self, batch):
            states = self.model.model(batch['input_ids'], batch['attention_mask']).last_hidden_state
            logits = self.model.lm_head(states)
            size = self.over(states.square().mean(dim=-1), batch['labels'])
            return {'loss': causal(logits, batch['labels']) + 1e-3 * size, 'logits': logits}

    model = Sized('causal', init='fresh')
    assert outcome_of(model).kind == 'refused'
    model.over = over_tokens
    assert outcome_of(model).kind == 'exact'


def without_value(value):
    return value - value.detach()


@pytest.mark.parametrize('options', [{}, {'packing': True}], ids=['padded', 'packed'])
@pytest.mark.parametrize(
    ('loss', 'kind'),
    [
        (lambda logits, labels: without_value(1e-3 * entropy(logits, labels).mean()), 'refused'),
        (lambda logits, labels: without_value(1e-3 * over_tokens(entropy(logits, labels), labels)), 'exact'),
        (lambda logits, labels: without_value(causal(logits, labels)) * (len(logits) - 1), 'refused'),
        (lambda logits, labels: without_value(causal(logits, labels)) * 7, 'exact'),
    ],
    ids=['term over all', 'term over tokens', 'times rows', 'times seven'],
)
def test_gradient_of_another_loss(loss, kind, options):
    model = in_forward('llama', lambda outputs, labels: loss(outputs.logits, labels))
    assert outcome_of(model, **options).kind == kind


@pytest.mark.parametrize(('over', 'kind'), [(over_all, 'refused'), (over_tokens, 'trained')])
def test_random_term_in_training(over, kind):
    """Dropout is left out, so that its gradients can be compared."""

    class Random(NativeModel):
        def forward(self, batch):
            logits = self.model(batch['input_ids'], batch['attention_mask']).logits
            logits = F.dropout(logits, 0.1, self.training)
            loss = causal(logits, batch['labels'])
            if self.training:
                loss = loss + 1e-3 * over(entropy(logits, batch['labels']), batch['labels'])
            return {'loss': loss, 'logits': logits}

    def run():
        return fit(Random('causal'), loader(collate(text_rows(LABELLED))))

    if kind == 'trained':
        assert run().gradients
    else:
        with pytest.raises(RuntimeError, match='a mean over other positions in the loss'):
            run()


@pytest.mark.parametrize('place', ['forward', 'loss'])
def test_model_pops_labels_from_batch(place):
    class Taking(NativeModel):
        def forward(self, batch: Any):
            labels = batch.pop('labels') if place == 'forward' else None
            logits = self.model(batch['input_ids'], batch['attention_mask']).logits
            return {'logits': logits, **({'loss': causal(logits, labels)} if labels is not None else {})}

        def loss(self, outputs, batch):
            return outputs['loss'] if 'loss' in outputs else causal(outputs['logits'], batch.pop('labels'))

    assert outcome_of(Taking('causal')).kind == 'exact'


@pytest.mark.parametrize('over', ['columns', 'tokens of each row'])
def test_term_of_samples_keeps_padding(over):
    class Two(NativeModel):
        def loss(self, outputs, batch):
            values, mask = entropy(outputs['logits'], None), batch['attention_mask']
            by_row = values.mean(dim=1) if over == 'columns' else (values * mask).sum(dim=1) / mask.sum(dim=1)
            return {'lm': causal(outputs['logits'], batch['labels']), 'entropy': 1e-3 * by_row.mean()}

    algorithm = TokenAccumulation(loss_units={'lm': 'tokens', 'entropy': 'samples'})
    outcome = outcome_of(Two('causal', init='fresh'), algorithms=[algorithm])
    assert outcome.kind == 'exact', outcome


def test_penalty_on_weights_is_exact():
    model = SUBJECTS['llama'].model('fresh')
    weight = model.model.lm_head.weight
    model = in_forward('llama', lambda outputs, labels: 1e-3 * model.model.lm_head.weight.square().sum())
    assert weight.numel()
    assert outcome_of(model).kind == 'exact'


def test_named_term_of_microbatches():
    class Named(NativeModel):
        def loss(self, outputs, batch):
            every = entropy(outputs['logits'], batch['labels']).mean()
            return {'lm': causal(outputs['logits'], batch['labels']), 'entropy': 1e-3 * every}

    batch = collate(text_rows(LABELLED))
    named = TokenAccumulation(loss_units={'lm': 'tokens', 'entropy': 'microbatches'})
    recorder = fit(Named('causal'), loader(batch), algorithms=[named])
    assert recorder.gradients


def test_rule_in_half_precision():
    """Means by several rules are near enough to a loss that is rounded to bfloat16."""
    for seed in range(2):
        model, algorithm = SUBJECTS['bert'].model('fresh').to(torch.bfloat16), TokenAccumulation()
        batch = SUBJECTS['bert'].batch(seed, side='right')
        fit(model, batch, algorithms=[algorithm])
        assert algorithm.rule == 'unshifted', seed


@pytest.mark.parametrize(
    ('family', 'dtype'),
    [
        *product(['llama', 't5', 'bert', 'gpt2'], [torch.bfloat16, torch.float64]),
        ('mixtral', torch.bfloat16),  # its experts' kernel takes no float64 on torch 2.15
    ],
)
def test_healthy_weights_of_other_precision(family, dtype):
    model = SUBJECTS[family].model('fresh').to(dtype)
    recorder = fit(model, SUBJECTS[family].batch(0, side='right'))
    assert recorder.gradients
