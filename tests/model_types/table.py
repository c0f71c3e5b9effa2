# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The outcomes of all model types: kept in ``results.json``, shown in docs/families.md.

``python -m tests.model_types.table try KIND [TYPE ...]`` tries types of a kind (``multimodal``, ``text``, ``masked``,
``seq2seq``; no TYPE: all of them) and keeps their outcomes. ``... table page`` writes the tables into the page.
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
RESULTS_FILE = Path(__file__).parent / 'results.json'
ORDER = ('wrong', 'crashed', 'exact', 'refused', 'not tried', 'not built')
HEAD = '| type | padded right | padded left | packed | logits |\n|---|---|---|---|---|'
TEXT_TITLES = {
    'multimodal': 'Text of multimodal types',
    'text': 'Text',
    'masked': 'Masked',
    'seq2seq': 'From sequence to sequence',
}
Results = dict[str, dict[str, dict[str, str]]]


def results() -> Results:
    """Returns the kept outcomes, by kind, type and modality."""
    return json.loads(RESULTS_FILE.read_text())


def try_types(kind: str, types: list[str]) -> None:
    """Tries types, one after the other, and keeps each result at once."""
    from tests.model_types.trial import CLASSES, tried

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _raise_timeout)
    for model_type in types or sorted(CLASSES[kind]):
        signal.alarm(150)
        try:
            outcomes = tried(model_type, kind)
        except TimeoutError:
            outcomes = {'': 'not tried: takes over two minutes'}
        signal.alarm(0)
        if not torch.__version__.startswith('2.7'):
            release, *_ = torch.__version__.split('+')
            outcomes = {name: f'{outcome} (torch {release})' for name, outcome in outcomes.items()}
        print(model_type, outcomes, flush=True)
        all_results = results()
        all_results.setdefault(kind, {})[model_type] = outcomes
        unfinished = RESULTS_FILE.with_suffix('.new')
        unfinished.write_text(_json(all_results))
        unfinished.replace(RESULTS_FILE)


def _json(all_results: Results) -> str:
    """Returns JSON with a line for each type."""
    kinds = []
    for kind, types in sorted(all_results.items()):
        lines = [f'"{model_type}": {json.dumps(outcomes)}' for model_type, outcomes in sorted(types.items())]
        lines_of_kind = ',\n'.join(lines)
        kinds.append(f'"{kind}": {{\n{lines_of_kind}\n}}')
    all_kinds = ',\n'.join(kinds)
    return f'{{\n{all_kinds}\n}}\n'


def _raise_timeout(*_: Any) -> None:
    raise TimeoutError


def table() -> str:
    """Returns Markdown: counts for each kind, and for each modality a table with a row for each type."""
    lines = []
    for kind, types in results().items():
        verdicts = Counter(verdict(outcomes) for outcomes in types.values())
        counts = ', '.join(f'{verdicts[name]} {name}' for name in ORDER if verdicts[name])
        lines += [f'{len(types)} {kind} types, exact where one modality is: {counts}.', '']
        for modality in ('image', 'video', 'audio', 'text', ''):
            rows = []
            for model_type, outcomes in types.items():
                if modality in outcomes:
                    rows.append(_row(model_type, outcomes, modality))
            if rows:
                lines += [f'### {_title(kind, modality)}', '', HEAD, *rows, '']
    return '\n'.join(lines).rstrip() + '\n'


def _title(kind: str, modality: str) -> str:
    """Returns the title of a table. Types that were not tried have no modality."""
    if modality == 'text':
        return TEXT_TITLES[kind]
    return modality.capitalize() or 'None'


def _row(model_type: str, outcomes: dict[str, str], modality: str) -> str:
    """Returns the row of a type, in the columns of :data:`HEAD`."""
    names = (modality, f'{modality}, padded left', f'{modality}, packed', 'logits')
    cells = [outcomes.get(name, '').replace('|', '/').replace('<', '&lt;') for name in names]
    return f'| `{model_type}` | {" | ".join(cells)} |'


def kind_of(outcome: str) -> str:
    """Returns the kind of an outcome without figures and reasons: ``exact``, ``refused``, ``not tried``, ..."""
    return 'exact' if outcome.startswith('exact') else outcome.partition(':')[0]


def verdict(outcomes: dict[str, str]) -> str:
    """Returns the verdict on a type: exact if one of its modalities is and none is wrong."""
    kinds = {kind_of(outcome) for outcome in outcomes.values()}
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
