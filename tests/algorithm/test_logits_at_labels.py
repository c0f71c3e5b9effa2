# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Logits only at labels, compared with one plain float64 forward that computes all logits."""

from __future__ import annotations

import copy
import logging
import weakref
from functools import partial

import pytest
import torch
import transformers
from composer.core import Event
from composer.metrics import LanguageCrossEntropy
from composer.models import ComposerClassifier
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from composer_tokacc import BatchLayout, LogitsAtLabels, TokenMonitor, weighted_microbatches
from composer_tokacc.algorithm import logits_at_labels
from composer_tokacc.compat import TorchDispatchMode
from composer_tokacc.counting import LossRule
from composer_tokacc.labelled import LabelledPositions, LabelSelector, batch_at_logits
from tests.support.families import FAMILIES
from tests.support.masked_text import masked_batch, masked_model
from tests.support.mixtures import mixture_of_experts
from tests.support.process_group import group_of_one_rank
from tests.support.text import (
    collate,
    named_batch,
    next_token_loss,
    one_layer_model,
    ragged_batch,
    single_rows,
    text_rows,
)
from tests.support.training import (
    TOLERANCE,
    On,
    assert_exact,
    composer_gradients,
    fit,
    gradients_of,
    hugging_face,
    num_hooks,
    reference_gradients,
    relative_error,
)
from tests.support.weights import column, weighted_reference

SMALL = {'vocab_size': 64, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2}
FEW_LABELS = [(14, 2), (5, 3), (19, 7), (24, 4), (16, 1), (13, 2)]
"""Length and number of labels of each row, as in vision-language data: few positions have a label."""
LENGTHS = [length for length, _ in FEW_LABELS]
NUM_LABELS = sum(num_labels for _, num_labels in FEW_LABELS)
NO_LOGITS_AT_LABELS = 'Logits are computed at all positions'
"""Beginning of the message that is logged if logits are not computed only at labels."""


def make(name, **config):
    """Returns a small model of a class of transformers."""
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**SMALL, **config))


HEADS = {'num_attention_heads': 4, 'num_key_value_heads': 4, 'head_dim': 8}
# Scales its embeddings, ties them to the head, and caps its logits.
gemma2 = partial(make, 'Gemma2ForCausalLM', **HEADS, final_logit_softcapping=5.0)
modern_bert = partial(masked_model, 'modernbert')
t5 = partial(
    make,
    'T5ForConditionalGeneration',
    d_ff=48,
    num_heads=4,
    d_kv=8,
    decoder_start_token_id=0,
    dropout_rate=0,
)


def resized():
    """Returns a model with embeddings for new tokens, such as control tokens of a tokenizer."""
    model = one_layer_model()
    model.resize_token_embeddings(71)
    return model


def with_lora():
    """Returns a model with adapters in its attention and in its head."""
    peft = pytest.importorskip('peft')
    config = peft.LoraConfig(r=2, target_modules=['q_proj', 'lm_head'], init_lora_weights=False)
    return peft.get_peft_model(one_layer_model(), config)


def checkpointed():
    """Returns a model that computes its layers again in the backward."""
    model = one_layer_model()
    model.gradient_checkpointing_enable({'use_reentrant': False})
    return model


