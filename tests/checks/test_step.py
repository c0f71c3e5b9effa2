# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Faults that only a later step shows: its loss is not the mean over its loss tokens."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from composer.core import Algorithm, Event
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from composer_tokacc import TokenAccumulation
from composer_tokacc.checks import step
from composer_tokacc.checks.step import MicrobatchRecord, Step, TokenChoice, check_step
from composer_tokacc.counting import LossRule
from composer_tokacc.labelled import LabelledPositions
from composer_tokacc.row_counts import RowCounts
from tests.matrix.harness import measure_steps
from tests.matrix.native_models import NativeModel
from tests.support.process_group import group_of_one_rank
from tests.support.text import next_token_loss, one_layer_model, ragged_batch
from tests.support.training import GradientRecorder, On, assert_exact, fit, loader

UNEVEN = [(4, 2), (14, 11), (9, 7), (5, 1)]
RARE = 63
"""A token that is a label only where a test puts it."""


def without_label(label):
    """Returns a model whose loss leaves out a label. Some models leave out the id of padding in every row."""

    def loss(logits, labels):
        counted_labels = labels.masked_fill(labels == label, -100)
        return next_token_loss(logits, counted_labels)

    return NativeModel(loss)


def kinds_of(outcomes):
    return [outcome.kind for outcome in outcomes]


def record_of(rows, batch=None):
    """Returns the record of a microbatch. ``rows`` are the counts of its rows."""
    return MicrobatchRecord(batch=batch or {}, rows=rows)


def step_of(record):
    """Returns a step of one microbatch, to which Composer must give the weight 1."""
    record.composers_weight = 1.0
    only_step = Step(rows=record.rows)
    only_step.microbatches.append(record)
    return only_step


class MaskAroundForward(Algorithm):
    """Hides half of the labels, but only during the forward. Before and after it all labels are there."""

    def match(self, event, state):
        return event in (Event.BEFORE_FORWARD, Event.AFTER_FORWARD)

    def apply(self, event, state, logger):
        if event == Event.BEFORE_FORWARD:
            self.labels = state.batch['labels']
            masked = self.labels.clone()
            masked[:, ::2] = -100
            state.batch = {**state.batch, 'labels': masked}
        else:
            state.batch = {**state.batch, 'labels': self.labels}


@pytest.mark.parametrize('microbatch_size', [1, 2])
def test_labels_on_later_padding_are_refused(microbatch_size):
    """The first batch has no padding, so its loss is the plain mean."""
    first = ragged_batch([(9, 4)] * 4)
    later = ragged_batch(UNEVEN, labels_on_pads=0)

    outcomes = measure_steps(without_label(0), [first, later, later], microbatch_size)

    assert kinds_of(outcomes) == ['exact', 'refused']
    assert 'the mean over its loss-generating tokens' in outcomes[-1].message


@pytest.mark.parametrize('is_last', [False, True])
def test_labels_changed_around_the_forward(is_last):
    algorithms = [MaskAroundForward(), TokenAccumulation()]
    if is_last:
        algorithms.reverse()
    data = loader(ragged_batch(UNEVEN))

    with pytest.raises(RuntimeError, match='an algorithm changes labels around the forward'):
        fit(one_layer_model(), data, algorithms=algorithms)


def test_healthy_steps_are_not_refused():
    uneven_labels = ragged_batch(UNEVEN)
    even_labels = ragged_batch([(9, 4), (12, 4), (7, 4), (9, 4)], side='left')
    twenty_batches = [uneven_labels, even_labels] * 10
    assert_exact(one_layer_model(), *twenty_batches)


