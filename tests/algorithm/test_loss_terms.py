# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Losses of several terms with different denominators, compared with sums that are written out."""

from __future__ import annotations

import logging

import pytest
import torch
from composer.core import Algorithm, DataSpec, Event
from composer.models import HuggingFaceModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc.algorithm.loss_terms import LossTerms, attached_zero, empty_sum
from composer_tokacc.row_counts import RowCounts, attach_row_counts
from tests.support.process_group import group_of_one_rank
from tests.support.text import next_token_loss, one_layer_model, ragged_batch
from tests.support.training import fit, gradients_of, loader, relative_error, weights_unchanged

SHAPE = [(4, 2), (5, 3), (9, 0), (14, 11), (6, 1)]
UNITS = {'lm': 'tokens', 'router': 'microbatches', 'contrastive': 'samples'}
LENGTH_OF_ALL = 10


def value_of_rows(first_logits):
    """Returns a value for each row, made of the logits at its first token."""
    return first_logits.square().mean(dim=1)


def value_of_microbatch(first_logits):
    """Returns a value that is no mean over rows, as the loss of a router. It is made of five logits of each row."""
    return first_logits[:, :5].exp().mean().square()


class TermsModel(HuggingFaceModel):
    """A model whose loss has a term of tokens, a term of samples and a term of the microbatch.

    Args:
        model: A causal language model.
        form: ``'dict'``; ``'total'``: a dict with the sum of the terms; ``'tuple'``: two terms of tokens; ``'only
            total'``: their sum in a dict.
        first_id_without_term: First id of the rows that do not have the term of samples.
    """

    def __init__(self, model, *, form='dict', first_id_without_term=None):
        super().__init__(model, shift_labels=True, use_logits=True)
        self.form = form
        self.first_id_without_term = first_id_without_term

    def loss(self, outputs, batch):
        first_logits = outputs['logits'].float()[:, 0]
        terms = {
            'lm': outputs['loss'],
            'contrastive': value_of_rows(first_logits).mean(),
            'router': value_of_microbatch(first_logits),
        }
        if self.first_id_without_term is not None:
            has_term = batch['input_ids'][:, 0] != self.first_id_without_term
            terms['contrastive'] = value_of_rows(first_logits)[has_term].sum() / len(has_term)
            if not has_term.any():
                del terms['contrastive']
        if self.form == 'tuple':
            return (terms['lm'], 2 * terms['lm'])
        if self.form == 'only total':
            return {'total': 3 * terms['lm']}
        if self.form == 'total':
            return {**terms, 'total': sum(terms.values())}
        return terms


class SequenceLoss(HuggingFaceModel):
    """Divides the summed losses of a row by a constant, as Dr. GRPO does. So the loss is only a mean over samples."""

    def loss(self, outputs, batch):
        return {'lm': summed_by_row(outputs['logits'], batch['labels']).mean() / LENGTH_OF_ALL}


class LossOfEverySecondToken(HuggingFaceModel):
    """Has no gradient at every second label, as clipped policy gradients have none at some. Divides by all labels."""

    def loss(self, outputs, batch):
        losses = next_token_loss(outputs['logits'], batch['labels'], reduction='none').view(len(batch['labels']), -1)
        return losses[:, ::2].sum() / (batch['labels'][:, 1:] != -100).sum()


def summed_by_row(logits, labels):
    losses = next_token_loss(logits, labels, reduction='none')
    return losses.view(len(labels), -1).sum(dim=1)


@pytest.fixture
def model():
    return one_layer_model()


@pytest.fixture
def batch():
    return ragged_batch(SHAPE)


def logits_of(model, batch):
    return model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits.float()


def expected_terms(model, batch, microbatch_size):
    """Returns each term by its definition: sums over tokens, samples or microbatches, divided by their number."""
    logits = logits_of(model, batch)
    first_logits = logits[:, 0]
    routers = [value_of_microbatch(rows) for rows in first_logits.split(microbatch_size)]
    return {
        'lm': next_token_loss(logits, batch['labels']),
        'contrastive': value_of_rows(first_logits).mean(),
        'router': torch.stack(routers).mean(),
    }