class CheckpointedHead(transformers.LlamaForCausalLM):
    """Computes its output embedding again in the backward, to save the memory of its logits."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None):
        hidden_states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = checkpoint(self.lm_head, hidden_states, use_reentrant=False)
        loss = next_token_loss(logits, labels)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


def checkpointed_head():
    torch.manual_seed(0)
    return CheckpointedHead(one_layer_model().config)


CAUSAL = {
    'llama': one_layer_model,
    'tied': partial(one_layer_model, tie_word_embeddings=True),
    'soft cap': gemma2,
    'resized': resized,
    'checkpointed': checkpointed,
    'checkpointed head': checkpointed_head,
}


@pytest.fixture
def shapes():
    """Records rows and width of the logits of each microbatch."""

    def rows_and_width(state):
        logits = state.outputs['logits']
        return tuple(logits.shape[:2])

    return On(Event.BEFORE_BACKWARD, rows_and_width)


def assert_logits_of_all_positions(shapes):
    """Checks that the logits have as many rows as the batch. Logits at labels have one row per microbatch."""
    num_rows = sum(rows for rows, _ in shapes.values)
    assert num_rows == len(FEW_LABELS)


def batch_of(side='right', shape=FEW_LABELS):
    """Returns named rows of these (length, number of labels)."""
    return named_batch(shape, side=side)


def inputs_of(shape=FEW_LABELS, side='right'):
    """Returns the rows of :func:`batch_of` as inputs of a model, without their names."""
    return ragged_batch(shape, side=side)


def forward_gradients(model, batch):
    """Returns the gradients of one forward of a model over its inputs."""
    outputs = model(**batch)
    return gradients_of(model, outputs.loss)


@pytest.mark.parametrize(
    ('name', 'side', 'microbatch_size'),
    [
        ('llama', 'right', 1),
        ('llama', 'right', 6),
        ('llama', 'left', 3),
        ('tied', 'right', 3),
        ('soft cap', 'right', 3),  # its eager attention in float64 is NaN with left padding
        ('resized', 'left', 1),
        ('checkpointed', 'left', 3),
        ('checkpointed head', 'right', 3),
    ],
)
def test_gradient_of_causal_models(name, side, microbatch_size, shapes):
    make_model = CAUSAL[name]
    model = make_model()
    batch = batch_of(side)

    assert_exact(model, batch, logits='labels', microbatch_size=microbatch_size, callbacks=[shapes])

    # The logits of a microbatch are one row: its labels, and one more position, which the model shifts away.
    num_logits = 0
    for rows, width in shapes.values:
        assert rows == 1
        num_logits += width - 1
    assert num_logits == NUM_LABELS


def test_gradient_with_packing():
    assert_exact(one_layer_model(), batch_of(), logits='labels', packing=True)


@pytest.mark.parametrize('microbatch_size', [1, 3])
def test_gradient_of_an_adapted_head(microbatch_size):
    model = with_lora()
    batch = batch_of()
    reference = copy.deepcopy(model).double()
    expected = forward_gradients(reference, inputs_of())

    composer_model = hugging_face(model)
    recorder = fit(composer_model, batch, logits='labels', microbatch_size=microbatch_size)

    assert relative_error(recorder.gradients, expected) < TOLERANCE


@pytest.mark.parametrize(
    ('make_model', 'microbatch_size'),
    [
        (modern_bert, 1),
        (modern_bert, 6),
        (t5, 2),
    ],
)
def test_gradient_of_unshifted_labels(make_model, microbatch_size, shapes):
    model = make_model()
    model.eval()  # without dropout
    batch = masked_batch(LENGTHS)
    num_labels = (batch['labels'] != -100).sum()

    assert_exact(model, batch, logits='labels', microbatch_size=microbatch_size, callbacks=[shapes])

    num_logits = sum(width for _, width in shapes.values)
    assert num_logits == num_labels


def test_gradient_is_that_of_sparse_prediction():
    """ModernBERT can compute logits only at labels by itself. That is an independent reference."""
    batch = masked_batch(LENGTHS)
    reference = modern_bert()
    reference.sparse_prediction = True
    expected = forward_gradients(reference, batch)

    model = modern_bert()
    with LogitsAtLabels(model):
        gradients = forward_gradients(model, batch)

    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-8, msg=name)


@pytest.mark.parametrize('router_balance', ['microbatch', 'step'])
def test_mixture_of_experts(router_balance):
    """The router's loss comes from all positions, also if logits are computed only at labels."""
    batch = batch_of()
    options = {'router_balance': router_balance, 'microbatch_size': 2}

    at_labels = fit(mixture_of_experts(), batch, logits='labels', **options)
    at_all = fit(mixture_of_experts(), batch, logits='all', **options)

    assert relative_error(at_labels.gradients, at_all.gradients) < TOLERANCE
    if router_balance == 'step':
        # Only then the router's loss is the same as in one forward over the whole batch.
        expected, _ = reference_gradients(mixture_of_experts(), batch)
        assert relative_error(at_labels.gradients, expected) < TOLERANCE


@pytest.mark.parametrize(
    ('token_weights', 'microbatch_size'),
    [
        ('sqrt', 1),
        ('sample', 4),
        ('column', 4),
    ],
)
def test_token_weights(token_weights, microbatch_size):
    model = one_layer_model()
    batch = batch_of()
    batch['loss_weights'] = column(batch)
    expected, weighted_mean, plain_mean = weighted_reference(model, batch, token_weights)

    recorder = fit(
        model,
        batch,
        token_weights=token_weights,
        logits='labels',
        microbatch_size=microbatch_size,
    )

    assert relative_error(recorder.gradients, expected) < TOLERANCE
    logged_total = recorder.logged('loss/train/total')
    assert logged_total == pytest.approx([weighted_mean], rel=TOLERANCE)
    logged_plain_mean = recorder.logged('token_accumulation/token_mean_loss')
    assert logged_plain_mean == pytest.approx([plain_mean], rel=TOLERANCE)


