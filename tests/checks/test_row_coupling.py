# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Models and loss terms that couple the rows of a microbatch are refused, or accepted on request."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from composer_tokacc.data_spec.split import split_of
from tests.matrix.native_models import NativeModel, has_loss
from tests.support.text import (
    ONE_UNLABELLED,
    RAGGED,
    VOCABULARY,
    gpt2,
    next_token_loss,
    one_layer_model,
    ragged_batch,
)
from tests.support.training import GradientRecorder, fit, hugging_face, num_hooks


def assert_second_step_is_refused(model, first, later, *, match, **options):
    """Fails unless the first batch is computed, and the second one is refused with a message that matches."""
    recorder = GradientRecorder()
    with pytest.raises(RuntimeError, match=match):
        fit(model, first, later, recorder=recorder, **options)
    assert len(recorder.steps) == 1


def packs_rows(recorder):
    """Returns whether the rows of a run were packed."""
    split = split_of(recorder.trainer.state.dataloader)
    return split.packs_rows


def with_batch_norm():
    """Returns a model that has a BatchNorm, which no forward calls."""
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
    recorder = fit(with_batch_norm(), ragged_batch(), loss_tokens='causal', check_loss=False)
    assert recorder.gradients


def with_term(term_of, make_model=one_layer_model):
    """Returns a model with a second term ``term_of(model, outputs, batch)``.

    If that is None, the loss has no second term.
    """
    model = hugging_face(make_model())
    plain_loss = model.loss

    def loss(outputs, batch):
        terms = {'lm': plain_loss(outputs, batch)}
        term = term_of(model, outputs, batch)
        if term is not None:
            terms['pairs'] = term
        return terms

    model.loss = loss
    return model


def units_of_terms(unit):
    """Returns the argument ``loss_units`` for a model of :func:`with_term`. ``unit`` is the unit of the second term."""
    return {'lm': 'tokens', 'pairs': unit}


class CouplesPrompts(NativeModel):
    """The logits at the third token depend on the other rows."""

    def logits_of(self, batch):
        logits = super().logits_of(batch).clone()
        mean_of_rows = logits[:, 2].mean(dim=0)
        logits[:, 2] += 0.1 * mean_of_rows
        return logits


def test_leak_at_tokens_without_labels():
    """Later rows may have labels there, so the check adds some."""
    batch = ragged_batch([(9, 2), (8, 3), (7, 1), (12, 4)])
    first_labels = batch['labels'][:, :4]  # the third token predicts the last of them
    assert (first_labels == -100).all()

    with pytest.raises(RuntimeError, match='rows beside it'):
        fit(CouplesPrompts('causal'), batch)


class CouplesStates(NativeModel):
    """Returns no logits. A term of the states depends on the other rows, but its value is small."""

    def forward(self, batch):
        states = self.states_of(batch)
        logits = self.model.lm_head(states)
        loss = self.loss_of(logits, batch['labels'])
        mean_state = states.mean(dim=(0, 1))
        coupling_term = mean_state.square().sum()
        return {'loss': loss + 1e-6 * coupling_term}


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
        first_loss = self.loss_of(logits, batch['labels'])

        second_logits = self.second_head(states)
        second_sum = next_token_loss(second_logits, batch['second_labels'], reduction='sum')
        num_first_labels = has_loss(batch['labels']).sum().clamp(min=1)
        second_loss = second_sum / num_first_labels
        return {'loss': first_loss + self.weight * second_loss, 'logits': logits}


def batch_of_two_tasks(row_sizes):
    """Returns a batch with the same labels for both tasks."""
    batch = ragged_batch(row_sizes)
    batch['second_labels'] = batch['labels'].clone()
    return batch


def batch_with_row_of_second_task():
    """Returns a batch with a row that has labels of the second task only."""
    batch = batch_of_two_tasks(ONE_UNLABELLED)
    unlabelled_row = 1
    batch['second_labels'][unlabelled_row, 1:4] = batch['input_ids'][unlabelled_row, 1:4]
    return batch


@pytest.mark.parametrize('weight', [1.0, 1e-5])
def test_second_labels_in_row_without_labels(weight):
    """The first batch has labels in every row."""
    assert_second_step_is_refused(
        SecondTask(weight),
        batch_of_two_tasks(RAGGED),
        batch_with_row_of_second_task(),
        match='must be the mean over its loss-generating tokens',
    )


