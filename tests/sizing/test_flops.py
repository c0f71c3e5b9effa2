# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Operations of a traced model beside those counted by hand."""

from __future__ import annotations

from functools import partial

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, LlavaForConditionalGeneration

from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.sizing import count_flops
from examples.digits import DigitsDataset, build_digits_processor, digits_model_config
from tests.support.text import text_rows


def llama_by_hand(config, rows, width):
    """Two operations an entry of a product forward, and four backward."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    weights = layers * (4 * hidden * hidden + 3 * hidden * inner) + hidden * config.vocab_size
    attention = layers * 2 * hidden * rows * width * width  # queries by keys, and weights by values
    return 6 * (weights * rows * width + attention)


def test_llama_costs_as_counted_by_hand():
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
        attn_implementation='eager',
    )
    flops = count_flops(partial(LlamaForCausalLM, config), config, text_rows([(9, 4), (20, 9)]), width=64)
    for rows, width in ((1, 7), (8, 128), (3, 2048)):
        assert flops.text(rows, width) == pytest.approx(llama_by_hand(config, rows, width), rel=0.01)
    assert flops.residual < 1e-6


@pytest.mark.slow
def test_demo_costs_as_counted_by_hand():
    """A vision encoder as well, whose last layer is not its own: the projector reads the one before the last norm."""
    processor = build_digits_processor()
    config = digits_model_config(processor)
    config._attn_implementation = 'eager'
    dataset = DigitsDataset(processor, num_samples=30)
    samples = [dataset[index] for index in range(30)]
    build = partial(LlavaForConditionalGeneration._from_config, config, attn_implementation='eager')
    flops = count_flops(build, config, samples, width=100)
    vision = config.vision_config
    side = vision.image_size // vision.patch_size
    patches, hidden = side**2, vision.hidden_size
    positions, inner, text = patches + 1, vision.intermediate_size, config.text_config.hidden_size
    block = positions * (4 * hidden * hidden + 2 * hidden * inner) + 2 * hidden * positions**2
    # Pixels need no gradient: the patches' weights have one product backward, not two.
    image = 6 * vision.num_hidden_layers * block + 4 * patches * hidden * 3 * vision.patch_size**2
    image += 6 * patches * (hidden * text + text * text)
    batch = VisionLanguageCollator(processor)(samples)
    assert flops.media(batch) == pytest.approx(sum(batch['num_images']) * image, rel=0.01)
    for rows, width in ((4, 60), (16, 100)):
        assert flops.text(rows, width) == pytest.approx(llama_by_hand(config.text_config, rows, width), rel=0.01)
    assert flops.residual < 1e-6