def test_column_that_is_not_used():
    """It may have one number for each row."""
    batch = batch_of()
    num_rows = len(batch['input_ids'])
    with_column = {**batch, 'loss_weights': torch.ones(num_rows)}
    assert_exact(one_layer_model(), with_column, batch=batch, logits='labels')


def test_dropout_keeps_the_gradient():
    """Hidden states are selected after the last dropout, so the same entries are dropped."""
    model = one_layer_model(attention_dropout=0.5)
    batch = inputs_of()
    torch.manual_seed(3)
    expected = forward_gradients(model, batch)

    with LogitsAtLabels(model, shifts_labels=True):
        model(**batch)  # the first forward is checked, and draws random numbers
        torch.manual_seed(3)
        gradients = forward_gradients(model, batch)

    assert relative_error(gradients, expected) < TOLERANCE


def test_media_rows():
    """Images of a row take positions that have no label."""
    case = FAMILIES['llava']()
    layout = BatchLayout.for_model(case.model)
    batch = layout.concat(case.rows)
    assert_exact(case.model, batch, logits='labels', microbatch_size=2)


def test_microbatch_without_labels():
    batch = batch_of()
    batch['labels'][2:4] = -100
    recorder = assert_exact(one_layer_model(), batch, logits='labels', microbatch_size=1)
    assert recorder.logged('token_accumulation/empty_microbatches') == [2]


def test_losses_by_source():
    model = one_layer_model()
    batch = batch_of()
    batch['source'] = ['a', 'b', 'a', 'b', 'c', 'c']

    at_all = fit(model, batch, logits='all', callbacks=[TokenMonitor()])
    at_labels = fit(model, batch, logits='labels', callbacks=[TokenMonitor()])

    for source in ('a', 'b', 'c'):
        name = f'token_monitor/source/{source}/loss'
        losses = at_labels.logged(name)
        expected_losses = at_all.logged(name)
        assert losses == pytest.approx(expected_losses, rel=1e-5)


def double_weight_in_second_step(state):
    """In the second step, lets the second label weigh double by a hook on the logits. The loss stays the same."""
    if state.timestamp.batch == 1:
        state.outputs['logits'].register_hook(with_doubled_position)


def with_doubled_position(gradient):
    """Doubles the gradient by the logits of the second position whose gradient is not 0."""
    has_gradient = gradient.abs().sum(dim=-1) != 0
    rows, columns = has_gradient.nonzero(as_tuple=True)
    doubled = gradient.clone()
    doubled[rows[1], columns[1]] *= 2
    return doubled


def test_error_names_sample_and_label():
    # These are fewer labels than a step measures, so that it measures all of them.
    shape = [(14, 2), (5, 3), (19, 7), (16, 1), (13, 2)]
    first_batch = batch_of(shape=shape)
    second_batch = batch_of(shape=shape)
    # Labels that the first step did not have, because only microbatches with new labels are measured.
    next_ids = (second_batch['input_ids'] + 1) % 64
    has_label = second_batch['labels'] != -100
    second_batch['input_ids'] = next_ids
    second_batch['labels'] = next_ids.masked_fill(~has_label, -100)
    labels_of_first_row = second_batch['labels'][0][has_label[0]]
    _, second_label = labels_of_first_row.tolist()

    with pytest.raises(RuntimeError, match=f'label {second_label} of .*sample-0'):
        fit(
            one_layer_model(),
            first_batch,
            second_batch,
            callbacks=[On(Event.AFTER_FORWARD, double_weight_in_second_step)],
            logits='labels',
            microbatch_size=5,
            slot_tokens=19,
        )


class Waits(TorchDispatchMode):
    """Records operations that make the host wait for a GPU."""

    WAITING = ('_local_scalar_dense', 'nonzero', 'equal', 'masked_select')

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.WAITING:
            self.names.append(name)
        if kwargs is None:
            return func(*args)
        return func(*args, **kwargs)


def test_selecting_waits_for_nothing():
    labels = batch_of()['labels']
    hidden_states = torch.zeros(*labels.shape, 5)
    with Waits() as waits:
        positions = LabelledPositions.from_batch({'labels': labels}, LossRule.CAUSAL, NUM_LABELS)
        positions.select_labels(labels, -100)
        positions.select(hidden_states)
    assert waits.names == []