def test_second_labels_after_batch_without_labels():
    """A batch without labels cannot show how the loss treats rows with and without them in one batch."""
    assert_second_step_is_refused(
        SecondTask(1.0),
        batch_of_two_tasks([(4, 0), (9, 0), (14, 0)]),
        batch_with_row_of_second_task(),
        match='a term in rows without labels',
        microbatch_size=1,
    )


@pytest.mark.parametrize('unit', ['coupled_samples', 'microbatches'])
def test_terms_that_couple_rows_refuse_regrouping(unit):
    model = with_term(lambda model, outputs, batch: outputs['logits'].mean())

    with pytest.raises(RuntimeError, match=r"the terms \['pairs'\] of `loss_units`"):
        fit(model, ragged_batch(), loss_units=units_of_terms(unit))


def is_labelled_row(batch):
    """Returns whether a row has a label, bool of shape ``(rows,)``."""
    has_label = batch['labels'] != -100
    return has_label.any(dim=1)


def of_two_rows(model, outputs, batch):
    """A row by itself leaves out the term, so its gradient depends on the cut."""
    first_logits = outputs['logits'].float()[:, 0]
    if len(first_logits) == 1:
        return None
    products_of_rows = first_logits @ first_logits.T
    return products_of_rows.mean()


def size_of_first_states(model, batch, has_term):
    """Returns the mean square of the embedding of the first token in some rows. No other layer has a part in it."""
    first_ids = batch['input_ids'][has_term, :1]
    states = model.model.get_input_embeddings()(first_ids)
    return 100 * states.square().mean()


def of_long_rows(model, outputs, batch):
    """It is not made of the last layers, so only its value shows that it is a mean over some of the rows."""
    is_long = batch['attention_mask'].sum(dim=1) > 5
    if not is_long.any():
        return None
    return size_of_first_states(model, batch, is_long)


def of_labelled_rows(model, outputs, batch):
    """All rows have labels. But a dummy row that fills up a rank has none, and would not be counted."""
    is_labelled = is_labelled_row(batch)
    first_logits = outputs['logits'][is_labelled, 0]
    return first_logits.square().mean()


def of_states_of_labelled_rows(model, outputs, batch):
    """It is not made of the last layers, so only its value shows that it leaves out rows without labels."""
    return size_of_first_states(model, batch, is_labelled_row(batch))


@pytest.mark.parametrize(
    'term_of',
    [of_two_rows, of_long_rows, of_labelled_rows, of_states_of_labelled_rows],
)
def test_term_of_some_rows_is_refused(term_of):
    model = with_term(term_of)

    with pytest.raises(RuntimeError, match="'samples' must be means over samples"):
        fit(model, ragged_batch(), loss_units=units_of_terms('samples'))


def of_documents(model, outputs, batch):
    """A packed row has one row of labels, so it does not show which of its documents have some."""
    states = model.model.get_input_embeddings()(batch['input_ids'])
    mask = batch['attention_mask'][..., None]
    sums_of_states = (states * mask).sum(dim=1)
    mean_states = sums_of_states / mask.sum(dim=1)
    sizes = 100 * mean_states.square().sum(dim=1)
    sizes_of_labelled = sizes * is_labelled_row(batch)
    return sizes_of_labelled.mean()


def test_packed_rows_without_labels():
    """Only a later batch has such rows, and the term is a mean over rows in every other cut."""
    model = with_term(of_documents)
    loss_units = units_of_terms('samples')
    batch = ragged_batch()

    with pytest.raises(RuntimeError, match="'samples' must be means over samples"):
        fit(model, batch, packing=True, loss_units=loss_units)

    recorder = fit(model, batch, packing='auto', loss_units=loss_units)
    assert not packs_rows(recorder)


def of_summed_tokens(model, outputs, batch):
    """Divides the sum of all losses by the number of rows. A packed batch has one row."""
    total = next_token_loss(outputs['logits'], batch['labels'], reduction='sum')
    return total / len(batch['labels'])


@pytest.mark.parametrize('check_loss', [True, False])
def test_packed_rows_of_a_mean_over_rows(check_loss):
    """Also refused if the loss is not checked, because only packing makes it wrong."""
    model = with_term(of_summed_tokens)
    options = {
        'loss_units': units_of_terms('samples'),
        'loss_tokens': 'causal',
        'check_loss': check_loss,
    }
    batch = ragged_batch()

    with pytest.raises(RuntimeError, match="'samples' must be means over samples"):
        fit(model, batch, packing=True, **options)

    recorder = fit(model, batch, packing='auto', **options)
    assert not packs_rows(recorder)


