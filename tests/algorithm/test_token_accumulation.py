# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from composer.algorithms import SAM, GradientClipping
from composer.callbacks import NaNMonitor
from composer.core import Algorithm, DataSpec, Event
from transformers.modeling_outputs import CausalLMOutput

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc.checks.step import MicrobatchRecord
from composer_tokacc.collectives import RankSum
from tests.support.half_precision import SCALE, EnabledScaler, set_precision
from tests.support.text import collate, text_model, text_rows
from tests.support.training import (
    TOLERANCE,
    assert_exact,
    fit,
    hugging_face,
    loader,
    reference_gradients,
    relative_error,
)
from tests.support.weights import column, weighted_reference

RAGGED = [(4, 2), (5, 3), (9, 7), (14, 11), (6, 1), (3, 2)]


@pytest.fixture
def model():
    return text_model()


@pytest.fixture
def batch():
    return collate(text_rows(RAGGED))


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize(
    ('split', 'microbatch_size'),
    [('stock', 2), ('stock', 6), ('ordered', 1), ('ordered', 3), ('regrouped', 1), ('regrouped', 3)],
)
def test_gradient_is_that_of_one_forward_over_the_batch(model, side, microbatch_size, split):
    batch = collate(text_rows(RAGGED), side=side)
    data = loader(batch) if split == 'stock' else token_data_spec(loader(batch), regroup=split == 'regrouped')
    assert_exact(model, data, batch=batch, microbatch_size=microbatch_size)


def test_stock_composer_is_wrong_here_so_the_test_can_fail(model):
    batch = collate(text_rows(RAGGED[:4]))
    expected, _ = reference_gradients(model, batch)
    recorder = fit(model, loader(batch), algorithms=[], microbatch_size=1)
    assert relative_error(recorder.gradients, expected) > 0.1
    recorder = fit(model, loader(batch), algorithms=[], microbatch_size=1, **FLAG)
    assert relative_error(recorder.gradients, expected) > 0.1  # its default counter counts padding


FLAG = {'accumulate_train_batch_on_tokens': True}


@pytest.mark.parametrize(
    ('is_ours', 'options'),
    [(True, {'algorithms': [], **FLAG}), (False, {'algorithms': [TokenAccumulation()], **FLAG}), (True, {})],
    ids=['our counters', 'its default counter', 'our counters without the flag'],
)
def test_native_flag_is_exact(model, batch, is_ours, options):
    """Its default counter is the sample weight in disguise.

    Rows times one common width is proportional to the rows: nothing is wrong on one rank, so nothing is refused.
    """
    data = token_data_spec(loader(batch), model=model) if is_ours else loader(batch)
    assert_exact(model, data, batch=batch, **options)


@pytest.mark.parametrize('rule', ['auto', 'causal', 'unshifted'])
def test_native_flag_without_a_model_to_count_by_is_refused(model, batch, rule):
    data = token_data_spec(loader(batch), loss_tokens=rule)
    with pytest.raises(RuntimeError, match=r'Pass `model=`'):
        fit(model, data, algorithms=[], **FLAG)


def test_native_flag_with_a_rule_that_is_not_the_models_is_refused(model, batch):
    data = token_data_spec(loader(batch), model=model, loss_tokens='unshifted')
    with pytest.raises(RuntimeError, match=r"Set `loss_tokens='causal'`"):
        fit(model, data, algorithms=[], **FLAG)


