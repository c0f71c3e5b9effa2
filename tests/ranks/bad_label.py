# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: the second rank gets a label outside of the vocabulary. Returns all messages."""

from __future__ import annotations

from composer.utils import dist

from tests.support.text import VOCABULARY, collate, one_layer_model, text_rows
from tests.support.training import fit

NUM_STEPS = 3


def messages(bad_step: int) -> list[str]:
    batches = [collate(text_rows([(4, 2), (6, 3)])) for _ in range(NUM_STEPS)]
    if dist.get_global_rank() == 1:
        batches[bad_step]['labels'][0, -1] = VOCABULARY
    message = ''
    try:
        fit(one_layer_model(), *batches)
    except (RuntimeError, ValueError) as error:
        message = str(error)
    return dist.all_gather_object(message)


def main() -> list[list[str]]:
    return [messages(bad_step=0), messages(bad_step=1)]
