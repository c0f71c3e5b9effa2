# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Methods of PEFT, as ``docs/limits.md`` names them, compared with one plain forward over the batch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from composer_tokacc.refusals import NotExactError
from tests.support.text import RAGGED, one_layer_model, ragged_batch
from tests.support.training import TOLERANCE, fit, hugging_face, reference_gradients, relative_error

peft = pytest.importorskip('peft')

CAUSAL = 'CAUSAL_LM'
WEIGHTS = {
    'dora': lambda: peft.LoraConfig(task_type=CAUSAL, target_modules=['q_proj'], use_dora=True),
    'adalora': lambda: peft.AdaLoraConfig(task_type=CAUSAL, target_modules=['q_proj'], total_step=100),
}
if 'ensure_weight_tying' in inspect.signature(peft.LoraConfig).parameters:
    # In PEFT 0.21 the wrapper of the head says that it has as many outputs as inputs.
    WEIGHTS['tied'] = lambda: peft.LoraConfig(
        task_type=CAUSAL, target_modules=['q_proj'], modules_to_save=['embed_tokens'], ensure_weight_tying=True
    )


def peft_model(config: Any, *, is_tied: bool = False) -> Any:
    """Returns a model in which no trained weight is 0, as many are when PEFT makes them."""
    model = peft.get_peft_model(one_layer_model(tie_word_embeddings=is_tied), config)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.train()


def composer_model(model: Any) -> Any:
    """Returns a model of Composer that passes labels on, also to a model with a learned prompt."""
    model = hugging_face(model)
    model.model_forward_args.add('labels')
    return model


def assert_is_one_forward(model: Any) -> None:
    batch = ragged_batch(RAGGED)
    expected, _ = reference_gradients(model, batch)
    recorder = fit(composer_model(model), batch)
    assert relative_error(recorder.gradients, expected) < 2 * TOLERANCE


@pytest.mark.parametrize('method', WEIGHTS)
def test_added_weights(method: str) -> None:
    assert_is_one_forward(peft_model(WEIGHTS[method](), is_tied=method == 'tied'))


def test_head_that_is_converted() -> None:
    """PEFT adds the adapter of a model in bfloat16 in float32, and converts the sum."""
    config = peft.LoraConfig(task_type=CAUSAL, target_modules=['lm_head'], init_lora_weights=False)
    model = peft.get_peft_model(one_layer_model().bfloat16(), config).train()
    batch = ragged_batch(RAGGED)
    expected, _ = reference_gradients(model, batch)
    recorder = fit(composer_model(model), batch)
    assert relative_error(recorder.gradients, expected) < 2e-2


def test_learned_prefix() -> None:
    config = peft.PrefixTuningConfig(task_type=CAUSAL, num_virtual_tokens=5)
    assert_is_one_forward(peft_model(config))


def test_virtual_tokens_are_refused() -> None:
    model = peft_model(peft.PromptTuningConfig(task_type=CAUSAL, num_virtual_tokens=5))
    with pytest.raises(NotExactError, match='as wide as the labels'):
        fit(composer_model(model), ragged_batch(RAGGED))
