# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What travels with a batch of ours: counts and weights of its rows, as lists, so that reading them syncs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer_tokacc.batch import IGNORE_INDEX, labels_of, text_of
from composer_tokacc.counting import count_tokens, mask_document_starts
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.weights import LOSS_WEIGHTS, token_weights_of

METADATA_PREFIX = 'composer_tokacc.'
"""Prefix of the entries of a batch that are ours, so that none can be taken for a collator's own. Each is a list with
one value per row:

=================== ============= ================================================= ===================================
Key after prefix    Values        Meaning                                           Written by
=================== ============= ================================================= ===================================
``loss_tokens``     int           loss-generating tokens, by ``rule``               :func:`annotate`
``real_tokens``     int           attended positions                                :func:`annotate`
``weights``         float         sum of the tokens' weights, where they are not    :func:`annotate`
                                  all 1
``rule``            str           by which ``loss_tokens`` were counted             :func:`annotate`
``sources``         SourceShare   what the row is of its source, where the batch    :func:`annotate`
                                  names it; None: a dummy row; a list in a packed
                                  row, one for each document
``samples``         int           samples of the dataset: 1, 0 for a row that was   loaders (rows that fill up a rank),
                                  added, several for a packed row                   the split (added and packed rows)
``microbatches``    int           microbatches with samples that this rank makes    the split
                                  of the step
=================== ============= ================================================= ===================================

Composer's own split cuts lists with the rows, its own sample counter takes nothing but tensors and lists, and moving a
batch to a device leaves them alone, so reading them costs no device sync; ``HuggingFaceModel.forward`` drops them.
"""


@dataclass(frozen=True, slots=True)
class SourceShare:
    """What a row, or a document of a packed one, is of its source; no tuple, which Composer would map over."""

    source: str | None  # None: of none
    loss_tokens: int
    real_tokens: int
    weight: float  # of its loss tokens


def sources_of(batch: Mapping[str, Any]) -> Sequence[str | None] | None:
    """Returns the source of each row, a list ``source`` of names; None where the batch has no such list."""
    names = batch.get('source')
    if not isinstance(names, (list, tuple)) or len(names) != num_rows(batch):
        return None
    return names if all(isinstance(name, str | None) for name in names) else None


def metadata_of(batch: Any) -> dict[str, list[Any]]:
    """Returns what the batch brings of ours, by name without the prefix."""
    keys = batch if isinstance(batch, Mapping) else ()
    return {key.removeprefix(METADATA_PREFIX): batch[key] for key in keys if str(key).startswith(METADATA_PREFIX)}


def with_metadata(batch: Mapping[str, Any], **facts: Sequence[Any]) -> dict[str, Any]:
    """Returns the batch with lists of ours, one value per row each, in place of those of the same names."""
    return {**batch, **{f'{METADATA_PREFIX}{name}': list(values) for name, values in facts.items()}}


def without_metadata(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the batch as its loader made it."""
    return {key: value for key, value in batch.items() if not str(key).startswith(METADATA_PREFIX)}


def is_annotated(batch: Any, loss_tokens: str | None = None) -> bool:
    """Returns whether the batch carries its counts; by the given rule, if one is given."""
    rules = batch.get(f'{METADATA_PREFIX}rule') if isinstance(batch, Mapping) else None
    return rules is not None and (loss_tokens is None or set(rules) <= {loss_tokens})


def annotate(batch: Mapping[str, Any], loss_tokens: str = 'causal', token_weights: str = 'token') -> Mapping[str, Any]:
    """Returns the batch with the counts of its rows, see :data:`METADATA_PREFIX`; packed rows are masked as counted.

    It is on the CPU where counting shall sync nothing. The rule is of :func:`.loss_mask`, the weights of
    :data:`TOKEN_WEIGHTS`.
    """
    if isinstance(batch, PreSplitBatch):
        return batch.map(lambda microbatch: annotate(microbatch, loss_tokens, token_weights))
    is_plain = token_weights == 'token'
    if is_annotated(batch, loss_tokens) and (is_plain or f'{METADATA_PREFIX}weights' in batch):
        return dict(batch)
    labels, samples = labels_of(batch), samples_of(batch)
    if not all(samples):  # rows that are no samples weigh nothing, whatever labels their loader left on them
        is_added = ~torch.tensor(samples, dtype=torch.bool, device=labels.device)
        batch = {**batch, 'labels': labels.masked_fill(is_added[:, None], IGNORE_INDEX)}
    batch = batch if loss_tokens == 'unshifted' else mask_document_starts(batch)
    counts = count_tokens(batch, loss_tokens)
    facts: dict[str, Sequence[Any]] = {
        'loss_tokens': counts.loss_generating,
        'real_tokens': [count if number else 0 for count, number in zip(counts.real, samples, strict=True)],
        'samples': samples,
        'rule': [loss_tokens] * len(samples),
    }
    if not is_plain:
        weights, _ = token_weights_of(batch, token_weights, loss_tokens)
        batch = {**batch, LOSS_WEIGHTS: weights}
        facts['weights'] = weights.sum(dim=1, dtype=torch.float64).tolist()
    if (sources := sources_of(batch)) is not None:
        weighed = facts.get('weights', counts.loss_generating)
        rows = zip(sources, counts.loss_generating, counts.real, weighed, samples, strict=True)
        facts['sources'] = [
            SourceShare(source, loss, real, weight) if number else None for source, loss, real, weight, number in rows
        ]
    return with_metadata(batch, **facts)


def num_rows(batch: Mapping[str, Any]) -> int:
    """Returns rows of the batch, by ``input_ids`` or, where its main input is another one, by ``labels``."""
    if isinstance(batch, PreSplitBatch):
        return sum(map(num_rows, batch.microbatches))
    return text_of(batch).shape[0]


def loss_tokens_of(batch: Mapping[str, Any]) -> list[int]:
    """Returns the loss tokens of each row as they were counted; of a batch that is not counted yet, its labels."""
    counted = metadata_of(batch).get('loss_tokens')
    if counted is not None:
        return counted
    return (labels_of(batch) != IGNORE_INDEX).sum(dim=1).tolist()


def num_samples(batch: Mapping[str, Any]) -> int:
    """Returns samples of the dataset in the batch: its rows, but for added ones, and several in a packed row."""
    return sum(samples_of(batch))


def samples_of(batch: Mapping[str, Any]) -> Sequence[int]:
    """Returns how many samples of the dataset each row is, see :data:`METADATA_PREFIX`."""
    return batch.get(f'{METADATA_PREFIX}samples') or [1] * num_rows(batch)


def loss_weight(batch: Mapping[str, Any]) -> float:
    """Returns the sum of the weights of the batch's loss-generating tokens: their number, where all weigh the same."""
    weights = batch.get(f'{METADATA_PREFIX}weights')
    return num_loss_tokens(batch) if weights is None else sum(weights)


def num_loss_tokens(batch: Mapping[str, Any]) -> int:
    """Loss-generating tokens that the batch carries."""
    return sum(batch[f'{METADATA_PREFIX}loss_tokens'])


def num_microbatches(batch: Mapping[str, Any]) -> int:
    """Microbatches with samples that this rank makes of the step; 0 where a split says nothing of it."""
    return next(iter(batch.get(f'{METADATA_PREFIX}microbatches', ())), 0)
