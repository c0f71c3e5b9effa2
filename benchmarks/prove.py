# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What each program of examples/prove prints, and the table of docs/prove.md that is made of it.

    .venv-rivals/bin/python -m benchmarks.prove

A trainer that is not installed keeps the line that it has. Writes results/prove.json.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec

from benchmarks.machine import environment, machine
from benchmarks.record import RESULTS as FOLDER
from benchmarks.record import ROOT, filled, parser_of, table, write

RESULTS, PAGE, PROGRAMS = FOLDER / 'prove.json', ROOT / 'docs' / 'prove.md', ROOT / 'examples' / 'prove'
COLUMNS = ('trainer', 'version', 'lightest to heaviest token', 'largest gradient error', 'verdict')


def programs() -> list[str]:
    """Their names; what is imported by all of them is none."""
    return sorted(path.stem for path in PROGRAMS.glob('*.py') if path.stem != 'subject')


def printed(program: str) -> str | None:
    """All that one prints; None where what it imports is not installed."""
    path = PROGRAMS / f'{program}.py'
    if not all(map(find_spec, {*re.findall(r'^(?:from|import) (\w+)', path.read_text(), re.MULTILINE)} - {'subject'})):
        return None
    done = subprocess.run([sys.executable, str(path)], env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'{program} failed:\n{done.stdout}{done.stderr}')
    return done.stdout


def rows_there() -> dict[str, list[str]]:
    return json.loads(RESULTS.read_text())['programs'] if RESULTS.exists() else {}


def row_of(output: str) -> list[str]:
    """The cells of the table, of the line that begins with the name of the trainer and ends with the verdict."""
    [line] = [line for line in output.splitlines() if line.count(' | ') == len(COLUMNS) - 1]
    return line.split(' | ')


def table_of(rows: dict[str, list[str]]) -> str:
    """The page's table, exact ones first."""
    return table(COLUMNS, sorted(rows.values(), key=lambda row: (row[-1] != 'exact', row[0].strip('*'))))


def main() -> None:
    parser_of(__doc__, results=None).parse_args()
    rows = rows_there()
    for program in programs():
        output = printed(program)
        print(f'{program}: not installed' if output is None else output, flush=True)
        if output is not None:
            rows[program] = row_of(output)
    write(RESULTS, {'machine': machine(), 'programs': rows})
    PAGE.write_text(filled(PAGE.read_text(), {'prove': lambda: table_of(rows)}))


if __name__ == '__main__':
    main()
