# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes the tables of the README, docs/index.md, docs/rivals.md and docs/rivals_speed.md from the results file.

A cell has the figures of one contender with one model, number of ranks and set of lengths. A case is a model, a number
of ranks and a set.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.record import DOCS, RESULTS, ROOT, Row, fill_page, ranks_text, table

RESULTS_FILE = RESULTS / 'rivals.json'
PAGES = (
    ROOT / 'README.md',
    DOCS / 'index.md',
    DOCS / 'rivals.md',
    DOCS / 'rivals_speed.md',
)
# The set of lengths that the overview shows.
SHOWN_SET = 'lognormal 0.9'
BOUND = 'bound'
EXACT = 2e-6
MODEL_TITLES = {'llava': 'LLaVA', 'llama': 'Llama', 'smolvlm': 'SmolVLM-256M', 'qwen': 'Qwen2.5-VL-3B'}
TITLES = {
    'composer': 'Composer',
    'hf': 'Hugging Face Trainer',
    'hf_group': 'Hugging Face Trainer, group_by_length',
    'hf_rebalance': 'Hugging Face Trainer, batch_rebalance',
    'trl': 'TRL',
    'odb': 'ODB, exact loss scaling',
    'hf_planned': 'Hugging Face Trainer, our sampler and weights',
    'accelerate_planned': 'accelerate, our sampler and weights',
    'ours': '**ours, three lines**',
    'ours_all_logits': "**ours, with the sampler, `logits='all'`**",
    'ours_sampler': '**ours, with the sampler**',
    'ours_packed': '**ours, packed**',
    BOUND: '*no padding, perfectly balanced*',
}
OUR_RUNS = ('ours', 'ours_sampler', 'ours_packed')
# The trainers that ours are compared with. The two with our sampler are not rivals.
RIVALS = ('composer', 'hf', 'hf_group', 'hf_rebalance', 'odb')
HEADLINE = ('composer', 'hf', *OUR_RUNS)


def parts_of(results: Row) -> dict[str, str]:
    """Returns the parts of the pages that are written from these results, by name."""
    cells = [cell for cell in results['cells'] if 'rounds' in cell]
    return {
        'headline': overview(cells, HEADLINE),
        'overview': overview(cells, tuple(TITLES)),
        'measured_on': measured_on(cells),
        'first_gradient': first_gradient(cells),
        'speed': speed(cells),
        'ratios': ratios(cells),
        'reached_the_model': reached_the_model(cells),
    }


def overview(cells: Sequence[Row], names: Sequence[str]) -> str:
    """Returns a table: which samples a step holds, how exact the first gradient is, and real tokens a second."""
    groups = grouped(cells_of_set(cells, SHOWN_SET))
    rows = []
    for name in names:
        cells_of_groups = [by_rival(group).get(name) for group in groups.values()]
        measured = [cell for cell in cells_of_groups if cell]
        if not measured:
            continue
        membership = ''
        error = ''
        if name != BOUND:
            memberships = dict.fromkeys(cell['global_batches'] for cell in measured)  # each once, in order
            membership = ', '.join(memberships)
            error = worst_error(measured)
        rows.append([TITLES[name], membership, error, *map(median_text, cells_of_groups)])
    return table(['', 'samples of a step', 'first gradient', *groups], rows)


def median_text(cell: Row | None) -> str:
    """Returns the median of real tokens a second. Empty if the cell was not measured."""
    return f'{cell["tokens_per_second"][1]:,.0f}' if cell else ''


def worst_error(cells: Sequence[Row]) -> str:
    if not cells:
        return ''
    worst = max(cell['gradient_error'] for cell in cells)
    return 'exact' if worst <= EXACT else f'up to {worst:.0%} off'


def measured_on(cells: Sequence[Row]) -> str:
    """Returns the machine of most cases, the other machines with their cases, and the versions."""
    cases_of_machines = defaultdict(list)
    packages = set()
    for case, cells_of_case in by_case(cells).items():
        for cell in cells_of_case:
            measured = cell['measured_on']
            host = measured['machine']
            machine = f'{host["cores"]} cores of {host["processor"]}'
            if case not in cases_of_machines[machine]:
                cases_of_machines[machine].append(case)
            for package, version in measured['versions'].items():
                packages.add(f'{package} {version}')
    usual_machine, *other_machines = sorted(cases_of_machines, key=lambda machine: -len(cases_of_machines[machine]))
    sentences = [usual_machine]
    for machine in other_machines:
        sentences.append(f'{machine}: {"; ".join(cases_of_machines[machine])}')
    sentences.append(', '.join(sorted(packages)))
    return '. '.join(sentences) + '.'


def first_gradient(cells: Sequence[Row]) -> str:
    """Returns a table of the errors of the first step's gradient: smallest and largest of all sets of lengths."""
    groups = grouped([cell for cell in cells if cell['rival'] != BOUND])
    rows = []
    for name in TITLES:
        spans = []
        for group in groups.values():
            errors = [cell['gradient_error'] for cell in group if cell['rival'] == name]
            spans.append(span(errors))
        if any(spans):
            rows.append([TITLES[name], *spans])
    return table(['', *groups], rows)


def span(errors: Sequence[float]) -> str:
    if not errors:
        return ''
    low = error_text(min(errors))
    high = error_text(max(errors))
    return low if low == high else f'{low} to {high}'


def error_text(error: float) -> str:
    return 'exact' if error <= EXACT else f'{error:.1%}'


