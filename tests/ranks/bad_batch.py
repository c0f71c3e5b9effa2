# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: the second rank gets a batch that is refused. Returns all messages."""

from __future__ import annotations

import torch
from composer.utils import dist

from composer_tokacc.batch import BatchDict
from tests.support.text import VOCABULARY, collate, one_layer_model, text_rows
from tests.support.training import fit

NUM_STEPS = 3
PLACEHOLDER = 5


def images_of_unknown_rows() -> BatchDict:
    """Returns rows whose images can be told apart, but not any more if only some of the rows are selected.

    In the whole batch the runs of placeholders tell the images of each row. Without the last image, the ranks of the
    images fit as numbers of placeholders, too, and would divide the images in another way.
    """
    batch = collate(text_rows([(20, 5), (3, 2), (12, 4), (14, 3), (13, 3), (15, 3), (11, 3)]))
    ids = batch['input_ids']
    ids[ids == PLACEHOLDER] = PLACEHOLDER + 1
    ids[3, 1:5] = PLACEHOLDER
    ids[4, [1, 2, 4, 5]] = PLACEHOLDER  # two images of two placeholders
    ids[5, 1:4] = PLACEHOLDER
    return {**batch, 'image_features': torch.ones(4, 3), 'image_rank': torch.tensor([2, 4, 2, 100])}


def messages(bad_step: int, bad_entry: str = 'labels') -> list[str]:
    """Returns the message of each rank. The second rank has a bad entry in one step.

    The entries are refused at different places: a label outside of the vocabulary before the batch is counted, a weight
    of NaN while it is counted, five flags for two rows when the rows are compared with the checked ones, and images of
    unknown rows when some rows are selected for a check.
    """
    model = one_layer_model()
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
        elif bad_entry == 'flags':
            batch['flags'] = torch.zeros(5, dtype=torch.long)
        else:
            batch = images_of_unknown_rows()
            num_rows = len(batch['labels'])
            flags = torch.zeros(num_rows, dtype=torch.long)
            batches[bad_step] = {**batch, 'loss_weights': torch.ones(num_rows), 'flags': flags}
    if bad_entry == 'image_rank':
        model.config.image_token_id = PLACEHOLDER
    message = ''
    try:
        fit(model, *batches, token_weights='column')
    except (RuntimeError, ValueError) as error:
        message = str(error)
    return dist.all_gather_object(message)


def main() -> list[list[str]]:
    results = []
    for bad_entry in ('labels', 'loss_weights', 'flags', 'image_rank'):
        results += [messages(0, bad_entry), messages(1, bad_entry)]
    return results
