# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measured weights of tokens, compared with weights that are computed by hand."""

from __future__ import annotations

import copy
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from composer import DataSpec

from composer_tokacc import TokenAccumulation, measure_token_weights, token_data_spec
from tests.checks.test_hidden_states import smoothed, with_z_loss
from tests.support.launch import launch_json
from tests.support.text import next_token_loss, one_layer_model, ragged_batch
from tests.support.training import hugging_face, loader, num_hooks, train

LENGTHS = [5, 9, 14, 30, 7, 22, 11, 3]
NUM_TARGETS = [length - 1 for length in LENGTHS]  # the model shifts its labels
TOTAL = sum(NUM_TARGETS)
BATCH = ragged_batch([(length, length) for length in LENGTHS])
EQUAL_WEIGHTS = torch.full((TOTAL,), 1 / TOTAL)


def assert_weights(report, *expected, rtol=3e-6):
    """Compares the weights of each microbatch. The default is the round-off of float32."""
    torch.testing.assert_close(report.weights, list(expected), rtol=rtol, atol=0)


def assert_all_weights(report, expected):
    """Compares the weights of all microbatches, one after the other. They may differ by the round-off of float32."""
    weights = torch.cat(report.weights)
    torch.testing.assert_close(weights, expected, rtol=3e-6, atol=0)


def tokens_measured(report):
    """Returns the number of measured tokens of each microbatch."""
    return [len(weights) for weights in report.weights]


def loss_of(model):
    """Returns the loss of a forward of the model over the batch."""
    outputs = model(**BATCH)
    return outputs.loss


def logits_and_labels(model):
    """Returns the logits of every position and the labels that they predict, without the dimension of rows."""
    predictions = model(BATCH['input_ids']).logits[:, :-1]
    next_labels = BATCH['labels'][:, 1:]
    return predictions.flatten(0, 1), next_labels.flatten()


def stock_split():
    """Returns data that Composer itself splits."""

    def count_rows(batch):
        return len(batch['input_ids'])

    return DataSpec(loader(BATCH), get_num_samples_in_batch=count_rows)


def exact_split():
    """Returns data that the package splits."""
    return token_data_spec(loader(BATCH))


def report_of_run(model, data, **options):
    """Returns the report of one step in microbatches of three rows."""
    with measure_token_weights(model) as report:
        train(model, data, microbatch_size=3, **options)
    return report


def test_stock_composer_weights():
    """A microbatch weighs as many samples as it has, however many tokens they have."""
    model = hugging_face(one_layer_model())

    report = report_of_run(model, stock_split())

    targets_of_microbatches = [NUM_TARGETS[0:3], NUM_TARGETS[3:6], NUM_TARGETS[6:8]]
    expected = []
    for num_targets in targets_of_microbatches:
        share_of_rows = len(num_targets) / len(LENGTHS)
        num_tokens = sum(num_targets)
        weight = share_of_rows / num_tokens
        expected.append(torch.full((num_tokens,), weight))
    assert_weights(report, *expected)

    # Of 93 tokens the second microbatch has 56, for 3/8 of the weight. The third one has 12, for 2/8.
    weights_over_mean = torch.cat(report.weights) * TOTAL
    smallest, largest = weights_over_mean.aminmax()
    assert float(smallest) == pytest.approx(0.62, abs=0.005)
    assert float(largest) == pytest.approx(1.94, abs=0.005)
    assert report.spread == pytest.approx(1.9375 / 0.62277, rel=1e-4)
    assert 'do NOT weigh the same, to 2e-05: largest over smallest weight 3.11' in str(report)


@pytest.mark.parametrize('dropout', [0.0, 0.1])
@pytest.mark.parametrize('split', [stock_split, exact_split])
def test_algorithm_gives_equal_weights(split, dropout):
    model = one_layer_model(attention_dropout=dropout).train()
    composer_model = hugging_face(model)

    report = report_of_run(composer_model, split(), algorithms=[TokenAccumulation()])

    assert_all_weights(report, EQUAL_WEIGHTS)
    assert report.spread < 1 + 1e-5
    assert report.residual < 1e-6
    assert 'tokens weigh the same' in str(report)


def test_square_root_weights():
    """A token of a row with n targets weighs 1 / sqrt(n)."""
    model = hugging_face(one_layer_model())
    algorithm = TokenAccumulation(token_weights='sqrt')

    report = report_of_run(model, stock_split(), algorithms=[algorithm])

    targets_of_row = torch.tensor(NUM_TARGETS)
    weight_of_row = targets_of_row.pow(-0.5)
    weights = weight_of_row.repeat_interleave(targets_of_row)
    assert_all_weights(report, weights / weights.sum())


