# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
import torch

from composer_tokacc import BatchLayout, TokenMonitor, token_data_spec
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.data_spec.pieces import CutRules
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.row_counts import RowCounts, rows_of, with_counts, with_rows
from tests.support.text import collate, text_model, text_rows
from tests.support.training import assert_exact, fit, hugging_face, loader, reference_gradients, relative_error

BOUNDS = ('attention_mask', 'position_ids')
SHAPE = [(4, 2), (5, 3), (9, 7), (14, 11), (6, 0), (3, 2)]


@pytest.mark.parametrize(
    ('side', 'attention', 'microbatch_size'),
    [('left', 'sdpa', 1), ('left', 'eager', 2), ('right', 'sdpa', 2), ('right', 'sdpa', 6), ('right', 'eager', 1)],
)
def test_packed_text_is_exact(side, attention, microbatch_size):
    model = text_model(attn_implementation=attention)
    batch = collate(text_rows(SHAPE), side=side)
    expected, loss = reference_gradients(model, batch, torch.float32 if attention == 'eager' else torch.float64)
    recorder = fit(model, batch, packing=True, microbatch_size=microbatch_size, callbacks=[TokenMonitor()])
    assert relative_error(recorder.gradients, expected) < 1e-6
    assert recorder.logged('loss/train/total') == pytest.approx([loss], rel=1e-6)
    assert recorder.logged('token_monitor/padding_ratio') == [0.0]


def test_auto_packs_nothing_if_that_saves_nothing():
    """Rows of equal length, one in each microbatch, cost the same packed as not packed."""
    batches = loader(collate(text_rows([(9, 2), (9, 7), (9, 4), (9, 1)])))
    fit(text_model(), token_data_spec(batches, packing='auto'), microbatch_size=1)
    assert split_of(batches).rules.packing == ''


def test_packed_left_padding_keeps_no_columns():
    """A model that counts positions from column 0 has rows padded on the left shifted, except when they are packed."""
    rows = text_rows(SHAPE)
    batches = loader(collate(rows, side='left'))
    spec = token_data_spec(batches, packing=True)
    split_of(batches).adopt(CutRules(left='shift', packing='documents'))
    microbatches = spec.split_batch(next(iter(batches)), 2)
    assert len(microbatches) > 1
    documents = []
    for microbatch in microbatches:
        lengths = microbatch['attention_mask'].sum(dim=1).tolist()
        assert sum(lengths) == microbatch['input_ids'].shape[1]
        starts = microbatch['position_ids'][0] == 0
        assert starts.nonzero().flatten().tolist() == [sum(lengths[:index]) for index in range(len(lengths))]
        documents += [ids.tolist() for ids in microbatch['input_ids'][0].split(lengths)]
    assert sorted(documents) == sorted(row['input_ids'][0].tolist() for row in rows)


def test_leak_between_documents_is_refused(monkeypatch):
    # Without bounds every document sees the ones before it. The positions are bounds too, because Transformers finds
    # documents by positions that restart at 0.
    model = hugging_face(text_model())
    forward = type(model).forward

    def leaking(self, batch):
        return forward(self, {key: value for key, value in batch.items() if key not in BOUNDS})

    monkeypatch.setattr(type(model), 'forward', leaking)
    batch = collate(text_rows(SHAPE), side='right')
    with pytest.raises(RuntimeError, match=r'leak from one document to the next'):
        fit(model, batch, packing=True)


@pytest.mark.parametrize('packing', [True, 'auto'])
def test_packing_without_the_algorithm_is_refused(packing):
    with pytest.raises(RuntimeError, match=f'`packing={packing!r}` needs TokenAccumulation'):
        fit(text_model(), collate(text_rows(SHAPE)), packing=packing, algorithms=[])


def test_unpackable_entries_are_refused():
    batch = collate(text_rows(SHAPE))
    layout = BatchLayout.infer(batch)
    with pytest.raises(ValueError, match='`position_ids` must be absent'):
        pack_rows(layout, {**batch, 'position_ids': torch.zeros_like(batch['input_ids'])})


@pytest.mark.parametrize('first_is_plain', [True, False])
@pytest.mark.parametrize('fault', ['hole', 'labels on padding'])
def test_interrupted_rows_are_refused(fault, first_is_plain):
    plain = collate(text_rows(SHAPE))
    batch = collate(text_rows(SHAPE), labels_on_pads=7 if fault == 'labels on padding' else -100)
    batch['attention_mask'][3, 5:7] = int(fault != 'hole')
    batch['labels'][3, :8] = -100
    batches = [plain, batch] if first_is_plain else [batch]
    with pytest.raises((ValueError, RuntimeError), match='Rows must be one run of tokens'):
        fit(text_model(), *batches, packing=True, max_duration='2ba')


def test_one_label_behind_the_tokens():
    model, batch = text_model(), collate(text_rows(SHAPE))
    for row, (length, _) in enumerate(SHAPE):
        batch['labels'][row, length : length + 1] = 7
    assert_exact(model, batch, packing=True)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_empty_rows_are_packed(side):
    """As a rank's share of a step, or of several microbatches."""
    model, plain, nothing = text_model(), collate(text_rows(SHAPE)), collate(text_rows(SHAPE), side=side)
    nothing['attention_mask'][:] = 0
    nothing['labels'][:] = -100
    recorder = fit(model, plain, nothing, plain, packing=True)
    assert not any(gradient.any() for gradient in recorder.steps[1].values())
    assert relative_error(recorder.steps[2], recorder.steps[0]) < 1e-6
    assert recorder.logged('loss/train/total')[1] == 0


def test_packed_row_keeps_the_counts_of_its_documents():
    batch = {**collate(text_rows([(4, 2), (5, 3), (3, 2)])), 'source': ['a', 'b', 'c']}
    marked = with_rows(batch, [RowCounts(), RowCounts(), RowCounts(samples=0)])
    counted = with_counts(marked, token_weights='sqrt')
    (packed,) = rows_of(pack_rows(BatchLayout.infer(counted), counted))
    assert packed.documents == tuple(rows_of(counted))
    assert [document.source for document in packed.documents] == ['a', 'b', None]
    assert (packed.samples, packed.real_tokens, packed.loss_tokens) == (2, 9, 5)
    assert packed.loss_weight == pytest.approx(2**0.5 + 3**0.5)
