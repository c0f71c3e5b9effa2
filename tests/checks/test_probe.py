# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The probe of a model, and the loss rule that it finds, without a Trainer."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from composer_tokacc.checks import replaced_weights
from composer_tokacc.checks.comparison import RowComparison
from composer_tokacc.checks.first_batch import LOOK_AGAIN, FirstBatchCheck, find_loss_rule, rule_batch
from composer_tokacc.checks.probe import Probe
from composer_tokacc.collectives import gather_this_rank_only
from composer_tokacc.counting import LossRule
from composer_tokacc.layout import BatchLayout
from tests.checks.test_written_state import Cache, Statistic, with_layers
from tests.support.text import ONE_UNLABELLED, next_token_loss, one_layer_model, ragged_batch, text_row
from tests.support.training import num_hooks, weights_unchanged

FLOAT32_EPS = torch.finfo(torch.float32).eps
BFLOAT16_EPS = torch.finfo(torch.bfloat16).eps


# Losses of logits and a batch.


def causal(logits, batch):
    return next_token_loss(logits, batch['labels'])


def attended(logits, batch):
    is_padding = batch['attention_mask'] == 0
    labels = batch['labels'].masked_fill(is_padding, -100)
    return next_token_loss(logits, labels)


def unshifted(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch['labels'].flatten())


def smoothed(logits, batch):
    return next_token_loss(logits, batch['labels'], label_smoothing=0.1)


def truncated(logits, batch):
    return next_token_loss(logits[:, :-2], batch['labels'][:, :-2])


def clipped(logits, batch):
    """Has no gradient at the second label, as clipped policy gradients have none at some labels."""
    losses = next_token_loss(logits, batch['labels'], reduction='none')
    has_label = batch['labels'][:, 1:].flatten() != -100
    label_positions = has_label.nonzero().flatten()
    loss_of_second_label = losses[label_positions[1]]
    return (losses.sum() - loss_of_second_label) / len(label_positions)


def with_squares(factor):
    """Returns a loss with a term over all positions. If the factor is large, most of the gradient is without labels."""

    def loss(logits, batch):
        return causal(logits, batch) + factor * logits.square().mean()

    return loss


def not_a_number(logits, batch):
    return causal(logits, batch) * torch.nan


def infinite(logits, batch):
    return causal(logits, batch) + torch.inf


def detached(logits, batch):
    return causal(logits, batch).detach()


def loss_in(outputs, batch):
    return outputs['loss']


def probe_of(loss, *, with_logits: bool = True, model=None):
    """Returns a probe of a model whose loss is ``loss(logits, batch)``. By default it is the smallest text model."""
    model = model or one_layer_model()

    def forward(batch):
        logits = model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
        outputs = {'loss': loss(logits, batch)}
        if with_logits:
            outputs['logits'] = logits
        return outputs

    return Probe(forward, loss_in, model)


def row_for_rule():
    """Returns a row with enough labels to find the loss rule."""
    return rule_batch(None, text_row(12, 6))


@pytest.mark.parametrize('with_logits', [True, False])
@pytest.mark.parametrize(
    ('loss', 'rule'),
    [
        (causal, 'causal'),
        (attended, 'causal_attended'),
        (unshifted, 'unshifted'),
        (smoothed, 'causal'),
        pytest.param(with_squares(1), 'causal', id='little gradient elsewhere'),
    ],
)
def test_rule_is_where_the_gradient_is(loss, rule, with_logits):
    probe = probe_of(loss, with_logits=with_logits)
    assert find_loss_rule(probe, row_for_rule()) == rule


each_loss_and_rule = pytest.mark.parametrize(
    ('loss', 'rule'),
    [
        (causal, 'causal'),
        (attended, 'causal_attended'),
        (unshifted, 'unshifted'),
    ],
)


@pytest.mark.parametrize('side', ['left', 'right'])
@each_loss_and_rule
def test_rule_of_rows_with_few_labels(loss, rule, side):
    """One label cannot tell the rules apart, so further tokens get one. Padding gets none."""
    batch = ragged_batch([(6, 1), (9, 0)], side=side)
    layout = BatchLayout.infer(batch)

    row = rule_batch(layout, batch)

    assert find_loss_rule(probe_of(loss), row) == rule


