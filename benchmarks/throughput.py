# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Real tokens per second of the same steps, cut in seven ways: one process, one memory cap, the same rows.

    python -m benchmarks.throughput [--lengths DIR] [--sets 'NAME SIZE' ...] [--rounds 5] [--quick]

A small LLaVA (hidden size 512, 4 layers, fp32) trains through the real Composer Trainer. Every method gets the memory
of `microbatch` rows as wide as the device batch. Rounds take the methods in turn; figures are medians over rounds. The
bound times rows of many widths among rows of their own width, in microbatches of the same memory, and adds them up:
no padding at all, perfectly cut. The planner's prices are fitted to such times, taken before. DIR holds tables
`tokens,image_tiles` as .csv.gz (real data; scaled down in width for the CPU); without it those sets are left out.
Prints tables; writes results/throughput.json and .png.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer import DataSpec, Trainer
from composer.core import Callback, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.length_sets import lognormal, read_tables
from benchmarks.machine import machine
from benchmarks.small_llava import build_model, make_rows
from benchmarks.throughput_report import picture, show
from composer_tokacc import BatchLayout, TokenAccumulation, token_data_spec
from composer_tokacc.planning import CostModel
from examples.digits import DigitsDataset, build_digits_processor

RESULTS = Path(__file__).resolve().parent / 'results'
MICROBATCH = 4
LONG = 'lognormal CV 0.9, mean 500'
METHODS = {
    'stock': 'stock Composer',
    'trim': 'stock + trimming each microbatch',
    'collate': 'Hugging Face style, padded per microbatch',
    'greedy': 'sorted, cut greedily',
    'ours': 'token_data_spec',
    'packing': 'token_data_spec, packing=True',
}
Row = dict[str, Any]