def test_other_shapes_are_not_compared():
    """Logits have one position for each of the labels and one more. Seven positions are too few."""
    batch = batch_of()
    logits = torch.zeros(1, 7, 64)
    assert batch_at_logits(batch, logits, LossRule.CAUSAL, NUM_LABELS) is None


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        ({'logits': 'all'}, 'set to all'),
        ({'check_loss': False, 'loss_tokens': 'causal'}, 'check_loss'),
        pytest.param({'compile_config': {'backend': 'eager'}}, 'compiled', marks=pytest.mark.slow),
    ],
)
def test_reason_of_all_logits_is_logged(options, reason, caplog, shapes):
    with caplog.at_level(logging.INFO):
        assert_exact(one_layer_model(), batch_of(), microbatch_size=2, callbacks=[shapes], **options)

    assert_logits_of_all_positions(shapes)
    (message,) = [line for line in caplog.messages if NO_LOGITS_AT_LABELS in line]
    assert reason in message


@pytest.fixture
def model_with_metrics():
    """Returns a model with a metric, which Composer computes in training."""
    return hugging_face(one_layer_model(), metrics=[LanguageCrossEntropy()])


def test_metrics_of_training_get_all_logits(model_with_metrics, shapes):
    fit(model_with_metrics, batch_of(), callbacks=[shapes], microbatch_size=6)
    assert shapes.values == [(6, 24)]


def test_logits_at_labels_need_no_metrics(model_with_metrics):
    with pytest.raises(RuntimeError, match='metrics of training'):
        fit(model_with_metrics, batch_of(), logits='labels')


class FusedLoss(transformers.LlamaForCausalLM):
    """Computes its loss without its output embedding, as fused kernels do."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = torch.nn.functional.linear(hidden, self.lm_head.weight)
        loss = self.loss_function(logits, labels, vocab_size=64)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


def test_model_that_does_not_call_head(caplog):
    model = FusedLoss(one_layer_model().config)
    with caplog.at_level(logging.INFO):
        assert_exact(model, batch_of(), microbatch_size=2)
    assert NO_LOGITS_AT_LABELS in caplog.text

    with pytest.raises(RuntimeError, match='logits-at-labels'):
        fit(model, batch_of(), logits='labels')


def test_refused_model_stays_as_it_was():
    """The check has found that rows may be packed, before the run is refused."""
    model = hugging_face(FusedLoss(one_layer_model().config))
    attention = model.model.config._attn_implementation
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(RuntimeError, match='logits-at-labels'):
        fit(model, batch_of(), logits='labels', packing=True, optimizer=optimizer)
    assert model.model.config._attn_implementation == attention
    assert not optimizer._optimizer_step_pre_hooks


def changed_value(loss):
    """Returns a loss with twice the value and the same gradient."""
    return loss + loss.detach()


def changed_gradient(loss):
    """Returns a loss with the same value and twice the gradient."""
    return 2 * loss - loss.detach()


class LossByShape(transformers.LlamaForCausalLM):
    """Changes its loss if it has fewer logits than positions."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None):
        hidden_states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = next_token_loss(logits, labels)
        if logits.shape[:2] != input_ids.shape:
            loss = self.changed(loss)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize('changed', [changed_value, changed_gradient])
def test_loss_that_fewer_logits_change(changed, shapes):
    """The first-batch check finds it. So the run computes all logits, and is exact."""
    model = LossByShape(one_layer_model().config)
    model.changed = changed
    assert_exact(model, batch_of(), microbatch_size=2, callbacks=[shapes])
    assert_logits_of_all_positions(shapes)


def test_head_that_is_replaced_later(shapes):
    """The new output embedding has no hook, so its hidden states cannot be selected."""
    model = one_layer_model()

    def replace_head(state):
        copied_head = copy.deepcopy(model.get_output_embeddings())
        model.set_output_embeddings(copied_head)

    callbacks = [On(Event.BATCH_END, replace_head), shapes]
    assert_exact(model, batch_of(), batch_of(), callbacks=callbacks, microbatch_size=6)

    shape_in_first_step, shape_in_second_step = shapes.values
    num_rows, _ = shape_in_first_step
    assert num_rows == 1, 'logits only at labels'
    assert shape_in_second_step == (len(FEW_LABELS), max(LENGTHS))


def test_dense_labels_compute_all_logits(shapes):
    """Nothing is gained by selecting nearly all positions."""
    batch = batch_of(shape=[(19, 19), (19, 19), (19, 19)])
    assert_exact(one_layer_model(), batch, logits='labels', callbacks=[shapes], microbatch_size=3)
    assert shapes.values == [(3, 19)]