@pytest.mark.parametrize('side', ['left', 'right'])
@each_loss_and_rule
def test_rule_of_labels_on_padding(loss, rule, side):
    """The attended loss counts no label on padding, so these labels must not be the ones that show the rule."""
    batch = ragged_batch([(1, 1), (6, 4), (20, 1)], side=side, labels_on_pads=7)
    layout = BatchLayout.infer(batch)

    row = rule_batch(layout, batch)

    assert find_loss_rule(probe_of(loss), row) == rule


def test_rule_needs_two_forwards():
    """The first forward finds the last layers. The second one shows whether the loss is random, and the rule."""
    num_forwards = 0

    def count_forward(module, args, output):
        nonlocal num_forwards
        num_forwards += 1

    model = one_layer_model()
    model.register_forward_hook(count_forward)

    rule = find_loss_rule(probe_of(causal, model=model), row_for_rule())

    assert rule == 'causal'
    assert num_forwards == 2


@pytest.mark.parametrize(
    ('loss', 'message'),
    [
        pytest.param(not_a_number, r"must be a number, got: nan \(sample 'first'\)", id='nan'),
        pytest.param(infinite, r"must be a number, got: inf \(sample 'first'\)", id='inf'),
        pytest.param(detached, r"no gradient at any position of sample 'first'\. .* factor of 0", id='no gradient'),
        pytest.param(with_squares(100), 'no rule explains', id='large squares'),
        pytest.param(truncated, r'no rule explains\. The model changes labels inside forward', id='truncated'),
    ],
)
def test_loss_without_a_rule(loss, message):
    row = {**row_for_rule(), 'sample_ids': ['first']}

    with pytest.raises(RuntimeError, match=message):
        find_loss_rule(probe_of(loss), row)


def test_invalid_loss_of_another_rank_has_no_rule():
    """All ranks raise in the same place, so none of them waits for another one."""
    probe = probe_of(causal)
    probe.gather = lambda value: [value, math.nan if value is None else value]

    with pytest.raises(RuntimeError, match='loss must be a number, got: nan'):
        find_loss_rule(probe, row_for_rule())


def test_rule_with_a_label_without_gradient():
    """The gradient does not tell the rules apart. If the user names one, it must only have no gradient elsewhere."""
    probe = probe_of(clipped)

    with pytest.raises(RuntimeError, match='no rule explains'):
        find_loss_rule(probe, row_for_rule())

    assert find_loss_rule(probe, row_for_rule(), named_rule=LossRule.CAUSAL) == 'causal'

    with pytest.raises(RuntimeError, match='no rule explains'):
        find_loss_rule(probe, row_for_rule(), named_rule=LossRule.UNSHIFTED)


def test_nearest_gradient_decides():
    """A second term gives a gradient by the states at every position. The one by the logits shows the labels."""
    model = one_layer_model()

    def forward(batch):
        outputs = model.model(
            input_ids=batch['input_ids'],
            attention_mask=batch['attention_mask'],
        )
        states = outputs.last_hidden_state
        logits = model.lm_head(states)
        loss = unshifted(logits, batch) + 1e-3 * states.square().mean()
        return {'loss': loss, 'logits': logits}

    probe = Probe(forward, loss_in, model)

    by_states, by_logits = probe.run(row_for_rule()).gradients['tokens']

    assert by_states.any(dim=-1).all()
    assert not by_logits.any(dim=-1).all()
    assert find_loss_rule(probe, row_for_rule()) == 'unshifted'


def takes_only_half_precision(module, args):
    if args[0].dtype != torch.bfloat16:
        raise RuntimeError('the kernel supports only bfloat16')


def casts_to_type_of_weights(module, args):
    return (args[0].to(module.weight.dtype),)


def with_half_weights(before_head=None):
    """Returns a model with weights in bfloat16. ``before_head`` is called before its output embedding."""
    model = one_layer_model().bfloat16()
    if before_head is not None:
        model.lm_head.register_forward_pre_hook(before_head)
    return model


@pytest.mark.parametrize(
    ('before_head', 'least', 'most'),
    [
        pytest.param(None, 1e-9, 1e-6, id='float32'),
        pytest.param(takes_only_half_precision, 1e-5, 1e-1, id='only half precision'),
        pytest.param(casts_to_type_of_weights, 1e-5, 1e-1, id='cast to half precision'),
    ],
)
def test_round_off_has_the_probes_precision(before_head, least, most):
    row = text_row(40, 30)
    probe = probe_of(causal, model=with_half_weights(before_head))

    plain_result = probe.run(row)
    rounded_result = probe.run(row, rounded=True)

    *_, plain = plain_result.gradients['tokens']
    *_, rounded = rounded_result.gradients['tokens']
    round_off = (rounded - plain).norm() / plain.norm()
    assert least < float(round_off) < most


