# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Vision tower and text of a modelled step: how evenly the ranks share each, and what knowing the tower's cost earns.

    python -m benchmarks.phases [--lengths DIR] [--quick]

Prints tables; writes results/phases.json, which docs/phases.md shows. Times are modelled
(`CostModel`), not measured. Samples are those of the tables, alone or with as many of text alone, as models see
them that make more or fewer tokens of a tile, under a tower of 1,024 patches a tile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from benchmarks.length_sets import TOKENS_PER_TILE, LengthSet, half_text, read_tables
from benchmarks.record import parser_of, table, write
from composer_tokacc.planning import CostModel, MicrobatchPlan, plan_microbatches

PATCHES_PER_TILE = 1024
MICROBATCH = 4
"""Memory of a microbatch, in rows of the longest."""
RANKS = {8: (16, 20), 64: (32, 6)}
"""Rows a rank, and global batches."""
LIMIT = 1.03


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a model makes of a tile, and what its tower costs beside a token of its text."""

    tokens_per_tile: float
    text: float
    """Parameters of the language model, by which a token costs 1."""
    tower: float = 3e8
    """Parameters of the tower."""
    hidden_size: int = 4096
    resolution: int = 0
    """Times the patches of the tiles, as one sequence; 0: each tile by itself."""

    def samples(self, drawn: LengthSet) -> Samples:
        """Lengths, image tokens, and what they cost in the tower by image tokens and by patches."""
        tiles, text = drawn.image_tokens // TOKENS_PER_TILE, drawn.lengths - drawn.image_tokens
        patches, squares = PATCHES_PER_TILE * tiles, PATCHES_PER_TILE**2 * tiles
        images = np.maximum((self.tokens_per_tile * tiles).astype(int), tiles > 0)
        if self.resolution:  # without the thumbnail that goes with several tiles
            patches = self.resolution * PATCHES_PER_TILE * (tiles - (tiles > 1))
            squares, images = patches**2, patches // 4
        elif not self.tokens_per_tile:
            images = (tiles > 0).astype(int)
        exact = (patches + squares / (6 * 1024)) * self.tower / self.text
        by_tokens = images * exact.sum() / images.sum()
        return Samples(text + images, images, {'none': 0.0 * exact, 'tokens': by_tokens, 'patches': exact})


class Samples(NamedTuple):
    lengths: np.ndarray
    image_tokens: np.ndarray
    vision: dict[str, np.ndarray]


MODELS = {
    '256 tokens a tile, 7B': Model(tokens_per_tile=256, text=7e9),
    '256 tokens a tile, 0.5B': Model(tokens_per_tile=256, text=5e8, hidden_size=896),
    '64 tokens a tile, 1.7B': Model(tokens_per_tile=64, text=1.7e9, tower=4e8, hidden_size=2048),
    'native resolution, 7B': Model(tokens_per_tile=256, text=7e9, tower=6.75e8, hidden_size=3584, resolution=4),
    'images by cross-attention, 8B': Model(tokens_per_tile=0, text=8e9, tower=9e8),
}


def phases(plan: MicrobatchPlan, vision: np.ndarray, cost: CostModel) -> np.ndarray:
    """Tower and text of a step: time of the slowest ranks, and means over the ranks, float64 (4,)."""
    columns = list(zip(*plan.ranks, strict=True))
    towers = np.array([[vision[list(one.indices)].sum() for one in column] for column in columns])
    rows = [[len(one.indices) * float(cost.rows(np.array(one.width))) for one in column] for column in columns]
    text = np.array(rows) + cost.launch
    return np.array([towers.max(1).sum(), towers.mean(1).sum(), text.max(1).sum(), text.mean(1).sum()])


def slowest_rank(plan: MicrobatchPlan, vision: np.ndarray, cost: CostModel) -> float:
    """Time of a step whose ranks wait at its end."""

    def one(microbatch: Any) -> float:
        text = len(microbatch.indices) * float(cost.rows(np.array(microbatch.width))) + cost.launch
        return text + float(vision[list(microbatch.indices)].sum())

    return max(sum(map(one, rank)) for rank in plan.ranks)


def global_batches(source: LengthSet, model: Model, size: int, count: int) -> Iterator[Samples]:
    """Global batches of one order of the samples."""
    for batch in source.draw(size * count, seed=1).global_batches(size):
        yield model.samples(batch)


def measure(
    source: LengthSet, model: Model, num_ranks: int, rows: int, count: int, objective: Any, memory: int = MICROBATCH
) -> dict[str, Any]:
    """Figures of the plans of some global batches, by what the planner knows of the tower."""
    cost = CostModel(quadratic=6.0 * model.hidden_size)
    steps: dict[str, float] = {'none': 0.0, 'tokens': 0.0, 'patches': 0.0}
    sums = {known: np.zeros(4) for known in steps}
    bound, columns, seconds = 0.0, 0, []
    for lengths, images, vision in global_batches(source, model, num_ranks * rows, count):
        options: dict[str, Any] = {
            'num_ranks': num_ranks, 'max_tokens': memory * int(lengths.max()), 'image_tokens': images,
            'objective': objective, 'cost': cost,
        }  # fmt: skip
        for known in steps:
            start = time.thread_time()
            plan = plan_microbatches(lengths, vision_cost=vision[known], **options)
            seconds.append(time.thread_time() - start)
            if objective == 'fsdp':
                sums[known] += phases(plan, vision['patches'], cost)
            else:
                steps[known] += slowest_rank(plan, vision['patches'], cost)
        bound += plan.stats.bound
        columns += len(plan.ranks[0])
    figures: dict[str, Any] = {'microbatches': columns / count, 'median_ms': 1e3 * float(np.median(seconds))}
    for known, (tower, mean_tower, text, mean_text) in sums.items():
        if objective == 'fsdp':
            steps[known] = tower + text
            figures[known] = {'tower': tower / mean_tower, 'text': text / mean_text}
        figures.setdefault(known, {})['step'] = steps[known] / bound
    figures['tower_share'] = float(sums['patches'][0] / steps['patches']) if objective == 'fsdp' else None
    return figures


def tables(results: dict[str, Any]) -> list[str]:
    """The tables of docs/phases.md: in columns, on ranks that wait at the end, and by rows and memory."""
    return [_in_columns(results['fsdp']), _at_the_end(results['ddp']), _by_rows(results['rows'])]


def _in_columns(rows: list[dict[str, Any]]) -> str:
    columns = (
        'samples', 'model', 'ranks x rows', 'vision', 'text', 'step over the bound', 'without', 'vision of the step',
    )  # fmt: skip
    return table(columns, [
        [row['set'], row['model'], f'{row["ranks"]} x {row["rows"]}',
         *(f'{row["patches"][name]:.2f}' for name in ('tower', 'text', 'step')), f'{row["none"]["step"]:.2f}',
         f'{row["tower_share"]:.0%}']
        for row in rows
    ])  # fmt: skip


def _at_the_end(rows: list[dict[str, Any]]) -> str:
    columns = ('samples', 'model', 'ranks x rows', 'step over the bound', 'by image tokens', 'without')
    return table(columns, [
        [row['set'], row['model'], f'{row["ranks"]} x {row["rows"]}',
         *(f'{row[known]["step"]:.2f}' for known in ('patches', 'tokens', 'none'))]
        for row in rows
    ])  # fmt: skip


def _by_rows(rows: list[dict[str, Any]]) -> str:
    memories = dict.fromkeys(f'memory of {row["memory"]} rows' for row in rows)
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        pair = f'{row["patches"]["tower"]:.3f}, {row["patches"]["text"]:.3f}'
        cells.setdefault((row['model'], f'{row["ranks"]} x {row["rows"]}'), []).append(pair)
    return table(('model', 'ranks x rows', *memories), [(*names, *pairs) for names, pairs in cells.items()])


def main() -> None:
    parser = parser_of(__doc__, lengths=True)
    parser.add_argument('--quick', action='store_true', help='two global batches each')
    given = parser.parse_args()
    found, source = read_tables(given.lengths)
    print(source)
    sets = {'images': found, 'half text': half_text(found)}
    results: dict[str, Any] = {'source': source, 'microbatch': MICROBATCH, 'limit': LIMIT}

    def row(
        name: str, model: str, ranks: int, rows: int, count: int, objective: str, memory: int = MICROBATCH
    ) -> dict[str, Any]:
        count = 2 if given.quick else count
        figures = measure(sets[name], MODELS[model], ranks, rows, count, objective, memory)
        return {'set': name, 'model': model, 'ranks': ranks, 'rows': rows, 'memory': memory, **figures}

    for objective in ('fsdp', 'ddp'):
        results[objective] = [
            row(name, model, ranks, rows, count, objective)
            for model in MODELS
            for name in sets
            for ranks, (rows, count) in RANKS.items()
        ]
    results['rows'] = [
        row('half text', model, ranks, rows, max(4, 20 * 16 // rows) if ranks == 8 else 4, 'fsdp', memory)
        for model in ('256 tokens a tile, 7B', '256 tokens a tile, 0.5B')
        for ranks, sizes in ((8, (16, 64, 256)), (64, (32, 128, 256)))
        for rows in sizes
        for memory in (2, 4, 16)
    ]
    print(*tables(results), sep='\n\n')
    write(given.results / 'phases.json', results)


if __name__ == '__main__':
    main()