def mean_where(has_term, values):
    """Returns the mean of the values that have the term, or 0 if none has it."""
    num_values = has_term.sum().clamp(min=1)
    return (values * has_term).sum() / num_values


def of_flagged_rows(batch, values):
    has_term = batch['flags'] > 0
    return mean_where(has_term, values.mean(dim=1))


def of_flagged_tokens(batch, values):
    has_term = (batch['flags'] > 0) & (batch['labels'] != -100)
    return mean_where(has_term[:, 1:], values[:, :-1])


def of_rows_of_other_tasks(batch, values):
    """Leaves out the rows of task 2."""
    has_term = batch['flags'] != 2
    return mean_where(has_term, values.mean(dim=1))


def of_flagged_answers(batch, values):
    """Each row has three answers."""
    has_term = batch['flags'] > 0
    values_of_rows = values.mean(dim=1, keepdim=True)
    return mean_where(has_term, values_of_rows.expand_as(has_term))


def of_rows_without_flag(batch, values):
    has_term = batch['flags'] == 0
    return mean_where(has_term, values.mean(dim=1))


def of_rows_in_column(batch, values):
    has_term = batch['flags'][:, 0] > 0
    return mean_where(has_term, values.mean(dim=1))


def with_flags(term_of, make_model=one_layer_model):
    """Returns a model with a term of the flags of a batch and of the mean square of the logits at each position."""

    def term_of_logits(model, outputs, batch):
        values = outputs['logits'].square().mean(dim=-1)
        return term_of(batch, values)

    return with_term(term_of_logits, make_model)


SAMPLES = r"'samples' must be means"
TOKENS = r"mean over its loss-generating tokens|row's losses"


@dataclass(frozen=True, kw_only=True)
class FlagCase:
    """A term that leaves something out, which only the flags of the second batch show."""

    term_of: Callable[[dict[str, Any], Tensor], Tensor]
    flags: Tensor  # of the first batch
    place: Any = 3  # of the flag that differs in the second batch
    later_flag: int
    unit: str = 'samples'
    message: str = SAMPLES


FLAG_CASES = {
    'flag of a row is 0': FlagCase(
        term_of=of_flagged_rows,
        flags=torch.ones(6, dtype=torch.long),
        later_flag=0,
    ),
    'flag of a row is -100': FlagCase(
        term_of=of_flagged_rows,
        flags=torch.ones(6, dtype=torch.long),
        later_flag=-100,
    ),
    'flag of a token is 0': FlagCase(
        term_of=of_flagged_tokens,
        flags=ragged_batch()['attention_mask'],
        place=(3, 13),
        later_flag=0,
        unit='tokens',
        message=TOKENS,
    ),
    'flag of an answer is False': FlagCase(
        term_of=of_flagged_answers,
        flags=torch.ones(6, 3, dtype=torch.bool),
        place=(3, 1),
        later_flag=False,
    ),
    'task that is left out': FlagCase(
        term_of=of_rows_of_other_tasks,
        flags=torch.tensor([0, 1, 3, 0, 1, 3]),
        later_flag=2,
    ),
    'flag says what is left out': FlagCase(
        term_of=of_rows_without_flag,
        flags=torch.zeros(6, dtype=torch.bool),
        later_flag=True,
    ),
    'flags in a column': FlagCase(
        term_of=of_rows_in_column,
        flags=torch.ones(6, 1, dtype=torch.bool),
        later_flag=False,
    ),
}


@pytest.mark.parametrize('name', FLAG_CASES)
def test_flag_that_a_later_batch_lacks(name):
    """Only the second batch has something that the term leaves out, and each microbatch has one row."""
    case = FLAG_CASES[name]
    later_flags = case.flags.clone()
    later_flags[case.place] = case.later_flag
    first = {**ragged_batch(), 'flags': case.flags}
    later = {**ragged_batch(), 'flags': later_flags}

    assert_second_step_is_refused(
        with_flags(case.term_of),
        first,
        later,
        match=case.message,
        loss_units=units_of_terms(case.unit),
        microbatch_size=1,
    )


