# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Models and loss terms that couple the rows of a microbatch are refused, or accepted on request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from composer_tokacc.checks.comparison import CutFailure, CutKind, Point, RowComparison, _Change
from composer_tokacc.data_spec.split import split_of
from tests.matrix.native_models import NativeModel, has_loss
from tests.support.text import ONE_UNLABELLED, VOCABULARY, gpt2, next_token_loss, one_layer_model, ragged_batch
from tests.support.training import GradientRecorder, fit, hugging_face, num_hooks


def with_batch_norm():
    model = one_layer_model()
    model.extra = torch.nn.BatchNorm1d(4)
    return model


@pytest.mark.parametrize('regroup', [True, False])
def test_batch_norm_in_training(regroup):
    """The refused model gets no hooks."""
    model = with_batch_norm()
    with pytest.raises(RuntimeError, match=r"1 BatchNorm in training mode, such as 'model\.extra'"):
        fit(model, ragged_batch(), regroup=regroup)
    assert num_hooks(model) == 0


def test_batch_norm_is_accepted_on_request():
    model = with_batch_norm()
    assert fit(model, ragged_batch(), loss_tokens='causal', check_loss=False).gradients


def with_term(term_of):
    """Returns a model with a second term ``term_of(model, outputs, batch)``. None: the microbatch leaves it out."""
    model = hugging_face(one_layer_model())
    plain_loss = model.loss

    def loss(outputs, batch):
        term = term_of(model, outputs, batch)
        terms = {} if term is None else {'pairs': term}
        return {'lm': plain_loss(outputs, batch), **terms}

    model.loss = loss
    return model


class CouplesPrompts(NativeModel):
    """The logits at the third token depend on the other rows."""

    def logits_of(self, batch):
        logits = super().logits_of(batch).clone()
        logits[:, 2] += 0.1 * logits[:, 2].mean(dim=0)
        return logits


def test_leak_where_no_token_has_a_label():
    """Later rows may have labels there, so the check adds some."""
    batch = ragged_batch([(9, 2), (8, 3), (7, 1), (12, 4)])
    assert (batch['labels'][:, :4] == -100).all()
    with pytest.raises(RuntimeError, match='rows beside it'):
        fit(CouplesPrompts('causal'), batch)


class CouplesStates(NativeModel):
    """Returns no logits. A term of the states depends on the other rows, but its value is small."""

    def forward(self, batch):
        states = self.states_of(batch)
        loss = self.loss_of(self.model.lm_head(states), batch['labels'])
        return {'loss': loss + 1e-6 * states.mean(dim=(0, 1)).square().sum()}


def test_small_term_of_states_without_logits():
    with pytest.raises(RuntimeError, match='rows beside it'):
        fit(CouplesStates('causal'), ragged_batch())


class SecondTask(NativeModel):
    """A second head has its own labels. The sum of both losses is divided by the number of the first labels."""

    def __init__(self, weight):
        super().__init__('causal')
        self.second_head = torch.nn.Linear(32, VOCABULARY)
        self.weight = weight

    def forward(self, batch):
        states = self.states_of(batch)
        logits = self.model.lm_head(states)
        num_labels = has_loss(batch['labels']).sum().clamp(min=1)
        second_sum = next_token_loss(self.second_head(states), batch['second_labels'], reduction='sum')
        loss = self.loss_of(logits, batch['labels']) + self.weight * second_sum / num_labels
        return {'loss': loss, 'logits': logits}


@pytest.mark.parametrize('weight', [1.0, 1e-5])
def test_second_labels_in_row_without_labels(weight):
    """The first batch has labels in every row. The second one has a row with labels of the second task only."""
    first = ragged_batch()
    first['second_labels'] = first['labels']
    later = ragged_batch(ONE_UNLABELLED)
    later['second_labels'] = later['labels'].clone()
    later['second_labels'][1, 1:4] = later['input_ids'][1, 1:4]
    recorder = GradientRecorder()
    with pytest.raises(RuntimeError, match='must be the mean over its loss-generating tokens'):
        fit(SecondTask(weight), first, later, recorder=recorder)
    assert len(recorder.steps) == 1


@pytest.mark.parametrize('unit', ['coupled_samples', 'microbatches'])
def test_terms_that_couple_rows_refuse_regrouping(unit):
    model = with_term(lambda model, outputs, batch: outputs['logits'].mean())
    with pytest.raises(RuntimeError, match=r"the terms \['pairs'\] of `loss_units`"):
        fit(model, ragged_batch(), loss_units={'lm': 'tokens', 'pairs': unit})


