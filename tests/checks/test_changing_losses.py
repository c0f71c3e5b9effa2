# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Losses, rows and norms that change during a run: every step is exact, or refused before the optimizer moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composer.core import Callback
from composer.models import ComposerModel

from composer_tokacc import TokenAccumulation
from tests.matrix.harness import measure, plain_gradients
from tests.matrix.native_models import NativeModel
from tests.matrix.subjects import SUBJECTS
from tests.support.text import collate, next_token_loss, text_model, text_rows
from tests.support.training import fit, relative_error

NUM_STEPS = 40
BEGINS = 12
"""The step in which the effect begins."""
SHAPE = [(4, 2), (9, 3), (5, 4), (14, 11), (6, 1), (3, 2)]
RARE = 63
"""A token that no label is before the effect begins."""


class Changing(ComposerModel):
    """A Llama whose loss is ``loss_of(logits, states, labels, heads, has_begun)``."""

    def __init__(self, loss_of: Callable[..., torch.Tensor], begins: int) -> None:
        super().__init__()
        self.model = SUBJECTS['llama'].model('large').model
        self.loss_of = loss_of
        self.begins = begins
        self.step = 0
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleDict({'next': torch.nn.Linear(32, 64), 'value': torch.nn.Linear(32, 1)})

    def forward(self, batch: Any) -> Any:
        states = self.model.model(batch['input_ids'], batch['attention_mask']).last_hidden_state
        logits = self.model.lm_head(states)
        loss = self.loss_of(logits, states, batch['labels'], self.heads, self.step >= self.begins)
        return {'loss': loss, 'logits': logits}

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return outputs['loss']

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return outputs or self(batch)


def rare_label_weighted(logits, states, labels, heads, has_begun):
    weight = torch.ones(64).index_fill(0, torch.tensor([RARE]), 0.1)
    return next_token_loss(logits, labels, weight=weight)


def rare_label_weighted_by_number(logits, states, labels, heads, has_begun):
    weight = torch.ones(64).index_fill(0, torch.tensor([RARE]), 0.1)
    return next_token_loss(logits, labels, weight=weight, reduction='sum') / (labels[:, 1:] != -100).sum()


def focal(logits, states, labels, heads, has_begun):
    losses = next_token_loss(logits, labels, reduction='none')
    factors = (1 - (-losses).exp()).square() if has_begun else torch.ones_like(losses)
    return (factors * losses).sum() / (labels[:, 1:] != -100).sum()


def label_smoothing(logits, states, labels, heads, has_begun):
    return next_token_loss(logits, labels, label_smoothing=0.1 * has_begun)


def z_loss(logits, states, labels, heads, has_begun):
    counted = labels[:, 1:] != -100
    squares = logits[:, :-1][counted].logsumexp(dim=-1).square()
    return next_token_loss(logits, labels) + 1e-2 * has_begun * squares.mean()


def z_loss_of_rows(logits, states, labels, heads, has_begun):
    counted = labels[:, 1:] != -100
    squares = logits[:, :-1].logsumexp(dim=-1).square() * counted
    means = squares.sum(dim=1) / counted.sum(dim=1).clamp(min=1)
    return next_token_loss(logits, labels) + 1e-2 * has_begun * means.mean()


def distillation(logits, states, labels, heads, has_begun):
    teacher = torch.randn(64, generator=torch.Generator().manual_seed(1)).log_softmax(dim=0)
    counted = labels[:, 1:] != -100
    distances = F.kl_div(
        logits[:, :-1][counted].log_softmax(dim=-1), teacher[None], log_target=True, reduction='none'
    ).sum(dim=-1)
    return next_token_loss(logits, labels) + 0.5 * has_begun * distances.mean()


def multi_token_prediction(logits, states, labels, heads, has_begun):
    if not has_begun:
        return next_token_loss(logits, labels)
    ahead = next_token_loss(heads['next'](states)[:, :-1], labels[:, 1:])  # the token after the next one
    return next_token_loss(logits, labels) + 0.3 * ahead


def value_head(logits, states, labels, heads, has_begun):
    if not has_begun:
        return next_token_loss(logits, labels)
    return next_token_loss(logits, labels) + 0.3 * heads['value'](states[:, -1]).square().mean()


