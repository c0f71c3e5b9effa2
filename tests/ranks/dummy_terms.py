# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: a loss with a term at all attended positions, on a rank with images and one with text.

Returns the errors of the steps, or the message if the run is refused.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from composer.models import HuggingFaceModel
from composer.utils import dist

from tests.matrix.collator import join
from tests.ranks.mixed_media import rows_of
from tests.support.families import MEDIA, freeze_unreached
from tests.support.training import each_run, fit, gradients_of, in_double, relative_error, tensors_in


class WithSquares(HuggingFaceModel):
    """Adds a term at each attended position to the loss, divided by the number of labels, like the z-loss of PaLM."""

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        num_labels = (batch['labels'][:, 1:] != -100).sum().clamp(min=1)
        squares = outputs['logits'].logsumexp(dim=-1).square() * (batch['attention_mask'] != 0)
        return outputs['loss'] + 1e-3 * squares.sum() / num_labels


def run(*, media_of_ranks: list[str]) -> list[float] | str:
    """Trains one step. ``media_of_ranks`` has the media of the rows of each rank, as in ``mixed_media.py``."""
    case = MEDIA['llava_onevision']()
    freeze_unreached(case)
    rows_of_ranks = [rows_of(case, media_of_rows) for media_of_rows in media_of_ranks]
    batch_of_rank = join(rows_of_ranks[dist.get_global_rank()], side='right', slots=False)
    model = WithSquares(copy.deepcopy(case.model), shift_labels=True, use_logits=True)
    try:
        recorder = fit(model, batch_of_rank)
    except RuntimeError as error:
        return str(error)
    all_rows = list(chain.from_iterable(rows_of_ranks))
    batch = tensors_in(join(all_rows, side='right', slots=False), torch.float64)
    reference = in_double(case.model)
    reference_with_squares = WithSquares(reference, shift_labels=True, use_logits=True)
    loss = reference_with_squares.loss(reference(**batch), batch)
    expected = gradients_of(reference, loss)
    return [relative_error(gradients, expected) for gradients in recorder.steps]


main = each_run(run)
