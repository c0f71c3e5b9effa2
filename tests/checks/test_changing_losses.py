# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Losses, rows and norms that change during a run: every step is exact, or refused before the optimizer moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composer.core import Callback, Event

from composer_tokacc import TokenAccumulation
from composer_tokacc.checks import first_batch
from composer_tokacc.checks.first_batch import LOOK_AGAIN
from composer_tokacc.data_spec.split import MicrobatchSplit
from composer_tokacc.refusals import RefusalError
from tests.matrix.harness import measure, plain_gradients
from tests.matrix.native_models import NativeModel, has_loss
from tests.matrix.subjects import SUBJECTS
from tests.matrix.test_losses import of_reference, over_rows, over_tokens
from tests.matrix.test_losses import z_loss as squared_partition
from tests.support.text import VOCABULARY, next_token_loss, one_layer_model, ragged_batch
from tests.support.training import GradientRecorder, Gradients, On, fit, relative_error

NUM_STEPS = 24
FIRST_CHANGED = 12
"""In this step the loss begins to change."""
RARE = 63
"""A token that no row has as a label before the loss changes."""
COMMON = 5
"""The label that is in its place until then."""


@dataclass
class Outputs:
    """The tensors that a loss may use, and whether it has changed."""

    logits: torch.Tensor
    states: torch.Tensor
    labels: torch.Tensor
    heads: torch.nn.ModuleDict
    has_changed: bool

    def next_token_loss(self, **options: Any) -> torch.Tensor:
        return next_token_loss(self.logits, self.labels, **options)


Loss = Callable[[Outputs], torch.Tensor]


class ChangingModel(NativeModel):
    """A Llama whose loss is a function of its outputs. It changes in the step ``first_changed``."""

    def __init__(self, loss_of_outputs: Loss = Outputs.next_token_loss, first_changed: int = FIRST_CHANGED):
        super().__init__('causal')
        self.loss_of_outputs = loss_of_outputs
        self.first_changed = first_changed
        self.step = 0
        torch.manual_seed(0)
        next_head = torch.nn.Linear(32, VOCABULARY)
        value_head = torch.nn.Linear(32, 1)
        self.heads = torch.nn.ModuleDict({'next': next_head, 'value': value_head})

    @property
    def has_changed(self) -> bool:
        return self.step >= self.first_changed

    def last_layer(self, states: torch.Tensor) -> torch.Tensor:
        """Changes nothing. Subclasses change the states before the head."""
        return states

    def forward(self, batch):
        states = self.last_layer(self.states_of(batch))
        logits = self.model.lm_head(states)
        outputs = Outputs(
            logits=logits,
            states=states,
            labels=batch['labels'],
            heads=self.heads,
            has_changed=self.has_changed,
        )
        loss = self.loss_of_outputs(outputs)
        return {'loss': loss, 'logits': logits}


# Losses whose token weights change, or that get a second term.


def low_weight_of_rare():
    """Returns a weight for each id of the vocabulary: 0.1 for the rare label, 1 for all others."""
    weights = torch.ones(VOCABULARY)
    weights[RARE] = 0.1
    return weights


def rare_label_weighted(outputs):
    return outputs.next_token_loss(weight=low_weight_of_rare())


def rare_label_weighted_by_number(outputs):
    """Divides by the number of labels. `cross_entropy` itself divides by the sum of their weights."""
    weighted_sum = outputs.next_token_loss(weight=low_weight_of_rare(), reduction='sum')
    num_labels = has_loss(outputs.labels).sum()
    return weighted_sum / num_labels


def focal(outputs):
    losses = outputs.next_token_loss(reduction='none')
    if outputs.has_changed:
        probabilities = (-losses).exp()
        losses = (1 - probabilities).square() * losses
    num_labels = has_loss(outputs.labels).sum()
    return losses.sum() / num_labels


def label_smoothing(outputs):
    if outputs.has_changed:
        return outputs.next_token_loss(label_smoothing=0.1)
    return outputs.next_token_loss()


