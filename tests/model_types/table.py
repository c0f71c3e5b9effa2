# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What became of every model type: kept in ``results.json``, shown in docs/families.md.

``python -m tests.model_types.table`` prints the table; ``... table try [TYPE ...]`` tries types, ``try_text`` those of
the causal language models, and keeps what became of them.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

KEPT = Path(__file__).parent / 'results.json'
Results = dict[str, dict[str, dict[str, str]]]


def results() -> Results:
    """By ``multimodal`` and ``text``, type and modality: what became of it."""
    return json.loads(KEPT.read_text())


def try_types(kind: str, types: list[str]) -> None:
    """Tries types, one after the other, and keeps each result at once."""
    from tests.model_types import trial

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _late)
    for model_type in types or (trial.TEXT if kind == 'text' else trial.MULTIMODAL):
        signal.alarm(150)
        try:
            found = trial.tried(model_type, text=kind == 'text')
        except TimeoutError:
            found = {'': 'not tried: takes over two minutes'}
        signal.alarm(0)
        print(model_type, found, flush=True)
        kept: Results = results() if KEPT.exists() else {}
        kept.setdefault(kind, {})[model_type] = found
        KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + '\n')


def _late(*_: Any) -> None:
    raise TimeoutError


def table() -> str:
    """Markdown: counts, and one row a type."""
    lines = []
    for kind, types in results().items():
        counts = Counter(verdict(found) for found in types.values())
        said = ', '.join(f'{count} {name}' for name, count in sorted(counts.items()))
        lines += [f'{len(types)} {kind} types of transformers {transformers.__version__}: {said}.', '']
        lines += ['| type | modality | result |', '|---|---|---|']
        for model_type, found in sorted(types.items()):
            lines += [f'| `{model_type}` | {modality} | {said} |' for modality, said in found.items()]
        lines.append('')
    return '\n'.join(lines)


def kind_of(said: str) -> str:
    """``exact``, ``refused``, ``not tried``, ...: what was said without figures and reasons."""
    return 'exact' if said.startswith('exact') else said.partition(':')[0]


def verdict(found: dict[str, str]) -> str:
    """Of all modalities of a type, the worst."""
    kinds = {kind_of(said) for said in found.values()}
    order = ('wrong', 'crashed', 'refused', 'exact', 'not tried', 'not built')
    return next(kind for kind in order if kind in kinds)


if __name__ == '__main__':
    command, *names = sys.argv[1:] or ['print']
    if command == 'print':
        print(table())
    else:
        try_types('text' if command == 'try_text' else 'multimodal', names)