@pytest.mark.parametrize(
    ('token_weights', 'num_measured'),
    [
        ('token', [2, 1, 1, 2, 1]),
        ('sqrt', [2, 2, 2, 2, 2]),
    ],
)
def test_microbatches_with_new_labels_are_measured(monkeypatch, token_weights, num_measured):
    """Of the two microbatches of a later step one is measured, by turns. If tokens have weights, both are."""
    batches = [ragged_batch(UNEVEN) for _ in num_measured]
    row_of_first_microbatch = 1
    labels_of_third_step = batches[2]['labels']
    labels_of_third_step[row_of_first_microbatch, -2] = 62  # in a step that measures this microbatch anyway
    labels_of_fourth_step = batches[3]['labels']
    labels_of_fourth_step[row_of_first_microbatch, -2] = 63
    original = MicrobatchRecord.watch
    watched = []

    def watch(record, *args, **options):
        watched.append(record)
        original(record, *args, **options)

    def count_watched(state):
        num_watched = len(watched)
        watched.clear()
        return num_watched

    monkeypatch.setattr(MicrobatchRecord, 'watch', watch)
    counter = On(Event.BATCH_END, count_watched)

    fit(one_layer_model(), *batches, regroup=False, token_weights=token_weights, callbacks=[counter])

    assert counter.values == num_measured


def test_each_size_is_measured_once():
    """Of the four microbatches of another step one is measured, by turns."""
    choice = TokenChoice()
    numbers_measured = []
    for microbatch_size in (2, 2, 1, 1, 2):
        measured = places_measured(choice, num_microbatches=4, microbatch_size=microbatch_size)
        numbers_measured.append(len(measured))
    assert numbers_measured == [4, 1, 4, 1, 1]


def places_measured(choice, num_microbatches, *, microbatch_size=1, is_planned=True):
    """Returns the places of the microbatches that are measured in the next step."""
    num_planned = num_microbatches if is_planned else 0
    choice.begin_step(microbatch_size)
    places = []
    for place in range(num_microbatches):
        if choice.chooses(place, [RowCounts()], num_planned):
            places.append(place)
    choice.end_step(num_microbatches)
    return places


@pytest.mark.parametrize('is_planned', [True, False])
@pytest.mark.parametrize('numbers', [[4], [2, 1], [1, 2], [3, 1, 2], [5, 6, 7]])
def test_turn_reaches_every_microbatch(numbers, is_planned):
    """Steps with other numbers of microbatches alternate. Each microbatch is measured within 8 such steps."""
    choice = TokenChoice()
    choice.begin_step(1)
    choice.end_step(numbers[-1])  # the first step, which is measured as a whole
    measured = set()
    for num_microbatches in numbers * 8:
        for place in places_measured(choice, num_microbatches, is_planned=is_planned):
            measured.add((num_microbatches, place))
    assert len(measured) == sum(numbers)


@pytest.mark.parametrize('label', [0, RARE], ids=['id of padding', 'in column 0'])
@pytest.mark.parametrize('row', range(len(UNEVEN)))
def test_label_that_did_not_count_before(row, label):
    """The labels of padding are -100, not 0. The rare label is only in column 0, where nothing predicts it."""
    first = ragged_batch(UNEVEN)
    is_rare = first['labels'] == RARE
    first['labels'][is_rare] = 5
    later = copy.deepcopy(first)
    first['labels'][:, 0] = RARE
    length, _ = UNEVEN[row]
    last_token = length - 1
    later['labels'][row, last_token] = label

    outcomes = measure_steps(without_label(label), [first, first, later], 1)

    assert kinds_of(outcomes) == ['exact', 'exact', 'refused']


