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
ONE = torch.tensor(1.0)


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
        num_labels = labels_per_row(batch).sum()
        return every_second.sum() / num_labels


@pytest.fixture
def model():
    return one_layer_model()


@pytest.fixture
def batch():
    return ragged_batch(SHAPE)


def outputs_of(model, batch):
    """Returns the outputs of one plain forward over the whole batch, without a loss."""
    return model(
        input_ids=batch['input_ids'],
        attention_mask=batch['attention_mask'],
    )


def logits_of(model, batch):
    """Returns the logits of one plain forward over the whole batch."""
    outputs = outputs_of(model, batch)
    return outputs.logits.float()


def values_of_rows(model, batch):
    """Returns the values of rows that the term of samples of TermsModel averages."""
    logits = logits_of(model, batch)
    return value_of_rows(logits[:, 0])


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
    logits_of_microbatches = first_logits.split(microbatch_size)
    router_values = [value_of_microbatch(part) for part in logits_of_microbatches]
    return {
        'lm': next_token_loss(logits, batch['labels']),
        'contrastive': value_of_rows(first_logits).mean(),
        'router': torch.stack(router_values).mean(),
    }


def assert_logged(recorder, name, expected):
    """Compares the logged value of a term of a run of one step."""
    logged_values = recorder.logged(f'loss/train/{name}')
    assert logged_values == pytest.approx([expected.item()], rel=1e-6)


