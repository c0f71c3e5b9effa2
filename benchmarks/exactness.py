# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Shows which trainers have the gradient of one forward over the whole batch, for each split and number of ranks.

    python -m benchmarks.exactness

Attaches `verify_invariance` to each trainer. The reference is one plain forward over the rows of all ranks. Writes
results/exactness.json and the tables of docs/rivals.md.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from composer.utils import dist

from benchmarks.adapters import ADAPTERS, TITLES, Gradients, gradients_of, inputs_of
from benchmarks.machine import machine, on_ranks
from benchmarks.record import DOCS, RESULTS, Row, fill_page, parser_of, ranks_text, table, write_rows
from composer_tokacc import BatchLayout, verify_invariance
from composer_tokacc.batch import BatchDict
from tests.support.families import FAMILIES, ragged_samples
from tests.support.text import next_token_loss, text_model, text_rows

RESULTS_FILE = RESULTS / 'exactness.json'
PAGE = DOCS / 'rivals.md'
# Names of the multimodal models in tests/support/families.py, by the titles of the page.
FAMILY_NAMES = {'LLaVA': 'llava', 'Qwen2.5-VL': 'qwen2_5_vl'}
SUBJECTS = ('Llama', *FAMILY_NAMES)
# On each rank. Microbatches of 16, 4 and 1 rows are accumulations of 1, 4 and 16.
ROWS = 16
ACCUMULATIONS = (1, 4, 16)
TOLERANCE = 2e-6


def subject_of(name: str) -> tuple[Any, list[BatchDict]]:
    """Returns a tiny model, and rows for two ranks."""
    rng = np.random.default_rng(0)
    if name == 'Llama':
        shapes = []
        for length in rng.integers(4, 40, 2 * ROWS).tolist():
            num_labels = int(rng.integers(1, length))
            shapes.append((length, num_labels))
        return text_model(), text_rows(shapes)
    samples = []
    for seed in range(6):
        samples += ragged_samples(seed=seed)
    case = FAMILIES[FAMILY_NAMES[name]]()
    rows = []
    for index in rng.permutation(len(samples))[: 2 * ROWS]:
        sample = samples[index]
        row = case.encode(sample)
        rows.append({**row, 'num_images': [len(sample.media('image'))]})
    return case.model, rows


def gradients_of_token_mean(model: Any, batch: BatchDict) -> Gradients:
    """Returns the gradients of the mean over all tokens, by one plain forward."""
    model.train().zero_grad(set_to_none=True)
    outputs = model(**inputs_of(model, batch))
    next_token_loss(outputs.logits, batch['labels']).backward()
    return gradients_of(model)


def check(subject: str, trainer: str) -> Row:
    """Checks one trainer with one model on the ranks of this launch."""
    model, rows = subject_of(subject)
    train_step = ADAPTERS[trainer](model)

    def step(microbatches: list[BatchDict]) -> Gradients:
        model.train().zero_grad(set_to_none=True)
        return train_step(microbatches)

    first_row = ROWS * dist.get_global_rank()
    report = verify_invariance(
        step,
        rows[first_row : first_row + ROWS],
        layout=BatchLayout.for_model(model),
        reference=partial(gradients_of_token_mean, model),
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
    """Returns a table for each model: a line for each trainer, a column for each number of ranks and accumulation."""
    cases = list(product((1, 2), ACCUMULATIONS))
    columns = [f'{ranks_text(ranks)}, x{accumulation}' for ranks, accumulation in cases]
    rows_by_launch = {}
    for row in rows:
        rows_by_launch[row['subject'], row['trainer'], row['ranks']] = row
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
    # Other cuts are no accumulation: 'again' has the rows of all ranks in one microbatch, 'uneven' has 15 rows and one.
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
    return [check(subject, trainer) for subject, trainer in product(SUBJECTS, ADAPTERS)]


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    rows = on_ranks((1, 2), 'benchmarks.exactness')
    tables = tables_of(rows)
    print(tables)
    write_rows(arguments.results / RESULTS_FILE.name, {'rows': rows})
    if arguments.results == RESULTS:
        fill_page(PAGE, {'exactness': tables})


if __name__ == '__main__':
    main()
