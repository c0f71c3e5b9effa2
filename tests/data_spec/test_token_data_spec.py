# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copy
import logging
import random

import pytest
import torch
from composer import Trainer
from composer.core import Event
from composer.metrics import LanguageCrossEntropy
from torch.utils.data import DataLoader

from composer_tokacc import BatchLayout, row_counts, token_data_spec
from composer_tokacc.data_spec.pieces import CutRules, padded_candidates
from composer_tokacc.layout import describe
from composer_tokacc.planning import CostModel
from tests.matrix.harness import measure, plain_gradients
from tests.matrix.native_models import NativeModel
from tests.matrix.subjects import SUBJECTS
from tests.support.exactness import family_batch, gradients_of, rows_of, split
from tests.support.families import FAMILIES
from tests.support.small_batches import TEXT, text_batch
from tests.support.text import collate, text_model, text_rows
from tests.support.training import On, fit, hugging_face, loader, reference_gradients, relative_error, train

SHAPE = [(4, 2), (5, 3), (9, 7), (14, 11), (6, 1), (3, 2)]


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('regroup', [True, False])
def test_cap_is_hard_and_rows_complete(side, regroup):
    generator = random.Random(0)
    for _ in range(200):
        shape = [(generator.randint(1, 40), 1) for _ in range(generator.randint(1, 24))]
        batch = collate(text_rows(shape), side=side)
        size, multiple = generator.choice([1, 1.5, 2, 3, 5, 8]), generator.choice([1, 1, 8])
        width = batch['input_ids'].shape[1]
        slot_tokens = width + generator.choice([0, 0, 7])
        microbatches = split(batch, size, slot_tokens=slot_tokens, regroup=regroup, width_multiple=multiple)
        assert rows_of(microbatches) == rows_of([batch])
        for microbatch in microbatches:
            rows, cut = microbatch['input_ids'].shape
            assert rows * cut <= size * slot_tokens
            # On the left nothing is trimmed before the check has seen the model.
            longest = int(microbatch['attention_mask'].sum(dim=1).max()) if side == 'right' else width
            assert cut == min(-(-longest // multiple) * multiple, width)


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('regroup', [True, False])
def test_bfloat16_rows_of_either_side(side, regroup):
    """As near to double precision as one whole forward in bfloat16 is."""
    model = text_model().bfloat16()
    batch = collate(text_rows(SHAPE), side=side)
    expected, _ = reference_gradients(model, batch)
    round_off = relative_error(plain_gradients(hugging_face(copy.deepcopy(model)), batch), expected)
    for microbatch_size in (1, 2, 3):
        recorder = fit(copy.deepcopy(model), batch, regroup=regroup, microbatch_size=microbatch_size)
        assert relative_error(recorder.gradients, expected) < 2 * round_off
    stock, _, _ = train(copy.deepcopy(model), loader(batch))
    assert relative_error(stock.gradients, expected) > 10 * round_off  # so the test can fail


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('loss', ['per row', 'all positions'])
def test_bfloat16_refusals_of_either_side(side, loss):
    batch = collate(text_rows(SHAPE), side=side)
    assert measure(NativeModel(loss).bfloat16(), batch, 2).kind == 'refused'
    assert fit(NativeModel('causal').bfloat16(), batch).gradients  # its neighbour is trained


# Patches in one run, images in slots, tiles: the ways in which tensors belong to rows.
@pytest.mark.parametrize('name', ['llama', 'llava', 'llava_next', 'qwen2_vl', 'idefics3', 'gemma3'])
def test_microbatches_add_up(name):
    case = FAMILIES[name]()
    batch = family_batch(case)
    expected = gradients_of(case.model, [batch])
    for size, regroup in ((1, True), (2, True), (2, False), (3, False), (6, True)):
        found = gradients_of(case.model, split(batch, size, regroup=regroup))
        assert relative_error(found, expected) < 1e-6, (size, regroup)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_rows_without_padding_tell_no_trimming(side):
    """Rules that were tried on rows of equal length would hold for padded rows that nobody has looked at."""
    layout, rules = BatchLayout(family=TEXT), CutRules()
    equal = describe(layout, text_batch([5, 5], side=side))
    assert list(padded_candidates(equal, rules)) == [rules]
    padded = describe(layout, text_batch([5, 3], side=side))
    assert len(list(padded_candidates(padded, rules))) > 1


def test_smaller_size_makes_no_fewer_microbatches():
    batch = collate(text_rows(SHAPE))
    counts = [len(split(batch, size)) for size in (8, 4, 2, 1)]
    assert counts == sorted(counts)
    assert counts[0] == 1


def test_same_batch_is_cut_alike():
    batch = collate(text_rows(SHAPE))
    spec = token_data_spec(loader(batch))
    before = copy.deepcopy(batch)
    first, second = (spec.split_batch(batch, 2) for _ in range(2))
    for part, again in zip(first, second, strict=True):
        assert all(torch.equal(part[key], again[key]) for key in before)
    assert all(torch.equal(batch[key], value) for key, value in before.items())


def test_order_is_kept_without_regrouping():
    microbatches = split(collate(text_rows(SHAPE)), 2, regroup=False)
    lengths = [row.real_tokens for microbatch in microbatches for row in row_counts.rows_of(microbatch)]
    assert lengths == [length for length, _ in SHAPE]


def test_microbatch_without_room_is_refused():
    with pytest.raises(ValueError, match='must be positive, got: 0'):
        split(collate(text_rows(SHAPE)), 0)
    batch = {**collate(text_rows(SHAPE)), 'sample_ids': [f'sample-{row}' for row in range(len(SHAPE))]}
    with pytest.raises(ValueError, match=r"got: sample 'sample-3' of 14 tokens, over the cap of 12"):
        split(batch, 2, slot_tokens=6)


def test_oversized_row_is_computed_alone(caplog):
    batch = collate(text_rows(SHAPE))
    spec = token_data_spec(loader(batch), slot_tokens=6, on_oversize='warn')
    with caplog.at_level(logging.WARNING, logger='composer_tokacc'):
        microbatches = spec.split_batch(spec.batch_transforms(batch), 1)
    assert rows_of(microbatches) == rows_of([batch])
    over = [m for m in microbatches if m['input_ids'].numel() > 6]
    assert sorted(m['input_ids'].shape for m in over) == [(1, 9), (1, 14)]
    assert len([record for record in caplog.records if 'row 3 of 14 tokens' in record.message]) == 1


def test_counters_are_exact_ints():
    batch = collate(text_rows(SHAPE))
    spec = token_data_spec(loader(batch))
    for given in (batch, spec.batch_transforms(batch)):
        assert spec.get_num_tokens_in_batch(given, token_type='loss_generating') == 26
        assert spec.get_num_tokens_in_batch(given) == sum(length for length, _ in SHAPE)
        assert spec.get_num_samples_in_batch(given) == 6


def test_evaluation_gives_the_true_mean():
    model = text_model()
    rows = text_rows(SHAPE)
    _, loss = reference_gradients(model, collate(rows))
    metric = LanguageCrossEntropy()
    composer_model = hugging_face(model, eval_metrics=[metric])
    data = token_data_spec(DataLoader(rows, batch_size=4, collate_fn=collate))
    trainer = fit(composer_model, loader(collate(rows))).trainer
    trainer.eval(data)
    assert trainer.state.eval_metrics['eval']['LanguageCrossEntropy'].compute().item() == pytest.approx(loss, rel=1e-6)
    with torch.no_grad():
        batch = data.batch_transforms(collate(rows))
        chunks = data.split_batch(batch, 4)
        assert [len(chunk['input_ids']) for chunk in chunks] == [4, 2]
        dropped = data.split_batch(chunks[0], 3)[0]  # as the trainer drops a sampler's padding
        assert dropped['attention_mask'].sum(dim=1).tolist() == [4, 5, 9]


def test_total_loss_equals_composer_metric():
    rows = text_rows(SHAPE)
    composer_model = hugging_face(text_model(), metrics=[LanguageCrossEntropy()])
    recorder = fit(composer_model, collate(rows))
    metric = recorder.logged('metrics/train/LanguageCrossEntropy')[-1:]
    assert recorder.logged('loss/train/total') == pytest.approx(metric, rel=1e-6)


@pytest.mark.parametrize('has_metrics', [False, True])
def test_microbatches_are_copied_for_metrics(has_metrics, monkeypatch):
    copied = []
    original = torch.Tensor.__deepcopy__
    monkeypatch.setattr(torch.Tensor, '__deepcopy__', lambda one, memo: (copied.append(one), original(one, memo))[1])
    composer_model = hugging_face(text_model(), metrics=[LanguageCrossEntropy()] if has_metrics else None)
    batch = collate(text_rows(SHAPE))
    data = token_data_spec(loader(batch))

    def num_copied(state):
        return sum(tensor.dtype == torch.long and tensor.dim() == 2 for tensor in copied)

    watch = [On(Event.BEFORE_TRAIN_BATCH, lambda state: copied.clear()), On(Event.AFTER_TRAIN_BATCH, num_copied)]
    expected, _ = reference_gradients(composer_model.model, batch)
    recorder = fit(composer_model, data, callbacks=watch)
    assert relative_error(recorder.gradients, expected) < 1e-6
    assert bool(watch[1].values[0]) == has_metrics


def test_late_train_metrics_keep_labels(monkeypatch):
    """Composer's eval_forward shifts the labels of the copy in place; a closure called again would train on them."""
    monkeypatch.setattr(Trainer, '_use_closures', lambda _: True)

    class Twice(torch.optim.SGD):
        def step(self, closure):
            closure()
            return super().step(closure)

    def set_metrics(state):
        state.train_metrics = {'late': LanguageCrossEntropy()}

    composer_model, batch = hugging_face(text_model()), collate(text_rows([(4, 1), (9, 5), (14, 11), (6, 2)]))
    expected, loss = reference_gradients(composer_model.model, batch)
    recorder = fit(
        composer_model,
        batch,
        callbacks=[On(Event.BEFORE_TRAIN_BATCH, set_metrics)],
        optimizer=Twice(composer_model.parameters(), lr=0.0),
    )
    assert [relative_error(found, expected) < 1e-6 for found in recorder.steps] == [True, True]
    assert recorder.logged('metrics/train/late')[-1] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'loss_tokens': 'shifted'}, "must be .*got: 'shifted'"),
        ({'on_oversize': 'skip'}, "`on_oversize` must be 'raise' or 'warn', got: 'skip'"),
        ({'slot_tokens': 0}, '`slot_tokens` must be a positive integer, got: 0'),
        ({'width_multiple': -8}, '`width_multiple` must be a positive integer, got: -8'),
        ({'slot_tokens': True}, '`slot_tokens` must be a positive integer, got: True'),
        ({'width_multiple': None}, '`width_multiple` must be a positive integer, got: None'),
        ({'equal_counts': 'always'}, "`equal_counts` must be True, False or 'auto'"),
        ({'regroup': 'no'}, "`regroup` must be True or False, got: 'no'"),
        ({'packing': 1}, "`packing` must be True, False or 'auto', got: 1"),
        ({'layout': 'llava'}, "`layout` must be a BatchLayout, got: 'llava'"),
        ({'model': 'llama'}, "`model` must be a Module, got: 'llama'"),
        ({'cost': 'auto'}, "`cost` must be a CostModel, got: 'auto'"),
        ({'split_batch': lambda batch, size: [batch]}, '`split_batch` must be left'),
    ],
)
def test_bad_arguments_get_one_clear_line(kwargs, message):
    with pytest.raises(ValueError, match=message):
        token_data_spec(loader(), **kwargs)