def with_later_term(outputs, weight, term, mean):
    """Adds a term, which is a mean of values over tokens or over rows."""
    loss = outputs.next_token_loss()
    if outputs.has_changed:
        values = term(outputs.logits, outputs.labels)
        loss = loss + weight * mean(values, outputs.labels)
    return loss


def z_loss(outputs):
    return with_later_term(outputs, 1e-2, squared_partition, over_tokens)


def z_loss_of_rows(outputs):
    return with_later_term(outputs, 1e-2, squared_partition, over_rows)


def distillation(outputs):
    return with_later_term(outputs, 0.5, of_reference, over_tokens)


def multi_token_prediction(outputs):
    loss = outputs.next_token_loss()
    if outputs.has_changed:
        next_head = outputs.heads['next']
        logits_of_second_next = next_head(outputs.states)
        term = next_token_loss(logits_of_second_next[:, :-1], outputs.labels[:, 1:])
        loss = loss + 0.3 * term
    return loss


def doubled(outputs):
    factor = 2 if outputs.has_changed else 1
    return factor * outputs.next_token_loss()


def penalty(outputs):
    loss = outputs.next_token_loss()
    if outputs.has_changed:
        squared_norm = outputs.heads['next'].weight.square().sum()
        loss = loss + 1e-2 * squared_norm
    return loss


def value_head(outputs):
    loss = outputs.next_token_loss()
    if outputs.has_changed:
        head = outputs.heads['value']
        values_of_rows = head(outputs.states[:, -1])
        loss = loss + 0.3 * values_of_rows.square().mean()
    return loss


QUICK_LOSSES = [rare_label_weighted_by_number, value_head]
LOSSES = [*QUICK_LOSSES, rare_label_weighted, focal, multi_token_prediction]
# `tests/matrix/test_losses.py` has these from the first step on.
LATER_LOSSES = [label_smoothing, z_loss, z_loss_of_rows, distillation]
CHANGES = []
for loss in LOSSES + LATER_LOSSES:
    marks = () if loss in QUICK_LOSSES else pytest.mark.slow
    CHANGES.append(pytest.param(loss, FIRST_CHANGED, marks=marks))
for loss in LOSSES:
    CHANGES.append(pytest.param(loss, 0, marks=pytest.mark.slow))


def batches(first_changed: int = FIRST_CHANGED) -> list[dict[str, Any]]:
    """Returns random rows. The rare label is in none of them before step 12.

    If ``first_changed`` is 0, it is in many of them from the start.
    """
    rng = random.Random(0)
    all_batches = []
    for step in range(NUM_STEPS):
        lengths = [rng.randint(4, 20) for _ in range(6)]
        row_sizes = []
        for length in lengths:
            num_labels = rng.randint(1, length - 1)
            row_sizes.append((length, num_labels))
        batch = ragged_batch(row_sizes)

        labels = batch['labels']
        labels[labels == RARE] = COMMON
        if step >= FIRST_CHANGED:
            row = rng.randrange(6)
            label_positions = (labels[row] != -100).nonzero()
            last_label = int(label_positions[-1])
            labels[row, last_label] = RARE
        if first_changed == 0:
            labels[labels == COMMON] = RARE
        all_batches.append(batch)
    return all_batches


def gradients_of_steps(
    model: Any,
    data: Any,
    *,
    step_is_set_at: Event = Event.BATCH_START,
    callbacks: Iterable[Callback] = (),
    **options: Any,
) -> list[Gradients]:
    """Trains until the run ends or a step is refused. Any other error is raised.

    Args:
        model: A :class:`ChangingModel`. It is told the number of each step.
        data: A batch for each step.
        step_is_set_at: The event at which the model is told.
        callbacks: Further callbacks of the run.
        options: See :func:`.fit`.

    Returns:
        The gradients of the steps that were not refused.
    """

    def set_step(state):
        model.step = int(state.timestamp.batch)

    all_callbacks = [On(step_is_set_at, set_step), *callbacks]
    recorder = GradientRecorder()
    try:
        fit(model, *data, callbacks=all_callbacks, recorder=recorder, **options)
        assert len(recorder.steps) == len(data)
    except RefusalError:
        pass
    return recorder.steps