def test_half_weights_are_probed_in_float32():
    """The model itself keeps its weights."""
    row = text_row(40, 30)
    model = with_half_weights()
    model_in_float32 = with_half_weights().float()

    result = probe_of(causal, model=model).run(row, varies_weights=False)

    expected = probe_of(causal, model=model_in_float32).run(row, varies_weights=False)
    assert result.losses == expected.losses
    assert result.gradient_eps == FLOAT32_EPS
    for parameter in model.parameters():
        assert parameter.dtype == torch.bfloat16
    states = torch.zeros(1, model.config.hidden_size).bfloat16()
    assert model.lm_head(states).dtype == torch.bfloat16


def test_float32_weights_are_probed_in_float32():
    row = text_row(40, 30)
    probe = probe_of(causal)
    expected = probe.run(row)

    with torch.autocast('cpu', dtype=torch.bfloat16):
        result = probe.run(row)

    assert result.losses == expected.losses
    assert result.gradient_eps == FLOAT32_EPS


@pytest.fixture(params=['by_old_names', 'by_new_names'])
def with_tf32(request):
    """Allows TF32 as Composer does on a GPU, or by the names of torch 2.9."""
    if request.param == 'by_new_names' and not hasattr(torch.backends, 'fp32_precision'):
        pytest.skip('new in torch 2.9')
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    matmul_before = matmul.allow_tf32
    cudnn_before = cudnn.allow_tf32

    if request.param == 'by_old_names':
        matmul.allow_tf32 = True
        cudnn.allow_tf32 = True
    else:
        matmul.fp32_precision = 'tf32'
    yield

    matmul.allow_tf32 = matmul_before
    cudnn.allow_tf32 = cudnn_before


def allows_tf32():
    """Returns whether torch allows TF32 in matrix products, and in convolutions."""
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    has_new_names = hasattr(torch.backends, 'fp32_precision')
    if has_new_names:
        return [matmul.fp32_precision == 'tf32', cudnn.conv.fp32_precision == 'tf32']
    return [matmul.allow_tf32, cudnn.allow_tf32]


def test_float32_is_not_tf32(with_tf32):
    """The round-off of TF32 is 5e-4, which would look like a loss that depends on the cut."""
    allowed_in_forwards = []

    def loss(logits, batch):
        allowed_in_forwards.extend(allows_tf32())
        return causal(logits, batch)

    assert allows_tf32() == [True, True]

    probe_of(loss).run(text_row(9, 7))

    assert allowed_in_forwards
    assert not any(allowed_in_forwards)
    assert allows_tf32() == [True, True]


def test_forward_sets_flags_of_cudnn():
    """The flags read whether TF32 is allowed. Torch 2.9 refuses that if only its new names were set."""

    def loss(logits, batch):
        with torch.backends.cudnn.flags(enabled=False):
            return causal(logits, batch)

    assert find_loss_rule(probe_of(loss), row_for_rule()) == 'causal'


def do_nothing(tensor):
    pass


def probe_in_bfloat16(before=do_nothing, after=do_nothing, gather=gather_this_rank_only):
    """Returns a probe of a float32 model that trains in bfloat16.

    Args:
        before: Called at the start of each forward, with the ids.
        after: Called at the end of each forward, with the logits.
        gather: Argument of the Probe.
    """
    model = one_layer_model()

    def forward(batch):
        before(batch['input_ids'])
        logits = model(input_ids=batch['input_ids']).logits
        after(logits)
        return {'loss': causal(logits, batch), 'logits': logits}

    autocast = partial(torch.autocast, 'cpu', dtype=torch.bfloat16)
    return Probe(forward, loss_in, model, autocast, gather=gather)


def is_in_half_precision():
    return torch.is_autocast_enabled('cpu')


def half_precision_only(ids, error_class=RuntimeError):
    if not is_in_half_precision():
        raise error_class('FlashAttention only support fp16 and bf16 data type')


