# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Trains epochs of all contenders in turns, on one number of ranks. Runs under the composer launcher."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import os
import statistics
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from composer.utils import dist

from benchmarks.adapters import Gradients, gradients_of
from benchmarks.machine import join_ranks
from benchmarks.rivals.contenders import CONTENDERS, Task
from benchmarks.rivals.data import Samples, Sizes, collate, lengths_of, new_model
from benchmarks.rivals.probe import UNKNOWN, Trace, watched
from benchmarks.rivals.report import BOUND
from composer_tokacc.invariance import relative_error

Row = dict[str, Any]
HELD_OUT = 64


def run(
    name: str,
    sizes: Sizes,
    samples: Samples,
    *,
    inspect: bool = False,
) -> tuple[Trace, Any, Row]:
    """Trains one epoch from the first weights and returns the trace, the trained model and the settings."""
    model = new_model(sizes)
    task = Task(model, samples, sizes)
    if dist.get_world_size() > 1:
        dist.barrier()
    # Puts the environment back: accelerate leaves variables of its own.
    with mock.patch.dict(os.environ), watched(model, samples, inspect=inspect) as trace:
        settings = CONTENDERS[name](task)
    gc.collect()
    return trace, model, settings


def inspected(
    name: str,
    sizes: Sizes,
    samples: Samples,
    held_out: Samples,
    references: dict[tuple[int, ...], Gradients],
) -> Row:
    """Trains one epoch and returns everything about it that is not a time."""
    trace, model, settings = run(name, sizes, samples, inspect=True)
    fields = ('ids', 'positions', 'tokens', 'largest', 'num_dummy_rows')
    ranks = dist.all_gather_object({key: getattr(trace, key) for key in fields})
    ids = []
    imbalances = []
    for step in range(max(len(rank['ids']) for rank in ranks)):
        in_step = [rank for rank in ranks if step < len(rank['ids'])]
        ids.append(sorted(chain.from_iterable(rank['ids'][step] for rank in in_step)))
        positions = [rank['positions'][step] for rank in in_step]
        imbalances.append(max(positions) * len(positions) / sum(positions))
    num_tokens = sum(sum(rank['tokens']) for rank in ranks)
    num_positions = sum(sum(rank['positions']) for rank in ranks)
    largest = max(rank['largest'] for rank in ranks)
    cap = sizes.microbatch * int(samples.lengths.max())
    all_ids = sorted(chain.from_iterable(ids))
    row: Row = {
        'settings': settings,
        'padded_share': 1 - num_tokens / num_positions,
        'largest_microbatch': largest,
        'cap': cap,
        'within_cap': largest <= cap,
        'rank_imbalance': statistics.median(imbalances),
        'steps': len(ids),
        'samples_a_step': [min(map(len, ids)), max(map(len, ids))],
        'every_sample_once': all_ids == list(range(len(samples))),
        'unknown_rows': all_ids.count(UNKNOWN),
        'filler_rows': sum(rank['num_dummy_rows'] for rank in ranks),
        'global_batches': membership(ids, len(samples), sizes.global_batch),
        'held_out_loss': held_out_loss(model, held_out),
    }
    if UNKNOWN not in ids[0]:
        first = tuple(ids[0])
        if first not in references:
            references[first] = whole_gradient(new_model(sizes), samples, first)
        error, reason = relative_error(trace.gradient, references[first])
        row['gradient_error'] = error
        row['gradient_reason'] = reason
    return row


def membership(ids: Sequence[Sequence[int]], num_samples: int, size: int) -> str:
    """Says whether the steps hold the global batches in order, those of another shuffle, or others."""
    hashes = [digest(step) for step in ids]
    starts = range(0, num_samples, size)
    if hashes == [digest(range(start, start + size)) for start in starts]:
        return 'the same'
    # BatchRebalanceSampler of Transformers starts from this shuffle. No argument turns it off.
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(42)).tolist()
    if hashes == [digest(order[start : start + size]) for start in starts]:
        return 'of a shuffle of its own'
    return 'by length'


def digest(ids: Sequence[int]) -> str:
    text = ','.join(str(index) for index in sorted(ids))
    return hashlib.sha1(text.encode()).hexdigest()[:12]


def whole_gradient(model: Any, samples: Samples, ids: Sequence[int]) -> Gradients:
    """Returns the gradient of the mean over all tokens, row by row: one forward over all would not fit."""
    model.train().zero_grad()
    rows = [samples[index] for index in ids]
    count = sum(num_targets(row) for row in rows)
    for row in rows:
        loss = summed_loss(model, row) / count
        loss.backward()
    return gradients_of(model)


