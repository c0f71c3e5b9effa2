# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Trains epochs of all contenders in turns, on the ranks that `benchmarks.rivals` starts with Composer's launcher."""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from composer.utils import dist

from benchmarks.adapters import Gradients, gradients_of
from benchmarks.machine import join_ranks
from benchmarks.record import Row
from benchmarks.rivals.contenders import CONTENDERS, Task
from benchmarks.rivals.data import UNKNOWN, Samples, Sizes, collate, lengths_of, new_model
from benchmarks.rivals.probe import Trace, watched
from benchmarks.rivals.report import BOUND
from benchmarks.timed_steps import chunks
from composer_tokacc.batch import BatchDict
from composer_tokacc.invariance import relative_error
from tests.support.text import next_token_loss

HELD_OUT = 64


def train_epoch(name: str, sizes: Sizes, samples: Samples) -> tuple[Trace, Any, Row]:
    """Trains one epoch from the first weights. Returns the trace, the trained model and the settings."""
    model = new_model(sizes)
    task = Task(model, samples, sizes)
    if dist.get_world_size() > 1:
        dist.barrier()
    # Restores the environment afterwards, because accelerate sets variables and leaves them.
    with mock.patch.dict(os.environ), watched(model, samples) as trace:
        settings = CONTENDERS[name](task)
    gc.collect()
    return trace, model, settings


def inspect_epoch(
    name: str,
    sizes: Sizes,
    samples: Samples,
    held_out: Samples,
    references: dict[tuple[int, ...], Gradients],
) -> Row:
    """Trains one epoch and returns all figures of it except times.

    `references` is a cache for all contenders: the right gradient of a first step, by the indices of its samples.
    """
    trace, model, settings = train_epoch(name, sizes, samples)
    gradient = trace.gradient
    trace.gradient = {}  # not gathered, because the ranks have the same one
    traces: list[Trace] = dist.all_gather_object(trace)
    steps = samples_of_steps(traces)
    num_tokens = sum(sum(trace_of_rank.tokens) for trace_of_rank in traces)
    num_positions = sum(sum(trace_of_rank.positions) for trace_of_rank in traces)
    largest = max(trace_of_rank.largest_microbatch for trace_of_rank in traces)
    cap = Task(model, samples, sizes).cap
    indices = sorted(chain.from_iterable(steps))
    sizes_of_steps = [len(step) for step in steps]
    row: Row = {
        'settings': settings,
        'padded_share': 1 - num_tokens / num_positions,
        'largest_microbatch': largest,
        'cap': cap,
        'within_cap': largest <= cap,
        'rank_imbalance': statistics.median(imbalances_of_steps(traces)),
        'steps': len(steps),
        'samples_a_step': [min(sizes_of_steps), max(sizes_of_steps)],
        'every_sample_once': indices == list(range(len(samples))),
        'unknown_rows': indices.count(UNKNOWN),
        'filler_rows': sum(trace_of_rank.num_dummy_rows for trace_of_rank in traces),
        'global_batches': membership(steps, len(samples), sizes.global_batch),
        'held_out_loss': held_out_loss(model, held_out),
    }
    first = tuple(steps[0])
    if UNKNOWN not in first:
        if first not in references:
            references[first] = whole_gradient(new_model(sizes), samples, first)
        row['gradient_error'], _ = relative_error(gradient, references[first])
    return row


def samples_of_steps(traces: Sequence[Trace]) -> list[list[int]]:
    """Returns the sorted indices of the samples of all ranks in each step. A rank may have fewer steps than others."""
    steps = zip_longest(*[trace.indices for trace in traces], fillvalue=())
    return [sorted(chain.from_iterable(step)) for step in steps]


def imbalances_of_steps(traces: Sequence[Trace]) -> list[float]:
    """Returns for each step: the positions of the rank that has most of them, divided by the mean of the ranks."""
    imbalances = []
    for step in zip_longest(*[trace.positions for trace in traces]):
        positions = [number for number in step if number is not None]
        imbalances.append(max(positions) / statistics.mean(positions))
    return imbalances


def membership(indices_of_steps: Sequence[Sequence[int]], num_samples: int, size: int) -> str:
    """Says which samples the steps have: the global batches in order, or of a known shuffle, or others."""
    steps = [sorted(indices) for indices in indices_of_steps]
    # BatchRebalanceSampler of Transformers starts from this shuffle. No argument turns it off.
    generator = torch.Generator().manual_seed(42)
    shuffled = torch.randperm(num_samples, generator=generator).tolist()
    orders = {
        'the same': range(num_samples),
        'of a shuffle of its own': shuffled,
    }
    for name, order in orders.items():
        if steps == [sorted(part) for part in chunks(order, size)]:
            return name
    return 'by length'