def test_evaluation_computes_all_logits():
    """Composer's metric is the same with logits at labels and with all logits."""

    def evaluated_loss(logits):
        """Returns the metric after a run with this option of the algorithm."""
        model = hugging_face(one_layer_model(), eval_metrics=[LanguageCrossEntropy()])
        eval_rows = DataLoader(text_rows(FEW_LABELS), batch_size=6, collate_fn=collate)
        recorder = fit(
            model,
            batch_of(),
            logits=logits,
            eval_interval='1ba',
            eval_dataloader=eval_rows,
        )
        metrics = recorder.trainer.state.eval_metrics['eval']
        return float(metrics['LanguageCrossEntropy'].compute())

    expected_loss = evaluated_loss('all')
    assert evaluated_loss('labels') == pytest.approx(expected_loss, rel=1e-6)


@pytest.mark.parametrize('shifts_labels', [None, True])
def test_plain_loop(shifts_labels):
    """Logits are computed only at labels in training, and only within the ``with`` block."""
    model = one_layer_model()
    batch = inputs_of()
    expected, _ = reference_gradients(model, batch)

    with LogitsAtLabels(model, shifts_labels=shifts_labels):
        for microbatch, weight in weighted_microbatches(single_rows(batch)):
            outputs = model(**microbatch)
            assert outputs.logits.shape[1] < microbatch['labels'].shape[1]
            weighted_loss = outputs.loss * weight
            weighted_loss.backward()
        model.eval()
        assert_one_logit_per_position(model, batch)

    assert relative_error(composer_gradients(model), expected) < TOLERANCE
    model.train()
    assert_one_logit_per_position(model, batch)
    assert num_hooks(model) == 0


def assert_one_logit_per_position(model, batch):
    """Checks that a forward of the model computes logits at all positions."""
    outputs = model(**batch)
    assert outputs.logits.shape[:2] == batch['labels'].shape


def assert_one_forward_is_exact(model, call, **options):
    """Compares one forward with logits at labels with a forward that computes all logits."""
    batch = inputs_of(**options)
    expected, _ = reference_gradients(model, batch)
    with LogitsAtLabels(model):
        outputs = call(**batch)
        assert outputs.logits.shape[0] == 1
        outputs.loss.backward()
    assert relative_error(composer_gradients(model), expected) < TOLERANCE


@pytest.mark.parametrize('side', ['left', 'right'])
def test_plain_loop_begins_with_one_token(side):
    model = one_layer_model()
    assert_one_forward_is_exact(model, model, side=side, shape=[(1, 0), (9, 3), (5, 2)])


def test_plain_loop_begins_with_one_column():
    """The loss of such a microbatch is NaN in a plain forward, too. The next microbatch is checked."""
    model = one_layer_model()
    with LogitsAtLabels(model):
        model(**inputs_of([(1, 0)]))
        outputs = model(**inputs_of())
    assert outputs.logits.shape[0] == 1


def test_arguments_by_position_are_refused():
    model = one_layer_model()
    batch = batch_of()
    with LogitsAtLabels(model), pytest.raises(ValueError, match=r'by name.*got: 1 arguments by position'):
        model(batch['input_ids'], labels=batch['labels'])


def test_masks_by_layer_type_are_refused():
    model = one_layer_model()
    batch = inputs_of()
    batch['attention_mask'] = {'full_attention': batch['attention_mask']}
    with LogitsAtLabels(model), pytest.raises(ValueError, match='`attention_mask` must be a tensor, got: dict'):
        model(**batch)


def test_adapted_model_without_a_task():
    """Its forward names no arguments."""
    model = with_lora()
    assert_one_forward_is_exact(model, model)


def test_logits_that_accelerate_converts():
    """In mixed precision it returns a copy of the outputs in float32. The noise of bfloat16 remains."""
    accelerate = pytest.importorskip('accelerate')
    batch = inputs_of()
    model = one_layer_model()
    expected, _ = reference_gradients(model, batch)
    trained = copy.deepcopy(model)  # accelerate wraps it in DDP if an earlier test has made a process group
    accelerator = accelerate.Accelerator(mixed_precision='bf16', cpu=True)
    prepared = accelerator.prepare_model(trained)

    with LogitsAtLabels(prepared):
        outputs = prepared(**batch)
        assert outputs.logits.shape[0] == 1
        assert outputs.logits.dtype == torch.float32
        outputs.loss.backward()

    assert relative_error(composer_gradients(trained), expected) < 2e-2