def test_native_flag_together_with_the_algorithm_is_refused_before_any_step(model, batch):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match='accumulate_train_batch_on_tokens'):
        fit(model, batch, **FLAG, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_custom_sample_counter_is_refused(model, batch):
    spec = DataSpec(loader(batch), get_num_samples_in_batch=lambda batch: int(batch['attention_mask'].sum()))
    with pytest.raises(RuntimeError, match='get_num_samples_in_batch'):
        fit(model, spec)


def test_microbatch_transforms_that_mask_labels_are_noticed(model, batch):
    def mask(batch):
        batch['labels'][:, -2:] = -100
        return batch

    with pytest.raises(RuntimeError, match='microbatch_transforms'):
        fit(model, token_data_spec(loader(batch), microbatch_transforms=mask))


def test_batch_transforms_that_mask_labels_are_counted(model):
    def mask(batch):
        labels = batch['labels'].clone()
        labels[:, -1:] = -100
        return {**batch, 'labels': labels}

    batch = collate(text_rows(RAGGED), side='left')
    assert_exact(model, batch, batch_transforms=mask, batch=mask(batch))


def test_split_that_drops_rows_is_noticed(model, batch):
    def drop(batch, size):
        return [{key: value[:size] for key, value in batch.items()}]

    with pytest.raises(RuntimeError, match='drops or repeats rows'):
        fit(model, DataSpec(loader(batch), split_batch=drop))


class At(Algorithm):
    """Calls a function with the state at an event."""

    def __init__(self, event, function):
        self.event, self.function = event, function

    def match(self, event, state):
        return event == self.event

    def apply(self, event, state, logger):
        self.function(state)


def test_later_algorithm_that_rescales_the_loss_is_refused(model, batch):
    def halve(state):
        state.loss = state.loss * 0.5

    with pytest.raises(RuntimeError, match='put TokenAccumulation last'):
        fit(model, loader(batch), algorithms=[TokenAccumulation(), At(Event.BEFORE_BACKWARD, halve)])


# Empty microbatches and steps.


@pytest.mark.parametrize('split', ['stock', 'regrouped'])
def test_rows_without_loss_tokens_are_exact_and_logged_finite(model, split):
    batch = collate(text_rows([(4, 2), (9, 0), (14, 11), (6, 0), (3, 1)]))
    data = loader(batch) if split == 'stock' else token_data_spec(loader(batch))
    recorder = assert_exact(model, data, batch=batch, callbacks=[NaNMonitor()], microbatch_size=1)
    assert recorder.logged('token_accumulation/empty_microbatches') == [2]


class MaskedSum(torch.nn.Module):
    """The other usual loss: sum over the mask, NaN gradients over no tokens."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, attention_mask, labels, use_cache=False):
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        mask = (labels[:, 1:] != -100).float()
        targets = labels[:, 1:].clamp(min=0)
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction='none')
        return CausalLMOutput(loss=(losses * mask).sum() / mask.sum(), logits=logits)


def test_masked_sum_loss_without_loss_tokens_has_finite_gradients(model):
    batch = collate(text_rows([(4, 2), (9, 0), (14, 11)]))
    assert_exact(MaskedSum(model), loader(batch), batch=batch, callbacks=[NaNMonitor()], microbatch_size=1)


def test_step_without_loss_tokens_moves_nothing(model, batch):
    empty = collate(text_rows([(5, 0), (7, 0)]))
    snapshots = []

    def keep(state):
        moments = copy.deepcopy(state.optimizers[0].state_dict()['state'])
        snapshots.append((copy.deepcopy(state.model.state_dict()), moments))

    options = {'optimizer': torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), 'max_duration': '2ba'}
    algorithms = [TokenAccumulation(), At(Event.BATCH_END, keep)]
    recorder = fit(model, loader(batch, empty), algorithms=algorithms, callbacks=[NaNMonitor()], **options)
    (before, moments_before), (after, moments_after) = snapshots
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(moments_before) == len(list(model.parameters()))
    for index, moment in moments_before.items():
        assert all(torch.equal(value, moments_after[index][name]) for name, value in moment.items())
    assert recorder.logged('token_accumulation/empty_steps') == [0, 1]
    assert recorder.logged('loss/train/total')[1] == 0.0


# What else runs in a trainer.


@pytest.mark.parametrize('token_weights', ['token', 'column'])
@pytest.mark.parametrize('data', ['stock', 'token_data_spec'])
def test_retry_after_out_of_memory_gives_the_same_gradient(model, batch, data, token_weights):
    """Raises once, as the GPU would, in the second microbatch of the first attempt."""
    batch['loss_weights'] = column(batch)
    expected, _, _ = weighted_reference(model, batch, token_weights)
    attempts = []

    def run_out_of_memory(state):
        state.auto_microbatching = True
        attempts.append(state.device_train_microbatch_size)
        if len(attempts) == 2:
            raise RuntimeError('CUDA out of memory')

    given = loader(batch) if data == 'stock' else token_data_spec(loader(batch))
    algorithms = [At(Event.BEFORE_LOSS, run_out_of_memory), TokenAccumulation(token_weights=token_weights)]
    recorder = fit(model, given, algorithms=algorithms, microbatch_size=4)
    assert relative_error(recorder.gradients, expected) < TOLERANCE
    assert recorder.trainer.state.device_train_microbatch_size == 2


def test_gradient_clipping_behind_the_algorithm(model, batch):
    """``test_composers_algorithms.py`` has it before."""
    expected, _ = reference_gradients(model, batch)
    clipping = GradientClipping(clipping_type='norm', clipping_threshold=0.1)
    recorder = fit(model, loader(batch), algorithms=[TokenAccumulation(), clipping])
    norm = torch.stack([value.norm() for value in expected.values()]).norm()
    clipped = {name: value * min(0.1 / norm.item(), 1.0) for name, value in expected.items()}
    assert relative_error(recorder.gradients, clipped) < 1e-5


def after_training(model, batch, optimizer, algorithms=()):
    """The model after one step, of the whole batch at once and of rows one by one."""
    finals = []
    for microbatch_size in (6, 1):
        copied = copy.deepcopy(model)
        options = {'microbatch_size': microbatch_size, 'optimizer': optimizer(copied.parameters(), lr=0.1)}
        fit(copied, loader(batch), algorithms=[*algorithms, TokenAccumulation()], **options)
        finals.append(copied.state_dict())
    return finals


def test_sam_takes_the_step_of_the_whole_batch(model, batch):
    finals = after_training(model, batch, torch.optim.SGD, [SAM()])
    whole, one_by_one = ({n: final[n] - v for n, v in model.state_dict().items()} for final in finals)
    assert relative_error(one_by_one, whole) < 1e-5


def test_lbfgs_closures(model, batch):
    finals = after_training(model, batch, partial(torch.optim.LBFGS, max_iter=2))
    whole, one_by_one = ({n: final[n] - v for n, v in model.state_dict().items()} for final in finals)
    assert relative_error(one_by_one, whole) < 1e-5


@pytest.mark.parametrize('precision', ['fp32', 'amp_fp16'])
def test_grad_scaler_scale_is_not_taken_for_a_wrong_weight(precision, model, batch, monkeypatch):
    """On a GPU the scaler is always enabled, but Composer uses it only in AMP_FP16."""
    callbacks = set_precision(precision, monkeypatch)
    monkeypatch.setattr('composer.trainer.trainer.get_precision_context', lambda *_: nullcontext())
    scaled_losses = []

    def scale(scaler, loss):
        scaled_losses.append(loss)
        return torch.amp.GradScaler.scale(scaler, loss)

    monkeypatch.setattr(EnabledScaler, 'scale', scale)
    recorder = assert_exact(model, loader(batch), batch=batch, callbacks=callbacks)
    assert recorder.trainer.state.scaler.get_scale() == SCALE
    assert bool(scaled_losses) == (precision == 'amp_fp16')


def test_second_fit_and_checkpoint(model, batch, tmp_path):
    expected, _ = reference_gradients(model, batch)
    recorder = fit(model, loader(batch), save_folder=str(tmp_path), save_interval='1ba')
    recorder.trainer.fit(duration='1ba')
    assert len(recorder.steps) == 2
    assert relative_error(recorder.gradients, expected) < TOLERANCE
    load_path = str(tmp_path / 'latest-rank0.pt')
    recorder = fit(text_model(), loader(batch), microbatch_size=1, max_duration='3ba', load_path=load_path)
    assert relative_error(recorder.gradients, expected) < TOLERANCE


def test_raw_loss_is_restored_for_callbacks(model, batch):
    _, loss = reference_gradients(model, {key: value[-1:] for key, value in batch.items()})
    recorder = fit(model, loader(batch), microbatch_size=1)
    assert recorder.losses[0].item() == pytest.approx(loss, rel=TOLERANCE)


SYNCS = ('item', 'tolist', 'cpu', 'numpy', 'nonzero', '__bool__', '__int__', '__float__')


@pytest.mark.parametrize('units', [None, {'lm': 'tokens'}])
def test_no_host_sync_a_microbatch(model, monkeypatch, units):
    """Everything that would wait for a GPU raises while the algorithm handles a microbatch, its hook included."""
    microbatch_events = (Event.BEFORE_TRAIN_BATCH, Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD)
    seen = []

    def forbid(function, label):
        def guarded(*args, **kwargs):
            with pytest.MonkeyPatch.context() as patch:
                for name in SYNCS:

                    def refuse(tensor, *args, name=name, **kwargs):
                        raise AssertionError(f'Tensor.{name} waits for the device')

                    patch.setattr(torch.Tensor, name, refuse)
                seen.append(label)
                return function(*args, **kwargs)

        return guarded

    algorithm = TokenAccumulation(loss_units=units)
    for event in microbatch_events:
        algorithm._actions[event] = forbid(algorithm._actions[event], event.value)
    for name in ('observe', '_measure'):
        monkeypatch.setattr(MicrobatchRecord, name, forbid(getattr(MicrobatchRecord, name), name))
    batch = collate(text_rows([*RAGGED, (5, 0)]))
    given = hugging_face(model)
    if units:
        monkeypatch.setattr(given, 'loss', lambda outputs, batch: {'lm': outputs['loss']})
    fit(given, loader(batch), algorithms=[algorithm], microbatch_size=1)
    assert (seen.count('observe'), seen.count('_measure')) == (7, 6)
    assert all(event.value in seen for event in microbatch_events)


def test_single_rank_waits_for_no_sum(model, batch, monkeypatch):
    """A sum over one rank would only make the host wait for the device."""
    monkeypatch.setattr(RankSum, 'read', lambda self: pytest.fail('waits for the device'))
    assert_exact(model, loader(batch), batch=batch)


# Rules.


def test_labels_on_pads_count_where_the_model_counts_them(model):
    # Llama's mean runs over the labels alone: a collator that does not mask pads trains on them.
    batch = collate(text_rows(RAGGED), labels_on_pads=5)
    for data in (loader(batch), token_data_spec(loader(batch))):
        algorithm = TokenAccumulation()
        assert_exact(model, data, batch=batch, algorithms=[algorithm])
        assert algorithm.rule == 'causal'


def test_probe_leaves_random_state_and_mode_alone(model, batch):
    states = []
    for algorithms in ([], [TokenAccumulation(loss_tokens='causal', check_loss=False)], [TokenAccumulation()]):
        torch.manual_seed(7)
        recorder = fit(copy.deepcopy(model), loader(batch), algorithms=algorithms, microbatch_size=6, seed=7)
        states.append(torch.get_rng_state())
        assert recorder.trainer.state.model.training
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'logits': 'some'}, 'logits'),
        ({'loss_tokens': 'all'}, 'loss_tokens'),
        ({'loss_units': {'lm': 'token'}}, "must be .*got: 'token'"),
        ({'loss_units': {'total': 'tokens'}}, 'reserves'),
        ({'loss_units': 'tokens'}, "must be a mapping from .* such as .*got: 'tokens'"),
        ({'token_weights': ['sqrt']}, r"must be .*got: \['sqrt'\]"),
        ({'check_loss': 'no'}, "must be True or False, got: 'no'"),
        ({'check_loss': False}, 'explicit rule'),
        ({'loss_units': {'lm': 'samples'}, 'token_weights': 'sample'}, "`token_weights` must be 'token'"),
        ({'router_balance': 'batch'}, "router_balance.*'microbatch' or 'step'"),
        ({'router_balance': 'step', 'loss_units': {'lm': 'tokens', 'router': 'microbatches'}}, 'loss_units'),
    ],
)
def test_bad_arguments_get_one_clear_line(kwargs, message):
    with pytest.raises(ValueError, match=message):
        TokenAccumulation(**kwargs)
