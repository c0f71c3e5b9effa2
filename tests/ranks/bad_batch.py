# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: the second rank gets a batch that is refused. Returns all messages."""

from __future__ import annotations

import torch
from composer.utils import dist

from tests.support.text import VOCABULARY, collate, one_layer_model, text_rows
from tests.support.training import fit

NUM_STEPS = 3


def messages(bad_step: int, bad_entry: str = 'labels') -> list[str]:
    """A label outside of the vocabulary is refused before the batch is counted, a weight of NaN while it is counted."""
    batches = []
    for _ in range(NUM_STEPS):
        batch = collate(text_rows([(4, 2), (6, 3)]))
        batches.append({**batch, 'loss_weights': torch.ones(2)})
    if dist.get_global_rank() == 1:
        if bad_entry == 'labels':
            batches[bad_step]['labels'][0, 2] = VOCABULARY
        else:
            batches[bad_step]['loss_weights'][0] = torch.nan
    message = ''
    try:
        fit(one_layer_model(), *batches, token_weights='column')
    except (RuntimeError, ValueError) as error:
        message = str(error)
    return dist.all_gather_object(message)


def main() -> list[list[str]]:
    return [messages(0), messages(1), messages(1, 'loss_weights')]
