# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What did my tokens weigh? `measure_token_weights` around one optimizer step of each trainer.

    .venv-rivals/bin/python -m benchmarks.token_weights     # everything (`make .venv-rivals/.installed` first)
    python -m benchmarks.token_weights --hosts composer ours --ranks 1
    python -m benchmarks.token_weights --hosts              # the picture and the page's table again, from the results

Eight ragged text rows, all of whose tokens carry loss, and 32 samples of a real mixture (AI2D, ChartQA, DocVQA; lengths
drawn from the tables in COMPOSER_TOKACC_LENGTHS, or from seeded synthetic ones, named as such), whose image tokens
carry none. A tiny Llama, float32; a step at learning rate 0. Each trainer makes it as its own guide says; a trainer
that is not installed is left out and keeps the figures that it has.

Writes results/token_weights.json, docs/figures/token_weights.svg and the table of docs/token_weights.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist, get_device

from benchmarks.length_sets import read_tables
from benchmarks.machine import machine, on_ranks
from benchmarks.record import RESULTS as FOLDER
from benchmarks.record import ROOT, filled, parser_of, table, write_at_once
from composer_tokacc import BatchLayout, TokenAccumulation, measure_token_weights, token_data_spec

RESULTS = FOLDER / 'token_weights.json'
PICTURE, PAGE = ROOT / 'docs' / 'figures' / 'token_weights.svg', ROOT / 'docs' / 'token_weights.md'
SUBJECTS = {'eight rows': 'eight ragged rows', 'mixture': 'AI2D, ChartQA, DocVQA'}
MICROBATCH = {'eight rows': 3, 'mixture': 4}
RANKS = {'eight rows': (1,), 'mixture': (1, 2)}
EIGHT, SAMPLES, SEED = (5, 9, 14, 30, 7, 22, 11, 3), 32, 0
VOCABULARY = 64
HOSTS = {
    'ours': ('**Composer with TokenAccumulation, `token_data_spec`**', 'mosaicml'),
    'hf': ('Hugging Face Trainer', 'transformers'),
    'trl': ('TRL SFTTrainer', 'trl'),
    'accelerate_tokens': ('accelerate, loss by tokens', 'accelerate'),
    'composer': ('stock Composer', 'mosaicml'),
    'composer_flag': ('Composer, `accumulate_train_batch_on_tokens`', 'mosaicml'),
    'lightning': ('Lightning, `accumulate_grad_batches`', 'lightning'),
    'accelerate': ('accelerate, `accumulate`', 'accelerate'),
    'plain': ('a plain loop, mean of means', 'torch'),
}
"""Title, package; the exact ones first."""
Batch = dict[str, Any]


def lengths_of(subject: str) -> tuple[list[int], list[int], str]:
    """Tokens of each sample, image tokens among them, and where they are from."""
    if subject == 'eight rows':
        return list(EIGHT), [0] * len(EIGHT), 'written down'
    tables, source = read_tables()
    drawn = tables.draw(SAMPLES, SEED)
    return drawn.lengths.tolist(), drawn.image_tokens.tolist(), source


