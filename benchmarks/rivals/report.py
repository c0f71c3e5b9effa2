# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The tables of docs/rivals.md, docs/rivals_speed.md and the README, and their picture, from the results file alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS as FOLDER
from benchmarks.record import ROOT, filled, table

RESULTS = FOLDER / 'rivals.json'
PAGES = tuple(ROOT / name for name in ('README.md', 'docs/index.md', 'docs/rivals.md', 'docs/rivals_speed.md'))
SHOWN, BOUND = 'lognormal 0.9', 'bound'
EXACT = 2e-6
BUSY = 1.7
"""Load average a core from which the machine did other work: a loader and a trainer a rank are ours."""
HEADLINE = ('composer', 'hf', 'ours', 'ours_sampler', 'ours_packed')
OVERVIEW = (
    *('composer', 'hf', 'hf_group', 'hf_rebalance', 'hf_planned', 'odb', 'accelerate', 'accelerate_planned'),
    *('ours', 'ours_sampler', 'ours_packed', BOUND),
)
Row = dict[str, Any]
CONTENDER_TITLES = {
    'composer': 'Composer',
    'composer_flag': 'Composer, accumulate_train_batch_on_tokens',
    'hf': 'Hugging Face Trainer',
    'hf_group': 'Hugging Face Trainer, group_by_length',
    'hf_rebalance': 'Hugging Face Trainer, batch_rebalance',
    'hf_flat': 'Hugging Face Trainer, padding-free',
    'trl': 'TRL SFTTrainer, vision',
    'odb': 'ODB, exact loss scaling',
    'lightning': 'Lightning',
    'accelerate': 'accelerate',
    'accelerate_tokens': 'accelerate, loss by tokens',
    'hf_planned': 'Hugging Face Trainer, our sampler and weights',
    'accelerate_planned': 'accelerate, our sampler and weights',
    'ours': 'ours, three lines',
    'ours_sampler': 'ours, with the sampler',
    'ours_packed': 'ours, packed',
    BOUND: '*no padding, perfectly balanced*',
}
OUR_SAMPLER = ('hf_planned', 'accelerate_planned')
"""Its batches and weights in the trainers of others."""
OURS = ('ours', 'ours_sampler', 'ours_packed')
TRAINER_TITLES = {
    'plain': 'a plain loop, mean of means',
    'composer': 'Composer',
    'composer_flag': 'Composer, accumulate_train_batch_on_tokens',
    'hf': 'Hugging Face Trainer',
    'lightning': 'Lightning',
    'accelerate': 'accelerate',
    'accelerate_tokens': 'accelerate, loss by tokens',
    'ours': '**Composer with TokenAccumulation**',
}


def parts_of(results: Row) -> dict[str, Callable[[], str]]:
    """Name of a made part of a page -> what it says of these results."""
    timed = [cell for cell in results['cells'] if 'rounds' in cell]
    rivals = [cell for cell in timed if cell['rival'] != BOUND]
    return {
        'headline': lambda: overview(timed, HEADLINE),
        'overview': lambda: overview(timed, OVERVIEW),
        'measured_on': lambda: measured_on([*timed, *results['exactness']]),
        'exactness': lambda: exactness(results['exactness']),
        'first_gradient': lambda: first_gradient(rivals),
        'speed': lambda: speed(timed),
        'ratios': lambda: ratios(timed),
        'reached_the_model': lambda: reached_the_model(rivals),
        'curves': lambda: curves(results['longer']['curves']),
        'stalls': lambda: stalls(results['longer']['stalls']),
        'settings': lambda: settings(timed),
    }


def overview(cells: Sequence[Row], rivals: Sequence[str]) -> str:
    """Whose steps hold what, how exact the first one is, and real tokens a second."""
    cells = [cell for cell in cells if cell['set'] == SHOWN]
    groups = list(_groups(cells))
    body = []
    for rival in rivals:
        mine = [cell for cell in cells if cell['rival'] == rival]
        errors = [cell['gradient_error'] for cell in mine if rival != BOUND]
        speeds = [_by_rival(of).get(rival) for *_, of in groups]
        body.append([
            _title(rival), ', '.join(dict.fromkeys(cell['global_batches'] for cell in mine if rival != BOUND)),
            '' if not errors else 'exact' if max(errors) <= EXACT else f'up to {max(errors):.0%} off',
            *('' if cell is None else f'{cell[_figure(cells)][1]:,.0f}' for cell in speeds),
        ])  # fmt: skip
    return table(['', 'samples of a step', 'first gradient', *(name for name, _ in groups)], body)


