# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Microbatches that a loader has collated: they stay as they are, and are cut again only if they must be."""

from __future__ import annotations

import logging
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from composer.models import HuggingFaceModel
from torch.utils.data import Dataset

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader, token_data_spec
from composer_tokacc.data_spec.pieces import CutRules
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.layout import BatchLayout, PreSplitBatch
from composer_tokacc.row_counts import num_samples
from tests.support.families import FAMILIES
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples
from tests.support.masked_text import masked_batch, masked_model
from tests.support.small_batches import LLAVA, TEXT, text_batch
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit, hugging_face, reference_gradients, relative_error

SHAPES = [[9, 8], [5, 4, 4, 3], [10]]
CAP = 20


def ready(shapes=SHAPES, *, side='right', images=False):
    """Microbatches of rows of these lengths; with a picture in the first row of all but the last."""
    microbatches = []
    for number, lengths in enumerate(shapes):
        batch = text_batch(lengths, side=side, names=[f'{number}.{row}' for row in range(len(lengths))])
        if images and number < len(shapes) - 1:
            batch['num_images'] = [1, *[0] * (len(lengths) - 1)]
            batch['pixel_values'] = torch.full((1, 3, 4, 4), float(number))
        elif images:
            batch['num_images'] = [0] * len(lengths)
        microbatches.append(batch)
    places = iter(range(100))
    return PreSplitBatch(microbatches, max_tokens=CAP, indices=[[next(places) for _ in lengths] for lengths in shapes])


def without_first_labels(batch):
    """Masks the labels of the first tokens, because on the left a pad may predict them."""
    return batch.map(lambda rows: {**rows, 'labels': rows['labels'].masked_fill(rows['labels'] == 1, -100)})


def spec_for(*, images=False, checked=True, left='trim', right='trim', needs_media=False, **kwargs):
    source = []
    spec = token_data_spec(source, layout=BatchLayout(family=LLAVA if images else TEXT), slot_tokens=10, **kwargs)
    split = spec.split_batch.__self__._split
    packing = 'documents' if kwargs.get('packing') else ''
    split.adopt(CutRules(left=left, right=right, needs_media=needs_media, packing=packing))
    split.checked = checked
    return spec


def names(microbatches):
    return [microbatch['names'] for microbatch in microbatches]


@pytest.fixture
def two_ranks(monkeypatch):
    """Makes this process one of two ranks. The other rank gives the same answers."""
    monkeypatch.setattr('composer_tokacc.data_spec.split.get_world_size', lambda: 2)
    monkeypatch.setattr('composer_tokacc.data_spec.split.max_over_ranks', list)


def is_handed_on(microbatches, batch):
    """The very tensors that the loader made, none copied."""
    assert len(microbatches) == len(batch.microbatches)
    for microbatch, source in zip(microbatches, batch.microbatches, strict=True):
        for key, value in source.items():
            assert microbatch[key] is value if isinstance(value, torch.Tensor) else microbatch[key] == value, key
        assert num_samples(microbatch) == len(microbatch['names'])


@pytest.mark.parametrize('side', ['right', 'left'])
def test_microbatches_are_not_copied(side):
    batch, spec = without_first_labels(ready(side=side)), spec_for()
    is_handed_on(spec.split_batch(spec.batch_transforms(batch), 2), batch)


def test_ranks_in_step_copy_nothing(two_ranks):
    batch, spec = ready([[9, 8], [5, 4, 4]], images=True), spec_for(images=True)
    batch.microbatches[-1].update(num_images=[1, 0, 0], pixel_values=torch.ones(1, 3, 4, 4))
    is_handed_on(spec.split_batch(batch, 2), batch)


def test_ranks_in_step_add_a_picture(two_ranks):
    batch, spec = ready([[9, 8], [5, 4], [10]], images=True), spec_for(images=True)
    first, second, last = spec.split_batch(batch, 4)
    assert (len(first['input_ids']), len(second['input_ids']), len(last['input_ids'])) == (2, 2, 2)
    assert first['pixel_values'] is batch.microbatches[0]['pixel_values']
    assert last['pixel_values'].shape == (1, 3, 4, 4)
    assert [num_samples(one) for one in (first, second, last)] == [2, 2, 1]