def test_flag_in_batch_that_is_not_trimmed():
    """GPT-2 keeps padding on the left. The check looks at the flagged row, although it looks at padded rows first."""
    model = with_flags(of_flagged_rows, make_model=gpt2)
    row_sizes = [(4, 2), (14, 8), (6, 3), (7, 4), (8, 4), (9, 5), (10, 5), (11, 5)]
    batch = ragged_batch(row_sizes, side='left')
    batch['flags'] = torch.ones(len(row_sizes), dtype=torch.long)
    batch['flags'][3] = 0

    with pytest.raises(RuntimeError, match="'samples' must be means"):
        fit(model, batch, loss_units=units_of_terms('samples'), microbatch_size=1)


def centre_rows(module, args, output):
    """Subtracts the mean of the rows. One row and its copy do not show that."""
    return output - 0.5 * output.mean(dim=0, keepdim=True)


def test_first_batch_has_one_row():
    model = one_layer_model()
    model.model.embed_tokens.register_forward_hook(centre_rows)
    first = ragged_batch([(9, 4)])
    later = ragged_batch([(9, 4), (9, 2)])

    assert_second_step_is_refused(model, first, later, match='rows beside it', microbatch_size=1)


class CoupledDocuments(LlamaForCausalLM):
    """Its loss depends on which documents are together, but not on whether they are padded or packed."""

    factor_of = None
    """Returns a factor on the logits from the lengths of the documents. None: the loss has a term instead."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, position_ids=None, **kwargs):
        outputs = self.model(input_ids, attention_mask, position_ids=position_ids)
        states = outputs.last_hidden_state
        logits = self.lm_head(states)
        # The mask of packed rows has a row for each document, so these are the lengths of the documents.
        lengths = attention_mask.sum(dim=1)
        if self.factor_of is not None:
            logits = logits * self.factor_of(lengths)
        loss = next_token_loss(logits, labels)
        if self.factor_of is None:
            is_packed = len(attention_mask) > len(input_ids)
            is_real = attention_mask.any(dim=0) if is_packed else attention_mask
            sizes = states.square().mean(dim=-1)
            mean_size = (sizes * is_real).sum() / lengths.sum()
            loss = loss + 0.1 * mean_size
        return CausalLMOutput(loss=loss, logits=logits)


def by_longest(lengths):
    return 1 + 0.01 * lengths.max()


def by_median(lengths):
    return 1 + 0.01 * lengths.median()


def by_whether_alone(lengths):
    return 1.1 if len(lengths) == 1 else 1.0


SHORT_AND_LONG = [(5, 2), (5, 3), (14, 11), (14, 4), (5, 1), (5, 4)]
LONGEST_HAS_NO_LABEL = [(6, 2), (6, 3), (9, 0), (6, 1), (6, 4)]
"""A truncated row often has lost its answer. The loss of the other rows may depend on its length."""


@pytest.mark.parametrize(
    ('factor_of', 'row_sizes'),
    [
        pytest.param(by_longest, SHORT_AND_LONG, id='longest document'),
        pytest.param(by_longest, LONGEST_HAS_NO_LABEL, id='longest document has no label'),
        pytest.param(by_median, SHORT_AND_LONG, id='median length'),
        pytest.param(by_whether_alone, SHORT_AND_LONG, id='only document'),
        pytest.param(None, SHORT_AND_LONG, id='mean over all tokens'),
    ],
)
@pytest.mark.parametrize('packing', [False, True])
def test_loss_depends_on_the_other_documents(packing, factor_of, row_sizes):
    model = CoupledDocuments(one_layer_model().config)
    model.factor_of = factor_of
    batch = ragged_batch(row_sizes)

    message = 'mean over its loss-generating tokens|rows beside it|packed documents apart'
    with pytest.raises(RuntimeError, match=message):
        fit(model, batch, packing=packing)


class CoupledEnds(LlamaForCausalLM):
    """The logits of a packed row depend on which is longer, its first or its last document."""

    def __init__(self, config, is_changed):
        super().__init__(config)
        self.is_changed = is_changed

    def forward(self, input_ids=None, attention_mask=None, labels=None, position_ids=None, **kwargs):
        outputs = super().forward(input_ids, attention_mask, position_ids=position_ids)
        logits = outputs.logits
        is_packed = len(attention_mask) > len(input_ids)
        if is_packed:
            lengths = attention_mask.sum(dim=1)
            if self.is_changed(lengths[0], lengths[-1]):
                logits = 1.1 * logits
        loss = next_token_loss(logits, labels)
        return CausalLMOutput(loss=loss, logits=logits)


@pytest.mark.parametrize(
    'is_changed',
    [
        pytest.param(operator.lt, id='last is longer'),
        pytest.param(operator.gt, id='first is longer'),
    ],
)
def test_first_and_last_document(is_changed):
    """The longest row of the check is its first one. With the number of copies here it would also be the last one."""
    model = CoupledEnds(one_layer_model().config, is_changed)
    batch = ragged_batch([(14, 11), (5, 2), (9, 7), (8, 4), (10, 6), (7, 3), (11, 2), (6, 5)])

    with pytest.raises(RuntimeError, match='mean over its loss-generating tokens'):
        fit(model, batch, packing=True, microbatch_size=8)


def lengths_of_packed_rows(batch, microbatch_size):
    """Returns the lengths of the documents of each packed row of the first-batch check."""
    model = one_layer_model()
    packed_rows = []

    def note(module, args, kwargs):
        mask = kwargs['attention_mask']
        is_packed = mask.shape != kwargs['input_ids'].shape  # (documents, tokens)
        if is_packed and not torch.is_grad_enabled():
            packed_rows.append(mask.sum(dim=1).tolist())

    with model.register_forward_pre_hook(note, with_kwargs=True):
        fit(model, batch, packing=True, microbatch_size=microbatch_size)
    return packed_rows


@pytest.mark.parametrize('microbatch_size', [1, 2, 3, 6])
def test_order_of_packed_rows(microbatch_size):
    """Each row comes before and after each other one. If one is right before another, it is also right after it."""
    lengths = [9, 7, 6, 3]
    batch = ragged_batch([(length, 2) for length in lengths])
    all_orders = set(permutations(lengths, 2))

    packed_rows = lengths_of_packed_rows(batch, microbatch_size)

    neighbours = set()
    earlier_and_later = set()
    for rows in packed_rows:
        neighbours.update(pairwise(rows))
        earlier_and_later.update(combinations(rows, 2))
    swapped_neighbours = {(later, earlier) for earlier, later in neighbours}
    assert earlier_and_later >= all_orders
    assert swapped_neighbours == neighbours


def test_label_whose_logit_is_masked():
    """Its loss is infinite. The label is not among those by which the loss rule is found."""
    masked_id = torch.tensor([6])

    def mask_logit(module, args, logits):
        return logits.index_fill(-1, masked_id, -torch.inf)

    model = one_layer_model()
    model.lm_head.register_forward_hook(mask_logit)
    batch = ragged_batch()
    assert masked_id in batch['labels']

    with pytest.raises(RuntimeError, match='must be a number, got: inf'):
        fit(model, batch)


def leaking_model():
    """Returns a fresh GPT-2, whose biases are 0. Its rows see each other in the attention of one layer."""
    model = gpt2()

    def subtract_mean_of_rows(module, args, output):
        states, *other_outputs = output
        mean_of_rows = states.mean(dim=0, keepdim=True)
        return (states - 0.3 * mean_of_rows, *other_outputs)

    model.transformer.h[1].attn.register_forward_hook(subtract_mean_of_rows)
    return model


def test_leak_beside_varied_biases():
    """The probe varies biases that are all 0. The leak is small compared with them, but not without them."""
    with pytest.raises(RuntimeError, match='rows beside it'):
        fit(leaking_model(), ragged_batch())


def mean_of_rows(logits, labels):
    """Returns the mean over rows of each row's mean over its tokens."""
    losses = []
    for row in range(len(labels)):
        loss = next_token_loss(logits[[row]], labels[[row]])
        losses.append(loss)
    return torch.stack(losses).mean()


def test_mean_of_rows_with_equally_many_labels():
    """In this batch it equals the mean over tokens, and no row can get more labels."""
    batch = ragged_batch([(9, 8)] * 4)
    with pytest.raises(RuntimeError, match='must be the mean over its loss-generating tokens'):
        fit(NativeModel(mean_of_rows, init='fresh'), batch)


class CouplesSecondForward(NativeModel):
    """Its loss runs the model twice. In the second forward the rows hardly see each other."""

    def forward(self, batch):
        outputs = super().forward(batch)
        states = self.states_of(batch)
        coupled_states = states + 1e-3 * states.mean(dim=0)
        coupled_logits = self.model.lm_head(coupled_states)
        second_loss = self.loss_of(coupled_logits, batch['labels'])
        return {**outputs, 'loss': outputs['loss'] + second_loss}


def test_leak_in_the_second_forward():
    model = CouplesSecondForward(next_token_loss, init='fresh')

    with pytest.raises(RuntimeError, match='rows beside it'):
        fit(model, ragged_batch())
