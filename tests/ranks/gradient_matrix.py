# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: every rank takes its share of one global batch; rank 0 writes the relative errors."""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from composer.callbacks import NaNMonitor
from composer.utils import dist

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.algorithm import step_loss_weights
from tests.support.families import FAMILIES
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit, loader, rank_share, reference_gradients, relative_error, train

# How many of the six rows each rank takes: uneven, so that ranks make different numbers of microbatches.
SHARES = {1: (6,), 2: (4, 2), 4: (2, 2, 1, 1)}
# Rows by number of images are 0, 1, 1, 2, 0, 3: 'split' gives the first rank both text-only rows, or makes one of them
# a rank of its own.
ORDERS = {'mixed': (0, 1, 2, 3, 4, 5), 'text_rank': (0, 4, 1, 2, 3, 5)}
TEXT_RANK_SHARES = {1: (6,), 2: (2, 4), 4: (1, 1, 2, 2)}

Case = tuple[str, Callable[[], dict[str, Any]]]


def measure(model: torch.nn.Module, batch: dict[str, Any], data: Any, size: int, **kwargs: Any) -> dict[str, Any]:
    expected, loss = reference_gradients(model, batch)
    recorder = fit(model, data, microbatch_size=size, callbacks=[NaNMonitor()], **kwargs)
    found = recorder.logged('loss/train/total')[-1]
    return {
        'error': relative_error(recorder.gradients, expected),
        'loss_error': abs(found - loss) / loss,
    }


def family_cases(name: str) -> Iterator[Case]:
    case = FAMILIES[name]()
    rows = case.rows
    # A row without loss tokens, in every family.
    rows[2] = {**rows[2], 'labels': torch.full_like(rows[2]['labels'], -100)}
    layout = BatchLayout.for_model(case.config)
    world = dist.get_world_size()
    # Two families take every size; the others show that their image rows are split as exactly.
    sizes = (1, 2, 3, 6) if name in ('llava', 'qwen2_5_vl') else (1, 3)
    # Two families packed as well, one with multimodal rotary positions.
    packings = (False, True) if name in ('llava', 'qwen2_5_vl') else (False,)
    for packing, side, order, size in itertools.product(packings, ('right', 'left'), ORDERS, sizes):
        ordered = [rows[index] for index in ORDERS[order]]
        shares = (SHARES if order == 'mixed' else TEXT_RANK_SHARES)[world]

        def run(
            ordered: Any = ordered, shares: Any = shares, side: str = side, size: int = size, packing: bool = packing
        ) -> dict[str, Any]:
            def join(rows: Any) -> dict[str, Any]:
                return layout.concat(rows, padding_side=side, pad_token_id=case.pad_token_id)

            data = token_data_spec(loader(join(rank_share(ordered, shares))), layout=layout, packing=packing)
            return measure(case.model, join(ordered), data, size)

        yield f'{name} {side} {order} microbatch {size}{" packed" if packing else ""}', run

    def unknown() -> dict[str, Any]:
        """The layout is inferred from the batch, of which the first rank sees only text."""
        model, ordered = copy.deepcopy(case.model), [rows[index] for index in ORDERS['text_rank']]
        model.config.model_type = 'known_to_nobody'
        share = layout.concat(rank_share(ordered, TEXT_RANK_SHARES[world]), pad_token_id=case.pad_token_id)
        whole = layout.concat(ordered, pad_token_id=case.pad_token_id)
        return measure(model, whole, token_data_spec(loader(share)), 2)

    if name == 'llava':
        yield 'llava of a family that is not known', unknown


def text_cases() -> Iterator[Case]:
    shape = [(4, 2), (14, 11), (9, 9), (3, 0), (6, 1), (7, 2)]  # 22 loss tokens against 3 on two ranks
    rows, model = text_rows(shape), text_model()
    shares = SHARES[dist.get_world_size()]
    for split, size in itertools.product(('stock', 'ordered', 'regrouped', 'free', 'packed'), (1, 2, 3, 6)):

        def run(split: str = split, size: int = size) -> dict[str, Any]:
            data = loader(collate(rank_share(rows, shares)))
            if split != 'stock':
                equal = False if split == 'free' else 'auto'
                data = token_data_spec(data, regroup=split != 'ordered', equal_counts=equal, packing=split == 'packed')
            return measure(model, collate(rows), data, size)

        yield f'text {split} microbatch {size}', run

    def empty_rank() -> dict[str, Any]:
        rows = text_rows([(4, 0), (14, 0), (9, 0), (3, 0), (6, 1), (7, 2)])
        data = token_data_spec(loader(collate(rank_share(rows, shares))))
        return measure(model, collate(rows), data, 2)

    yield 'text rank without loss tokens', empty_rank

    def plain_loop() -> dict[str, Any]:
        """Without a Trainer: DistributedDataParallel and the functional form alone."""
        expected, _ = reference_gradients(model, collate(rows))
        parallel: Any = copy.deepcopy(model)
        if dist.get_world_size() > 1:
            parallel = torch.nn.parallel.DistributedDataParallel(parallel)
        microbatches = [collate([row]) for row in rank_share(rows, shares) if bool((row['labels'] != -100).any())]
        for index, weight in enumerate(step_loss_weights(microbatches)):
            parallel.require_backward_grad_sync = index == len(microbatches) - 1
            (parallel(**microbatches[index]).loss * weight).backward()
        own = {name.removeprefix('module.'): p.grad for name, p in parallel.named_parameters() if p.grad is not None}
        return {'error': relative_error({f'model.{n}': g for n, g in own.items()}, expected), 'loss_error': 0.0}

    yield 'text plain loop', plain_loop

    def exact_flag() -> dict[str, Any]:
        data = token_data_spec(loader(collate(rank_share(rows, shares))), model=model)
        expected, _ = reference_gradients(model, collate(rows))
        recorder, _, _ = train(model, data, microbatch_size=2, accumulate_train_batch_on_tokens=True)
        return {'error': relative_error(recorder.gradients, expected), 'loss_error': 0.0}

    yield 'text flag without algorithm', exact_flag


def refusals() -> dict[str, str]:
    """What must be refused, with its message."""
    rows = text_rows([(4, 2), (14, 11), (9, 9), (3, 2), (6, 1), (7, 2)])
    share = collate(rank_share(rows, SHARES[dist.get_world_size()]))
    found = {}
    for name, data in {'default counter': loader(share), 'exact counter': token_data_spec(loader(share))}.items():
        try:
            fit(text_model(), data, accumulate_train_batch_on_tokens=True)
            found[name] = ''
        except RuntimeError as error:
            found[name] = str(error)
    return found


def main() -> None:
    *names, path = sys.argv[1:]
    results: dict[str, Any] = {}
    for name in names:
        for label, run in text_cases() if name == 'text' else family_cases(name):
            results[label] = run()
    results['refused'] = refusals() if 'text' in names else {}
    if dist.get_global_rank() == 0:
        Path(path).write_text(json.dumps(results))


if __name__ == '__main__':
    main()
