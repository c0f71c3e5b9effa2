# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Microbatches that a loader has collated: they stay as they are, and are cut again only if they must be."""

from __future__ import annotations

import logging
import sys
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from composer.core import Event
from composer.models import HuggingFaceModel

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader, token_data_spec
from composer_tokacc.checks.cut_rules import CutRules
from composer_tokacc.counting import LossRule
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.layout import BatchLayout, PreSplitBatch
from composer_tokacc.layout.layout import inferred_layout
from composer_tokacc.planning import CostModel
from composer_tokacc.row_counts import RowCounts, attach_row_counts, num_samples, with_counts
from tests.support.exactness import family_batch
from tests.support.families import FAMILIES
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples, regrouping_loader
from tests.support.masked_text import masked_batch, masked_model
from tests.support.small_batches import LLAVA, TEXT, text_batch
from tests.support.text import collate, column_counter, gpt2, one_layer_model, packed_row, text_rows, with_vectors
from tests.support.training import On, assert_exact, fit, gradients_of, in_double, relative_error, tensors_in

LENGTHS = [[9, 8], [5, 4, 4, 3], [10]]
"""Lengths of the rows of each microbatch."""
CAP = 20
"""The largest number of positions, rows times width, of a microbatch that the loader plans."""
TRIM = CutRules(left=sys.maxsize, right=sys.maxsize)
"""Padding of any width may be cut off on both sides."""
TEXT_LAYOUT = BatchLayout(family=TEXT)
ROWS = [(9, 3), (8, 4), (5, 2), (4, 2), (4, 1), (3, 2)]
"""Length and number of labels of each row, for training."""


def pre_split(lengths_of_microbatches=LENGTHS, *, side='right'):
    """Returns microbatches of rows of these lengths. Row 1 of microbatch 2 is named ``2.1``."""
    microbatches = []
    indices = []
    next_index = 0
    for number, lengths in enumerate(lengths_of_microbatches):
        num_rows = len(lengths)
        names_of_rows = [f'{number}.{row}' for row in range(num_rows)]
        microbatch = text_batch(lengths, side=side, names=names_of_rows)
        microbatches.append(microbatch)
        end_index = next_index + num_rows
        indices.append(list(range(next_index, end_index)))
        next_index = end_index
    return PreSplitBatch(microbatches, max_tokens=CAP, indices=indices)


def with_images(batch, numbers):
    """Adds an image to the first row of the microbatches with these numbers."""
    for number, microbatch in enumerate(batch.microbatches):
        images_per_row = [0] * len(microbatch['names'])
        microbatch['num_images'] = images_per_row
        if number in numbers:
            images_per_row[0] = 1
            microbatch['pixel_values'] = torch.full((1, 3, 4, 4), float(number))
    return batch


def without_first_labels(batch):
    """Masks the labels of the first tokens, whose id is 1, because on the left a pad may predict them."""

    def masked(microbatch):
        labels = microbatch['labels']
        return {**microbatch, 'labels': labels.masked_fill(labels == 1, -100)}

    return batch.map(masked)


def spec_for(*, family=TEXT, rules=TRIM, **options):
    """Returns a spec whose rules the first-batch check has already found."""
    layout = BatchLayout(family=family)
    spec = token_data_spec([], layout=layout, slot_tokens=10, **options)
    split = split_of(spec.dataloader)
    split.start(one_layer_model(), text_batch([1]), 1)
    split.adopt(rules, layout)
    return spec


def names(microbatches):
    """Returns the names of the rows of each microbatch."""
    return [microbatch['names'] for microbatch in microbatches]


def shapes(microbatches):
    """Returns number and width of the rows of each microbatch."""
    return [microbatch['input_ids'].shape for microbatch in microbatches]


def num_positions(microbatches):
    """Returns the number of positions of each microbatch, rows times width."""
    return [shape.numel() for shape in shapes(microbatches)]


def assert_same_rows(microbatches, batch):
    """Checks that the microbatches have all rows of a batch, in any order."""
    rows = list(chain.from_iterable(names(microbatches)))
    assert sorted(rows) == sorted(batch['names'])


