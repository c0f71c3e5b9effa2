# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: weights of tokens over ranks that take unequal shares; rank 0 writes the errors."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from composer.callbacks import NaNMonitor
from composer.utils import dist

from composer_tokacc import BatchLayout, token_data_spec
from tests.algorithm.test_router_loss import Microbatches, expected_gradients, mixture
from tests.ranks.gradient_matrix import ORDERS, SHARES, TEXT_RANK_SHARES, Case
from tests.support.families import FAMILIES
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit, loader, rank_share, relative_error
from tests.support.weights import column, weighted_reference


def measure(
    model: torch.nn.Module, rows: Any, shares: Any, pad_token_id: int, weights: str, size: int, **options: Any
) -> dict[str, Any]:
    layout = BatchLayout.for_model(model)
    batch = layout.concat(rows, pad_token_id=pad_token_id)
    expected, loss, token_mean = weighted_reference(model, batch, weights)
    data = token_data_spec(loader(layout.concat(rank_share(rows, shares), pad_token_id=pad_token_id)), **options)
    recorder = fit(model, data, token_weights=weights, microbatch_size=size, callbacks=[NaNMonitor()])
    found, beside = (recorder.logged(name)[-1] for name in ('loss/train/total', MEAN))
    return {
        'error': relative_error(recorder.gradients, expected),
        'loss_error': max(abs(found - loss) / loss, abs(beside - token_mean) / token_mean),
    }


MEAN = 'token_accumulation/token_mean_loss'


def with_column(rows: Any, zero: Any = ()) -> list[dict[str, Any]]:
    """Rows with random weights, those of some rows all zero."""
    return [{**row, 'loss_weights': column(row, seed=index) * (index not in zero)} for index, row in enumerate(rows)]


def cases(name: str) -> Iterator[Case]:
    world = dist.get_world_size()
    if name == 'text':
        rows, model, pad = text_rows([(4, 2), (14, 11), (9, 8), (3, 0), (6, 1), (7, 2)]), text_model(), 0
        order, shares, sizes = range(6), SHARES[world], (1, 2, 3, 6)
    else:
        case = FAMILIES[name]()
        rows, model, pad = case.rows, case.model, case.pad_token_id
        order, shares, sizes = ORDERS['text_rank'], TEXT_RANK_SHARES[world], (1, 3)  # a rank without images
    packings = (False, True) if name != 'qwen2_5_vl' else (False,)
    ordered = with_column([rows[index] for index in order])
    for packing, size, weights in itertools.product(packings, sizes, ('sqrt', 'sample', 'column')):

        def run(size: int = size, weights: str = weights, packing: bool = packing) -> dict[str, Any]:
            return measure(model, ordered, shares, pad, weights, size, packing=packing)

        yield f'{name} {weights} microbatch {size}{" packed" if packing else ""}', run

    def weightless_rank() -> dict[str, Any]:
        return measure(model, with_column(rows, zero=range(SHARES[world][0])), SHARES[world], pad, 'column', 2)

    if world > 1:
        yield f'{name} rank without weight', weightless_rank

    def router() -> dict[str, Any]:
        mixtral, seen = mixture('mixtral', 0.1), Microbatches()
        data = token_data_spec(loader(collate(rank_share(rows, shares))))
        recorder = fit(mixtral, data, token_weights='sqrt', microbatch_size=1, callbacks=[seen])
        microbatches = dist.all_gather_object(seen.inputs)
        expected, tokens, balance = expected_gradients(mixtral, collate(rows), microbatches, 'sqrt')
        found = [recorder.logged(f'loss/train/{name}')[-1] for name in ('tokens', 'router')]
        return {
            'error': relative_error(recorder.gradients, expected),
            'loss_error': max(abs(found[0] / tokens.item() - 1), abs(found[1] / balance.item() - 1)),
        }

    if name == 'text':
        yield 'router of a mixture of experts', router


def main() -> None:
    *names, path = sys.argv[1:]
    results = {label: run() for name in names for label, run in cases(name)}
    if dist.get_global_rank() == 0:
        Path(path).write_text(json.dumps(results))


if __name__ == '__main__':
    main()
