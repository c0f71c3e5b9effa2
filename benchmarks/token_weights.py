# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures the weight of each token in the gradient of one optimizer step, with `measure_token_weights`.

    python -m benchmarks.token_weights [--hosts composer ours] [--ranks 1]
    python -m benchmarks.token_weights --hosts       # only draws the picture and writes the table, from the results

The hosts are trainers. They train on eight ragged text rows, in which all tokens carry loss, and on 32 samples of a
real mixture (AI2D, ChartQA, DocVQA), in which image tokens carry no loss. The lengths of the mixture are drawn from the
tables in COMPOSER_TOKACC_LENGTHS. Without tables they are synthetic, and the results say so. The model is a tiny Llama
in float32, at learning rate 0.

Writes results/token_weights.json, docs/figures/token_weights.svg and the table of docs/token_weights.md. Trainers that
are not measured keep their figures.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from composer.utils import dist
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.adapters import ADAPTERS, Batch
from benchmarks.length_sets import read_tables
from benchmarks.machine import machine, on_ranks
from benchmarks.record import (
    RESULTS,
    ROOT,
    fill_page,
    parser_of,
    ranks_text,
    table,
    write_rows,
)
from benchmarks.timed_steps import Batches, chunks, fit
from composer_tokacc import (
    BatchLayout,
    TokenAccumulation,
    measure_token_weights,
    token_data_spec,
)

RESULTS_FILE = RESULTS / 'token_weights.json'
PICTURE = ROOT / 'docs' / 'figures' / 'token_weights.svg'
PAGE = ROOT / 'docs' / 'token_weights.md'
SUBJECTS = {
    'eight rows': 'eight ragged rows',
    'mixture': 'AI2D, ChartQA, DocVQA',
}
MICROBATCH = {'eight rows': 3, 'mixture': 4}
CASES = (('eight rows', 1), ('mixture', 1), ('mixture', 2))
EIGHT_LENGTHS = (5, 9, 14, 30, 7, 22, 11, 3)
SAMPLES = 32
SEED = 0
VOCABULARY = 64
# Title and package of each trainer, exact ones first.
HOSTS = {
    'ours': ('**Composer with TokenAccumulation, `token_data_spec`**', 'mosaicml'),
    'hf': ('Hugging Face Trainer', 'transformers'),
    'composer': ('stock Composer', 'mosaicml'),
    'composer_flag': ('Composer, `accumulate_train_batch_on_tokens`', 'mosaicml'),
}
Row = dict[str, Any]


def lengths_of(subject: str) -> tuple[list[int], list[int], str]:
    """Returns the number of tokens and of image tokens of each sample, and the source of the lengths."""
    if subject == 'eight rows':
        return list(EIGHT_LENGTHS), [0] * len(EIGHT_LENGTHS), 'written down'
    tables, source = read_tables()
    samples = tables.draw(SAMPLES, SEED)
    return samples.lengths.tolist(), samples.image_tokens.tolist(), source


def rows_of(lengths: list[int], image_tokens: list[int]) -> list[Batch]:
    """Returns batches of one row with random tokens. Its image tokens come first and carry no loss."""
    generator = torch.Generator().manual_seed(SEED)
    rows = []
    for length, num_image_tokens in zip(lengths, image_tokens, strict=True):
        ids = torch.randint(3, VOCABULARY, (1, length), generator=generator)
        labels = ids.clone()
        labels[:, :num_image_tokens] = -100
        rows.append(
            {
                'input_ids': ids,
                'attention_mask': torch.ones_like(ids),
                'labels': labels,
            }
        )
    return rows