def rows_of(lengths: list[int], without_loss: list[int]) -> list[Batch]:
    """One-row batches of random tokens, the first of which carry no loss."""
    generator, rows = torch.Generator().manual_seed(SEED), []
    for length, silent in zip(lengths, without_loss, strict=True):
        ids = torch.randint(3, VOCABULARY, (1, length), generator=generator)
        labels = ids.clone()
        labels[:, :silent] = -100
        rows.append({'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels})
    return rows


def tiny_llama() -> Any:
    """The same weights every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def ours(model: Any, microbatches: list[Batch]) -> None:
    """The three lines, on the device batch as a loader pads it."""
    from composer import Trainer
    from composer.models import HuggingFaceModel
    from torch.utils.data import DataLoader

    from benchmarks.timed_steps import Batches

    layout = BatchLayout.for_model(model)
    Trainer(
        model=HuggingFaceModel(model, shift_labels=True, use_logits=True),
        train_dataloader=token_data_spec(DataLoader(Batches([dict(layout.concat(microbatches))]), batch_size=None)),
        algorithms=[TokenAccumulation()],
        device_train_microbatch_size=len(microbatches[0]['input_ids']),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        max_duration='1ba', device='cpu', progress_bar=False,
    ).fit()  # fmt: skip


def trl(model: Any, microbatches: list[Batch]) -> None:
    """SFTTrainer on tokenized samples; ranks are dealt microbatches in turn, as they are here."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from benchmarks.rivals.data import build_processor

    samples = [
        {key: batch[key][row][batch['attention_mask'][row].bool()].tolist() for key in ('input_ids', 'labels')}
        for of_rank in zip(*dist.all_gather_object(microbatches), strict=True)
        for batch in of_rank
        for row in range(len(batch['input_ids']))
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, per_device_train_batch_size=len(microbatches[0]['input_ids']),
            gradient_accumulation_steps=len(microbatches), train_sampling_strategy='sequential', num_train_epochs=1,
            learning_rate=0.0, optim='sgd', max_grad_norm=0.0, use_cpu=True, bf16=False, save_strategy='no',
            report_to='none', disable_tqdm=True, logging_strategy='no', max_length=None, gradient_checkpointing=False,
            packing=False,
        )  # fmt: skip
        SFTTrainer(
            model, arguments, train_dataset=Dataset.from_list(samples), processing_class=build_processor().tokenizer
        ).train()


def step_of(host: str) -> Callable[[Any, list[Batch]], Any]:
    if host in ('ours', 'trl'):
        return {'ours': ours, 'trl': trl}[host]
    from benchmarks.rivals.adapters import ADAPTERS

    return lambda model, microbatches: ADAPTERS[host](model)(microbatches)


def measured(subject: str, host: str) -> dict[str, Any]:
    lengths, silent, source = lengths_of(subject)
    model, rank, ranks = tiny_llama(), dist.get_global_rank(), dist.get_world_size()
    layout = BatchLayout.for_model(model)
    own, size = rows_of(lengths, silent)[rank::ranks], MICROBATCH[subject]
    microbatches = [dict(layout.concat(own[start : start + size])) for start in range(0, len(own), size)]
    environment = dict(os.environ)
    with measure_token_weights(model.train()) as report:
        step_of(host)(model, microbatches)
    os.environ.clear()  # Lightning takes WORLD_SIZE away, accelerate leaves variables of its own
    os.environ.update(environment)
    of_ranks = dist.all_gather_object(report.weights)
    every = torch.cat([*chain.from_iterable(of_ranks)])
    expected = sum(length - max(silent_one, 1) for length, silent_one in zip(lengths, silent, strict=True))
    if len(every) != expected:  # repeated or dropped samples
        raise SystemExit(f'{host} trained on other tokens than it was given, got: {len(every)} of {expected}.')
    say(f'{subject}, {ranks} ranks, {host}\n{report}')
    return {
        'subject': subject, 'host': host, 'ranks': ranks, 'microbatch': size, 'lengths': lengths, 'source': source,
        'tokens': len(every), 'spread': report.spread, 'smallest': float(every.min() / every.mean()),
        'largest': float(every.max() / every.mean()), 'residual': max(dist.all_gather_object(report.residual)),
        # (tokens, smallest, largest) of each microbatch of each rank
        'microbatches': [
            [[len(one), float(one.min() / every.mean()), float(one.max() / every.mean())] for one in weights]
            for weights in of_ranks
        ],
        'measured_on': {'machine': machine(), HOSTS[host][1]: version(HOSTS[host][1])},
    }  # fmt: skip


def say(line: str) -> None:
    """On the first rank."""
    if dist.get_global_rank() == 0:
        print(line, flush=True)


def work(plan: list[tuple[str, str]], path: Path) -> None:
    """Under the composer launcher: all rows of a number of ranks."""
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    dist.initialize_dist(get_device('cpu'))
    for noisy in ('transformers', 'lightning.pytorch', 'lightning', 'composer', 'accelerate'):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    rows = [measured(subject, host) for subject, host in plan]
    if dist.get_global_rank() == 0:
        path.write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)  # a process that a package leaves behind would be waited for


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by trainer, subject and ranks, the newest of each; refuses to hold other samples beside those."""
    rows = {(row['subject'], row['ranks'], row['host']): row for row in [*old, *new]}
    for subject in SUBJECTS:
        sizes = {json.dumps([row['lengths'], row['microbatch']]) for row in rows.values() if row['subject'] == subject}
        if len(sizes) > 1:
            raise SystemExit(
                f'{subject}: the results hold trainers on other samples. Measure all, or write to another --results.'
            )
    return sorted(rows.values(), key=lambda row: (row['subject'], row['ranks'], [*HOSTS].index(row['host'])))


def table_of(rows: list[dict[str, Any]]) -> str:
    """The page's table: lightest and heaviest token of each trainer beside the mean of the step."""
    columns = [(subject, ranks) for subject, of in RANKS.items() for ranks in of]
    found = {(row['host'], row['subject'], row['ranks']): row for row in rows}
    versions = {row['host']: row['measured_on'][HOSTS[row['host']][1]] for row in rows}
    heads = [f'{subject}, {ranks} rank{"s" * (ranks > 1)}' for subject, ranks in columns]
    return table(['trainer', *heads], [
        [f'{title} ({package} {versions[host]})', *(_cell(found.get((host, *column))) for column in columns)]
        for host, (title, package) in HOSTS.items()
    ])  # fmt: skip


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return 'not measured'
    if row['spread'] < 1 + 1e-5:
        return 'all the same'
    return f'{row["smallest"]:.2f} to {row["largest"]:.2f}'


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Blocks as wide as a microbatch has tokens and as high as each weighs: stock Composer beside ours, on one rank."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams['svg.hashsalt'] = 'composer_tokacc'
    figure = Figure(figsize=(8, 4.2), layout='constrained')
    found = {(row['subject'], row['host']): row for row in rows if row['ranks'] == 1}
    panels = figure.subplots(len(SUBJECTS), 2, sharey='row')
    for line, subject in zip(panels, SUBJECTS, strict=True):
        for axes, host, colour in zip(line, ('composer', 'ours'), ('#c8553d', '#3b6fb6'), strict=True):
            row, left = found[subject, host], 0
            for tokens, smallest, largest in row['microbatches'][0]:
                axes.bar(left, (smallest + largest) / 2, width=tokens, align='edge', color=colour, ec='white', lw=1)
                left += tokens
            axes.axhline(1, color='black', lw=0.8, ls='--')
            axes.set_xlim(0, left)
            axes.spines[['top', 'right']].set_visible(False)
            data = SUBJECTS[subject] if 'SYNTHETIC' not in row['source'] else '32 samples of synthetic lengths'
            name = f'{data}: stock Composer' if host == 'composer' else 'TokenAccumulation'
            axes.set_title(f'{name}, {_cell(row)}', loc='left', fontsize=9)
            axes.set_xlabel(f'{row["tokens"]:,} tokens, a block a microbatch', fontsize=8)
            axes.tick_params(labelsize=8)
        line[0].set_ylabel('weight in the gradient\n(mean: 1)', fontsize=8)
    figure.savefig(path, metadata={'Date': None})


def main() -> None:
    parser = parser_of(__doc__, results=RESULTS)
    parser.add_argument('--hosts', nargs='*', choices=[*HOSTS, []], default=list(HOSTS))
    parser.add_argument('--ranks', type=int, nargs='+', choices=(1, 2), default=[1, 2])
    parser.add_argument('work_results', type=Path, nargs='?', help=argparse.SUPPRESS)
    given = parser.parse_args()
    installed = [host for host in given.hosts if find_spec(HOSTS[host][1].replace('mosaicml', 'composer'))]
    if given.work_results:
        [ranks] = given.ranks
        work(
            [(subject, host) for subject, of in RANKS.items() if ranks in of for host in installed], given.work_results
        )
        return
    rows = json.loads(given.results.read_text())['rows'] if given.results.exists() else []
    for ranks in given.ranks if installed else ():
        arguments = ['--ranks', str(ranks), '--hosts', *installed]
        rows = merged(rows, on_ranks(ranks, 'benchmarks.token_weights', *arguments))
    write_at_once(given.results, '{"rows": [\n' + ',\n'.join(json.dumps(row) for row in rows) + '\n]}\n')
    print(table_of(rows))
    if given.results.resolve() == RESULTS:
        draw(rows, PICTURE)
        PAGE.write_text(filled(PAGE.read_text(), {'weights': lambda: table_of(rows)}))


if __name__ == '__main__':
    main()
