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
from tests.support.launch import launch_json
from tests.support.text import collate, next_token_loss, text_model, text_rows
from tests.support.training import hugging_face, loader, train

LENGTHS = [5, 9, 14, 30, 7, 22, 11, 3]
TARGETS = [length - 1 for length in LENGTHS]  # the model shifts its labels
BATCH = collate(text_rows([(length, length) for length in LENGTHS]))
FLOAT32 = {'rtol': 3e-6, 'atol': 0}
MICROBATCHES = [slice(0, 3), slice(3, 6), slice(6, 8)]
EQUAL = torch.full((sum(TARGETS),), 1 / sum(TARGETS))


def shifted(model, batch=BATCH):
    """Logits and the labels that they predict, without the dimension of rows."""
    return model(batch['input_ids']).logits[:, :-1].flatten(0, 1), batch['labels'][:, 1:].flatten()


def stock(batch):
    return DataSpec(loader(batch), get_num_samples_in_batch=lambda batch: len(batch['input_ids']))


def fit(model, data, **options):
    with measure_token_weights(model) as report:
        train(model, data, microbatch_size=3, **options)
    return report


def test_stock_composer_weights():
    report = fit(hugging_face(text_model()), stock(BATCH))
    expected = []
    for rows in MICROBATCHES:
        share_of_rows = (rows.stop - rows.start) / len(LENGTHS)
        num_tokens = sum(TARGETS[rows])
        expected.append(torch.full((num_tokens,), share_of_rows / num_tokens))
    torch.testing.assert_close(report.weights, expected, **FLOAT32)
    relative = torch.cat(report.weights) * sum(TARGETS)
    assert relative.min().item() == pytest.approx(0.62, abs=0.005)
    assert relative.max().item() == pytest.approx(1.94, abs=0.005)
    assert report.spread == pytest.approx(1.9375 / 0.62277, rel=1e-4)
    assert 'do NOT weigh the same, to 2e-05: largest over smallest weight 3.11' in str(report)


@pytest.mark.parametrize('dropout', [0.0, 0.1])
@pytest.mark.parametrize(
    'make', [stock, lambda batch: token_data_spec(loader(batch))], ids=['stock split', 'our split']
)
def test_algorithm_gives_equal_weights(make, dropout):
    model = hugging_face(text_model(attention_dropout=dropout).train())
    report = fit(model, make(BATCH), algorithms=[TokenAccumulation()])
    torch.testing.assert_close(torch.cat(report.weights), EQUAL, **FLOAT32)
    assert report.spread < 1 + 1e-5
    assert report.residual < 1e-6
    assert 'tokens weigh the same' in str(report)


def test_square_root_weights():
    report = fit(hugging_face(text_model()), stock(BATCH), algorithms=[TokenAccumulation(token_weights='sqrt')])
    weights = torch.cat([torch.full((count,), count**-0.5) for count in TARGETS])
    torch.testing.assert_close(torch.cat(report.weights), weights / weights.sum(), **FLOAT32)


@pytest.mark.parametrize('signed', [False, True], ids=['positive', 'advantages'])
def test_signed_weights_of_weighted_loss(signed):
    model = text_model()
    generator = torch.Generator().manual_seed(0)
    with measure_token_weights(model) as report:
        logits, labels = shifted(model)
        weights = torch.rand(len(labels), generator=generator) + 0.1
        if signed:
            weights *= torch.randint(2, weights.shape, generator=generator) * 2 - 1
        (F.cross_entropy(logits, labels, reduction='none') * weights).sum().backward()
    weights = weights[labels != -100]
    torch.testing.assert_close(report.weights, [weights], **FLOAT32)
    assert report.spread == pytest.approx(float(weights.abs().max() / weights.abs().min()), rel=1e-5)


def test_measuring_changes_no_gradient():
    model = text_model()
    model(**BATCH).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with measure_token_weights(model) as report:
        model(**BATCH).loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert [len(weights) for weights in report.weights] == [sum(TARGETS)]


def test_label_with_one_rival():
    """Both entries of the gradient are equal except for round-off. The wrong one would give a negative weight."""
    model = torch.nn.Embedding(4, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([0.0, 0.85, -20.0, -20.0]))
    ids = torch.zeros(1, 3, dtype=torch.long)
    labels = torch.tensor([0, 0, 1])
    with measure_token_weights(model) as report:
        F.cross_entropy(model(ids)[0].float(), labels, reduction='sum').backward()
    torch.testing.assert_close(report.weights, [torch.ones(3)], rtol=2e-2, atol=0)


