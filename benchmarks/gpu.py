# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures what only a GPU can show: speed against stock, memory, exactness, and a real out-of-memory.

    python -m benchmarks.gpu --lengths DIR             # all parts, on one GPU of 24 GB or more
    python -m benchmarks.gpu --parts speed memory      # some of them
    python -m benchmarks.gpu --rehearse --results DIR  # the same code on a CPU, with tiny sizes

exactness      error of the gradient in fp32, and in bf16, where one forward in bf16 shows the error of rounding
out_of_memory  gradient of a step in which the microbatch size 'auto' first runs out of memory
logits         time and memory of steps with all logits and with logits at labels, for text models as large as those of
               SmolVLM-256M and Qwen2.5-VL-3B
speed          real tokens a second and peak memory of four ways to cut the same batches, for lognormal lengths with
               three coefficients of variation, and for real tables
memory         predicted and measured peaks

Each result is written to results/gpu/ as soon as it is measured, with the machine and its versions. DIR holds tables
`tokens,image_tiles` as .csv.gz. Without `--lengths`, synthetic tables are used, and the result says so.
"""

from __future__ import annotations

import gc
import json
import statistics
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, LlavaConfig

from benchmarks import logits_memory
from benchmarks.adapters import FirstGradient, Gradients, gradients_of, inputs_of
from benchmarks.length_sets import lognormal, read_tables
from benchmarks.models import (
    QWEN_TEXT,
    SMOLVLM_TEXT,
    large_llava_config,
    made_up_sample,
    make_rows,
    new_llava,
    small_llava_config,
    text_batch,
)
from benchmarks.record import RESULTS, Row, parser_of, write
from benchmarks.timed_steps import CPU, GIB, GPU, ComputeDevice, chunks, data_of, fit, time_steps
from composer_tokacc import BatchLayout, TokenAccumulation
from composer_tokacc.batch import BatchDict
from composer_tokacc.invariance import relative_error
from composer_tokacc.layout import describe
from composer_tokacc.sizing import BatchShape, calibrate_fake
from composer_tokacc.sizing.shapes import batch_of_width

Measure = Callable[[], Row]

# A part has one or more measurements. Their names begin with the name of the part.
PARTS = ('exactness', 'out_of_memory', 'logits', 'speed', 'memory')

# Speed over stock that ODB publishes for Qwen3-VL, by the coefficient of variation of the lengths.
TARGETS = {0.29: 1.73, 0.48: 1.77, 1.0: 2.46}

EXACTNESS_LENGTHS = (40, 9, 300, 17, 120, 64, 33, 511, 12, 75, 260, 28)
EXACT_IN_FP32 = 1e-5
# Rounding gives even one forward in bf16 an error, the noise. A cut changes the order of sums, so it changes the
# rounding. The error of a cut may be this many times the noise.
BF16_NOISE_FACTOR = 2.0

# Rows and width of the batches whose memory is predicted and measured. The prediction is calibrated with other shapes.
MEMORY_SHAPES = (
    (1, 1536),
    (2, 900),
    (2, 1700),
    (3, 1100),
    (4, 1300),
    (5, 700),
    (6, 1000),
    (8, 800),
)
# Largest relative error of a prediction. It is the part of the memory that `safety` keeps free for everything that is
# not predicted, such as the buffers of cuBLAS.
MEMORY_LIMIT = 0.08
OUT_OF_MEMORY_ROWS = 32
# Steps that are timed, after a first step with the check of the first batch.
LOGITS_STEPS = 4
TEXT_SIZES = {'smolvlm': SMOLVLM_TEXT, 'qwen': QWEN_TEXT}
NARROW_TEXT = {
    'hidden_size': 32,
    'intermediate_size': 64,
    'num_hidden_layers': 2,
    'num_attention_heads': 2,
    'num_key_value_heads': 1,
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of the models and the data."""

    device: ComputeDevice
    config: Callable[[], LlavaConfig]
    # A config for parts in which the size of the model does not change the result.
    small_config: Callable[[], LlavaConfig]
    device_batch: int
    microbatch: int
    mean_length: int
    longest: int
    num_steps: int
    logits_rows: int
    variations: tuple[float, ...] = tuple(TARGETS)
    checkpointing: bool = False
    # Lengths that are written for a GPU are divided by this number.
    shrink: int = 1
    lengths: Path | None = None

    def lengths_of(self, variation: float | None) -> tuple[np.ndarray, str]:
        """Returns lengths and their source: those of the tables if `variation` is None, else lognormal ones."""
        if variation is None:
            tables, source = read_tables(self.lengths)
            return np.maximum(tables.lengths // self.shrink, 4), source
        # Lengths are clipped, which makes their variation smaller. So they are drawn with a larger one.
        unclipped_variation = variation
        for _ in range(20):
            length_set = lognormal(unclipped_variation, mean=self.mean_length, longest=self.longest)
            unclipped_variation *= variation / length_set.variation
        return length_set.lengths, f'lognormal, variation {variation}'


FULL = Scale(
    device=GPU,
    config=large_llava_config,
    small_config=small_llava_config,
    device_batch=32,
    microbatch=4,
    mean_length=1200,
    longest=8192,
    num_steps=2,
    logits_rows=12,
)
TINY_CONFIG = partial(small_llava_config, hidden_size=64, num_layers=2)
REHEARSAL = Scale(
    device=CPU,
    config=TINY_CONFIG,
    small_config=TINY_CONFIG,
    device_batch=8,
    microbatch=2,
    mean_length=32,
    longest=96,
    num_steps=1,
    logits_rows=2,
    variations=(1.0,),
    shrink=10,
)


def for_memory(scale: Scale, total_bytes: int) -> Scale:
    """Returns the scale with as many rows a microbatch as this memory holds.

    Parameters, gradients and bf16 copies take 10 GiB. The activations of a row of 8,192 tokens take about 15 GiB, or
    3 GiB with checkpointing. Its logits take 3 GiB more.
    """
    if total_bytes > 110 * GIB:
        return scale
    if total_bytes > 60 * GIB:
        return replace(scale, microbatch=2)
    return replace(scale, microbatch=1, checkpointing=True)


def build_llava(config: LlavaConfig, device: ComputeDevice, *, checkpointing: bool = False) -> Any:
    """Makes a model on the device, in training mode, with the same float32 weights at every call."""
    with torch.device(device.name):
        model = new_llava(config).float().train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
    return model


def gradients_of_one_forward(
    config: LlavaConfig, batch: BatchDict, device: ComputeDevice, dtype: torch.dtype
) -> Gradients:
    """Returns the gradients of one plain forward over all rows."""
    model = build_llava(config, device)
    inputs = {}
    for key, value in inputs_of(model, batch).items():
        inputs[key] = value.to(device.name)
    with torch.autocast(device.name, dtype, enabled=dtype != torch.float32):
        loss = model(**inputs).loss
    loss.backward()
    return gradients_of(model)


def gradients_of_trainer(
    config: LlavaConfig,
    rows: list[BatchDict],
    method: str,
    microbatch: int | str,
    device: ComputeDevice,
    precision: str = 'fp32',
    callbacks: tuple[Callback, ...] = (),
) -> Gradients:
    """Returns the gradients of a step of the Trainer over all rows, without TF32."""
    recorder = FirstGradient()
    layout = BatchLayout.for_model(config)
    # The microbatch size 'auto' begins with the batch size of the loader.
    loader = DataLoader(rows, batch_size=len(rows), collate_fn=layout.concat)  # pyright: ignore[reportArgumentType]
    fit(
        build_llava(config, device),
        data_of(method, loader, layout),
        microbatch,
        device=device,
        precision=precision,
        allow_tf32=False,
        algorithms=[] if method == 'stock' else [TokenAccumulation()],
        callbacks=[*callbacks, recorder],
    )
    return recorder.gradients


def measure_exactness(scale: Scale) -> Row:
    """Returns the gradient errors of all ways to cut a batch, relative to one forward in fp32."""
    device = scale.device
    if device.is_gpu:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    config = scale.small_config()
    lengths = [max(length // scale.shrink, 4) for length in EXACTNESS_LENGTHS]
    rows = make_rows(lengths, seed=0, config=config)
    batch = BatchLayout.for_model(config).concat(rows)
    expected = gradients_of_one_forward(config, batch, device, torch.float32)
    in_bf16 = gradients_of_one_forward(config, batch, device, torch.bfloat16)
    noise, _ = relative_error(in_bf16, expected)
    limits = {'fp32': EXACT_IN_FP32}
    if device.is_gpu:
        limits['amp_bf16'] = BF16_NOISE_FACTOR * noise
    errors: dict[str, dict[str, float]] = {}
    holds = True
    for precision, limit in limits.items():
        errors[precision] = {}
        for method in ('stock', 'ours', 'packing'):
            for size in (1, 2, 4):
                gradients = gradients_of_trainer(config, rows, method, size, device, precision)
                error, _ = relative_error(gradients, expected)
                errors[precision][f'{method} {size}'] = error
                if method != 'stock':
                    holds = holds and error <= limit
    return {'errors': errors, 'bf16_noise_of_one_forward': noise, 'holds': holds}


class Attempts(Callback):
    """Records the microbatch size of each attempt at the step.

    A rehearsal on the CPU does not run out of memory, so there this callback lets the first attempts fail.
    """

    def __init__(self, device: ComputeDevice) -> None:
        self.device = device
        self.sizes: list[int] = []

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self.sizes.append(int(state.device_train_microbatch_size or 0))

    def before_loss(self, state: State, logger: Logger) -> None:
        if self.device.is_gpu:
            return
        state.auto_microbatching = True  # Composer refuses the size 'auto' on a CPU
        if self.sizes[-1] > OUT_OF_MEMORY_ROWS // 4:
            raise RuntimeError('CUDA out of memory')


@contextmanager
def limited_memory(limit: float, device: ComputeDevice) -> Iterator[None]:
    """Lets torch's allocator have at most this many bytes of the GPU."""
    if not device.is_gpu:
        yield
        return
    device.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(limit / device.total_bytes(), 1.0))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def measure_out_of_memory(scale: Scale) -> Row:
    """Compares the gradients of two runs: one with a size that fits, one with 'auto' that first runs out of memory."""
    device = scale.device
    config = scale.small_config()
    longest = 2048 // scale.shrink
    # The rows have equal lengths, so no cut saves padding. So each microbatch has as many rows as the size allows.
    rows = make_rows([longest] * OUT_OF_MEMORY_ROWS, 0, config)
    device.reset_peak()
    before = device.allocated_bytes()
    expected = gradients_of_trainer(config, rows, 'ours', OUT_OF_MEMORY_ROWS // 4, device)
    fitting_bytes = device.peak_bytes() - before
    attempts = Attempts(device)
    size = 'auto' if device.is_gpu else OUT_OF_MEMORY_ROWS
    # Twice as many rows need nearly twice the memory, so they do not fit. The size that fits gets 40 % more than it
    # needs, because the caching allocator wastes some memory.
    with limited_memory(before + 1.4 * fitting_bytes, device):
        gradients = gradients_of_trainer(config, rows, 'ours', size, device, callbacks=(attempts,))
    error, _ = relative_error(gradients, expected)
    return {
        'rows': OUT_OF_MEMORY_ROWS,
        'longest': longest,
        'fits_in_gib': fitting_bytes / GIB,
        'attempts': attempts.sizes,
        'gradient_error': error,
        'holds': error <= EXACT_IN_FP32 and len(attempts.sizes) > 1,
    }


def measure_method(method: str, model: Any, batches: list[BatchDict], scale: Scale) -> Row:
    """Times one way to cut the batches. TokenAccumulation is on for all of them, so that only the cut differs.

    All batches are trained on once, then once more. In the first pass the allocator of a GPU asks the driver for memory
    at each new shape, as in the first steps of a run. The second pass shows the speed of a long run.
    """
    layout = BatchLayout.for_model(model)
    lengths = [describe(layout, batch).lengths for batch in batches]
    # A step that does not count comes first, in which TokenAccumulation checks its batch. That batch has the two
    # shortest and the two longest rows of the first of the batches, so that its other rows need no new check.
    rows_by_length = np.argsort(lengths[0], kind='stable').tolist()
    checked_rows = {*rows_by_length[:2], *rows_by_length[-2:]}
    checked_batch = layout.select(batches[0], sorted(checked_rows))
    clock = time_steps(
        method,
        model,
        [checked_batch, *batches, *batches],
        scale.microbatch,
        algorithms=[TokenAccumulation(loss_tokens='causal', check_loss=False)],
        device=scale.device,
        slot_tokens=max(batch['input_ids'].shape[1] for batch in batches),  # the memory of stock for the widest batch
    )
    first_pass, second_pass = chunks(clock.seconds, len(batches))
    real_tokens = [sum(lengths_of_batch) for lengths_of_batch in lengths]
    return {
        'tokens_per_second': float(np.median(np.divide(real_tokens, second_pass))),
        'seconds': second_pass,
        'first_pass_seconds': first_pass,
        'padding': 1 - 2 * sum(real_tokens) / sum(clock.positions),  # the positions of both passes
        'peak_gib': max(clock.peak_bytes) / GIB,
    }


def measure_speed(variation: float | None, scale: Scale) -> Row:
    """Times four ways to cut the same batches in the same memory."""
    config = scale.config()
    layout = BatchLayout.for_model(config)
    model = build_llava(config, scale.device, checkpointing=scale.checkpointing)
    all_lengths, source = scale.lengths_of(variation)
    lengths = np.random.default_rng(0).choice(all_lengths, (scale.num_steps, scale.device_batch))
    batches = []
    for step, lengths_of_step in enumerate(lengths):
        rows = make_rows(lengths_of_step.tolist(), step, config)
        batches.append(layout.concat(rows))
    methods = {}
    for method in ('stock', 'collate', 'ours', 'packing'):
        figures = measure_method(method, model, batches, scale)
        methods[method] = figures
        figures['against_stock'] = figures['tokens_per_second'] / methods['stock']['tokens_per_second']
    best = max(methods['ours']['against_stock'], methods['packing']['against_stock'])
    target = None if variation is None else TARGETS.get(variation)
    return {
        'source': source,
        'variation': float(lengths.std() / lengths.mean()),
        'device_batch': scale.device_batch,
        'microbatch': scale.microbatch,
        'checkpointing': scale.checkpointing,
        'parameters': sum(parameter.numel() for parameter in model.parameters()),
        'methods': methods,
        'target': target,
        'holds': None if target is None else best >= target,
    }


def measure_logits(scale: Scale) -> Row:
    """Compares steps with all logits and with logits at labels. Each step is one microbatch."""
    result = {}
    for name, known_sizes in TEXT_SIZES.items():
        sizes = known_sizes if scale.device.is_gpu else known_sizes | NARROW_TEXT
        config = LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False)
        torch.manual_seed(0)
        with torch.device(scale.device.name):
            model = LlamaForCausalLM(config).train()
        model.gradient_checkpointing_enable({'use_reentrant': False})
        width = logits_memory.ROW_TOKENS // scale.shrink
        batch = text_batch(config.vocab_size, scale.logits_rows, width, logits_memory.LABELS)
        all_logits = time_logits('all', model, batch, scale.device)
        at_labels = time_logits('labels', model, batch, scale.device)
        times_as_fast = all_logits['seconds'] / at_labels['seconds']
        result[name] = {'all': all_logits, 'labels': at_labels, 'times_as_fast': times_as_fast}
    return result


def time_logits(logits: str, model: Any, batch: BatchDict, device: ComputeDevice) -> dict[str, float]:
    """Returns the median time and the largest peak of the steps. The first does not count: it includes a check."""
    batches = [batch] * (1 + LOGITS_STEPS)
    num_rows = len(batch['input_ids'])
    algorithms = [TokenAccumulation(logits=logits)]
    clock = time_steps('ours', model, batches, num_rows, algorithms=algorithms, device=device)
    return {'seconds': statistics.median(clock.seconds), 'peak_gib': max(clock.peak_bytes) / GIB}


def measured_peak(model: Any, batch: BatchDict, device: ComputeDevice) -> int:
    """Returns the peak memory of two steps. Each step computes the batch twice, in two microbatches.

    So in the second microbatch there are already gradients when the activations are largest, as in the prediction.
    """
    layout = BatchLayout.for_model(model)
    device_batch = layout.concat([batch, batch])
    device.reset_peak()
    data = data_of('stock', [device_batch, device_batch], layout)
    fit(model, data, layout.num_rows(batch), '2ba', device=device)
    return device.peak_bytes()


def measure_memory(checkpointing: bool, scale: Scale) -> Row:
    """Compares predicted and measured peaks of steps of two microbatches. A rehearsal only predicts."""
    config = scale.config()
    device = scale.device
    memory = calibrate_fake(
        partial(build_llava, config, CPU, checkpointing=checkpointing),
        config,
        [made_up_sample(config, 30), made_up_sample(config, 50, num_images=1)],
        width=1800 // scale.shrink,
        precision='amp_bf16',
        make_optimizer=partial(torch.optim.SGD, lr=0.0),
    )
    model = build_llava(config, device, checkpointing=checkpointing)
    layout = BatchLayout.for_model(config)
    with_image = made_up_sample(config, 40, num_images=1)
    without_image = made_up_sample(config, 40)
    rows = []
    for num_rows, full_width in MEMORY_SHAPES:
        width = full_width // scale.shrink
        # Two of three rows have an image.
        samples = [with_image, with_image, without_image] * num_rows
        batch = dict(batch_of_width(layout, samples[:num_rows], width))
        predicted_bytes = memory.peak(BatchShape.from_batch(batch, layout))
        row = {'rows': num_rows, 'width': width, 'predicted_gib': predicted_bytes / GIB}
        if device.is_gpu:
            row['measured_gib'] = measured_peak(model, batch, device) / GIB
            row['error'] = row['predicted_gib'] / row['measured_gib'] - 1
        rows.append(row)
    result: Row = {'checkpointing': checkpointing, 'residual': memory.residual, 'shapes': rows}
    if device.is_gpu:
        result['holds'] = all(abs(row['error']) <= MEMORY_LIMIT for row in rows)
    return result


def record(folder: Path, name: str, device: ComputeDevice, measure: Measure) -> None:
    """Measures a result and writes it. If it fails, the traceback is written, so that the next results are measured."""
    try:
        result = measure()
    except Exception as error:
        result = {'error': f'{type(error).__name__}: {error}', 'traceback': traceback.format_exc()}
    write(folder / f'{name}.json', {'machine': device.report(), 'result': result})
    print(f'{name}: {json.dumps(result)[:2000]}', flush=True)
    # The last model may still be in a reference cycle of a traceback or of Composer.
    gc.collect()
    device.empty_cache()


def measurements(scale: Scale) -> dict[str, Measure]:
    """Returns the measurements by name, the quick ones first."""
    measures: dict[str, Measure] = {
        'exactness': partial(measure_exactness, scale),
        'out_of_memory': partial(measure_out_of_memory, scale),
        'logits': partial(measure_logits, scale),
    }
    for variation in (None, *scale.variations):
        measures[f'speed_{variation or "tables"}'] = partial(measure_speed, variation, scale)
    measures['memory'] = partial(measure_memory, False, scale)
    measures['memory_checkpointing'] = partial(measure_memory, True, scale)
    return measures


def main() -> None:
    warnings.simplefilter('ignore')
    parser = parser_of(__doc__, results=RESULTS / 'gpu')
    parser.add_argument('--parts', nargs='*', choices=PARTS, default=PARTS)
    parser.add_argument('--lengths', type=Path, help='folder of tables, by default COMPOSER_TOKACC_LENGTHS')
    parser.add_argument('--rehearse', action='store_true', help='tiny sizes on the CPU')
    arguments = parser.parse_args()
    if arguments.rehearse and arguments.results == RESULTS / 'gpu':
        parser.error("--rehearse needs --results, so that its figures are not taken for a GPU's")
    if not arguments.rehearse and not torch.cuda.is_available():
        parser.error('torch finds no GPU. Give --rehearse for tiny sizes on the CPU')
    scale = REHEARSAL if arguments.rehearse else for_memory(FULL, GPU.total_bytes())
    scale = replace(scale, lengths=arguments.lengths)
    for name, measure in measurements(scale).items():
        if name.startswith(tuple(arguments.parts)):
            record(arguments.results, name, scale.device, measure)


if __name__ == '__main__':
    main()
