# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Sharing global batches among ranks: balance and step time against other samplers, and what the planning costs.

    python -m benchmarks.scaling [--lengths DIR] [--quick] [--no-timing]

Modelled on 8 to 4,096 ranks, timed on 2 and 4 ranks of this machine, planned for an epoch of 1.2 million samples.
Prints tables; writes results/scaling.json and .png.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.length_sets import LengthSet, lognormal, read_tables
from benchmarks.machine import machine, on_ranks
from benchmarks.modelled import STOCK, Rivals
from benchmarks.record import parser_of, show, write
from composer_tokacc.planning import CostModel, CutOptions, Rows, lower_bound
from composer_tokacc.sampling import RegroupingBatchSampler

MICROBATCH = 4
WORLDS = ((8, 16, 40), (64, 32, 10), (512, 32, 4), (4096, 32, 1))
"""Ranks, samples a rank, global batches."""


def simulate(length_set: LengthSet, num_ranks: int, per_rank: int, steps: int) -> list[dict[str, Any]]:
    """Imbalance, share of the bound and speed-up of every method, over several global batches."""
    cost = CostModel()
    rivals = Rivals(num_ranks, MICROBATCH, cost)
    global_batch = num_ranks * per_rank
    batches = length_set.draw(global_batch * steps, seed=num_ranks).global_batches(global_batch)
    found = {name: [method(batch) for batch in batches] for name, method in rivals.methods().items()}
    bounds = [
        lower_bound(
            Rows(
                batch.lengths,
                CutOptions(max_tokens=MICROBATCH * int(batch.lengths.max()), cost=cost),
                image_tokens=batch.image_tokens,
            ),
            num_ranks,
        )
        for batch in batches
    ]
    stock = sum(load.max() for load in found[STOCK]) / steps
    return [
        {
            'set': length_set.name, 'ranks': num_ranks, 'samples a rank': per_rank, 'method': name,
            'slowest / mean': float(sum(load.max() for load in per_step) / sum(load.mean() for load in per_step)),
            'share of bound': float(np.mean(bounds) / np.mean([load.max() for load in per_step])),
            'times stock': float(stock / np.mean([load.max() for load in per_step])),
        }
        for name, per_step in found.items()
    ]  # fmt: skip


def plan_epoch(lengths: np.ndarray, num_ranks: int, global_batch: int) -> dict[str, float]:
    """Processor seconds and memory of one epoch of a sampler, everything that it does included."""
    list(_sampler(np.resize(lengths, global_batch), num_ranks, global_batch))  # loads the compiled code
    start, start_busy = time.perf_counter(), time.process_time()
    num_batches = sum(1 for _ in _sampler(lengths, num_ranks, global_batch))
    busy, wall = time.process_time() - start_busy, time.perf_counter() - start
    tracemalloc.start()  # slows everything down, so a second pass
    for _ in itertools.islice(_sampler(lengths, num_ranks, global_batch), 20):
        pass
    # The order of the epoch is torch's, which is not traced: 8 bytes a sample.
    peak = tracemalloc.get_traced_memory()[1] + 8 * len(lengths)
    tracemalloc.stop()
    return {
        'ranks': num_ranks, 'global batch': global_batch, 'samples': len(lengths), 'batches': num_batches,
        'wall s': wall, 'processor s': busy, 'samples / s': len(lengths) / busy, 'bytes a sample': peak / len(lengths),
    }  # fmt: skip


def _sampler(lengths: np.ndarray, num_ranks: int, global_batch: int) -> RegroupingBatchSampler:
    return RegroupingBatchSampler(
        range(len(lengths)), lengths=lengths, global_batch_size=global_batch, num_replicas=num_ranks, rank=0,
        max_tokens=MICROBATCH * int(lengths.max()), drop_last=True,
    )  # fmt: skip


def plan_epochs(length_set: LengthSet, sizes: list[int]) -> list[dict[str, float]]:
    """As :func:`plan_epoch`, each in a process of its own: peak memory never shrinks."""
    rows = []
    for num_ranks, global_batch in ((8, 256), (64, 2048)):
        for size in sizes:
            with tempfile.TemporaryDirectory() as folder:
                table, result = Path(folder) / 'lengths.npy', Path(folder) / 'result.json'
                np.save(table, np.random.default_rng(0).choice(length_set.lengths, size))
                arguments = ['--plan', str(table), str(num_ranks), str(global_batch), str(result)]
                subprocess.run([sys.executable, '-m', 'benchmarks.scaling', *arguments], check=True)
                rows.append(json.loads(result.read_text()))
    return rows


def time_ranks(ranks: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    found = on_ranks(ranks, 'benchmarks.scaling_ranks', str(rounds), str(steps))
    methods, launch = found['methods'], found['cost']['launch']
    ours = methods['regrouped over ranks']
    return [
        {
            'ranks': ranks, 'method': method, 'launch in tokens': launch, 'wall s a step': times['wall'] / steps,
            'processor s a step': times['busy'] / steps, 'slowest / mean': times['imbalance'],
            'ours is faster, wall': times['wall'] / ours['wall'],
            'ours is faster, processor': times['busy'] / ours['busy'],
        }
        for method, times in methods.items()
    ]  # fmt: skip


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout='constrained')
    axes = figure.subplots(1, 2)
    rows = [row for row in rows if row['set'] == rows[0]['set']]
    for axis, key in zip(axes, ('slowest / mean', 'times stock'), strict=True):
        for name in dict.fromkeys(row['method'] for row in rows):
            line = [row for row in rows if row['method'] == name]
            axis.plot([row['ranks'] for row in line], [row[key] for row in line], 'o-', label=name)
        axis.set(xlabel='ranks', ylabel=key, xscale='log')
    axes[0].set_title('Slowest rank over the mean, modelled')
    axes[1].set_title('Times stock Composer, modelled, equal memory')
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    if sys.argv[1:2] == ['--plan']:
        table, num_ranks, global_batch, result = sys.argv[2:]
        Path(result).write_text(json.dumps(plan_epoch(np.load(table), int(num_ranks), int(global_batch))))
        return
    parser = parser_of(__doc__, lengths=True)
    parser.add_argument('--quick', action='store_true', help='fewer ranks, samples and rounds')
    parser.add_argument('--no-timing', action='store_true', help='leave the timed ranks out')
    given = parser.parse_args()
    tables, source = read_tables(given.lengths)
    worlds = WORLDS[:2] if given.quick else WORLDS
    rows = [row for length_set in (tables, lognormal(0.92)) for world in worlds for row in simulate(length_set, *world)]
    show(f'Modelled, memory of {MICROBATCH} rows; {source}', rows)
    planning = plan_epochs(tables, [75_000] if given.quick else [300_000, 600_000, 1_200_000])
    show('Planning an epoch, one core', planning)
    timed = []
    if not given.no_timing:
        for ranks in (2, 4):
            timed += time_ranks(ranks, *((1, 2) if given.quick else (2, 12)))
        show('Timed on this machine, global batch of 64, lognormal lengths', timed)
    report = {'source': source, 'machine': machine(), 'modelled': rows, 'planning': planning, 'timed': timed}
    write(given.results / 'scaling.json', report)
    picture(rows, given.results / 'scaling.png')


if __name__ == '__main__':
    main()