def of_two_rows(model, outputs, batch):
    """A row by itself leaves out the term, so its gradient depends on the cut."""
    first_logits = outputs['logits'].float()[:, 0]
    return (first_logits @ first_logits.T).mean() if len(first_logits) > 1 else None


def of_long_rows(model, outputs, batch):
    """It is not made of the last layers, so only its value shows that it is divided by some of the rows."""
    has_term = batch['attention_mask'].sum(dim=1) > 5
    states = model.model.get_input_embeddings()(batch['input_ids'][has_term, :1])
    return 100 * states.square().mean() if has_term.any() else None


def of_labelled_rows(model, outputs, batch):
    """All rows have labels, but the row without labels that fills up a rank would not be counted."""
    is_labelled = (batch['labels'] != -100).any(dim=1)
    return outputs['logits'][is_labelled, 0].square().mean()


def of_states_of_labelled_rows(model, outputs, batch):
    """It is not made of the last layers, so only its value shows that it leaves out rows without labels."""
    is_labelled = (batch['labels'] != -100).any(dim=1)
    states = model.model.get_input_embeddings()(batch['input_ids'][is_labelled, :1])
    return 100 * states.square().mean()


@pytest.mark.parametrize('term_of', [of_two_rows, of_long_rows, of_labelled_rows, of_states_of_labelled_rows])
def test_term_of_some_rows_is_refused(term_of):
    with pytest.raises(RuntimeError, match="'samples' must be means over samples"):
        fit(with_term(term_of), ragged_batch(), loss_units={'lm': 'tokens', 'pairs': 'samples'})


def of_documents(model, outputs, batch):
    """A packed row has one row of labels, so it does not show which of its documents have some."""
    states = model.model.get_input_embeddings()(batch['input_ids'])
    mask = batch['attention_mask'][..., None]
    means = (states * mask).sum(dim=1) / mask.sum(dim=1)
    is_labelled = (batch['labels'] != -100).any(dim=1)
    return (100 * means.square().sum(dim=1) * is_labelled).mean()


def test_packed_rows_without_labels():
    """Only a later batch has such rows, and the term is a mean over rows in every other cut."""
    model = with_term(of_documents)
    options = {'loss_units': {'lm': 'tokens', 'pairs': 'samples'}}
    batch = ragged_batch()
    with pytest.raises(RuntimeError, match="'samples' must be means over samples"):
        fit(model, batch, packing=True, **options)
    recorder = fit(model, batch, packing='auto', **options)
    assert not split_of(recorder.trainer.state.dataloader).packs_rows


def of_flagged_rows(batch, values):
    has_term = batch['flags'] > 0
    return (values.mean(dim=1) * has_term).sum() / has_term.sum().clamp(min=1)


def of_flagged_tokens(batch, values):
    has_term = ((batch['flags'] > 0) & (batch['labels'] != -100))[:, 1:]
    return (values[:, :-1] * has_term).sum() / has_term.sum().clamp(min=1)


ROW_FLAGS = torch.ones(6, dtype=torch.long)
TOKEN_FLAGS = ragged_batch()['attention_mask']


@pytest.mark.parametrize(
    ('term_of', 'unit', 'flags', 'place', 'missing'),
    [
        (of_flagged_rows, 'samples', ROW_FLAGS, 3, 0),
        (of_flagged_rows, 'samples', ROW_FLAGS, 3, -100),
        (of_flagged_tokens, 'tokens', TOKEN_FLAGS, (3, 13), 0),
    ],
)
def test_flag_that_a_later_batch_lacks(term_of, unit, flags, place, missing):
    """Only the second batch has something that the term leaves out, and each microbatch has one row."""
    later_flags = flags.clone()
    later_flags[place] = missing
    batches = [{**ragged_batch(), 'flags': flags}, {**ragged_batch(), 'flags': later_flags}]
    model = with_term(lambda model, outputs, batch: term_of(batch, outputs['logits'].square().mean(dim=-1)))
    recorder = GradientRecorder()
    with pytest.raises(
        RuntimeError, match=r"'samples' must be means|mean over its loss-generating tokens|row's losses"
    ):
        fit(model, *batches, loss_units={'lm': 'tokens', 'pairs': unit}, microbatch_size=1, recorder=recorder)
    assert len(recorder.steps) == 1