def assert_handed_on(microbatches, batch):
    """Checks that the microbatches hold the very tensors that the loader made. None is copied."""
    for microbatch, source in zip(microbatches, batch.microbatches, strict=True):
        for key, value in source.items():
            if isinstance(value, torch.Tensor):
                assert microbatch[key] is value, key
            else:
                assert microbatch[key] == value, key
        assert num_samples(microbatch) == len(microbatch['names'])


# Without a Trainer.


@pytest.mark.parametrize('side', ['right', 'left'])
def test_microbatches_are_not_copied(side):
    batch = without_first_labels(pre_split(side=side))
    spec = spec_for()

    counted = spec.batch_transforms(batch)
    microbatches = spec.split_batch(counted, 2)

    assert_handed_on(microbatches, batch)


def test_planned_microbatches_stay_as_they_are():
    """Even if a plain batch would be cut into more microbatches, which cost less."""
    batch = pre_split([[10, 1]])
    plain_batch = batch.joined(TEXT_LAYOUT)
    spec = spec_for(cost=CostModel(launch=1.0))

    microbatches = spec.split_batch(batch, 2)
    microbatches_of_plain_batch = spec.split_batch(plain_batch, 2)

    assert_handed_on(microbatches, batch)
    assert len(microbatches_of_plain_batch) == 2


def test_ranks_in_step_copy_nothing(two_ranks):
    text_and_image = pre_split([[9, 8], [5, 4, 4]])
    batch = with_images(text_and_image, [0, 1])
    spec = spec_for(family=LLAVA)

    microbatches = spec.split_batch(batch, 2)

    assert_handed_on(microbatches, batch)


def test_ranks_in_step_add_an_image(two_ranks):
    """The last microbatch has no image, so it gets a dummy row, which is no sample."""
    planned = pre_split([[9, 8], [5, 4], [10]])
    batch = with_images(planned, [0, 1])
    spec = spec_for(family=LLAVA)

    microbatches = spec.split_batch(batch, 4)

    rows = [len(microbatch['input_ids']) for microbatch in microbatches]
    samples = [num_samples(microbatch) for microbatch in microbatches]
    assert rows == [2, 2, 2]
    assert samples == [2, 2, 1]
    first, _, last = microbatches
    assert first['pixel_values'] is batch.microbatches[0]['pixel_values']
    assert last['pixel_values'].shape == (1, 3, 4, 4)


@pytest.mark.parametrize('size', [1, 1.5])
def test_too_large_microbatches_are_cut(size):
    """A slot has 10 tokens. The last microbatch has 10 positions, so it is not copied."""
    batch = pre_split()
    spec = spec_for()

    microbatches = spec.split_batch(batch, size)

    assert max(num_positions(microbatches)) <= 10 * size
    assert_same_rows(microbatches, batch)
    place_of_last = names(microbatches).index(['2.0'])
    assert microbatches[place_of_last]['input_ids'] is batch.microbatches[2]['input_ids']


@pytest.mark.parametrize('size', [2, 8])
def test_loader_gives_the_budget(size):
    """Without ``slot_tokens`` the plan stays, whatever the size (8, all rows, is the default of Composer).

    Composer halves the size if memory runs out, and each half must need less.
    """
    spec = token_data_spec([], layout=TEXT_LAYOUT)
    split_of(spec.dataloader).adopt(TRIM, TEXT_LAYOUT)
    batch = pre_split([[5, 4, 4, 3], [3, 2, 1, 1]])
    row_over_the_cap = pre_split([[CAP + 1]])

    microbatches = spec.split_batch(batch, size)
    halves = spec.split_batch(batch, size / 2)
    undivided = spec.split_batch(row_over_the_cap, size / 2)

    assert_handed_on(microbatches, batch)
    assert max(num_positions(halves)) <= 12  # half of the budget, in whole tokens a slot
    assert_same_rows(halves, batch)
    assert_handed_on(undivided, row_over_the_cap)


def test_longer_lengths_keep_the_cap():
    """The loader has planned with lengths that are too short: three rows of 9 tokens are over the cap of 20."""
    spec = spec_for()
    too_many_rows = pre_split([[9, 9, 9], [4, 4]])

    microbatches = spec.split_batch(too_many_rows, 2)

    rows_of_microbatches = [len(rows) for rows in names(microbatches)]
    assert sorted(rows_of_microbatches) == [1, 2, 2]


