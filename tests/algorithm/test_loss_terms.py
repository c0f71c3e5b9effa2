# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Losses of several terms with different denominators, compared with sums that are written out."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from composer.core import Algorithm, DataSpec, Event
from composer.models import HuggingFaceModel

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc.algorithm.loss_terms import LossTerms, attached_zero
from composer_tokacc.row_counts import RowCounts, attach_row_counts
from tests.support.text import next_token_loss, one_layer_model, ragged_batch, single_rows
from tests.support.training import fit, gradients_of, loader, relative_error, weights_unchanged

SHAPE = [(4, 2), (5, 3), (9, 0), (14, 11), (6, 1)]
"""Length and number of labels of each row. The third row has no labels."""
UNITS = {'lm': 'tokens', 'router': 'microbatches', 'contrastive': 'samples'}
"""Units of the terms of TermsModel."""
NORM_UNITS = {'lm': 'tokens', 'norm': 'samples'}
"""Units of the models with a term called ``norm``."""
LENGTH_OF_ALL = 10
"""The constant that SequenceLoss divides by."""


def value_of_rows(first_logits):
    """Returns a value for each row, made of the logits at its first token."""
    return first_logits.square().mean(dim=1)


def value_of_microbatch(first_logits):
    """Returns a value that is not a mean over rows, like the loss of a router. It uses five logits of each row."""
    five_logits = first_logits[:, :5]
    return five_logits.exp().mean().square()


def token_losses(logits, labels):
    """Returns the loss of each label, (rows, width - 1). Positions without a label have 0."""
    losses = next_token_loss(logits, labels, reduction='none')
    return losses.view(len(labels), -1)


def summed_by_row(logits, labels):
    """Returns the sum of the losses of each row."""
    return token_losses(logits, labels).sum(dim=1)


def labels_per_row(batch):
    """Returns how many labels of each row are predicted."""
    next_labels = batch['labels'][:, 1:]
    return (next_labels != -100).sum(dim=1)


class CausalModel(HuggingFaceModel):
    """A Hugging Face model that predicts the next token. Subclasses define its loss."""

    def __init__(self, model):
        super().__init__(model, shift_labels=True, use_logits=True)


class TermsModel(CausalModel):
    """A model whose loss has a term of tokens, a term of samples and a term of the microbatch.

    Args:
        model: A causal language model.
        form: What the loss is. ``'dict'``: the three terms. ``'total'``: the three terms and their sum. ``'tuple'``:
            two terms of tokens. ``'only total'``: a dict with only the sum of those two.
        first_id_without_term: First id of the rows that do not have the term of samples.
    """

    def __init__(self, model, *, form='dict', first_id_without_term=None):
        super().__init__(model)
        self.form = form
        self.first_id_without_term = first_id_without_term

    def loss(self, outputs, batch):
        token_mean = outputs['loss']
        if self.form == 'tuple':
            return (token_mean, 2 * token_mean)
        if self.form == 'only total':
            return {'total': 3 * token_mean}

        first_logits = outputs['logits'].float()[:, 0]
        terms = {
            'lm': token_mean,
            'contrastive': value_of_rows(first_logits).mean(),
            'router': value_of_microbatch(first_logits),
        }
        if self.first_id_without_term is not None:
            self.restrict_contrastive(terms, first_logits, batch)
        if self.form == 'total':
            terms['total'] = sum(terms.values())
        return terms

    def restrict_contrastive(self, terms, first_logits, batch):
        """Takes the term of samples only from rows that have it. It is absent if no row has it."""
        has_term = batch['input_ids'][:, 0] != self.first_id_without_term
        values = value_of_rows(first_logits)[has_term]
        terms['contrastive'] = values.sum() / len(has_term)
        if not has_term.any():
            del terms['contrastive']


class SequenceLoss(CausalModel):
    """Divides the summed losses of a row by a constant, as Dr. GRPO does. So the loss is only a mean over samples."""

    def loss(self, outputs, batch):
        losses = summed_by_row(outputs['logits'], batch['labels'])
        return {'lm': losses.mean() / LENGTH_OF_ALL}


