# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Operations of a traced model, compared with operations counted by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlavaForConditionalGeneration

from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.sizing import count_flops
from composer_tokacc.sizing.trace import StepTracer
from examples.digits import DigitsDataset, build_digits_processor, digits_model_config
from tests.support.text import text_rows


def llama_by_hand(config, rows, width):
    """Operations of a step: two for each entry of a matrix product in the forward pass, four in the backward pass."""
    hidden = config.hidden_size
    layers = config.num_hidden_layers
    layer_weights = 4 * hidden**2 + 3 * hidden * config.intermediate_size
    weights = layers * layer_weights + hidden * config.vocab_size
    attention = layers * 2 * hidden * rows * width**2  # queries by keys, and weights by values
    return 6 * (weights * rows * width + attention)


def clip_image_by_hand(config):
    """Operations of a step for one image: the patch embedding, all layers but the last norm, and the projector."""
    vision = config.vision_config
    hidden = vision.hidden_size
    text_hidden = config.text_config.hidden_size
    patches = (vision.image_size // vision.patch_size) ** 2
    positions = patches + 1
    layer_weights = 4 * hidden**2 + 2 * hidden * vision.intermediate_size
    layer = positions * layer_weights + 2 * hidden * positions**2
    # Pixels need no gradient: the backward pass of the patch embedding has one product, not two.
    embedding = 4 * patches * hidden * 3 * vision.patch_size**2
    projector = 6 * patches * (hidden * text_hidden + text_hidden**2)
    return embedding + 6 * vision.num_hidden_layers * layer + projector


LLAMA = LlamaConfig(
    vocab_size=500,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
    attn_implementation='eager',
)
build_llama = partial(LlamaForCausalLM, LLAMA)


@pytest.fixture(scope='module')
def flops_of_llama():
    samples = text_rows([(9, 4), (20, 9)])
    return count_flops(build_llama, LLAMA, samples, width=64)


def test_llama_costs_as_counted_by_hand(flops_of_llama):
    for rows, width in ((1, 7), (8, 128), (3, 2048)):
        expected = llama_by_hand(LLAMA, rows, width)
        assert flops_of_llama.text(rows, width) == pytest.approx(expected, rel=0.01)
    assert flops_of_llama.residual < 1e-6


def test_logits_only_at_labels_cost_less(flops_of_llama):
    length = 40
    num_labels = 7
    num_logits = num_labels + 1  # the last token has logits, too, but predicts nothing
    (batch,) = text_rows([(length, num_labels)])
    step = StepTracer(build_llama, batch, on_gpu=False, logits='labels')

    flops = step.measure_flops(batch)

    saved = flops_of_llama.logits(length - num_logits)
    expected = flops_of_llama.text(1, length) - saved
    assert flops == pytest.approx(expected, rel=1e-6)


def test_samples_without_gradient_are_refused():
    """Only a projector is trained, and the samples are text."""
    config = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    samples = text_rows([(9, 4), (20, 9)])

    def build():
        model = LlamaForCausalLM(config).requires_grad_(False)
        model.projector = torch.nn.Linear(2, 2)
        return model

    with pytest.raises(ValueError, match='No gradient comes from any of the samples'):
        count_flops(build, config, samples, width=64)


@pytest.mark.slow
def test_demo_costs_as_counted_by_hand():
    """With a vision encoder. The projector reads its features before the last norm."""
    processor = build_digits_processor()
    config = digits_model_config(processor)
    config._attn_implementation = 'eager'
    dataset = DigitsDataset(processor, num_samples=30)
    samples = [dataset[index] for index in range(30)]
    batch = VisionLanguageCollator(processor)(samples)
    num_images = sum(batch['num_images'])
    build = partial(LlavaForConditionalGeneration._from_config, config, attn_implementation='eager')

    flops = count_flops(build, config, samples, width=100)

    expected_of_images = num_images * clip_image_by_hand(config)
    assert flops.media(batch) == pytest.approx(expected_of_images, rel=0.01)
    for rows, width in ((4, 60), (16, 100)):
        expected_of_text = llama_by_hand(config.text_config, rows, width)
        assert flops.text(rows, width) == pytest.approx(expected_of_text, rel=0.01)
    assert flops.residual < 1e-6
