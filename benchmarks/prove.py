# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs the programs of examples/prove and writes the table of docs/prove.md.

    .venv-rivals/bin/python -m benchmarks.prove

Writes results/prove.json. If a trainer is not installed, its row of an earlier run stays.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

from benchmarks.machine import environment, machine
from benchmarks.record import DOCS, RESULTS, ROOT, fill_page, parser_of, read, table, write

RESULTS_FILE = RESULTS / 'prove.json'
PAGE = DOCS / 'prove.md'
PROGRAMS = ROOT / 'examples' / 'prove'
COLUMNS = (
    'trainer',
    'version',
    'lightest to heaviest token',
    'largest gradient error',
    'verdict',
)


def programs() -> list[str]:
    """Returns the names of the programs. `subject` holds the model and the rows that all of them import."""
    return sorted(path.stem for path in PROGRAMS.glob('*.py') if path.stem != 'subject')


def run_program(program: str) -> str | None:
    """Runs a program and returns its output. None: a package that it imports is not installed."""
    path = PROGRAMS / f'{program}.py'
    imported = re.findall(r'^(?:from|import) (\w+)', path.read_text(), re.MULTILINE)
    packages = set(imported) - {'subject'}
    if not all(find_spec(package) for package in packages):
        return None
    completed = subprocess.run(
        [sys.executable, str(path)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    if completed.returncode:
        raise SystemExit(f'{program} failed:\n{completed.stdout}{completed.stderr}')
    return completed.stdout


def row_of(output: str) -> list[str]:
    """Returns the cells of the one line that has a cell for each column."""
    rows = [line.split(' | ') for line in output.splitlines()]
    [cells] = [row for row in rows if len(row) == len(COLUMNS)]
    return cells


def table_of(rows: dict[str, list[str]]) -> str:
    """Returns the table of the page, exact trainers first."""
    lines = sorted(rows.values(), key=lambda row: (row[-1] != 'exact', row[0].strip('*')))
    return table(COLUMNS, lines)


def main() -> None:
    path = parser_of(__doc__).parse_args().results / RESULTS_FILE.name
    rows = read(path).get('programs', {})
    for program in programs():
        output = run_program(program)
        if output is None:
            print(f'{program}: not installed', flush=True)
        else:
            print(output, flush=True)
            rows[program] = row_of(output)
    write(path, {'machine': machine(), 'programs': rows})
    if path == RESULTS_FILE:
        fill_page(PAGE, {'prove': table_of(rows)})


if __name__ == '__main__':
    main()