def test_longer_length_over_the_cap():
    """The length of a row that the loader took for shorter is over the cap of 20 by itself."""
    spec = spec_for()
    too_long_row = pre_split([[9, 8], [21]])

    with pytest.raises(ValueError, match='got: sample number 2 of the dataset of 21 tokens, over the cap of 20'):
        spec.split_batch(too_long_row, 2)


def test_unneeded_columns_are_cut_off():
    too_wide = text_batch([4, 3], width=9, names=['a', 'b'])
    batch = PreSplitBatch([too_wide], max_tokens=CAP)
    spec = spec_for()

    microbatches = spec.split_batch(batch, 2)

    assert shapes(microbatches) == [(2, 4)]


@pytest.mark.parametrize(
    ('options', 'side'),
    [
        pytest.param({'regroup': False}, 'right', id='rows in order'),
        pytest.param({'packing': True, 'rules': CutRules(packing='documents')}, 'right', id='packed'),
        pytest.param({'rules': CutRules()}, 'right', id='padding stays, right'),
        pytest.param({'rules': CutRules()}, 'left', id='padding stays, left'),
    ],
)
def test_rows_are_joined_if_needed(options, side):
    """If the planned microbatches cannot stay, the batch is split as one that came joined."""
    batch = without_first_labels(pre_split(side=side))
    joined = batch.joined(TEXT_LAYOUT)
    spec = spec_for(**options)

    microbatches = spec.split_batch(batch, 5)

    expected_microbatches = spec.split_batch(joined, 5)
    for microbatch, expected in zip(microbatches, expected_microbatches, strict=True):
        assert microbatch.keys() == expected.keys()
        for key, value in microbatch.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, expected[key])


def test_evaluation_keeps_rows_in_order():
    batch = pre_split()
    spec = spec_for()

    with torch.no_grad():
        microbatches = spec.split_batch(batch, 3)

    assert names(microbatches) == [['0.0', '0.1'], ['1.0', '1.1', '1.2'], ['1.3'], ['2.0']]


def test_layout_of_all_microbatches():
    """The first microbatch does not tell the layout, although it has as many keys as the other one."""
    one_image = torch.zeros(1, 3, 4, 4)
    without_image = text_batch([4], pixel_values=None)
    with_image = text_batch([5], pixel_values=one_image)

    layout = inferred_layout([without_image, with_image])

    assert layout.family.name == 'LLaVA'


def test_evaluation_cuts_each_microbatch_by_itself():
    """Each keeps its width and its plain values. Microbatches without images may lack lists about images."""
    rows_with_paths = text_batch([4, 3, 2], width=6, paths=['a.png', 'b.png', 'c.png'], scale=1.0)
    row_without_path = text_batch([5], width=8, scale=2.0)
    batch = PreSplitBatch([rows_with_paths, row_without_path], max_tokens=CAP)
    spec = token_data_spec([])

    with torch.no_grad():
        parts = spec.split_batch(batch, 2)

    expected_parts = [
        text_batch([4, 3], paths=['a.png', 'b.png'], scale=1.0),
        text_batch([2], paths=['c.png'], scale=1.0),
        text_batch([5], scale=2.0),
    ]
    for part, expected in zip(parts, expected_parts, strict=True):
        assert torch.equal(part['input_ids'], expected['input_ids'])
        assert part.get('paths') == expected.get('paths')
        assert part['scale'] == expected['scale']


def test_users_transforms_see_plain_mappings():
    def drop_names(batch):
        assert type(batch) is dict
        return {key: value for key, value in batch.items() if key != 'names'}

    spec = token_data_spec([], batch_transforms=drop_names)

    changed = spec.batch_transforms(pre_split())

    assert isinstance(changed, PreSplitBatch)
    assert 'names' not in changed
    assert spec.get_num_samples_in_batch(changed) == 7
    assert spec.get_num_tokens_in_batch(changed) == 43


def test_repeated_microbatch_adds_no_tokens():
    """Composer counts a run in samples and in tokens. Other ranks count those of a repeated microbatch."""
    two_samples = text_batch([4, 3])
    repeated = attach_row_counts(text_batch([9]), [RowCounts(samples=0)])
    batch = PreSplitBatch([two_samples, repeated], max_tokens=CAP)
    spec = token_data_spec([])

    assert spec.get_num_samples_in_batch(batch) == 2
    assert spec.get_num_tokens_in_batch(batch) == 7