LOSSES = [
    rare_label_weighted,
    rare_label_weighted_by_number,
    focal,
    label_smoothing,
    z_loss,
    z_loss_of_rows,
    distillation,
    multi_token_prediction,
    value_head,
]


def batches():
    rng = random.Random(0)
    for step in range(NUM_STEPS):
        lengths = [rng.randint(4, 20) for _ in range(6)]
        batch = collate(text_rows([(n, rng.randint(1, n - 1)) for n in lengths]))
        batch['labels'][batch['labels'] == RARE] = 5
        if step >= BEGINS:
            row = rng.randrange(6)
            place = int((batch['labels'][row] != -100).nonzero()[-1])
            batch['labels'][row, place] = RARE
        yield batch


QUICK = [(rare_label_weighted_by_number, BEGINS), (value_head, BEGINS)]
CELLS = [
    pytest.param(
        loss,
        begins,
        marks=[] if (loss, begins) in QUICK else pytest.mark.slow,
        id=f'{loss.__name__} from step {begins} on',
    )
    for loss in LOSSES
    for begins in (0, BEGINS)
]


def steps(model: Any, data: Any, *, callbacks: Any = (), **options: Any) -> list[dict[str, torch.Tensor]]:
    """Gradients of the steps of a run, until it ends or is refused."""

    class Recording(Callback):
        def batch_start(self, state, logger):
            model.step = int(state.timestamp.batch)

        def after_train_batch(self, state, logger):
            gradients_of_step = {}
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradients_of_step[name] = parameter.grad.clone()
            gradients.append(gradients_of_step)

    gradients: list[dict[str, torch.Tensor]] = []
    refusal = ''
    try:
        fit(model, *data, callbacks=[Recording(), *callbacks], **options)
    except RuntimeError as error:
        refusal = str(error)
    # Only a refusal may end a run early.
    assert len(gradients) == len(data) or ' must ' in refusal
    return gradients


@pytest.mark.parametrize(('loss', 'begins'), CELLS)
def test_every_step_is_exact_or_refused(loss, begins):
    model = Changing(loss, begins)
    data = list(batches())
    if begins == 0:
        for batch in data:
            batch['labels'] = batch['labels'].masked_fill(batch['labels'] == 5, RARE)
    exact_steps = steps(model, data)
    for step, gradients in enumerate(exact_steps):
        model.step = step
        assert relative_error(gradients, plain_gradients(model, data[step])) < 1e-6, step
    if begins > 0:
        assert len(exact_steps) >= BEGINS, 'refused before the effect began'


@pytest.mark.parametrize('token_weights', ['sqrt', 'column'])
def test_unweighted_term_is_refused_with_weights(token_weights):
    def loss_of(logits, states, labels, heads, has_begun):
        counted = labels[:, 1:] != -100
        values = heads['value'](states).squeeze(-1)[:, :-1].square()
        return next_token_loss(logits, labels) + 0.3 * (values * counted).sum() / counted.sum()

    batch = collate(text_rows(SHAPE))
    model = Changing(loss_of, 0)
    assert measure(model, batch, 2).kind == 'exact'
    batch['loss_weights'] = torch.rand(batch['labels'].shape) + 0.1
    outcome = measure(model, batch, 2, algorithms=[TokenAccumulation(token_weights=token_weights)])
    assert outcome.kind == 'refused', outcome


@pytest.mark.parametrize('seed', range(2))
@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_rounded_gradients_are_no_leak(dtype, smoothing, seed):
    torch.manual_seed(seed)

    class Smoothed(NativeModel):
        def forward(self, batch: Any) -> Any:
            logits = self.model(batch['input_ids'], batch['attention_mask']).logits
            return {
                'loss': next_token_loss(logits.float(), batch['labels'], label_smoothing=smoothing),
                'logits': logits,
            }

    model = Smoothed('causal', init='fresh').to(dtype)
    batch = SUBJECTS['llama'].batch(seed, side='right')
    recorder = fit(model, batch)
    assert recorder.gradients