class NothingWithoutLabels(SequenceLoss):
    """Returns no loss for a microbatch without labels."""

    def loss(self, outputs, batch):
        if labels_per_row(batch).sum() == 0:
            return {}
        return super().loss(outputs, batch)


class LossOfEverySecondToken(CausalModel):
    """Has no gradient at every second label, as clipped policy gradients have none at some. Divides by all labels."""

    def loss(self, outputs, batch):
        losses = token_losses(outputs['logits'], batch['labels'])
        every_second = losses[:, ::2]
        return every_second.sum() / labels_per_row(batch).sum()


@pytest.fixture
def model():
    return one_layer_model()


@pytest.fixture
def batch():
    return ragged_batch(SHAPE)


def outputs_of(model, batch):
    """Returns the outputs of one plain forward over the whole batch, without a loss."""
    return model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask'])


def logits_of(model, batch):
    """Returns the logits of one plain forward over the whole batch."""
    return outputs_of(model, batch).logits.float()


def with_dummy_rows(batch, num_dummies):
    """Returns the batch with its last rows marked as dummy rows, which do not count as samples."""
    num_samples = len(batch['labels']) - num_dummies
    counts_of_samples = [RowCounts()] * num_samples
    counts_of_dummies = [RowCounts(samples=0)] * num_dummies
    return attach_row_counts(batch, counts_of_samples + counts_of_dummies)


def expected_terms(model, batch, microbatch_size):
    """Returns each term by its definition: sums over tokens, samples or microbatches, divided by their number."""
    logits = logits_of(model, batch)
    first_logits = logits[:, 0]
    router_values = []
    for logits_of_microbatch in first_logits.split(microbatch_size):
        router_values.append(value_of_microbatch(logits_of_microbatch))
    return {
        'lm': next_token_loss(logits, batch['labels']),
        'contrastive': value_of_rows(first_logits).mean(),
        'router': torch.stack(router_values).mean(),
    }


def assert_logged(recorder, name, expected):
    """Compares the logged value of a term of a run of one step."""
    assert recorder.logged(f'loss/train/{name}') == pytest.approx([expected.item()], rel=1e-6)


@pytest.mark.parametrize(
    ('form', 'microbatch_size'), [('dict', 1), ('dict', 3), ('total', 1), ('total', 2), ('total', 5)]
)
def test_every_term_has_its_own_denominator(model, batch, form, microbatch_size):
    terms = expected_terms(model, batch, microbatch_size)
    terms['total'] = sum(terms.values())
    expected = gradients_of(model, terms['total'])
    terms_model = TermsModel(model, form=form)

    recorder = fit(terms_model, loader(batch), loss_units=UNITS, microbatch_size=microbatch_size)

    assert relative_error(recorder.gradients, expected) < 1e-6
    for name, value in terms.items():
        assert_logged(recorder, name, value)


class AddsToTotal(Algorithm):
    """Adds a penalty on the weights to the total of the loss only."""

    def match(self, event, state):
        return event == Event.BEFORE_BACKWARD

    def apply(self, event, state, logger):
        penalties = [parameter.square().sum() for parameter in state.model.parameters()]
        state.loss['total'] = state.loss['total'] + sum(penalties)


def test_term_that_is_only_in_the_total(model, batch):
    """Composer takes the gradient of the total, but the package takes the gradient of the terms."""
    terms_model = TermsModel(model, form='total')
    algorithms = [AddsToTotal(), TokenAccumulation(loss_units=UNITS)]
    with weights_unchanged(model), pytest.raises(RuntimeError, match='must be the sum of the other terms'):
        fit(terms_model, loader(batch), algorithms=algorithms)


def test_loss_without_a_gradient_at_each_label(model, batch):
    composer_model = LossOfEverySecondToken(model)
    outputs = {'logits': logits_of(model, batch)}
    loss = composer_model.loss(outputs, batch)
    expected = gradients_of(model, loss)

    with pytest.raises(RuntimeError, match='no rule explains'):
        fit(composer_model, batch, microbatch_size=1)
    recorder = fit(composer_model, batch, microbatch_size=1, loss_tokens='causal')

    assert relative_error(recorder.gradients, expected) < 1e-6