def speed(cells: Sequence[Row]) -> str:
    """Returns a table for each model and number of ranks: real tokens a second of time, and of processor time."""
    parts = []
    for title, group in grouped(cells).items():
        sets = sorted({cell['set'] for cell in group})
        sets.sort(key=lambda name: not name.startswith('lognormal'))  # lognormal ones first
        measured = {(cell['rival'], cell['set']): cell for cell in group}
        rows = []
        for name in by_rival(group):
            texts = [speed_text(measured.get((name, set_name))) for set_name in sets]
            rows.append([TITLES[name], *texts])
        parts.append(f'### {title}\n\n{table(["", *sets], rows)}')
    return '\n'.join(parts)


def speed_text(cell: Row | None) -> str:
    if cell is None:
        return ''
    low, _, high = cell['tokens_per_second']
    quartiles = f' ({low:,.0f}-{high:,.0f})' if len(cell['rounds']) > 1 else ''
    return f'{median_text(cell)}{quartiles}; {cell["tokens_per_processor_second"][1]:,.0f}'


def ratios(cells: Sequence[Row]) -> str:
    """Returns a table of our speed over the speed of each rival: the range over all cases.

    Its last column names the cases in which the rival is faster.
    """
    rows = []
    for name in RIVALS:
        measured = []
        for case, cells_of_case in by_case(cells).items():
            ratio = against(cells_of_case, name)
            if ratio is not None:
                measured.append((ratio, case))
        measured.sort()
        least, least_case = measured[0]
        largest, _ = measured[-1]
        faster = '; '.join(f'{case} ({1 / ratio:.2f})' for ratio, case in measured if ratio < 1)
        rows.append([TITLES[name], f'{least:.2f} to {largest:.2f}', least_case, len(measured), faster])
    return table(['', 'ours over it', 'least', 'cells', 'where it is faster'], rows)


def against(cells: Sequence[Row], rival: str) -> float | None:
    """Returns how many times as fast as a rival our fastest run is, in one case. None: one of the two is not measured.

    It is the median of the ratios of the rounds. If the two were measured in different runs, they did not take turns.
    Then it is the ratio of their medians.
    """
    contenders = by_rival(cells)
    our_cells = [contenders[name] for name in OUR_RUNS if name in contenders]
    if rival not in contenders or not our_cells:
        return None
    best = max(our_cells, key=lambda cell: cell['tokens_per_second'][1])
    other = contenders[rival]
    if best['measured_on'] != other['measured_on']:
        return best['tokens_per_second'][1] / other['tokens_per_second'][1]
    return ratio_of_rounds(best, other)


def ratio_of_rounds(our_cell: Row, other: Row, figure: str = 'tokens_per_second') -> float:
    """Returns how many times as fast ours is in a round: the median over the rounds, in which the two took turns."""
    quotients = []
    for our_round, other_round in zip(our_cell['rounds'], other['rounds'], strict=False):
        quotients.append(our_round[figure] / other_round[figure])
    return statistics.median(quotients)


def reached_the_model(cells: Sequence[Row]) -> str:
    """Returns a table of the measurements of the hooks, for each model and number of ranks."""
    cells = [cell for cell in cells if cell['rival'] != BOUND]
    columns = (
        '',
        'padding',
        'largest',
        'imbalance',
        'steps',
        'samples a step',
        'global batches',
        'gradient error',
        'eval loss',
    )
    parts = []
    for title, group in grouped(cells_of_set(cells, SHOWN_SET)).items():
        rows = [reached_row(cell) for cell in by_rival(group).values()]
        parts.append(f'### {title}\n\n{table(columns, rows)}')
    over_the_cap = []
    for case, cells_of_case in by_case(cells).items():
        if not all(cell['within_cap'] for cell in cells_of_case):
            over_the_cap.append(case)
    parts.append(f'Microbatches over the cap, in all sets: {"; ".join(over_the_cap) or "none"}.')
    return '\n'.join(parts)


def reached_row(cell: Row) -> list[object]:
    low, high = cell['samples_a_step']
    global_batches = cell['global_batches']
    if not cell['every_sample_once']:
        global_batches += ', not each sample once'
    return [
        TITLES[cell['rival']],
        f'{cell["padded_share"]:.0%}',
        f'{cell["largest_microbatch"] / cell["cap"]:.0%}',
        f'{cell["rank_imbalance"]:.2f}',
        cell['steps'],
        low if low == high else f'{low}-{high}',
        global_batches,
        error_text(cell['gradient_error']),
        f'{cell["held_out_loss"]:.4f}',
    ]


def cells_of_set(cells: Sequence[Row], set_name: str) -> list[Row]:
    return [cell for cell in cells if cell['set'] == set_name]


def grouped(cells: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the cells of each model and number of ranks, LLaVA first."""
    groups: dict[str, list[Row]] = {}
    llava_first = sorted(cells, key=lambda cell: (cell['model'] == 'llama', cell['ranks']))
    for cell in llava_first:
        title = f'{MODEL_TITLES[cell["model"]]}, {ranks_text(cell["ranks"])}'
        groups.setdefault(title, []).append(cell)
    return groups


def by_case(cells: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the cells of each case: model, number of ranks and set."""
    cases: dict[str, list[Row]] = {}
    for title, group in grouped(cells).items():
        for cell in group:
            cases.setdefault(f'{title}, {cell["set"]}', []).append(cell)
    return cases


def by_rival(cells: Sequence[Row]) -> dict[str, Row]:
    """Returns the cell of each contender, or the last one if it has several, in the order of the titles."""
    cells_by_name = {cell['rival']: cell for cell in cells}
    return {name: cells_by_name[name] for name in TITLES if name in cells_by_name}


def write_pages(results: Row) -> None:
    parts = parts_of(results)
    for page in PAGES:
        fill_page(page, parts)
