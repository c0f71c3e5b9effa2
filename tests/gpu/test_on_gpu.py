# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What only a GPU can show: exact in fp32 and with a GradScaler, no host sync, page-locked memory, compiled models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer.core import Callback, Event
from composer.devices import DeviceGPU
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.device import GPU
from benchmarks.gpu import REHEARSAL, build_llava
from benchmarks.small_llava import make_rows
from composer_tokacc import BatchLayout, TokenAccumulation, token_data_spec
from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.data_spec.pieces import add_rows, zero_weight
from composer_tokacc.programs.models import build_model
from composer_tokacc.verify import main as verify
from examples.digits import DigitsDataset, build_digits_processor
from tests.programs.test_models import LLAVA
from tests.support.families import FAMILIES
from tests.support.half_precision import train_in_two_cuts
from tests.support.programs import DIGITS, TINY_DIGITS
from tests.support.text import collate, text_model, text_rows
from tests.support.training import GivenBatches, fit, loader, reference_gradients, relative_error, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')]

RAGGED = [(4, 2), (5, 3), (9, 7), (14, 11), (6, 1), (3, 2), (40, 38), (21, 0)]
# The reference is a CPU's: kernels sum in another order.
TOLERANCE = 1e-5
MIB = 2**20


def in_float32() -> dict[str, Any]:
    """Options of the Trainer. Without them Composer trains in AMP_FP16, and with TF32, which has 10 bits."""
    return {'device': DeviceGPU(allow_tf32=False), 'precision': 'fp32'}


@pytest.mark.parametrize('microbatch_size', [1, 2, 3, 8])
@pytest.mark.parametrize('split', ['stock', 'ordered', 'regrouped', 'packed'])
def test_text_gradient_is_exact(split, microbatch_size):
    model, batch = text_model(), collate(text_rows(RAGGED))
    expected, _ = reference_gradients(model, batch)
    data: Any = loader(batch)
    if split != 'stock':
        data = token_data_spec(data, regroup=split != 'ordered', packing=split == 'packed')
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


def test_stock_composer_is_wrong_here():
    model, batch = text_model(), collate(text_rows(RAGGED))
    expected, _ = reference_gradients(model, batch)
    recorder, _, _ = train(model, loader(batch), microbatch_size=1, **in_float32())
    assert relative_error(recorder.gradients, expected) > 0.1


@pytest.mark.parametrize('precision', ['amp_fp16', 'amp_bf16'])
def test_half_precision_is_near(precision):
    """AMP_FP16 goes through a GradScaler, whose scale must not be taken for a wrong weight."""
    model, batch = text_model(), collate(text_rows(RAGGED))
    expected, _ = reference_gradients(model, batch)
    errors = []
    for microbatch_size in (1, len(RAGGED)):
        recorder = fit(text_model(), batch, precision=precision, microbatch_size=microbatch_size, device='gpu')
        errors.append(relative_error(recorder.gradients, expected))
    accumulated, whole = errors
    assert 0 < whole < 0.05
    assert accumulated < 2 * whole


MICROBATCH_EVENTS = (Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD)


@pytest.mark.parametrize('logits', ['all', 'labels'])
@pytest.mark.parametrize('precision', ['fp32', 'amp_bf16', 'amp_fp16'])
def test_composers_own_settings_are_not_refused(precision, logits):
    """Composer turns TF32 on. The check must not take its round-off for a loss that depends on the cut."""
    sizes = {'vocab_size': 4096, 'hidden_size': 512, 'intermediate_size': 1376, 'num_hidden_layers': 4}
    batch = collate(text_rows([*RAGGED, (600, 20), (512, 300)]))
    recorders = []
    for microbatch_size in (1, 10):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, use_cache=False))
        recorder = fit(
            model, batch, microbatch_size=microbatch_size, logits=logits, device=DeviceGPU(), precision=precision
        )
        recorders.append(recorder)
    one_by_one, whole = recorders
    assert relative_error(one_by_one.gradients, whole.gradients) < 0.05


@pytest.mark.parametrize('family', FAMILIES)
def test_families_train_in_half_precision(family):
    results = train_in_two_cuts(FAMILIES[family](), device=DeviceGPU(), precision='amp_bf16')
    accumulated, whole = (error for _, error in results)
    assert 0 < accumulated < 2 * whole


class NeverWaits(TokenAccumulation):
    """Torch raises at anything that waits for the GPU, from the second microbatch on."""

    microbatches = 0

    def apply(self, event, state, logger):
        self.microbatches += event == Event.BEFORE_FORWARD
        if event not in MICROBATCH_EVENTS or self.microbatches < 2:
            super().apply(event, state, logger)
            return
        torch.cuda.set_sync_debug_mode('error')
        try:
            super().apply(event, state, logger)
        finally:
            torch.cuda.set_sync_debug_mode('default')


def test_no_host_sync_a_microbatch():
    torch.cuda.init()
    torch.cuda.set_sync_debug_mode('error')
    try:
        with pytest.raises(RuntimeError, match='synchronizing'):
            torch.ones(1, device='cuda').item()  # so the mode is at work here
    finally:
        torch.cuda.set_sync_debug_mode('default')
    algorithm = NeverWaits()
    fit(text_model(), collate(text_rows(RAGGED)), algorithms=[algorithm], microbatch_size=1, device='gpu')
    assert algorithm.microbatches >= 4