@pytest.mark.slow
def test_compiled_model_in_a_plain_loop():
    model = one_layer_model()
    compiled = torch.compile(model, backend='eager')
    assert_one_forward_is_exact(model, compiled)


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, 'record_event'), reason='FSDP2 of torch 2.6 needs a GPU')
def test_sharded_model_in_a_plain_loop(tmp_path):
    """The check runs the model before FSDP2 has gathered the weights for the forward of the loop."""
    model = one_layer_model()
    batch = inputs_of()
    expected, _ = reference_gradients(model, batch)
    with group_of_one_rank(tmp_path):
        fully_shard(model, mesh=init_device_mesh('cpu', (1,)))
        with LogitsAtLabels(model):
            outputs = model(**batch)
        assert outputs.logits.shape[0] == 1
        sharded_gradients = gradients_of(model, outputs.loss)
        gradients = {name: gradient.full_tensor() for name, gradient in sharded_gradients.items()}
    assert relative_error(gradients, expected) < TOLERANCE


def test_labels_that_are_shifted_already():
    """The loss then reads `shift_labels`, which are not selected. So all logits are computed."""
    batch = batch_of()
    next_labels = batch['labels'][:, 1:]
    batch['shift_labels'] = torch.nn.functional.pad(next_labels, (0, 1), value=-100)
    model = one_layer_model()
    expected = forward_gradients(model, batch)

    with LogitsAtLabels(model):
        outputs = model(**batch)
    gradients = gradients_of(model, outputs.loss)

    assert outputs.logits.shape[:2] == batch['labels'].shape
    assert relative_error(gradients, expected) < TOLERANCE


def test_plain_loop_refuses_a_wrong_shift():
    model = one_layer_model()
    batch = inputs_of()
    with pytest.raises(RuntimeError, match='logits-at-labels'), LogitsAtLabels(model, shifts_labels=False):
        model(**batch)


class MeanOfRows(transformers.LlamaForCausalLM):
    """Its loss is the mean of the means of the rows. Its forward names only some arguments."""

    def forward(self, labels=None, **inputs):
        outputs = super().forward(**inputs)
        losses = next_token_loss(outputs.logits, labels, reduction='none')
        losses_of_rows = losses.view(len(labels), -1).sum(dim=1)
        is_counted = labels[:, 1:] != -100
        num_labels = is_counted.sum(dim=1).clamp(min=1)
        means_of_rows = losses_of_rows / num_labels
        outputs.loss = means_of_rows.mean()
        return outputs


ONE_ROW = [(14, 4)]
EQUAL_ROWS = [(14, 3), (9, 3)]
NO_LABEL = [(14, 0), (9, 0)]


@pytest.mark.parametrize('shape', [ONE_ROW, EQUAL_ROWS, NO_LABEL])
def test_plain_loop_checks_how_rows_are_joined(shape):
    """The rows of the first forward do not show that logits in one row change the loss of several rows."""
    model = MeanOfRows(one_layer_model().config)
    batch = inputs_of(shape)
    with pytest.raises(RuntimeError, match='logits-at-labels'), LogitsAtLabels(model):
        model(**batch)


def test_plain_loop_checks_a_batch_without_labels():
    model = one_layer_model()
    batch = inputs_of(NO_LABEL)
    with pytest.raises(RuntimeError, match='logits-at-labels'), LogitsAtLabels(model, shifts_labels=False):
        model(**batch)


class TakesAnything(transformers.LlamaForCausalLM):
    """Passes all arguments on by ``**kwargs``, as many subclasses do."""

    def forward(self, **inputs):
        return super().forward(**inputs)


@pytest.mark.parametrize(
    'option',
    [
        pytest.param({}, id='no option'),
        pytest.param({'num_items_in_batch': 21}, id='divisor of the loss'),
        pytest.param({'return_dict': False}, id='outputs in a tuple'),
    ],
)
def test_plain_loop_passes_all_arguments(option):
    model = TakesAnything(one_layer_model().config)
    batch = inputs_of()

    def gradients_with_option():
        outputs = model(**batch, **option)
        loss = outputs[0]
        return gradients_of(model, loss)

    expected = gradients_with_option()
    with LogitsAtLabels(model):
        gradients = gradients_with_option()

    assert relative_error(gradients, expected) < TOLERANCE


def test_rows_that_cannot_be_told_apart_compute_all_logits():
    """The check had only one row, and nothing tells how to copy it. So batches of one row compute logits at labels."""
    model = one_layer_model()
    one_row = inputs_of(ONE_ROW)
    one_row['cu_seq_lens_q'] = torch.arange(3)
    several_rows = inputs_of(FEW_LABELS)
    several_rows['cu_seq_lens_q'] = torch.arange(8)

    with LogitsAtLabels(model):
        outputs_of_one_row = model(**one_row)
        outputs_of_several_rows = model(**several_rows)

    assert outputs_of_one_row.logits.shape[:2] == (1, 5)
    assert outputs_of_several_rows.logits.shape[:2] == (len(FEW_LABELS), max(LENGTHS))