def held_out_loss(model: Any, held_out: Samples) -> float:
    """Returns the mean loss over the tokens of samples that nobody trained on."""
    model.eval()
    rows = [held_out[index] for index in range(len(held_out))]
    with torch.no_grad():
        total = sum(summed_loss(model, row).item() for row in rows)
    return total / sum(num_targets(row) for row in rows)


def num_targets(sample: Row) -> int:
    return int((sample['labels'][1:] != -100).sum())


def summed_loss(model: Any, sample: Row) -> torch.Tensor:
    batch = collate([sample])
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    labels = batch['labels'][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction='sum')


def timed(name: str, sizes: Sizes, samples: Samples) -> Row:
    """Times an epoch without its first step, which pays for things that a run does once."""
    trace, _, _ = run(name, sizes, samples)
    counts = trace.positions if name == BOUND else trace.tokens
    processor_seconds = trace.processor[-1] - trace.processor[0]
    ranks = dist.all_gather_object((sum(counts[1:]), processor_seconds))
    tokens = sum(count for count, _ in ranks)
    seconds = trace.ends[-1] - trace.ends[0]
    return {
        'tokens_per_second': tokens / seconds,
        'tokens_per_processor_second': tokens / sum(busy for _, busy in ranks),
        'load_average': round(os.getloadavg()[0], 2),
    }


def quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method='inclusive')


def measure(
    sizes: Sizes,
    set_name: str,
    names: Sequence[str],
    rounds: int,
) -> Iterator[list[Row]]:
    """Yields the cells of a set after each epoch. In every round, the contenders take turns."""
    lengths = lengths_of(set_name, sizes.mean)
    samples = Samples(sizes, lengths)
    held_out = Samples(sizes, lengths, seed=1, count=min(HELD_OUT, sizes.samples // 4))
    references: dict[tuple[int, ...], Gradients] = {}
    cells: dict[str, Row] = {}
    for name in names:
        cell: Row = {
            'rival': name,
            'set': set_name,
            'model': sizes.model,
            'ranks': dist.get_world_size(),
            'sizes': asdict(sizes),
            'variation': float(samples.lengths.std() / samples.lengths.mean()),
            'longest': int(samples.lengths.max()),
        }
        try:
            if name == BOUND:
                _, _, cell['settings'] = run(name, sizes, samples)
            else:
                cell.update(inspected(name, sizes, samples, held_out, references))
        except Exception:
            # Other ranks may be elsewhere, so the launch ends.
            if dist.get_world_size() > 1:
                raise
            cell['error'] = traceback.format_exc()
        cells[name] = cell
        say(f'{sizes.model}, {set_name}, {name}: looked at')
        yield list(cells.values())
    for number in range(rounds):
        for name, cell in cells.items():
            if 'error' in cell:
                continue
            cell.setdefault('rounds', []).append(timed(name, sizes, samples))
            for figure in ('tokens_per_second', 'tokens_per_processor_second'):
                cell[figure] = quartiles([each_round[figure] for each_round in cell['rounds']])
            say(f'round {number + 1}, {name}: {cell["rounds"][-1]["tokens_per_second"]:,.0f} tokens/s')
            yield list(cells.values())


def say(line: str) -> None:
    """Prints on the first rank."""
    if dist.get_global_rank() == 0:
        print(line, flush=True)


def begin() -> argparse.Namespace:
    """Reads the command line of this launch, joins the ranks and quiets the packages."""
    parser = argparse.ArgumentParser()
    parser.add_argument('results', type=Path)
    parser.add_argument('plan', type=json.loads)
    arguments = parser.parse_args()
    torch.multiprocessing.set_sharing_strategy('file_system')
    join_ranks()
    for package in ('transformers', 'composer', 'accelerate'):
        logging.getLogger(package).setLevel(logging.ERROR)
    return arguments


def end() -> NoReturn:
    """Ends this rank at once. Otherwise it would wait forever for loader processes that a package leaves behind."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    arguments = begin()
    plan = arguments.plan
    for cells in measure(Sizes(**plan['sizes']), plan['set'], plan['rivals'], plan['rounds']):
        if dist.get_global_rank() == 0:
            arguments.results.write_text(json.dumps(cells))
    end()


if __name__ == '__main__':
    main()
