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

Every `config.model_type` of `MODEL_FOR_MULTIMODAL_LM_MAPPING` and `MODEL_FOR_CAUSAL_LM_MAPPING` of transformers 5.24: a
tiny model of its config in double precision, rows with two items, none and one as its own image, video and audio
processors make them, and as many placeholders as its encoder makes features; steps of the Trainer on one rank with
microbatches of one, two and three rows. A table for each modality, a row for each type, columns for rows padded on the
right and on the left.

- `exact 3e-16`: the largest relative error of the gradient against one forward over the whole batch. In float32 where
  the model takes no doubles (1e-7), or casts inside (1e-9). More than 1e-6, of Gemma 4 padded on the left, is what
  other rows beside them and eight more columns of padding change by rounding alone (float32 is 5e-5 off doubles).
- `refused: ...`: stopped before the optimizer step, for this reason.
- `not tried: ...`: the model's own forward takes no such rows, or there is no loss over tokens.
- No result for the left: the rows are of one length, or of a decoder.
- Of the encoders of timm, which is no requirement (FastVLM, Gemma 3n, Perception LM), one convolution stands in; of
  Qwen-Omni the thinker is trained, whose forward takes a batch; `torch 2.15` where torch 2.7 is too old for the model.

Made by `make model-types TRY=1`; `make model-types` tries all again and compares. On two ranks, DDP and FSDP2, with
steps of text alone and with media on one rank only: `tests/data_spec/test_text_only_steps.py`, types by sample.
"""

NOT_THERE = """
## Not there

My model is not in the tables:

1. Try it: a model without an entry is taken as it is. Names and shapes of the tensors, the ids in the config and the
   placeholders of the rows tell which tensors belong to which row, if one answer fits.
2. The first-batch check proves it, or stops the run and says by how much rows depend on each other.
3. `layout must tell which of N entries ...`: none or two answers fit. Carry `num_images` (`num_videos`, `num_audios`)
   in the batch, one int a row.
4. A tensor that is neither of rows nor of media: `layout=BatchLayout.for_model(model).with_entries(name=Entry(...))`.
5. Several ranks need nothing more: under DDP any step may be without media; under FSDP the smallest row with media of
   any rank serves as [dummy row](decisions/dummy_rows.md).
6. A type with the format of a known one: a word in `model_types` of `composer_tokacc/layout/families.py`.
7. Tell us: the `model_type`, the message, and names and shapes of the tensors of one batch.
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


def page() -> str:
    """Returns the end of docs/families.md."""
    return f'{PAGE}\n{table()}\n{NOT_THERE.rstrip()}'


def table() -> str:
    """Markdown: counts, and for each modality one row a type."""
    lines = []
    for kind, types in results().items():
        counts = Counter(verdict(found) for found in types.values())
        said = ', '.join(f'{counts[name]} {name}' for name in ORDER if counts[name])
        lines += [f'{len(types)} {kind} types, exact where one modality is: {said}.', '']
        for modality in ('image', 'video', 'audio', 'text', ''):
            found = {name: one for name, one in types.items() if modality in one}
            if not found:
                continue
            title = {'': 'None', 'text': 'Text' if kind == 'text' else 'Text of multimodal types'}
            lines += [f'### {title.get(modality, modality.capitalize())}', '']
            lines += ['| type | padded right | padded left |', '|---|---|---|']
            lines += [
                f'| `{name}` | {_cell(one[modality])} | {_cell(one.get(f"{modality}, padded left", ""))} |'
                for name, one in found.items()
            ]
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