@pytest.mark.parametrize(
    ('form', 'microbatch_size'), [('dict', 1), ('dict', 3), ('total', 1), ('total', 2), ('total', 5)]
)
def test_every_term_has_its_own_denominator(model, batch, form, microbatch_size):
    terms = expected_terms(model, batch, microbatch_size)
    terms['total'] = sum(terms.values())
    expected = gradients_of(model, terms['total'])
    options = {'loss_units': UNITS, 'microbatch_size': microbatch_size}
    recorder = fit(TermsModel(model, form=form), loader(batch), **options)
    assert relative_error(recorder.gradients, expected) < 1e-6
    for name, value in terms.items():
        assert recorder.logged(f'loss/train/{name}') == pytest.approx([value.item()], rel=1e-6)


class AddsToTotal(Algorithm):
    """Adds a penalty on the weights to the total of the loss only."""

    def match(self, event, state):
        return event == Event.BEFORE_BACKWARD

    def apply(self, event, state, logger):
        penalties = [parameter.square().sum() for parameter in state.model.parameters()]
        state.loss['total'] = state.loss['total'] + sum(penalties)


def test_term_that_is_only_in_the_total(model, batch):
    """Composer takes the gradient of the total, but the package that of the terms."""
    algorithms = [AddsToTotal(), TokenAccumulation(loss_units=UNITS)]
    with weights_unchanged(model), pytest.raises(RuntimeError, match='must be the sum of the other terms'):
        fit(TermsModel(model, form='total'), loader(batch), algorithms=algorithms)


def test_loss_without_a_gradient_at_each_label(model, batch):
    composer_model = LossOfEverySecondToken(model)
    expected = gradients_of(model, composer_model.loss({'logits': logits_of(model, batch)}, batch))
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
    assert recorder.logged('loss/train/contrastive') == pytest.approx([terms['contrastive'].item()], rel=1e-6)


def test_term_of_one_short_row(model):
    """Of the rows that the first-batch check also computes without labels, the longer ones, none has the term."""
    batch = ragged_batch([(9, 3), (4, 2), (6, 3)])
    batch['input_ids'][:, 0] = torch.tensor([5, 6, 5])
    logits = logits_of(model, batch)
    term = value_of_rows(logits[:, 0])[1] / 3
    router = value_of_microbatch(logits[:, 0])
    expected = gradients_of(model, next_token_loss(logits, batch['labels']) + term + router)
    terms_model = TermsModel(model, first_id_without_term=5)
    recorder = fit(terms_model, loader(batch), loss_units=UNITS, microbatch_size=3)
    assert relative_error(recorder.gradients, expected) < 1e-6


@pytest.mark.parametrize(('form', 'names'), [('tuple', {'loss0', 'loss1', 'total'}), ('only total', {'total'})])
@pytest.mark.parametrize('microbatch_size', [1, 2])
def test_losses_without_units_are_token_means(model, batch, microbatch_size, form, names):
    expected = gradients_of(model, 3 * expected_terms(model, batch, 1)['lm'])
    recorder = fit(TermsModel(model, form=form), loader(batch), microbatch_size=microbatch_size)
    assert relative_error(recorder.gradients, expected) < 1e-6
    prefix = 'loss/train/'
    assert {name.removeprefix(prefix) for name in recorder.memory.data if name.startswith(prefix)} == names


def test_terms_of_microbatches_of_the_split(model, batch):
    """The term is averaged over the microbatches of the token budget, and not over rows / microbatch size."""
    data = token_data_spec(loader(batch), regroup=False)
    # In order, with a budget of 2 * 14 tokens.
    microbatches = data.split_batch(data.batch_transforms(batch), 2)
    assert [len(microbatch['input_ids']) for microbatch in microbatches] == [3, 2]
    # Microbatches of three rows: the same cut.
    terms = expected_terms(model, batch, 3)
    expected = gradients_of(model, sum(terms.values()))
    recorder = fit(TermsModel(model), data, loss_units=UNITS)
    assert relative_error(recorder.gradients, expected) < 1e-6
    assert recorder.logged('loss/train/router') == pytest.approx([terms['router'].item()], rel=1e-6)


def test_term_without_unit_is_refused(model, batch):
    with pytest.raises(RuntimeError, match="no unit for 'contrastive'"):
        fit(TermsModel(model), loader(batch), loss_units={'lm': 'tokens', 'router': 'microbatches'})


