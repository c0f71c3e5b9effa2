# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The memory that a traced step reports, compared with bytes counted by hand."""

from __future__ import annotations

import resource
from collections.abc import Callable
from types import SimpleNamespace

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
    sizes = {
        'hidden_size': HIDDEN,
        'intermediate_size': INNER,
        'num_hidden_layers': LAYERS,
        'num_attention_heads': 4,
        'vocab_size': VOCABULARY,
        'use_cache': False,
    }
    return LlamaConfig(**{**sizes, **changes})


def builder(config: LlamaConfig | LlavaConfig, *, checkpointing: bool = False) -> Callable[[], PreTrainedModel]:
    """Returns a function that makes a Llama or LLaVA in training mode."""
    model_class = LlavaForConditionalGeneration if isinstance(config, LlavaConfig) else LlamaForCausalLM

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


@pytest.fixture(scope='module')
def static() -> StaticBytes:
    """Bytes of the small model, whose weights are all trained."""
    config = small_config()
    return StepTracer(builder(config), made_up_sample(config, 10)).static


def test_parameters_gradients_and_states_by_hand(static: StaticBytes) -> None:
    assert static.parameters == 4 * ALL_WEIGHTS
    assert static.gradients == 4 * ALL_WEIGHTS
    # Two moments, and a step counter of four bytes for each of 9 tensors a block and 3 outside.
    assert static.optimizer == 8 * ALL_WEIGHTS + 4 * (9 * LAYERS + 3)
    assert static.block == BLOCK
    assert static.outside == OUTSIDE
    assert static.trained_outside == OUTSIDE


def test_frozen_parts_have_no_gradient() -> None:
    config = small_config()

    def build() -> PreTrainedModel:
        model = builder(config)()
        model.get_input_embeddings().requires_grad_(False)
        return model

    static = StepTracer(build, made_up_sample(config, 10)).static
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


def test_optimizer_that_reads_values() -> None:
    config = small_config()
    static = StepTracer(builder(config), made_up_sample(config, 10), make_optimizer=ScaledByNorm).static
    rows_of_block = 4 * HIDDEN + (2 * INNER + HIDDEN) + 2 * HIDDEN
    assert static.optimizer == 4 * (LAYERS * rows_of_block + 2 * VOCABULARY + HIDDEN)


def test_pixels_of_text_do_not_count() -> None:
    """Token weights are floats, as pixels are."""
    text = BatchShape(rows=1, width=1024, pixel_bytes=4096)
    image = BatchShape(rows=1, width=1024, image_tokens=16, pixel_bytes=12288)
    bytes_of_parts = {'text': 1000, 'logits': 10, 'vision': 10, 'weights': 0}
    peaks = [MicrobatchPeaks(shape, {'blocks': bytes_of_parts}) for shape in (text, image)]
    step = SimpleNamespace(
        measure=dict(enumerate(peaks)).get, static=None, strategy='ddp', model=SimpleNamespace(config=small_config())
    )
    memory = _traced_memory(lambda first, logits: step, [0, 1], 'all', has_mask=True)
    assert memory.pixel_bytes_per_image_token == 12288 / 16


def test_ranks_share_what_fsdp_shards(static: StaticBytes) -> None:
    shared = static.terms('fsdp', 8)
    assert shared['parameters'] == 4 * ALL_WEIGHTS / 8
    assert shared['gradients'] == 4 * ALL_WEIGHTS / 8
    # Outside of the blocks: weights and gradients. Of blocks: weights of two, gradients of one, and their sum.
    assert shared['gathered by FSDP'] == 4 * (2 * OUTSIDE + 4 * BLOCK)


def test_buckets_of_several_ddp_ranks(static: StaticBytes) -> None:
    assert 'DDP buckets' not in static.terms('ddp', 1)
    assert static.terms('ddp', 2)['DDP buckets'] == 4 * ALL_WEIGHTS


def test_bad_ranks_and_strategies_are_refused(static: StaticBytes) -> None:
    config = small_config()
    with pytest.raises(ValueError, match='`num_ranks` must be a positive integer, got: 0'):
        static.terms('ddp', 0)
    with pytest.raises(ValueError, match=r"`strategy` must be .*, got: 'tp'"):
        StepTracer(builder(config), made_up_sample(config, 10), strategy='tp')


def test_autocast_copies_every_weight_once() -> None:
    config = small_config()
    sample = made_up_sample(config, 40)
    run = StepTracer(builder(config), sample, precision='amp_bf16')
    memory = run.measure(sample).phases['loss']
    matrices = LAYERS * MATRICES_OF_BLOCK + VOCABULARY * HIDDEN
    assert memory['weights'] == 2 * matrices  # the embedding is looked up, not multiplied


