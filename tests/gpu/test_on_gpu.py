# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Faults that only a GPU shows: TF32, a GradScaler, waits of the host, lost page locks, graphs of compiled models."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from composer.core import Event
from composer.devices import DeviceGPU
from packaging import version
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu import REHEARSAL, build_llava
from benchmarks.models import make_rows
from benchmarks.timed_steps import GPU
from composer_tokacc import BatchLayout, TokenAccumulation, token_data_spec
from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.data_spec.pieces import add_rows, zero_weight
from composer_tokacc.programs.models import build_model
from composer_tokacc.verify import main as verify
from composer_tokacc.weights import token_weights_of
from examples.digits import DigitsDataset, build_digits_processor
from tests.programs.test_models import LLAVA
from tests.support.families import FAMILIES
from tests.support.half_precision import train_in_two_cuts
from tests.support.programs import DIGITS, TINY_DIGITS
from tests.support.text import collate, text_model, text_rows
from tests.support.training import GivenBatches, On, fit, loader, reference_gradients, relative_error, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')]

RAGGED = [(4, 2), (5, 3), (9, 7), (14, 11), (6, 1), (3, 2), (40, 38), (21, 0)]
# The reference is a CPU's: kernels sum in another order.
TOLERANCE = 1e-5
MIB = 2**20


def in_float32() -> dict[str, Any]:
    """Options of the Trainer. Without them Composer trains in AMP_FP16, and with TF32, which has 10 bits."""
    return {'device': DeviceGPU(allow_tf32=False), 'precision': 'fp32'}


def ragged_text() -> dict[str, Any]:
    """Returns a batch of rows of 3 to 40 tokens. One row has no labels."""
    return collate(text_rows(RAGGED))


@pytest.mark.parametrize('microbatch_size', [1, 2, 3, 8])
@pytest.mark.parametrize('split', ['stock', 'ordered', 'regrouped', 'packed'])
def test_text_gradient_is_exact(split, microbatch_size):
    model = text_model()
    batch = ragged_text()
    expected, _ = reference_gradients(model, batch)
    data: Any = loader(batch)
    if split != 'stock':
        is_regrouped = split != 'ordered'
        is_packed = split == 'packed'
        data = token_data_spec(data, regroup=is_regrouped, packing=is_packed)

    recorder = fit(model, data, microbatch_size=microbatch_size, **in_float32())

    assert relative_error(recorder.gradients, expected) < TOLERANCE


@pytest.mark.parametrize('microbatch_size', [1, 2, 6])
@pytest.mark.parametrize('family', ['llava', 'qwen2_5_vl', 'idefics3', 'gemma3'])
def test_image_gradient_is_exact(family, microbatch_size):
    case = FAMILIES[family]()
    layout = BatchLayout.for_model(case.config)
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    expected, _ = reference_gradients(case.model, batch)

    recorder = fit(case.model, batch, layout=layout, microbatch_size=microbatch_size, **in_float32())

    assert relative_error(recorder.gradients, expected) < TOLERANCE


def test_listed_weights_of_rows():
    """A loop moves the tensors of a batch to the GPU, but not a list. The rows have two and three labels."""
    batch = collate(text_rows([(4, 2), (6, 3)]))
    batch_on_gpu = {key: value.cuda() for key, value in batch.items()}
    batch_on_gpu['loss_weights'] = [1.0, 2.0]
    weights = token_weights_of(batch_on_gpu, 'column')
    assert weights.sum(dim=1).tolist() == [2 * 1.0, 3 * 2.0]


def test_stock_composer_is_wrong_here():
    """So the tests here can fail."""
    model = text_model()
    batch = ragged_text()
    expected, _ = reference_gradients(model, batch)
    recorder, _, _ = train(model, loader(batch), microbatch_size=1, **in_float32())
    assert relative_error(recorder.gradients, expected) > 0.1


