# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which positions carry loss, and which are real; per row, as plain ints that travel with the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer_tokacc.layout import Batch, ReadyBatch
from composer_tokacc.layout.families import IGNORE_INDEX
from composer_tokacc.layout.layout import text_of

__all__ = [
    'CARRIED',
    'IGNORE_INDEX',
    'LOSS_RULES',
    'LOSS_WEIGHTS',
    'TOKEN_WEIGHTS',
    'Batch',
    'TokenCounts',
    'carried',
    'carry',
    'check_rule',
    'count_tokens',
    'is_counted',
    'labels_of',
    'loss_mask',
    'loss_weight',
    'mask_document_starts',
    'num_loss_tokens',
    'num_rows',
    'num_samples',
    'real_tokens',
    'sample_name',
    'token_weights_of',
    'with_carried',
    'with_one_label',
    'with_own_tensors',
    'without_carried',
]

LOSS_RULES = ('causal', 'causal_attended', 'unshifted')
"""Which labels a model's own loss averages over: see :func:`.loss_mask`."""

CARRIED = 'composer_tokacc.'
"""Prefix of the entries of a batch that are ours, so that none can be taken for a collator's own. Each is a list with
one value per row:

=================== ============= ================================================= ===================================
Key after prefix    Values        Meaning                                           Written by
=================== ============= ================================================= ===================================
``loss_tokens``     int           loss-generating tokens, by ``rule``               :func:`carry`
``real_tokens``     int           attended positions                                :func:`carry`
``weights``         float         sum of the tokens' weights, where they are not    :func:`carry`
                                  all 1
``rule``            str           by which ``loss_tokens`` were counted             :func:`carry`
``samples``         int           samples of the dataset: 1, 0 for a row that was   loaders (rows that fill up a rank),
                                  added, several for a packed row                   the split (added and packed rows)
``microbatches``    int           microbatches with samples that this rank makes    the split
                                  of the step
=================== ============= ================================================= ===================================

Composer's own split cuts lists with the rows, its own sample counter takes nothing but tensors and lists, and moving a
batch to a device leaves them alone, so reading them costs no device sync; ``HuggingFaceModel.forward`` drops them.
"""

LOSS_WEIGHTS = 'loss_weights'
"""Key of the tokens' weights: what a collator gives, a float per row or per position; from BATCH_START on, where tokens
do not all weigh the same, float32 of the labels' shape, 0 where no loss is generated."""

TOKEN_WEIGHTS: dict[str, float | None] = {'token': 0.0, 'sqrt': 0.5, 'sample': 1.0, 'column': None}
"""How tokens may be weighed: by the loss tokens of their sample to the power -p, or as the batch says."""


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
    """The rule, if there is such a one; ``'auto'`` is one where it is allowed.

    Raises:
        ValueError: If not; names the valid ones.
    """
    allowed = ('auto', *LOSS_RULES) if allow_auto else LOSS_RULES
    if loss_tokens not in allowed:
        raise ValueError(f'`loss_tokens` must be one of {allowed}, got: {loss_tokens!r}.')
    return loss_tokens


