# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The matrix as a table: ``python -m tests.matrix.table > docs/families.md``; a line a cell goes to stderr meanwhile.

Arguments: names of families (default: all).
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from tests.matrix.harness import Cell, Outcome, cells, run_cell, seeds_of
from tests.matrix.subjects import SUBJECTS
from tests.model_types.table import page

__all__ = ['HEAD', 'summary', 'table']

COLUMNS = [
    (packing, side, regroup) for packing in (False, True) for side in ('right', 'left') for regroup in (True, False)
]

HEAD = """# Supported model families

Tiny models from configs on a CPU, ragged batches with and without media, microbatches of one to four rows; each cell is
four random batches, packed ten.

- `exact 3e-07`: the largest relative error of the gradient against one forward over the whole batch as the loader
  made it.
- `refused (a)`: every batch stops the run before its first optimizer step, with the message (a) below the table.
- `9 of 10 exact 4e-07, 1 refused (a)`: the batches of the cell differ. Of packed text those are refused in which rows
  label their first token: in a row padded on the left a pad predicts it, and packing leaves no pad (BERT reads it from
  its own column). LLaVA-OneVision packs a batch without media alone.

Made by `python -m tests.matrix.table > docs/families.md`.
"""

QUERIES = """
## Query tokens

BLIP-2, InstructBLIP, InstructBLIP-Video: `num_query_tokens` placeholders stand for an image, or for each of the four
frames of a clip; the processor writes them before the text, and must have the number of the model's config. They count
as image tokens in length tables and caps. What VideoChat2 calls `num_query_token` and `extra_num_query_token` are one
number here, their sum. A sample has one image or clip, which is the processor's limit, and the chat template writes
nothing for it. The query transformer of InstructBLIP sees what stands before the first answer with loss, and no answer.
The models take no batch without an image: one that has none gets a grey image of no row, whose gradient is zero.
"""


def summary(outcomes: Sequence[Outcome], name: Callable[[str], str]) -> str:
    """``exact 3e-07``, ``refused (name of the reason)``, or what went wrong; with counts where batches differ."""
    kinds = collections.Counter(outcome.kind for outcome in outcomes)
    parts = []
    for kind, count in sorted(kinds.items()):
        chosen = [outcome for outcome in outcomes if outcome.kind == kind]
        told = f'({name(chosen[0].message)})' if chosen[0].message else f'{max(one.error for one in chosen):.0e}'
        share = f'{count} ' if parts else f'{count} of {len(outcomes)} '
        parts.append(f'{share if len(kinds) > 1 else ""}{kind} {told}')
    return ', '.join(parts)


class Reasons:
    """A letter for each requirement that a refusal names, and its first message."""

    def __init__(self) -> None:
        self.messages: dict[str, str] = {}

    def __call__(self, message: str) -> str:
        message = re.sub(r'^\w+Error: ', '', message).replace('|', '/').replace('\n', ' ')
        requirement = re.sub(r'\d+', '', message.rpartition(', got:')[0])
        self.messages.setdefault(requirement, message)
        return chr(ord('a') + list(self.messages).index(requirement))

    def legend(self) -> list[str]:
        """A line a letter."""
        return [f'- ({chr(ord("a") + index)}) {message}' for index, message in enumerate(self.messages.values())]


def table(results: Mapping[Cell, Sequence[Outcome]]) -> str:
    """Markdown: families by cells, and what the refusals say."""
    names = [
        f'{"packed" if packing else "padded"} {side}, {"regrouped" if regroup else "in order"}'
        for packing, side, regroup in COLUMNS
    ]
    reasons = Reasons()
    lines = [f'| family | {" | ".join(names)} |', '|---' * (len(names) + 1) + '|']
    for family in dict.fromkeys(cell.family for cell in results):
        row = {(c.packing, c.side, c.regroup): summary(o, reasons) for c, o in results.items() if c.family == family}
        lines.append(f'| {family} | {" | ".join(row.get(column, "") for column in COLUMNS)} |')
    return '\n'.join([*lines, '', 'Reasons of refusal, with the numbers of one batch:', '', *reasons.legend()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('families', nargs='*')
    arguments = parser.parse_args()
    results = {}
    for cell in cells(arguments.families or SUBJECTS):
        start = time.perf_counter()
        results[cell] = run_cell(cell, seeds_of(cell))
        line = (
            f'{cell!s:48} {time.perf_counter() - start:5.1f} s  {summary(results[cell], lambda message: message[:200])}'
        )
        print(line, file=sys.stderr, flush=True)
    kinds = collections.Counter(outcome.kind for outcomes in results.values() for outcome in outcomes)
    print(dict(kinds), file=sys.stderr)
    print(HEAD)
    print(table(results))
    print(QUERIES)
    print(page())


if __name__ == '__main__':
    main()
