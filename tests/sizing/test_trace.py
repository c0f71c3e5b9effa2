# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The memory that a traced step reports, compared with bytes counted by hand."""

from __future__ import annotations

import resource
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from benchmarks.models import made_up_sample
from composer_tokacc.sizing import GIB, BatchShape, StaticBytes, calibrate_fake
from composer_tokacc.sizing.memory_model import LARGE_RESIDUAL
from composer_tokacc.sizing.trace import MicrobatchPeaks, StepTracer, _traced_memory

HIDDEN = 64
INNER = 96
LAYERS = 2
VOCABULARY = 200


def small_config(**changes: object) -> LlamaConfig:
    """Returns the configuration of the small Llama, with these changes."""
    settings = {
        'hidden_size': HIDDEN,
        'intermediate_size': INNER,
        'num_hidden_layers': LAYERS,
        'num_attention_heads': 4,
        'vocab_size': VOCABULARY,
        'use_cache': False,
        **changes,
    }
    return LlamaConfig(**settings)


def builder(config: LlamaConfig | LlavaConfig, *, checkpointing: bool = False) -> Callable[[], PreTrainedModel]:
    """Returns a function that makes a Llama or LLaVA in training mode."""
    is_llava = isinstance(config, LlavaConfig)
    model_class = LlavaForConditionalGeneration if is_llava else LlamaForCausalLM

    def build() -> PreTrainedModel:
        model = model_class(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
        return model

    return build


MATRICES_OF_BLOCK = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
BLOCK = MATRICES_OF_BLOCK + 2 * HIDDEN
"""Weights of a block."""
OUTSIDE = 2 * VOCABULARY * HIDDEN + HIDDEN
"""Weights outside of the blocks: embeddings, head and last norm."""
ALL_WEIGHTS = LAYERS * BLOCK + OUTSIDE


def tracer(config: LlamaConfig, *, checkpointing: bool = False, **options: Any) -> StepTracer:
    """Returns a tracer of steps of a model, made with a sample of 10 tokens."""
    build = builder(config, checkpointing=checkpointing)
    return StepTracer(build, made_up_sample(config, 10), **options)


@pytest.fixture(scope='module')
def static() -> StaticBytes:
    """Returns the bytes of the small model, whose weights are all trained."""
    return tracer(small_config()).static


def test_parameters_gradients_and_states_by_hand(static):
    assert static.parameters == 4 * ALL_WEIGHTS
    assert static.gradients == 4 * ALL_WEIGHTS
    # Two moments, and a step counter of four bytes for each of 9 tensors a block and 3 outside.
    assert static.optimizer == 8 * ALL_WEIGHTS + 4 * (9 * LAYERS + 3)
    assert static.block == BLOCK
    assert static.outside == OUTSIDE
    assert static.trained_outside == OUTSIDE


def test_frozen_parts_have_no_gradient():
    config = small_config()
    build_trained = builder(config)

    def build_frozen():
        model = build_trained()
        model.get_input_embeddings().requires_grad_(False)
        return model

    static = StepTracer(build_frozen, made_up_sample(config, 10)).static

    frozen = VOCABULARY * HIDDEN
    assert static.gradients == static.parameters - 4 * frozen
    assert static.optimizer < 2 * static.parameters - 8 * frozen + 200
    assert static.trained_outside == static.outside - frozen
    assert static.trained_block == static.block


class ScaledByNorm(torch.optim.Optimizer):
    """Reads a norm, as Adafactor does. Its state has a number for each row of a weight."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group['params']:
                norm = parameter.grad.norm().item()
                self.state[parameter]['rows'] = parameter.new_zeros(len(parameter))
                parameter.sub_(parameter.grad / max(1.0, norm))


def test_optimizer_that_reads_values():
    static = tracer(small_config(), make_optimizer=ScaledByNorm).static
    # Four matrices of attention, three of the feed-forward part, and two norms.
    rows_of_block = 4 * HIDDEN + (2 * INNER + HIDDEN) + 2 * HIDDEN
    rows_outside = 2 * VOCABULARY + HIDDEN
    assert static.optimizer == 4 * (LAYERS * rows_of_block + rows_outside)


def test_pixels_of_text_do_not_count():
    """Token weights are floats, as pixels are."""
    text = BatchShape(rows=1, width=1024, pixel_bytes=4096)
    image = BatchShape(rows=1, width=1024, image_tokens=16, pixel_bytes=12288)
    bytes_of_parts = {'text': 1000, 'logits': 10, 'vision': 10, 'weights': 0}
    peaks = [MicrobatchPeaks(shape, {'blocks': bytes_of_parts}) for shape in (text, image)]
    # The batches that are measured are called 0 and 1.
    step = SimpleNamespace(
        measure=peaks.__getitem__,
        static=None,
        strategy='ddp',
        model=SimpleNamespace(config=small_config()),
    )

    memory = _traced_memory(lambda first, logits: step, [0, 1], 'all', has_mask=True)

    assert memory.pixel_bytes_per_image_token == 12288 / 16


def test_ranks_share_what_fsdp_shards(static):
    shared = static.terms('fsdp', 8)
    assert shared['parameters'] == 4 * ALL_WEIGHTS / 8
    assert shared['gradients'] == 4 * ALL_WEIGHTS / 8
    # Outside of the blocks: weights and gradients. Of blocks: weights of two, gradients of one, and their sum.
    assert shared['gathered by FSDP'] == 4 * (2 * OUTSIDE + 4 * BLOCK)


def test_buckets_of_several_ddp_ranks(static):
    assert 'DDP buckets' not in static.terms('ddp', 1)
    assert static.terms('ddp', 2)['DDP buckets'] == 4 * ALL_WEIGHTS


def test_bad_ranks_and_strategies_are_refused(static):
    with pytest.raises(ValueError, match='`num_ranks` must be a positive integer, got: 0'):
        static.terms('ddp', 0)
    with pytest.raises(ValueError, match=r"`strategy` must be .*, got: 'tp'"):
        tracer(small_config(), strategy='tp')


def test_autocast_copies_every_weight_once():
    config = small_config()
    sample = made_up_sample(config, 40)
    step = StepTracer(builder(config), sample, precision='amp_bf16')

    memory = step.measure(sample).phases['loss']

    matrices = LAYERS * MATRICES_OF_BLOCK + VOCABULARY * HIDDEN
    assert memory['weights'] == 2 * matrices  # the embedding is looked up, not multiplied


def highest_peak(build: Callable[[], PreTrainedModel]) -> int:
    """Returns the most bytes in any phase of a step of 40 tokens."""
    sample = made_up_sample(small_config(), 40)
    phases = StepTracer(build, sample).measure(sample).phases
    return max(sum(bytes_of_parts.values()) for bytes_of_parts in phases.values())


def test_model_that_names_no_embeddings():
    """Its phases end at other moments. The highest peak is the same."""
    build_plain = builder(small_config())

    def raise_error():
        raise NotImplementedError

    def build_without_name():
        model = build_plain()
        model.get_input_embeddings = raise_error
        return model

    assert highest_peak(build_without_name) == highest_peak(build_plain)


def test_type_of_the_residual_stream():
    """Checkpointing keeps the input of each block: in float32 under DDP, in two bytes under FSDP."""
    config = small_config()
    sample = made_up_sample(config, 40)
    build = builder(config, checkpointing=True)

    memory = {}
    for strategy in ('ddp', 'fsdp'):
        step = StepTracer(build, sample, precision='amp_bf16', strategy=strategy)
        assert step.static.parameters == 4 * ALL_WEIGHTS
        memory[strategy] = step.measure(sample).phases['loss']

    assert memory['ddp']['text'] - memory['fsdp']['text'] >= LAYERS * 40 * HIDDEN * 2
    assert memory['ddp']['weights'] > 0
    assert memory['fsdp']['weights'] == 0


@pytest.mark.slow
def test_recomputed_blocks_see_first_types():
    """Layer norms are float32 under a GPU's autocast, and under FSDP their inputs are not."""
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = LlavaConfig(vision_config=vision, text_config=small_config(), image_token_index=VOCABULARY - 1)
    sample = made_up_sample(config, 20, num_images=1)
    build = builder(config, checkpointing=True)
    step = StepTracer(build, sample, precision='amp_bf16', strategy='fsdp')

    memory = step.measure(sample).phases['blocks']

    assert memory['vision'] > 0


def test_fsdp_computes_with_cast_weights():
    """Newer versions of torch swap the tensors of fake parameters, although gradients refer to them."""
    config = small_config(tie_word_embeddings=True)
    sample = made_up_sample(config, 10)
    step = StepTracer(builder(config), sample, precision='amp_bf16', strategy='fsdp')
    types = {parameter.dtype for parameter in step.model.parameters()}
    assert types == {torch.bfloat16}
    assert step.model.lm_head.weight is step.model.model.embed_tokens.weight

    memory = step.measure(sample).phases['head']

    assert memory['weights'] == 0


NUM_TEXT_BLOCKS = 3
NUM_VISION_BLOCKS = 3


def wide_llava() -> LlavaConfig:
    """Returns LLaVA-1.5 7B with a tenth of its blocks."""
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_hidden_layers=NUM_VISION_BLOCKS,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    )
    text = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_attention_heads=32,
        num_hidden_layers=NUM_TEXT_BLOCKS,
        vocab_size=32064,
        use_cache=False,
    )
    return LlavaConfig(vision_config=vision, text_config=text, image_token_index=32000)