def test_loss_that_counts_forwards_in_bfloat16():
    """It grows by more than one digit of bfloat16, so it is not taken for round-off."""
    model = one_layer_model()
    num_forwards = 0

    def forward(batch):
        nonlocal num_forwards
        half_precision_only(batch['input_ids'])
        num_forwards += 1
        outputs = model(input_ids=batch['input_ids'])
        loss = causal(outputs.logits, batch) + 0.05 * num_forwards
        return {'loss': loss, 'logits': outputs.logits}

    autocast = partial(torch.autocast, 'cpu', dtype=torch.bfloat16)
    probe = Probe(forward, loss_in, model, autocast)

    with pytest.raises(RuntimeError, match='although all random numbers were the same'):
        probe.examine(row_for_rule())


@pytest.mark.parametrize(
    'error_class',
    [
        RuntimeError,
        AssertionError,
        ValueError,
        torch.OutOfMemoryError,
    ],
)
def test_kernel_of_half_precision_only(error_class):
    """Kernels in Triton assert the type, and other hosts raise ValueError. Half precision takes less memory."""
    probe = probe_in_bfloat16(partial(half_precision_only, error_class=error_class))
    assert find_loss_rule(probe, row_for_rule()) == 'causal'


def compare_rows(probe, batch):
    """Returns a comparison of cuts. Its reference, all rows together, is already computed."""
    layout = BatchLayout.infer(batch)
    return RowComparison(
        probe,
        layout,
        on_device=lambda rows: rows,
        rule=LossRule.CAUSAL,
        rows=batch,
        check_loss=True,
    )


def test_later_kernel_of_half_precision_only():
    """The kernel of a vision encoder does not run if the first rows have no image."""
    batch = ragged_batch()

    def before(ids):
        if len(ids) == len(batch['labels']):
            half_precision_only(ids)

    probe = probe_in_bfloat16(before)
    probe.run(text_row(12, 6))

    comparison = compare_rows(probe, batch)

    assert comparison.reference.gradient_eps == BFLOAT16_EPS


def first_batch_check(probe, layout):
    """Returns the check of a causal model. It splits no batch, because it has no cutter."""
    return FirstBatchCheck(
        probe,
        layout,
        lambda rows: rows,
        cutter=None,
        named_rule=LossRule.CAUSAL,
        check_loss=True,
    )


def test_facts_of_earlier_checks_stay(monkeypatch):
    """The rows of a later check may not show that terms over samples have a gradient in rows without labels."""
    num_checks = 0

    def trains_unlabelled_row(comparison):
        nonlocal num_checks
        num_checks += 1
        return num_checks == 1

    monkeypatch.setattr(RowComparison, 'trains_unlabelled_row', trains_unlabelled_row)
    batch = ragged_batch()
    check = first_batch_check(probe_of(causal), BatchLayout.infer(batch))

    check.prove(batch, 1)
    wider_rows = ragged_batch([(20, 9), (5, 3)])
    loss_facts = check.prove(wider_rows, 1)

    assert num_checks > 1
    assert loss_facts.trains_unlabelled_rows


def test_refused_check_stays_due():
    """If a caller goes on after the refusal of a check, the next step is checked, too."""
    loss = causal
    batch = ragged_batch()
    probe = probe_of(lambda logits, batch: loss(logits, batch))
    check = first_batch_check(probe, BatchLayout.infer(batch))
    check.prove(batch, 1)

    loss = with_squares(1)
    check.note_step(LOOK_AGAIN)

    for _ in range(2):
        with pytest.raises(RuntimeError, match='must'):
            check.prove(batch, 1)


def test_rows_without_tokens_show_no_rule():
    """They have no column for a label."""
    no_tokens = torch.zeros(2, 0, dtype=torch.long)
    batch = {'input_ids': no_tokens, 'attention_mask': no_tokens, 'labels': no_tokens}

    with pytest.raises(RuntimeError, match='must have a row with two tokens'):
        first_batch_check(probe_of(causal), layout=None).prove(batch, 1)


def test_half_precision_only_in_unknown_rows():
    """A later batch has the first image, and no layout tells its rows apart."""
    batch = text_row(12, 6)
    is_later = False

    def before(ids):
        if is_later:
            half_precision_only(ids)

    probe = probe_in_bfloat16(before)
    check = first_batch_check(probe, layout=None)
    check.prove(batch, microbatch_size=2)

    is_later = True
    check.note_step(LOOK_AGAIN)
    check.prove(batch, microbatch_size=2)

    assert probe.run(batch).gradient_eps == BFLOAT16_EPS


