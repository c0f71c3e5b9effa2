# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures the weight of each token in the gradient of one optimizer step, with `measure_token_weights`.

    python -m benchmarks.token_weights
    python -m benchmarks.token_weights --report       # only draws the picture and writes the table, from the results

Each trainer (`host`) trains on two subjects. `eight rows` are ragged text rows, in which all tokens carry loss.
`mixture` has 32 samples as long as those of a real mixture (AI2D, ChartQA, DocVQA), in which image tokens carry no
loss. Its lengths are drawn from the tables in COMPOSER_TOKACC_LENGTHS. Without tables they are synthetic, and the
results say so. The model is a tiny Llama in float32, at learning rate 0.

Writes results/token_weights.json, docs/figures/token_weights.svg and the table of docs/token_weights.md.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.utils import dist

from benchmarks.adapters import ADAPTERS
from benchmarks.length_sets import read_tables
from benchmarks.machine import machine, on_ranks
from benchmarks.record import DOCS, RESULTS, Row, fill_page, new_figure, parser_of, ranks_text, read, table, write_rows
from benchmarks.timed_steps import chunks, data_of, fit
from composer_tokacc import BatchLayout, TokenAccumulation, measure_token_weights
from composer_tokacc.batch import BatchDict
from tests.support.text import text_model, text_rows

RESULTS_FILE = RESULTS / 'token_weights.json'
PICTURE = DOCS / 'figures' / 'token_weights.svg'
PAGE = DOCS / 'token_weights.md'
SUBJECTS = {'eight rows': 'eight ragged rows', 'mixture': 'AI2D, ChartQA, DocVQA'}
MICROBATCH = {'eight rows': 3, 'mixture': 4}
CASES = (('eight rows', 1), ('mixture', 1), ('mixture', 2))
EIGHT_LENGTHS = (5, 9, 14, 30, 7, 22, 11, 3)
SAMPLES = 32
# Title and package of each trainer, exact ones first.
HOSTS = {
    'ours': ('**Composer with TokenAccumulation, `token_data_spec`**', 'mosaicml'),
    'hf': ('Hugging Face Trainer', 'transformers'),
    'composer': ('stock Composer', 'mosaicml'),
    'composer_flag': ('Composer, `accumulate_train_batch_on_tokens`', 'mosaicml'),
}


def lengths_of(subject: str) -> tuple[list[int], list[int], str]:
    """Returns the number of tokens and of image tokens of each sample, and the source of the lengths."""
    if subject == 'eight rows':
        return list(EIGHT_LENGTHS), [0] * len(EIGHT_LENGTHS), 'written down'
    tables, source = read_tables()
    samples = tables.draw(SAMPLES, seed=0)
    return samples.lengths.tolist(), samples.image_tokens.tolist(), source


def rows_of(lengths: list[int], image_tokens: list[int]) -> list[BatchDict]:
    """Returns batches of one row with random tokens. Its image tokens come first and carry no loss."""
    shapes = []
    for length, num_image_tokens in zip(lengths, image_tokens, strict=True):
        shapes.append((length, length - num_image_tokens))
    return text_rows(shapes)


def train(host: str, model: Any, rows: list[BatchDict], size: int) -> None:
    """Trains a step on the rows of this rank, in microbatches of this size."""
    layout = BatchLayout.for_model(model)
    if host == 'ours':
        # The three lines of docs/trainer.md, so that `token_data_spec` cuts the batch. The adapter takes microbatches.
        device_batch = dict(layout.concat(rows))
        fit(model, data_of('ours', [device_batch], layout), size, algorithms=[TokenAccumulation()])
    else:
        microbatches = [dict(layout.concat(part)) for part in chunks(rows, size)]
        train_step = ADAPTERS[host](model)
        train_step(microbatches)


def measure(subject: str, host: str) -> Row:
    """Measures the weights of one step on the ranks of this launch."""
    lengths, image_tokens, source = lengths_of(subject)
    rows = rows_of(lengths, image_tokens)
    rows_of_rank = rows[dist.get_global_rank() :: dist.get_world_size()]
    size = MICROBATCH[subject]
    model = text_model(max_position_embeddings=4096).train()
    with measure_token_weights(model) as report:
        train(host, model, rows_of_rank, size)
    weights_of_ranks = dist.all_gather_object(report.weights)
    weights = torch.cat(list(chain.from_iterable(weights_of_ranks)))
    # The first label of a row is not trained, because no token comes before it.
    labels = torch.cat([row['labels'][0, 1:] for row in rows])
    expected = int((labels != -100).sum())
    if len(weights) != expected:
        raise SystemExit(f'{host} repeated or dropped samples: it trained {len(weights)} of {expected} tokens.')
    mean = weights.mean()
    return {
        'subject': subject,
        'host': host,
        'ranks': dist.get_world_size(),
        'microbatch': size,
        'source': source,
        'tokens': len(weights),
        'spread': report.spread,
        'smallest': float(weights.min() / mean),
        'largest': float(weights.max() / mean),
        'microbatches': [summaries_of(weights_of_rank, mean) for weights_of_rank in weights_of_ranks],
        'measured_on': {'machine': machine()},
    }


