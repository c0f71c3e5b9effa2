# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The positions of a batch that predict a label.

Only these positions get a loss. A model that computes logits only there returns them as one row, which holds the
positions of the first row of the batch, then those of the second row, and so on. :class:`LabelledPositions` selects
hidden states, labels and weights into such a row. :func:`batch_at_logits` tells from the shape of the logits whether a
model has computed them like this.
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
    """The positions of the labels of a batch, and the positions that predict them.

    A model that shifts labels compares ``logits[:, :-1]`` with ``labels[:, 1:]``. So a position is added after the
    selected positions, and an ignored label before the selected labels. After the model's own shift each position meets
    its label.

    Args:
        of_labels: Indices of the labels in the flattened batch, int64 ``(labels,)``.
        of_predictions: Indices of the positions whose logits predict them, int64 ``(labels,)``.
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
            num_labels: The number of labels that count. Tokens were counted on the CPU, so it is known.
        """
        ordinals = loss_mask(batch, rule).flatten().cumsum(dim=0)
        of_labels = places_of(ordinals, range(1, num_labels + 1))
        if rule == 'unshifted':
            return cls(of_labels, of_labels, shifts_labels=False)
        # The position before is in the same row, because labels in column 0 do not count.
        return cls(of_labels, of_labels - 1, shifts_labels=True)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width of the logits."""
        return 1, len(self.of_labels) + int(self.shifts_labels)

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """Selects the values at the predicting positions, from ``(rows, width, ...)`` to ``(1, labels (+ 1), ...)``."""
        places = self.of_predictions
        if self.shifts_labels:
            places = F.pad(places, (0, 1))  # position 0, but any would do: the model drops its logits
        # With a mask the CPU would have to wait for the number of positions.
        return values.flatten(0, 1).index_select(0, places)[None]

    def select_labels(self, values: torch.Tensor, fill: float) -> torch.Tensor:
        """Selects the values at the labels, from ``(rows, width)`` to ``(1, (1 +) labels)``; ``fill`` is added."""
        selected = values.flatten().index_select(0, self.of_labels)
        if self.shifts_labels:
            selected = F.pad(selected, (1, 0), value=fill)
        return selected[None]

    def put_back(self, selected: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """Returns values of selected positions at their places in ``(rows, width, ...)``, and zeros elsewhere."""
        values = selected[0, : len(self.of_predictions)]
        placed = values.new_zeros(rows * width, *values.shape[1:])
        placed.index_copy_(0, self.of_predictions.to(values.device), values)
        return placed.unflatten(0, (rows, width))


def batch_at_logits(
    batch: Batch, logits: torch.Tensor, rule: str, num_labels: int
) -> tuple[Mapping[str, Any], LabelledPositions | None] | None:
    """Returns a batch with its labels and weights in the shape of its logits.

    Args:
        batch: The microbatch with ``labels`` of shape ``(rows, width)``.
        logits: Its logits, ``(rows, width, vocabulary)``, or ``(1, labels (+ 1), vocabulary)`` if the model computed
            them only at labels.
        rule: Which labels count.
        num_labels: The number of labels that count.

    Returns:
        The batch itself and None for logits at all positions. A batch of the selected labels, and their positions, for
        logits at labels only. None if the logits have another shape, so that they cannot be compared with labels.
    """
    labels = labels_of(batch)
    shape = logits.shape[:2]
    if shape == labels.shape:
        return batch, None
    added_labels = 0 if rule == 'unshifted' else 1
    if shape != (1, num_labels + added_labels):
        return None
    positions = LabelledPositions.from_batch(batch, rule, num_labels)
    selected: dict[str, Any] = {'labels': positions.select_labels(labels, IGNORE_INDEX)}
    if LOSS_WEIGHTS in batch:
        selected[LOSS_WEIGHTS] = positions.select_labels(batch[LOSS_WEIGHTS], 0.0)
    return selected, positions


def places_of(ordinals: torch.Tensor, numbers: range) -> torch.Tensor:
    """Returns the index of the k-th True of a mask, for each k in ``numbers``, which begin at 1.

    Uses the running sum of the mask, because ``nonzero()`` would wait for the GPU. If the mask has too few, the
    index is the last one.

    Args:
        ordinals: Running sum of the mask, int64 ``(n,)``.
        numbers: The values of k.
    """
    last = len(ordinals) - 1
    ks = torch.arange(numbers.start, numbers.stop, numbers.step, device=ordinals.device)
    positions = torch.searchsorted(ordinals, ks)
    return positions.clamp_(max=last)