def measured_on(rows: Sequence[Row]) -> str:
    """Machines, of which sets where there are several, and versions; a warning where one did other work."""
    hosts = [row['measured_on'] for row in rows]
    versions = sorted({f'{name} {version}' for host in hosts for name, version in host['versions'].items()})
    where: dict[str, list[str]] = {_machine(row): [] for row in rows}
    for case, of in _cases([row for row in rows if 'rounds' in row]):
        for name in {_machine(row) for row in of}:
            where[name].append(case)
    most = max(where, key=lambda name: len(where[name]))
    machines = [most, *(f'{name}: {"; ".join(cases)}' for name, cases in where.items() if name != most)]
    busy = [_load(row) for row in rows if row.get('rounds') and _is_disturbed(row)]
    warning = f'\n\n**{len(busy)} cells were timed beside other work: their ratios are of processor time.**' * bool(
        busy
    )
    return f'{". ".join(machines)}. {", ".join(versions)}.{warning}'


def _machine(row: Row) -> str:
    machine = row['measured_on']['machine']
    return f'{machine["cores"]} cores of {machine["processor"]}'


def exactness(rows: Sequence[Row]) -> str:
    """A table a model: each trainer by ranks and accumulation."""
    parts = []
    for subject in dict.fromkeys(row['subject'] for row in rows):
        mine = [row for row in rows if row['subject'] == subject]
        columns = [
            (ranks, accumulation) for ranks in sorted({row['ranks'] for row in mine}) for accumulation in (1, 4, 16)
        ]
        found = {(row['trainer'], row['ranks']): row for row in mine}
        body = [
            [title, *(_exact_cell(found.get((trainer, ranks)), accumulation) for ranks, accumulation in columns)]
            for trainer, title in TRAINER_TITLES.items()
        ]
        heads = [f'{_ranks(ranks)}, x{accumulation}' for ranks, accumulation in columns]
        parts.append(f'### {subject}\n\n{table(["", *heads], body)}')
    return '\n'.join(parts)


def _exact_cell(row: Row | None, accumulation: int) -> str:
    if row is None or 'error' in row:
        return '' if row is None else 'fails'
    size = max(case['microbatch_size'] for case in row['cases']) // accumulation
    cases = [
        case for case in row['cases'] if case['microbatch_size'] == size and case['cut'] in ('in order', 'by length')
    ]
    worst = max(cases, key=lambda case: case['error'])
    if worst['error'] <= EXACT:
        return 'exact'
    if worst.get('unexplained', 1.0) < 0.001:
        return (
            f'{worst["error"]:.0%} off: tokens x{worst["token_factor"]:.2f}, router x{abs(worst["router_factor"]):.2f}'
        )
    return f'{worst["error"]:.0%} off, x{worst["factor"]:.2f}'


def first_gradient(cells: Sequence[Row]) -> str:
    """Error of the first step's gradient in the timed runs, the smallest and largest over the sets of lengths."""

    def span(mine: Sequence[Row]) -> str:
        errors = [cell['gradient_error'] for cell in mine if cell.get('gradient_error') is not None]
        if not errors or max(errors) <= EXACT:
            return 'exact' if errors else ''
        low, high = (f'{error:.1%}' if error > EXACT else 'exact' for error in (min(errors), max(errors)))
        return low if low == high else f'{low} to {high}'

    return _by_group(cells, lambda of, rival: span([cell for cell in of if cell['rival'] == rival]))


def speed(cells: Sequence[Row]) -> str:
    """Real tokens a second, a table a model and number of ranks."""
    parts = []
    for name, mine in _groups(cells):
        sets = sorted({cell['set'] for cell in mine}, key=lambda name: (not name.startswith('lognormal'), name))
        found = {(cell['rival'], cell['set']): cell for cell in mine}
        body = [[_title(rival), *(_speed_cell(found.get((rival, one))) for one in sets)] for rival in _by_rival(mine)]
        parts.append(f'### {name}\n\n{table(["", *sets], body)}')
    return '\n'.join(parts)


