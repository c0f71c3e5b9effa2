# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging

import pytest
import torch
from composer.models import HuggingFaceModel

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc.row_counts import RowCounts, with_rows
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit, loader, relative_error

SHAPE = [(4, 2), (5, 3), (9, 0), (14, 11), (6, 1)]
MODALITIES = {'lm': 'tokens', 'router': 'microbatches', 'contrastive': 'samples'}


class TermsModel(HuggingFaceModel):
    """A causal loss, a per-sample term and a per-microbatch term, as a dict or a tuple."""

    def __init__(self, model, *, form='dict', absent=(), order=None):
        super().__init__(model, shift_labels=True, use_logits=True)
        self.form, self.absent, self.order = form, absent, order

    def terms(self, outputs):
        logits = outputs['logits'].float()
        return {
            'lm': outputs['loss'],
            'contrastive': logits[:, 0].square().mean(),  # one value a sample, averaged over samples
            'router': logits[:, 0, :5].exp().mean().square(),  # a statistic of the microbatch
        }

    def loss(self, outputs, batch):
        terms = self.terms(outputs)
        if len(batch['input_ids']) == 1:
            terms = {name: value for name, value in terms.items() if name not in self.absent}
        if self.form == 'tuple':
            return (terms['lm'], 2 * terms['lm'])
        if self.form == 'total':
            return {**terms, 'total': sum(terms.values())}
        return terms


class SequenceLoss(HuggingFaceModel):
    """The losses of a row's tokens summed up over a constant, as Dr. GRPO has them: a mean over samples alone."""

    def loss(self, outputs, batch):
        return {'lm': summed_by_row(outputs['logits'], batch['labels']).mean() / 10}


def summed_by_row(logits, labels):
    flat = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction='none')
    return flat.sum(dim=1)


def gradients_of(model, total):
    model.zero_grad()
    total.backward()
    return {f'model.{name}': p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def expected_total(model, batch, microbatch_size, *, absent=()):
    """Every term by its definition: sums over tokens, samples, microbatches, each over its own number."""
    labels, rows = batch['labels'], len(batch['labels'])
    logits = model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits.float()
    lm = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    per_sample = logits[:, 0].square().mean(dim=1)
    parts = [range(i, min(i + microbatch_size, rows)) for i in range(0, rows, microbatch_size)]
    counted = [i for part in parts for i in part if not ('contrastive' in absent and len(part) == 1)]
    contrastive = per_sample[counted].sum() / rows
    routers = [logits[list(part)][:, 0, :5].exp().mean().square() for part in parts]
    return {'lm': lm, 'contrastive': contrastive, 'router': torch.stack(routers).mean()}


@pytest.mark.parametrize(('form', 'microbatch_size'), [('dict', 1), ('dict', 3), ('total', 2), ('total', 5)])
def test_every_term_has_its_own_denominator(form, microbatch_size):
    model = text_model()
    batch = collate(text_rows(SHAPE))
    terms = expected_total(model, batch, microbatch_size)
    expected = gradients_of(model, sum(terms.values()))
    model.zero_grad()
    recorder = fit(TermsModel(model, form=form), loader(batch), loss_units=MODALITIES, microbatch_size=microbatch_size)
    assert relative_error(recorder.gradients, expected) < 1e-6
    for name, value in terms.items():
        assert recorder.logged(f'loss/train/{name}') == pytest.approx([value.item()], rel=1e-6)
    assert recorder.logged('loss/train/total') == pytest.approx([sum(terms.values()).item()], rel=1e-6)


def test_term_absent_in_some_microbatches():
    model = text_model()
    batch = collate(text_rows(SHAPE))
    terms = expected_total(model, batch, 2, absent=('contrastive',))
    expected = gradients_of(model, sum(terms.values()))
    model.zero_grad()
    recorder = fit(TermsModel(model, absent=('contrastive',)), loader(batch), loss_units=MODALITIES)
    assert relative_error(recorder.gradients, expected) < 1e-6
    assert recorder.logged('loss/train/contrastive') == pytest.approx([terms['contrastive'].item()], rel=1e-6)


@pytest.mark.parametrize('microbatch_size', [1, 2])
def test_tuple_losses_are_token_means(microbatch_size):
    model = text_model()
    batch = collate(text_rows(SHAPE))
    expected = gradients_of(model, 3 * expected_total(model, batch, 1)['lm'])
    model.zero_grad()
    recorder = fit(TermsModel(model, form='tuple'), loader(batch), microbatch_size=microbatch_size)
    assert relative_error(recorder.gradients, expected) < 1e-6


def test_number_of_microbatches_is_known():
    model = text_model()
    batch = collate(text_rows(SHAPE))
    # In order, under a budget of 2 x 14 tokens: rows 0 to 2, then 3 with 4.
    parts = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 3), slice(3, 5))]
    routers = torch.stack([expected_total(model, part, 3)['router'] for part in parts])
    terms = {**expected_total(model, batch, 5), 'router': routers.mean()}
    expected = gradients_of(model, sum(terms.values()))
    model.zero_grad()
    data = token_data_spec(loader(batch), regroup=False)
    assert [len(m['input_ids']) for m in data.split_batch(data.batch_transforms(batch), 2)] == [3, 2]
    recorder = fit(TermsModel(model), data, loss_units=MODALITIES)
    assert relative_error(recorder.gradients, expected) < 1e-6
    assert recorder.logged('loss/train/router') == pytest.approx([terms['router'].item()], rel=1e-6)