def whole_gradient(model: Any, samples: Samples, indices: Sequence[int]) -> Gradients:
    """Returns the gradient of the mean over all tokens. Computed row by row, because one forward needs more memory."""
    model.train().zero_grad()
    num_labels = 0
    for index in indices:
        losses = token_losses(model, samples[index])
        losses.sum().backward()
        num_labels += len(losses)
    return {name: gradient / num_labels for name, gradient in gradients_of(model).items()}


def held_out_loss(model: Any, held_out: Samples) -> float:
    """Returns the mean loss over the tokens of samples that were not trained on."""
    model.eval()
    with torch.no_grad():
        losses = [token_losses(model, held_out[index]) for index in range(len(held_out))]
    return torch.cat(losses).mean().item()


def token_losses(model: Any, sample: BatchDict) -> torch.Tensor:
    """Returns the loss of each label. The first token has none, because no token comes before it."""
    batch = collate([sample])
    losses = next_token_loss(model(**batch).logits, batch['labels'], reduction='none')
    return losses[batch['labels'][0, 1:] != -100]


def time_epoch(name: str, sizes: Sizes, samples: Samples) -> Row:
    """Times an epoch. Leaves out the first step, which pays for work that a run does once."""
    trace, _, _ = train_epoch(name, sizes, samples)
    # In the bound all positions count as tokens, as if there were no padding at all.
    counts = trace.positions if name == BOUND else trace.tokens
    seconds = trace.ends[-1] - trace.ends[0]
    processor_seconds = trace.processor_ends[-1] - trace.processor_ends[0]
    tokens = sum(dist.all_gather_object(sum(counts[1:])))
    processor_seconds_of_ranks = sum(dist.all_gather_object(processor_seconds))
    return {
        'tokens_per_second': tokens / seconds,
        'tokens_per_processor_second': tokens / processor_seconds_of_ranks,
    }


def quartiles(values: Sequence[float]) -> list[float]:
    """Returns the lower quartile, the median and the upper quartile."""
    return np.quantile(values, (0.25, 0.5, 0.75)).tolist()


def measure(sizes: Sizes, set_name: str, names: Sequence[str], rounds: int) -> Iterator[list[Row]]:
    """Yields all cells of a set after each epoch, so that they can be saved. In a round, the contenders take turns."""
    lengths, source = lengths_of(set_name, sizes.mean)
    samples = Samples(sizes, lengths, ranks=dist.get_world_size())
    num_held_out = min(HELD_OUT, sizes.samples // 4)
    held_out = Samples(replace(sizes, samples=num_held_out), lengths, seed=1)
    references: dict[tuple[int, ...], Gradients] = {}
    cells: dict[str, Row] = {}
    for name in names:
        cell: Row = {
            'rival': name,
            'set': set_name,
            'source': source,
            'model': sizes.model,
            'ranks': dist.get_world_size(),
            'sizes': asdict(sizes),
        }
        try:
            if name == BOUND:
                _, _, cell['settings'] = train_epoch(name, sizes, samples)
            else:
                cell.update(inspect_epoch(name, sizes, samples, held_out, references))
        except Exception:
            # The other ranks may have gone on or may wait for this one, so the launch ends.
            if dist.get_world_size() > 1:
                raise
            cell['error'] = traceback.format_exc()
        cells[name] = cell
        # Composer's launcher shows only the output of rank 0.
        print(f'{sizes.model}, {set_name}, {name}: inspected', flush=True)
        yield list(cells.values())
    for number in range(rounds):
        for name, cell in cells.items():
            if 'error' in cell:
                continue
            epoch = time_epoch(name, sizes, samples)
            cell.setdefault('rounds', []).append(epoch)
            for figure in ('tokens_per_second', 'tokens_per_processor_second'):
                cell[figure] = quartiles([each_round[figure] for each_round in cell['rounds']])
            print(f'round {number + 1}, {name}: {epoch["tokens_per_second"]:,.0f} tokens/s', flush=True)
            yield list(cells.values())


def main() -> None:
    path, sizes, plan = sys.argv[1:]
    torch.multiprocessing.set_sharing_strategy('file_system')
    join_ranks()
    for package in ('transformers', 'composer', 'accelerate'):
        logging.getLogger(package).setLevel(logging.ERROR)
    for cells in measure(Sizes(**json.loads(sizes)), **json.loads(plan)):
        if dist.get_global_rank() == 0:
            Path(path).write_text(json.dumps(cells))
    dist.barrier()
    sys.stdout.flush()
    # A usual exit would wait forever for loader processes that a package leaves behind.
    os._exit(0)


if __name__ == '__main__':
    main()