def _speed_cell(cell: Row | None) -> str:
    if cell is None:
        return ''
    low, middle, high = cell['tokens_per_second']
    spread = f' ({low:,.0f}-{high:,.0f})' if len(cell['rounds']) > 1 else ''
    return f'{middle:,.0f}{spread}; {cell["tokens_per_processor_second"][1]:,.0f}'


def ratios(cells: Sequence[Row]) -> str:
    """The best of ours over each rival: the least and most of all cells, and where it is least."""
    body = []
    for rival in CONTENDER_TITLES:
        found = [(ratio, where) for where, of in _cases(cells) if (ratio := against(of, rival)) is not None]
        if found and rival not in (*OURS, *OUR_SAMPLER, BOUND):
            (least, where), (most, _) = min(found), max(found)
            won = '; '.join(f'{place} ({1 / ratio:.2f})' for ratio, place in sorted(found) if ratio < 1)
            body.append([CONTENDER_TITLES[rival], f'{least:.2f} to {most:.2f}', where, len(found), won])
    return table(['', 'ours over it', 'least', 'cells', 'where it is faster'], body)


def against(cells: Sequence[Row], rival: str) -> float | None:
    """Best of ours over the rival in the same set: median of the rounds' own ratios, or of two runs their medians'.

    Of tokens a second; of tokens a processor second where the machine did other work.
    """
    of, figure = _by_rival(cells), _figure(cells)
    known = [of[name] for name in OURS if name in of]
    if rival not in of or not known:
        return None
    best = max(known, key=lambda cell: cell[figure][1])
    if best['measured_on'] != of[rival]['measured_on']:  # their rounds took no turns
        return best[figure][1] / of[rival][figure][1]
    pairs = zip(best['rounds'], of[rival]['rounds'], strict=False)
    return statistics.median(a[figure] / b[figure] for a, b in pairs)


def reached_the_model(cells: Sequence[Row]) -> str:
    """What hooks on model and optimizer saw, a table a model and number of ranks."""
    columns = ('', 'padding', 'largest', 'MiB kept', 'MiB more', 'imbalance', 'steps', 'samples a step',
               'global batches', 'gradient error', 'eval loss')  # fmt: skip
    parts = []
    for name, mine in _groups([cell for cell in cells if cell['set'] == SHOWN]):
        body = []
        for rival, cell in _by_rival(mine).items():
            low, high = cell['samples_a_step']
            error = cell['gradient_error']
            body.append([
                _title(rival), f'{cell["padded_share"]:.0%}', f'{cell["largest_microbatch"] / cell["cap"]:.0%}',
                f'{cell["saved_mib"]:.0f}', f'{cell["rss_mib"]:.0f}', f'{cell["rank_imbalance"]:.2f}', cell['steps'],
                str(low) if low == high else f'{low}-{high}',
                cell['global_batches'] + ', not each sample once' * (not cell['every_sample_once']),
                'exact' if error <= EXACT else f'{error:.1%}', f'{cell["held_out_loss"]:.4f}',
            ])  # fmt: skip
        parts.append(f'### {name}\n\n{table(columns, body)}')
    over = '; '.join(where for where, of in _cases(cells) if not all(cell['within_cap'] for cell in of))
    return '\n'.join([*parts, f'Microbatches over the cap, in all sets: {over or "none"}.'])


def curves(found: Row) -> str:
    stock = found['hf']['losses']

    def apart(losses: Sequence[float]) -> str:
        if losses is stock or len(losses) != len(stock):
            return ''
        return f'{max(abs(a - b) for a, b in zip(losses, stock, strict=True)):.4f}'

    return table(['', 'steps', 'unrest', 'apart', 'eval loss'], [
        [_title(name), len(one['losses']), f'{one["unrest"]:.4f}', apart(one['losses']), f'{one["held_out_loss"]:.4f}']
        for name, one in found.items()
    ])  # fmt: skip


def stalls(found: Row) -> str:
    columns = ['', 'steps', 'p50', 'p99', 'longest', 'p99 / p50 a token', 'waits for the loader', 'longest wait']
    return table(columns, [
        [_title(name), one['steps'], *(f'{1000 * one[key]:.0f}' for key in ('p50', 'p99', 'max')),
         f'{one["p99_per_token"]:.2f}', f'{one["loader_wait_share"]:.1%}', f'{1000 * one["longest_wait"]:.0f}']
        for name, one in found.items()
    ])  # fmt: skip