def test_split_with_an_unknown_number_of_microbatches(model, batch):
    """The router's term is divided before the last microbatch is known. Composer would make three of five rows."""

    def single_rows(batch, size):
        return [{key: value[row : row + 1] for key, value in batch.items()} for row in range(5)]

    spec = DataSpec(loader(batch), split_batch=single_rows)
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
        LossTerms(None).probed(loss, None)


def test_microbatch_without_a_loss(model):
    class NothingWithoutLabels(SequenceLoss):
        def loss(self, outputs, batch):
            has_labels = (batch['labels'][:, 1:] != -100).any()
            return super().loss(outputs, batch) if has_labels else {}

    batch = ragged_batch([(9, 0), (9, 3), (9, 4)])
    with pytest.raises(RuntimeError, match='in every microbatch'):
        fit(NothingWithoutLabels(model), batch, loss_units={'lm': 'samples'}, microbatch_size=1)


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
    """The round-off of a sum is as large as that of its terms. A term that is missing is still refused."""
    terms_of_loss = torch.tensor(values, dtype=dtype)
    lm, boxes, entropy = terms_of_loss
    loss = {'lm': lm, 'boxes': boxes, 'entropy': entropy}
    terms = LossTerms({'lm': 'tokens', 'boxes': 'samples', 'entropy': 'samples'})
    total = entropy + boxes + lm
    assert total.float() != terms_of_loss.float().sum()
    assert terms.probed({**loss, 'total': total}, {}) == {'tokens': lm, 'samples': boxes + entropy}
    assert terms.total_error({**loss, 'total': terms_of_loss.float().sum()[None]}).item() < 1, 'not rounded, one entry'
    with pytest.raises(RuntimeError, match='must be the sum'):
        terms.probed({**loss, 'total': total - boxes}, {})
    with pytest.raises(RuntimeError, match='must be a tensor'):
        terms.probed({**loss, 'total': float(total)}, {})


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
    expected = gradients_of(model, losses[:num_samples].mean() / LENGTH_OF_ALL)
    if num_copies:
        batch = attach_row_counts(batch, [RowCounts()] * num_samples + [RowCounts(samples=0)] * num_copies)
    data = loader(batch)
    if has_data_spec:
        data = token_data_spec(data)
    options = {'loss_units': {'lm': 'samples'}, 'microbatch_size': microbatch_size}
    recorder = fit(SequenceLoss(model, use_logits=True), data, **options)
    assert relative_error(recorder.gradients, expected) < 1e-6


class NormTerm(HuggingFaceModel):
    """Its loss has a mean over tokens, and a mean over rows that does not look at their labels."""

    def loss(self, outputs, batch):
        return {'lm': outputs['loss'], 'norm': outputs['logits'][:, 0].square().mean()}


class TermOfLabels(HuggingFaceModel):
    """Its second term is a mean over rows of their means over labels, so NaN if a row has none."""

    def loss(self, outputs, batch):
        is_label = batch['labels'] != -100
        squares = outputs['logits'][..., 0].square() * is_label
        row_means = squares.sum(dim=1) / is_label.sum(dim=1)
        return {'lm': outputs['loss'], 'norm': row_means.mean()}


def test_nan_of_a_dummy_row_is_zero(model):
    """The last microbatch holds only a repeated sample, so it must add nothing to the loss and to the gradient."""
    composer_model = TermOfLabels(model, shift_labels=True, use_logits=True)
    batch = ragged_batch([(4, 2), (5, 3), (6, 1)])
    samples = {key: value[:2] for key, value in batch.items()}
    expected = sum(composer_model.loss(composer_model(samples), samples).values())
    expected_gradients = gradients_of(model, expected)
    batch = attach_row_counts(batch, [RowCounts(), RowCounts(), RowCounts(samples=0)])
    options = {'loss_units': {'lm': 'tokens', 'norm': 'samples'}, 'microbatch_size': 1, 'regroup': False}
    recorder = fit(composer_model, batch, **options)
    assert recorder.logged('loss/train/total') == pytest.approx([expected.item()], rel=1e-6)
    assert relative_error(recorder.gradients, expected_gradients) < 1e-6