def test_certain_tokens_are_left_out():
    model = torch.nn.Embedding(4, 4)
    with torch.no_grad():
        model.weight.copy_(torch.eye(4) * 12)
    ids = torch.tensor([[0, 1, 2, 3]])
    labels = torch.tensor([0, 1, 3, 0])
    with measure_token_weights(model) as report:
        F.cross_entropy(model(ids)[0], labels).backward()
    torch.testing.assert_close(report.weights, [torch.full((2,), 0.25)], **FLOAT32)
    assert '2 left out: 1 - p of the label below 0.001' in str(report)


@pytest.mark.parametrize(
    ('term', 'residual'),
    [
        (lambda logits, labels: 1e-2 * logits.logsumexp(-1).square().mean(), 1e-3),
        (lambda logits, labels: 0.1 * F.cross_entropy(logits, labels, label_smoothing=1.0), 1e-3),
    ],
    ids=['z-loss', 'label smoothing'],
)
def test_other_loss_shows_as_residual(term, residual):
    model = text_model()
    with measure_token_weights(model) as report:
        logits, labels = shifted(model)
        (F.cross_entropy(logits, labels) + term(logits, labels)).backward()
    assert residual < report.residual < 0.2
    assert [len(weights) for weights in report.weights] == [sum(TARGETS)], (
        'a position without a label counts as a token'
    )


def in_bfloat16(model, batch):
    model.bfloat16()(**batch).loss.backward()