def summaries_of(microbatches: list[torch.Tensor], mean: torch.Tensor) -> list[list[float]]:
    """Returns for each microbatch: the number of tokens, and the smallest and largest weight, divided by the mean."""
    summaries = []
    for weights in microbatches:
        if len(weights) == 0:
            # A dummy microbatch: other ranks have more microbatches in this step.
            continue
        smallest = float(weights.min() / mean)
        largest = float(weights.max() / mean)
        summaries.append([len(weights), smallest, largest])
    return summaries


def measure_on_ranks() -> list[Row]:
    """Measures all cases that need as many ranks as this launch has."""
    rows = []
    for subject, ranks in CASES:
        if ranks == dist.get_world_size():
            rows += [measure(subject, host) for host in HOSTS]
    return rows


def table_of(rows: list[Row]) -> str:
    """Returns the table of the page: the smallest and the largest weight of a token over the mean of the step."""
    rows_by_case = {}
    for row in rows:
        rows_by_case[row['host'], row['subject'], row['ranks']] = row
    columns = [f'{subject}, {ranks_text(ranks)}' for subject, ranks in CASES]
    lines = []
    for host, (title, package) in HOSTS.items():
        measured = [rows_by_case[host, subject, ranks] for subject, ranks in CASES]
        version = measured[0]['measured_on']['machine'][package]
        spans = [span_text(row) for row in measured]
        lines.append([f'{title} ({package} {version})', *spans])
    return table(['trainer', *columns], lines)


def span_text(row: Row) -> str:
    if row['spread'] < 1 + 1e-5:
        return 'all the same'
    return f'{row["smallest"]:.2f} to {row["largest"]:.2f}'


def draw(rows: list[Row], path: Path) -> None:
    """Draws a panel for each subject, for stock Composer and for ours."""
    on_one_rank = {}
    for row in rows:
        if row['ranks'] == 1:
            on_one_rank[row['subject'], row['host']] = row
    figure = new_figure(8, 4.2, font_size=8)
    panels = figure.subplots(len(SUBJECTS), 2, sharey='row')
    for (stock_axes, our_axes), subject in zip(panels, SUBJECTS, strict=True):
        samples = SUBJECTS[subject]
        stock_row = on_one_rank[subject, 'composer']
        if 'SYNTHETIC' in stock_row['source']:
            samples = '32 samples of synthetic lengths'
        draw_panel(stock_axes, stock_row, f'{samples}: stock Composer', color='#c8553d')
        draw_panel(our_axes, on_one_rank[subject, 'ours'], 'TokenAccumulation', color='#3b6fb6')
        stock_axes.set_ylabel('weight in the gradient\n(mean: 1)')
    figure.savefig(path, metadata={'Date': None})


def draw_panel(axes: Any, row: Row, name: str, color: str) -> None:
    """Draws a block for each microbatch of rank 0. Width: its number of tokens. Height: the middle of their weights."""
    tokens, smallest, largest = np.transpose(row['microbatches'][0])
    ends = tokens.cumsum()
    heights = (smallest + largest) / 2
    axes.bar(ends - tokens, heights, width=tokens, align='edge', color=color, ec='white', lw=1)
    axes.axhline(1, color='black', lw=0.8, ls='--')
    axes.set_xlim(0, ends[-1])
    axes.set_title(f'{name}, {span_text(row)}')
    axes.set_xlabel(f'{row["tokens"]:,} tokens, a block a microbatch')


def main() -> None:
    arguments = parser_of(__doc__, report=True).parse_args()
    path = arguments.results / RESULTS_FILE.name
    if not arguments.report:
        measured = on_ranks((1, 2), 'benchmarks.token_weights')
        write_rows(path, {'rows': measured})
    rows = read(path)['rows']
    print(table_of(rows))
    if path == RESULTS_FILE:
        draw(rows, PICTURE)
        fill_page(PAGE, {'weights': table_of(rows)})


if __name__ == '__main__':
    main()
