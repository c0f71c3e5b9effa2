# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Counts the positions of a batch that carry loss, and those that are not padding."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch

from composer_tokacc.arguments import check_choice
from composer_tokacc.batch import IGNORE_INDEX, attended_positions, check_ids, labels_of, text_of
from composer_tokacc.refusals import InvalidInputError

__all__ = [
    'LOSS_RULES',
    'TokenCounts',
    'check_rule',
    'count_tokens',
    'counted_tokens',
    'document_starts',
    'loss_mask',
    'mask_document_starts',
    'real_tokens',
    'with_one_label',
]

# With a cache, a second call with the same message does nothing.
_warn_once = cache(logging.getLogger(__name__).warning)


class LossRule(str, Enum):
    """Which labels are in the mean of a model's loss. Users name a rule by its value, in arguments ``loss_tokens``.

    ``LossRule(loss_tokens)`` returns the rule of a value, and raises ValueError if there is none.
    """

    CAUSAL = 'causal'
    """Each position predicts the label of the next one, so a label in column 0 never counts (most decoders)."""
    CAUSAL_ATTENDED = 'causal_attended'
    """In addition, only labels at attended positions count (LLaVA up to transformers 4.51, Gemma3 up to 4.57)."""
    UNSHIFTED = 'unshifted'
    """Every label counts (encoder-decoder, pre-shifted labels)."""

    # Messages and logs show the plain value, as users write it. Python 3.10 has no StrEnum.
    __str__ = str.__str__
    __repr__ = str.__repr__

    @classmethod
    def _missing_(cls, value: object) -> None:
        """Raises ValueError for a value that is no rule. Enum calls it."""
        check_choice('loss_tokens', value, LOSS_RULES)

    @classmethod
    def named(cls, loss_tokens: str) -> LossRule | None:
        """Returns the rule that a user has named; None: ``'auto'``. Raises ValueError for another value."""
        check_rule(loss_tokens, allow_auto=True)
        return None if loss_tokens == 'auto' else cls(loss_tokens)

    @property
    def shifts_labels(self) -> bool:
        """Whether the logits at a position predict the label of the next position, and not of their own."""
        return self is not LossRule.UNSHIFTED

    def mask(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Returns which labels carry loss, bool ``(rows, width)``, on the labels' device and without waiting for it.

        Args:
            batch: A batch with ``labels``. Only :attr:`CAUSAL_ATTENDED` reads ``attention_mask``, if it has the same
                shape.

        Raises:
            ValueError: If the batch has no labels.
        """
        labels = labels_of(batch)
        has_loss = labels != IGNORE_INDEX
        if not self.shifts_labels:
            return has_loss
        has_loss[:, :1].fill_(False)  # `:1`, because rows may be empty
        mask = batch.get('attention_mask')
        if self is LossRule.CAUSAL_ATTENDED and mask is not None and mask.shape == labels.shape:
            has_loss &= mask != 0
        return has_loss

    def counted(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Returns which labels are counted, bool ``(rows, width)``. May wait for the device.

        These are the labels of :meth:`mask`. If labels are shifted, the first token of each further document of a
        packed row is left out, because the document before would predict it.
        """
        has_loss = self.mask(batch)
        starts = document_starts(batch) if self.shifts_labels else None
        return has_loss if starts is None else has_loss & ~starts

    def at_predictions(self, values: torch.Tensor) -> torch.Tensor:
        """Moves the value of each label, ``(rows, width)``, to the position whose logits predict the label."""
        if not self.shifts_labels:
            return values
        # The value of column 0 moves to the last column. It never counts, because nothing predicts the first token.
        return values.roll(-1, dims=1)

    def targets(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Returns the token that each position should predict, ``(rows, width)``; -100: none, by :meth:`mask`."""
        labels_with_loss = labels_of(batch).masked_fill(~self.mask(batch), IGNORE_INDEX)
        return self.at_predictions(labels_with_loss)


LOSS_RULES = tuple(rule.value for rule in LossRule)
"""The names of the loss rules. A model's rule says which labels are in the mean of its loss: see :func:`.loss_mask`."""


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Numbers of positions in each row of a batch.

    Args:
        loss_generating: Labels that are counted, by row, see :func:`.counted_tokens`.
        real: Attended positions, by row.
        padded: All other positions, by row; ``real + padded`` is the width of the batch.
    """

    loss_generating: tuple[int, ...]
    real: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def num_loss_generating(self) -> int:
        """Loss-generating positions of all rows."""
        return sum(self.loss_generating)

    @property
    def num_real(self) -> int:
        """Attended positions of all rows."""
        return sum(self.real)

    @property
    def num_padded(self) -> int:
        """Padding positions of all rows."""
        return sum(self.padded)


def check_rule(loss_tokens: str, *, allow_auto: bool = False) -> str:
    """Returns ``loss_tokens``. Raises ValueError unless it is one of :data:`LOSS_RULES`, or ``'auto'`` if allowed."""
    allowed = ('auto', *LOSS_RULES) if allow_auto else LOSS_RULES
    check_choice('loss_tokens', loss_tokens, allowed)
    return loss_tokens


def document_starts(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Marks the first token of each further document of a row, bool ``(rows, width)``. None: no row is packed.

    Waits for the device. A packed row has ``position_ids`` that restart at 0 after its first attended token, and are
    above 0 somewhere. Each row is read by itself, so the marks do not depend on the other rows.
    """
    positions = batch.get('position_ids')
    if not isinstance(positions, torch.Tensor):
        return None
    labels = labels_of(batch)
    if positions.shape != labels.shape:  # (3, rows, width) of Qwen-VL, which are not read
        return None
    attended = attended_positions(batch)
    if attended.shape != labels.shape:  # labels of a decoder, ids and mask of its encoder
        return None
    is_behind_first_token = attended & (attended.cumsum(dim=1) > 1)
    # If all positions of a row are 0, they say nothing about documents.
    has_positions = positions.amax(dim=1, keepdim=True) > 0
    starts = is_behind_first_token & has_positions & (positions == 0)
    return starts if bool(starts.any()) else None


def mask_document_starts(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the batch with a masked label at the first token of each further document of packed rows. Warns once.

    Otherwise the last token of a document would be trained to predict the first token of the next one. Our counts leave
    these labels out, and models count every label that is not masked. With the mask both divide by the same number.

    Callers must not do this if the loss rule is ``'unshifted'``, because then no token predicts the next one's label.
    """
    starts = document_starts(batch)
    if starts is None:
        return batch
    labels_at_starts = batch['labels'][starts]
    if not bool((labels_at_starts != IGNORE_INDEX).any()):
        return batch
    _warn_once(
        'Rows are packed (`position_ids` restart at 0), and the first token of a further document has a label, which '
        'the document before it would predict: it is set to -100, in this and all later batches.'
    )
    return {**batch, 'labels': batch['labels'].masked_fill(starts, IGNORE_INDEX)}


def loss_mask(batch: Mapping[str, Any], loss_tokens: str = 'causal') -> torch.Tensor:
    """Returns which labels carry loss, bool ``(rows, width)``, on the labels' device and without waiting for it.

    Args:
        batch: A batch with ``labels``. Only ``'causal_attended'`` reads ``attention_mask``, if it has the same shape.
        loss_tokens: ``'causal'``: each position predicts the label of the next one, so a label in column 0 never counts
            (most decoders). ``'causal_attended'``: in addition, only labels at attended positions count (LLaVA up to
            transformers 4.51, Gemma3 up to 4.57). ``'unshifted'``: every label counts (encoder-decoder, pre-shifted
            labels).

    Raises:
        ValueError: If there is no such rule, or the batch has no labels.
    """
    return LossRule(loss_tokens).mask(batch)


def counted_tokens(batch: Mapping[str, Any], loss_tokens: str) -> torch.Tensor:
    """Returns which labels are counted, bool ``(rows, width)``.

    These are the labels of :func:`loss_mask`, without the first token of each further document of a packed row, because
    the document before would predict it. The rule ``'unshifted'`` counts this token, because there no token predicts
    the label of the next one.
    """
    return LossRule(loss_tokens).counted(batch)


def count_tokens(batch: Mapping[str, Any], loss_tokens: str = 'causal') -> TokenCounts:
    """Counts the positions of every row of a batch.

    Args:
        batch: A batch with ``labels`` of shape ``(rows, width)``. ``attention_mask`` (absent: all positions are real)
            and ``position_ids`` are used if they are present.
        loss_tokens: The rule, see :func:`.loss_mask`. In a packed row only ``'unshifted'`` counts the first token of
            each further document.

    Raises:
        ValueError: If mask, positions or labels do not belong to the ids.

    Example:
        >>> labels = torch.tensor([[5, 6, 7], [-100, 8, -100]])
        >>> mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        >>> count_tokens({'labels': labels, 'attention_mask': mask})
        TokenCounts(loss_generating=(2, 1), real=(3, 2), padded=(0, 1))
    """
    rule = LossRule(loss_tokens)
    labels = labels_of(batch)
    check_ids(batch)
    num_rows = len(text_of(batch))
    if len(labels) != num_rows:
        raise InvalidInputError(f'`labels` must have as many rows as `input_ids`, {num_rows}, got: {len(labels)}.')
    counted = rule.counted(batch)
    real = real_tokens(batch)
    width = text_of(batch).shape[1]
    return TokenCounts(
        loss_generating=tuple(counted.sum(dim=1).tolist()),
        real=tuple(real),
        padded=tuple(width - num_real for num_real in real),
    )


def real_tokens(batch: Mapping[str, Any]) -> list[int]:
    """Returns the number of attended positions of each row. Without a mask of the text, all positions are attended."""
    mask = batch.get('attention_mask')
    # If the batch has neither ids nor embeddings (Whisper), text_of() returns the labels, and attended_positions()
    # ignores the mask. But LossRule.mask() reads a mask in the shape of the labels. So it is read here, too.
    if mask is not None and mask.shape == text_of(batch).shape:
        is_attended = mask != 0
    else:
        is_attended = attended_positions(batch)
    return is_attended.sum(dim=1).tolist()


def with_one_label(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the batch with a label that carries loss. Does not wait for the device, so it may replace another label.

    A mean over no labels is 0 / 0, so NaN, and stays NaN if the caller multiplies the loss by 0. The label is written
    at the first attended position after an attended one, so that a real token predicts it. If there is none, it is
    written at the first attended position behind the first column, or else at the first pad there. In a batch of one
    column it is written in this column, where models that shift labels do not count it.

    The label is 0, because every vocabulary has this token. Ids of image placeholders may lie outside of it.
    """
    labels = labels_of(batch)
    mask = batch.get('attention_mask')
    is_attended = torch.ones_like(labels, dtype=torch.bool)
    if isinstance(mask, torch.Tensor) and mask.shape == labels.shape:  # LossRule.mask() reads no other mask
        is_attended = mask != 0
    counts_by_every_rule = is_attended[:, 1:]
    is_predicted_by_token = counts_by_every_rule & is_attended[:, :-1]
    # 0 (first column): only 'unshifted' counts a label here; 1: 'causal' does, too; 2 and 3: every rule does.
    preference = torch.zeros_like(labels)
    preference[:, 1:] = 1 + counts_by_every_rule.int() + is_predicted_by_token.int()
    best_place = preference.flatten().argmax()  # the first of equals
    with_label = labels.flatten().index_fill(0, best_place, 0).view_as(labels)
    return {**batch, 'labels': with_label}
