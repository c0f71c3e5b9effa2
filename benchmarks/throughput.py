# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Real tokens per second of the same steps, cut in seven ways: one process, one memory cap, the same rows.

    python -m benchmarks.throughput [--lengths DIR] [--sets NAME ...] [--rounds 5] [--quick]

A small LLaVA (hidden size 256, 4 layers, fp32) trains through the real Composer Trainer. Every method gets the memory
of `microbatch` rows as wide as the device batch. Rounds take the methods in turn; figures are medians over rounds. The
bound times rows of many widths among rows of their own width, in microbatches of the same memory, and adds them up:
no padding at all, perfectly cut. DIR holds tables `tokens,image_tiles` as .csv.gz (real data; scaled down in width for
the CPU); without it those sets are left out. Prints tables; writes results/throughput.json and .png.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer import DataSpec, Trainer
from composer.core import Callback, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader, IterableDataset
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.length_sets import lognormal, read_tables
from benchmarks.machine import machine
from composer_tokacc import BatchLayout, TokenAccumulation, token_data_spec
from composer_tokacc.counting import annotate
from composer_tokacc.data import DigitsDataset, build_digits_processor

RESULTS = Path(__file__).resolve().parent / 'results'
VOCABULARY, IMAGE_TOKEN, IMAGE_LENGTH = 512, 3, 4
METHODS = {
    'stock': 'stock Composer',
    'trim': 'stock + trimming each microbatch',
    'collate': 'Hugging Face style, padded per microbatch',
    'greedy': 'sorted, cut greedily',
    'ours': 'token_data_spec',
    'packing': 'token_data_spec, packing=True',
}
Row = dict[str, Any]


def build_model() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_seq_length=IMAGE_LENGTH,
        vision_feature_layer=-1, vision_feature_select_strategy='default',
    )  # fmt: skip
    config.use_cache = False
    return LlavaForConditionalGeneration(config)