@pytest.mark.parametrize(('loss', 'first_changed'), CHANGES)
def test_every_step_is_exact_or_refused(loss, first_changed):
    model = ChangingModel(loss, first_changed)
    data = batches(first_changed)

    steps = gradients_of_steps(model, data)

    for step, gradients in enumerate(steps):
        model.step = step
        expected = plain_gradients(model, data[step])
        assert relative_error(gradients, expected) < 1e-6, step
    if first_changed > 0:
        assert len(steps) >= FIRST_CHANGED, 'refused before the loss changed'


class SecondHeadInTurn(ChangingModel):
    """Has a second mean over tokens, which is not made of the logits, in steps 0 and 2."""

    @property
    def has_changed(self) -> bool:
        return self.step % 2 == 0


def second_head(outputs):
    loss = outputs.next_token_loss()
    if outputs.has_changed:
        next_head = outputs.heads['next']
        second_logits = next_head(outputs.states)
        loss = loss + 0.3 * next_token_loss(second_logits, outputs.labels)
    return loss


def test_known_term_may_come_back():
    """Step 1 does not have the term, but step 0 has shown that the loss may have it."""
    data = [ragged_batch()] * 3

    steps = gradients_of_steps(SecondHeadInTurn(second_head), data)

    assert len(steps) == len(data)


@pytest.mark.parametrize('loss', [label_smoothing, doubled])
def test_change_while_rows_are_checked(loss):
    """The check of the rows must not take the changed loss for the loss of the run."""
    first_changed = LOOK_AGAIN
    model = ChangingModel(loss, first_changed)
    data = batches(first_changed)

    # At the end of the step before, because at BATCH_START the check runs before callbacks.
    steps = gradients_of_steps(model, data, step_is_set_at=Event.BATCH_END)

    assert len(steps) == first_changed


@pytest.mark.parametrize('packing', [False, 'auto'])
def test_model_begins_to_see_the_width(packing, monkeypatch):
    """Padded rows would still be exact, but the trimmed or packed rows of the last steps were not."""
    monkeypatch.setattr(first_batch, 'LOOK_AGAIN', 4)
    monkeypatch.setattr(MicrobatchSplit, '_packing_costs_less', lambda *arguments: True)
    model = one_layer_model()

    def add_width(module, args, embedded):
        width = embedded.shape[1]
        return embedded + 0.01 * width

    def change_after_two_steps(state):
        if state.timestamp.batch == 2:
            model.model.embed_tokens.register_forward_hook(add_width)

    eight_batches = [ragged_batch()] * 8
    callbacks = [On(Event.BATCH_END, change_after_two_steps)]
    recorder = GradientRecorder()
    with pytest.raises(RuntimeError, match='Earlier steps had rows like these'):
        fit(model, *eight_batches, callbacks=callbacks, recorder=recorder, packing=packing)

    assert len(recorder.steps) == 4


DYNAMIC_ROPE = {'rope_type': 'dynamic', 'factor': 4.0}


@pytest.mark.parametrize(
    ('config', 'untrimmed', 'trimmed', 'side'),
    [
        pytest.param(
            {},
            [(12, 12), (9, 9), (6, 6), (4, 4)],
            [(12, 5), (9, 4), (6, 2), (4, 1)],
            'left',
            id='first tokens had labels',
        ),
        pytest.param(
            {'rope_scaling': DYNAMIC_ROPE, 'max_position_embeddings': 16},
            [(20, 12), (9, 9), (6, 6), (4, 4)],
            [(12, 5), (9, 4), (6, 2), (5, 2)],
            'right',
            id='rows were over the rotary limit',
        ),
    ],
)
def test_rows_are_trimmed_later(config, untrimmed, trimmed, side, monkeypatch):
    """The rows of the first four steps cannot be trimmed. The fifth step trims rows for the first time.

    Everything is checked again before the fifth step, and nothing is refused.
    """
    monkeypatch.setattr(first_batch, 'LOOK_AGAIN', 4)
    model = one_layer_model(**config)
    before = ragged_batch(untrimmed, side=side)
    after = ragged_batch(trimmed, side=side)

    recorder = fit(model, before, before, before, before, after)

    assert len(recorder.steps) == 5


