# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""docs/rivals.md and its picture, made from the results file alone."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.names import BOUND, CONTENDER_TITLES, OURS, TRAINER_TITLES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / 'benchmarks' / 'results' / 'rivals.json'
README = ROOT / 'README.md'
DOCUMENT = ROOT / 'docs' / 'rivals.md'
SHOWN = 'lognormal 0.9'
EXACT = 2e-6
BUSY = 1.7
"""Load average a core from which the machine did other work: a loader and a trainer a rank are ours."""
OVERVIEW = ('composer', 'hf', 'hf_group', 'hf_rebalance', 'odb', 'ours', 'ours_sampler', 'ours_packed', BOUND)
KEPT_GOAL = 1.5
CHANGES_BATCHES = ('hf_group', 'odb')
Row = dict[str, Any]

_LITTLE_PADDED = (
    "Little to gain where little is padded, and its loop does less around a microbatch than Composer's with counting "
    'and checking.'
)
WHY = {
    'hf_group': 'Its steps are of like lengths because it chooses what they hold: next to no padding, at the price of '
    'other global batches and a restless curve (below).',
    'odb': 'It fills microbatches from a window of 256 samples, and steps after each: fewer and fuller ones than the '
    'samples of a step can be cut into, other global batches, and no step that waits for accumulation.',
    'hf_rebalance': 'It sorts and cuts within the global batch, as our planner does, and does less around a microbatch '
    "than Composer's loop.",
    'hf_flat': 'It computes no padding either, in the order of the data; under SDPA with a mask as wide as the packed '
    'row, which costs little while rows are short.',
    **dict.fromkeys(
        ('composer', 'composer_flag', 'hf', 'lightning', 'accelerate', 'accelerate_tokens', 'trl'), _LITTLE_PADDED
    ),
}

HEAD = """# Against the real packages

Each package runs by its own public interface, as its own guide shows, on the same samples, first weights, optimizer
(AdamW, constant rate, no clipping), memory and machine; how each was called is at the end, all of its settings are in
[`benchmarks/results/rivals.json`](../benchmarks/results/rivals.json). This page is made from that file
(`python -m benchmarks.rivals report`), and a test holds it to it. To repeat: `make bench-rivals`.
"""

EXACTNESS = f"""`verify_invariance` attached to each trainer ([adapters](../benchmarks/rivals/adapters.py) to copy): 16
ragged rows a rank, in microbatches of 16, 4 and 1 (accumulation 1, 4, 16), in order and by length. The reference is one
plain forward over the rows of all ranks. *exact*: relative error of the gradient up to {EXACT:.0e}; else the largest
error, and the factor by which the gradient is too long.

- Hugging Face Trainer counts the targets of the step over all ranks and hands their number to a model whose forward
  takes it. Those that do not (`accepts_loss_kwargs = False`: Qwen2.5-VL and others) are trained on a mean of means.
  A router's loss is added whole in every microbatch and multiplied by the ranks.
- accelerate's recipe by tokens, which its users write into their loop, is exact for the tokens; a sum over logits
  never has a router's loss in it.
- Composer's flag counts positions, padding included, unless it is given a counter.
- What ODB and TRL do is in the column *gradient error* further down: ODB weighs ranks by input tokens, not by those
  that carry loss.
"""

MIXTRAL = """
The router's loss is a statistic of each microbatch: its rightful weight is the mean over all of the step. Errors are in
parts of the gradient of the token mean. Where tokens and routers together explain all that was found, the factor of
each is given.
"""

SPEED = """Medians over rounds in which the contenders take turns, with quartiles where there are several. Behind the
semicolon: real tokens a second of processor time of the training processes, which other work on the machine disturbs
less; it leaves out loaders and waiting. The last row is no rival: positions a second of a plain loop over full
microbatches of rows of one length, the same on every rank, made before. Nobody can be faster who computes as this model
computes in this memory.
"""

FACTS = """Seen by hooks on model and optimizer, the same for all; other sets are in the results file. *largest*:
positions of the largest microbatch, of the cap of 4 rows of the longest sample. *MiB kept*: activations that a forward
keeps for its backward, the most; *MiB more*: growth of the process at its peak, in the timed rounds. *imbalance*: the
busiest rank over the mean, in positions, median of the steps. *gradient error*: of the first step, against the mean
over the tokens of the very samples of that step. *held out*: loss after the epoch, however many steps that was.
"""