def test_unlabelled_rows_out_of_memory():
    """They are computed after the others, which were compared in float32. So all are compared again."""
    batch = ragged_batch(ONE_UNLABELLED)
    batches_in_float32 = []
    batches_in_half = []

    def fill_memory(ids):
        if is_in_half_precision():
            batches_in_half.append(ids.tolist())
            return
        if len(ids) == 2:  # a row with labels, followed by the one without
            raise torch.OutOfMemoryError('CUDA out of memory')
        if len(ids) > 2:
            batches_in_float32.append(ids.tolist())

    probe = probe_in_bfloat16(fill_memory)
    check = first_batch_check(probe, BatchLayout.infer(batch))

    check.prove(batch, microbatch_size=2)

    assert batches_in_float32
    for rows in batches_in_float32:
        assert rows in batches_in_half


def test_known_rows_send_no_objects(monkeypatch):
    """With Composer's own flag every step calls the check."""
    batch = text_row(12, 6)
    check = first_batch_check(probe_of(causal), BatchLayout.infer(batch))
    check.prove(batch, microbatch_size=2)

    monkeypatch.setattr('composer_tokacc.checks.first_batch.all_gather_object', None)  # a call would raise
    check.prove(batch, microbatch_size=2)


def test_out_of_memory_without_varied_weights():
    """The reference with varied weights was computed in float32. The next one raises, and tries no half precision."""
    batch = ragged_batch()
    references = []

    def fill_memory(ids):
        if len(ids) == len(batch['labels']):
            references.append(ids)
        if len(references) == 2:
            raise torch.OutOfMemoryError('CUDA out of memory')

    probe = probe_in_bfloat16(fill_memory)
    probe.run(text_row(12, 6))
    comparison = compare_rows(probe, batch)

    with pytest.raises(torch.OutOfMemoryError):
        comparison.check_single_rows()

    assert len(references) == 2


def pool(ids):
    width = ids.shape[1]
    if width < 6:
        raise RuntimeError('pooling needs 6 positions')


def test_failed_cut_leaves_the_precision():
    row = text_row(12, 6)
    short_row = text_row(5, 3)
    probe = probe_in_bfloat16(pool)
    expected = probe.run(row)

    with pytest.raises(RuntimeError, match='pooling'):
        probe.run(short_row)

    assert probe.run(row).losses == expected.losses


def mask_one_logit(logits):
    logits[..., 3].fill_(-1e4)


def test_logits_that_are_written_in_float32():
    probe = probe_in_bfloat16(after=mask_one_logit)
    result = probe.run(text_row(12, 6))
    assert result.gradient_eps == FLOAT32_EPS


def test_later_forward_out_of_memory():
    """It raises at once, because its result would be compared with the first one."""
    row = text_row(12, 6)
    is_later = False
    later_forwards_in_half = []

    def fill_memory(ids):
        if is_later:
            later_forwards_in_half.append(is_in_half_precision())
            raise torch.OutOfMemoryError('CUDA out of memory')

    probe = probe_in_bfloat16(fill_memory)
    probe.run(row)

    is_later = True
    with pytest.raises(torch.OutOfMemoryError):
        probe.run(row)

    # One forward in float32, and none in half precision after it.
    assert later_forwards_in_half == [False]


@pytest.mark.parametrize('fails_here', [False, True])
def test_ranks_agree_on_precision(fails_here):
    """Only the rank of the fuller GPU runs out of memory. With unequal tolerances, ranks would wait for each other."""
    # Whether float32 has failed, whether a second forward has the same loss, and the states that a forward changes.
    of_other_rank = [True, True, []]
    gathered = []

    def gather(value):
        value_of_other_rank = of_other_rank[len(gathered)]
        gathered.append(value)
        return [value, value_of_other_rank]

    before = half_precision_only if fails_here else do_nothing
    probe = probe_in_bfloat16(before, gather=gather)

    result = probe.run(text_row(12, 6))

    assert result.gradient_eps == BFLOAT16_EPS
    assert gathered == [fails_here, True, []]


@torch.library.custom_op('tests_of_probe::bias_dropout_add', mutates_args=())
def bias_dropout_add(biases: torch.Tensor, factor: float) -> torch.Tensor:
    """Stands for a fused kernel, which does more than a dropout."""
    return biases * factor


def test_kernel_with_dropout_in_its_name():
    """Only torch's own dropout is switched off. Without the kernel the loss would be another one."""
    model = one_layer_model()
    row = row_for_rule()

    def loss(logits, batch):
        vocabulary = logits.shape[-1]
        biases = bias_dropout_add(torch.linspace(0, 1, vocabulary), 3.0)
        return causal(logits + biases, batch)

    logits = model(row['input_ids']).logits
    expected = loss(logits, row)  # before the probe, which may switch something off

    result = probe_of(loss, model=model).run(row, varies_weights=False)

    assert result.losses['tokens'] == pytest.approx(expected.item())