def with_mean_of_values(loss, values, labels):
    """Adds the mean square of the values (rows, width, 1) at the tokens of the loss."""
    counted_values = values[:, :-1][has_loss(labels)]
    return loss + 0.3 * counted_values.square().mean()


def separate_heads():
    """Returns a model with one layer for logits and one for values."""

    def loss_of(outputs):
        values = outputs.heads['value'](outputs.states)
        return with_mean_of_values(outputs.next_token_loss(), values, outputs.labels)

    return ChangingModel(loss_of)


class CommonHead(ChangingModel):
    """One layer makes logits and values, and `split` takes them apart."""

    def __init__(self):
        super().__init__()
        self.common_head = torch.nn.Linear(32, VOCABULARY + 1)

    def forward(self, batch):
        logits_and_values = self.common_head(self.states_of(batch))
        logits, values = logits_and_values.split([VOCABULARY, 1], dim=-1)
        labels = batch['labels']
        loss = with_mean_of_values(next_token_loss(logits, labels), values, labels)
        return {'loss': loss, 'logits': logits}


@pytest.mark.parametrize(
    ('make_model', 'token_weights'),
    [
        (separate_heads, 'sqrt'),
        (separate_heads, 'column'),
        (CommonHead, 'sqrt'),
    ],
)
def test_unweighted_term_is_refused_with_weights(make_model, token_weights):
    """Token weights apply to the losses of the logits. The term of the values would stay unweighted."""
    batch = ragged_batch()
    model = make_model()

    outcome = measure(model, batch, 2)
    assert outcome.kind == 'exact'

    batch['loss_weights'] = torch.rand(batch['labels'].shape) + 0.1
    weighted_algorithm = TokenAccumulation(token_weights=token_weights)
    weighted_outcome = measure(model, batch, 2, algorithms=[weighted_algorithm])
    assert weighted_outcome.kind == 'refused', weighted_outcome


@pytest.mark.parametrize(
    ('dtype', 'smoothing', 'seed'),
    [
        (torch.bfloat16, 0.0, 0),
        (torch.bfloat16, 0.1, 1),
        (torch.float16, 0.0, 1),
        (torch.float16, 0.1, 0),
    ],
)
def test_rounded_gradients_are_no_leak(dtype, smoothing, seed):
    """The round-off of logits in half precision is not taken for a row that changes another one.

    Nor is label smoothing taken for a factor. It is one only as long as the model is fresh.
    """

    class RoundedLogits(NativeModel):
        def forward(self, batch):
            logits = self.logits_of(batch)
            loss = next_token_loss(logits.float(), batch['labels'], label_smoothing=smoothing)
            return {'loss': loss, 'logits': logits}

    torch.manual_seed(seed)
    model = RoundedLogits('causal', init='fresh').to(dtype)
    batch = SUBJECTS['llama'].batch(seed, side='right')

    def enlarge_logits(state):
        with torch.no_grad():
            model.model.lm_head.weight.mul_(50)

    callback = On(Event.BATCH_END, enlarge_logits)
    recorder = fit(model, batch, batch, callbacks=[callback])

    assert len(recorder.steps) == 2


