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

PAGE = """
## Model types

Every `config.model_type` of `MODEL_FOR_MULTIMODAL_LM_MAPPING` and `MODEL_FOR_CAUSAL_LM_MAPPING` of transformers 5.23: a
tiny model of its config in double precision, rows with two items, none and one as its own image, video and audio
processors make them, and as many placeholders as its encoder makes features; one step of the Trainer with microbatches
of one and two rows, padded on the right, on one rank.

- `exact 3e-16`: the largest relative error of the gradient against one forward over the whole batch. In float32 where
  the model takes no doubles (1e-7), or casts inside (1e-9).
- `refused: ...`: stopped before the first optimizer step, for this reason.
- `not tried`, `not built`: the model's own forward fails on such rows, or a package is missing.

Made by `make model-types TRY=1`; `make model-types` tries all again and compares.
"""

NOT_THERE = """
## Not there

1. Try it: a model without an entry is taken as it is. Names and shapes of the tensors, the ids in the config and the
   placeholders of the rows tell which tensors belong to which row, if one answer fits.
2. The first-batch check proves it, or stops the run and says by how much rows depend on each other.
3. `layout must tell which of N entries ...`: none or two answers fit. Carry `num_images` (`num_videos`, `num_audios`)
   in the batch, one int a row.
4. A tensor that is neither of rows nor of media: `layout=BatchLayout.for_model(model).with_entries(name=Entry(...))`.
5. On several ranks have a row with media in every step: dummy rows are known for families with an entry only.
6. A type with the format of a known one: a word in `model_types` of `composer_tokacc/layout/families.py`.
"""

KEPT = Path(__file__).parent / 'results.json'
ORDER = ('wrong', 'crashed', 'exact', 'refused', 'not tried', 'not built')
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
        KEPT.write_text(_lines(kept))


def _lines(kept: Results) -> str:
    """JSON with a line a type."""
    parts = [
        f'"{kind}": {{\n' + ',\n'.join(f'"{name}": {json.dumps(types[name])}' for name in sorted(types)) + '\n}'
        for kind, types in sorted(kept.items())
    ]
    return '{\n' + ',\n'.join(parts) + '\n}\n'


def _late(*_: Any) -> None:
    raise TimeoutError


def page() -> str:
    """Returns the end of docs/families.md."""
    return f'{PAGE}\n{table()}\n{NOT_THERE.rstrip()}'


def table() -> str:
    """Markdown: counts, and one row a type and modality."""
    lines = []
    for kind, types in results().items():
        counts = Counter(verdict(found) for found in types.values())
        said = ', '.join(f'{counts[name]} {name}' for name in ORDER if counts[name])
        lines += [
            f'{len(types)} {kind} types, exact where one modality is: {said}.',
            '',
            '| type | modality | result |',
            '|---|---|---|',
        ]
        for model_type, found in types.items():
            lines += [f'| `{model_type}` | {modality} | {_cell(said)} |' for modality, said in found.items()]
        lines.append('')
    return '\n'.join(lines).rstrip()


def _cell(said: str) -> str:
    return said.replace('|', '/').replace('<', '&lt;')


def kind_of(said: str) -> str:
    """``exact``, ``refused``, ``not tried``, ...: what was said without figures and reasons."""
    return 'exact' if said.startswith('exact') else said.partition(':')[0]


def verdict(found: dict[str, str]) -> str:
    """Returns what became of a type: exact where one of its modalities is and none is wrong."""
    kinds = {kind_of(said) for said in found.values()}
    return next(kind for kind in ORDER if kind in kinds)


if __name__ == '__main__':
    command, *names = sys.argv[1:] or ['print']
    if command == 'print':
        print(page())
    elif command == 'page':  # writes it
        families = Path('docs/families.md')
        families.write_text(families.read_text().partition('\n## Model types')[0] + page() + '\n')
    else:
        try_types('text' if command == 'try_text' else 'multimodal', names)