def weights_with_gradient(model: LlavaForConditionalGeneration) -> int:
    """Returns how many weights of the wide LLaVA have a gradient.

    None reaches the last block and the last norm of the vision encoder: features are taken one block earlier.
    """
    last_block = f'layers.{NUM_VISION_BLOCKS - 1}.'
    num_weights = 0
    for name, parameter in model.named_parameters():
        is_after_features = last_block in name or 'post_layernorm' in name
        if not ('vision' in name and is_after_features):
            num_weights += parameter.numel()
    return num_weights


def most_resident_bytes() -> int:
    """Returns the largest memory that this process has had until now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_maxrss * 1024


@pytest.mark.slow
def test_llava_7b_without_a_gpu():
    config = wide_llava()
    samples = [made_up_sample(config, 60), made_up_sample(config, 90, num_images=1)]
    build = builder(config, checkpointing=True)
    bytes_before = most_resident_bytes()

    memory = calibrate_fake(build, config, samples, width=2048, precision='amp_bf16', strategy='fsdp')
    shape = BatchShape(rows=4, width=1024, image_tokens=4 * 576, pixel_bytes=4 * 3 * 336 * 336 * 4)
    terms = memory.terms(shape, num_ranks=8)

    assert most_resident_bytes() - bytes_before < 2 * GIB, 'the weights alone would be 3.5 GiB'
    assert memory.residual < LARGE_RESIDUAL
    with torch.device('meta'):
        model = LlavaForConditionalGeneration(config)
    weights = model.num_parameters()
    trained_weights = weights_with_gradient(model)
    assert memory.static.parameters == 4 * weights
    assert memory.static.gradients == 4 * trained_weights
    assert memory.static.optimizer == pytest.approx(8 * trained_weights, rel=1e-4)
    assert terms['parameters'] == pytest.approx(4 * weights / 8)
    # Every block keeps its input, 4096 numbers a token, in the two bytes that FSDP casts to. One block, which is
    # computed again, keeps about four times as much in addition.
    block_input = 4096 * 2 * shape.tokens
    bytes_of_recomputed_block = terms['text activations'] - NUM_TEXT_BLOCKS * block_input
    assert 2 * block_input < bytes_of_recomputed_block < 6 * block_input
