# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The first-batch check refuses rows that depend on each other, and chooses a cut that keeps their gradients."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from composer_tokacc import token_data_spec
from composer_tokacc.data_spec.pieces import CutRules
from tests.support.text import VOCABULARY, collate, text_model, text_rows
from tests.support.training import fit, hugging_face, loader, reference_gradients, relative_error

SHAPE = [(4, 2), (5, 3), (9, 7), (14, 11), (6, 1), (3, 2)]
EVEN = [(9, 4), (9, 7), (9, 2), (9, 8)]


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(config)


class WithoutPositionIds(GPT2LMHeadModel):
    """Takes no ``position_ids``, as some models with their own code."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False)


def rules_after(model, batch, **kwargs):
    data = token_data_spec(loader(batch), **kwargs)
    recorder = fit(model, data)
    expected, _ = reference_gradients(model, batch)
    assert relative_error(recorder.gradients, expected) < 1e-6
    return data.split_batch.__self__._split.rules


@pytest.mark.parametrize(
    ('make', 'side', 'rules'),
    [
        (text_model, 'right', CutRules(right='trim', right_width=14)),
        (text_model, 'left', CutRules(left='trim', left_width=14)),
        (gpt2, 'left', CutRules(left='shift', left_width=14)),
        (lambda: WithoutPositionIds(gpt2().config), 'left', CutRules(left='keep', left_width=14)),
    ],
    ids=['right', 'left', 'positions are written', 'positions would move'],
)
def test_padding_is_cut_if_exact(make, side, rules, caplog):
    with caplog.at_level(logging.INFO, logger='composer_tokacc'):
        assert rules_after(make(), collate(text_rows(SHAPE), side=side)) == rules
    assert any('The first-batch check took' in record.message for record in caplog.records)


def test_cuts_that_failed_are_logged(caplog):
    """GPT-2 counts positions from column 0, so rows padded on the left cannot just be trimmed."""
    with caplog.at_level(logging.INFO, logger='composer_tokacc'):
        rules_after(gpt2(), collate(text_rows(SHAPE), side='left'))
    failed = [record.message for record in caplog.records if record.message.startswith('CutRules(')]
    assert len(failed) == 1
    assert "left='trim'" in failed[0]
    assert 'position' in failed[0]


@pytest.mark.parametrize('side', ['left', 'right'])
def test_later_padding_is_proven_first(side):
    model = gpt2()
    batches = [collate(text_rows(EVEN)), collate(text_rows(SHAPE), side=side), collate(text_rows(SHAPE[1:]), side=side)]
    data = token_data_spec(loader(*batches))
    recorder = fit(model, data, max_duration='3ba')
    for batch, gradients in zip(batches, recorder.steps, strict=True):
        assert relative_error(gradients, reference_gradients(model, batch)[0]) < 1e-6
    expected = {'left': CutRules(left='shift', left_width=14), 'right': CutRules(right='trim', right_width=14)}
    assert data.split_batch.__self__._split.rules == expected[side]


class WritesIntoBatch(GPT2LMHeadModel):
    """Writes into its inputs, as models that normalise images in place do."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None):
        input_ids.add_(1).remainder_(VOCABULARY)
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False)


@pytest.mark.parametrize('by', ['model', 'transforms'])
@pytest.mark.parametrize('shape', [[(9, 3)], [(14, 11), (5, 3)]], ids=['one row', 'longest first'])
def test_check_leaves_the_batch_alone(by, shape):
    def transform(microbatch):
        microbatch['input_ids'].add_(1).remainder_(VOCABULARY)
        return microbatch

    batch = collate(text_rows(shape))
    trained_batch = {**batch, 'input_ids': (batch['input_ids'] + 1) % VOCABULARY}
    if by == 'model':
        model = WritesIntoBatch(gpt2().config)
        recorder = fit(model, batch)
    else:
        model = GPT2LMHeadModel(gpt2().config)
        recorder = fit(model, batch, microbatch_transforms=transform)
    plain = gpt2()
    plain.load_state_dict(model.state_dict())
    expected, _ = reference_gradients(plain, trained_batch)
    assert relative_error(recorder.gradients, expected) < 1e-6


class MixesRows(torch.nn.Module):
    """Adds the mean of all rows to every row."""

    def forward(self, hidden):
        return hidden + hidden.mean(dim=0, keepdim=True)


@pytest.mark.parametrize('make', [lambda batch: loader(batch), lambda batch: token_data_spec(loader(batch))])
def test_coupled_rows_are_refused_by_name(make):
    model = text_model()
    model.model.embed_tokens = torch.nn.Sequential(model.model.embed_tokens, MixesRows())
    before = copy.deepcopy(model.state_dict())
    ids = [f'sample-{row}' for row in range(len(SHAPE))]
    batch = {**collate(text_rows(SHAPE)), 'sample_ids': ids}
    with pytest.raises(
        RuntimeError,
        match=r"must not depend on the rows beside.* sample 'sample-\d': the gradient at its logits changes by",
    ):
        fit(model, make(batch), optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_coupled_rows_without_logits():
    model = text_model()
    model.model.embed_tokens = torch.nn.Sequential(model.model.embed_tokens, MixesRows())
    wrapped = hugging_face(model)
    forward = wrapped.forward
    wrapped.forward = lambda batch: {'loss': forward(batch)['loss']}
    with pytest.raises(RuntimeError, match='must not depend on the rows beside it'):
        fit(wrapped, loader(collate(text_rows(SHAPE))))


def test_label_on_first_token_behind_padding(caplog):
    batch = collate(text_rows([(4, 4), (5, 3), (9, 7), (14, 11)]), side='left')
    model = text_model()
    with caplog.at_level(logging.WARNING, logger='composer_tokacc'):
        rules = rules_after(model, batch)
    assert rules == CutRules(left='trim', left_width=14)
    assert sum('have a label on their first token' in record.message for record in caplog.records) == 1