CURVES = """The loss of each step is the mean over its tokens. *unrest*: standard deviation about the running mean of 21
steps, second half. *apart*: largest distance from the curve of the same batches by exact weights (Hugging Face Trainer,
exact for this model). Who steps more often gets further in an epoch: held-out losses compare only where the numbers of
steps do. Tokens of long and of short samples follow chains of their own here, as captions and documents do, so that a
step of like lengths sees one kind alone.
"""

STALLS = """Times of the steps in ms. Steps of unlike tokens take unlike times, so the 99th percentile is given over the
median a token too.
"""

LEFT_OUT = """## Left out, and why

- llm-foundry pins torch 2.7.0 and transformers below 4.52, this package wants transformers 4.57, and TRL and ODB stand
  beside neither: no environment holds them all. Its gradients are held to ours in an environment of its own
  ([llm-foundry](llm_foundry.md)); it trains through Composer's Trainer, so the rows
  `Composer` and `accumulate_train_batch_on_tokens` are its loop.
- Padding-free training of vision-language models: `DataCollatorWithFlattening` drops images, and TRL refuses
  `padding_free` for vision datasets. With Llama it runs through SDPA; the Flash Attention it is meant for needs a GPU.
- ODB runs with `no_warmup=True`: an epoch this short would end inside the ramp in which its window grows. Its guide's
  window of 4 workers x 64 is kept as 1 worker x 256.
- ODB on two ranks at times stood still at the start of an epoch: it makes a gloo group for each loader, whose
  connection failed on one rank (`connectFullMesh failed`), which then tried again alone. Cells of two ranks that lack
  it or have fewer rounds ended there.
- Where rows need not be of the width of the longest (`batch_rebalance`, padding-free) the rival gets as many rows a
  microbatch as keep within the memory, the most that a user would find by trying.
- `group_by_length` sorts within a quarter of an epoch this short, or within 50 global batches of a long one: in the
  300 steps below it has them all.
- Ours plans with its default prices: 128 tokens a launch. Fitted to these models by hand it is 125 (Llama) and 132
  (LLaVA).
- What lies between ours packed and the bound: the samples of a step fill their microbatches less (Llama, one rank,
  lognormal 0.9: 39 of them an epoch, where the bound has 35), attention goes document by document, and a model
  this small feels what Composer's loop, counting and checking do around a microbatch.
- On the digits the memory is that of 120 tokens. Where several ranks train, the last microbatch of a step gets one more
  row with an image, where it has none, so that all ranks use the vision tower: so little memory feels it.
- A GPU: none has run this yet.
"""


def write(results: Row) -> str:
    """The whole page."""
    cells = [cell for cell in results.get('cells', []) if 'error' not in cell]
    parts = [HEAD, *_measured_on([*cells, *results.get('exactness', [])])]
    if results.get('exactness'):
        parts += _exactness(results['exactness'])
    if cells:
        parts += [*_speed(cells), *_wins(cells), *_targets(cells)]
        parts += _facts([cell for cell in cells if cell['rival'] != BOUND])
    if results.get('longer'):
        parts += _longer(results['longer'])
    failed = [cell for cell in results.get('cells', []) if 'error' in cell]
    if failed:
        lines = [f'- {_where(cell)}: {cell["error"].strip().splitlines()[-1]}' for cell in failed]
        parts += ['## Failed\n', '\n'.join(lines) + '\n']
    parts.append(LEFT_OUT)
    if cells:
        parts += _settings(cells)
    return '\n'.join(parts)


def overview(results: Row) -> str:
    """The README's table: whose steps hold what, how exact the first one is, and real tokens a second."""
    cells = [cell for cell in results['cells'] if cell['set'] == SHOWN and 'rounds' in cell]
    groups = _groups(cells)
    figure = 'tokens_per_processor_second' if _disturbed(cells) else 'tokens_per_second'
    body = []
    for rival in OVERVIEW:
        mine = [cell for cell in cells if cell['rival'] == rival]
        errors = [cell['gradient_error'] for cell in mine if rival != BOUND]
        speeds = [_by_rival(of).get(rival) for *_, of in groups]
        batches = dict.fromkeys(cell['global_batches'] for cell in mine if rival != BOUND)
        body.append([
            _title(rival), ', '.join(batches),
            '' if not errors else 'exact' if max(errors) <= EXACT else f'up to {max(errors):.0%} off',
            *('' if cell is None else f'{cell[figure][1]:,.0f}' for cell in speeds),
        ])  # fmt: skip
    columns = [f'{_model(model)}, {ranks} rank{"s" * (ranks > 1)}' for model, ranks, _ in groups]
    return table(['', 'samples of a step', 'first gradient', *columns], body)


