# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: rows padded on the left, on two ranks. Each rank pads to its own longest row.

Returns for each case the relative error of the gradient, compared with one forward over the rows of both ranks, or the
message of the refusal.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from composer.utils import dist

from composer_tokacc import token_data_spec
from tests.matrix.test_later_batches import long_rope
from tests.support.text import collate, column_counter, gpt2, positions_of, text_model, text_rows, with_vectors
from tests.support.training import (
    COMPOSERS_FLAG,
    fit,
    hugging_face,
    loader,
    reference_gradients,
    relative_error,
    train,
)

# Names of cases. `masked`: a Llama, which masks padding and has relative positions, so the width does not matter.
# `positions`: a model that counts positions from the first column. `labelled`: the first tokens of some rows have a
# label, which a pad would predict. `untried`: no row shows whether padding may be trimmed.
MASKED = [(4, 2), (9, 5), (6, 3), (14, 8)]
UNPADDED = [(9, 5), (9, 3)]
ONE_RANK_IS_PADDED = [(9, 5), (9, 3), (4, 2), (14, 8)]
LABELLED = [(4, 4), (9, 5), (6, 3), (14, 8)]
ONLY_LABELLED_ARE_PADDED = [(9, 5), (9, 3), (4, 4), (14, 14)]  # nothing shows whether padding may be trimmed
LABELLED_ON_OTHER_RANK = [(5, 3), (9, 5), (4, 4), (14, 8)]  # only the first rank has padding that can be trimmed
ONE_TOKEN = [(9, 5), (9, 3), (1, 0), (14, 8)]  # a row of one token has no loss, so it shows nothing
BEYOND_10 = [(8, 3), (9, 5), (12, 4), (30, 8)]  # the second rank is beyond the rotary limit
ALL_BEYOND_10 = [(8, 3), (19, 5), (12, 4), (30, 8)]


def measure(
    model: Any,
    shape: list[tuple[int, int]],
    *,
    side: str = 'left',
    equal_widths: bool = False,
    gives_positions: bool = False,
    gives_vectors: bool = False,
    earlier_shapes: Sequence[list[tuple[int, int]]] = (),
    by_flag: bool = False,
) -> Any:
    """Returns the relative error of the last gradient, or the message of the refusal.

    Args:
        model: The model.
        shape: Length and number of labels of each of four rows. Each rank takes two of them.
        side: The side of the padding.
        equal_widths: Whether the ranks pad to the same width.
        gives_positions: Whether the batches have ``position_ids``. The reference has none: the model ignores them.
        gives_vectors: Whether the batches have ``inputs_embeds`` instead of ids.
        earlier_shapes: The rows of earlier steps, the same on both ranks.
        by_flag: Whether Composer's own flag weights the microbatches, not the algorithm.
    """
    rows = text_rows(shape)
    batch = collate(rows, side=side)
    start = 2 * dist.get_global_rank()
    rows_of_rank = slice(start, start + 2)
    if equal_widths:
        rank_batch = {key: value[rows_of_rank] for key, value in batch.items()}
    else:
        rank_batch = collate(rows[rows_of_rank], side=side)
    batches = []
    for earlier_shape in earlier_shapes:
        earlier_rows = text_rows(earlier_shape)
        batches.append(collate(earlier_rows, side=side))
    batches.append(rank_batch)
    if gives_positions:
        for given_batch in batches:
            given_batch['position_ids'] = positions_of(given_batch)
    if gives_vectors:
        batch = with_vectors(model, batch)
        batches = [with_vectors(model, each) for each in batches]

    try:
        if by_flag:
            composer_model = hugging_face(copy.deepcopy(model))
            data = token_data_spec(loader(*batches), model=composer_model)
            recorder, _, _ = train(composer_model, data, **COMPOSERS_FLAG)
        else:
            recorder = fit(model, *batches, microbatch_size=1)
    except RuntimeError as error:
        return str(error)
    expected, _ = reference_gradients(model, batch)
    return relative_error(recorder.gradients, expected)


def main() -> dict[str, Any]:
    """Returns the outcome of each case."""
    return {
        'masked': measure(text_model(), MASKED),
        'masked, padded later': measure(text_model(), MASKED, earlier_shapes=[UNPADDED]),
        'masked, one rank without padding': measure(text_model(), ONE_RANK_IS_PADDED),
        'labelled': measure(text_model(), LABELLED),
        'labelled, equally wide': measure(text_model(), LABELLED, equal_widths=True),
        'labelled, on the right': measure(text_model(), LABELLED, side='right'),
        'positions': measure(gpt2(), MASKED),
        'positions, equally wide': measure(gpt2(), MASKED, equal_widths=True),
        'positions, vectors': measure(gpt2(), MASKED, gives_vectors=True),
        'masked, vectors': measure(text_model(), MASKED, gives_vectors=True),
        'positions, by the flag': measure(gpt2(), MASKED, by_flag=True),
        'positions, equally wide, by the flag': measure(gpt2(), MASKED, equal_widths=True, by_flag=True),
        'masked, by the flag': measure(text_model(), MASKED, by_flag=True),
        'positions, padded later': measure(gpt2(), MASKED, earlier_shapes=[UNPADDED]),
        'positions, untried': measure(gpt2(), ONLY_LABELLED_ARE_PADDED),
        'masked, labelled on the other rank': measure(text_model(), LABELLED_ON_OTHER_RANK),
        'positions, labelled on the other rank': measure(gpt2(), LABELLED_ON_OTHER_RANK),
        'positions, one token trimmed': measure(gpt2(), ONE_TOKEN),
        'no position_ids': measure(column_counter(), MASKED),
        'no position_ids, equally wide': measure(column_counter(), MASKED, equal_widths=True),
        'ignored position_ids, untried': measure(column_counter(), ONLY_LABELLED_ARE_PADDED, gives_positions=True),
        'positions, on the right': measure(gpt2(), MASKED, side='right'),
        'rotary': measure(long_rope().model, BEYOND_10, side='right'),
        'rotary, equally wide': measure(long_rope().model, BEYOND_10, side='right', equal_widths=True),
        'rotary, both beyond': measure(long_rope().model, ALL_BEYOND_10, side='right'),
    }
