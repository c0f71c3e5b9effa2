# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: models that are refused on all ranks, and a state that only one rank has.

FSDP hangs unless all ranks run the same forwards, so all of them must come to the same decision.
"""

from __future__ import annotations

from typing import Any

import torch
from composer.utils import dist

from composer_tokacc import token_data_spec
from composer_tokacc.refusals import NotExactError
from tests.checks.test_row_coupling import leaking_model
from tests.support.fsdp import FSDP, sharded
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit, loader, rank_share, reference_gradients, relative_error

ROWS = [(4, 2), (14, 11), (9, 9), (5, 1), (6, 1), (7, 2)]
SHARES = (2, 4)
"""Rows of each rank."""


def model_with_state(influence: float) -> torch.nn.Module:
    """Returns a Llama that counts its forwards in an attribute, which at first exists only on the first rank.

    Args:
        influence: By how much the output grows with each forward. 0: the count is harmless.
    """
    model = text_model()
    norm = model.model.norm
    if dist.get_global_rank() == 0:
        norm.num_calls = 0

    def count(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        module.num_calls = getattr(module, 'num_calls', 0) + 1
        return output * (1 + influence * module.num_calls)

    norm.register_forward_hook(count)
    return model


def branching_model() -> torch.nn.Module:
    """Returns a Llama with two layers of equal size. A row uses the first one if its first token is even."""
    model = text_model()
    embedding = model.model.embed_tokens
    embedding.branches = torch.nn.ModuleList([torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)])

    def add_branch(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        (ids,) = args
        remainders = ids[:, :1, None] % 2
        for number, branch in enumerate(module.branches):
            is_used = remainders == number
            if is_used.any():
                output = output + is_used * branch(output)
        return output

    embedding.register_forward_hook(add_branch)
    return model


def rows_of_branches() -> list[Any]:
    """Returns rows that use the first layer on the first rank, and the second layer on the second rank."""
    rows = text_rows(ROWS)
    num_rows_of_first_rank, _ = SHARES
    for index, row in enumerate(rows):
        first_id = 4 if index < num_rows_of_first_rank else 5
        row['input_ids'][0, 0] = first_id
    return rows


def train(model: torch.nn.Module, *, fsdp: bool, rows: list[Any] | None = None) -> list[Any]:
    """Trains one step. Returns the message of each rank, or the error of its gradient if it is not refused."""
    rows = rows or text_rows(ROWS)
    expected, _ = reference_gradients(model, collate(rows))
    rank_batch = collate(rank_share(rows, SHARES))
    data = token_data_spec(loader(rank_batch))
    options = {}
    if fsdp:
        model = sharded(model)
        options = FSDP
    try:
        recorder = fit(model, data, **options)
    except NotExactError as error:
        result = str(error)
    else:
        result = relative_error(recorder.gradients, expected)
    return dist.all_gather_object(result)


def main() -> dict[str, list[Any]]:
    results = {}
    for fsdp in (False, True):
        name = 'fsdp' if fsdp else 'ddp'
        results[f'{name} leak'] = train(leaking_model(), fsdp=fsdp)
        results[f'{name} harmless state'] = train(model_with_state(influence=0.0), fsdp=fsdp)
        results[f'{name} decisive state'] = train(model_with_state(influence=0.1), fsdp=fsdp)
        results[f'{name} branches'] = train(branching_model(), fsdp=fsdp, rows=rows_of_branches())
    return results