# In training.


def planned_loader(rows, collate_rows, *, max_tokens, lengths=None, **options):
    """Returns a loader of one global batch of these rows, planned in microbatches of at most ``max_tokens``."""
    if lengths is None:
        lengths = [row['labels'].shape[1] for row in rows]
    sampler = RegroupingBatchSampler(
        rows, lengths=lengths, global_batch_size=len(rows), max_tokens=max_tokens, shuffle=False, **options
    )
    return RegroupingDataLoader(rows, batch_sampler=sampler, collate_fn=collate_rows)


def left_padded_loader(rows):
    """Returns the spec of a loader that pads on the left. Its microbatches have at most 24 positions."""
    collate_left = partial(collate, side='left')
    planned = planned_loader(rows, collate_left, max_tokens=24)
    return token_data_spec(planned)


def rows_of_lengths(lengths):
    """Returns rows of text. Each token except the first of a row has a label."""
    return text_rows([(length, length - 1) for length in lengths])


def without_masks(rows):
    """Collates rows of one length, which need no mask."""
    batch = {}
    for key in rows[0]:
        if key != 'attention_mask':
            batch[key] = torch.cat([row[key] for row in rows])
    return batch


def rows_without_padding(batch, lengths):
    """Returns the rows of a batch that is padded on the right, each as a batch."""
    rows = []
    for number, length in enumerate(lengths):
        row = {key: value[number : number + 1, :length] for key, value in batch.items()}
        rows.append(row)
    return rows


def test_label_predicted_by_pad_is_refused():
    """Such a label counts only if its row is padded in its microbatch, so it would depend on the cut."""
    all_tokens_labelled = text_rows([(length, length) for length in (9, 8, 5, 4, 4, 3)])
    data = left_padded_loader(all_tokens_labelled)

    with pytest.raises(ValueError, match='first token of a row must have no label'):
        fit(one_layer_model(), data)


@pytest.mark.parametrize(
    ('lengths', 'is_refused'),
    [
        pytest.param([4, 4], True, id='narrower than the padded microbatch'),
        pytest.param([10], False, id='as wide as all rows'),
    ],
)
def test_first_label_of_narrow_microbatch_is_refused(lengths, is_refused):
    """No pad predicts it in its own microbatch, but in one batch of all rows a pad would."""
    [padded_left] = without_first_labels(pre_split([[9, 8]], side='left')).microbatches
    [with_first_labels] = pre_split([lengths]).microbatches
    batch = with_counts(PreSplitBatch([padded_left, with_first_labels], max_tokens=CAP))
    spec = spec_for()

    if is_refused:
        with pytest.raises(ValueError, match='first token of a row must have no label'):
            spec.split_batch(batch, 2)
    else:
        microbatches = spec.split_batch(batch, 2)
        assert_handed_on(microbatches, batch)


def test_hidden_token_looks_like_padding():
    """A mask of ``input_ids != pad`` hides a BOS that is the pad, too. Rows are padded on the right.

    Microbatches of equally long rows look padded on the left. The BOS predicts the first label in every cut.
    """

    def with_hidden_bos(microbatch):
        mask = microbatch['attention_mask'].clone()
        mask[:, 0] = 0
        return {**microbatch, 'attention_mask': mask}

    rows = without_first_labels(pre_split())
    batch = with_counts(rows.map(with_hidden_bos))
    spec = spec_for()

    microbatches = spec.split_batch(batch, 2)

    assert_same_rows(microbatches, batch)
    counted_tokens = 0
    for microbatch in microbatches:
        has_loss = LossRule.CAUSAL.mask(microbatch)
        counted_tokens += int(has_loss.sum())
    assert counted_tokens == 36  # 43 tokens in 7 rows, whose first tokens have no label


@pytest.mark.parametrize('has_positions', [False, True])
@pytest.mark.parametrize('width_multiple', [1, 8])
def test_padding_without_masks_is_not_attended(width_multiple, has_positions):
    """Rows of one length need no mask. If their microbatch is padded later, it gets one."""
    lengths = [9, 9, 5, 5]
    batch = masked_batch(lengths)
    rows = rows_without_padding(batch, lengths)
    if has_positions:
        for row, length in zip(rows, lengths, strict=True):
            row['position_ids'] = torch.arange(length)[None]
    planned = planned_loader(rows, without_masks, max_tokens=32, width_multiple=width_multiple)
    data = token_data_spec(planned, width_multiple=width_multiple)
    model = masked_model('bert')

    assert_exact(model, data, batch=batch, microbatch_size=4)