class CoupledDocuments(LlamaForCausalLM):
    """Its loss depends on which documents are together, but not on whether they are padded or packed."""

    factor_of = None
    """Returns a factor on the logits from the lengths of the documents. None: the loss has a term instead."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, position_ids=None, **kwargs):
        states = self.model(input_ids, attention_mask, position_ids=position_ids).last_hidden_state
        logits = self.lm_head(states)
        # The mask of packed rows has a row for each document, so these are the lengths of the documents.
        lengths = attention_mask.sum(dim=1)
        if self.factor_of is not None:
            logits = logits * self.factor_of(lengths)
            return CausalLMOutput(loss=next_token_loss(logits, labels), logits=logits)
        is_packed = len(attention_mask) > len(input_ids)
        is_real = attention_mask.any(dim=0) if is_packed else attention_mask
        sizes = states.square().mean(dim=-1)
        mean_size = (sizes * is_real).sum() / lengths.sum()
        return CausalLMOutput(loss=next_token_loss(logits, labels) + 0.1 * mean_size, logits=logits)


FACTORS = {
    'longest document': lambda lengths: 1 + 0.01 * lengths.max(),
    'median length': lambda lengths: 1 + 0.01 * lengths.median(),
    'only document': lambda lengths: 1.1 if len(lengths) == 1 else 1.0,
    'mean over all tokens': None,
}
SHORT_AND_LONG = [(5, 2), (5, 3), (14, 11), (14, 4), (5, 1), (5, 4)]
LONGEST_HAS_NO_LABEL = [(6, 2), (6, 3), (9, 0), (6, 1), (6, 4)]
"""A truncated row often has lost its answer. The loss of the other rows may depend on its length."""


COUPLINGS = [(name, SHORT_AND_LONG) for name in FACTORS]
COUPLINGS.append(('longest document', LONGEST_HAS_NO_LABEL))


@pytest.mark.parametrize(('coupling', 'shape'), COUPLINGS)
@pytest.mark.parametrize('packing', [False, True])
def test_loss_depends_on_the_other_documents(packing, coupling, shape):
    model = CoupledDocuments(one_layer_model().config)
    model.factor_of = FACTORS[coupling]
    message = 'mean over its loss-generating tokens|rows beside it|packed documents apart'
    with pytest.raises(RuntimeError, match=message):
        fit(model, ragged_batch(shape), packing=packing)


def test_label_whose_logit_is_masked():
    """Its loss is infinite. The label is not among those by which the loss rule is found."""
    model = one_layer_model()
    masked_id = torch.tensor([6])
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, masked_id, -torch.inf))
    batch = ragged_batch()
    assert masked_id in batch['labels']
    with pytest.raises(RuntimeError, match='must be a number, got: inf'):
        fit(model, batch)


def leaking_model():
    """Returns a fresh GPT-2. The rows see each other in its attention, which is small beside biases that are not 0."""
    model = gpt2()

    def center(module, args, output):
        states = output[0]
        return (states - 0.3 * states.mean(dim=0, keepdim=True), *output[1:])

    model.transformer.h[1].attn.register_forward_hook(center)
    return model


def test_leak_beside_biases_of_a_fresh_model():
    """The probe varies biases that are all 0."""
    with pytest.raises(RuntimeError, match='rows beside it'):
        fit(leaking_model(), ragged_batch())


class CouplesSecondForward(NativeModel):
    """Its loss runs the model twice. In the second forward the rows hardly see each other."""

    def forward(self, batch):
        outputs = super().forward(batch)
        states = self.states_of(batch)
        logits = self.model.lm_head(states + 1e-3 * states.mean(dim=0))
        return {**outputs, 'loss': outputs['loss'] + self.loss_of(logits, batch['labels'])}


def test_leak_in_the_second_forward():
    with pytest.raises(RuntimeError, match='rows beside it'):
        fit(CouplesSecondForward(next_token_loss, init='fresh'), ragged_batch())


def test_rank_with_the_change_explains_it():
    """This rank has no change, but it raises the error of the rank that has one."""
    point = Point('tokens', 0)
    change_here = _Change(point, row=0, error=0.0, factor=1.0, error_without_factor=0.0)
    change_there = _Change(point, row=1, error=1e-3, factor=1.0, error_without_factor=1e-3)

    class ProbeOfTwoRanks:
        is_random = False

        def gather(self, changes):
            return [changes, [change_there]]

    comparison = RowComparison.__new__(RowComparison)  # only what the method below reads
    comparison.probe = ProbeOfTwoRanks()
    comparison.rows = {'sample_ids': ['first', 'second']}
    comparison._counts = [1, 1]
    comparison.reference = SimpleNamespace(invalid_loss=None)
    comparison._aligned = lambda batch, result, rows: {}
    comparison._largest_changes = lambda gradients, rows: [change_here]
    comparison._allowed = lambda point, error: 1e-6
    comparison._explained = lambda difference, cut_kind: difference
    with pytest.raises(CutFailure, match="'second': the gradient at its logits changes by"):
        comparison._check_gradients({}, None, [0, 1], CutKind.SINGLE_ROW)