@pytest.mark.parametrize(
    ('form', 'microbatch_size'),
    [
        ('dict', 1),
        ('dict', 3),
        ('total', 1),
        ('total', 2),
        ('total', 5),
    ],
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
    message = 'must be the sum of the other terms'

    with weights_unchanged(model), pytest.raises(RuntimeError, match=message):
        fit(terms_model, loader(batch), algorithms=algorithms)


def test_loss_without_a_gradient_at_each_label(model, batch):
    composer_model = LossOfEverySecondToken(model)
    outputs = outputs_of(model, batch)
    loss = composer_model.loss(outputs, batch)
    expected = gradients_of(model, loss)

    with pytest.raises(RuntimeError, match='no rule explains'):
        fit(composer_model, batch, microbatch_size=1)
    recorder = fit(composer_model, batch, microbatch_size=1, loss_tokens='causal')

    assert relative_error(recorder.gradients, expected) < 1e-6


def test_term_absent_in_some_microbatches(model, batch):
    """The last of five rows does not have the term, and is a separate microbatch. The term is still divided by five."""
    terms = expected_terms(model, batch, 2)
    first_four_values = values_of_rows(model, batch)[:4]
    terms['contrastive'] = first_four_values.sum() / 5
    expected = gradients_of(model, sum(terms.values()))

    *other_first_ids, id_of_last_row = batch['input_ids'][:, 0].tolist()
    assert id_of_last_row not in other_first_ids
    terms_model = TermsModel(model, first_id_without_term=id_of_last_row)

    recorder = fit(terms_model, loader(batch), loss_units=UNITS)

    assert relative_error(recorder.gradients, expected) < 1e-6
    assert_logged(recorder, 'contrastive', terms['contrastive'])


def test_term_of_one_short_row(model):
    """The first-batch check also computes the longer rows without labels. None of them has the term."""
    batch = ragged_batch([(9, 3), (4, 2), (6, 3)])
    batch['input_ids'][:, 0] = torch.tensor([5, 6, 5])
    terms_model = TermsModel(model, first_id_without_term=5)
    terms = expected_terms(model, batch, 3)
    value_of_short_row = values_of_rows(model, batch)[1]
    terms['contrastive'] = value_of_short_row / 3
    expected = gradients_of(model, sum(terms.values()))

    recorder = fit(terms_model, loader(batch), loss_units=UNITS, microbatch_size=3)

    assert relative_error(recorder.gradients, expected) < 1e-6


@pytest.mark.parametrize(
    ('form', 'names'),
    [
        ('tuple', {'loss0', 'loss1', 'total'}),
        ('only total', {'total'}),
    ],
)
@pytest.mark.parametrize('microbatch_size', [1, 2])
def test_losses_without_units_are_token_means(model, batch, microbatch_size, form, names):
    """Both forms add up to three times the mean over tokens."""
    logits = logits_of(model, batch)
    token_mean = next_token_loss(logits, batch['labels'])
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
    first, second = data.split_batch(transformed_batch, 2)
    assert len(first['input_ids']) == 3
    assert len(second['input_ids']) == 2
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
        pytest.param(None, 'must be a tensor.* got: None', id='none'),
        pytest.param({}, 'must be a tensor.* got: {}', id='no terms'),
        pytest.param(1.5, 'must be a tensor.* got: 1.5', id='number'),
        pytest.param((ONE, 2.0), 'must be a tensor, got: 2.0', id='term that is a number'),
        pytest.param({'lm': ONE, 'boxes': ONE}, "no unit for 'lm'", id='terms without units'),
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
    terms_of_loss = {'lm': lm, 'boxes': boxes, 'entropy': entropy}
    terms = LossTerms({'lm': 'tokens', 'boxes': 'samples', 'entropy': 'samples'})

    loss = {**terms_of_loss, 'total': rounded_total}
    losses_by_unit = terms.losses_to_compare(loss, {})
    assert losses_by_unit == {'tokens': lm, 'samples': boxes + entropy}

    loss = {**terms_of_loss, 'total': other_total[None]}  # a total may be a tensor of shape (1,)
    assert terms.total_error(loss).item() < 1

    loss = {**terms_of_loss, 'total': rounded_total - boxes}
    with pytest.raises(RuntimeError, match='must be the sum'):
        terms.losses_to_compare(loss, {})


def test_total_must_be_a_tensor():
    loss = {'lm': ONE, 'total': 1.0}
    terms = LossTerms({'lm': 'tokens'})
    with pytest.raises(RuntimeError, match='must be a tensor'):
        terms.losses_to_compare(loss, {})


@pytest.mark.parametrize(
    ('num_copies', 'microbatch_size', 'make_spec'),
    [
        (0, 1, DataSpec),
        (0, 2, token_data_spec),
        (0, 5, DataSpec),
        (1, 1, token_data_spec),
        (1, 2, token_data_spec),
        (1, 1, DataSpec),
        (1, 2, DataSpec),
        (1, 5, DataSpec),
    ],
)
def test_loss_of_samples_only(model, batch, num_copies, microbatch_size, make_spec):
    """The last rows may be copies of a sample, which count nothing. Composer's own split (DataSpec) weighs them."""
    num_samples = len(SHAPE) - num_copies
    logits = logits_of(model, batch)
    losses = summed_by_row(logits, batch['labels'])
    expected_loss = losses[:num_samples].mean() / LENGTH_OF_ALL
    expected = gradients_of(model, expected_loss)
    if num_copies:
        batch = with_dummy_rows(batch, num_copies)

    recorder = fit(
        SequenceLoss(model),
        make_spec(loader(batch)),
        loss_units={'lm': 'samples'},
        microbatch_size=microbatch_size,
    )

    assert relative_error(recorder.gradients, expected) < 1e-6


class TwoTerms(CausalModel):
    """Its loss has a mean over tokens, and another term, which subclasses define."""

    def loss(self, outputs, batch):
        return {'lm': outputs['loss'], 'norm': self.second_term(outputs, batch)}


class NormTerm(TwoTerms):
    """Its second term is a mean over rows that does not look at their labels."""

    def second_term(self, outputs, batch):
        first_logits = outputs['logits'][:, 0]
        return first_logits.square().mean()


class TermOfLabels(TwoTerms):
    """Its second term is the mean over rows of each row's mean over its labels. It is NaN if a row has no labels."""

    def second_term(self, outputs, batch):
        is_label = batch['labels'] != -100
        squares = outputs['logits'][..., 0].square() * is_label
        row_means = squares.sum(dim=1) / is_label.sum(dim=1)
        return row_means.mean()


class StatesTerm(TwoTerms):
    """Its second term is a mean over all rows, made of hidden states, not of logits, like the loss of a value head."""

    def second_term(self, outputs, batch):
        last_states = outputs['hidden_states'][-1]
        first_states = last_states[:, 0]
        return first_states.square().mean()


class ZeroTerm(TwoTerms):
    """Its second term is 0 times the logits, as of a microbatch that does not have the term."""

    def second_term(self, outputs, batch):
        return 0 * outputs['logits'].sum()


def test_nan_of_a_dummy_row_is_zero(model):
    """The last microbatch holds only a repeated sample, so it must add nothing to the loss and to the gradient."""
    composer_model = TermOfLabels(model)
    batch = ragged_batch([(4, 2), (5, 3), (6, 1)])
    samples = {key: value[:2] for key, value in batch.items()}
    outputs = composer_model(samples)
    terms = composer_model.loss(outputs, samples)
    expected_loss = sum(terms.values())
    expected = gradients_of(model, expected_loss)

    recorder = fit(
        composer_model,
        with_dummy_rows(batch, 1),
        loss_units=NORM_UNITS,
        microbatch_size=1,
        regroup=False,
    )

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
    units = {'lm': 'tokens', 'norm': unit}
    batch_with_dummy = with_dummy_rows(batch, 1)

    fit(composer_model, batch, loss_units=units, microbatch_size=5, regroup=False)
    with pytest.raises(RuntimeError, match='1 of 5 rows fill up'):
        fit(composer_model, loader(batch_with_dummy), loss_units=units, microbatch_size=5)


class LastRowTerm(TwoTerms):
    """Its second term sees only the last row of a microbatch."""

    def second_term(self, outputs, batch):
        logits_of_last_row = outputs['logits'][-1]
        return logits_of_last_row.square().mean()


def test_term_of_the_last_dummy_row_is_refused(model, batch):
    batch_with_dummies = with_dummy_rows(batch, 2)
    units = {'lm': 'tokens', 'norm': 'coupled_samples'}
    with pytest.raises(RuntimeError, match='2 of 5 rows fill up'):
        fit(LastRowTerm(model), loader(batch_with_dummies), loss_units=units, microbatch_size=5)


class LabelledTerm(TwoTerms):
    """Its second term is a mean over rows, to which rows without labels add 0."""

    def second_term(self, outputs, batch):
        values = value_of_rows(outputs['logits'][:, 0])
        has_label = batch['labels'] != -100
        values_of_labelled = values * has_label.any(dim=1)
        return values_of_labelled.mean()


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
    batch_with_dummy = with_dummy_rows(batch, 1)
    fit(LabelledTerm(model), loader(batch_with_dummy), loss_units=NORM_UNITS, microbatch_size=5)


OPTIONS_OF_WEIGHTS = {
    'loss_units': NORM_UNITS,
    'token_weights': 'column',
    'microbatch_size': 1,
}


def test_token_weights_and_another_term(model, batch):
    """The weights would also change the gradient of another term that is made of the logits."""
    batch['loss_weights'] = torch.arange(1.0, 6)
    with pytest.raises(RuntimeError, match=r'another term .* made of the logits'):
        fit(NormTerm(model), batch, **OPTIONS_OF_WEIGHTS)


def test_token_weights_and_a_zero_term(model, batch):
    """A term of 0 times the logits has no gradient that weights could change."""
    batch['loss_weights'] = torch.arange(1.0, 6)
    fit(ZeroTerm(model), batch, **OPTIONS_OF_WEIGHTS)


def test_token_weights_and_a_term_of_states(model, batch):
    """The weights of tokens do not change a term of the hidden states."""
    model.config.output_hidden_states = True
    weights = torch.arange(1.0, 6)
    batch['loss_weights'] = weights
    outputs = outputs_of(model, batch)
    losses = summed_by_row(outputs.logits, batch['labels'])
    sum_of_weights = (weights * labels_per_row(batch)).sum()
    first_states = outputs.hidden_states[-1][:, 0]
    terms = {
        'lm': (weights * losses).sum() / sum_of_weights,
        'norm': first_states.square().mean(),
    }
    expected = gradients_of(model, sum(terms.values()))

    recorder = fit(StatesTerm(model), batch, **OPTIONS_OF_WEIGHTS)

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
        loss = next_token_loss(logits, no_labels)
        assert loss.isnan()
    else:
        # Some losses do not use the logits if there is no label.
        loss = {'lm': torch.tensor(0.0), 'norm': scaled.square().mean()}

    attached_zero(outputs, loss).backward()

    assert torch.equal(head.weight.grad, torch.zeros(5, 3))
    assert pooler.weight.grad is None
