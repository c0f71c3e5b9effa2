# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The real rivals on the same samples, first weights, memory and machine.

    make bench-rivals                                          # everything, by the environment that has the rivals
    python -m benchmarks.rivals speed --sets 'lognormal 0.9' --rivals hf ours_sampler --ranks 1 --rounds 1
    python -m benchmarks.rivals exactness --ranks 1 2
    python -m benchmarks.rivals curves stalls
    python -m benchmarks.rivals report                         # the pages again, from the results alone

`speed`: an epoch of every contender on every set of lengths, in one process, first once to look (what reached the
model, the gradient of the first step, memory, eval loss), then timed, the contenders taking turns in every round.
`exactness`: `verify_invariance` attached to each trainer. `curves`, `stalls`: every step of a longer epoch.

What is measured is put into results/rivals.json, where what is left out keeps its last figures; results/rivals.png and
the tables of docs/rivals.md, docs/rivals_speed.md and the README are made from it. COMPOSER_TOKACC_LENGTHS names the
folder of real length tables.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.machine import COMPOSER, environment, machine
from benchmarks.record import ROOT, parser_of, write_at_once
from benchmarks.rivals.adapters import ADAPTERS
from benchmarks.rivals.contenders import CONTENDERS, takes
from benchmarks.rivals.curves import NAMES, WINDOW
from benchmarks.rivals.data import MODELS, SETS, Sizes
from benchmarks.rivals.exactness import SUBJECTS
from benchmarks.rivals.report import RESULTS, picture, write_pages

PARTS = ('speed', 'exactness', 'curves', 'stalls', 'report')
PACKAGES = (
    'mosaicml', 'torch', 'transformers', 'trl', 'lightning', 'accelerate', 'online-dynamic-batching', 'datasets',
)  # fmt: skip