def test_dearer_launch_makes_fewer_microbatches():
    batch = collate(text_rows([(length, 2) for length in range(4, 36)]))
    counts = []
    for launch in (1.0, 1000.0):
        spec = token_data_spec(loader(batch), cost=CostModel(launch=launch))
        parts = spec.split_batch(spec.batch_transforms(batch), 8)
        assert max(part['input_ids'].numel() for part in parts) <= 8 * 35
        counts.append(len(parts))
    assert counts[0] > counts[1]


# Several models, several specs.


@pytest.mark.parametrize('has_spec', [True, False])
def test_unshifted_first_labels_of_documents(has_spec):
    batch = collate(text_rows([(12, 12)] * 3))
    batch['labels'] = batch['input_ids'].roll(-1, dims=1)
    batch['labels'][:, [4, 11]] = -100  # last tokens of the two documents of each row
    batch['position_ids'] = torch.tensor([[*range(5), *range(7)]] * 3)
    model = NativeModel('unshifted')
    data = loader(batch)
    recorder = fit(model, token_data_spec(data) if has_spec else data, microbatch_size=1)
    assert relative_error(recorder.gradients, plain_gradients(model, batch)) < 1e-6


def test_second_model_is_proven_again():
    """What may be trimmed for a Llama moves the positions of GPT-2."""
    full, left = collate(text_rows([(9, 3)] * 4)), collate(text_rows(SHAPE), side='left')
    batches = loader(left, full)
    spec = token_data_spec(batches)
    fit(SUBJECTS['llama'].model('large'), spec, max_duration='2ba')
    batches.dataset.batches = [full, left]  # pyright: ignore[reportAttributeAccessIssue]
    model = SUBJECTS['gpt2'].model('large')
    recorder = fit(model, spec, max_duration='2ba')
    for found, batch in zip(recorder.steps, (full, left), strict=True):
        assert relative_error(found, plain_gradients(model, batch)) < 1e-6


def test_only_used_spec_is_checked():
    data = loader(collate(text_rows(SHAPE)))
    used, _ = token_data_spec(data), token_data_spec(data, packing=True)
    model = SUBJECTS['bloom'].model('large')  # refuses to be packed
    recorder = fit(model, used)
    assert relative_error(recorder.gradients, plain_gradients(model, collate(text_rows(SHAPE)))) < 1e-6
