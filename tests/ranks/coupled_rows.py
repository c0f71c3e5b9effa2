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
from tests.support.fsdp import FSDP, sharded
from tests.support.text import collate, gpt2, text_model, text_rows
from tests.support.training import fit, loader, rank_share, reference_gradients, relative_error

ROWS = [(4, 2), (14, 11), (9, 9), (5, 1), (6, 1), (7, 2)]


def leaking_model() -> torch.nn.Module:
    """Returns a fresh GPT-2. The rows see each other in its attention, which is small beside biases that are not 0."""
    model = gpt2()

    def center(module: torch.nn.Module, args: object, output: Any) -> Any:
        states, *others = output
        return states - 0.3 * states.mean(dim=0, keepdim=True), *others

    model.transformer.h[1].attn.register_forward_hook(center)
    return model


def model_with_state(influence: float) -> torch.nn.Module:
    """Returns a Llama whose first rank has a number, as from an earlier forward. Each forward writes it."""
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
        first_ids = args[0][:, :1, None]
        for remainder, branch in enumerate(module.branches):
            is_used = first_ids % 2 == remainder
            if is_used.any():
                output = output + is_used * branch(output)
        return output

    embedding.register_forward_hook(add_branch)
    return model


def rows_of_branches() -> list[Any]:
    """Returns rows of which the first rank gets only those of the first branch."""
    rows = text_rows(ROWS)
    for number, row in enumerate(rows):
        row['input_ids'][0, 0] = 4 if number < 2 else 5
    return rows


def train(model: torch.nn.Module, *, fsdp: bool, rows: list[Any] | None = None) -> list[Any]:
    """Trains one step. Returns the message of each rank, or the error of its gradient if it is not refused."""
    rows = rows or text_rows(ROWS)
    expected, _ = reference_gradients(model, collate(rows))
    data = token_data_spec(loader(collate(rank_share(rows, (2, 4)))))
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