def test_term_absent_in_some_microbatches(model, batch):
    """The last of five rows does not have the term, and is a separate microbatch. The term is still divided by five."""
    terms = expected_terms(model, batch, 2)
    first_logits = logits_of(model, batch)[:, 0]
    terms['contrastive'] = value_of_rows(first_logits)[:4].sum() / 5
    expected = gradients_of(model, sum(terms.values()))
    first_ids = batch['input_ids'][:, 0].tolist()
    assert first_ids.count(first_ids[-1]) == 1
    terms_model = TermsModel(model, first_id_without_term=first_ids[-1])

    recorder = fit(terms_model, loader(batch), loss_units=UNITS)

    assert relative_error(recorder.gradients, expected) < 1e-6
    assert_logged(recorder, 'contrastive', terms['contrastive'])


def test_term_of_one_short_row(model):
    """The first-batch check also computes the longer rows without labels. None of them has the term."""
    batch = ragged_batch([(9, 3), (4, 2), (6, 3)])
    batch['input_ids'][:, 0] = torch.tensor([5, 6, 5])
    terms_model = TermsModel(model, first_id_without_term=5)
    terms = expected_terms(model, batch, 3)
    first_logits = logits_of(model, batch)[:, 0]
    terms['contrastive'] = value_of_rows(first_logits)[1] / 3
    expected = gradients_of(model, sum(terms.values()))

    recorder = fit(terms_model, loader(batch), loss_units=UNITS, microbatch_size=3)

    assert relative_error(recorder.gradients, expected) < 1e-6


@pytest.mark.parametrize(('form', 'names'), [('tuple', {'loss0', 'loss1', 'total'}), ('only total', {'total'})])
@pytest.mark.parametrize('microbatch_size', [1, 2])
def test_losses_without_units_are_token_means(model, batch, microbatch_size, form, names):
    """Both forms add up to three times the mean over tokens."""
    token_mean = next_token_loss(logits_of(model, batch), batch['labels'])
    expected = gradients_of(model, 3 * token_mean)
    terms_model = TermsModel(model, form=form)

    recorder = fit(terms_model, loader(batch), microbatch_size=microbatch_size)

    assert relative_error(recorder.gradients, expected) < 1e-6
    logged_losses = set()
    for metric in recorder.memory.data:
        if metric.startswith('loss/train/'):
            logged_losses.add(metric.removeprefix('loss/train/'))
    assert logged_losses == names


def test_terms_of_microbatches_of_the_split(model, batch):
    """The term is averaged over the microbatches of the token budget, and not over rows / microbatch size."""
    data = token_data_spec(loader(batch), regroup=False)
    # In order, with a budget of 2 * 14 tokens.
    transformed_batch = data.batch_transforms(batch)
    microbatches = data.split_batch(transformed_batch, 2)
    assert [len(microbatch['input_ids']) for microbatch in microbatches] == [3, 2]
    # Microbatches of three rows: the same cut.
    terms = expected_terms(model, batch, 3)
    expected = gradients_of(model, sum(terms.values()))

    recorder = fit(TermsModel(model), data, loss_units=UNITS)

    assert relative_error(recorder.gradients, expected) < 1e-6
    assert_logged(recorder, 'router', terms['router'])


def test_term_without_unit_is_refused(model, batch):
    units_of_two_terms = {'lm': 'tokens', 'router': 'microbatches'}
    with pytest.raises(RuntimeError, match="no unit for 'contrastive'"):
        fit(TermsModel(model), loader(batch), loss_units=units_of_two_terms)