def labels_of(batch: Any) -> torch.Tensor:
    """The labels of a batch, integers ``(rows, width)``.

    Raises:
        ValueError: If there are none, or they are of another shape or type.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get('labels'), torch.Tensor):
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f'`batch` must be a mapping with a `labels` tensor of shape (rows, width), got: {got}. Token accumulation '
            'counts loss-generating labels; write them in the collator.'
        )
    labels = batch['labels']
    if labels.dim() != 2 or labels.is_floating_point():
        raise ValueError(
            f'`labels` must be integers of shape (rows, width), one for each token, got: {labels.dtype} of shape '
            f'{tuple(labels.shape)}. Losses of whole rows or of several codes a token are no means over tokens.'
        )
    return labels


def check_batch(batch: Any, vocabulary: int | None = None) -> None:
    """Raises ValueError, naming the sample, where torch would only say that an index is out of range.

    Args:
        batch: A batch or microbatch with ``labels``, on the CPU.
        vocabulary: Ids that a label may have; None: not known.
    """
    labels = labels_of(batch)
    if labels.dtype != torch.int64:
        raise ValueError(
            f'`labels` must be int64, as cross-entropy takes them, got: {labels.dtype}. Give it `.long()`.'
        )
    if not labels.numel():
        raise ValueError(
            f'A batch must hold at least one row of one token, got: labels of shape {tuple(labels.shape)}. Have the '
            'loader leave such batches out, on all ranks alike.'
        )
    mask = batch.get('attention_mask')
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4)):
        got = f'shape {tuple(mask.shape)}' if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f'`attention_mask` must be a tensor of shape (rows, width) or (rows, heads, width, width), got: {got}, '
            f'beginning with {sample_name(batch, 0)}. Give one mask for all heads as `mask[:, None]`.'
        )
    ids = labels.masked_fill(labels == IGNORE_INDEX, 0)
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        bad = ids < 0 if vocabulary is None else (ids < 0) | (ids >= vocabulary)
        row = int(bad.any(dim=1).int().argmax())
        last = 'one of the vocabulary' if vocabulary is None else f'from 0 to {vocabulary - 1}'
        raise ValueError(
            f'A label must be {IGNORE_INDEX} or an id {last}, got: {int(labels[row][bad[row]][0])} in '
            f'{sample_name(batch, row)}. Take the tokenizer that belongs to the model, and mask placeholders of media.'
        )


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

    Raises:
        ValueError: If there is no such rule, or there are no labels.
    """
    check_rule(loss_tokens)
    labels = labels_of(batch)
    counted = labels != IGNORE_INDEX
    if loss_tokens == 'unshifted':
        return counted
    counted[:, :1] = False
    mask = batch.get('attention_mask')
    if loss_tokens == 'causal_attended' and mask is not None and mask.shape == labels.shape:
        counted &= mask != 0
    return counted


def _counted(batch: Mapping[str, Any], loss_tokens: str) -> torch.Tensor:
    """As :func:`loss_mask`, without the first token of each document of a packed row."""
    starts = document_starts(batch) if loss_tokens != 'unshifted' else None
    counted = loss_mask(batch, loss_tokens)
    return counted if starts is None else counted & ~starts


def count_tokens(batch: Mapping[str, Any], loss_tokens: str = 'causal') -> TokenCounts:
    """Counts the positions of every row of a batch.

    Args:
        batch: A batch with ``labels`` of shape ``(rows, width)``; ``attention_mask`` (absent: all positions are real)
            and ``position_ids`` are used where present.
        loss_tokens: The rule, see :func:`.loss_mask`. The first token of each document of a packed row never counts.

    Returns:
        TokenCounts: Tuples of ints, one entry per row.

    Example:
        >>> labels = torch.tensor([[5, 6, 7], [-100, 8, -100]])
        >>> mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        >>> count_tokens({'labels': labels, 'attention_mask': mask})
        TokenCounts(loss_generating=(2, 1), real=(3, 2), padded=(0, 1))
    """
    counted = _counted(batch, loss_tokens)
    real, width = real_tokens(batch), text_of(batch).shape[1]
    return TokenCounts(
        loss_generating=tuple(counted.sum(dim=1).tolist()),
        real=tuple(real),
        padded=tuple(width - row for row in real),
    )


def real_tokens(batch: Mapping[str, Any]) -> list[int]:
    """Attended positions, by row; all of them where there is no ``attention_mask``."""
    text, mask = text_of(batch), batch.get('attention_mask')
    # The mask of another input (Whisper's frames) says nothing about labels.
    has_mask = mask is not None and mask.shape == text.shape
    return (mask != 0).sum(dim=1).tolist() if has_mask else [text.shape[1]] * len(text)


