# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What was wrong in silence, or refused though healthy, while the measuring at the logits was new."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composer.core import Callback

from composer_tokacc import TokenAccumulation
from tests.checks.test_later_effects import Changing, batches, token_losses
from tests.matrix.harness import measure
from tests.matrix.native_models import NativeModel
from tests.matrix.subjects import SUBJECTS
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit

SHAPE = [(4, 2), (9, 3), (5, 4), (14, 11), (6, 1), (3, 2)]


def steps(model: Any, *, num_steps: int, callbacks: Any = (), **options: Any) -> int:
    """How many steps a run took before it was refused."""
    done = 0

    class Counting(Callback):
        def batch_start(self, state, logger):
            model.step = int(state.timestamp.batch)

        def batch_end(self, state, logger):
            nonlocal done
            done += 1

    refusal = ''
    try:
        fit(model, *list(batches())[:num_steps], callbacks=[Counting(), *callbacks], **options)
    except RuntimeError as error:
        refusal = str(error)
    # Nothing but a refusal ends a run before its time.
    assert done == num_steps or ' must ' in refusal
    return done


@pytest.mark.parametrize('token_weights', ['sqrt', 'column'])
def test_term_of_the_states_that_no_weight_reaches_is_refused_with_weights(token_weights):
    def of(logits, states, labels, heads, has_begun):
        counted = labels[:, 1:] != -100
        values = heads['value'](states).squeeze(-1)[:, :-1].square()
        return token_losses(logits, labels) + 0.3 * (values * counted).sum() / counted.sum()

    batch = collate(text_rows(SHAPE))
    model = Changing(of, 0)
    assert measure(model, batch, 2).kind == 'exact'
    batch['loss_weights'] = torch.rand(batch['labels'].shape) + 0.1
    outcome = measure(model, batch, 2, algorithms=[TokenAccumulation(token_weights=token_weights)])
    assert outcome.kind == 'refused', outcome


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_gradients_that_are_rounded_themselves_are_no_leak(dtype, smoothing, seed):
    torch.manual_seed(seed)

    class Smoothed(NativeModel):
        def forward(self, batch: Any) -> Any:
            logits = self.model(batch['input_ids'], batch['attention_mask']).logits
            return {'loss': token_losses(logits.float(), batch['labels'], label_smoothing=smoothing), 'logits': logits}

    model = Smoothed('causal', init='fresh').to(dtype)
    batch = SUBJECTS['llama'].batch(seed, side='right')
    recorder = fit(model, batch)
    assert recorder.gradients


@pytest.mark.parametrize('order', ['before', 'after'])
def test_a_teacher_whose_head_is_the_last_to_be_called(order):
    class Taught(NativeModel):
        def __init__(self) -> None:
            super().__init__('causal')
            self.teacher = text_model().requires_grad_(False)

        def taught(self, batch: Any) -> torch.Tensor:
            with torch.no_grad():
                return self.teacher(batch['input_ids'], batch['attention_mask']).logits.log_softmax(dim=-1)

        def forward(self, batch: Any) -> Any:
            wanted = self.taught(batch) if order == 'before' else None
            logits = self.model(batch['input_ids'], batch['attention_mask']).logits
            wanted = self.taught(batch) if wanted is None else wanted
            counted = (batch['labels'] != -100)[:, 1:]
            apart = F.kl_div(logits.log_softmax(dim=-1), wanted, log_target=True, reduction='none').sum(dim=-1)
            loss = token_losses(logits, batch['labels']) + 0.5 * apart[:, :-1][counted].mean()
            return {'loss': loss, 'logits': logits}

    assert measure(Taught(), collate(text_rows(SHAPE)), 2).kind == 'exact'


def test_norms_that_are_thawed_later_are_refused():
    class Normed(Changing):
        def __init__(self) -> None:
            super().__init__(lambda logits, states, labels, heads, has_begun: token_losses(logits, labels), 0)
            self.norm = torch.nn.BatchNorm1d(32).eval()

        def forward(self, batch: Any) -> Any:
            states = self.model.model(batch['input_ids'], batch['attention_mask']).last_hidden_state
            logits = self.model.lm_head(self.norm(states.transpose(1, 2)).transpose(1, 2))
            return {'loss': token_losses(logits, batch['labels']), 'logits': logits}

    class AsEvaluationDoes(Callback):
        def batch_end(self, state, logger):
            if int(state.timestamp.batch) == 3:
                state.model.train()

    model = Normed()

    class Frozen(Callback):
        def epoch_start(self, state, logger):
            model.norm.eval()

    assert steps(model, num_steps=6, callbacks=[Frozen(), AsEvaluationDoes()]) == 3


@pytest.mark.parametrize('units', [None, {'lm': 'tokens', 'rows': 'samples'}])
def test_rows_that_begin_to_see_each_other_are_noticed_at_the_next_look(units):
    """What tokens weigh at the logits stays right, so only a look at the rows shows it."""

    class Seeing(Changing):
        def forward(self, batch: Any) -> Any:
            states = self.model.model(batch['input_ids'], batch['attention_mask']).last_hidden_state
            states = states + 0.3 * states.mean(dim=0, keepdim=True) * (self.step >= 12)
            logits = self.model.lm_head(states)
            return {'loss': token_losses(logits, batch['labels']), 'logits': logits}

        def loss(self, outputs: Any, batch: Any) -> Any:
            if units is None:
                return outputs['loss']
            return {'lm': outputs['loss'], 'rows': 1e-2 * outputs['logits'][:, -1].square().mean(dim=-1).mean()}

    model = Seeing(lambda *given: None, 0)
    assert 12 <= steps(model, num_steps=20, loss_units=units) == 16


def test_a_loss_that_changes_on_purpose_runs_where_it_is_not_held_to_what_it_was():
    def of(logits, states, labels, heads, has_begun):
        return token_losses(logits, labels) * (2.0 if has_begun else 1.0)

    assert steps(Changing(of, 12), num_steps=16) == 12
    assert steps(Changing(of, 12), num_steps=16, check_loss=False, loss_tokens='causal') == 16


@pytest.mark.parametrize('term', [None, 0.5])
def test_a_term_that_is_no_tensor_is_named(term):
    class Two(NativeModel):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return {'lm': outputs['loss'], 'box': term}

    algorithms = [TokenAccumulation(loss_units={'lm': 'tokens', 'box': 'samples'})]
    options = {'algorithms': algorithms, 'reference': lambda model, batch: {}}
    outcome = measure(Two('causal'), collate(text_rows(SHAPE)), 2, **options)
    assert outcome.kind == 'refused', outcome
    assert "`loss['box']` must be a tensor" in outcome.message