def test_split_with_an_unknown_number_of_microbatches(model, batch):
    """The router's term is divided before the last microbatch is known.

    Composer would make three microbatches of the five rows, but this split makes five.
    """
    spec = DataSpec(loader(batch), split_batch=lambda batch, size: single_rows(batch))
    with pytest.raises(RuntimeError, match=r'number of microbatches.*got: 5, but 3'):
        fit(TermsModel(model), spec, loss_units=UNITS, microbatch_size=2)


def test_units_without_a_dict_loss(model, batch):
    with pytest.raises(RuntimeError, match='must go with a dict loss'):
        fit(model, loader(batch), loss_units={'lm': 'tokens'})


@pytest.mark.parametrize(
    ('loss', 'message'),
    [
        (None, 'must be a tensor.* got: None'),
        ({}, 'must be a tensor.* got: {}'),
        (1.5, 'must be a tensor.* got: 1.5'),
        ((torch.tensor(1.0), 2.0), 'must be a tensor, got: 2.0'),
        ({'lm': torch.tensor(1.0), 'boxes': torch.tensor(1.0)}, "no unit for 'lm'"),
    ],
)
def test_loss_must_be_a_tensor_or_have_units(loss, message):
    with pytest.raises(RuntimeError, match=message):
        LossTerms(None).losses_to_compare(loss, None)


def test_microbatch_without_a_loss(model):
    composer_model = NothingWithoutLabels(model)
    batch = ragged_batch([(9, 0), (9, 3), (9, 4)])
    with pytest.raises(RuntimeError, match='in every microbatch'):
        fit(composer_model, batch, loss_units={'lm': 'samples'}, microbatch_size=1)


@pytest.mark.parametrize(
    ('values', 'dtype'),
    [
        pytest.param((5.03, 1.61, 0.0), torch.bfloat16, id='bfloat16'),
        pytest.param((5.03, 1.61, 0.0), torch.float16, id='float16'),
        pytest.param((0.1, 2.3, -2.4), torch.float32, id='terms that nearly cancel'),
        pytest.param((-2.4, 2.3, 0.1), torch.bfloat16, id='terms that nearly cancel in bfloat16'),
    ],
)
def test_total_is_rounded(values, dtype):
    """The total may differ from the sum of the terms by round-off. A missing term is still refused."""
    values_of_terms = torch.tensor(values, dtype=dtype)
    other_total = values_of_terms.float().sum()  # in float32, and added in another order
    lm, boxes, entropy = values_of_terms
    rounded_total = entropy + boxes + lm
    assert rounded_total.float() != other_total
    loss = {'lm': lm, 'boxes': boxes, 'entropy': entropy}
    terms = LossTerms({'lm': 'tokens', 'boxes': 'samples', 'entropy': 'samples'})

    loss['total'] = rounded_total
    assert terms.losses_to_compare(loss, {}) == {'tokens': lm, 'samples': boxes + entropy}

    loss['total'] = other_total[None]  # a total may be a tensor of shape (1,)
    assert terms.total_error(loss).item() < 1

    loss['total'] = rounded_total - boxes
    with pytest.raises(RuntimeError, match='must be the sum'):
        terms.losses_to_compare(loss, {})

    loss['total'] = float(rounded_total)
    with pytest.raises(RuntimeError, match='must be a tensor'):
        terms.losses_to_compare(loss, {})


@pytest.mark.parametrize(
    ('num_copies', 'microbatch_size', 'has_data_spec'),
    [
        (0, 1, False),
        (0, 2, True),
        (0, 5, False),
        (1, 1, True),
        (1, 2, True),
        (1, 1, False),
        (1, 2, False),
        (1, 5, False),
    ],
)
def test_loss_of_samples_only(model, batch, num_copies, microbatch_size, has_data_spec):
    """The last rows may be copies of a sample, which count nothing. Composer's own split gives them a weight."""
    num_samples = len(SHAPE) - num_copies
    losses = summed_by_row(logits_of(model, batch), batch['labels'])
    expected_loss = losses[:num_samples].mean() / LENGTH_OF_ALL
    expected = gradients_of(model, expected_loss)
    if num_copies:
        batch = with_dummy_rows(batch, num_copies)
    data = loader(batch)
    if has_data_spec:
        data = token_data_spec(data)

    recorder = fit(SequenceLoss(model), data, loss_units={'lm': 'samples'}, microbatch_size=microbatch_size)

    assert relative_error(recorder.gradients, expected) < 1e-6