def dropout_in_place(states, probability, is_training):
    return torch.feature_dropout_(states.clone(), probability, is_training)


@pytest.mark.parametrize(
    'dropout',
    [
        pytest.param(F.dropout, id='function'),
        pytest.param(dropout_in_place, id='in place'),
        pytest.param(torch.ops.aten.dropout.default, id='exported'),
    ],
)
def test_dropout_is_switched_off(dropout):
    """The dropout of attention is an argument of a kernel. Other dropout is a function that is called."""

    def loss(logits, batch):
        dropped_logits = dropout(logits, 0.5, True)
        return causal(dropped_logits, batch)

    row = text_row(12, 6)
    model = one_layer_model(attention_dropout=0.5).train()
    probe = probe_of(loss, model=model)

    result = probe.run(row)

    model_without_dropout = one_layer_model()
    expected = probe_of(causal, model=model_without_dropout).run(row)
    assert result.losses == pytest.approx(expected.losses, rel=1e-6)
    assert probe.runs_as_in_training


class SelfAttention(torch.nn.MultiheadAttention):
    def forward(self, states):
        return super().forward(states, states, states)[0]


class ExportedAttention(torch.nn.Module):
    """Calls attention as a model of torch.export does."""

    dropout = 0.5

    def forward(self, states):
        return torch.ops.aten.scaled_dot_product_attention.default(states, states, states, None, self.dropout)


class Recurrent(torch.nn.LSTM):
    def forward(self, states):
        return super().forward(states)[0]


@pytest.mark.parametrize(
    'layer',
    [
        pytest.param(SelfAttention(32, 2, dropout=0.5, batch_first=True), id='attention'),
        pytest.param(ExportedAttention(), id='exported attention'),
        pytest.param(Recurrent(32, 32, num_layers=2, dropout=0.5, batch_first=True), id='lstm'),
    ],
)
def test_dropout_inside_of_torchs_modules(layer):
    model = one_layer_model().train()
    model.model.norm = torch.nn.Sequential(layer, torch.nn.LayerNorm(32))
    probe = probe_of(causal, model=model)
    row = text_row(12, 6)

    result = probe.run(row)
    result_of_other_seed = probe.run(row, seed=1)

    assert result.losses == result_of_other_seed.losses
    assert probe.runs_as_in_training
    assert layer.dropout == 0.5


def draw_with_numpy(shape):
    numbers = np.random.standard_normal(shape)
    return torch.tensor(numbers, dtype=torch.float32)


def draw_with_python(shape):
    return torch.full(shape, random.random())


@pytest.mark.parametrize(
    'draw',
    [
        pytest.param(torch.randn, id='torch'),
        pytest.param(draw_with_numpy, id='numpy'),
        pytest.param(draw_with_python, id='python'),
    ],
)
def test_random_forward_is_probed_in_evaluation(draw):
    def add_noise_in_training(module, args, output):
        if module.training:
            return output + 0.1 * draw(output.shape)
        return output

    model = one_layer_model().train()
    model.model.norm.register_forward_hook(add_noise_in_training)
    probe = probe_of(causal, model=model)
    row = text_row(12, 6)

    first_result = probe.run(row)
    second_result = probe.run(row)

    assert first_result.losses == second_result.losses
    assert not probe.runs_as_in_training


class Turn(torch.nn.Module):
    """Alternates between 0 and 1 from forward to forward."""

    def __init__(self):
        super().__init__()
        self.value = 1

    def next(self):
        self.value = 1 - self.value
        return self.value


class HiddenTurn(Turn):
    """The same, where no snapshot finds it."""

    def __init__(self):
        super().__init__()
        self.values = [1]

    def next(self):
        self.values[0] = 1 - self.values[0]
        return self.values[0]


def probe_with_term_by_turns(turn):
    """Returns a probe whose loss has a second term in every other forward."""
    model = one_layer_model().train()
    model.turn = turn

    def forward(batch):
        logits = model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
        return {'loss': causal(logits, batch), 'logits': logits}

    def terms(loss, outputs):
        if turn.next():
            return {'tokens': loss, 'samples': loss}
        return {'tokens': loss}

    return Probe(forward, loss_in, model, terms=terms)