def make_rows(lengths: Sequence[int], seed: int) -> list[Row]:
    """One-row batches; every other row long enough for one begins with an image."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, length in enumerate(lengths):
        ids = torch.randint(4, VOCABULARY, (1, int(length)), generator=generator)
        row: Row = {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': ids.clone(), 'num_images': [0]}
        if index % 2 == 0 and length > 2 * IMAGE_LENGTH:
            ids[:, :IMAGE_LENGTH] = IMAGE_TOKEN
            row['labels'][:, : length // 2] = -100
            row['pixel_values'] = torch.randn(1, 3, 16, 16, generator=generator)
            row['num_images'] = [1]
        rows.append(row)
    return rows


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

    def chunks(order: Sequence[int], size: int) -> list[Sequence[int]]:
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


def data_of(method: str, batches: Sequence[Row], layout: BatchLayout) -> DataSpec:
    loader = DataLoader(Batches(batches), batch_size=None)
    if method in ('ours', 'packing'):
        return token_data_spec(loader, layout=layout, packing=method == 'packing')
    return DataSpec(
        loader,
        batch_transforms=annotate,
        split_batch=split_of(method, layout, len(batches[0]['input_ids'])),
        get_num_samples_in_batch=lambda batch: len(batch['input_ids']),
    )


def timed(method: str, model: Any, batches: Sequence[Row], microbatch: int) -> StepClock:
    """All steps through a Trainer. The algorithm is on for all methods: only the cut differs."""
    clock = StepClock()
    wrapped = HuggingFaceModel(model, shift_labels=True, use_logits=True)
    trainer = Trainer(
        model=wrapped,
        train_dataloader=data_of(method, batches, BatchLayout.for_model(model)),
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
    return clock


def saved_bytes(method: str, model: Any, batch: Row, microbatch: int) -> int:
    """Largest activation memory that a microbatch of the batch keeps for its backward."""
    layout = BatchLayout.for_model(model)
    spec = data_of(method, [batch], layout)
    batch = {**spec.batch_transforms(batch), **({'packed': 'checked'} if method == 'packing' else {})}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    named = inspect.signature(model.forward).parameters
    peak = 0
    for part in spec.split_batch(batch, microbatch):
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = model(**{key: value for key, value in part.items() if key in named})
        peak = max(peak, sum(storages.values()))
        del outputs
    return peak


def bound_seconds(lengths: Sequence[int], model: Any, microbatch: int, width: int, repeats: int) -> float:
    """Seconds for these rows were each computed among rows of its own width, in microbatches of the same memory."""
    widths = np.unique(np.geomspace(max(min(lengths), 2), max(lengths), 12).astype(int))
    per_row = []
    for length in widths:
        count = max(microbatch * width // int(length), 1)
        batch = BatchLayout.for_model(model).concat(make_rows([int(length)] * count, seed=1))
        clocks = [timed('stock', model, [batch], count).seconds[0] for _ in range(repeats)]
        per_row.append(statistics.median(clocks) / count)
    # Seconds per token vary little with the width, so interpolate those.
    per_token = np.interp(lengths, widths, np.array(per_row) / widths)
    return float(np.sum(per_token * np.array(lengths)))


def measure(name: str, lengths: np.ndarray, device_batch: int, microbatch: int, steps: int, rounds: int) -> Row:
    rng = np.random.default_rng(0)
    model = build_model()
    layout = BatchLayout.for_model(model)
    drawn = rng.choice(lengths, (steps, device_batch))
    batches = [layout.concat(make_rows(row.tolist(), seed)) for seed, row in enumerate(drawn)]
    real = int(drawn.sum())
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    clocks: dict[str, StepClock] = {}
    bounds = []
    for _ in range(rounds):
        for method in METHODS:
            clocks[method] = timed(method, model, batches, microbatch)
            seconds[method].append(sum(clocks[method].seconds))
        # Same caps as the device batches', which differ a little in width.
        width = int(np.mean([batch['input_ids'].shape[1] for batch in batches]))
        bounds.append(bound_seconds(drawn.flatten().tolist(), model, microbatch, width, 1))
    bound = statistics.median(bounds)
    rows = []
    for method, title in METHODS.items():
        median = statistics.median(seconds[method])
        rows.append({
            'method': title,
            'tokens_per_second': real / median,
            'against_stock': statistics.median(a / b for a, b in zip(seconds['stock'], seconds[method], strict=True)),
            'against_hugging_face': statistics.median(
                a / b for a, b in zip(seconds['collate'], seconds[method], strict=True)
            ),
            'share_of_bound': statistics.median(a / b for a, b in zip(bounds, seconds[method], strict=True)),
            'padding': 1 - real / clocks[method].positions,
            'largest_microbatch': clocks[method].largest,
            'saved_mib': max(saved_bytes(method, model, batch, microbatch) for batch in batches[:1]) / 2**20,
            'seconds': seconds[method],
        })  # fmt: skip
    return {
        'set': name, 'device_batch': device_batch, 'microbatch': microbatch, 'steps': steps, 'rounds': rounds,
        'variation': float(drawn.std() / drawn.mean()), 'bound_tokens_per_second': real / bound, 'methods': rows,
    }  # fmt: skip


def length_sets(folder: Path | None) -> dict[str, np.ndarray]:
    sets = {'lognormal CV 0.9': np.clip(lognormal(0.92, mean=160).lengths, 12, 1024)}
    sets['no padding'] = np.full(1000, 128)
    digits = DigitsDataset(build_digits_processor(), num_samples=512)
    sets['digits'] = np.array([digits[index]['input_ids'].shape[1] for index in range(512)])
    if folder is not None:
        tables, _ = read_tables(folder)
        sets['real tables / 4'] = np.maximum(tables.lengths // 4, 4)
    return sets


def show(result: Row) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f'{result["set"]} (variation {result["variation"]:.2f}), device batch {result["device_batch"]}, memory '
        f'of {result["microbatch"]} rows; bound {result["bound_tokens_per_second"]:,.0f} real tokens/s'
    )
    for column in ('method', 'real tokens/s', 'x stock', 'x HF style', 'of bound', 'padding', 'largest', 'saved MiB'):
        table.add_column(column, justify='left' if column == 'method' else 'right')
    for row in result['methods']:
        table.add_row(
            row['method'], f'{row["tokens_per_second"]:,.0f}', f'{row["against_stock"]:.2f}',
            f'{row["against_hugging_face"]:.2f}', f'{row["share_of_bound"]:.2f}', f'{row["padding"]:.0%}',
            f'{row["largest_microbatch"]:,}', f'{row["saved_mib"]:.0f}',
        )  # fmt: skip
    Console(width=130).print(table)


def picture(results: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(results), figsize=(4 * len(results) + 2, 4), sharey=True, layout='constrained'
    )
    for axis, result in zip(np.atleast_1d(axes), results, strict=True):
        speeds = [row['tokens_per_second'] for row in result['methods']]
        colors = ['tab:gray'] * 4 + ['tab:green', 'tab:olive']
        bars = axis.barh(range(len(speeds)), speeds, color=colors)
        labels = [f'{row["against_stock"]:.1f}x, {row["padding"]:.0%} padding' for row in result['methods']]
        axis.bar_label(bars, labels, padding=3, fontsize=7)
        axis.axvline(result['bound_tokens_per_second'], color='tab:red', lw=1, ls='--', label='no padding at all')
        axis.set_xlim(0, max(*speeds, result['bound_tokens_per_second']) * 1.5)
        axis.set_yticks(range(len(speeds)), [row['method'] for row in result['methods']], fontsize=8)
        axis.invert_yaxis()
        axis.set_title(f'{result["set"]}\ndevice batch {result["device_batch"]}', fontsize=9)
        axis.set_xlabel('real tokens per second')
    np.atleast_1d(axes)[0].legend(fontsize=7, loc='lower right')
    figure.suptitle('Same rows, same memory: small LLaVA, fp32, CPU')
    figure.savefig(path, dpi=130)


def main() -> None:
    warnings.simplefilter('ignore')
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lengths', type=Path, default=os.environ.get('COMPOSER_TOKACC_LENGTHS'))
    parser.add_argument('--sets', nargs='*')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--quick', action='store_true', help='one round of one step')
    parser.add_argument('--results', type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    sets = length_sets(Path(given.lengths) if given.lengths else None)
    runs = [(name, 32, 4, 2) for name in sets] + [('lognormal CV 0.9', 128, 4, 1)]
    results = []
    for name, device_batch, microbatch, steps in runs:
        if given.sets and not any(wanted in name for wanted in given.sets):
            continue
        steps, rounds = (1, 1) if given.quick else (steps, given.rounds)
        results.append(measure(name, sets[name], device_batch, microbatch, steps, rounds))
        show(results[-1])
    given.results.mkdir(parents=True, exist_ok=True)
    summary = {'machine': machine(), 'results': results}
    (given.results / 'throughput.json').write_text(json.dumps(summary, indent=1))
    picture(results, given.results / 'throughput.png')


if __name__ == '__main__':
    main()
