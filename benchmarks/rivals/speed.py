# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Epochs of every contender on one number of ranks, in turns; runs under the composer launcher."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from composer.utils import dist, get_device

from benchmarks.rivals.contenders import CONTENDERS, Task, takes
from benchmarks.rivals.data import Samples, Sizes, collate, lengths_of, new_model
from benchmarks.rivals.probe import UNKNOWN, Gradients, Seen, watched
from benchmarks.rivals.report import BOUND
from composer_tokacc.invariance import relative_error

Row = dict[str, Any]
HELD_OUT = 64


def run(name: str, sizes: Sizes, samples: Samples, **options: bool) -> tuple[Seen, Any, Row]:
    """One epoch from the first weights; what was seen, the trained model, the settings."""
    model = new_model(sizes)
    task = Task(model, samples, sizes, int(samples.lengths.max()))
    if dist.get_world_size() > 1:
        dist.barrier()
    environment = dict(os.environ)
    with watched(model, samples, **options) as seen:
        settings = CONTENDERS[name](task)
    os.environ.clear()  # Lightning takes WORLD_SIZE away, accelerate leaves variables of its own
    os.environ.update(environment)
    gc.collect()
    return seen, model, settings


def inspected(name: str, sizes: Sizes, samples: Samples, held_out: Samples, references: dict[Any, Gradients]) -> Row:
    """Everything about a contender that is not a time, on rank 0."""
    seen, model, settings = run(name, sizes, samples, inspect=True)
    ranks = dist.all_gather_object(
        {key: getattr(seen, key) for key in ('ids', 'positions', 'tokens', 'largest', 'saved', 'fillers')}
    )
    steps = max(len(rank['positions']) for rank in ranks)
    of_step = [[rank['ids'][step] for rank in ranks if step < len(rank['ids'])] for step in range(steps)]
    ids = [sorted(chain.from_iterable(parts)) for parts in of_step]
    positions = [[rank['positions'][step] for rank in ranks if step < len(rank['positions'])] for step in range(steps)]
    real, all_positions = sum(sum(rank['tokens']) for rank in ranks), sum(map(sum, positions))
    largest = max(rank['largest'] for rank in ranks)
    cap = sizes.microbatch * int(samples.lengths.max())
    once = sorted(chain.from_iterable(ids))
    row: Row = {
        'settings': settings,
        'padded_share': 1 - real / all_positions,
        'largest_microbatch': largest,
        'cap': cap,
        'within_cap': largest <= cap,
        'saved_mib': max(rank['saved'] for rank in ranks) / 2**20,
        'rank_imbalance': statistics.median(max(of) * len(of) / sum(of) for of in positions),
        'steps': steps,
        'samples_a_step': [min(map(len, ids)), max(map(len, ids))],
        'every_sample_once': once == list(range(len(samples))),
        'unknown_rows': once.count(UNKNOWN),
        'filler_rows': sum(rank['fillers'] for rank in ranks),
        'global_batches': membership(ids, len(samples), sizes.global_batch),
        'hashes': [digest(one) for one in ids],
        'held_out_loss': held_out_loss(model, held_out),
    }
    if UNKNOWN not in ids[0]:
        key = tuple(ids[0])
        if key not in references:
            references[key] = whole_gradient(new_model(sizes), samples, ids[0])
        row['gradient_error'], row['gradient_reason'] = relative_error(seen.gradient, references[key])
        row['gradient_factor'] = factor(seen.gradient, references[key])
    return row


def membership(ids: Sequence[Sequence[int]], num_samples: int, size: int) -> str:
    """Whether the steps hold the global batches of the order given, of a shuffle of its own, or others."""
    if [digest(one) for one in ids] == [digest(range(k, k + size)) for k in range(0, num_samples, size)]:
        return 'the same'
    # What transformers' BatchRebalanceSampler starts from, whose shuffle no argument turns off.
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(42)).tolist()
    if [digest(one) for one in ids] == [digest(sorted(order[k : k + size])) for k in range(0, num_samples, size)]:
        return 'of a shuffle of its own'
    return 'by length'


def digest(ids: Sequence[int]) -> str:
    return hashlib.sha1(','.join(map(str, sorted(ids))).encode()).hexdigest()[:12]