def test_term_of_every_other_forward():
    probe = probe_with_term_by_turns(Turn())
    with pytest.raises(RuntimeError, match=r"the next one, got: 'turn\.value'"):
        probe.examine(row_for_rule())


def test_term_of_every_other_forward_by_hidden_state():
    """The first and the third forward have the same terms. So it looks like a random loss."""
    probe = probe_with_term_by_turns(HiddenTurn())
    probe.examine(row_for_rule())
    assert probe.is_random


def test_loss_is_detached_in_every_other_forward():
    """Its value stays the same."""
    model = one_layer_model().train()
    model.turn = Turn()

    def loss(logits, batch):
        if model.turn.next():
            logits = logits.detach()
        return causal(logits, batch)

    with pytest.raises(RuntimeError, match=r"the next one, got: 'turn\.value'"):
        probe_of(loss, model=model).examine(row_for_rule())


def test_counter_beside_a_loss_that_is_detached_by_turns():
    """A gradient that comes and goes is no round-off. So the change by the counter is not taken for round-off, either.

    Nothing shows what decides about the gradient, but the counter is found.
    """
    model = one_layer_model().train()
    model.turn = Turn()
    hidden_turn = HiddenTurn()

    def loss(logits, batch):
        if hidden_turn.next():
            logits = logits.detach()
        return causal(logits, batch) * (1 + 1e-3 * model.turn.next())

    with pytest.raises(RuntimeError, match=r"the next one, got: 'turn\.value'"):
        probe_of(loss, model=model).examine(row_for_rule())


class AlternatingNorm(torch.nn.Module):
    """Has two norms, which take turns. Only one of them is found among the last layers."""

    def __init__(self):
        super().__init__()
        first = torch.nn.LayerNorm(32)
        second = torch.nn.LayerNorm(32)
        self.norms = torch.nn.ModuleList([first, second])
        self.turn = Turn()

    def forward(self, states):
        norm = self.norms[self.turn.next()]
        return norm(states)


def test_last_layer_of_every_other_forward():
    model = one_layer_model().train()
    model.model.norm = AlternatingNorm()

    with pytest.raises(RuntimeError, match=r"the next one, got: '.*turn\.value'"):
        probe_of(causal, model=model).examine(row_for_rule())


def test_norm_after_the_head():
    """A layer before the head that runs again after it does not end the graph of the loss."""
    model = one_layer_model()

    def loss(logits, batch):
        width = logits.shape[1]
        model.model.norm(torch.ones(1, width, 32))
        return causal(logits, batch)

    assert find_loss_rule(probe_of(loss, model=model), row_for_rule()) == 'causal'


class Positions(torch.nn.Module):
    """Adds the number of its column to each state, times weights that begin at 0."""

    def __init__(self, *shape):
        super().__init__()
        self.scales = torch.nn.Parameter(torch.zeros(shape))

    def forward(self, states):
        scales = self.scales
        if scales.dim() == 2:
            scales = scales.sum(dim=0)
        width = states.shape[1]
        columns = torch.arange(width, dtype=states.dtype)[:, None]
        return states + columns * scales


def padded_on_the_left(row, num_pads):
    padding = (num_pads, 0)
    return {
        'input_ids': F.pad(row['input_ids'], padding),
        'attention_mask': F.pad(row['attention_mask'], padding),
        'labels': F.pad(row['labels'], padding, value=-100),
    }


SHAPES_OF_WEIGHTS = [(), (1,), (32,), (4, 32)]


@pytest.mark.parametrize('shape', SHAPES_OF_WEIGHTS)
def test_weights_of_0_hide_nothing(shape):
    """A weight of 0 hides that the loss depends on columns, until it is trained. The probe varies the weights."""
    model = one_layer_model()
    embed = model.model.embed_tokens
    model.model.embed_tokens = torch.nn.Sequential(embed, Positions(*shape))
    row = text_row(12, 6)
    padded_row = padded_on_the_left(row, num_pads=40)
    outputs = model(**row)
    padded_outputs = model(**padded_row)
    torch.testing.assert_close(padded_outputs.loss, outputs.loss, rtol=1e-5, atol=0)

    probe = probe_of(causal, model=model)
    with weights_unchanged(model):
        result = probe.run(row)
        padded_result = probe.run(padded_row)

    assert not result.is_same_loss('tokens', padded_result.losses['tokens'])