def launch(module: str, ranks: int, *arguments: str, limit: float | None = None) -> Any:
    """Runs a part under the composer launcher and gives what it wrote, or had written in so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / 'found.json'
        command = [COMPOSER, '-n', str(ranks), '--stdout', f'{folder}/rank{{rank}}.out', '-m']
        # ODB makes a gloo group a loader, which may find no way to another address.
        own = environment(TOKENIZERS_PARALLELISM='false', GLOO_SOCKET_IFNAME='lo')
        process = subprocess.Popen(
            [*command, f'benchmarks.rivals.{module}', str(found), *arguments], cwd=ROOT, env=own, start_new_session=True
        )
        try:
            process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # loader processes that a package left behind
        if found.exists() and (limit is not None or not process.returncode):
            return json.loads(found.read_text())
        if limit is not None:
            return []
        raise SystemExit(f'{module} on {ranks} ranks ended with {process.returncode}; its output is above.')


def measure_cells(plan: dict[str, Any], ranks: int, limit: float) -> list[dict[str, Any]]:
    """The cells of a set; whoever stands still or dies on several ranks is put down as failed, and the others go on."""
    names = [name for name in plan['rivals'] if takes(name, plan['sizes']['model'])]
    failed: list[dict[str, Any]] = []
    while names:
        found = launch('speed', ranks, json.dumps({**plan, 'rivals': names}), limit=limit)
        missing = [name for name in names if name not in {cell['rival'] for cell in found}]
        if not missing:
            return [*found, *failed]
        cell = {'rival': missing[0], 'model': plan['sizes']['model'], 'set': plan['set'], 'ranks': ranks}
        failed.append(
            {**cell, 'error': f'stood still or died; nothing came from it within {limit:.0f} s of its launch'}
        )
        names.remove(missing[0])
    return failed


def measured_on() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {'machine': machine(), 'versions': versions}


def dumps(results: dict[str, Any]) -> str:
    """As JSON, a row a line."""
    parts = []
    for key, value in results.items():
        rows = ',\n'.join(f'  {json.dumps(row)}' for row in value) if isinstance(value, list) else None
        parts.append(f' {json.dumps(key)}: ' + (json.dumps(value) if rows is None else f'[\n{rows}\n ]'))
    return '{\n' + ',\n'.join(parts) + '\n}\n'


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, results=RESULTS)
    parser.add_argument('parts', nargs='*', choices=[*PARTS, []], help='default: all')
    parser.add_argument('--models', nargs='+', choices=MODELS, default=MODELS)
    parser.add_argument('--sets', nargs='+', choices=SETS, default=SETS)
    parser.add_argument('--rivals', nargs='+', choices=[*CONTENDERS, *ADAPTERS], metavar='NAME', help='default: all')
    parser.add_argument('--subjects', nargs='+', choices=SUBJECTS, default=SUBJECTS)
    parser.add_argument('--ranks', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--rounds', type=int, default=5)
    for name in ('hidden', 'layers', 'mean', 'samples', 'global_batch', 'microbatch', 'workers'):
        parser.add_argument(f'--{name.replace("_", "-")}', type=int, default=getattr(Sizes(), name))
    parser.add_argument('--steps', type=int, default=300, help='of curves and stalls')
    parser.add_argument('--limit', type=float, default=3600, help='seconds for a set of `speed`')
    return _checked(parser, parser.parse_args())


def _checked(parser: argparse.ArgumentParser, given: argparse.Namespace) -> argparse.Namespace:
    """Refuses what would measure nothing, or mix or write over results."""
    given.results, asked = given.results.resolve(), {*(given.parts or PARTS)}
    if given.results.suffix != '.json':
        parser.error(f'`--results` must be a .json file, got: {given.results}.')
    counts = {name: value for name, value in vars(given).items() if isinstance(value, (int, float))}
    for name, value in [*counts.items(), *(('ranks', number) for number in given.ranks)]:
        if value < (name != 'workers'):
            parser.error(f'`--{name.replace("_", "-")}` must be at least {int(name != "workers")}, got: {value}.')
    if given.rivals and asked <= {'curves', 'stalls', 'report'} and not {*given.rivals} & {*NAMES}:
        parser.error(f'`--rivals` must name some of {list(NAMES)} for curves and stalls, got: {given.rivals}.')
    if given.steps < WINDOW and 'curves' in asked:
        parser.error(f'`--steps` must be at least {WINDOW}, over which a curve is smoothed, got: {given.steps}.')
    try:
        cells = read(given.results).get('cells', [])
    except ValueError as error:
        parser.error(f'`--results` must name a file of results or a new one, got: {given.results}, {error}.')
    sizes = {name: getattr(given, name) for name in asdict(Sizes()) if name in given}
    if 'speed' in asked and any(not cell.get('sizes', sizes).items() >= sizes.items() for cell in cells):
        parser.error(f'`--results` must be of the same sizes, got: {given.results}, whose cells are of others.')
    is_short = given.samples < 2 * given.global_batch  # the first step is not timed
    if is_short or given.samples % given.global_batch or given.global_batch % (given.microbatch * max(given.ranks)):
        parser.error(
            '`--samples` must hold two or more whole global batches, each of whole microbatches of every rank.'
        )
    return given


def read(path: Path) -> dict[str, Any]:
    """What the file holds so far, or nothing; raises ValueError where that is no results."""
    results = json.loads(path.read_text()) if path.exists() else {}
    kinds = {'exactness': list, 'cells': list, 'longer': dict}
    if isinstance(results, dict) and all(isinstance(results.get(key, kind()), kind) for key, kind in kinds.items()):
        return results
    raise ValueError('which holds something else')


def keep(path: Path, part: str, found: Any, *keys: str) -> None:
    """Puts what was found into the file: new rows in place of old ones of the same keys.

    A rival that stood still or died before its first round leaves the row that it has.
    """
    results, here = read(path), measured_on()  # once, as rows of one run are told by it
    rows = {tuple(row[key] for key in keys): row for row in results.get(part, [])}
    for row in found:
        key = tuple(row[name] for name in keys)
        if 'rounds' in row or 'rounds' not in rows.get(key, {}):
            rows[key] = {**row, 'measured_on': here}
    results[part] = list(rows.values())
    write_at_once(path, dumps(results))


def keep_longer(path: Path, found: dict[str, Any]) -> None:
    """As above, of the longer epoch; those of another set or other sizes, not to be compared, are dropped."""
    results = read(path)
    about = {key: found[key] for key in ('set', 'sizes')}
    old = results.get('longer', {})
    old = old if old.items() >= about.items() else {}
    for part in ('curves', 'stalls'):
        rows = {name: {**row, 'measured_on': measured_on()} for name, row in found.get(part, {}).items()}
        about |= {part: {**old.get(part, {}), **rows}} if rows or part in old else {}
    results['longer'] = {**old, **about}
    write_at_once(path, dumps(results))


def main() -> None:
    given = arguments()
    parts, file = given.parts or PARTS, given.results
    sizes = {name: getattr(given, name) for name in asdict(Sizes()) if name in given}
    for ranks in given.ranks if 'exactness' in parts else ():
        names = [name for name in given.rivals or ADAPTERS if name in ADAPTERS]
        found = launch('exactness', ranks, '--subjects', *given.subjects, '--rivals', *names)
        keep(file, 'exactness', found, 'subject', 'ranks', 'trainer')
    rivals = [name for name in given.rivals or CONTENDERS if name in CONTENDERS]
    cases = product(given.ranks, given.models, given.sets) if 'speed' in parts else ()
    for ranks, model, name in cases:
        plan = {'sizes': {**sizes, 'model': model}, 'set': name, 'rivals': rivals, 'rounds': given.rounds}
        keep(file, 'cells', measure_cells(plan, ranks, given.limit), 'model', 'set', 'ranks', 'rival')
    longer = [part for part in ('curves', 'stalls') if part in parts]
    names = [name for name in given.rivals or NAMES if name in NAMES]
    if longer and names:
        small = {'model': 'llama', 'hidden': 64, 'layers': 2, 'mean': 32, 'samples': given.steps * given.global_batch}
        plan = {'sizes': {**sizes, **small}, 'set': 'lognormal 0.9', 'rivals': names, 'parts': longer}
        keep_longer(file, launch('curves', 1, json.dumps(plan)))
    results = read(file)
    if file == RESULTS:
        write_pages(results)
    if results.get('longer', {}).get('curves'):
        picture(results['longer'], file.with_suffix('.png'))
    print(file)


if __name__ == '__main__':
    main()