def tiny_llama() -> Any:
    """Returns a model with the same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train_three_lines(model: Any, microbatches: list[Batch]) -> None:
    """Trains a step with the three lines. The device batch is padded as a loader pads it."""
    device_batch = dict(BatchLayout.for_model(model).concat(microbatches))
    loader = DataLoader(Batches([device_batch]), batch_size=None)
    microbatch = len(microbatches[0]['input_ids'])
    fit(model, token_data_spec(loader), microbatch, num_steps=1, algorithms=[TokenAccumulation()])


def measure(subject: str, host: str) -> Row:
    """Measures the weights of one step on the ranks of this launch."""
    lengths, image_tokens, source = lengths_of(subject)
    model = tiny_llama().train()
    layout = BatchLayout.for_model(model)
    size = MICROBATCH[subject]
    rows = rows_of(lengths, image_tokens)[dist.get_global_rank() :: dist.get_world_size()]
    microbatches = [dict(layout.concat(part)) for part in chunks(rows, size)]
    with mock.patch.dict('os.environ'), measure_token_weights(model) as report:
        if host == 'ours':
            train_three_lines(model, microbatches)
        else:
            ADAPTERS[host](model)(microbatches)
    weights_of_ranks = dist.all_gather_object(report.weights)
    residual = max(dist.all_gather_object(report.residual))
    weights_of_microbatches = list(chain.from_iterable(weights_of_ranks))
    weights = torch.cat(weights_of_microbatches)
    expected = 0
    for length, num_image_tokens in zip(lengths, image_tokens, strict=True):
        # The first label of a row is not trained, because no token comes before it.
        expected += length - max(num_image_tokens, 1)
    if len(weights) != expected:
        raise SystemExit(f'{host} repeated or dropped samples: it trained {len(weights)} of {expected} tokens.')
    mean = weights.mean()
    package = HOSTS[host][1]
    return {
        'subject': subject,
        'host': host,
        'ranks': dist.get_world_size(),
        'microbatch': size,
        'lengths': lengths,
        'source': source,
        'tokens': len(weights),
        'spread': report.spread,
        'smallest': float(weights.min() / mean),
        'largest': float(weights.max() / mean),
        'residual': residual,
        'microbatches': [summaries_of(weights_of_rank, mean) for weights_of_rank in weights_of_ranks],
        'measured_on': {'machine': machine(), package: version(package)},
    }


def summaries_of(microbatches: list[torch.Tensor], mean: torch.Tensor) -> list[list[float]]:
    """Returns for each microbatch: the number of tokens, and the smallest and the largest weight over the mean."""
    summaries = []
    for weights in microbatches:
        smallest = float(weights.min() / mean)
        largest = float(weights.max() / mean)
        summaries.append([len(weights), smallest, largest])
    return summaries


def measure_on_ranks(hosts: list[str]) -> list[Row]:
    """Measures all cases that need as many ranks as this launch has."""
    rows = []
    for subject, ranks in CASES:
        if ranks == dist.get_world_size():
            rows += [measure(subject, host) for host in hosts]
    return rows


def merged(earlier: list[Row], measured: list[Row]) -> list[Row]:
    """Returns the newest row of each trainer and case. Stops if trainers of one subject had different samples."""
    rows = {}
    for row in [*earlier, *measured]:
        rows[row['subject'], row['ranks'], row['host']] = row
    for subject in SUBJECTS:
        samples = set()
        for row in rows.values():
            if row['subject'] == subject:
                samples.add(str((row['lengths'], row['microbatch'])))
        if len(samples) > 1:
            raise SystemExit(
                f'{subject}: the results hold trainers on other samples. Measure all, or write to another --results.'
            )
    order = list(HOSTS)

    def place(row: Row) -> tuple[str, int, int]:
        return row['subject'], row['ranks'], order.index(row['host'])

    return sorted(rows.values(), key=place)


def table_of(rows: list[Row]) -> str:
    """Returns the table of the page: the smallest and the largest weight of a token over the mean of the step."""
    cells = {}
    versions = {}
    for row in rows:
        host = row['host']
        _, package = HOSTS[host]
        cells[host, row['subject'], row['ranks']] = row
        versions[host] = row['measured_on'][package]
    columns = [f'{subject}, {ranks_text(ranks)}' for subject, ranks in CASES]
    lines = []
    for host, (title, package) in HOSTS.items():
        spans = [span_text(cells.get((host, subject, ranks))) for subject, ranks in CASES]
        lines.append([f'{title} ({package} {versions.get(host)})', *spans])
    return table(['trainer', *columns], lines)


def span_text(row: Row | None) -> str:
    if row is None:
        return 'not measured'
    if row['spread'] < 1 + 1e-5:
        return 'all the same'
    return f'{row["smallest"]:.2f} to {row["largest"]:.2f}'


def draw(rows: list[Row], path: Path) -> None:
    """Draws a panel for each subject, for stock Composer and for ours."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams['svg.hashsalt'] = 'composer_tokacc'
    figure = Figure(figsize=(8, 4.2), layout='constrained')
    panels = figure.subplots(len(SUBJECTS), 2, sharey='row')
    on_one_rank = {(row['subject'], row['host']): row for row in rows if row['ranks'] == 1}
    for (stock_axes, our_axes), (subject, samples) in zip(panels, SUBJECTS.items(), strict=True):
        stock_row = on_one_rank[subject, 'composer']
        our_row = on_one_rank[subject, 'ours']
        if 'SYNTHETIC' in stock_row['source']:
            samples = '32 samples of synthetic lengths'
        draw_panel(stock_axes, stock_row, f'{samples}: stock Composer', color='#c8553d')
        draw_panel(our_axes, our_row, 'TokenAccumulation', color='#3b6fb6')
        stock_axes.set_ylabel('weight in the gradient\n(mean: 1)', fontsize=8)
    figure.savefig(path, metadata={'Date': None})


def draw_panel(axes: Any, row: Row, name: str, color: str) -> None:
    """Draws a block for each microbatch. Its width is its number of tokens, its height their weight."""
    left = 0
    for tokens, smallest, largest in row['microbatches'][0]:
        height = (smallest + largest) / 2
        axes.bar(left, height, width=tokens, align='edge', color=color, ec='white', lw=1)
        left += tokens
    axes.axhline(1, color='black', lw=0.8, ls='--')
    axes.set_xlim(0, left)
    axes.spines[['top', 'right']].set_visible(False)
    axes.set_title(f'{name}, {span_text(row)}', loc='left', fontsize=9)
    axes.set_xlabel(f'{row["tokens"]:,} tokens, a block a microbatch', fontsize=8)
    axes.tick_params(labelsize=8)


def main() -> None:
    parser = parser_of(__doc__, results=RESULTS_FILE)
    # `--hosts` without a value gives an empty list. argparse checks it against the choices, too.
    parser.add_argument('--hosts', nargs='*', choices=[*HOSTS, []], default=list(HOSTS))
    parser.add_argument('--ranks', type=int, nargs='+', choices=(1, 2), default=[1, 2])
    arguments = parser.parse_args()
    rows: list[Row] = []
    if arguments.results.exists():
        rows = json.loads(arguments.results.read_text())['rows']
    if arguments.hosts:
        for ranks in arguments.ranks:
            measured = on_ranks(ranks, 'benchmarks.token_weights', hosts=arguments.hosts)
            rows = merged(rows, measured)
    write_rows(arguments.results, {'rows': rows})
    print(table_of(rows))
    if arguments.results.resolve() == RESULTS_FILE:
        draw(rows, PICTURE)
        fill_page(PAGE, {'weights': table_of(rows)})


if __name__ == '__main__':
    main()