def test_equal_weights_are_varied_upwards():
    """Below 0 a root or a logarithm of a weight would not be a number."""
    for shape in SHAPES_OF_WEIGHTS:
        varied = replaced_weights._varied(torch.zeros(shape))
        assert varied.shape == shape
        assert bool((varied > 0).all())
        different_weights = varied.flatten().unique()
        assert len(different_weights) > 0.9 * varied.numel()


def test_layer_of_torchscript():
    model = one_layer_model()
    scripted_norm = torch.jit.script(torch.nn.LayerNorm(32))
    model.model.embed_tokens = torch.nn.Sequential(model.model.embed_tokens, scripted_norm)
    assert find_loss_rule(probe_of(causal, model=model), row_for_rule()) == 'causal'


def traces_in(model):
    """Returns what a probe could leave behind: random numbers, modes, attributes, hooks and gradients."""
    traces = [torch.get_rng_state().tolist()]
    assert num_hooks(model) == 0
    for module in model.modules():
        traces.append((module.training, sorted(vars(module))))
    for parameter in model.parameters():
        assert parameter.grad is None
    return traces


def test_probe_leaves_no_trace():
    """The model has state that is judged, and parts in evaluation. The last forward fails."""
    model = with_layers(Statistic(), Cache())
    model.model.layers[0].eval()
    row = text_row(12, 6)
    row_outside_of_vocabulary = {**row, 'input_ids': torch.full((1, 12), 10**6)}
    traces_before = traces_in(model)
    probe = Probe.from_model(model)

    first_result = probe.run(row)
    second_result = probe.run(row)
    probe.run(row, rounded=True)
    with pytest.raises(IndexError):
        probe.run(row_outside_of_vocabulary)

    assert first_result.losses == second_result.losses
    assert traces_in(model) == traces_before


def test_interrupted_probe_shows_the_weights():
    def interrupt(module, args, output):
        raise KeyboardInterrupt

    model = one_layer_model()
    norm = model.model.norm
    norm.register_forward_hook(interrupt)
    attributes_before = sorted(vars(norm))

    with pytest.raises(KeyboardInterrupt):
        probe_of(causal, model=model).run(text_row(12, 6))

    assert sorted(vars(norm)) == attributes_before


def test_change_on_another_rank_names_its_row():
    """On this rank no row has changed, but all ranks raise the same error."""

    def gather(value):
        if not isinstance(value, list):
            return [value]
        changes_of_other_rank = []
        for change in value:
            changed = replace(change, row=1, error=1e-3, error_without_factor=1e-3)
            changes_of_other_rank.append(changed)
        return [value, changes_of_other_rank]

    probe = probe_of(causal)
    probe.examine(text_row(12, 6))
    comparison = compare_rows(probe, ragged_batch())
    probe.gather = gather
    with pytest.raises(RuntimeError, match='row 1: the gradient at its logits changes'):
        comparison.check_single_rows()


@pytest.mark.parametrize('changes_gradient', [True, False], ids=['gradient and loss', 'loss only'])
def test_loss_of_another_rank_is_no_number(changes_gradient):
    """All ranks name this cause."""

    def gather(value):
        of_other_rank = value
        if isinstance(value, list) and changes_gradient:
            of_other_rank = [replace(change, error=math.inf) for change in value]
        elif isinstance(value, bool):  # whether a loss is the expected one
            of_other_rank = False
        elif value is None:
            of_other_rank = math.nan
        return [value, of_other_rank]

    probe = probe_of(causal)
    probe.examine(text_row(12, 6))
    comparison = compare_rows(probe, ragged_batch())
    probe.gather = gather
    with pytest.raises(RuntimeError, match='loss must be a number, got: nan'):
        comparison.check_single_rows()


def test_unlabelled_row_without_a_number_on_another_rank():
    """No rank compares such rows then, because each comparison is a collective."""
    model = one_layer_model()

    def forward(batch):
        outputs = model(
            input_ids=batch['input_ids'],
            attention_mask=batch['attention_mask'],
        )
        loss = causal(outputs.logits, batch)
        return {'loss': loss, 'logits': outputs.logits}

    def terms(loss, outputs):
        term = outputs['logits'].square().mean()
        return {'tokens': loss, 'samples': term}

    def gather(value):
        of_other_rank = math.nan if value is None else value
        return [value, of_other_rank]

    probe = Probe(forward, loss_in, model, terms=terms)
    probe.examine(text_row(12, 6))
    comparison = compare_rows(probe, ragged_batch())
    probe.gather = gather

    assert not comparison.trains_unlabelled_row()