@pytest.mark.parametrize('precision', ['amp_fp16', 'amp_bf16'])
def test_half_precision_is_near(precision):
    """AMP_FP16 goes through a GradScaler, whose scale must not be taken for a wrong weight."""
    batch = ragged_text()
    expected, _ = reference_gradients(text_model(), batch)

    errors = []
    for microbatch_size in (1, len(RAGGED)):
        recorder = fit(text_model(), batch, precision=precision, microbatch_size=microbatch_size, device='gpu')
        errors.append(relative_error(recorder.gradients, expected))

    accumulated_error, single_error = errors
    assert 0 < single_error < 0.05
    assert accumulated_error < 2 * single_error


MICROBATCH_EVENTS = (Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD)


@pytest.mark.parametrize('logits', ['all', 'labels'])
@pytest.mark.parametrize('precision', ['fp32', 'amp_bf16', 'amp_fp16'])
def test_composers_own_settings_are_not_refused(precision, logits):
    """Composer turns TF32 on. The check must not take its round-off for a loss that depends on the cut."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        use_cache=False,
    )
    batch = collate(text_rows([*RAGGED, (600, 20), (512, 300)]))

    gradients = []
    for microbatch_size in (1, 10):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        recorder = fit(
            model,
            batch,
            device=DeviceGPU(),
            microbatch_size=microbatch_size,
            logits=logits,
            precision=precision,
        )
        gradients.append(recorder.gradients)

    assert relative_error(*gradients) < 0.05


@pytest.mark.parametrize('family', FAMILIES)
def test_families_train_in_half_precision(family):
    if family == 'smolvlm' and version.parse(transformers.__version__) < version.parse('5.24'):
        pytest.skip('Transformers 5.17 cannot: it writes bfloat16 image states into float32 embeddings')
    case = FAMILIES[family]()
    results = train_in_two_cuts(case, device=DeviceGPU(), precision='amp_bf16')
    (_, accumulated_error), (_, single_error) = results
    assert 0 < accumulated_error < 2 * single_error


@contextmanager
def waits_raise():
    """Lets torch raise at any operation that waits for the GPU."""
    torch.cuda.set_sync_debug_mode('error')
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode('default')


class NeverWaits(TokenAccumulation):
    """Must not wait for the GPU at the events of a microbatch, from the second microbatch on."""

    num_microbatches = 0

    def apply(self, event, state, logger):
        if event == Event.BEFORE_FORWARD:
            self.num_microbatches += 1
        if event in MICROBATCH_EVENTS and self.num_microbatches > 1:
            with waits_raise():
                super().apply(event, state, logger)
        else:
            super().apply(event, state, logger)


def test_waits_raise_here():
    """So the next test can fail."""
    torch.cuda.init()
    with waits_raise(), pytest.raises(RuntimeError, match='synchronizing'):
        torch.ones(1, device='cuda').item()


def test_no_host_sync_a_microbatch():
    algorithm = NeverWaits()
    fit(text_model(), ragged_text(), algorithms=[algorithm], microbatch_size=1, device='gpu')
    assert algorithm.num_microbatches >= 4


def test_page_locked_images_stay_page_locked():
    case = FAMILIES['llava']()
    layout = BatchLayout.for_model(case.config)
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    expected, _ = reference_gradients(case.model, batch)
    pinning_loader = DataLoader(GivenBatches([batch]), batch_size=None, pin_memory=True)
    spec = token_data_spec(pinning_loader, layout=layout)
    split = spec.split_batch
    pinned_microbatches = []

    def split_and_record(batch, size):
        microbatches = split(batch, size)
        for microbatch in microbatches:
            if 'pixel_values' in microbatch:
                pinned_microbatches.append(microbatch['pixel_values'].is_pinned())
        return microbatches

    spec.split_batch = split_and_record
    pinned_batches = On(Event.BATCH_START, lambda state: state.batch['pixel_values'].is_pinned())

    recorder = fit(case.model, spec, callbacks=[pinned_batches], **in_float32())

    assert relative_error(recorder.gradients, expected) < TOLERANCE
    assert pinned_batches.values == [True]
    assert pinned_microbatches
    assert all(pinned_microbatches)


def test_compiled_model_has_few_graphs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    lengths = [12, 14, 16, 9, 30, 28, 32, 25]
    model = text_model()
    batch = collate(text_rows([(length, length - 2) for length in lengths]))
    expected, _ = reference_gradients(model, batch)

    recorder = fit(model, *[batch] * 3, width_multiple=16, compile_config={'mode': 'default'}, **in_float32())

    for gradients_of_step in recorder.steps:
        gradients = {}
        for name, gradient in gradients_of_step.items():
            gradients[name.replace('_orig_mod.', '')] = gradient
        assert relative_error(gradients, expected) < TOLERANCE
    # One for the probe, one for the first width, one for any other width. If torch made a graph for each value of a
    # number that the package passes, each microbatch would have its own.
    num_graphs = torch._dynamo.utils.counters['stats']['unique_graphs']
    assert 0 < num_graphs <= 4


def test_verify_is_exact_here(capsys):
    arguments = ['--rows', '4', *TINY_DIGITS, 'trainer.device=gpu', 'dataset.eval=null', 'report.num_samples=0']
    assert verify([DIGITS, *arguments]) == 0
    assert not torch.backends.cuda.matmul.allow_tf32
    assert 'exact: largest relative gradient error' in capsys.readouterr().out


def peak_mib(model: torch.nn.Module, batch: dict[str, Any]) -> float:
    """Returns the most memory that a forward and a backward hold at once. The first run also makes the gradients."""
    inputs = {key: value.cuda() for key, value in batch.items() if isinstance(value, torch.Tensor)}
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        bytes_before = torch.cuda.memory_allocated()
        model(**inputs).loss.backward()
    peak = torch.cuda.max_memory_allocated() - bytes_before
    return peak / MIB


def test_dummy_row_takes_no_more_memory():
    """Seven rows of text and a dummy row with an image are compared with eight rows of the same width."""
    config = REHEARSAL.config()
    model = build_llava(config, GPU)
    layout = BatchLayout.for_model(config)
    width = 2048
    eight_rows = layout.concat(make_rows([width] * 8, 0, config))
    sixteen_rows = layout.concat(make_rows([width] * 16, 0, config))
    text_only = layout.select(sixteen_rows, range(1, 15, 2))
    assert layout.num_rows(text_only) == 7
    (row_with_image,) = make_rows([width], 0, config)
    dummy_row = zero_weight(row_with_image)
    with_dummy = add_rows(layout, text_only, [dummy_row], 'right')

    peak_with_dummy = peak_mib(model, with_dummy)
    peak_of_rows = peak_mib(model, eight_rows)

    assert peak_with_dummy <= 1.02 * peak_of_rows


def write_small_llava(folder: Path) -> None:
    """Writes a LLaVA with weights that bitsandbytes can quantize."""
    text_config = {**LLAVA['text_config'], 'hidden_size': 64, 'intermediate_size': 128}
    composer_model = build_model(config={**LLAVA, 'text_config': text_config}, processor=build_digits_processor())
    composer_model.model.save_pretrained(folder)


def test_adapters_in_four_bits(tmp_path):
    pytest.importorskip('bitsandbytes')
    write_small_llava(tmp_path)
    processor = build_digits_processor()
    lora = {'r': 4, 'bits': 4, 'modules_to_save': ['multi_modal_projector']}
    dataset = DigitsDataset(processor, num_samples=8, max_images=3)
    samples = [dataset[index] for index in range(8)]
    batch = VisionLanguageCollator(processor)(samples)

    gradients = []
    for microbatch_size in (1, 8):
        model = build_model(pretrained=str(tmp_path), processor=processor, lora=lora, dtype='bfloat16')
        trained = {}
        quantized_names = []
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                trained[name] = weight
            if weight.dtype == torch.uint8:
                quantized_names.append(name)
        assert quantized_names
        assert all('language_model' in name for name in quantized_names)
        assert {weight.dtype for weight in trained.values()} == {torch.float32}

        recorder, _, trainer = train(
            model,
            token_data_spec(loader(batch)),
            algorithms=[TokenAccumulation()],
            microbatch_size=microbatch_size,
            device='gpu',
            precision='amp_bf16',
            optimizer=torch.optim.AdamW(trained.values(), lr=1e-3),
        )
        gradients.append(recorder.gradients)
        saved_names = trainer.state.state_dict()['model'].keys()
        assert saved_names == trained.keys()

    assert relative_error(*gradients) < 0.05  # bfloat16