def test_labels_masked_in_an_unmeasured_microbatch():
    """The second step measures tokens of its second microbatch. Those of the first are only counted."""

    def mask_last_column(state):
        is_second_step = state.timestamp.batch == 1
        is_first_microbatch = 'a' in state.batch['sample_ids']
        if is_second_step and is_first_microbatch:
            labels = state.batch['labels'].clone()
            labels[:, -1] = -100
            state.batch = {**state.batch, 'labels': labels}

    batch = {**ragged_batch(UNEVEN), 'sample_ids': ['a', 'b', 'c', 'd']}
    masking = On(Event.BEFORE_FORWARD, mask_last_column)
    recorder = GradientRecorder()

    # The first microbatch has 2 and 11 labels. One of them is in the last column.
    with pytest.raises(RuntimeError, match=r"abels .* must not change .* 12 .* sample 'a', where 13"):
        fit(
            one_layer_model(),
            batch,
            batch,
            callbacks=[masking],
            recorder=recorder,
            logits='all',
            regroup=False,
        )

    assert len(recorder.steps) == 1


class InfiniteOnPadding(NativeModel):
    """A Llama whose logits on padding are -inf. Its loss selects the positions with labels, so it is finite."""

    def forward(self, batch):
        is_padding = batch['attention_mask'] == 0
        finite_logits = self.logits_of(batch)
        logits = finite_logits.masked_fill(is_padding[..., None], -torch.inf)
        loss = self.loss_of(logits, batch['labels'])
        return {'loss': loss, 'logits': logits}


def test_infinite_logits_on_padding(monkeypatch):
    """All positions are measured, also those whose softmax is NaN. From the third step on the loss is not a mean."""
    monkeypatch.setattr(step, 'ALL_TOKENS_SHARE', 1.0)
    current_step = 0

    def loss_of(logits, labels):
        next_labels = labels[:, 1:]
        has_loss = next_labels != -100
        predictions = logits[:, :-1][has_loss]
        losses = F.cross_entropy(predictions, next_labels[has_loss], reduction='none')
        if current_step < 2:
            return losses.mean()
        return losses.sum() / (len(losses) + 1)

    def set_step(state):
        nonlocal current_step
        current_step = int(state.timestamp.batch)

    model = InfiniteOnPadding(loss_of)
    four_batches = [ragged_batch(UNEVEN)] * 4
    callbacks = [On(Event.BATCH_START, set_step)]
    recorder = GradientRecorder()

    with pytest.raises(RuntimeError, match='must stay the mean'):
        fit(model, *four_batches, callbacks=callbacks, recorder=recorder)

    assert len(recorder.steps) == 2


def test_worst_position_without_a_label():
    """Of one row a model has the logits of two labels, and of one more position, because it shifts labels."""
    batch = {'labels': torch.tensor([[-100, -100, 5, 6]])}
    record = record_of([RowCounts(rule=LossRule.CAUSAL, loss_tokens=2)], batch)
    record.positions_of_logits = LabelledPositions.from_batch(batch, LossRule.CAUSAL, 2)

    record.deviations = torch.tensor([0.0, 1.0, 0.0])
    assert record.worst_token() == ('row 0', 6)

    record.deviations = torch.tensor([0.0, 0.0, 1.0])
    assert record.worst_token() == ('row 0', -100)


def measured_deviations(logits, gradient, measures_all):
    """Returns the deviations of three rows of five labels. The first label of a row does not count."""
    rows = [RowCounts(rule=LossRule.CAUSAL, loss_tokens=4)] * 3
    batch = {'labels': torch.arange(15).view(3, 5)}
    record = record_of(rows, batch)
    record._measure(
        gradient,
        batch=batch,
        logits=logits,
        weights=None,
        plain_token_weight=0.1,
        measures_all=measures_all,
    )
    return record.deviations


@pytest.mark.parametrize('measures_all', [True, False])
def test_tokens_of_a_sharded_vocabulary(measures_all, tmp_path, monkeypatch):
    monkeypatch.setattr(step, 'NUM_SAMPLED', 100)  # all tokens, in the same order
    logits = torch.randn(3, 5, 16)
    gradient = torch.randn(3, 5, 16)
    expected = measured_deviations(logits, gradient, measures_all)

    with group_of_one_rank(tmp_path):
        mesh = init_device_mesh('cpu', (1,))
        sharded_logits = distribute_tensor(logits, mesh, [Shard(2)])
        sharded_gradient = distribute_tensor(gradient, mesh, [Shard(2)])
        deviations = measured_deviations(sharded_logits, sharded_gradient, measures_all)

    torch.testing.assert_close(deviations, expected)


