# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The speed-up that `size` predicts for the digits run, against the measured one; and whether its size trains.

    python -m benchmarks.sizing [--size 8] [--steps 30]

Both runs go through the Trainer with the same model, data, algorithms and memory (k rows of the widest batch). Stock
is given a splitter that keeps images with their rows, which Composer's own does not; it slices rows and trims nothing.
The cost model is fitted to a few steps of ours at several sizes, trimmed and not. Short blocks of steps of
both alternate, so that a busy machine slows both.
"""

from __future__ import annotations

import statistics
from typing import Any
from unittest import mock

import torch

from benchmarks.machine import machine
from benchmarks.record import ROOT, parser_of, show, write
from benchmarks.timed_steps import split_of
from composer_tokacc import size as size_program
from composer_tokacc.data_spec.split import split_of as split_of_loader
from composer_tokacc.planning import CostModel, CutOptions
from composer_tokacc.programs import TrainConfig, load_config
from composer_tokacc.programs.build import RunParts, build_parts
from composer_tokacc.programs.config_checks import check_config
from composer_tokacc.programs.sources import source_of
from composer_tokacc.programs.suggest import device_memory_gib, memory_of_run, suggest_for_run
from composer_tokacc.size import time_shapes, time_steps
from composer_tokacc.sizing import SampleSizes, draw_batches, simulate_steps

LIMIT = 0.15


def build_stock_parts(config: TrainConfig) -> RunParts:
    """The run's parts, its rows sliced in order and nothing trimmed, as Composer does with text batches."""
    parts = build_parts(config)
    ours: Any = split_of_loader(parts.train_loader.dataloader)
    parts.train_loader.split_batch = split_of('stock', ours.layout)
    return parts


def measure(config: TrainConfig, size: int, slot: int, *, stock: bool, steps: int) -> float:
    with mock.patch.object(size_program, 'build_parts', build_stock_parts if stock else build_parts):
        timer = time_steps(config, size=size, slot_tokens=slot, num_steps=steps)
    return (sum(timer.seconds) + sum(timer.outside)) / max(len(timer.outside), 1)


def predict(config: TrainConfig, table: Any, methods: tuple[str, ...], size: int, slot: int) -> dict[str, float]:
    """Seconds of a step that `size` would report, at prices fitted to steps of ours."""
    cost, outside = time_shapes(config, size=size, slot_tokens=slot)
    assert cost.seconds_per_token is not None
    sizes, own = SampleSizes.from_lengths(table), config.microbatching
    batches = draw_batches(len(sizes), config.loader.global_batch_size, num_batches=40)
    options = CutOptions(
        max_tokens=size * slot, regroup=own.regroup, width_multiple=own.width_multiple, packing=own.packing,
        cost=own.cost or CostModel(),
    )  # fmt: skip
    figures = {
        method: simulate_steps(
            sizes, batches, method=method, num_ranks=1, microbatch_rows=size, options=options, price=cost
        )
        for method in methods
    }
    return {method: found.cost * cost.seconds_per_token + outside for method, found in figures.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument('--yaml', default=str(ROOT / 'yamls' / 'digits.yaml'))
    parser.add_argument('--size', type=int, default=0, help='rows of a microbatch; 0: what the helper suggests')
    parser.add_argument('--steps', type=int, default=20)
    parser.add_argument('--blocks', type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(given.yaml)
    check_config(config, num_ranks=1)
    source = source_of(config)
    processor = source.build_processor()
    dataset = source.build_dataset(processor)
    table = source.measure(dataset, processor)
    memory = memory_of_run(config, dataset, processor, table)
    report = suggest_for_run(config, memory, table, num_ranks=1, gib=device_memory_gib(config))
    size, slot = given.size or report.device_train_microbatch_size, report.slot_tokens
    methods = ('stock', 'planned' if config.regroups_ranks else 'split')
    predicted = predict(config, table, methods, size, slot)
    blocks: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(given.blocks):
        for method in methods:
            blocks[method].append(measure(config, size, slot, stock=method == 'stock', steps=given.steps))
    measured = {method: statistics.median(values) for method, values in blocks.items()}
    ratios = {'predicted': predicted, 'measured': measured}
    ratios = {name: found['stock'] / found[methods[1]] for name, found in ratios.items()}
    error = ratios['predicted'] / ratios['measured'] - 1
    name = 'sizing.json' if not given.size else f'sizing-{size}.json'
    write(given.results / name, {
        'machine': machine(), 'suggested': report.device_train_microbatch_size, 'size': size, 'slot_tokens': slot,
        'predicted_seconds': predicted, 'measured_seconds': measured, 'blocks': blocks, 'speedup': ratios,
        'error': error,
    })  # fmt: skip
    rows = [{'': method, 'predicted s': predicted[method], 'measured s': measured[method]} for method in methods]
    show(f'{size} rows of {slot} tokens (suggested: {report.device_train_microbatch_size})', rows)
    print(f'speed-up: predicted {ratios["predicted"]:.2f}x, measured {ratios["measured"]:.2f}x, off by {error:+.1%}')
    print('within the limit' if abs(error) <= LIMIT else f'NOT within {LIMIT:.0%}')


if __name__ == '__main__':
    main()