class OneRow(transformers.LlamaForCausalLM):
    """Computes one row only, as some kernels for packed rows do."""

    def forward(self, input_ids, **inputs):
        assert len(input_ids) == 1, 'several rows'
        return super().forward(input_ids=input_ids, **inputs)


def test_model_of_one_row_keeps_its_check():
    """It cannot compute the row that the check adds, so the check has one row."""
    model = OneRow(one_layer_model().config)
    assert_one_forward_is_exact(model, model, shape=ONE_ROW)


def test_rows_that_failed_are_freed(monkeypatch):
    """The check tries again with fewer rows. Perhaps there was no memory for more, so it must not keep them."""
    model = OneRow(one_layer_model().config)
    labels_with_added_row = []
    are_freed = []
    with_unequal_row = logits_at_labels._with_unequal_row

    def watched_rows(*arguments):
        rows = with_unequal_row(*arguments)
        labels_with_added_row.append(weakref.ref(rows['labels']))
        return rows

    def note_whether_freed(module, inputs):
        for labels in labels_with_added_row:
            are_freed.append(labels() is None)

    monkeypatch.setattr(logits_at_labels, '_with_unequal_row', watched_rows)
    with LogitsAtLabels(model):
        model.lm_head.register_forward_pre_hook(note_whether_freed)
        model(**inputs_of(ONE_ROW))

    assert len(labels_with_added_row) == 1
    assert are_freed
    assert all(are_freed)


def test_embeddings_with_a_graph():
    """A model around the language model makes its `inputs_embeds`, and trains what it makes them with."""
    model = one_layer_model()
    number_of_logits = []
    embed = model.get_input_embeddings()
    with LogitsAtLabels(model):
        for shape in (ONE_ROW, FEW_LABELS):
            batch = inputs_of(shape)
            ids = batch.pop('input_ids')
            batch['inputs_embeds'] = embed(ids)
            expected_loss = model.eval()(**batch).loss
            outputs = model.train()(**batch)
            torch.testing.assert_close(outputs.loss, expected_loss)
            number_of_logits.append(tuple(outputs.logits.shape[:2]))
    assert number_of_logits == [(1, 5), (1, NUM_LABELS + 1)]