class NormTerm(CausalModel):
    """Its loss has a mean over tokens, and a mean over rows that does not look at their labels."""

    def loss(self, outputs, batch):
        first_logits = outputs['logits'][:, 0]
        return {'lm': outputs['loss'], 'norm': first_logits.square().mean()}


class TermOfLabels(CausalModel):
    """Its second term is the mean over rows of each row's mean over its labels. It is NaN if a row has no labels."""

    def loss(self, outputs, batch):
        is_label = batch['labels'] != -100
        squares = outputs['logits'][..., 0].square() * is_label
        row_means = squares.sum(dim=1) / is_label.sum(dim=1)
        return {'lm': outputs['loss'], 'norm': row_means.mean()}


class StatesTerm(CausalModel):
    """Its second term is a mean over all rows, made of hidden states, not of logits, like the loss of a value head."""

    def loss(self, outputs, batch):
        first_states = outputs['hidden_states'][-1][:, 0]
        return {'lm': outputs['loss'], 'norm': first_states.square().mean()}


class ZeroTerm(CausalModel):
    """Its second term is 0 times the logits, as of a microbatch that does not have the term."""

    def loss(self, outputs, batch):
        return {'lm': outputs['loss'], 'norm': 0 * outputs['logits'].sum()}


def test_nan_of_a_dummy_row_is_zero(model):
    """The last microbatch holds only a repeated sample, so it must add nothing to the loss and to the gradient."""
    composer_model = TermOfLabels(model)
    batch = ragged_batch([(4, 2), (5, 3), (6, 1)])
    samples = {key: value[:2] for key, value in batch.items()}
    outputs = composer_model(samples)
    expected_loss = sum(composer_model.loss(outputs, samples).values())
    expected = gradients_of(model, expected_loss)

    batch = with_dummy_rows(batch, 1)
    recorder = fit(composer_model, batch, loss_units=NORM_UNITS, microbatch_size=1, regroup=False)

    assert_logged(recorder, 'total', expected_loss)
    assert relative_error(recorder.gradients, expected) < 1e-6


def test_nan_of_a_sample_stays(model):
    """A row without labels is a sample, so its NaN must not become 0 unnoticed."""
    first = ragged_batch([(4, 2), (5, 3)])
    with_unlabelled_row = ragged_batch([(4, 2), (5, 0)])

    recorder = fit(
        TermOfLabels(model),
        first,
        with_unlabelled_row,
        loss_units=NORM_UNITS,
        microbatch_size=1,
        regroup=False,
    )

    first_loss, second_loss = recorder.logged('loss/train/total')
    assert math.isfinite(first_loss)
    assert math.isnan(second_loss)


@pytest.mark.parametrize(
    ('model_class', 'unit'),
    [
        (NormTerm, 'samples'),
        (NormTerm, 'coupled_samples'),
        (NormTerm, 'microbatches'),
        (StatesTerm, 'samples'),
        (StatesTerm, 'coupled_samples'),
    ],
)
def test_term_of_a_dummy_row_is_refused(model_class, unit, model, batch):
    model.config.output_hidden_states = True
    composer_model = model_class(model)
    options = {'loss_units': {'lm': 'tokens', 'norm': unit}, 'microbatch_size': 5}
    fit(composer_model, batch, regroup=False, **options)

    batch_with_dummy = with_dummy_rows(batch, 1)
    with pytest.raises(RuntimeError, match='1 of 5 rows fill up'):
        fit(composer_model, loader(batch_with_dummy), **options)


class LastRowTerm(CausalModel):
    """Its second term sees only the last row of a microbatch."""

    def loss(self, outputs, batch):
        return {'lm': outputs['loss'], 'norm': outputs['logits'][-1].square().mean()}