def settings(cells: Sequence[Row]) -> str:
    lines = []
    for rival in CONTENDER_TITLES:
        mine = [cell for cell in cells if cell['rival'] == rival]
        first = min(
            mine, key=lambda cell: (cell['set'] != SHOWN, cell['ranks'], cell['model'] != 'llava'), default=None
        )
        if first is not None:
            given = ', '.join(f'{key}={value!r}' for key, value in first['settings'].items())
            lines.append(f'- {CONTENDER_TITLES[rival]} ({_where(first)}): `{given}`')
    sizes = {', '.join(f'{key}={value}' for key, value in cell['sizes'].items() if key != 'model') for cell in cells}
    return f'Sizes: {"; ".join(f"`{one}`" for one in sorted(sizes))}.\n\n' + '\n'.join(lines)


def _groups(cells: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Cells by model and ranks, and the name of both."""
    keys = sorted({(cell['model'], cell['ranks']) for cell in cells}, key=lambda key: (key[0] == 'llama', key))
    for model, ranks in keys:
        yield (
            f'{_model(model)}, {_ranks(ranks)}',
            [cell for cell in cells if (cell['model'], cell['ranks']) == (model, ranks)],
        )


def _cases(cells: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Cells by model, ranks and set, and the name of all three."""
    for name, mine in _groups(cells):
        for one in dict.fromkeys(cell['set'] for cell in mine):
            yield f'{name}, {one}', [cell for cell in mine if cell['set'] == one]


def _by_group(cells: Sequence[Row], cell_of: Callable[[list[Row], str], str]) -> str:
    groups = list(_groups(cells))
    body = [[_title(rival), *(cell_of(of, rival) for _, of in groups)] for rival in _by_rival(cells)]
    return table(['', *(name for name, _ in groups)], body)


def _by_rival(cells: Sequence[Row]) -> dict[str, Row]:
    known = {cell['rival']: cell for cell in cells}
    return {name: known[name] for name in CONTENDER_TITLES if name in known}


def _figure(cells: Sequence[Row]) -> str:
    """What is compared."""
    return 'tokens_per_processor_second' if any(map(_is_disturbed, cells)) else 'tokens_per_second'


def _is_disturbed(row: Row) -> bool:
    return _load(row) > BUSY * row['measured_on']['machine']['cores']


def _load(row: Row) -> float:
    """Highest load average of the rounds; results from before rounds noted theirs have that of the set's end."""
    at_end = row['measured_on']['machine']['load_average']
    return max(one.get('load_average', at_end) for one in row.get('rounds', [{}]))


def _where(cell: Row) -> str:
    return f'{_model(cell["model"])}, {_ranks(cell["ranks"])}, {cell["set"]}'


def _model(name: str) -> str:
    return {'llava': 'LLaVA', 'llama': 'Llama'}[name]


def _ranks(count: int) -> str:
    return f'{count} rank{"s" * (count > 1)}'


def _title(rival: str) -> str:
    return f'**{CONTENDER_TITLES[rival]}**' if rival in OURS else CONTENDER_TITLES[rival]


def picture(longer: Row, path: Path) -> None:
    from matplotlib.figure import Figure

    found, batch = longer['curves'], longer['sizes']['global_batch']
    figure = Figure(figsize=(3.4 * len(found), 3.6), layout='constrained')
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axis, (name, one) in zip(axes, found.items(), strict=True):
        color = 'tab:green' if name in OURS else 'tab:gray'
        axis.plot([seen / batch for seen in one['samples_seen']], one['losses'], color=color, lw=0.8)
        if name != 'hf' and 'hf' in found:
            stock = found['hf']
            axis.plot([seen / batch for seen in stock['samples_seen']], stock['losses'], color='black', lw=0.5, ls=':')
        axis.set_title(f'{CONTENDER_TITLES[name]}\n{len(one["losses"])} steps, unrest {one["unrest"]:.3f}', fontsize=8)
        axis.set_xlabel(f'samples seen / {batch}')
    axes[0].set_ylabel('loss of the step, mean over its tokens')
    figure.suptitle('Same weights, same samples of an epoch (dotted: the batches in order, exact weights)', fontsize=9)
    figure.savefig(path, dpi=130)


def write_pages(results: Row) -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(), parts_of(results)))


def read(path: Path = RESULTS) -> Row:
    return json.loads(path.read_text())
