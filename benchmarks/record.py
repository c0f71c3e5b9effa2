# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Arguments of benchmarks, their results files, and tables in Markdown, of the screen and of pages.

Tables of a page stand between `<!-- made: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
_MADE = re.compile(r'(<!-- made: (\w+) -->\n).*?(<!-- end -->)', re.DOTALL)


def parser_of(doc: str | None, *, results: Path | None = RESULTS, lengths: bool = False) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring.

    Args:
        doc: The docstring.
        results: Default of ``--results``; None: the benchmark takes none.
        lengths: Whether it takes ``--lengths``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if results is not None:
        parser.add_argument('--results', type=Path, default=results)
    if lengths:
        parser.add_argument('--lengths', type=Path, help='folder of tables, by default COMPOSER_TOKACC_LENGTHS')
    return parser


def write(path: Path, found: Any) -> None:
    write_at_once(path, json.dumps(found, indent=1) + '\n')


def write_at_once(path: Path, text: str) -> None:
    """Writes a file, beside it first: a benchmark may be killed while it writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix('.part')
    begun.write_text(text)
    begun.replace(path)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ['---'] * len(columns), *rows]
    return '\n'.join(f'| {" | ".join(map(str, line))} |' for line in lines) + '\n'


def show(title: str, rows: Sequence[dict[str, object]]) -> None:
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