def carried(batch: Any) -> dict[str, list[Any]]:
    """What the batch carries of ours, by name without the prefix."""
    if not isinstance(batch, Mapping):
        return {}
    names = (key for key in batch if isinstance(key, str) and key.startswith(CARRIED))
    return {key.removeprefix(CARRIED): batch[key] for key in names}


def with_carried(batch: Mapping[str, Any], **facts: Sequence[Any]) -> dict[str, Any]:
    """The batch with lists of ours, one value per row each, in place of those of the same names: :data:`CARRIED`."""
    return {**batch, **{f'{CARRIED}{name}': list(values) for name, values in facts.items()}}


def without_carried(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as its loader made it."""
    return {key: value for key, value in batch.items() if not (isinstance(key, str) and key.startswith(CARRIED))}


def with_own_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with copies of its tensors, so that whoever writes into them changes no other batch."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def is_counted(batch: Any, loss_tokens: str | None = None) -> bool:
    """Whether the batch carries its counts; by the given rule, if one is given."""
    rules = batch.get(f'{CARRIED}rule') if isinstance(batch, Mapping) else None
    return rules is not None and (loss_tokens is None or set(rules) <= {loss_tokens})


def carry(batch: Mapping[str, Any], loss_tokens: str = 'causal', token_weights: str = 'token') -> Mapping[str, Any]:
    """The batch with the counts of its rows (see :data:`CARRIED`), and packed rows masked as they are counted.

    Args:
        batch: A batch with ``labels``, on the CPU where counting shall sync nothing.
        loss_tokens: The rule, see :func:`.loss_mask`.
        token_weights: What the tokens weigh, see :data:`TOKEN_WEIGHTS`.
    """
    if isinstance(batch, ReadyBatch):
        return batch.map(lambda microbatch: carry(microbatch, loss_tokens, token_weights))
    is_plain = token_weights == 'token'
    if is_counted(batch, loss_tokens) and (is_plain or 'weights' in carried(batch)):
        return dict(batch)
    samples = carried(batch).get('samples', [1] * num_rows(batch))
    batch = _without_added_labels(batch, samples)
    batch = batch if loss_tokens == 'unshifted' else mask_document_starts(batch)
    counts = count_tokens(batch, loss_tokens)
    facts: dict[str, Sequence[Any]] = {
        'loss_tokens': counts.loss_generating,
        'real_tokens': counts.real,
        'samples': samples,
        'rule': [loss_tokens] * len(samples),
    }
    if not is_plain:
        weights, _ = token_weights_of(batch, token_weights, loss_tokens)
        batch = {**batch, LOSS_WEIGHTS: weights}
        facts['weights'] = weights.sum(dim=1, dtype=torch.float64).tolist()
    return with_carried(batch, **facts)


def token_weights_of(
    batch: Mapping[str, Any], token_weights: str, loss_tokens: str = 'causal'
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the tokens of a batch weigh.

    Args:
        batch: A batch with ``labels``; with ``loss_weights`` for ``'column'``.
        token_weights: ``'token'``, ``'sqrt'`` or ``'sample'``: the loss-generating tokens of its sample to the power 0,
            -1/2 or -1, where a document of a packed row is a sample; or ``'column'``.
        loss_tokens: The rule, see :func:`.loss_mask`.

    Returns:
        Weights, float32 ``(rows, width)``, 0 where no loss is generated; and where it is, bool ``(rows, width)``.

    Raises:
        ValueError: If a weight is missing, negative or not finite, or the weights are of another shape; with the
            sample.
    """
    counted = _counted(batch, loss_tokens)
    power = TOKEN_WEIGHTS[token_weights]
    if power is None:
        return _given_weights(batch, counted).masked_fill(~counted, 0), counted
    documents = _documents(batch)
    counts = torch.bincount(documents[counted], minlength=documents.numel()).clamp(min=1)
    return counts.double().pow(-power)[documents].masked_fill(~counted, 0).float(), counted


def _documents(batch: Mapping[str, Any]) -> torch.Tensor:
    """``(rows, width)`` int, another number for each document of each row."""
    labels, positions, sequences = labels_of(batch), batch.get('position_ids'), batch.get('sequence_id')
    begins = torch.zeros_like(labels, dtype=torch.bool)
    if isinstance(positions, torch.Tensor) and positions.shape == labels.shape:
        begins |= positions == 0  # of padding as well: a document without labels weighs nothing
    if isinstance(sequences, torch.Tensor) and sequences.shape == labels.shape:  # llm-foundry's packed rows
        begins[:, 1:] |= sequences[:, 1:] != sequences[:, :-1]
    begins[:, :1] = True
    return begins.flatten().cumsum(dim=0).view_as(labels) - 1


def _given_weights(batch: Mapping[str, Any], counted: torch.Tensor) -> torch.Tensor:
    """The weights of the batch itself, float32 ``(rows, width)``."""
    given: Any = batch.get(LOSS_WEIGHTS)
    if given is None:
        raise ValueError(
            f"`token_weights='column'` needs `{LOSS_WEIGHTS}` in every batch, a float per row or per position of the "
            f'labels, got: {sorted(map(str, batch))}, beginning with {sample_name(batch, 0)}. Give the data '
            'such a column, or take other weights.'
        )
    if isinstance(given, (list, tuple)):
        absent = [row for row, value in enumerate(given) if not isinstance(value, (int, float))]
        if absent:
            raise ValueError(
                f'`{LOSS_WEIGHTS}` must be a number for every sample, got: {given[absent[0]]!r} for '
                f'{sample_name(batch, absent[0])}.'
            )
        given = torch.tensor(given)
    rows, width = counted.shape
    if not isinstance(given, torch.Tensor):
        raise ValueError(f'`{LOSS_WEIGHTS}` must be a tensor, or a list of a float per row, got: {given!r}.')
    if tuple(given.shape) not in ((rows,), (rows, 1), (rows, width)):
        raise ValueError(
            f'`{LOSS_WEIGHTS}` must be of shape ({rows},) or {rows, width}, as the labels, got: {tuple(given.shape)}, '
            f'beginning with {sample_name(batch, 0)}.'
        )
    weights = given.float().view(rows, -1).expand(rows, width)
    bad = counted & ~(weights.isfinite() & (weights >= 0))
    if bool(bad.any()):
        row = int(bad.any(dim=1).int().argmax())
        raise ValueError(
            f'`{LOSS_WEIGHTS}` must be finite and not negative, got: {weights[row][bad[row]][0].item()} for '
            f'{sample_name(batch, row)} (nan: it has none). Mend it, or leave the sample out.'
        )
    return weights


def sample_name(batch: Mapping[str, Any], row: int) -> str:
    """What a message calls a row: the sample by its id, or where the batch has none the row by its number."""
    ids = batch.get('sample_ids')
    return f'sample {ids[row]!r}' if isinstance(ids, (list, tuple)) and len(ids) > row else f'row {row}'


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
    return text_of(batch).shape[0]


def num_samples(batch: Mapping[str, Any]) -> int:
    """Samples of the dataset in the batch: its rows, but for added ones, and several in a packed row."""
    samples = batch.get(f'{CARRIED}samples')
    return num_rows(batch) if samples is None else sum(samples)


def loss_weight(batch: Mapping[str, Any]) -> float:
    """Sum of the weights of the batch's loss-generating tokens: their number, where all weigh the same."""
    weights = batch.get(f'{CARRIED}weights')
    return num_loss_tokens(batch) if weights is None else sum(weights)


def num_loss_tokens(batch: Mapping[str, Any]) -> int:
    """Loss-generating tokens that the batch carries."""
    return sum(batch[f'{CARRIED}loss_tokens'])


def num_microbatches(batch: Mapping[str, Any]) -> int:
    """Microbatches with samples that this rank makes of the step; 0 where a split says nothing of it."""
    return next(iter(batch.get(f'{CARRIED}microbatches', ())), 0)