@pytest.mark.parametrize('teacher_first', [True, False])
def test_head_of_a_teacher(teacher_first):
    """The check must watch the logits of the model, and not the logits of the frozen teacher."""

    class Student(NativeModel):
        def __init__(self):
            super().__init__('causal')
            self.teacher = one_layer_model().requires_grad_(False)

        def teacher_logits(self, batch):
            outputs = self.teacher(batch['input_ids'], batch['attention_mask'])
            return outputs.logits

        def forward(self, batch):
            if teacher_first:
                teacher_logits = self.teacher_logits(batch)
                logits = self.logits_of(batch)
            else:
                logits = self.logits_of(batch)
                teacher_logits = self.teacher_logits(batch)

            labels = batch['labels']
            is_counted = has_loss(labels)
            predictions = logits[:, :-1][is_counted]
            targets = teacher_logits[:, :-1][is_counted]
            divergence = F.kl_div(
                predictions.log_softmax(dim=-1),
                targets.log_softmax(dim=-1),
                log_target=True,
                reduction='batchmean',
            )
            loss = next_token_loss(logits, labels)
            return {'loss': loss + 0.5 * divergence, 'logits': logits}

    outcome = measure(Student(), ragged_batch(), 2)
    assert outcome.kind == 'exact'


def test_norms_thawed_later_are_refused():
    """A callback that calls `train()` after an evaluation also thaws a norm that was frozen."""

    class WithNorm(ChangingModel):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(32)

        def last_layer(self, states: torch.Tensor) -> torch.Tensor:
            channels_first = states.transpose(1, 2)
            return self.norm(channels_first).transpose(1, 2)

    def freeze_norm(state):
        state.model.norm.eval()

    def thaw_after_three_steps(state):
        if state.timestamp.batch == 3:
            state.model.train()

    six_batches = batches()[:6]
    callbacks = [
        On(Event.EPOCH_START, freeze_norm),
        On(Event.BATCH_END, thaw_after_three_steps),
    ]

    steps = gradients_of_steps(WithNorm(), six_batches, callbacks=callbacks)

    assert len(steps) == 3


@pytest.mark.parametrize('units', [None, {'lm': 'tokens', 'rows': 'samples'}])
def test_rows_coupled_later_are_refused(units):
    """The weights of tokens at the logits stay right, so only a new check of rows shows it, in step 16."""

    class MixesRowsLater(ChangingModel):
        def last_layer(self, states: torch.Tensor) -> torch.Tensor:
            if self.has_changed:
                mean_of_rows = states.mean(dim=0, keepdim=True)
                states = states + 0.3 * mean_of_rows
            return states

        def loss(self, outputs, batch):
            if units is None:
                return outputs['loss']
            last_logits = outputs['logits'][:, -1]
            term = 1e-2 * last_logits.square().mean()
            return {'lm': outputs['loss'], 'rows': term}

    twenty_batches = batches()[:20]

    steps = gradients_of_steps(MixesRowsLater(), twenty_batches, loss_units=units)

    assert len(steps) == 16


@pytest.mark.parametrize('loss', [doubled, penalty])
def test_unchecked_loss_may_change(loss):
    """With the check the first changed step is refused. Without it all 16 steps run."""
    data = batches()[:16]

    checked_steps = gradients_of_steps(ChangingModel(loss), data)
    unchecked_steps = gradients_of_steps(
        ChangingModel(loss),
        data,
        check_loss=False,
        loss_tokens='causal',
    )

    assert len(checked_steps) == FIRST_CHANGED
    assert len(unchecked_steps) == 16


@pytest.mark.parametrize('term', [None, 0.5])
def test_term_without_tensor_is_named(term):
    class TwoTerms(NativeModel):
        def loss(self, outputs, batch):
            return {'lm': outputs['loss'], 'box': term}

    algorithm = TokenAccumulation(loss_units={'lm': 'tokens', 'box': 'samples'})

    outcome = measure(TwoTerms('causal'), ragged_batch(), 2, algorithms=[algorithm])

    assert outcome.kind == 'refused', outcome
    assert "`loss['box']` must be a tensor" in outcome.message