@pytest.mark.parametrize('first_position', [0, 2])
def test_padded_packed_rows_get_no_mask(first_position):
    """Transformers tells documents apart by their positions only if there is no mask."""
    documents_of_rows = [
        rows_of_lengths([5, 4]),
        rows_of_lengths([4, 5]),
        rows_of_lengths([9]),
        text_rows([(9, 7)]),
    ]
    rows = [packed_row(documents) for documents in documents_of_rows]
    for row in rows:
        row['position_ids'] += first_position
    planned = planned_loader(rows, without_masks, max_tokens=32, width_multiple=8)
    data = token_data_spec(planned, width_multiple=8)
    [planned_batch] = planned
    assert shapes(planned_batch.microbatches) == [(2, 16), (2, 16)]
    whole_batch = without_masks(rows)

    assert_exact(one_layer_model(), data, batch=whole_batch, microbatch_size=4)


def test_all_microbatches_get_masks_or_none():
    """Only one of them is padded to the next multiple, but they are joined later."""
    rows = rows_of_lengths([16, 16, 5, 5, 5])
    planned = planned_loader(rows, without_masks, max_tokens=32, width_multiple=8)
    data = token_data_spec(planned, width_multiple=8)
    [planned_batch] = planned
    assert sorted(shapes(planned_batch.microbatches)) == [(2, 16), (3, 8)]
    whole_batch = collate(rows)

    assert_exact(one_layer_model(), data, batch=whole_batch, microbatch_size=4)


def test_positions_that_padding_moves_are_refused():
    """The check keeps the padding of such a model, but joined microbatches would have more of it."""
    rows = text_rows(ROWS)
    data = left_padded_loader(rows)

    with pytest.raises(ValueError, match='padded on the right'):
        fit(column_counter(), data)


@pytest.mark.parametrize(
    ('make_model', 'is_refused'),
    [
        pytest.param(one_layer_model, False, id='positions from the first token'),
        pytest.param(gpt2, True, id='positions from the first column'),
    ],
)
def test_vectors_are_padded_as_ids(make_model, is_refused):
    """A batch with ``inputs_embeds`` has no ids, but its mask tells the padding."""
    model = make_model()
    rows = text_rows(ROWS)

    def collate_vectors(rows):
        padded_left = collate(rows, side='left')
        return with_vectors(model, padded_left)

    planned = planned_loader(rows, collate_vectors, max_tokens=24)
    data = token_data_spec(planned)

    if is_refused:
        with pytest.raises(ValueError, match='padded on the right'):
            fit(model, data)
    else:
        whole_batch = collate_vectors(rows)
        assert_exact(model, data, batch=whole_batch)


@pytest.mark.parametrize('width_multiple', [1, 4])
@pytest.mark.parametrize('side', ['left', 'right'])
def test_microbatches_stay_after_the_check(side, width_multiple):
    """The check trims only the side that the loader pads. One microbatch has no padding."""
    rows = text_rows([(9, 3), (8, 4), (3, 2), (3, 2), (3, 1), (3, 2)])
    collate_on_side = partial(collate, side=side)
    planned = planned_loader(rows, collate_on_side, max_tokens=24, width_multiple=width_multiple)
    data = token_data_spec(planned, width_multiple=width_multiple)
    [planned_batch] = planned
    planned_shapes = shapes(planned_batch.microbatches)
    assert len(planned_shapes) > 1
    whole_batch = collate(rows)
    trained_shapes = On(Event.AFTER_LOSS, lambda state: state.batch['input_ids'].shape)

    assert_exact(one_layer_model(), data, batch=whole_batch, microbatch_size=6, callbacks=[trained_shapes])

    assert trained_shapes.values == planned_shapes


def test_label_preceded_by_pad_counts():
    """A masked language model predicts each label from its own position, so padding on the left changes nothing."""
    lengths = [9, 8, 5, 4, 4, 3]
    batch = masked_batch(lengths)
    rows = rows_without_padding(batch, lengths)
    data = left_padded_loader(rows)
    model = masked_model('esm')

    assert_exact(model, data, batch=batch)