@pytest.mark.parametrize('order', ['before', 'after'])
def test_head_of_a_teacher(order):
    class Student(NativeModel):
        def __init__(self) -> None:
            super().__init__('causal')
            self.teacher = text_model().requires_grad_(False)

        def teacher_log_probabilities(self, batch: Any) -> torch.Tensor:
            with torch.no_grad():
                return self.teacher(batch['input_ids'], batch['attention_mask']).logits.log_softmax(dim=-1)

        def forward(self, batch: Any) -> Any:
            if order == 'before':
                teacher = self.teacher_log_probabilities(batch)
            logits = self.model(batch['input_ids'], batch['attention_mask']).logits
            if order == 'after':
                teacher = self.teacher_log_probabilities(batch)
            counted = (batch['labels'] != -100)[:, 1:]
            distances = F.kl_div(logits.log_softmax(dim=-1), teacher, log_target=True, reduction='none').sum(dim=-1)
            loss = next_token_loss(logits, batch['labels']) + 0.5 * distances[:, :-1][counted].mean()
            return {'loss': loss, 'logits': logits}

    assert measure(Student(), collate(text_rows(SHAPE)), 2).kind == 'exact'


def test_norms_thawed_later_are_refused():
    class Normed(Changing):
        def __init__(self) -> None:
            super().__init__(lambda logits, states, labels, heads, has_begun: next_token_loss(logits, labels), 0)
            self.norm = torch.nn.BatchNorm1d(32).eval()

        def forward(self, batch: Any) -> Any:
            states = self.model.model(batch['input_ids'], batch['attention_mask']).last_hidden_state
            logits = self.model.lm_head(self.norm(states.transpose(1, 2)).transpose(1, 2))
            return {'loss': next_token_loss(logits, batch['labels']), 'logits': logits}

    class TrainModeAfterEvaluation(Callback):
        def batch_end(self, state, logger):
            if int(state.timestamp.batch) == 3:
                state.model.train()

    model = Normed()

    class FreezeNorm(Callback):
        def epoch_start(self, state, logger):
            model.norm.eval()

    assert len(steps(model, list(batches())[:6], callbacks=[FreezeNorm(), TrainModeAfterEvaluation()])) == 3


@pytest.mark.parametrize('units', [None, {'lm': 'tokens', 'rows': 'samples'}])
def test_rows_coupled_later_are_refused(units):
    """The weights of tokens at the logits stay right, so only a new check of rows shows it, in step 16."""

    class MixesRowsLater(Changing):
        def forward(self, batch: Any) -> Any:
            states = self.model.model(batch['input_ids'], batch['attention_mask']).last_hidden_state
            states = states + 0.3 * states.mean(dim=0, keepdim=True) * (self.step >= 12)
            logits = self.model.lm_head(states)
            return {'loss': next_token_loss(logits, batch['labels']), 'logits': logits}

        def loss(self, outputs: Any, batch: Any) -> Any:
            if units is None:
                return outputs['loss']
            return {'lm': outputs['loss'], 'rows': 1e-2 * outputs['logits'][:, -1].square().mean(dim=-1).mean()}

    model = MixesRowsLater(lambda *args: None, 0)
    assert len(steps(model, list(batches())[:20], loss_units=units)) == 16


def test_unchecked_loss_may_change():
    def loss_of(logits, states, labels, heads, has_begun):
        return next_token_loss(logits, labels) * (2.0 if has_begun else 1.0)

    data = list(batches())[:16]
    assert len(steps(Changing(loss_of, 12), data)) == 12
    assert len(steps(Changing(loss_of, 12), data, check_loss=False, loss_tokens='causal')) == 16


@pytest.mark.parametrize('term', [None, 0.5])
def test_term_without_tensor_is_named(term):
    class TwoTerms(NativeModel):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return {'lm': outputs['loss'], 'box': term}

    algorithms = [TokenAccumulation(loss_units={'lm': 'tokens', 'box': 'samples'})]
    options = {'algorithms': algorithms, 'reference': lambda model, batch: {}}
    outcome = measure(TwoTerms('causal'), collate(text_rows(SHAPE)), 2, **options)
    assert outcome.kind == 'refused', outcome
    assert "`loss['box']` must be a tensor" in outcome.message