class SeesPixels(Callback):
    """Which device batches came page-locked, and what kind of memory the split's microbatches are in."""

    def __init__(self):
        self.device_batches, self.microbatches = [], []

    def watch(self, spec):
        split = spec.split_batch

        def watched(batch, size):
            parts = split(batch, size)
            self.microbatches += [part['pixel_values'].is_pinned() for part in parts if 'pixel_values' in part]
            return parts

        spec.split_batch = watched
        return spec

    def batch_start(self, state, logger):
        self.device_batches.append(state.batch['pixel_values'].is_pinned())


def test_page_locked_images_stay_page_locked():
    case = FAMILIES['llava']()
    layout = BatchLayout.for_model(case.config)
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    expected, _ = reference_gradients(case.model, batch)
    seen = SeesPixels()
    pinning = DataLoader(GivenBatches([batch]), batch_size=None, pin_memory=True)
    recorder = fit(case.model, seen.watch(token_data_spec(pinning, layout=layout)), callbacks=[seen], **in_float32())
    assert relative_error(recorder.gradients, expected) < TOLERANCE
    assert seen.device_batches == [True]
    assert seen.microbatches
    assert all(seen.microbatches)


def test_compiled_model_has_few_graphs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    lengths = [12, 14, 16, 9, 30, 28, 32, 25]
    model, batch = text_model(), collate(text_rows([(length, length - 2) for length in lengths]))
    expected, _ = reference_gradients(model, batch)
    recorder = fit(model, *[batch] * 3, width_multiple=16, compile_config={'mode': 'default'}, **in_float32())
    for gradients in recorder.steps:
        found = {name.replace('_orig_mod.', ''): gradient for name, gradient in gradients.items()}
        assert relative_error(found, expected) < TOLERANCE
    # The probe's, the first width's, one for any: a number of ours that is guarded on would make one a microbatch.
    assert 0 < torch._dynamo.utils.counters['stats']['unique_graphs'] <= 4


def test_verify_is_exact_here(capsys):
    assert verify([DIGITS, '--rows', '4', *TINY_DIGITS, 'dataset.eval=null', 'report.num_samples=0']) == 0
    assert not torch.backends.cuda.matmul.allow_tf32
    assert 'exact: largest relative gradient error' in capsys.readouterr().out


def peak_mib(model: torch.nn.Module, batch: dict[str, Any]) -> float:
    """Most memory held in forward and backward, beyond what is there before."""
    moved = {key: value.cuda() for key, value in batch.items() if isinstance(value, torch.Tensor)}
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(**moved).loss.backward()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def test_dummy_row_takes_no_more_memory():
    """A text-only microbatch with an image row added, against a full one of the same rows x width."""
    config = REHEARSAL.config()
    model, layout = build_llava(config, GPU), BatchLayout.for_model(config)
    width = 2048
    full = layout.concat(make_rows([width] * 8, 0, config))
    text = layout.select(layout.concat(make_rows([width] * 16, 0, config)), range(1, 15, 2))
    spare = zero_weight(make_rows([width], 0, config)[0])
    assert layout.num_rows(text) == 7
    assert peak_mib(model, add_rows(layout, text, [spare], 'right')) <= 1.02 * peak_mib(model, full)


def test_adapters_in_four_bits(tmp_path):
    pytest.importorskip('bitsandbytes')
    processor = build_digits_processor()
    text = {**LLAVA['text_config'], 'hidden_size': 64, 'intermediate_size': 128}
    build_model(config={**LLAVA, 'text_config': text}, processor=processor).model.save_pretrained(tmp_path)
    lora = {'r': 4, 'bits': 4, 'modules_to_save': ['multi_modal_projector']}
    dataset = DigitsDataset(processor, num_samples=8, max_images=3)
    batch = VisionLanguageCollator(processor)([dataset[index] for index in range(8)])
    gradients = []
    for microbatch_size in (1, 8):
        model = build_model(pretrained=str(tmp_path), processor=processor, lora=lora, dtype='bfloat16')
        weights = dict(model.named_parameters())
        rounded = [name for name, weight in weights.items() if weight.dtype == torch.uint8]
        assert rounded
        assert all('language_model' in name for name in rounded)
        trained = [weight for weight in weights.values() if weight.requires_grad]
        assert all(weight.dtype == torch.float32 for weight in trained)
        recorder, _, trainer = train(
            model,
            token_data_spec(loader(batch)),
            algorithms=[TokenAccumulation()],
            microbatch_size=microbatch_size,
            device='gpu',
            precision='amp_bf16',
            optimizer=torch.optim.AdamW(trained, lr=1e-3),
        )
        gradients.append(recorder.gradients)
        assert set(trainer.state.state_dict()['model']) == {n for n, weight in weights.items() if weight.requires_grad}
    assert relative_error(*gradients) < 0.05  # bfloat16