@pytest.mark.parametrize('size', [1, 1.5])
def test_too_large_microbatches_are_cut(size):
    batch = ready([[9, 8], [5, 4, 4, 3], [10]])
    microbatches = spec_for().split_batch(batch, size)
    for microbatch in microbatches:
        assert microbatch['input_ids'].numel() <= 10 * size
    assert sorted(chain.from_iterable(names(microbatches))) == sorted(batch['names'])
    uncut = next(microbatch for microbatch in microbatches if microbatch['names'] == ['2.0'])
    assert uncut['input_ids'] is batch.microbatches[2]['input_ids'], 'it was small enough'


def test_longer_lengths_keep_the_cap():
    spec = spec_for()
    microbatches = spec.split_batch(ready([[9, 9, 9], [4, 4]]), 2)
    assert sorted(len(microbatch['names']) for microbatch in microbatches) == [1, 2, 2]
    with pytest.raises(ValueError, match='got: sample number 2 of the dataset of 21 tokens, over the cap of 20'):
        spec.split_batch(ready([[9, 8], [21]]), 2)


def test_unneeded_columns_are_cut_off():
    batch = PreSplitBatch([text_batch([4, 3], width=9, names=['a', 'b'])], max_tokens=CAP)
    (microbatch,) = spec_for().split_batch(batch, 2)
    assert microbatch['input_ids'].shape == (2, 4)


@pytest.mark.parametrize(
    ('kwargs', 'side'),
    [
        ({'regroup': False}, 'right'),
        ({'packing': True}, 'right'),
        ({'right': 'keep'}, 'right'),
        ({'left': 'keep'}, 'left'),
    ],
)
def test_rows_are_joined_if_needed(kwargs, side):
    batch, spec = without_first_labels(ready(side=side)), spec_for(**kwargs)
    plain = batch.joined(BatchLayout(family=TEXT))
    microbatches = spec.split_batch(batch, 5)
    expected_microbatches = spec.split_batch(plain, 5)
    assert len(microbatches) == len(expected_microbatches)
    for microbatch, expected in zip(microbatches, expected_microbatches, strict=True):
        assert microbatch.keys() == expected.keys()
        for key, value in microbatch.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, expected[key])


def test_positions_that_depend_on_padding_are_refused():
    """A model that counts positions from the first column would count others in each microbatch."""
    batch, spec = without_first_labels(ready(side='left')), spec_for(left='shift')
    with pytest.raises(ValueError, match='padded on the right'):
        spec.split_batch(batch, 5)


def left_padded_loader(dataset, collate):
    sampler = RegroupingBatchSampler(
        dataset, lengths=[len(row['labels'][0]) for row in dataset], global_batch_size=6, max_tokens=24, shuffle=False
    )
    return token_data_spec(RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate))


def test_label_that_a_pad_predicts_is_refused():
    """Whether it counts depends on the cut, because a row has no padding in a microbatch of its own."""
    rows = text_rows([(length, length) for length in (9, 8, 5, 4, 4, 3)])
    data = left_padded_loader(rows, partial(collate, side='left'))
    with pytest.raises(ValueError, match='first token of a row must have no label'):
        fit(text_model(), data, max_duration='1ba')


def test_label_that_a_pad_precedes_counts():
    """A masked language model predicts each label from its own position, so padding on the left changes nothing."""
    whole = masked_batch([9, 8, 5, 4, 4, 3])
    rows = []
    for row, length in enumerate(whole['attention_mask'].sum(dim=1).tolist()):
        rows.append({key: value[row : row + 1, :length] for key, value in whole.items()})
    model = masked_model('esm')
    expected, _ = reference_gradients(model, whole)
    recorder = fit(HuggingFaceModel(model), left_padded_loader(rows, partial(collate, side='left')), max_duration='1ba')
    assert relative_error(recorder.gradients, expected) < 1e-6


def test_evaluation_keeps_rows_in_order():
    batch, spec = ready(), spec_for()
    with torch.no_grad():
        microbatches = spec.split_batch(batch, 3)
    assert names(microbatches) == [batch['names'][start : start + 3] for start in (0, 3, 6)]


def test_users_transforms_see_plain_mappings():
    def drop_names(batch):
        assert type(batch) is dict
        return {key: value for key, value in batch.items() if key != 'names'}

    spec = token_data_spec([], batch_transforms=drop_names)
    changed = spec.batch_transforms(ready())
    assert isinstance(changed, PreSplitBatch)
    assert 'names' not in changed
    assert spec.get_num_samples_in_batch(changed) == 7
    assert spec.get_num_tokens_in_batch(changed) == sum(map(sum, SHAPES))


