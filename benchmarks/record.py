# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Arguments of the benchmarks, their results files, and tables in Markdown.

A table of a page stands between `<!-- made: NAME -->` and `<!-- end -->`, and the benchmark writes it there.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Figures by name.
Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / 'docs'
RESULTS = ROOT / 'benchmarks' / 'results'
MADE_PART = re.compile(r'(<!-- made: (\w+) -->\n).*?(<!-- end -->)', re.DOTALL)


def parser_of(
    doc: str | None,
    *,
    results: Path = RESULTS,
    report: bool = False,
) -> argparse.ArgumentParser:
    """Returns a parser with the help text `doc`. `results` is the default of ``--results``, a folder."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--results', type=Path, default=results)
    if report:
        parser.add_argument('--report', action='store_true', help='measure nothing; write the pages from the results')
    return parser


def read(path: Path) -> Row:
    """Returns a results file. Empty if there is no file yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, results: Any) -> None:
    write_at_once(path, json.dumps(results, indent=1) + '\n')


def write_rows(path: Path, results: dict[str, list[Any]]) -> None:
    """Writes JSON with a line for each row, so that changes can be read."""
    parts = []
    for key, rows in results.items():
        lines = ',\n'.join(f'  {json.dumps(row)}' for row in rows)
        parts.append(f' {json.dumps(key)}: [\n{lines}\n ]')
    write_at_once(path, '{\n' + ',\n'.join(parts) + '\n}\n')


def write_at_once(path: Path, text: str) -> None:
    """Writes a file under another name and renames it, because a benchmark may be killed while it writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix('.part')
    partial.write_text(text)
    partial.replace(path)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    ruler = ['---'] * len(columns)
    lines = []
    for row in (columns, ruler, *rows):
        cells = ' | '.join(str(cell) for cell in row)
        lines.append(f'| {cells} |\n')
    return ''.join(lines)


def new_figure(width: float, height: float, font_size: float) -> Any:
    """Returns a figure of matplotlib. Saved as SVG, the same figure gives the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update(
        {
            'svg.hashsalt': 'composer_tokacc',
            'font.size': font_size,
            'axes.titlesize': 9,
            'axes.titlelocation': 'left',
            'axes.spines.top': False,
            'axes.spines.right': False,
        }
    )
    return Figure(figsize=(width, height), layout='constrained')


def ranks_text(ranks: int) -> str:
    return '1 rank' if ranks == 1 else f'{ranks} ranks'


def filled(page: str, parts: dict[str, str]) -> str:
    """Returns the page with new text between the marks of these parts. Marks of other names are left alone."""

    def replacement(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in parts:
            return match[0]
        return f'{begin}\n{parts[name].strip()}\n\n{end}'

    return MADE_PART.sub(replacement, page)


def fill_page(page: Path, parts: dict[str, str]) -> None:
    """Writes parts of a page again."""
    page.write_text(filled(page.read_text(), parts))