@pytest.mark.parametrize('signed', [False, True], ids=['positive', 'advantages'])
def test_signed_weights_of_weighted_loss(signed):
    model = one_layer_model()
    generator = torch.Generator().manual_seed(0)
    num_positions = BATCH['labels'][:, 1:].numel()
    weights = 0.1 + torch.rand(num_positions, generator=generator)
    if signed:
        zeros_and_ones = torch.randint(2, weights.shape, generator=generator)
        weights *= 2 * zeros_and_ones - 1

    with measure_token_weights(model) as report:
        logits, labels = logits_and_labels(model)
        losses = F.cross_entropy(logits, labels, reduction='none')
        weighted_losses = losses * weights
        weighted_losses.sum().backward()

    expected_weights = weights[labels != -100]
    assert_weights(report, expected_weights)
    sizes = expected_weights.abs()
    expected_spread = float(sizes.max() / sizes.min())
    assert report.spread == pytest.approx(expected_spread, rel=1e-5)


def test_measuring_changes_no_gradient():
    """Two measurements at once measure the same."""
    model = one_layer_model()
    loss_of(model).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    with measure_token_weights(model) as outer, measure_token_weights(model) as inner:
        loss_of(model).backward()

    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert tokens_measured(inner) == [TOTAL]
    assert torch.equal(outer.weights[0], inner.weights[0])


