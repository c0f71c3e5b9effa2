# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which positions carry loss, and which are real; per row, as plain ints that travel with the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer_tokacc.layout import ReadyBatch

__all__ = [
    'CARRIED',
    'IGNORE_INDEX',
    'LOSS_RULES',
    'Batch',
    'TokenCounts',
    'carried',
    'carry',
    'check_rule',
    'count_tokens',
    'is_counted',
    'labels_of',
    'loss_mask',
    'mask_document_starts',
    'num_loss_tokens',
    'num_rows',
    'num_samples',
    'real_tokens',
    'with_carried',
    'with_one_label',
    'without_carried',
]

LOSS_RULES = ('causal', 'causal_attended', 'unshifted')
"""Which labels a model's own loss averages over: see :func:`loss_mask`."""

CARRIED = 'composer_tokacc.'
"""Prefix of the entries of a batch that are ours, so that none can be taken for a collator's own. Each is a list with
one value per row:

=================== ============= ================================================= ===================================
Key after prefix    Values        Meaning                                           Written by
=================== ============= ================================================= ===================================
``loss_tokens``     int           loss-generating tokens, by ``rule``               :func:`carry`
``real_tokens``     int           attended positions                                :func:`carry`
``rule``            str           by which ``loss_tokens`` were counted             :func:`carry`
``samples``         int           samples of the dataset: 1, 0 for a row that was   loaders (rows that fill up a rank),
                                  added, several for a packed row                   the split (added and packed rows)
``microbatches``    int           microbatches with samples that this rank makes    the split
                                  of the step
=================== ============= ================================================= ===================================

Composer's own split cuts lists with the rows, its own sample counter takes nothing but tensors and lists, and moving a
batch to a device leaves them alone, so reading them costs no device sync; ``HuggingFaceModel.forward`` drops them.
"""

IGNORE_INDEX = -100

Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Positions of each row of a batch.

    Args:
        loss_generating: Positions that carry loss, by row.
        real: Attended positions, by row.
        padded: Padding positions, by row; ``real + padded`` is the width of the batch.
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
    """Returns the rule, or raises ValueError naming the valid ones."""
    allowed = ('auto', *LOSS_RULES) if allow_auto else LOSS_RULES
    if loss_tokens not in allowed:
        raise ValueError(f'`loss_tokens` must be one of {allowed}, got: {loss_tokens!r}.')
    return loss_tokens


def labels_of(batch: Any) -> torch.Tensor:
    """The labels of a batch, ``(rows, width)``."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get('labels'), torch.Tensor):
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f'`batch` must be a mapping with a `labels` tensor of shape (rows, width), got: {got}. Token accumulation '
            'counts loss-generating labels; write them in the collator.'
        )
    return batch['labels']


def document_starts(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """``(rows, width)`` bool, where a further document starts in a packed row; None if the rows are not packed.

    A packed row has ``position_ids`` that restart at 0 and no padding; with padding, a 0 after column 0 is merely the
    first real token of a left-padded row.
    """
    positions, mask = batch.get('position_ids'), batch.get('attention_mask')
    if positions is None or positions.dim() != 2 or positions.shape != labels_of(batch).shape:
        return None
    if mask is not None and (mask.dim() != 2 or not bool((mask != 0).all())):
        return None
    starts = positions == 0
    starts[:, 0] = False
    return starts if bool(starts.any()) else None


def mask_document_starts(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Masks the label of the first token of each document in packed rows.

    The last token of one document would be trained to predict the first of the next, and models count that label
    unless it is masked: masked, the model's denominator and ours agree.
    """
    starts = document_starts(batch)
    if starts is None or not bool((batch['labels'][starts] != IGNORE_INDEX).any()):
        return batch
    return {**batch, 'labels': batch['labels'].masked_fill(starts, IGNORE_INDEX)}


def loss_mask(batch: Mapping[str, Any], loss_tokens: str = 'causal') -> torch.Tensor:
    """Which labels carry loss, ``(rows, width)`` bool on the labels' device; no host sync.

    Args:
        batch: A batch with ``labels``, and for ``'causal_attended'`` a 2-D ``attention_mask``.
        loss_tokens: ``'causal'``: the label is predicted by the position before it, so column 0 never counts (most
            decoders); ``'causal_attended'``: moreover its own position is attended (LLaVA up to transformers 4.51,
            Gemma3 up to 4.57); ``'unshifted'``: every label counts (encoder-decoder, pre-shifted labels).
    """
    labels = labels_of(batch)
    counted = labels != IGNORE_INDEX
    if loss_tokens == 'unshifted':
        return counted
    counted[:, :1] = False
    mask = batch.get('attention_mask')
    if loss_tokens == 'causal_attended' and mask is not None and mask.shape == labels.shape:
        counted &= mask != 0
    return counted


