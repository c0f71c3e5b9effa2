# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What became of every model type: kept in ``results.json``, shown in docs/families.md.

``python -m tests.model_types.table try KIND [TYPE ...]`` tries types of a kind (``multimodal``, ``text``, ``other``; no
TYPE: all of them) and keeps what became of them; ``... table page`` writes the tables into the page.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import fill_page

PAGE = Path(__file__).parents[2] / 'docs' / 'families.md'
KEPT = Path(__file__).parent / 'results.json'
ORDER = ('wrong', 'crashed', 'exact', 'refused', 'not tried', 'not built')
HEAD = '| type | padded right | padded left | packed | logits |\n|---|---|---|---|---|'
TEXT_TITLES = {
    'multimodal': 'Text of multimodal types',
    'text': 'Text',
    'other': 'Masked, and from sequence to sequence',
}
Results = dict[str, dict[str, dict[str, str]]]


def results() -> Results:
    """By ``multimodal`` and ``text``, type and modality: what became of it."""
    return json.loads(KEPT.read_text())


def try_types(kind: str, types: list[str]) -> None:
    """Tries types, one after the other, and keeps each result at once."""
    from tests.model_types.trial import CLASSES, tried

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _late)
    for model_type in types or sorted(CLASSES[kind]):
        signal.alarm(150)
        try:
            found = tried(model_type, kind)
        except TimeoutError:
            found = {'': 'not tried: takes over two minutes'}
        signal.alarm(0)
        if not torch.__version__.startswith('2.7'):
            found = {name: f'{said} (torch {torch.__version__.partition("+")[0]})' for name, said in found.items()}
        print(model_type, found, flush=True)
        kept: Results = results() if KEPT.exists() else {}
        kept.setdefault(kind, {})[model_type] = found
        unfinished = KEPT.with_suffix('.new')
        unfinished.write_text(_lines(kept))
        unfinished.replace(KEPT)


def _lines(kept: Results) -> str:
    """JSON with a line a type."""
    parts = [
        f'"{kind}": {{\n' + ',\n'.join(f'"{name}": {json.dumps(types[name])}' for name in sorted(types)) + '\n}'
        for kind, types in sorted(kept.items())
    ]
    return '{\n' + ',\n'.join(parts) + '\n}\n'


def _late(*_: Any) -> None:
    raise TimeoutError


def table() -> str:
    """Markdown: counts, and for each modality one row a type."""
    lines = []
    for kind, types in results().items():
        verdicts = Counter(verdict(outcomes) for outcomes in types.values())
        counts = ', '.join(f'{verdicts[name]} {name}' for name in ORDER if verdicts[name])
        lines += [f'{len(types)} {kind} types, exact where one modality is: {counts}.', '']
        for modality in ('image', 'video', 'audio', 'text', ''):
            rows = {name: outcomes for name, outcomes in types.items() if modality in outcomes}
            if rows:
                title = TEXT_TITLES[kind] if modality == 'text' else modality.capitalize() or 'None'
                lines += [f'### {title}', '', HEAD, *(_row(name, rows[name], modality) for name in rows), '']
    return '\n'.join(lines).rstrip() + '\n'


def _row(model_type: str, outcomes: dict[str, str], modality: str) -> str:
    names = (modality, f'{modality}, padded left', f'{modality}, packed', 'logits')
    return f'| `{model_type}` | {" | ".join(_cell(outcomes.get(name, "")) for name in names)} |'


def _cell(said: str) -> str:
    return said.replace('|', '/').replace('<', '&lt;')


def kind_of(said: str) -> str:
    """``exact``, ``refused``, ``not tried``, ...: what was said without figures and reasons."""
    return 'exact' if said.startswith('exact') else said.partition(':')[0]


def verdict(found: dict[str, str]) -> str:
    """Returns what became of a type: exact where one of its modalities is and none is wrong."""
    kinds = {kind_of(said) for said in found.values()}
    return next(kind for kind in ORDER if kind in kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    attempt = commands.add_parser('try')
    attempt.add_argument('kind', choices=TEXT_TITLES)
    attempt.add_argument('types', nargs='*')
    commands.add_parser('page')
    arguments = parser.parse_args()
    if arguments.command == 'try':
        try_types(arguments.kind, arguments.types)
    else:
        fill_page(PAGE, {'model_types': table()})


if __name__ == '__main__':
    main()