def test_term_without_unit_is_refused():
    model = TermsModel(text_model())
    units = {'lm': 'tokens', 'router': 'microbatches'}
    with pytest.raises(RuntimeError, match="no unit for 'contrastive'"):
        fit(model, loader(collate(text_rows(SHAPE))), loss_units=units)


def test_units_without_a_dict_loss():
    with pytest.raises(RuntimeError, match='must go with a dict loss'):
        fit(text_model(), loader(collate(text_rows(SHAPE))), loss_units={'lm': 'tokens'})


@pytest.mark.parametrize(
    ('copies', 'microbatch_size', 'wrapped'), [(0, 1, False), (0, 2, True), (0, 5, False), (1, 1, True), (1, 2, True)]
)
def test_loss_of_samples_alone(copies, microbatch_size, wrapped):
    model, batch = text_model(), collate(text_rows(SHAPE))
    rows = len(SHAPE) - copies
    logits = model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
    expected = gradients_of(model, summed_by_row(logits, batch['labels'])[:rows].mean() / 10)
    model.zero_grad()
    given = with_rows(batch, [RowCounts()] * rows + [RowCounts(samples=0)] * copies) if copies else batch
    data = token_data_spec(loader(given)) if wrapped or copies else loader(given)
    recorder = fit(
        SequenceLoss(model, use_logits=True), data, loss_units={'lm': 'samples'}, microbatch_size=microbatch_size
    )
    assert relative_error(recorder.gradients, expected) < 1e-6


class NormTerm(HuggingFaceModel):
    """Beside the mean over tokens one over rows, which does not ask for their labels."""

    def loss(self, outputs, batch):
        return {'lm': outputs['loss'], 'norm': outputs['logits'][:, 0].square().mean()}


def test_sample_term_beside_a_dummy_row():
    model: HuggingFaceModel = NormTerm(text_model(), shift_labels=True, use_logits=True)
    rows = len(SHAPE)
    batch, algorithm = collate(text_rows(SHAPE)), TokenAccumulation(loss_units={'lm': 'tokens', 'norm': 'samples'})
    fit(model, batch, algorithms=[algorithm], microbatch_size=rows)
    given = with_rows(batch, [RowCounts()] * (rows - 1) + [RowCounts(samples=0)])
    with pytest.raises(RuntimeError, match=r'gradient in such rows \(1 of 5 rows fill up'):
        fit(model, given, algorithms=[algorithm], microbatch_size=rows)


def test_noise_scaled_by_width_is_said(caplog):
    model = text_model()
    setattr(model.model.embed_tokens, 'neftune_noise_alpha', 5.0)  # noqa: B010
    with caplog.at_level(logging.WARNING):
        fit(model, collate(text_rows(SHAPE)))
    assert 'NEFTune' in caplog.text


def test_state_holds_what_composers_algorithms_save():
    algorithm = TokenAccumulation()
    assert algorithm.state_dict()['repr'] == repr(algorithm)
