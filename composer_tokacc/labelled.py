# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The positions of a batch that predict a label.

Only these positions get a loss. A model that computes logits only there returns them as one row, in the order of the
batch read row by row. :class:`LabelledPositions` selects hidden states, labels and weights into that row, and
:func:`batch_at_logits` tells from the shape of the logits whether a model did so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from composer_tokacc.batch import IGNORE_INDEX, Batch, labels_of
from composer_tokacc.counting import loss_mask
from composer_tokacc.weights import LOSS_WEIGHTS


@dataclass(frozen=True, eq=False)
class LabelledPositions:
    """Where the labels of a batch are, and which positions predict them.

    A model that shifts labels compares ``logits[:, :-1]`` with ``labels[:, 1:]``. So one position is added behind the
    selected ones and one ignored label in front of theirs: after the model's own shift each position meets its label.

    Args:
        of_labels: Places of the labels in the flattened batch, int64 ``(labels,)``.
        of_predictions: Places of the positions whose logits predict them, int64 ``(labels,)``.
        shifts_labels: Whether the model shifts labels itself.
    """

    of_labels: torch.Tensor
    of_predictions: torch.Tensor
    shifts_labels: bool

    @classmethod
    def from_batch(cls, batch: Batch, rule: str, num_labels: int) -> LabelledPositions:
        """Finds the positions on the device of the labels, without waiting for it.

        Args:
            batch: A batch with ``labels``, ``(rows, width)``.
            rule: Which labels count, see :func:`.loss_mask`.
            num_labels: How many labels count; known on the CPU from the counting.
        """
        ordinals = loss_mask(batch, rule).flatten().cumsum(dim=0)
        of_labels = places_of(ordinals, range(1, num_labels + 1))
        shifts_labels = rule != 'unshifted'
        of_predictions = of_labels - 1 if shifts_labels else of_labels  # in the same row: column 0 never counts
        return cls(of_labels, of_predictions, shifts_labels)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width of what the model computes logits of."""
        return 1, len(self.of_labels) + int(self.shifts_labels)

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """Selects values of the predicting positions, ``(rows, width, ...)`` to ``(1, labels (+ 1), ...)``."""
        places = self.of_predictions
        if self.shifts_labels:
            places = F.pad(places, (0, 1))  # any position: the model drops its logits
        # Not by a mask, whose size the CPU would have to wait for.
        return values.flatten(0, 1).index_select(0, places)[None]

    def select_labels(self, values: torch.Tensor, fill: float) -> torch.Tensor:
        """Selects values of the labels, ``(rows, width)`` to ``(1, (1 +) labels)``; ``fill`` stands in front."""
        selected = values.flatten().index_select(0, self.of_labels)
        if self.shifts_labels:
            selected = F.pad(selected, (1, 0), value=fill)
        return selected[None]

    def put_back(self, selected: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """Puts values of selected positions where they came from, ``(rows, width, ...)``; elsewhere are zeros."""
        values = selected[0, : len(self.of_predictions)]
        placed = values.new_zeros(rows * width, *values.shape[1:])
        placed.index_copy_(0, self.of_predictions.to(values.device), values)
        return placed.unflatten(0, (rows, width))


def batch_at_logits(
    batch: Batch, logits: torch.Tensor, rule: str, num_labels: int
) -> tuple[Mapping[str, Any], LabelledPositions | None] | None:
    """Returns the labels, and weights, of a batch in the shape in which a model returned its logits.

    Args:
        batch: The microbatch with ``labels`` of shape ``(rows, width)``.
        logits: What the model returned for it, ``(rows, width, vocabulary)``, or ``(1, labels (+ 1), vocabulary)`` if
            logits were computed only where a label is.
        rule: Which labels count.
        num_labels: How many count.

    Returns:
        The batch itself and None for logits of all positions; the selected labels and their positions for logits at
        labels only; None if the logits have another shape, so that they cannot be compared with the labels.
    """
    labels = labels_of(batch)
    if logits.shape[:2] == labels.shape:
        return batch, None
    if logits.shape[:2] != (1, num_labels + int(rule != 'unshifted')):
        return None
    positions = LabelledPositions.from_batch(batch, rule, num_labels)
    selected: dict[str, Any] = {'labels': positions.select_labels(labels, IGNORE_INDEX)}
    if LOSS_WEIGHTS in batch:
        selected[LOSS_WEIGHTS] = positions.select_labels(batch[LOSS_WEIGHTS], 0.0)
    return selected, positions


def places_of(ordinals: torch.Tensor, numbers: range) -> torch.Tensor:
    """Returns the index of the k-th True of a mask, for each k of ``numbers``.

    Uses the running sum of the mask, because ``nonzero()`` would wait for the GPU. The result is within bounds also if
    the mask has fewer.

    Args:
        ordinals: Running sum of the mask, int64 ``(n,)``.
        numbers: Which of them are wanted, from 1.
    """
    wanted = torch.arange(numbers.start, numbers.stop, numbers.step, device=ordinals.device)
    return torch.searchsorted(ordinals, wanted).clamp_(max=len(ordinals) - 1)
