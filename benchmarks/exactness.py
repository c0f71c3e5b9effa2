# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Shows which trainers have the gradient of one forward over the whole batch, by microbatches and ranks.

    python -m benchmarks.exactness [--ranks 1 2] [--subjects Llama LLaVA]

Attaches `verify_invariance` to each trainer. The reference is one plain forward over the rows of all ranks. Writes
results/exactness.json and the tables of docs/rivals.md.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any
from unittest import mock

import numpy as np
import torch
from composer.utils import dist

from benchmarks.adapters import (
    ADAPTERS,
    TITLES,
    Batch,
    Gradients,
    gradients_of,
    inputs_of,
)
from benchmarks.machine import machine, on_ranks, versions
from benchmarks.record import RESULTS, ROOT, fill_page, parser_of, ranks_text, table, write_rows
from composer_tokacc import BatchLayout, verify_invariance
from tests.support.families import FAMILIES, ragged_samples
from tests.support.text import text_model, text_rows

RESULTS_FILE = RESULTS / 'exactness.json'
PAGE = ROOT / 'docs' / 'rivals.md'
SUBJECTS = ('Llama', 'LLaVA', 'Qwen2.5-VL')
# On each rank. Microbatches of 16, 4 and 1 rows are accumulations of 1, 4 and 16.
ROWS = 16
ACCUMULATIONS = (1, 4, 16)
TOLERANCE = 2e-6
Row = dict[str, Any]


def subject_of(name: str) -> tuple[Any, list[Batch]]:
    """Returns a tiny model of the family, and rows for two ranks."""
    rng = np.random.default_rng(0)
    if name == 'Llama':
        lengths = rng.integers(4, 40, 2 * ROWS).tolist()
        rows = text_rows([(length, int(rng.integers(1, length))) for length in lengths])
        return text_model(), rows
    case = FAMILIES['llava' if name == 'LLaVA' else 'qwen2_5_vl']()
    samples = []
    for seed in range(6):
        samples += ragged_samples(with_images=True, seed=seed)
    rows = []
    for index in rng.permutation(len(samples))[: 2 * ROWS]:
        sample = samples[index]
        row = case.encode(sample)
        rows.append({**row, 'num_images': [len(sample.images)]})
    return case.model, rows


def gradients_of_token_mean(model: Any, batch: Batch) -> Gradients:
    """Returns the gradients of the mean over all tokens, by one plain forward."""
    model.train().zero_grad(set_to_none=True)
    outputs = model(**inputs_of(model, batch))
    logits = outputs.logits[:, :-1].flatten(0, 1)
    labels = batch['labels'][:, 1:].flatten()
    torch.nn.functional.cross_entropy(logits, labels).backward()
    gradients = gradients_of(model)
    model.zero_grad(set_to_none=True)
    return gradients


def check(subject: str, trainer: str) -> Row:
    """Checks one trainer with one model on the ranks of this launch."""
    model, rows = subject_of(subject)
    layout = BatchLayout.for_model(model)
    start = ROWS * dist.get_global_rank()
    train_step = ADAPTERS[trainer](model)

    def step(microbatches: list[Batch]) -> Gradients:
        model.train().zero_grad(set_to_none=True)
        with mock.patch.dict('os.environ'):
            return train_step(microbatches)

    report = verify_invariance(
        step,
        rows[start : start + ROWS],
        layout=layout,
        reference=lambda batch: gradients_of_token_mean(model, batch),
        microbatch_sizes=(1, 4, ROWS),
        padding_sides=('right',),
        tolerance=TOLERANCE,
    )
    return {
        'subject': subject,
        'ranks': dist.get_world_size(),
        'trainer': trainer,
        'cases': [asdict(case) for case in report.cases],
        'measured_on': {'machine': machine(), 'versions': versions(('mosaicml', 'torch', 'transformers'))},
    }


def tables_of(rows: list[Row]) -> str:
    """Returns a table for each model: trainers by ranks and accumulation."""
    parts = []
    for subject in SUBJECTS:
        rows_of_subject = {}
        for row in rows:
            if row['subject'] == subject:
                rows_of_subject[row['trainer'], row['ranks']] = row
        columns = ['']
        lines = [[title] for title in TITLES.values()]
        for ranks in (1, 2):
            for accumulation in ACCUMULATIONS:
                columns.append(f'{ranks_text(ranks)}, x{accumulation}')
                for line, trainer in zip(lines, TITLES, strict=True):
                    line.append(cell_text(rows_of_subject[trainer, ranks], accumulation))
        parts.append(f'### {subject}\n\n{table(columns, lines)}')
    return '\n'.join(parts)


def cell_text(row: Row, accumulation: int) -> str:
    """Returns the largest error of a trainer with this accumulation, and the factor of that gradient's length."""
    size = ROWS // accumulation
    cuts = ('in order', 'by length')
    cases = []
    for case in row['cases']:
        if case['microbatch_size'] == size and case['cut'] in cuts:
            cases.append(case)
    worst = max(cases, key=lambda case: case['error'])
    if worst['error'] <= TOLERANCE:
        return 'exact'
    return f'{worst["error"]:.0%} off, x{worst["factor"]:.2f}'


def measure_on_ranks(subjects: list[str]) -> list[Row]:
    """Checks all trainers with these models on the ranks of this launch."""
    return [check(subject, trainer) for subject in subjects for trainer in ADAPTERS]


def merged(earlier: list[Row], measured: list[Row]) -> list[Row]:
    """Returns the newest row of each model, trainer and number of ranks."""
    rows = {}
    for row in [*earlier, *measured]:
        rows[row['subject'], row['ranks'], row['trainer']] = row
    return list(rows.values())


def main() -> None:
    parser = parser_of(__doc__, results=RESULTS_FILE)
    parser.add_argument('--ranks', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--subjects', nargs='+', choices=SUBJECTS, default=list(SUBJECTS))
    arguments = parser.parse_args()
    path = arguments.results
    rows: list[Row] = []
    if path.exists():
        rows = json.loads(path.read_text())['rows']
    for ranks in arguments.ranks:
        measured = on_ranks(ranks, 'benchmarks.exactness', subjects=arguments.subjects)
        for row in measured:
            text = cell_text(row, ACCUMULATIONS[-1])
            print(f'{row["subject"]}, {ranks_text(ranks)}, {row["trainer"]}: {text}')
        rows = merged(rows, measured)
    write_rows(path, {'rows': rows})
    if path == RESULTS_FILE:
        fill_page(PAGE, {'exactness': tables_of(rows)})


if __name__ == '__main__':
    main()
