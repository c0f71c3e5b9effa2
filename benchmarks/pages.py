# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tables in Markdown, and pages whose tables stand between `<!-- made: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MADE = re.compile(r'(<!-- made: (\w+) -->\n).*?(<!-- end -->)', re.DOTALL)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """In Markdown."""
    lines = [columns, ['---'] * len(columns), *rows]
    return '\n'.join(f'| {" | ".join(map(str, line))} |' for line in lines) + '\n'


def show(title: str, rows: Sequence[dict[str, object]]) -> None:
    """Prints a table of rows that have the same keys."""
    print(f'\n{title}')
    print(table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows]))


def filled(page: str, parts: dict[str, Callable[[], str]]) -> str:
    """The page with each part made again that these name."""

    def made(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return f'{begin}\n{parts[name]().strip()}\n\n{end}' if name in parts else match[0]

    return _MADE.sub(made, page)


def _cell(value: object) -> str:
    return f'{value:.6g}' if isinstance(value, float) else '' if value is None else str(value)
