# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Faults that only a later step shows: the model's own loss is no longer the mean over its loss tokens."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from composer.core import Algorithm, Callback, Event
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from composer_tokacc import TokenAccumulation
from composer_tokacc.checks import step
from composer_tokacc.checks.step import MicrobatchRecord
from composer_tokacc.row_counts import RowCounts
from tests.support.text import collate, next_token_loss, text_model, text_rows
from tests.support.training import fit, hugging_face, loader, reference_gradients, relative_error

EVEN = [(9, 4), (12, 4), (7, 4), (9, 4)]
UNEVEN = [(4, 2), (14, 11), (9, 7), (5, 1)]
NEW = 63
"""A label that the rows of the other steps do not have."""
NEW_IN_CHOSEN = 62
"""The same, in a microbatch that is measured anyway."""


def with_loss(function):
    """A Llama whose loss is ``function(logits, labels)``. Its logits are in the outputs."""
    model = hugging_face(text_model())
    forward = model.model.forward

    def with_other_loss(input_ids=None, attention_mask=None, position_ids=None, labels=None):
        outputs = forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        outputs['loss'] = function(outputs.logits, labels)
        return outputs

    model.model.forward = with_other_loss
    return model


def mean_of_rows(logits, labels):
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction='none')
    counted = (labels[:, 1:] != -100).sum(dim=1)
    return (losses.sum(dim=1) / counted.clamp(min=1)).mean()


def without_padding_id(logits, labels):
    labels = labels.masked_fill(labels == 0, -100)
    return next_token_loss(logits, labels)


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
@pytest.mark.parametrize(('loss', 'labels_on_pads'), [(mean_of_rows, -100), (without_padding_id, 0)])
def test_loss_that_changes_later_is_refused(loss, labels_on_pads, microbatch_size):
    model = with_loss(loss)
    before = copy.deepcopy(model.state_dict())
    first = collate(text_rows(EVEN))
    if loss is without_padding_id:
        first = collate(text_rows([(9, 4)] * 4))
    later = collate(text_rows(UNEVEN), labels_on_pads=labels_on_pads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(RuntimeError, match=r'must (stay|be) the mean over its loss-generating tokens'):
        fit(model, first, later, later, microbatch_size=microbatch_size, optimizer=optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_labels_changed_around_the_forward():
    batch = collate(text_rows(UNEVEN))
    for algorithms in ([MaskAroundForward(), TokenAccumulation()], [TokenAccumulation(), MaskAroundForward()]):
        with pytest.raises(RuntimeError, match='an algorithm changes labels around the forward'):
            fit(text_model(), loader(batch), algorithms=algorithms)


def test_healthy_steps_are_not_refused():
    batches = [collate(text_rows(UNEVEN)), collate(text_rows(EVEN), side='left')] * 10
    model = text_model()
    recorder = fit(model, *batches, max_duration='20ba')
    for batch, gradients in zip(batches, recorder.steps, strict=True):
        assert relative_error(gradients, reference_gradients(model, batch)[0]) < 1e-6


@pytest.mark.parametrize(('token_weights', 'later'), [('token', 1), ('sqrt', 2)])
def test_microbatches_with_new_labels_are_measured(monkeypatch, token_weights, later):
    batches = [collate(text_rows(UNEVEN)) for _ in range(14)]
    batches[8]['labels'][1, -2] = NEW_IN_CHOSEN  # in the first microbatch, which is measured in even steps
    batches[11]['labels'][1, -2] = NEW
    measured = []
    watch = MicrobatchRecord.watch

    def counted(self, *args, **options):
        measured.append(self)
        watch(self, *args, **options)

    monkeypatch.setattr(MicrobatchRecord, 'watch', counted)

    class Steps(Callback):
        def batch_end(self, state, logger):
            steps.append(len(measured))
            measured.clear()

    steps: list[int] = []
    fit(text_model(), *batches, regroup=False, token_weights=token_weights, callbacks=[Steps()], max_duration='14ba')
    assert steps == [2] + [later] * 10 + [2, later, later]


KEPT_GROUPS = []
"""Process groups that are kept until the process ends. The destructor of gloo may wait without end for a thread that
needs the lock of the interpreter."""


@pytest.mark.parametrize('is_whole', [True, False])
def test_tokens_of_a_sharded_vocabulary(is_whole, monkeypatch, tmp_path):
    monkeypatch.setattr(step, 'NUM_SAMPLED', 100)  # all tokens, in the same order
    needs_group = not dist.is_initialized()
    if needs_group:
        dist.init_process_group('gloo', init_method=f'file://{tmp_path}/ranks', rank=0, world_size=1)
    plain = [torch.randn(3, 5, 8), torch.randn(3, 5, 8)]
    sharded = [distribute_tensor(tensor, init_device_mesh('cpu', (1,)), [Shard(2)]) for tensor in plain]
    deviations = []
    for logits, gradient in (plain, sharded):
        rows = [RowCounts(rule='causal', loss_tokens=4)] * 3
        record = MicrobatchRecord(batch={'labels': torch.arange(15).view(3, 5) % 8}, rows=rows)
        record._measure(gradient, batch=record.batch, logits=logits, weights=None, unit=0.1, is_whole=is_whole)
        deviations.append(record.deviations)
    if needs_group:
        KEPT_GROUPS.append(dist.group.WORLD)
        dist.destroy_process_group()
    torch.testing.assert_close(*deviations)
