# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Shows which trainers have the gradient of one forward over the whole batch, for each split and number of ranks.

    python -m benchmarks.exactness

Attaches `verify_invariance` to each trainer. The reference is one plain forward over the rows of all ranks. Writes
results/exactness.json and the tables of docs/rivals.md.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

import numpy as np
from composer.utils import dist

from benchmarks.adapters import ADAPTERS, TITLES, Batch, Gradients, gradients_of, inputs_of
from benchmarks.machine import machine, on_ranks
from benchmarks.record import RESULTS, ROOT, Row, fill_page, parser_of, ranks_text, table, write_rows
from composer_tokacc import BatchLayout, verify_invariance
from tests.support.families import FAMILIES, ragged_samples
from tests.support.text import next_token_loss, text_model, text_rows

RESULTS_FILE = RESULTS / 'exactness.json'
PAGE = ROOT / 'docs' / 'rivals.md'
SUBJECTS = ('Llama', 'LLaVA', 'Qwen2.5-VL')
# On each rank. Microbatches of 16, 4 and 1 rows are accumulations of 1, 4 and 16.
ROWS = 16
ACCUMULATIONS = (1, 4, 16)
TOLERANCE = 2e-6


def subject_of(name: str) -> tuple[Any, list[Batch]]:
    """Returns a tiny model of the family, and rows for two ranks."""
    rng = np.random.default_rng(0)
    if name == 'Llama':
        shapes = []
        for length in rng.integers(4, 40, 2 * ROWS).tolist():
            num_labels = int(rng.integers(1, length))
            shapes.append((length, num_labels))
        return text_model(), text_rows(shapes)
    case = FAMILIES['llava' if name == 'LLaVA' else 'qwen2_5_vl']()
    samples = []
    for seed in range(6):
        samples += ragged_samples(seed=seed)
    rows = []
    for index in rng.permutation(len(samples))[: 2 * ROWS]:
        sample = samples[index]
        row = case.encode(sample)
        rows.append({**row, 'num_images': [len(sample.media('image'))]})
    return case.model, rows


def gradients_of_token_mean(model: Any, batch: Batch) -> Gradients:
    """Returns the gradients of the mean over all tokens, by one plain forward."""
    model.train().zero_grad(set_to_none=True)
    outputs = model(**inputs_of(model, batch))
    next_token_loss(outputs.logits, batch['labels']).backward()
    return gradients_of(model)


def check(subject: str, trainer: str) -> Row:
    """Checks one trainer with one model on the ranks of this launch."""
    model, rows = subject_of(subject)
    layout = BatchLayout.for_model(model)
    start = ROWS * dist.get_global_rank()
    train_step = ADAPTERS[trainer](model)

    def step(microbatches: list[Batch]) -> Gradients:
        model.train().zero_grad(set_to_none=True)
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
        'measured_on': {'machine': machine()},
    }


def tables_of(rows: list[Row]) -> str:
    """Returns a table for each model: trainers by ranks and accumulation."""
    cases = list(product((1, 2), ACCUMULATIONS))
    columns = [f'{ranks_text(ranks)}, x{accumulation}' for ranks, accumulation in cases]
    rows_by_launch = {(row['subject'], row['trainer'], row['ranks']): row for row in rows}
    parts = []
    for subject in SUBJECTS:
        lines = []
        for trainer, title in TITLES.items():
            texts = []
            for ranks, accumulation in cases:
                row = rows_by_launch[subject, trainer, ranks]
                texts.append(cell_text(row, accumulation))
            lines.append([title, *texts])
        parts.append(f'### {subject}\n\n{table(["", *columns], lines)}')
    return '\n'.join(parts)


def cell_text(row: Row, accumulation: int) -> str:
    """Returns the largest error of a trainer with this accumulation, and the factor of that `InvarianceCase`."""
    # The other cuts belong to no accumulation: 'again' computes the rows of all ranks at once, 'uneven' 15 rows and 1.
    cases = []
    for case in row['cases']:
        if case['microbatch_size'] == ROWS // accumulation and case['cut'] in ('in order', 'by length'):
            cases.append(case)
    worst = max(cases, key=lambda case: case['error'])
    if worst['error'] <= TOLERANCE:
        return 'exact'
    return f'{worst["error"]:.0%} off, x{worst["factor"]:.2f}'


def measure_on_ranks() -> list[Row]:
    """Checks all trainers with all models on the ranks of this launch."""
    rows = []
    for subject in SUBJECTS:
        for trainer in ADAPTERS:
            row = check(subject, trainer)
            rows.append(row)
            # Composer's launcher shows only the output of rank 0.
            print(subject, row['ranks'], trainer, cell_text(row, ACCUMULATIONS[-1]), flush=True)
    return rows


def main() -> None:
    arguments = parser_of(__doc__, results=RESULTS_FILE).parse_args()
    rows = on_ranks((1, 2), 'benchmarks.exactness')
    write_rows(arguments.results, {'rows': rows})
    if arguments.results == RESULTS_FILE:
        fill_page(PAGE, {'exactness': tables_of(rows)})


if __name__ == '__main__':
    main()
