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
    """Returns the message of each rank. The second rank has a bad entry in one step.

    The three entries are refused at different places: a label outside of the vocabulary before the batch is counted, a
    weight of NaN while it is counted, and five flags for two rows when the rows are compared with the checked ones.
    """
    batches = []
    for _ in range(NUM_STEPS):
        batch = collate(text_rows([(4, 2), (6, 3)]))
        batches.append({**batch, 'loss_weights': torch.ones(2), 'flags': torch.zeros(2, dtype=torch.long)})
    if dist.get_global_rank() == 1:
        batch = batches[bad_step]
        if bad_entry == 'labels':
            batch['labels'][0, 2] = VOCABULARY
        elif bad_entry == 'loss_weights':
            batch['loss_weights'][0] = torch.nan
        else:
            batch['flags'] = torch.zeros(5, dtype=torch.long)
    message = ''
    try:
        fit(one_layer_model(), *batches, token_weights='column')
    except (RuntimeError, ValueError) as error:
        message = str(error)
    return dist.all_gather_object(message)


def main() -> list[list[str]]:
    results = []
    for bad_entry in ('labels', 'loss_weights', 'flags'):
        results += [messages(0, bad_entry), messages(1, bad_entry)]
    return results