def count_tokens(batch: Mapping[str, Any], loss_tokens: str = 'causal') -> TokenCounts:
    """Counts the positions of every row of a batch.

    Args:
        batch: A batch with ``labels`` of shape ``(rows, width)``; ``attention_mask`` (absent: all positions are real)
            and ``position_ids`` are used where present.
        loss_tokens: The rule, see :func:`loss_mask`. The first token of each document of a packed row never counts.

    Returns:
        TokenCounts: Tuples of ints, one entry per row.

    Example:
        >>> labels = torch.tensor([[5, 6, 7], [-100, 8, -100]])
        >>> mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        >>> count_tokens({'labels': labels, 'attention_mask': mask})
        TokenCounts(loss_generating=(2, 1), real=(3, 2), padded=(0, 1))
    """
    counted = loss_mask(batch, check_rule(loss_tokens))
    starts = document_starts(batch) if loss_tokens != 'unshifted' else None
    if starts is not None:
        counted &= ~starts
    real, width = real_tokens(batch), _main_input(batch).shape[1]
    return TokenCounts(
        loss_generating=tuple(counted.sum(dim=1).tolist()),
        real=tuple(real),
        padded=tuple(width - row for row in real),
    )


def real_tokens(batch: Mapping[str, Any]) -> list[int]:
    """Attended positions, by row."""
    ids, mask = _main_input(batch), batch.get('attention_mask')
    # The mask of another input (Whisper's frames) says nothing about labels.
    has_mask = mask is not None and mask.shape == ids.shape
    return (mask != 0).sum(dim=1).tolist() if has_mask else [ids.shape[1]] * len(ids)


def _main_input(batch: Mapping[str, Any]) -> torch.Tensor:
    """The tensor whose shape is that of the rows: ``input_ids``, or ``labels`` where the main input is another one."""
    ids = batch.get('input_ids')
    return ids if isinstance(ids, torch.Tensor) and ids.dim() == 2 else batch['labels']


def carried(batch: Any) -> dict[str, list[Any]]:
    """What the batch carries of ours, by name without the prefix."""
    if not isinstance(batch, Mapping):
        return {}
    names = (key for key in batch if isinstance(key, str) and key.startswith(CARRIED))
    return {key.removeprefix(CARRIED): batch[key] for key in names}


def with_carried(batch: Mapping[str, Any], **facts: Sequence[Any]) -> dict[str, Any]:
    """The batch with lists of ours, one value per row each, in place of those of the same names."""
    return {**batch, **{f'{CARRIED}{name}': list(values) for name, values in facts.items()}}


def without_carried(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as its loader made it."""
    return {key: value for key, value in batch.items() if not (isinstance(key, str) and key.startswith(CARRIED))}


def is_counted(batch: Any, loss_tokens: str | None = None) -> bool:
    """Whether the batch carries its counts; by the given rule, if one is given."""
    rules = carried(batch).get('rule')
    return rules is not None and (loss_tokens is None or set(rules) <= {loss_tokens})


def carry(batch: Mapping[str, Any], loss_tokens: str = 'causal') -> Mapping[str, Any]:
    """The batch with the counts of its rows (see :data:`CARRIED`), and packed rows masked as they are counted.

    Args:
        batch: A batch with ``labels``, on the CPU where counting shall sync nothing.
        loss_tokens: The rule, see :func:`loss_mask`.
    """
    if isinstance(batch, ReadyBatch):
        return batch.map(lambda microbatch: carry(microbatch, loss_tokens))
    if is_counted(batch, loss_tokens):
        return dict(batch)
    samples = carried(batch).get('samples', [1] * num_rows(batch))
    batch = _without_added_labels(batch, samples)
    batch = batch if loss_tokens == 'unshifted' else mask_document_starts(batch)
    counts = count_tokens(batch, loss_tokens)
    return with_carried(
        batch,
        loss_tokens=counts.loss_generating,
        real_tokens=counts.real,
        samples=samples,
        rule=[loss_tokens] * len(samples),
    )


def _without_added_labels(batch: Mapping[str, Any], samples: Sequence[int]) -> Mapping[str, Any]:
    """Rows that are no samples weigh nothing, whatever labels their loader left on them."""
    if all(samples):
        return batch
    labels = batch['labels'].clone()
    labels[[row for row, number in enumerate(samples) if number == 0]] = IGNORE_INDEX
    return {**batch, 'labels': labels}


def with_one_label(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with one label, at a position that counts by every rule where there is one; no host sync.

    The label is token 0, which every vocabulary has; ids of image placeholders may lie outside it.
    """
    labels, mask = labels_of(batch), batch.get('attention_mask')
    allowed = torch.ones_like(labels, dtype=torch.bool)
    if isinstance(mask, torch.Tensor) and mask.shape == labels.shape:
        # Its own position and the one that predicts it are attended.
        allowed = mask != 0
        allowed[:, 1:] &= mask[:, :-1] != 0
    allowed[:, :1] = labels.shape[1] == 1
    place = torch.arange(labels.numel(), device=labels.device) == allowed.flatten().int().argmax()
    return {**batch, 'labels': labels.masked_fill(place.view_as(labels), 0)}


def num_rows(batch: Mapping[str, Any]) -> int:
    """Rows of the batch, by ``input_ids`` or, where its main input is another one, by ``labels``."""
    if isinstance(batch, ReadyBatch):
        return sum(map(num_rows, batch.microbatches))
    return len(batch['input_ids'] if batch.get('input_ids') is not None else labels_of(batch))


def num_samples(batch: Mapping[str, Any]) -> int:
    """Samples of the dataset in the batch: its rows, but for added ones, and several in a packed row."""
    facts = carried(batch)
    return sum(facts['samples']) if 'samples' in facts else num_rows(batch)


def num_loss_tokens(batch: Mapping[str, Any]) -> int:
    """Loss-generating tokens that the batch carries."""
    return sum(carried(batch)['loss_tokens'])