@pytest.mark.parametrize(
    ('max_tokens', 'size', 'most_rows'),
    [
        pytest.param(49, 3, 4, id='budget is no multiple of the size'),
        pytest.param(sys.maxsize, 1, 6, id='budget without an exact float'),
        pytest.param(sys.maxsize, 2, 6, id='half of a budget without an exact float'),
    ],
)
def test_joined_rows_keep_the_budget(max_tokens, size, most_rows):
    rows = rows_of_lengths([10] * 6)
    planned = planned_loader(rows, collate, max_tokens=max_tokens)
    spec = token_data_spec(planned, regroup=False)
    [batch] = planned

    microbatches = spec.split_batch(batch, size)

    for num_rows, _ in shapes(microbatches):
        assert num_rows <= most_rows


@pytest.mark.parametrize('options', [{}, {'packing': True}, {'regroup': False}])
def test_padding_to_one_width_keeps_the_budget(options):
    """The collator pads all rows to 60 tokens, and the loader has planned with half of each length."""
    lengths = [10, 9, 8, 7, 6, 5]
    rows = rows_of_lengths(lengths)
    half_lengths = [(length + 1) // 2 for length in lengths]
    collate_wide = partial(collate, width=60)
    planned = planned_loader(rows, collate_wide, max_tokens=22, lengths=half_lengths)
    data = token_data_spec(planned, **options)
    positions = On(Event.BEFORE_FORWARD, lambda state: state.batch['input_ids'].numel())

    fit(one_layer_model(), data, microbatch_size=6, callbacks=[positions])

    assert sum(positions.values) >= sum(lengths)
    assert max(positions.values) <= 22


def global_batches(dataset, loader):
    """Returns the samples of each step, collated at once."""
    batches = []
    for step in range(len(loader)):
        samples = [dataset[index] for index in loader.batch_sampler.window(step)]
        batches.append(collate_samples(samples))
    return batches


@pytest.mark.parametrize('width_multiple', [1, 8])
def test_gradient_of_each_global_batch(width_multiple):
    dataset = LengthDataset(20)
    loader = regrouping_loader(dataset, global_batch_size=8, width_multiple=width_multiple)
    for batch in loader:
        for _, width in shapes(batch.microbatches):
            assert width % width_multiple == 0
    spec = token_data_spec(loader, slot_tokens=LONGEST, width_multiple=width_multiple)
    batches = global_batches(dataset, loader)

    recorder = assert_exact(one_layer_model(), spec, batch=batches, max_duration='1ep')

    num_trained = int(recorder.trainer.state.timestamp.sample)
    assert num_trained == 20


class StaleLengths:
    """A dataset, and a loader that plans with wrong lengths: half of each length, and 2 for the longest sample.

    The cap is the length of the second longest sample. So only the longest one does not fit.
    """

    def __init__(self):
        self.dataset = LengthDataset(20)
        lengths = self.dataset.lengths
        longest = int(lengths.argmax())
        self.name_of_longest = str(longest)
        self.longest_in_messages = f"sample '{longest}' of {lengths[longest]} tokens"
        self.cap = int(np.sort(lengths)[-2])
        assert lengths[longest] > self.cap
        stale_lengths = lengths // 2
        stale_lengths[longest] = 2
        self.loader = regrouping_loader(self.dataset, global_batch_size=8, lengths=stale_lengths, max_tokens=self.cap)


def test_stale_lengths_stop_the_run():
    stale = StaleLengths()
    spec = token_data_spec(stale.loader, slot_tokens=stale.cap)

    message = f'got: {stale.longest_in_messages}, over the cap of {stale.cap} .* measure the lengths'
    with pytest.raises(ValueError, match=message):
        fit(one_layer_model(), spec, microbatch_size=1, max_duration='1ep')


def samples_over(microbatches, cap):
    """Returns the samples of each microbatch that is over the cap."""
    samples = []
    for microbatch in microbatches:
        if microbatch['input_ids'].numel() > cap:
            samples.append(microbatch['sample_ids'])
    return samples


def test_stale_lengths_may_only_warn(caplog):
    stale = StaleLengths()
    spec = token_data_spec(stale.loader, slot_tokens=stale.cap, on_oversize='warn')

    over_as_planned = []
    over_as_cut = []
    for batch in stale.loader:
        microbatches = spec.split_batch(batch, 1)
        over_as_planned += samples_over(batch.microbatches, stale.cap)
        over_as_cut += samples_over(microbatches, stale.cap)

    assert len(over_as_planned) > 1
    assert over_as_cut == [[stale.name_of_longest]]  # by itself, because it is over the cap

    batches = global_batches(stale.dataset, stale.loader)
    with caplog.at_level(logging.WARNING, logger='composer_tokacc'):
        assert_exact(one_layer_model(), spec, batch=batches, microbatch_size=1, max_duration='1ep')
    assert stale.longest_in_messages in caplog.text


@pytest.mark.parametrize('name', ['llava', 'qwen2_5_vl'])
def test_images_go_with_their_rows(name):
    case = FAMILIES[name]()
    layout = BatchLayout.for_model(case.model)
    longest = max(layout.width(row) for row in case.rows)
    collate_rows = partial(layout.concat, pad_token_id=case.pad_token_id)
    planned = planned_loader(case.rows, collate_rows, max_tokens=2 * longest)
    data = token_data_spec(planned, slot_tokens=longest)
    [planned_batch] = planned
    assert len(planned_batch.microbatches) > 1
    whole_batch = family_batch(case)
    is_checked = On(Event.BATCH_END, lambda state: split_of(planned).checked)

    assert_exact(case.model, data, batch=whole_batch, callbacks=[is_checked])

    assert is_checked.values == [True]


@pytest.mark.parametrize(('side', 'width_multiple'), [('left', 8), ('right', 1)])
def test_image_masks_as_wide_as_text(side, width_multiple):
    """Mllama's mask says which token sees which image. It gets wider with the text, and has a slot for each image."""
    case = FAMILIES['mllama']()
    layout = BatchLayout.for_model(case.model)
    collate_rows = partial(layout.concat, padding_side=side, pad_token_id=case.pad_token_id)
    planned = planned_loader(case.rows, collate_rows, max_tokens=72, width_multiple=width_multiple)
    data = token_data_spec(planned, width_multiple=width_multiple)
    whole_batch = collate_rows(case.rows)

    assert_exact(case.model, data, batch=whole_batch, microbatch_size=2)


class TwoTasks(HuggingFaceModel):
    """The labels of its second task lie at the tokens. Its second term is divided by the number of the first labels."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, shift_labels=True, use_logits=True)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        has_label = batch['labels'][:, 1:] != -100
        scores = outputs['hidden_states'][-1].flatten(0, 1)
        second_labels = batch['more_labels'].flatten()
        second_loss = torch.nn.functional.cross_entropy(scores, second_labels, reduction='sum')
        return outputs['loss'] + second_loss / has_label.sum()


def collate_two_tasks(rows: Any) -> Any:
    """Adds labels of the second task to each token."""
    batch = collate(rows)
    is_padding = batch['attention_mask'] == 0
    second_labels = batch['input_ids'] % 7
    batch['more_labels'] = second_labels.masked_fill(is_padding, -100)
    return batch


@pytest.mark.parametrize(
    'row_sizes',
    [
        pytest.param([(4, 2), (5, 3), (9, 7), (14, 11)], id='padded'),
        pytest.param([(5, 2), (5, 3), (14, 7), (14, 11)], id='without padding'),
    ],
)
@pytest.mark.parametrize('regroup', [True, False])
def test_labels_of_a_second_task_are_masked_on_padding(row_sizes, regroup):
    """No family registers their key. Padded by 0, they would be labels of the token 0."""
    rows = text_rows(row_sizes)
    short_rows = collate_two_tasks(rows[:2])
    long_rows = collate_two_tasks(rows[2:])
    planned = PreSplitBatch([short_rows, long_rows], max_tokens=28)
    whole_batch = collate_two_tasks(rows)
    model = one_layer_model(output_hidden_states=True)
    reference = in_double(model)
    outputs = reference(**tensors_in(whole_batch, torch.float64))
    loss = TwoTasks(reference).loss(outputs, whole_batch)
    expected = gradients_of(reference, loss)

    recorder = fit(TwoTasks(model), planned, regroup=regroup)

    assert relative_error(recorder.gradients, expected) < 1e-6