class Batches(IterableDataset):
    def __init__(self, batches: Sequence[Row]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class StepClock(Callback):
    """Seconds from the batch on the CPU to whole gradients, splitting included, and what was computed."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.positions = 0
        self.largest = 0

    def batch_start(self, state: State, logger: Logger) -> None:
        self.started = time.perf_counter()

    def before_forward(self, state: State, logger: Logger) -> None:
        size = state.batch['input_ids'].numel()
        self.positions += size
        self.largest = max(self.largest, size)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def split_of(method: str, layout: BatchLayout, device_batch: int) -> Callable[[Row, int | float], list[Row]]:
    """The rivals, each from its description; every one keeps image rows with their own."""

    def chunks(order: Sequence[Any], size: int) -> list[Sequence[Any]]:
        return [order[start : start + size] for start in range(0, len(order), size)]

    def stock(batch: Row, size: int | float) -> list[Row]:
        return [layout.select(batch, rows) for rows in chunks(range(layout.num_rows(batch)), int(size))]

    def trim(batch: Row, size: int | float) -> list[Row]:
        return [layout.trim(microbatch) for microbatch in stock(batch, size)]

    def collate(batch: Row, size: int | float) -> list[Row]:
        """What a loader with batches of `size` hands to gradient accumulation: rows joined afresh."""
        rows = [layout.trim(layout.select(batch, [row])) for row in range(layout.num_rows(batch))]
        return [layout.concat(part) for part in chunks(rows, int(size))]

    def greedy(batch: Row, size: int | float) -> list[Row]:
        lengths = layout.lengths(batch)
        budget = int(size) * batch['input_ids'].shape[1]
        groups: list[list[int]] = [[]]
        for row in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            # Longest first, so the first row of a group is its width.
            if groups[-1] and (len(groups[-1]) + 1) * lengths[groups[-1][0]] > budget:
                groups.append([])
            groups[-1].append(row)
        return [layout.trim(layout.select(batch, rows)) for rows in groups]

    return {'stock': stock, 'trim': trim, 'collate': collate, 'greedy': greedy}[method]


def data_of(method: str, batches: Sequence[Row], layout: BatchLayout, cost: CostModel | None = None) -> DataSpec:
    loader = DataLoader(Batches(batches), batch_size=None)
    if method in ('ours', 'packing'):
        return token_data_spec(loader, layout=layout, packing=method == 'packing', cost=cost)
    return DataSpec(
        loader,
        split_batch=split_of(method, layout, len(batches[0]['input_ids'])),
        get_num_samples_in_batch=lambda batch: len(batch['input_ids']),
    )


def timed(method: str, model: Any, batches: Sequence[Row], microbatch: int, cost: CostModel | None = None) -> StepClock:
    """All steps through a Trainer. The algorithm is on for all methods: only the cut differs."""
    clock = StepClock()
    wrapped = HuggingFaceModel(model, shift_labels=True, use_logits=True)
    trainer = Trainer(
        model=wrapped,
        train_dataloader=data_of(method, batches, BatchLayout.for_model(model), cost),
        optimizers=torch.optim.SGD(wrapped.parameters(), lr=0.0),
        max_duration=f'{len(batches)}ba',
        device='cpu',
        device_train_microbatch_size=microbatch,
        # The first batch would pay for the probes; packing cannot go without.
        algorithms=[TokenAccumulation(loss_tokens='causal', check_loss=False)],
        callbacks=[clock],
        progress_bar=False,
    )
    trainer.fit()
    # Composer keeps every trainer until the process ends, and each keeps its last batch and outputs.
    trainer.close()
    for name in ('batch', 'outputs', 'loss'):
        setattr(trainer.state, name, None)
    return clock


def saved_bytes(method: str, model: Any, batch: Row, microbatch: int, cost: CostModel | None) -> int:
    """Largest activation memory that a microbatch of the batch keeps for its backward."""
    layout = BatchLayout.for_model(model)
    spec = data_of(method, [batch], layout, cost)
    batch = spec.batch_transforms(batch)
    spec.split_batch.checked = True  # the benchmark's models are the tests' own
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    named = inspect.signature(model.forward).parameters
    peak = 0
    for part in spec.split_batch(batch, microbatch):
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage] = storages) -> None:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage
            # The graph gets nothing: one that holds its own outputs is never freed.

        with torch.autograd.graph.saved_tensors_hooks(keep, _never_unpacked):
            model(**{key: value for key, value in part.items() if key in named})
        peak = max(peak, sum(storage.nbytes() for storage in storages.values()))
    return peak


def _never_unpacked(nothing: None) -> torch.Tensor:
    raise AssertionError('there is no backward pass')


def equal_widths(
    lengths: np.ndarray, model: Any, microbatch: int, width: int, num_microbatches: int = 1
) -> list[tuple[int, int, float]]:
    """Rows, width and seconds of microbatches of equal rows that fill the memory, at widths as the set has them."""
    found = []
    for length in np.unique(np.geomspace(max(lengths.min(), 2), lengths.max(), 7).astype(int)).tolist():
        count = max(microbatch * width // length, 1)
        batch = BatchLayout.for_model(model).concat(make_rows([length] * count * num_microbatches, seed=1))
        found.append((count, length, timed('stock', model, [batch], count).seconds[0] / num_microbatches))
    return found


def bound_seconds(lengths: np.ndarray, times: Sequence[tuple[int, int, float]]) -> float:
    """Seconds for these rows were each computed among rows of its own width, in microbatches of the same memory."""
    counts, widths, seconds = np.array(times).T
    # Seconds per token vary little with the width, so interpolate those.
    return float(np.sum(np.interp(lengths, widths, seconds / counts / widths) * lengths))


def fitted_cost(model: Any, lengths: np.ndarray, width: int) -> CostModel:
    """What the planner is told of this machine: the same rows in six small microbatches and in one, at many widths.

    The difference is what launches cost, which on a CPU is mostly the adding up of gradients in memory.
    """
    equal_widths(lengths, model, 1, width // 4)  # the first ones of a process are slow
    small, joined = [], []
    for _ in range(3):
        small.append(equal_widths(lengths, model, 1, width // 8, num_microbatches=6))
        joined.append(equal_widths(lengths, model, 6, width // 8))
    medians = [
        (*shapes[0][:2], statistics.median(shape[2] for shape in shapes))
        for repeats in (small, joined)
        for shapes in zip(*repeats, strict=True)
    ]
    counts, widths, seconds = zip(*medians, strict=True)
    return CostModel.fit(counts, widths, seconds)


def measure(name: str, lengths: np.ndarray, device_batch: int, methods: Sequence[str], steps: int, rounds: int) -> Row:
    rng = np.random.default_rng(0)
    model = build_model()
    layout = BatchLayout.for_model(model)
    drawn = rng.choice(lengths, (steps, device_batch))
    batches = [layout.concat(make_rows(row.tolist(), seed)) for seed, row in enumerate(drawn)]
    real = int(drawn.sum())
    # Same caps as the device batches', which differ a little in width.
    width = int(np.mean([batch['input_ids'].shape[1] for batch in batches]))
    cost = fitted_cost(model, drawn, width)
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    clocks: dict[str, StepClock] = {}
    bounds = []
    for _ in range(rounds):
        for method in methods:
            clocks[method] = timed(method, model, batches, MICROBATCH, cost)
            seconds[method].append(sum(clocks[method].seconds))
        bounds.append(bound_seconds(drawn, equal_widths(drawn, model, MICROBATCH, width)))

    def against(times: Sequence[float], method: str) -> float:
        return statistics.median(a / b for a, b in zip(times, seconds[method], strict=True))

    rows = []
    for method in methods:
        rows.append({
            'method': METHODS[method],
            'tokens_per_second': real / statistics.median(seconds[method]),
            'against_stock': against(seconds['stock'], method) if 'stock' in methods else None,
            'against_hugging_face': against(seconds['collate'], method) if 'collate' in methods else None,
            'share_of_bound': against(bounds, method),
            'padding': 1 - real / clocks[method].positions,
            'largest_microbatch': clocks[method].largest,
            'saved_mib': saved_bytes(method, model, batches[0], MICROBATCH, cost) / 2**20,
            'seconds': seconds[method],
        })  # fmt: skip
    return {
        'set': name, 'device_batch': device_batch, 'microbatch': MICROBATCH, 'steps': steps, 'rounds': rounds,
        'mean_length': float(drawn.mean()), 'variation': float(drawn.std() / drawn.mean()), 'cost': asdict(cost),
        'bound_tokens_per_second': real / statistics.median(bounds), 'bounds': bounds, 'methods': rows,
    }  # fmt: skip


def length_sets(folder: Path | None) -> dict[str, np.ndarray]:
    sets = {'lognormal CV 0.9': np.clip(lognormal(0.92, mean=320).lengths, 12, 2048)}
    sets[LONG] = lognormal(0.92).lengths
    sets['no padding'] = np.full(1000, 128)
    digits = DigitsDataset(build_digits_processor(), num_samples=512)
    sets['digits'] = np.array([digits[index]['input_ids'].shape[1] for index in range(512)])
    if folder is not None:
        tables, _ = read_tables(folder)
        sets['real tables / 4'] = np.maximum(tables.lengths // 4, 4)
    return sets


def main() -> None:
    warnings.simplefilter('ignore')
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lengths', type=Path, default=os.environ.get('COMPOSER_TOKACC_LENGTHS'))
    parser.add_argument('--sets', nargs='*', help="name and device batch, e.g. 'digits 32'")
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--quick', action='store_true', help='one round of one step')
    parser.add_argument('--results', type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    sets = length_sets(Path(given.lengths) if given.lengths else None)
    # Many rows give the planner most to choose from; the slowest ways to cut them are left out there.
    runs = [(name, 32, tuple(METHODS), 2 if name in ('digits', 'no padding') else 1) for name in sets]
    runs.append((LONG, 128, ('greedy', 'ours'), 1))
    file = given.results / 'throughput.json'
    # With --sets, what was measured of the others before stays.
    known = json.loads(file.read_text())['results'] if given.sets and file.exists() else []
    results = {(one['set'], one['device_batch']): one for one in known}
    for name, device_batch, methods, steps in runs:
        if given.sets and f'{name} {device_batch}' not in given.sets:
            continue
        steps, rounds = (1, 1) if given.quick else (steps, given.rounds)
        found = measure(name, sets[name], device_batch, methods, steps, rounds)
        results[name, device_batch] = {'machine': machine(), **found}
        show(found)
    given.results.mkdir(parents=True, exist_ok=True)
    ordered = [results[name, size] for name, size, *_ in runs if (name, size) in results]
    file.write_text(json.dumps({'results': ordered}, indent=1))
    picture(ordered, given.results / 'throughput.png')


if __name__ == '__main__':
    main()