def test_model_that_names_no_embeddings() -> None:
    """Its phases end at other moments. The highest peak is the same."""

    def raise_error() -> None:
        raise NotImplementedError

    def build() -> PreTrainedModel:
        model = builder(small_config())()
        model.get_input_embeddings = raise_error  # type: ignore[method-assign]
        return model

    def highest_peak(build: Callable[[], PreTrainedModel]) -> int:
        phases = StepTracer(build, sample).measure(sample).phases
        return max(sum(phase.values()) for phase in phases.values())

    sample = made_up_sample(small_config(), 40)
    assert highest_peak(build) == highest_peak(builder(small_config()))


def test_type_of_the_residual_stream() -> None:
    config = small_config()
    sample = made_up_sample(config, 40)
    memory = {}
    for strategy in ('ddp', 'fsdp'):
        run = StepTracer(builder(config, checkpointing=True), sample, precision='amp_bf16', strategy=strategy)
        assert run.static.parameters == 4 * ALL_WEIGHTS
        memory[strategy] = run.measure(sample).phases['loss']
    # Checkpointing keeps the input of each block: in float32 under DDP, in two bytes under FSDP.
    assert memory['ddp']['text'] - memory['fsdp']['text'] >= LAYERS * 40 * HIDDEN * 2
    assert memory['ddp']['weights'] > 0
    assert memory['fsdp']['weights'] == 0


@pytest.mark.slow
def test_recomputed_blocks_see_first_types() -> None:
    vision = {'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2, 'num_attention_heads': 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=28, patch_size=14),
        text_config=small_config(),
        image_token_index=VOCABULARY - 1,
    )
    sample = made_up_sample(config, 20, num_images=1)
    # Layer norms are float32 under a GPU's autocast, and under FSDP their inputs are not.
    build = builder(config, checkpointing=True)
    run = StepTracer(build, sample, precision='amp_bf16', strategy='fsdp')
    memory = run.measure(sample).phases['blocks']
    assert memory['vision'] > 0


def test_fsdp_computes_with_cast_weights() -> None:
    """Newer versions of torch swap the tensors of fake parameters, although gradients refer to them."""
    config = small_config(tie_word_embeddings=True)
    sample = made_up_sample(config, 10)
    run = StepTracer(builder(config), sample, precision='amp_bf16', strategy='fsdp')
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.bfloat16}
    assert run.model.lm_head.weight is run.model.model.embed_tokens.weight
    memory = run.measure(sample).phases['head']
    assert memory['weights'] == 0


NUM_TEXT_BLOCKS = 3
NUM_VISION_BLOCKS = 3


def wide_llava() -> LlavaConfig:
    """LLaVA-1.5 7B with a tenth of its blocks."""
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


def most_resident_bytes() -> int:
    """The largest memory that this process has had until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.slow
def test_llava_7b_without_a_gpu() -> None:
    config = wide_llava()
    samples = [made_up_sample(config, 60), made_up_sample(config, 90, num_images=1)]
    before = most_resident_bytes()
    build = builder(config, checkpointing=True)
    memory = calibrate_fake(build, config, samples, width=2048, precision='amp_bf16', strategy='fsdp')
    shape = BatchShape(rows=4, width=1024, image_tokens=4 * 576, pixel_bytes=4 * 3 * 336 * 336 * 4)
    terms = memory.terms(shape, num_ranks=8)
    assert most_resident_bytes() - before < 2 * GIB, 'the weights alone would be 3.5 GiB'
    assert memory.residual < LARGE_RESIDUAL
    with torch.device('meta'):
        model = LlavaForConditionalGeneration(config)
    weights = model.num_parameters()
    assert memory.static.parameters == 4 * weights
    # No gradient reaches the last block and the last norm of the vision encoder: features are taken one block earlier.
    trained_weights = weights
    for name, parameter in model.named_parameters():
        if 'vision' in name and (f'layers.{NUM_VISION_BLOCKS - 1}.' in name or 'post_layernorm' in name):
            trained_weights -= parameter.numel()
    assert memory.static.gradients == 4 * trained_weights
    assert memory.static.optimizer == pytest.approx(8 * trained_weights, rel=1e-4)
    assert terms['parameters'] == pytest.approx(4 * weights / 8)
    # Every block keeps its input, 4096 numbers a token, in the two bytes that FSDP casts to. One block, which is
    # computed again, keeps about four times as much in addition.
    block_input = 4096 * 2 * shape.tokens
    kept_besides_inputs = terms['text activations'] - NUM_TEXT_BLOCKS * block_input
    assert 2 * block_input < kept_besides_inputs < 6 * block_input
