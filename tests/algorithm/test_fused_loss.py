# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Models that compute their loss together with the last layer, as liger-kernel does. They return no logits."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composer.models import HuggingFaceModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from composer_tokacc import TokenAccumulation
from tests.support.launch import ROOT, environment
from tests.support.text import ONE_UNLABELLED, one_layer_model, ragged_batch
from tests.support.training import fit, gradients_of, largest, reference_gradients, relative_error


class FusedLinear(torch.autograd.Function):
    """Computes loss and gradients in its forward, from hidden states and the weights of the last layer."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # A kernel reads the numbers only. If the labels are a subclass of Tensor, the class is lost.
        labels = torch.tensor(labels.tolist())
        hidden = hidden.detach().requires_grad_()
        weight = weight.detach().requires_grad_()
        with torch.enable_grad():
            logits = F.linear(hidden, weight)
            sum_of_losses = F.cross_entropy(logits, labels, reduction='sum')
            hidden_gradient, weight_gradient = torch.autograd.grad(sum_of_losses, [hidden, weight])
        # Without labels the mean and its gradients are NaN.
        num_labels = (labels != -100).sum()
        ctx.save_for_backward(hidden_gradient / num_labels, weight_gradient / num_labels)
        return sum_of_losses.detach() / num_labels

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (loss_gradient,) = grad_outputs
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient * loss_gradient, weight_gradient * loss_gradient, None


def fused(*, logits_in_eval: bool, shift_in_training: int = 1):
    """Returns a Llama whose forward is replaced, as liger-kernel does.

    Args:
        logits_in_eval: Whether it computes logits in evaluation mode.
        shift_in_training: By how many positions it shifts labels in training mode.
    """
    model = one_layer_model()
    plain_forward = model.forward

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, use_cache=None):
        inputs: dict[str, Any] = {
            'input_ids': input_ids,
            'attention_mask': attention_mask,
            'position_ids': position_ids,
        }
        if not self.training and logits_in_eval:
            return plain_forward(**inputs, labels=labels, use_cache=use_cache)
        hidden = self.model(**inputs, use_cache=use_cache).last_hidden_state
        shift = 1
        if self.training:
            shift = shift_in_training
        num_predictions = hidden.shape[1] - shift
        predicting = hidden[:, :num_predictions].flatten(0, 1)
        targets = labels[:, shift:].flatten()
        loss = FusedLinear.apply(predicting, self.lm_head.weight, targets)
        return CausalLMOutputWithPast(loss=loss, logits=None)

    model.forward = MethodType(forward, model)
    return model.train()


@pytest.mark.parametrize(
    ('logits_in_eval', 'packing', 'microbatch_size'),
    [
        (True, False, 6),
        (True, True, 2),
        (False, False, 1),
        (False, True, 2),
    ],
)
def test_rule_is_found_without_logits(logits_in_eval, packing, microbatch_size, caplog):
    batch = ragged_batch(ONE_UNLABELLED)
    expected, _ = reference_gradients(one_layer_model(), batch)
    model = fused(logits_in_eval=logits_in_eval)
    algorithm = TokenAccumulation()

    recorder = fit(
        model,
        batch,
        packing=packing,
        microbatch_size=microbatch_size,
        algorithms=[algorithm],
    )

    assert algorithm.rule == 'causal'
    assert relative_error(recorder.gradients, expected) < 1e-6
    our_warnings = []
    for record in caplog.records:
        if record.name.startswith('composer_tokacc') and record.levelname != 'INFO':
            our_warnings.append(record.getMessage())
    assert our_warnings == []


class NamedLoss(HuggingFaceModel):
    """Returns its loss as the only term of a dict."""

    def loss(self, outputs, batch):
        return {'lm': outputs['loss']}


def test_row_without_labels_in_named_loss():
    """In a microbatch of this row the kernel would divide by zero labels."""
    batch = ragged_batch(ONE_UNLABELLED)
    expected, _ = reference_gradients(one_layer_model(), batch)
    fused_model = fused(logits_in_eval=False)
    composer_model = NamedLoss(fused_model, shift_labels=True, use_logits=True)

    recorder = fit(composer_model, batch, microbatch_size=1, loss_units={'lm': 'tokens'})

    assert recorder.logged('token_accumulation/empty_microbatches') == [1]
    assert relative_error(recorder.gradients, expected) < 1e-6


@pytest.mark.parametrize('logits_in_eval', [True, False])
def test_wrong_rule_is_refused(logits_in_eval):
    model = fused(logits_in_eval=logits_in_eval)
    batch = ragged_batch(ONE_UNLABELLED)
    with pytest.raises(RuntimeError, match="averages by 'causal'"):
        fit(model, batch, loss_tokens='unshifted')


@pytest.mark.parametrize('logits_in_eval', [True, False])
def test_loss_that_shifts_only_in_evaluation(logits_in_eval):
    model = fused(logits_in_eval=logits_in_eval, shift_in_training=0)
    batch = ragged_batch([(4, 4), (9, 9), (5, 2)])
    outputs = model(**batch)
    expected = gradients_of(model, outputs.loss)
    algorithm = TokenAccumulation()

    recorder = fit(model, batch, algorithms=[algorithm])

    assert algorithm.rule == 'unshifted'
    assert relative_error(recorder.gradients, expected) < 1e-6


@pytest.mark.parametrize('logits_in_eval', [True, False])
def test_token_weights_are_refused(logits_in_eval):
    model = fused(logits_in_eval=logits_in_eval)
    batch = ragged_batch(ONE_UNLABELLED)
    with pytest.raises(RuntimeError, match=r'made of the logits .*a fused kernel'):
        fit(model, batch, token_weights='sqrt')


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('liger_kernel') is None, reason='needs liger-kernel')
def test_liger_kernel_is_exact():
    command = [sys.executable, '-m', 'tests.algorithm.liger_on_cpu']
    variables = {**environment(), 'TRITON_INTERPRET': '1'}
    process = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    last_line = process.stdout.splitlines()[-1]
    results = json.loads(last_line)
    assert not results['has_logits']
    assert set(results['rules']) == {'causal'}
    assert len(results['errors']) == 2
    assert largest(results['errors'].values()) < 1e-6, results
    assert 'made of the logits' in results['refusal']