def with_overview(readme: str, results: Row) -> str:
    """The README with the table of these results in place of the one that it has."""
    return re.sub(r'\|  \| samples of a step \|.*?\n(?=\n)', lambda _: overview(results), readme, flags=re.DOTALL)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [columns, ['---'] * len(columns), *rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines) + '\n'


def _measured_on(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    versions = sorted({f'{name} {version}' for row in rows for name, version in row['measured_on']['versions'].items()})
    machines = sorted(
        {
            f'{row["measured_on"]["machine"]["cores"]} cores of {row["measured_on"]["machine"]["processor"]}'
            for row in rows
        }
    )
    found = [f'{"; ".join(machines)}; {", ".join(versions)}.\n']
    timed = [row for row in rows if row.get('rounds')]
    loads = [_load(row) for row in timed if _is_disturbed(row)]
    if loads:
        found.append(
            f'**{len(loads)} of {len(timed)} timed cells were taken beside other work (load average up to '
            f'{max(loads):.0f}): their tokens a second are no benchmark, and ratios are of processor time. What is no '
            'time (exactness, padding, memory of activations, steps, held-out loss) does not depend on it.**\n'
        )
    return found


def _exactness(rows: Sequence[Row]) -> list[str]:
    parts = [
        '## Who is exact where\n',
        EXACTNESS,
    ]
    for subject in dict.fromkeys(row['subject'] for row in rows):
        mine = [row for row in rows if row['subject'] == subject]
        ranks = sorted({row['ranks'] for row in mine})
        columns = [(number, accumulation) for number in ranks for accumulation in (1, 4, 16)]
        body = []
        for trainer in sorted({row['trainer'] for row in mine}, key=list(TRAINER_TITLES).index):
            of = {row['ranks']: row for row in mine if row['trainer'] == trainer}
            body.append([TRAINER_TITLES[trainer], *(_exact_cell(of.get(number), size) for number, size in columns)])
        title = f'### {subject}\n'
        if subject == 'Mixtral':
            title += MIXTRAL
        parts += [title, table(['', *(f'{n} rank{"s" * (n > 1)}, x{a}' for n, a in columns)], body)]
    return parts


def _exact_cell(row: Row | None, accumulation: int) -> str:
    if row is None:
        return ''
    if 'error' in row:
        return 'fails'
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


def _groups(cells: Sequence[Row]) -> list[tuple[str, int, list[Row]]]:
    """Cells by model and ranks."""
    keys = sorted({(cell['model'], cell['ranks']) for cell in cells}, key=lambda key: (key[0] == 'llama', key))
    return [(*key, [cell for cell in cells if (cell['model'], cell['ranks']) == key]) for key in keys]


def _by_rival(cells: Sequence[Row]) -> dict[str, Row]:
    known = {cell['rival']: cell for cell in cells}
    return {name: known[name] for name in CONTENDER_TITLES if name in known}


def _sets(cells: Sequence[Row]) -> list[str]:
    return sorted({cell['set'] for cell in cells}, key=lambda name: (not name.startswith('lognormal'), name))


def _speed(cells: Sequence[Row]) -> list[str]:
    parts = ['## Real tokens a second\n', SPEED]
    for model, ranks, mine in _groups([cell for cell in cells if 'rounds' in cell]):
        names = _sets(mine)
        body = []
        for rival in _by_rival(mine):
            of = {cell['set']: cell for cell in mine if cell['rival'] == rival}
            body.append([_title(rival), *(_speed_cell(of.get(name)) for name in names)])
        parts += [f'### {_model(model)}, {ranks} rank{"s" * (ranks > 1)}\n', table(['', *names], body)]
    if any(cell.get('tables') == 'synthetic' for cell in cells):
        parts.append('`tables` are synthetic ones here: COMPOSER_TOKACC_LENGTHS did not name a folder of real ones.\n')
    return parts


def _speed_cell(cell: Row | None) -> str:
    if cell is None:
        return ''
    low, middle, high = cell['tokens_per_second']
    spread = f' ({low:,.0f}-{high:,.0f})' if len(cell['rounds']) > 1 else ''
    spent = cell.get('tokens_per_processor_second')
    return f'{middle:,.0f}{spread}' + (f'; {spent[1]:,.0f}' if spent else '')


def against(cells: Sequence[Row], rival: str, ours: Sequence[str] = OURS) -> float | None:
    """Best of ours over the rival in the same set: median of the rounds' own ratios, or of two runs their medians'.

    Of tokens a second; of tokens a processor second where the machine did other work.
    """
    of = _by_rival(cells)
    known = [of[name] for name in ours if 'rounds' in of.get(name, {})]
    if rival not in of or 'rounds' not in of[rival] or not known:
        return None
    figure = 'tokens_per_processor_second' if _disturbed(cells) else 'tokens_per_second'
    best = max(known, key=lambda cell: cell[figure][1])
    if best['measured_on'] != of[rival]['measured_on']:  # their rounds took no turns
        return best[figure][1] / of[rival][figure][1]
    pairs = zip(best['rounds'], of[rival]['rounds'], strict=False)
    return statistics.median(a[figure] / b[figure] for a, b in pairs)


def _disturbed(cells: Sequence[Row]) -> bool:
    return any(_is_disturbed(cell) for cell in cells if cell.get('rounds'))


def _is_disturbed(row: Row) -> bool:
    return _load(row) > BUSY * row['measured_on']['machine']['cores']


def _load(row: Row) -> float:
    """Highest load average of the rounds; results from before rounds noted theirs have that of the set's end."""
    at_end = row['measured_on']['machine']['load_average']
    return max(one.get('load_average', at_end) for one in row.get('rounds', [{}]))


def _wins(cells: Sequence[Row]) -> list[str]:
    """Where a rival is faster than all of ours."""
    found = []
    for model, ranks, mine in _groups(cells):
        for name in _sets(mine):
            of = [cell for cell in mine if cell['set'] == name]
            faster = {rival: ratio for rival in WHY if (ratio := against(of, rival)) is not None and ratio < 1.0}
            for rival, ratio in sorted(faster.items(), key=lambda pair: pair[1]):
                found.append(f'- {_model(model)}, {ranks} rank{"s" * (ranks > 1)}, {name}: {CONTENDER_TITLES[rival]}, '
                             f'{1 / ratio:.2f} times ours. {WHY[rival]}')  # fmt: skip
    lines = '\n'.join(found) + '\n' if found else 'Nowhere in these runs.\n'
    return ['## Where a rival is faster than the best of ours\n', lines]


def _targets(cells: Sequence[Row]) -> list[str]:
    """What was set out to be reached, and the smallest ratio that was."""
    kept, changed, unpadded, possible = [], {1: [], 2: []}, [], {}
    for model, ranks, mine in _groups(cells):
        for name in _sets(mine):
            of = [cell for cell in mine if cell['set'] == name]
            where = f'{_model(model)}, {ranks} rank{"s" * (ranks > 1)}, {name}'
            ratios = {rival: ratio for rival in WHY if (ratio := against(of, rival)) is not None}
            if name == 'no padding':
                unpadded += [(ratios[rival], rival, where) for rival in ('composer',) if rival in ratios]
                continue
            kept += [(ratio, rival, where) for rival, ratio in ratios.items() if rival not in CHANGES_BATCHES]
            possible.update({(rival, where): against(of, rival, (BOUND,)) for rival in ratios})
            changed.setdefault(ranks, [])
            changed[ranks] += [(ratio, rival, where) for rival, ratio in ratios.items() if rival in CHANGES_BATCHES]
    goals = [
        ('every rival that keeps the size of the global batches and does not choose by length', KEPT_GOAL, kept),
        ('those that choose by length, one rank', 1.0, changed.get(1, [])),
        ('those that choose by length, two ranks', 1.1, changed.get(2, [])),
        ('stock Composer where nothing is padded', 0.97, unpadded),
    ]
    body, below = [], []
    for goal, wanted, ratios in goals:
        if ratios:
            below += [one for one in sorted(ratios) if one[0] < wanted]
            ratio, rival, where = min(ratios)
            reached = sum(one >= wanted for one, *_ in ratios)
            body.append(
                [
                    goal,
                    f'{wanted:.2f}',
                    f'{reached} of {len(ratios)}',
                    f'{ratio:.2f}',
                    f'{CONTENDER_TITLES[rival]}, {where}',
                ]
            )
    if not body:
        return []
    return [
        '## Against what was to be reached\n',
        'Best of ours over the rival, in the same round' + (', by processor time' if _disturbed(cells) else '') + '; '
        'by their medians where one of them was measured again by itself.\n',
        table(['against', 'wanted', 'cells that reach it', 'smallest', 'where'], body),
        *_below(below, possible),
    ]


def _below(below: Sequence[tuple[float, str, str]], possible: dict[tuple[str, str], float | None]) -> list[str]:
    """What stays under its goal, and how near to it the bound is."""
    body = [
        [
            CONTENDER_TITLES[rival],
            where,
            f'{ratio:.2f}',
            f'{bound:.2f}' if (bound := possible.get((rival, where))) else '',
        ]
        for ratio, rival, where in below
    ]
    if not body:
        return []
    return [
        'Where that is less, with the times as fast as the rival that no padding and perfect balance would be:\n',
        table(['against', 'where', 'ours', 'the bound'], body),
    ]


def _facts(cells: Sequence[Row]) -> list[str]:
    parts = [
        f'## What reached the model ({SHOWN})\n',
        FACTS,
    ]
    columns = ('', 'padding', 'largest', 'MiB kept', 'MiB more', 'imbalance', 'steps', 'samples a step',
               'global batches', 'gradient error', 'held out')  # fmt: skip
    for model, ranks, mine in _groups([cell for cell in cells if cell['set'] == SHOWN]):
        body = []
        for rival, cell in _by_rival(mine).items():
            low, high = cell['samples_a_step']
            body.append([
                _title(rival), f'{cell["padded_share"]:.0%}', f'{cell["largest_microbatch"] / cell["cap"]:.0%}',
                f'{cell["saved_mib"]:.0f}', f'{cell["rss_mib"]:.0f}' if 'rss_mib' in cell else '',
                f'{cell["rank_imbalance"]:.2f}', str(cell['steps']), str(low) if low == high else f'{low}-{high}',
                cell['global_batches'] + ('' if cell['every_sample_once'] else ', not each sample once'),
                _error(cell), f'{cell["held_out_loss"]:.4f}',
            ])  # fmt: skip
        parts += [f'### {_model(model)}, {ranks} rank{"s" * (ranks > 1)}\n', table(columns, body)]
    for model, ranks, mine in _groups(cells):
        names = _sets(mine)
        if len(names) > 1:
            body = []
            for rival in _by_rival(mine):
                of = {cell['set']: cell for cell in mine if cell['rival'] == rival}
                body.append([_title(rival), *(_padding_cell(of.get(name)) for name in names)])
            title = f'### Padding, error of the first gradient: {_model(model)}, {ranks} rank{"s" * (ranks > 1)}\n'
            parts += [title, table(['', *names], body)]
    over = [_where(cell) for cell in cells if not cell['within_cap']]
    parts.append(f'Microbatches over the cap, in all sets: {"; ".join(over) or "none"}.\n')
    return parts


def _padding_cell(cell: Row | None) -> str:
    return '' if cell is None else f'{cell["padded_share"]:.0%}, {_error(cell)}'


def _error(cell: Row) -> str:
    error = cell.get('gradient_error')
    return '' if error is None else 'exact' if error <= EXACT else f'{error:.1%}'


def _longer(longer: Row) -> list[str]:
    sizes = longer['sizes']
    parts = [f'## {sizes["samples"] // sizes["global_batch"]} steps\n',
             f'A Llama of hidden size {sizes["hidden"]}, {longer["set"]}, one rank, an epoch of {sizes["samples"]:,} '
             'samples.\n']  # fmt: skip
    if 'curves' in longer:
        curves = longer['curves']
        body = [
            [
                _title(name),
                str(len(one['losses'])),
                f'{one["unrest"]:.4f}',
                _apart(curves, name),
                f'{one["held_out_loss"]:.4f}',
            ]
            for name, one in curves.items()
        ]
        parts += [
            CURVES,
            table(['', 'steps', 'unrest', 'apart', 'held out'], body),
            '![Loss of every step](../benchmarks/results/rivals.png)\n',
        ]
    if 'stalls' in longer:
        body = [
            [_title(name), str(one['steps']), *(f'{1000 * one[key]:.0f}' for key in ('p50', 'p99', 'max')),
             f'{one["p99_per_token"]:.2f}', f'{one["loader_wait_share"]:.1%}', f'{1000 * one["longest_wait"]:.0f}']
            for name, one in longer['stalls'].items()
        ]  # fmt: skip
        parts += [
            STALLS,
            table(
                ['', 'steps', 'p50', 'p99', 'longest', 'p99 / p50 a token', 'waits for the loader', 'longest wait'],
                body,
            ),
        ]
        rows = longer['stalls'].values()
        machines = [(one.get('measured_on') or longer['measured_on'])['machine'] for one in rows]
        loads = [one['load_average'] for one in machines if one['load_average'] > BUSY * one['cores']]
        if loads:
            parts.append(f'(Taken beside other work, load average {max(loads):.0f}.)\n')
    return parts


def _apart(curves: Row, name: str) -> str:
    losses, stock = curves[name]['losses'], curves.get('hf', {}).get('losses', [])
    if len(losses) != len(stock) or name == 'hf':
        return ''
    return f'{max(abs(a - b) for a, b in zip(losses, stock, strict=True)):.4f}'


def _settings(cells: Sequence[Row]) -> list[str]:
    lines = []
    for rival in CONTENDER_TITLES:
        found = [cell for cell in cells if cell['rival'] == rival]
        found.sort(key=lambda cell: (cell['set'] != SHOWN, cell['ranks'], cell['model'] != 'llava'))
        if found:
            given = ', '.join(f'{key}={value!r}' for key, value in found[0]['settings'].items())
            lines.append(f'- {CONTENDER_TITLES[rival]} ({_where(found[0])}): `{given}`')
    sizes: dict[str, list[str]] = {}
    for cell in cells:
        about = ', '.join(f'{key}={value}' for key, value in cell['sizes'].items() if key != 'model')
        sizes.setdefault(about, []).append(_where(cell))
    usual = max(sizes, key=lambda about: len(sizes[about]))
    others = [
        f'Other sizes, not to be compared: `{about}` ({"; ".join(where)}).\n'
        for about, where in sizes.items()
        if about != usual
    ]
    return ['## How each was called\n', f'Sizes: `{usual}`.\n', *others, '\n'.join(lines) + '\n']


def _where(cell: Row) -> str:
    return f'{cell["rival"]}, {_model(cell["model"])}, {cell["ranks"]} rank{"s" * (cell["ranks"] > 1)}, {cell["set"]}'


def _model(name: str) -> str:
    return {'llava': 'LLaVA', 'llama': 'Llama'}[name]


def _title(rival: str) -> str:
    return f'**{CONTENDER_TITLES[rival]}**' if rival in OURS else CONTENDER_TITLES[rival]


def picture(longer: Row, path: Path) -> None:
    """Loss of every step by the samples seen."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    curves = longer['curves']
    size = (3.4 * len(curves), 3.6)
    figure, (axes,) = pyplot.subplots(1, len(curves), figsize=size, sharey=True, layout='constrained', squeeze=False)
    batch = longer['sizes']['global_batch']
    stock = curves.get('hf')
    for axis, (name, one) in zip(axes, curves.items(), strict=True):
        color = 'tab:green' if name in OURS else 'tab:gray'
        axis.plot([seen / batch for seen in one['samples_seen']], one['losses'], color=color, lw=0.8)
        if stock is not None and name != 'hf':
            axis.plot([seen / batch for seen in stock['samples_seen']], stock['losses'], color='black', lw=0.5, ls=':')
        axis.set_title(f'{CONTENDER_TITLES[name]}\n{len(one["losses"])} steps, unrest {one["unrest"]:.3f}', fontsize=8)
        axis.set_xlabel(f'samples seen / {batch}')
    axes[0].set_ylabel('loss of the step, mean over its tokens')
    figure.suptitle('Same weights, same samples of an epoch (dotted: the batches in order, exact weights)', fontsize=9)
    figure.savefig(path, dpi=130)


def read(path: Path = RESULTS) -> Row:
    """The results file."""
    return json.loads(path.read_text())