def record_with_added_row():
    """Returns the record of a microbatch of two rows. The second one is a dummy row."""
    sample = RowCounts(rule=LossRule.CAUSAL)
    dummy_row = RowCounts(samples=0)
    record = record_of([sample, dummy_row])
    record.added_rows = [1]
    return record


def test_added_rows_of_a_sharded_vocabulary(tmp_path):
    """The flag is a plain tensor, because it is read together with other plain tensors."""
    record = record_with_added_row()
    logits = torch.randn(2, 5, 16)
    with group_of_one_rank(tmp_path):
        mesh = init_device_mesh('cpu', (1,))
        leaf = distribute_tensor(logits, mesh, [Shard(2)]).requires_grad_()
        sharded_logits = 1 * leaf
        record.watch_added_rows(sharded_logits)
        sharded_logits.sum().backward()
    assert record.trains_added_rows is not None
    assert type(record.trains_added_rows) is torch.Tensor
    assert record.trains_added_rows


def test_label_of_id_zero_is_new():
    """Masked labels, -100, are no id. Id 1 was a label before."""
    choice = TokenChoice()

    def has_new_label(*labels):
        one_row = {'labels': torch.tensor([labels])}
        [is_new] = choice.rows_with_new_labels(one_row, LossRule.CAUSAL)
        return is_new

    assert has_new_label(1, 1, -100)
    assert not has_new_label(1, -100, 1)
    assert has_new_label(1, 0, -100)
    assert not has_new_label(1, 0, 0)


@pytest.mark.parametrize('trained_output', [0, 1])
def test_added_row_in_one_of_two_outputs(trained_output):
    """The gradient of the other output comes before or after it, and is 0 in the added row."""
    record = record_with_added_row()
    outputs = [1 * torch.randn(2, 5, 16, requires_grad=True) for _ in range(2)]
    for output in outputs:
        record.watch_added_rows(output)

    logits_of_added_row = outputs[trained_output][1]
    other_output = 1 - trained_output
    logits_of_sample = outputs[other_output][0]
    loss = logits_of_added_row.sum() + logits_of_sample.sum()
    loss.backward()

    assert record.trains_added_rows


def test_factors_of_two_backwards_add_up():
    rows = [RowCounts(loss_tokens=2, loss_weight=2, rule=LossRule.CAUSAL)]
    record = record_of(rows, ragged_batch([(4, 2)]))
    only_step = step_of(record)

    record.observe(torch.tensor([0.5, 0.25]))  # of a term that is not yet summed
    record.observe(torch.tensor(0.25))

    check_step(only_step)


@pytest.mark.parametrize(
    ('num_tokens', 'factor', 'is_refused'),
    [
        pytest.param(2, 1.0, False, id='weighted by its share'),
        pytest.param(2, 0.5, True, id='weighted by half of its share'),
        pytest.param(2, None, True, id='no backward of a loss with tokens'),
        pytest.param(0, None, False, id='no backward of a loss without tokens'),
        pytest.param(0, 0.5, True, id='other terms are weighted by half of their share'),
    ],
)
def test_composers_weight_of_the_only_microbatch(num_tokens, factor, is_refused):
    rows = [RowCounts(loss_tokens=num_tokens, loss_weight=num_tokens, rule=LossRule.CAUSAL)]
    record = record_of(rows, ragged_batch([(4, num_tokens)]))
    only_step = step_of(record)

    if factor is not None:
        record.observe(torch.tensor(factor))

    if is_refused:
        with pytest.raises(RuntimeError, match='weight microbatches by their samples'):
            check_step(only_step)
    else:
        check_step(only_step)