def in_autocast(model, batch):
    with torch.autocast('cpu', torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()


def by_accelerate(model, batch):
    """The forward returns a copy of the logits. The loss was computed of the logits themselves."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    model.forward = convert_outputs_to_fp32(torch.autocast('cpu', torch.bfloat16)(model.forward))
    model(**batch).loss.backward()


@pytest.mark.parametrize('run', [in_bfloat16, in_autocast, by_accelerate])
def test_short_floats_up_to_round_off(run):
    model = text_model()
    with measure_token_weights(model) as report:
        run(model, BATCH)
    torch.testing.assert_close(report.weights, [EQUAL], rtol=1e-2, atol=0)
    assert 1e-4 < report.residual < 1e-2
    assert 'tokens weigh the same' in str(report)


class NextToken(torch.nn.Module):
    """Returns logits, or logits and loss, as models of plain loops often do."""

    def __init__(self, returns_loss):
        super().__init__()
        self.module = torch.nn.Embedding(64, 8)  # a name under which wrappers such as DDP have the whole model
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
    torch.testing.assert_close(report.weights, [EQUAL], **FLOAT32)


def peft(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=['q_proj']))


def compiled_before(model):
    model = torch.compile(model, backend='aot_eager')
    model(**BATCH).loss.backward()
    return model


def checkpointed(model):
    model.train().gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize(
    'wrap', [peft, pytest.param(compiled_before, marks=pytest.mark.slow), checkpointed, hugging_face]
)
def test_wrapped_models_are_measured_once(wrap):
    model = wrap(text_model())
    with measure_token_weights(model) as report:
        outputs = model(BATCH) if wrap is hugging_face else model(**BATCH)
        outputs.loss.backward()
    torch.testing.assert_close(report.weights, [EQUAL], **FLOAT32)
    assert 'had no gradient' not in str(report)


def test_two_forwards_and_evaluation():
    model = text_model()
    with measure_token_weights(model) as report:
        (model(**BATCH).loss + model(**BATCH).loss / 2).backward()
        with torch.no_grad():
            model(**BATCH)
        model(**BATCH)
    relative = sorted(weights.mean().item() * sum(TARGETS) for weights in report.weights)
    assert relative == pytest.approx([0.5, 1.0], abs=1e-5)
    assert '1 of 3 forwards had no gradient at their logits' in str(report)


def test_nested_measurements_agree():
    model = text_model()
    with measure_token_weights(model) as outer, measure_token_weights(model) as inner:
        model(**BATCH).loss.backward()
    assert torch.equal(outer.weights[0], inner.weights[0])


class FusedLoss(torch.nn.Module):
    """Returns a loss, but no logits."""

    def __init__(self):
        super().__init__()
        self.llama = text_model()

    def forward(self, **batch):
        return {'loss': self.llama.model(batch['input_ids'])[0].square().mean(), 'logits': None}


@pytest.mark.parametrize(
    ('make', 'run', 'reason'),
    [
        (text_model, lambda model: None, 'made no forward with gradients'),
        (text_model, lambda model: copy.deepcopy(model).eval(), 'made no forward with gradients'),
        (text_model, lambda model: torch.no_grad()(model)(**BATCH), 'made no forward with gradients'),
        (FusedLoss, lambda model: model(**BATCH)['loss'].backward(), 'outputs hold no logits'),
        (text_model, lambda model: model(**BATCH), 'no gradient came to its logits'),
        (text_model, lambda model: shifted(model)[0].detach(), 'no gradient came to its logits'),
    ],
    ids=['no forward', 'a copy', 'no grad', 'no logits', 'no backward', 'detached'],
)
def test_nothing_measured_is_refused(make, run, reason):
    model = make()
    message = rf'No token weight was measured of {type(model).__name__}: .*{reason}'
    with pytest.raises(RuntimeError, match=message), measure_token_weights(model):
        run(model)
    assert num_hooks(model) == 0


def num_hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def test_error_inside_removes_all_hooks():
    model = text_model()

    def fail():
        assert num_hooks(model) > 0
        raise KeyError('inside')

    with pytest.raises(KeyError, match='inside'), measure_token_weights(model):
        fail()
    assert num_hooks(model) == 0


def test_copy_made_inside():
    model = text_model()
    with measure_token_weights(model) as report:
        average = copy.deepcopy(model)
        model(**BATCH).loss.backward()
    average(**BATCH).loss.backward()
    assert len(report.weights) == 1
    assert 'forwards had no gradient' not in str(report)


def test_infinite_gradients_are_reported():
    model = text_model()
    with measure_token_weights(model) as report:
        (model(**BATCH).loss * torch.nan).backward()
        model(**BATCH).loss.backward()
    assert math.isnan(report.spread)
    assert math.isnan(report.residual)
    assert 'do NOT weigh the same' in str(report)


def test_label_smoothing_keeps_weights_equal():
    model = text_model()
    with measure_token_weights(model) as report:
        logits, labels = shifted(model)
        F.cross_entropy(logits, labels, label_smoothing=0.1).backward()
    assert report.spread > 1.0001
    assert 'tokens weigh the same, to 3e-03' in str(report)


def test_fused_head_with_log_probabilities():
    """TRL's fused head returns no logits. The gradient by a label's log-probability is the weight of the token."""

    class FusedHead(FusedLoss):
        def forward(self, **batch):
            labels = batch['labels'][:, 1:]
            logits = self.llama.lm_head(self.llama.model(batch['input_ids'])[0])[:, :-1]
            log_probs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            return SimpleNamespace(log_probs=log_probs.masked_fill(labels == -100, 0), label_mask=labels != -100)

    model = FusedHead()
    with measure_token_weights(model) as report:
        (-model(**BATCH).log_probs.sum() / 7).backward()
    torch.testing.assert_close(report.weights, [torch.full((sum(TARGETS),), 1 / 7)])


def test_backward_after_the_end():
    model = text_model()
    with measure_token_weights(model) as report:
        late = model(**BATCH).loss
        model(**BATCH).loss.backward()
    late.backward()
    assert len(report.weights) == 1
    assert '1 of 2 forwards' in str(report)


def test_report_without_tokens():
    model = text_model()
    with measure_token_weights(model) as report:
        assert 'backward' in str(report)
        assert math.isnan(report.spread)
        (model(**BATCH).loss * 0).backward()
    assert report.residual == 0
    assert [len(weights) for weights in report.weights] == [0]


class Sentinel:
    """An object that is freed together with its holder."""


def test_graph_is_freed_with_logits():
    model = text_model()
    with measure_token_weights(model) as report:
        outputs = model(**BATCH)
        outputs.loss.backward()
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
    assert all('on this rank' in text for text in results['plain']['printed'])
    assert results['nothing on rank 1']['spread'] == pytest.approx([1.0, 1.0], abs=1e-5)