@pytest.mark.parametrize('width_multiple', [1, 8])
def test_gradient_of_each_global_batch(width_multiple):
    dataset, model = LengthDataset(20), text_model()
    sampler = RegroupingBatchSampler(
        dataset,
        lengths=dataset.lengths,
        global_batch_size=8,
        max_tokens=2 * LONGEST,
        num_replicas=1,
        rank=0,
        width_multiple=width_multiple,
    )
    loader = RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate_samples)
    widths = {one['input_ids'].shape[1] % width_multiple for batch in loader for one in batch.microbatches}
    assert widths == {0}
    spec = token_data_spec(loader, slot_tokens=LONGEST, width_multiple=width_multiple)
    recorder = fit(model, spec, max_duration='1ep')
    assert int(recorder.trainer.state.timestamp.sample) == 20
    for step, (found, loss) in enumerate(zip(recorder.steps, recorder.logged('loss/train/total'), strict=True)):
        whole = collate_samples([dataset[index] for index in sampler.window(step)])
        expected, true_loss = reference_gradients(model, whole)
        assert relative_error(found, expected) < 1e-6
        assert loss == pytest.approx(true_loss, rel=1e-6)


def loader_with_a_stale_table(dataset):
    """The longest sample was far shorter when lengths were measured, all others had half their tokens."""
    changed, cap = int(dataset.lengths.argmax()), int(np.sort(dataset.lengths)[-2])
    assert dataset.lengths[changed] > cap
    lengths = dataset.lengths // 2
    lengths[changed] = 2
    sampler = RegroupingBatchSampler(
        dataset, lengths=lengths, global_batch_size=8, max_tokens=cap, num_replicas=1, rank=0
    )
    return RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate_samples), changed, cap


def test_stale_lengths_stop_the_run():
    dataset = LengthDataset(20)
    loader, changed, cap = loader_with_a_stale_table(dataset)
    spec = token_data_spec(loader, slot_tokens=cap)
    message = (
        f"got: sample '{changed}' of {dataset.lengths[changed]} tokens, over the cap of {cap} .* measure the lengths"
    )
    with pytest.raises(ValueError, match=message):
        fit(text_model(), spec, microbatch_size=1, max_duration='1ep')


def test_stale_lengths_may_only_warn(caplog):
    dataset, model = LengthDataset(20), text_model()
    loader, changed, cap = loader_with_a_stale_table(dataset)
    spec = token_data_spec(loader, slot_tokens=cap, on_oversize='warn')
    batches = list(loader)
    planned, cut = (
        [one['sample_ids'] for batch in microbatches for one in batch if one['input_ids'].numel() > cap]
        for microbatches in (
            [batch.microbatches for batch in batches],
            [spec.split_batch(batch, 1) for batch in batches],
        )
    )
    assert len(planned) > 1, 'the planned microbatches should be too large'
    assert cut == [[str(changed)]], 'alone, and nothing else is over the cap'
    with caplog.at_level(logging.WARNING, logger='composer_tokacc'):
        recorder = fit(model, spec, microbatch_size=1, max_duration='1ep')
    assert f"sample '{changed}' of {dataset.lengths[changed]} tokens" in caplog.text
    assert len(recorder.steps) == len(batches)
    for step, found in enumerate(recorder.steps):
        whole = collate_samples([dataset[index] for index in loader.batch_sampler.window(step)])
        assert relative_error(found, reference_gradients(model, whole)[0]) < 1e-6


@pytest.mark.parametrize('name', ['llava', 'qwen2_5_vl'])
def test_pictures_go_with_their_rows(name):
    case = FAMILIES[name]()
    layout = BatchLayout.for_model(case.model)
    rows, collate = case.rows, partial(layout.concat, pad_token_id=case.pad_token_id)

    class Rows(Dataset):
        def __len__(self):
            return len(rows)

        def __getitem__(self, index):
            return rows[index]

    lengths = [row['input_ids'].shape[1] for row in rows]
    sampler = RegroupingBatchSampler(
        Rows(), lengths=lengths, global_batch_size=len(rows), max_tokens=2 * max(lengths), num_replicas=1, rank=0
    )
    loader = RegroupingDataLoader(Rows(), batch_sampler=sampler, collate_fn=collate)
    assert len(next(iter(loader)).microbatches) > 1
    spec = token_data_spec(loader, slot_tokens=max(lengths))
    recorder = fit(hugging_face(case.model), spec)
    assert split_of(loader).checked
    expected, _ = reference_gradients(case.model, collate(rows))
    assert relative_error(recorder.gradients, expected) < 1e-6
