# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""(b) Real tokens per second, share of the peak, and memory: five ways to cut the same global batches."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers.utils import is_flash_attn_2_available

from benchmarks.device import ComputeDevice, peak_flops
from benchmarks.gpu.scale import Scale, build_llava, count_parameters
from benchmarks.gpu.store import Store
from benchmarks.length_sets import lognormal, read_tables
from benchmarks.small_llava import make_rows
from benchmarks.timed_steps import Row, StepClock, bound_seconds, equal_widths, timed
from composer_tokacc import BatchLayout
from composer_tokacc.layout import describe

TARGETS = {0.29: 1.73, 0.48: 1.77, 1.0: 2.46}
"""Times stock that ODB publishes for Qwen3-VL, by coefficient of variation of the lengths."""
# SDPA skips nothing between packed documents; the other two do, and have no backward pass on a CPU.
PACKED_ATTENTION = ('flash_attention_2', 'flex_attention', 'sdpa')


def lengths_of(variation: float | None, scale: Scale) -> np.ndarray:
    """Of one set: lognormal with this variation, or the real tables."""
    if variation is None:
        return np.maximum(read_tables(scale.lengths)[0].lengths // scale.table_divisor, 4)
    wide = variation
    for _ in range(20):  # clipping takes from the variation, so more is drawn
        drawn = lognormal(wide, mean=scale.mean_length, longest=scale.longest).lengths
        wide *= variation / (drawn.std() / drawn.mean())
    return drawn


def model_flops(lengths: np.ndarray, num_images: int, scale: Scale) -> float:
    """Operations of forward and backward over real tokens alone; checkpointing's second forward is none of them.

    Six a weight and token, and 12 x hidden size x length^2 / 2 a layer for causal attention (PaLM, appendix B).
    """
    text, vision = scale.text, scale.vision
    hidden, layers = text['hidden_size'], text['num_hidden_layers']
    weights = layers * (4 * hidden**2 + 3 * hidden * text['intermediate_size']) + hidden * text['vocab_size']
    total = 6.0 * weights * lengths.sum() + 6.0 * layers * hidden * float(np.square(lengths.astype(float)).sum())
    patches = (vision['image_size'] // vision['patch_size']) ** 2 + 1
    size, depth = vision['hidden_size'], vision['num_hidden_layers']
    tower = depth * (4 * size**2 + 2 * size * vision['intermediate_size'])
    return total + num_images * (6.0 * tower * patches + 12.0 * depth * size * patches**2)


def matrix_flops(device: ComputeDevice) -> float:
    """Operations a second of a large bf16 product here: the ceiling of any model on this machine."""
    size = 8192 if device.is_gpu else 256
    a, b = torch.randn(2, size, size, device=device.name, dtype=torch.bfloat16)
    seconds = []
    for _ in range(8):
        device.synchronize()
        started = time.perf_counter()
        _ = a @ b
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(seconds[3:])


def affordable_steps(model: Any, batch: Row, scale: Scale) -> int:
    """How many steps of stock, the slowest, fit into the time: from one of its microbatches."""
    layout = BatchLayout.for_model(model)
    head = layout.select(batch, range(scale.microbatch))
    clock = timed('stock', model, [head, head], scale.microbatch, device=scale.device, exact=False)
    step = clock.whole[-1] * scale.device_batch / scale.microbatch
    return int(np.clip(scale.step_seconds // step, 1, scale.num_steps))


def time_method(method: str, model: Any, batches: list[Row], scale: Scale) -> dict[str, Any]:
    """One way to cut: the first microbatch's worth of rows warms up, then each batch is a step."""
    layout, device = BatchLayout.for_model(model), scale.device
    width = max(batch['input_ids'].shape[1] for batch in batches)
    head = layout.select(batches[0], range(scale.microbatch))
    device.reset_peak()
    clock: StepClock = timed(
        method, model, [head, *batches], scale.microbatch, device=device, slot_tokens=width,
        exact=method in ('ours', 'packing'),
    )  # fmt: skip
    real = [sum(describe(layout, batch).lengths) for batch in batches]
    seconds = clock.whole[1:]
    return {
        'tokens_per_second': statistics.median(r / s for r, s in zip(real, seconds, strict=True)),
        'seconds': seconds,
        'seconds_to_gradients': clock.seconds[1:],
        'padding': 1 - sum(real) / sum(clock.positions[1:]),
        'microbatches': clock.microbatches[1:],
        'largest_microbatch': clock.largest,
        'peak_gib': device.peak_bytes() / 2**30,
    }


def time_packed(batches: list[Row], scale: Scale, refused: dict[str, str]) -> dict[str, Any]:
    """Packed rows, with the first attention that the check on the first batch lets through.

    Args:
        batches: Global batches.
        scale: Of the run.
        refused: Why an attention is not to be tried; those that fail here are added.
    """
    for attention in PACKED_ATTENTION:
        if attention in refused:
            continue
        try:
            model = build_llava(
                scale.config(), scale.device, attention=attention, checkpointing=scale.checkpointing
            )  # fmt: skip
            found = time_method('packing', model, batches, scale)
            return {'attention': attention, 'refused': dict(refused), **found}
        except Exception as error:  # kernels fail in many ways, and the next may do
            refused[attention] = f'{type(error).__name__}: {error}'[:600]
    return {'refused': dict(refused)}


def refused_here(device: ComputeDevice) -> dict[str, str]:
    """Attention for packed rows that need not be tried."""
    refused = {}
    if not is_flash_attn_2_available():
        refused['flash_attention_2'] = 'not installed'
    if not device.is_gpu:
        refused['flex_attention'] = 'no backward pass on a CPU'
    return refused


def measure(lengths: np.ndarray, scale: Scale, target: float | None, refused: dict[str, str]) -> dict[str, Any]:
    config, device = scale.config(), scale.device
    layout = BatchLayout.for_model(config)
    model = build_llava(config, device, checkpointing=scale.checkpointing)
    drawn = np.random.default_rng(0).choice(lengths, (scale.num_steps, scale.device_batch))
    batches = [layout.concat(make_rows(row.tolist(), seed, config)) for seed, row in enumerate(drawn)]
    batches = batches[: affordable_steps(model, batches[0], scale)]
    drawn = drawn[: len(batches)]
    methods = {method: time_method(method, model, batches, scale) for method in ('stock', 'collate', 'ours')}
    width = int(np.mean([batch['input_ids'].shape[1] for batch in batches]))
    times = equal_widths(drawn, model, scale.microbatch, width, device=device, num_widths=scale.num_widths)
    bounds = [bound_seconds(row, times) for row in drawn]
    del model
    methods['packing'] = time_packed(batches, scale, refused)
    images = sum(sum(batch['num_images']) for batch in batches)
    flops = model_flops(drawn, images, scale)
    ceiling, peak = matrix_flops(device), peak_flops(torch.cuda.get_device_name()) if device.is_gpu else None
    stock = methods['stock']['tokens_per_second']
    bound = statistics.median(float(row.sum()) / seconds for row, seconds in zip(drawn, bounds, strict=True))
    for found in methods.values():
        if 'seconds' not in found:
            continue
        found['against_stock'] = found['tokens_per_second'] / stock
        found['share_of_bound'] = found['tokens_per_second'] / bound
        rate = flops / sum(found['seconds'])
        found['model_tflops'] = rate / 1e12
        found['mfu_of_measured_ceiling'] = rate / ceiling
        found['mfu'] = rate / peak if peak else None
    best = max(methods[method].get('against_stock', 0.0) for method in ('ours', 'packing'))
    return {
        'variation': float(drawn.std() / drawn.mean()), 'mean_length': float(drawn.mean()),
        'longest': int(drawn.max()), 'device_batch': scale.device_batch, 'microbatch': scale.microbatch,
        'checkpointing': scale.checkpointing, 'steps': len(batches), 'parameters': count_parameters(config),
        'measured_ceiling_tflops': ceiling / 1e12, 'methods': methods,
        'bound_tokens_per_second': bound, 'bound_against_stock': bound / stock, 'bound_times': times,
        'target': target, 'best_against_stock': best, 'holds': None if target is None else best >= target,
    }  # fmt: skip


def run(scale: Scale, store: Store) -> None:
    refused = refused_here(scale.device)
    sets: dict[str, float | None] = {f'b_throughput_{variation}': variation for variation in scale.variations}
    sets['b_throughput_tables'] = None
    for name, variation in sets.items():
        target = None if variation is None else TARGETS.get(variation)
        store.measure(name, lambda v=variation, t=target: measure(lengths_of(v, scale), scale, t, refused))