def whole_gradient(model: Any, samples: Samples, ids: Sequence[int]) -> Gradients:
    """Of the mean over all tokens of these samples, row by row: a forward over all at once would not fit."""
    model.train().zero_grad()
    count = sum(int((samples[one]['labels'][1:] != -100).sum()) for one in ids)
    for one in ids:
        (token_loss(model, collate([samples[one]])) / count).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def token_loss(model: Any, batch: Row) -> torch.Tensor:
    """Sum over the tokens that carry loss."""
    logits, labels = model(**batch).logits[:, :-1], batch['labels'][:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum')


def held_out_loss(model: Any, samples: Samples) -> float:
    """Mean over the tokens of samples that nobody trained on."""
    model.eval()
    with torch.no_grad():
        total = sum(token_loss(model, collate([sample])).item() for sample in samples)  # pyright: ignore
    return total / sum(int((sample['labels'][1:] != -100).sum()) for sample in samples)  # pyright: ignore


def factor(found: Gradients, expected: Gradients) -> float:
    """Length of the gradient along the right one."""
    along = sum(
        float((found[name].double() * value.double()).sum()) for name, value in expected.items() if name in found
    )
    return along / sum(float(value.double().square().sum()) for value in expected.values())


def timed(name: str, sizes: Sizes, samples: Samples) -> Row:
    """Times of an epoch without its first step, which pays for what a run does once."""
    seen, _, _ = run(name, sizes, samples)
    spent = seen.processor[-1] - seen.processor[0]
    counts = seen.positions if name == BOUND else seen.tokens
    ranks = dist.all_gather_object((sum(counts[1:]), spent, seen.rss))
    tokens = sum(count for count, *_ in ranks)
    seconds = seen.ends[-1] - seen.ends[0]
    steps = [end - start for start, end in pairwise(seen.ends)]
    return {
        'tokens_per_second': tokens / seconds,
        'tokens_per_processor_second': tokens / sum(spent for _, spent, _ in ranks),
        'longest_step': max(steps) / statistics.median(steps),
        'loader_wait_share': sum(seen.waits[1:]) / seconds,
        'rss_mib': max(rss for *_, rss in ranks) / 2**20,
        'load_average': round(os.getloadavg()[0], 2),
    }


def quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method='inclusive')


def measure(sizes: Sizes, set_name: str, names: Sequence[str], rounds: int) -> Iterator[list[Row]]:
    """The cells of a set, every contender in turn in every round; all that there is so far after each."""
    lengths = lengths_of(set_name, sizes.mean)
    samples = Samples(sizes, lengths)
    held_out = Samples(sizes, lengths, seed=1, count=HELD_OUT)
    names = [name for name in names if takes(name, sizes.model)]
    cells: dict[str, Row] = {}
    references: dict[Any, Gradients] = {}
    about = {
        'set': set_name, 'model': sizes.model, 'ranks': dist.get_world_size(), 'sizes': asdict(sizes),
        'variation': float(samples.lengths.std() / samples.lengths.mean()), 'longest': int(samples.lengths.max()),
    }  # fmt: skip
    if set_name == 'tables':
        about['tables'] = 'real' if os.environ.get('COMPOSER_TOKACC_LENGTHS') else 'synthetic'
    for name in names:
        began = time.monotonic()
        try:
            if name == BOUND:
                found = {'settings': run(name, sizes, samples)[2]}
            else:
                found = inspected(name, sizes, samples, held_out, references)
            cells[name] = {'rival': name, **about, **found}
        except Exception:
            cells[name] = {'rival': name, **about, 'error': traceback.format_exc()}
            if dist.get_world_size() > 1:
                raise  # the other ranks may be elsewhere
        say(f'{about["model"]}, {set_name}, {about["ranks"]} ranks, {name}: {time.monotonic() - began:.1f} s')
        yield list(cells.values())
    for number in range(rounds):
        for name in names:
            cell = cells[name]
            if 'error' not in cell:
                cell.setdefault('rounds', []).append(timed(name, sizes, samples))
                for figure in ('tokens_per_second', 'tokens_per_processor_second'):
                    cell[figure] = quartiles([one[figure] for one in cell['rounds']])
                cell['rss_mib'] = statistics.median(one['rss_mib'] for one in cell['rounds'])
                say(f'round {number + 1}, {name}: {cell["rounds"][-1]["tokens_per_second"]:,.0f} tokens/s')
                yield list(cells.values())


def say(line: str) -> None:
    """On the first rank."""
    if dist.get_global_rank() == 0:
        print(line, flush=True)


def begin() -> tuple[dict[str, Any], Path]:
    """The plan on this launch's command line and where its results go; one thread, ranks joined, packages quiet."""
    warnings.simplefilter('ignore')
    parser = argparse.ArgumentParser()
    parser.add_argument('results', type=Path)
    parser.add_argument('plan', type=json.loads)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy('file_system')
    dist.initialize_dist(get_device('cpu'))
    for noisy in ('transformers', 'lightning.pytorch', 'lightning', 'composer', 'accelerate'):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    return given.plan, given.results


def end() -> NoReturn:
    """Ends this rank at once: a loader process that a package leaves behind would be waited for without end."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    plan, path = begin()
    for cells in measure(Sizes(**plan['sizes']), plan['set'], plan['rivals'], plan['rounds']):
        if dist.get_global_rank() == 0:
            path.write_text(json.dumps(cells))
    end()


if __name__ == '__main__':
    main()