class CheckpointedNormAndHead(CheckpointedHead):
    """Has a layer before its output embedding in the checkpoint, so its hidden states are made again, too."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head.register_forward_pre_hook(self.times_one, prepend=True)

    @staticmethod
    def times_one(head, args):
        (hidden_states,) = args
        return (1.0 * hidden_states,)


FIRST_SHAPE = [(14, 4), (9, 2)]
SECOND_SHAPE = [(14, 3), (9, 3)]


@pytest.mark.parametrize('has_frozen_body', [False, True])
def test_checkpointed_head_of_several_forwards(has_frozen_body):
    """A backward of two losses computes the output embedding of both forwards again, each at its own labels."""
    model = checkpointed_head()
    batch = inputs_of(FIRST_SHAPE)
    other_batch = inputs_of(SECOND_SHAPE)
    if has_frozen_body:
        model.model.requires_grad_(False)

    def gradients_of_both():
        first_loss = model(**batch).loss
        second_loss = model(**other_batch).loss
        return gradients_of(model, first_loss + second_loss)

    expected = gradients_of_both()
    with LogitsAtLabels(model):
        gradients = gradients_of_both()
    assert relative_error(gradients, expected) < TOLERANCE


def test_checkpoint_begins_before_the_head():
    """Then nothing tells which forward is computed again, so it must be the last one."""
    model = CheckpointedNormAndHead(checkpointed_head().config)
    batch = inputs_of(FIRST_SHAPE)
    other_batch = inputs_of(SECOND_SHAPE)
    expected = forward_gradients(model, batch)
    with LogitsAtLabels(model):
        outputs = model(**batch)
        with torch.no_grad():
            model(**other_batch)
        gradients = gradients_of(model, outputs.loss)
        assert relative_error(gradients, expected) < TOLERANCE

        outputs_of_both = [model(**batch), model(**other_batch)]
        with pytest.raises(RuntimeError, match='got: 2 forwards before a backward'):
            outputs_of_both[0].loss.backward()


@pytest.mark.parametrize(
    ('arms_again', 'shape_in_backward'),
    [
        pytest.param(True, (1, 7), id='LogitsAtLabels'),
        pytest.param(False, (2, 14), id='armed for one forward'),
    ],
)
def test_checkpoint_around_the_model(arms_again, shape_in_backward):
    """The backward runs the forward again, with or without the selection. The gradient is the same."""
    model = one_layer_model()
    batch = inputs_of(FIRST_SHAPE)
    input_ids = batch.pop('input_ids')
    shapes_of_logits = []

    def loss_of(embeddings):
        outputs = model(inputs_embeds=embeddings, **batch)
        shapes_of_logits.append(tuple(outputs.logits.shape[:2]))
        return outputs.loss

    def gradients_with_checkpoint():
        embed = model.get_input_embeddings()
        loss = checkpoint(loss_of, embed(input_ids), use_reentrant=True)
        return gradients_of(model, loss)

    expected = gradients_with_checkpoint()
    shapes_of_logits.clear()
    if arms_again:
        with LogitsAtLabels(model):
            gradients = gradients_with_checkpoint()
    else:
        LabelSelector(model).arm(LossRule.CAUSAL, 6)
        gradients = gradients_with_checkpoint()
    assert shapes_of_logits == [(1, 7), shape_in_backward]
    assert relative_error(gradients, expected) < TOLERANCE


def test_checkpoint_around_the_first_forwards():
    """The forwards of the check are not part of the checkpoint, whose backward computes only one forward again."""
    model = one_layer_model()
    batches = [inputs_of(FIRST_SHAPE), inputs_of(SECOND_SHAPE)]

    def loss_of(batch):
        return model(**batch).loss

    def sum_of_losses():
        return sum(checkpoint(loss_of, batch, use_reentrant=False) for batch in batches)

    expected = gradients_of(model, sum_of_losses())
    with LogitsAtLabels(model):
        gradients = gradients_of(model, sum_of_losses())
    assert relative_error(gradients, expected) < TOLERANCE


def test_model_that_calls_itself():
    """Which call the output embedding belongs to is not known, so nothing is selected later."""
    model = one_layer_model()
    batch = inputs_of(FIRST_SHAPE)
    selector = LabelSelector(model)
    model(**batch)
    assert selector.num_head_calls == 1

    is_inner_call = iter([False, True])

    def call_again(module, args, output):
        if not next(is_inner_call):
            model(**batch)

    model.model.register_forward_hook(call_again)
    model(**batch)
    assert selector.num_head_calls == 0


@pytest.mark.parametrize('model_class', [CheckpointedHead, CheckpointedNormAndHead])
@pytest.mark.parametrize('has_frozen_body', [False, True])
def test_forward_that_fails_before_a_backward(has_frozen_body, model_class):
    """It leaves nothing behind that the backward of an earlier forward would use."""
    model = model_class(checkpointed_head().config)
    batch = inputs_of(FIRST_SHAPE)
    other_batch = inputs_of(SECOND_SHAPE)
    if has_frozen_body:
        model.model.requires_grad_(False)
    expected = forward_gradients(model, batch)

    def fail(head, args, output):
        raise RuntimeError('out of memory')

    with LogitsAtLabels(model):
        outputs = model(**batch)
        with model.lm_head.register_forward_hook(fail), pytest.raises(RuntimeError, match='out of memory'):
            model(**other_batch)
        gradients = gradients_of(model, outputs.loss)

    assert relative_error(gradients, expected) < TOLERANCE


def text_model_without_head():
    return one_layer_model().model


def classifier():
    """Returns a ComposerModel without an attribute ``model``."""
    return ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)


@pytest.mark.parametrize('make_model', [text_model_without_head, classifier])
def test_plain_loop_needs_a_head(make_model):
    model = make_model()
    with pytest.raises(ValueError, match='output embedding'):
        LogitsAtLabels(model)


@pytest.mark.parametrize(
    ('model', 'options', 'message'),
    [
        ('llama', {}, '`model` must be a Module'),
        (one_layer_model(), {'shifts_labels': 'yes'}, '`shifts_labels` must be'),
    ],
)
def test_plain_loop_refuses_other_arguments(model, options, message):
    with pytest.raises(ValueError, match=message):
        LogitsAtLabels(model, **options)


def test_plain_loop_enters_once():
    """The hooks of the first block would stay on the model."""
    model = one_layer_model()
    context = LogitsAtLabels(model)
    with pytest.raises(ValueError, match='entered already'), context, context:
        pass
    assert num_hooks(model) == 0
    with context:
        assert num_hooks(model) > 0


def test_validation_in_inference_mode_before_training():
    """The check of the first forward needs gradients, so it waits for a forward that has some."""
    model = one_layer_model()
    batch = inputs_of()
    with LogitsAtLabels(model):
        with torch.inference_mode():
            assert_one_logit_per_position(model, batch)
        outputs = model(**batch)
    assert outputs.logits.shape[0] == 1