def test_label_with_one_rival():
    """Both entries of the gradient are equal except for round-off. The wrong one would give a negative weight."""
    # The logits of every id: only the first two labels are likely.
    same_logits = torch.tensor([0.0, 0.85, -20.0, -20.0])
    model = torch.nn.Embedding(4, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.copy_(same_logits)
    ids = torch.zeros(1, 3, dtype=torch.long)
    labels = torch.tensor([0, 0, 1])

    with measure_token_weights(model) as report:
        logits = model(ids)[0].float()
        loss = F.cross_entropy(logits, labels, reduction='sum')
        loss.backward()

    assert_weights(report, torch.ones(3), rtol=2e-2)


def test_certain_tokens_are_left_out():
    """If the model is sure of a label, its gradient is too small to measure a weight."""
    model = torch.nn.Embedding(4, 4)
    with torch.no_grad():
        model.weight.copy_(torch.eye(4) * 12)  # each id predicts itself
    ids = torch.tensor([[0, 1, 2, 3]])
    labels = torch.tensor([0, 1, 3, 0])

    with measure_token_weights(model) as report:
        logits = model(ids)[0]
        loss = F.cross_entropy(logits, labels)
        loss.backward()

    # The loss is the mean of four. The model is sure of the first two labels, so only the others are measured.
    assert_weights(report, torch.full((2,), 0.25))
    assert '2 left out: 1 - p of the label below 0.001' in str(report)


@pytest.mark.parametrize('other_loss', [with_z_loss, smoothed])
def test_other_loss_shows_as_residual(other_loss):
    """A term may give positions without a label a gradient. They are not counted as tokens."""
    model = one_layer_model()

    with measure_token_weights(model) as report:
        logits, labels = logits_and_labels(model)
        loss = other_loss(logits, labels)
        loss.backward()

    assert 1e-3 < report.residual < 0.2
    assert tokens_measured(report) == [TOTAL]
    # The weights are equal as far as the residual tells.
    assert report.spread > 1.0001
    assert 'tokens weigh the same, to ' in str(report)
    assert 'to 2e-05' not in str(report)


def run_in_bfloat16(model):
    model.bfloat16()
    loss_of(model).backward()


def run_in_autocast(model):
    with torch.autocast('cpu', torch.bfloat16):
        loss = loss_of(model)
    loss.backward()


def run_by_accelerate(model):
    """The forward returns a copy of the logits. The loss was computed of the logits themselves."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    autocast_forward = torch.autocast('cpu', torch.bfloat16)(model.forward)
    model.forward = convert_outputs_to_fp32(autocast_forward)
    loss_of(model).backward()


@pytest.mark.parametrize('run', [run_in_bfloat16, run_in_autocast, run_by_accelerate])
def test_short_floats_up_to_round_off(run):
    model = one_layer_model()

    with measure_token_weights(model) as report:
        run(model)

    assert_weights(report, EQUAL_WEIGHTS, rtol=1e-2)
    assert 1e-4 < report.residual < 1e-2
    assert 'tokens weigh the same' in str(report)


class NextToken(torch.nn.Module):
    """Returns logits, or logits and loss, as models of plain loops often do."""

    def __init__(self, returns_loss):
        super().__init__()
        self.module = torch.nn.Embedding(64, 8)  # wrappers such as DDP keep the model under this name
        self.head = torch.nn.Linear(8, 64)
        self.returns_loss = returns_loss

    def forward(self, input_ids, attention_mask, labels):
        logits = self.head(self.module(input_ids))
        if self.returns_loss:
            return logits, next_token_loss(logits, labels)
        return logits


@pytest.mark.parametrize('returns_loss', [True, False])
def test_plain_modules(returns_loss):
    model = NextToken(returns_loss)

    with measure_token_weights(model) as report:
        outputs = model(**BATCH)
        if returns_loss:
            _, loss = outputs
        else:
            loss = next_token_loss(outputs, BATCH['labels'])
        loss.backward()

    assert_weights(report, EQUAL_WEIGHTS)


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=['q_proj'])
    return get_peft_model(model, config)


def compiled_before(model):
    """Its graph was made before the hooks of the measurement are there."""
    compiled = torch.compile(model, backend='aot_eager')
    loss_of(compiled).backward()
    return compiled


def checkpointed(model):
    model.train().gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize(
    'wrap',
    [
        with_lora,
        pytest.param(compiled_before, marks=pytest.mark.slow),
        checkpointed,
        hugging_face,
    ],
)
def test_wrapped_models_are_measured_once(wrap):
    model = wrap(one_layer_model())

    with measure_token_weights(model) as report:
        if wrap is hugging_face:
            outputs = model(BATCH)
        else:
            outputs = model(**BATCH)
        outputs.loss.backward()

    assert_weights(report, EQUAL_WEIGHTS)
    assert 'had no gradient' not in str(report)


def test_forwards_without_gradient_are_counted():
    """One forward has one backward, one has two, one has none. An evaluation is not counted."""
    model = one_layer_model()

    with measure_token_weights(model) as report:
        half_loss = loss_of(model) / 2
        second_loss = loss_of(model)
        (second_loss + half_loss).backward(retain_graph=True)
        half_loss.backward()
        with torch.no_grad():
            model(**BATCH)
        model(**BATCH)

    sums_of_weights = [weights.mean().item() * TOTAL for weights in report.weights]
    # The two halves of the first forward are added.
    assert sums_of_weights == pytest.approx([1.0, 1.0], abs=1e-5)
    assert '1 of 3 forwards had no gradient at their logits' in str(report)


class FusedLoss(torch.nn.Module):
    """Returns a loss, but no logits."""

    def __init__(self):
        super().__init__()
        self.llama = one_layer_model()

    def forward(self, **batch):
        states = self.llama.model(batch['input_ids'])[0]
        return {'loss': states.square().mean(), 'logits': None}


def do_nothing(model):
    pass


def forward(model):
    return model(**BATCH)


def evaluate(model):
    with torch.no_grad():
        model(**BATCH)


def train_without_logits(model):
    outputs = model(**BATCH)
    outputs['loss'].backward()


def train_detached(model):
    logits, labels = logits_and_labels(model)
    leaf = logits.detach().requires_grad_()
    loss = F.cross_entropy(leaf, labels)
    loss.backward()


@pytest.mark.parametrize(
    ('make', 'run', 'reason'),
    [
        pytest.param(one_layer_model, do_nothing, 'made no forward with gradients', id='nothing'),
        pytest.param(one_layer_model, copy.deepcopy, 'made no forward with gradients', id='copy'),
        pytest.param(one_layer_model, evaluate, 'made no forward with gradients', id='no graph'),
        pytest.param(FusedLoss, train_without_logits, 'hold no logits', id='no logits'),
        pytest.param(one_layer_model, forward, 'no gradient came to its logits', id='no backward'),
        pytest.param(one_layer_model, train_detached, 'no gradient came to its logits', id='detached'),
    ],
)
def test_nothing_measured_is_refused(make, run, reason):
    model = make()
    class_name = type(model).__name__

    message = rf'No token weight was measured of {class_name}: .*{reason}'
    with pytest.raises(RuntimeError, match=message), measure_token_weights(model):
        run(model)

    assert num_hooks(model) == 0


def test_error_inside_removes_all_hooks():
    model = one_layer_model()

    def fail():
        assert num_hooks(model) > 0
        raise KeyError('inside')

    with pytest.raises(KeyError, match='inside'), measure_token_weights(model):
        fail()

    assert num_hooks(model) == 0


def test_backwards_after_the_end():
    """A copy has copies of the hooks, as the average of an EMA. After the end they must not add to the report."""
    model = one_layer_model()

    with measure_token_weights(model) as report:
        copied_model = copy.deepcopy(model)
        late_loss = loss_of(model)
        loss_of(model).backward()
    late_loss.backward()
    loss_of(copied_model).backward()

    assert len(report.weights) == 1
    assert '1 of 2 forwards had no gradient' in str(report)


def test_infinite_gradients_are_reported():
    model = one_layer_model()

    with measure_token_weights(model) as report:
        infinite_loss = loss_of(model) * torch.nan
        infinite_loss.backward()
        loss_of(model).backward()

    assert math.isnan(report.spread)
    assert math.isnan(report.residual)
    assert 'do NOT weigh the same' in str(report)


def test_tokens_without_a_number_are_named():
    """They are compared with the median of the others."""
    model = one_layer_model()

    with measure_token_weights(model) as report:
        for factor in (1.0, 1.0, math.nan):
            logits, labels = logits_and_labels(model)
            loss = F.cross_entropy(logits, labels)
            (loss * factor).backward()

    expected_start = f'forward 3: {TOTAL} of {TOTAL} tokens with loss weigh nan to nan'
    assert report.unequal_tokens().startswith(expected_start)


def test_fused_head_with_log_probabilities():
    """TRL's fused head returns no logits. The gradient by a label's log-probability is the weight of the token."""

    class FusedHead(FusedLoss):
        def forward(self, **batch):
            labels = batch['labels'][:, 1:]
            has_label = labels != -100
            states = self.llama.model(batch['input_ids'])[0]
            logits = self.llama.lm_head(states)[:, :-1]
            label_ids = labels.clamp(min=0)[..., None]
            log_probs_of_ids = logits.log_softmax(dim=-1)
            log_probs = log_probs_of_ids.gather(-1, label_ids)[..., 0]
            return SimpleNamespace(log_probs=log_probs * has_label, label_mask=has_label)

    model = FusedHead()

    with measure_token_weights(model) as report:
        outputs = model(**BATCH)
        loss = -outputs.log_probs.sum() / 7
        loss.backward()

    expected_weights = torch.full((TOTAL,), 1 / 7)
    torch.testing.assert_close(report.weights, [expected_weights])


def test_log_probabilities_without_a_mask():
    """Those of a CTC loss, for example, are not of labels. So their gradient is not the weight of a token."""

    class OtherHead(FusedLoss):
        def forward(self, **batch):
            states = self.llama.model(batch['input_ids'])[0]
            logits = self.llama.lm_head(states)
            log_probs_of_ids = logits.log_softmax(dim=-1)
            return SimpleNamespace(log_probs=log_probs_of_ids[..., 0])

    model = OtherHead()

    def train_by_log_probs():
        outputs = model(**BATCH)
        outputs.log_probs.sum().backward()

    with pytest.raises(RuntimeError, match='its outputs hold no logits'), measure_token_weights(model):
        train_by_log_probs()


def test_report_without_tokens():
    """No token is measured before the first backward, nor if the gradient is 0."""
    model = one_layer_model()

    with measure_token_weights(model) as report:
        assert 'forward' in str(report)
        assert math.isnan(report.spread)
        assert report.unequal_tokens() == ''
        zero_loss = 0 * loss_of(model)
        zero_loss.backward()

    assert report.residual == 0
    assert tokens_measured(report) == [0]


class Sentinel:
    """An object that is freed together with its holder."""


def test_graph_is_freed_with_logits():
    """The report keeps neither the logits nor their graph."""
    model = one_layer_model()

    with measure_token_weights(model) as report:
        outputs = model(**BATCH)
        outputs.loss.backward()

        # From here on only the graph of the logits holds the sentinel.
        sentinel = Sentinel()
        outputs.logits.grad_fn.metadata['sentinel'] = sentinel
        reference = weakref.ref(sentinel)
        del sentinel
        assert reference() is not None

        del outputs
        assert reference() is None

    assert len(report.weights) == 1


@pytest.mark.slow
def test_spread_over_two_ranks():
    results = launch_json('tests/ranks/measured_weights.py', ranks=2)

    # Rank 0 has rows of 4 and 8 targets, rank 1 has one of 2. In a mean of means the tokens of one rank weigh the same.
    assert results['plain']['own'] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert results['plain']['spread'] == pytest.approx([6.0, 6.0], rel=1e-5)
    assert results['ours']['spread'] == pytest.approx([1.0, 1.0], abs=1e-5)
    for text in results['plain']['printed']:
        assert 'on this rank' in text

    assert results['faults'] == ''
    expected_start = 'Each rank has other gradients at the step of the optimizer, or at the end'
    assert results['faults without averages'].startswith(expected_start)
    assert results['faults without a step'].startswith(expected_start)
    assert results['nothing on rank 1']['spread'] == pytest.approx([1.0, 1.0], abs=1e-5)
