# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Methods of PEFT, as ``docs/limits.md`` names them, compared with one plain forward over the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from composer_tokacc.refusals import NotExactError
from tests.support.text import RAGGED, one_layer_model, ragged_batch
from tests.support.training import TOLERANCE, fit, hugging_face, reference_gradients, relative_error

peft = pytest.importorskip('peft')

CAUSAL = 'CAUSAL_LM'
CAN_TIE_WEIGHTS = 'ensure_weight_tying' in inspect.signature(peft.LoraConfig).parameters


def dora() -> Any:
    return peft.LoraConfig(task_type=CAUSAL, target_modules=['q_proj'], use_dora=True)


def adalora() -> Any:
    return peft.AdaLoraConfig(task_type=CAUSAL, target_modules=['q_proj'], total_step=100)


def lora_of_tied_weights() -> Any:
    """Also trains the embedding. In PEFT 0.21 the wrapper of the head says that it has as many outputs as inputs."""
    return peft.LoraConfig(
        task_type=CAUSAL, target_modules=['q_proj'], modules_to_save=['embed_tokens'], ensure_weight_tying=True
    )


def peft_model(config: Any, *, is_tied: bool = False) -> Any:
    """Returns a model with this method. PEFT sets many trained weights to 0. Here they get random values."""
    base_model = one_layer_model(tie_word_embeddings=is_tied)
    model = peft.get_peft_model(base_model, config)
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


def assert_is_one_forward(model: Any, tolerance: float = 2 * TOLERANCE) -> None:
    """Compares the gradient of a step in microbatches of two rows with one forward over the batch in float64."""
    batch = ragged_batch(RAGGED)
    expected, _ = reference_gradients(model, batch)
    recorder = fit(composer_model(model), batch)
    assert relative_error(recorder.gradients, expected) < tolerance


@pytest.mark.parametrize('make_config', [dora, adalora])
def test_added_weights(make_config: Callable[[], Any]) -> None:
    model = peft_model(make_config())
    assert_is_one_forward(model)


@pytest.mark.skipif(not CAN_TIE_WEIGHTS, reason='needs a newer PEFT')
def test_tied_weights() -> None:
    model = peft_model(lora_of_tied_weights(), is_tied=True)
    assert_is_one_forward(model)


def test_head_that_is_converted() -> None:
    """PEFT adds the adapter of a model in bfloat16 in float32, and converts the sum."""
    config = peft.LoraConfig(task_type=CAUSAL, target_modules=['lm_head'], init_lora_weights=False)
    base_model = one_layer_model().bfloat16()
    model = peft.get_peft_model(base_model, config)
    model.train()
    assert_is_one_forward(model, tolerance=2e-2)


def test_learned_prefix() -> None:
    config = peft.PrefixTuningConfig(task_type=CAUSAL, num_virtual_tokens=5)
    model = peft_model(config)
    assert_is_one_forward(model)


def test_virtual_tokens_are_refused() -> None:
    config = peft.PromptTuningConfig(task_type=CAUSAL, num_virtual_tokens=5)
    model = composer_model(peft_model(config))
    batch = ragged_batch(RAGGED)
    with pytest.raises(NotExactError, match='as wide as the labels'):
        fit(model, batch)