class StatesTerm(HuggingFaceModel):
    """Its second term is a mean over all rows of their last hidden states, as the loss of a value head."""

    def loss(self, outputs, batch):
        return {'lm': outputs['loss'], 'norm': outputs['hidden_states'][-1][:, 0].square().mean()}


@pytest.mark.parametrize(
    ('term_model', 'unit'),
    [(NormTerm, 'samples'), (NormTerm, 'coupled_samples'), (NormTerm, 'microbatches'), (StatesTerm, 'samples')],
)
def test_term_of_a_dummy_row_is_refused(term_model, unit, model, batch):
    model.config.output_hidden_states = True
    model = term_model(model, shift_labels=True, use_logits=True)
    options = {'loss_units': {'lm': 'tokens', 'norm': unit}, 'microbatch_size': 5}
    fit(model, batch, regroup=False, **options)
    batch_with_dummy = attach_row_counts(batch, [RowCounts()] * 4 + [RowCounts(samples=0)])
    with pytest.raises(RuntimeError, match='1 of 5 rows fill up'):
        fit(model, loader(batch_with_dummy), **options)


def test_token_weights_and_another_term(model, batch):
    """The weights would also change the gradient of another term that is made of the logits."""
    model.config.output_hidden_states = True
    batch['loss_weights'] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    options = {'loss_units': {'lm': 'tokens', 'norm': 'samples'}, 'token_weights': 'column', 'microbatch_size': 1}
    with pytest.raises(RuntimeError, match=r'another term .* made of the logits'):
        fit(NormTerm(model, shift_labels=True, use_logits=True), batch, **options)
    outputs = model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask'])
    losses = summed_by_row(outputs.logits, batch['labels'])
    counts = (batch['labels'][:, 1:] != -100).sum(dim=1)
    weights = batch['loss_weights']
    weighted_mean = (weights * losses).sum() / (weights * counts).sum()
    expected = gradients_of(model, weighted_mean + outputs.hidden_states[-1][:, 0].square().mean())
    recorder = fit(StatesTerm(model, shift_labels=True, use_logits=True), batch, **options)
    assert relative_error(recorder.gradients, expected) < 1e-6


def test_warning_of_noise_scaled_by_width(model, batch, caplog):
    model.model.embed_tokens.neftune_noise_alpha = 5.0
    with caplog.at_level(logging.WARNING):
        fit(model, batch)
    assert 'NEFTune' in caplog.text


def test_state_of_a_composer_algorithm():
    """Composer compares the `repr` in a checkpoint with that of the algorithm which resumes."""
    algorithm = TokenAccumulation()
    assert algorithm.state_dict()['repr'] == repr(algorithm)


@pytest.mark.parametrize('uses_logits', [False, True])
def test_zero_reaches_only_parameters_of_the_loss(uses_logits):
    """Under FSDP ranks must reduce gradients of the same parameters, also if a microbatch of one has no label."""
    head = torch.nn.Linear(3, 5)
    pooler = torch.nn.Linear(3, 5)
    hidden = torch.ones(2, 4, 3)
    scale = torch.ones(3, requires_grad=True)
    outputs = {'logits': head(hidden), 'scaled': hidden * scale, 'pooled': pooler(hidden)}
    no_labels = torch.full((2, 4), -100)
    # Some losses do without logits if there is no label.
    loss = {'lm': torch.tensor(0.0), 'norm': outputs['scaled'].square().mean()}
    if uses_logits:
        loss = torch.nn.functional.cross_entropy(outputs['logits'].flatten(0, 1), no_labels.flatten())
        assert loss.isnan()
    attached_zero(outputs, loss).backward()
    assert torch.equal(head.weight.grad, torch.zeros(5, 3))
    assert pooler.weight.grad is None


def test_empty_sum_of_sharded_parameters(tmp_path):
    """A step of text under FSDP2 adds it to a loss without a gradient, if only layers of an encoder are trained."""
    layer = torch.nn.Linear(3, 5)
    with group_of_one_rank(tmp_path):
        fully_shard(layer, mesh=init_device_mesh('cpu', (1,)))
        loss = torch.tensor(1.5) + empty_sum(layer.weight)
        loss.backward()
    assert type(loss) is torch.Tensor
    assert torch.equal(layer.weight.grad.to_local(), torch.zeros(5, 3))