def test_term_of_the_last_dummy_row_is_refused(model, batch):
    batch_with_dummies = with_dummy_rows(batch, 2)
    options = {'loss_units': {'lm': 'tokens', 'norm': 'coupled_samples'}, 'microbatch_size': 5}
    with pytest.raises(RuntimeError, match='2 of 5 rows fill up'):
        fit(LastRowTerm(model), loader(batch_with_dummies), **options)


class LabelledTerm(CausalModel):
    """Its second term is a mean over rows, to which rows without labels add 0."""

    def loss(self, outputs, batch):
        has_labels = (batch['labels'] != -100).any(dim=1)
        squares = outputs['logits'][:, 0].square().mean(dim=1) * has_labels
        return {'lm': outputs['loss'], 'norm': squares.sum() / len(squares)}


def test_states_in_another_order_are_not_rows(model, batch):
    """The outputs have states of as many images as there are rows, but the last image is not of the last row."""
    states_of_images = []

    def make_images(module, args, embeddings):
        images = embeddings.flip(0)
        states_of_images.append(images)
        return images.flip(0)

    def add_output(module, args, outputs):
        outputs['image_hidden_states'] = states_of_images[-1]
        return outputs

    model.model.embed_tokens.register_forward_hook(make_images)
    model.register_forward_hook(add_output)
    data = loader(with_dummy_rows(batch, 1))
    fit(LabelledTerm(model), data, loss_units=NORM_UNITS, microbatch_size=len(batch['labels']))


def test_token_weights_and_another_term(model, batch):
    """The weights would also change the gradient of another term that is made of the logits."""
    model.config.output_hidden_states = True
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    batch['loss_weights'] = weights
    options = {'loss_units': NORM_UNITS, 'token_weights': 'column', 'microbatch_size': 1}
    with pytest.raises(RuntimeError, match=r'another term .* made of the logits'):
        fit(NormTerm(model), batch, **options)

    # A term of the hidden states is not changed by the weights of tokens, and neither is 0 times the logits.
    fit(ZeroTerm(model), batch, **options)
    outputs = outputs_of(model, batch)
    losses = summed_by_row(outputs.logits, batch['labels'])
    weighted_mean = (weights * losses).sum() / (weights * labels_per_row(batch)).sum()
    first_states = outputs.hidden_states[-1][:, 0]
    expected = gradients_of(model, weighted_mean + first_states.square().mean())
    recorder = fit(StatesTerm(model), batch, **options)
    assert relative_error(recorder.gradients, expected) < 1e-6


def test_warning_of_noise_scaled_by_width(model, batch, caplog):
    model.model.embed_tokens.neftune_noise_alpha = 5.0
    with caplog.at_level(logging.WARNING):
        fit(model, batch)
    assert 'NEFTune' in caplog.text


def test_state_of_a_composer_algorithm():
    """Composer compares the `repr` in a checkpoint with the `repr` of the algorithm of the resumed run."""
    algorithm = TokenAccumulation()
    assert algorithm.state_dict()['repr'] == repr(algorithm)


@pytest.mark.parametrize('uses_logits', [False, True])
def test_zero_reaches_only_parameters_of_the_loss(uses_logits):
    """Under FSDP all ranks must reduce gradients of the same parameters, also if the microbatch of one has no label."""
    head = torch.nn.Linear(3, 5)
    pooler = torch.nn.Linear(3, 5)
    scale = torch.ones(3, requires_grad=True)
    hidden = torch.ones(2, 4, 3)
    scaled = hidden * scale
    logits = head(hidden)
    outputs = {'logits': logits, 'scaled': scaled, 'pooled': pooler(hidden)}
    if uses_logits:
        no_labels = torch.full((2, 4), -100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), no_labels.flatten())
        assert loss.isnan()
    else:
        # Some losses do not use the logits if there is no label.
        loss = {'lm': torch.tensor(0.0), 'norm': scaled.square().mean()}

    attached_zero(outputs, loss).backward()

    assert torch.equal(head.weight.grad, torch.zeros(5, 3))
    assert pooler.weight.grad is None
