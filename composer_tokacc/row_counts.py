# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Counts of the rows of a batch, which travel with the batch.

A batch is counted once, on the CPU: :func:`with_counts` adds one list, with a :class:`RowCounts` for each row. Code
that selects, packs or adds rows later does the same with the list. In a :class:`.PreSplitBatch`, which is a mapping as
well, each microbatch has its own list, and the entry of the whole batch is all of them joined.

A batch may have such a list before it is counted. It then only marks rows that must not count: they have 0 samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, overload

import torch

from composer_tokacc.batch import IGNORE_INDEX, Batch, BatchDict, labels_of, sample_name, text_of
from composer_tokacc.counting import LossRule, mask_document_starts, real_tokens
from composer_tokacc.layout import PreSplitBatch, microbatches_of
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.weights import LOSS_WEIGHTS, WeightsOfShares, token_weights_of

ROWS_KEY = 'composer_tokacc.rows'
"""Key of the counts in a batch. With token weights, :func:`with_counts` adds ``loss_weights`` as well.

The value is a list, because Composer cuts lists with the rows, and does not touch them when it moves a batch to the
device. So reading the counts never waits for the device. ``HuggingFaceModel.forward`` drops the key.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Counts of one row of a batch.

    Args:
        samples: Samples of the dataset: 0 for a dummy row or a repeated sample, several for a packed row.
        real_tokens: Attended positions; 0 if ``samples`` is 0.
        loss_tokens: Loss-generating tokens.
        loss_weight: Sum of the weights of these tokens. It is their number if tokens have no weights.
        rule: The loss rule that counted the tokens. None: they were not counted, and their numbers here are 0.
        source: Source of the data, if the batch names it.
        has_new_label: Whether a token id counts as a label in this row for the first time in the run. The algorithm
            marks such rows after it has counted them. It measures the token weights of their microbatches, because a
            loss may treat some labels differently from others.
        documents: The counts of the rows that were packed into this row; empty: it is not packed.
    """

    samples: int = 1
    real_tokens: int = 0
    loss_tokens: int = 0
    loss_weight: float = 0.0
    rule: LossRule | None = None
    source: str | None = None
    has_new_label: bool = False
    documents: tuple[RowCounts, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> RowCounts:
        """Returns the row itself, because it never changes, and Composer deep-copies every microbatch."""
        return self


class CountSums(NamedTuple):
    """The number of some rows, such as those of a microbatch, and the sums of their :class:`RowCounts`."""

    num_rows: int = 0
    samples: int = 0
    real_tokens: int = 0
    loss_tokens: int = 0
    loss_weight: float = 0.0

    @classmethod
    def of(cls, rows: Sequence[RowCounts]) -> CountSums:
        """Adds up the counts of the rows. Without rows all sums are 0."""
        samples = 0
        num_real = 0
        num_loss = 0
        loss_weight = 0.0
        for row in rows:
            samples += row.samples
            num_real += row.real_tokens
            num_loss += row.loss_tokens
            loss_weight += row.loss_weight
        return cls(len(rows), samples, num_real, num_loss, loss_weight)


def packed_counts(rows: Sequence[RowCounts]) -> RowCounts:
    """Returns the counts of a row into which these rows are packed, at least one. They become its ``documents``.

    All rows have the same loss rule. The packed row has no source, because its documents may have several.
    """
    sums = CountSums.of(rows)
    return RowCounts(
        samples=sums.samples,
        real_tokens=sums.real_tokens,
        loss_tokens=sums.loss_tokens,
        loss_weight=sums.loss_weight,
        rule=rows[0].rule,
        has_new_label=any(row.has_new_label for row in rows),
        documents=tuple(rows),
    )


def with_counts(batch: Batch, rule: LossRule = LossRule.CAUSAL, token_weights: str = 'token') -> Batch:
    """Returns the batch with the counts of its rows, and masks labels that must not count.

    The batch should be on the CPU, so that nothing waits for the device. The labels of dummy rows and repeated samples
    are masked. If the collator has packed rows, and the rule shifts labels, the label of the first token of each
    further document is masked too, because the document before would predict it.

    Args:
        batch: A batch with ``labels``.
        rule: The loss rule.
        token_weights: Weights of the tokens, see :data:`.TOKEN_WEIGHTS`. If it is not ``'token'``, the batch gets
            ``loss_weights``.
    """
    if isinstance(batch, PreSplitBatch):
        return batch.map(partial(with_counts, rule=rule, token_weights=token_weights))
    batch = _without_labels_of_added_rows(batch)
    if rule.shifts_labels:
        batch = mask_document_starts(batch)
    weights = None
    if token_weights != 'token':
        weights = token_weights_of(batch, token_weights, rule)
        batch = {**batch, LOSS_WEIGHTS: weights}
    return attach_row_counts(batch, count_rows(batch, rule, weights))


def check_loss_shares(
    batch: Batch,
    token_weights: str,
    rule: LossRule,
    tokens_of_rows: Sequence[int] = (),
) -> None:
    """Raises ValueError if the sampler's ``loss_shares`` are not applied, or come from wrong numbers of loss tokens.

    With ``loss_shares`` the user sets which part of the loss each dataset has. The sampler computes the weights of the
    rows from the shares, and from a table of the numbers of loss tokens, which may be out of date. With wrong numbers
    the datasets would not have their shares. Does nothing unless the sampler has shares.

    Args:
        batch: A batch of a :class:`.RegroupingDataLoader`, or one of its microbatches. No other batch has shares.
        token_weights: The scheme of token weights in use. Only ``'column'`` applies the weights of the batch. With any
            other one, a batch of a sampler with shares is refused.
        rule: The loss rule by which the tokens were counted.
        tokens_of_rows: The loss tokens of each row, for ``'column'``.
    """
    planned_tokens: list[int] = []
    are_numbers_known = True
    for microbatch in microbatches_of(batch):
        weights = microbatch.get(LOSS_WEIGHTS)
        if not isinstance(weights, WeightsOfShares):
            return
        planned_tokens += weights.loss_tokens
        # accelerate, Transformers and Composer make each list again when they move a batch: `type(weights)(...)`.
        are_numbers_known &= len(weights.loss_tokens) == len(weights)
    if token_weights != 'column':
        raise InvalidInputError(
            "The `loss_shares` of a sampler need `token_weights='column'`, which applies them, got: "
            f'{token_weights!r}. Set it (in a loop, with `step_loss_weights` and `apply_token_weights`), or leave '
            '`loss_shares` out.'
        )
    if not are_numbers_known:
        return
    rows = row_counts_of(batch)
    for number, (row, counted, planned) in enumerate(zip(rows, tokens_of_rows, planned_tokens, strict=True)):
        has_loss = row.samples > 0  # a repeated sample has none
        if has_loss and counted != planned:
            raise InvalidInputError(
                f'`loss_shares` must know the loss tokens of each sample, got: {planned} for '
                f'{sample_name(batch, number)}, which has {counted} by the loss rule {rule!r}. The weights of its '
                'dataset would be wrong. Count the samples again (remove the length table, or give the dataset a '
                "`fingerprint()` that changes with its labels). A length table counts by the rule 'causal'; if the "
                'model has another one, give `LossShares` numbers of your own. Samples whose labels are random cannot '
                'have `loss_shares`.'
            )


def _without_labels_of_added_rows(batch: Batch) -> Batch:
    """Returns the batch with the labels of dummy rows and repeated samples masked. These have 0 samples."""
    labels = labels_of(batch)
    is_added = [row.samples == 0 for row in row_counts_of(batch)]
    if not any(is_added):
        return batch
    mask_of_added = torch.tensor(is_added, device=labels.device)
    return {**batch, 'labels': labels.masked_fill(mask_of_added[:, None], IGNORE_INDEX)}


def count_rows(
    batch: Batch,
    rule: LossRule = LossRule.CAUSAL,
    weights: torch.Tensor | None = None,
) -> list[RowCounts]:
    """Counts the tokens of each row of a batch.

    It must be called before the split packs rows, because it fills in no ``documents``. A row that the collator has
    packed counts as one sample.

    Args:
        batch: A batch with ``labels``. A row that is marked as 0 samples stays so, and its tokens do not count.
        rule: The loss rule.
        weights: Weights of the tokens, ``(rows, width)``, 0 at positions without loss. None: tokens have no weights.
    """
    loss_counts = rule.counted(batch).sum(dim=1).tolist()
    real_counts = real_tokens(batch)
    loss_weights: Sequence[float] = loss_counts
    if weights is not None:
        loss_weights = weights.sum(dim=1, dtype=torch.float64).tolist()
    rows = row_counts_of(batch)
    sources = sources_of(batch) or [None] * len(rows)
    counted_rows = []
    for number, row in enumerate(rows):
        if row.samples == 0:
            counted = RowCounts(samples=0, rule=rule)
        else:
            counted = RowCounts(
                samples=row.samples,
                real_tokens=real_counts[number],
                loss_tokens=loss_counts[number],
                loss_weight=loss_weights[number],
                rule=rule,
                source=sources[number],
            )
        counted_rows.append(counted)
    return counted_rows


def sources_of(batch: Batch) -> Sequence[str | None] | None:
    """Returns the list ``source``, a name or None for each row; None if the batch has no such list."""
    names = batch.get('source')
    if not isinstance(names, (list, tuple)) or len(names) != num_rows(batch):
        return None
    if not all(isinstance(name, str | None) for name in names):
        return None
    return names


@overload
def attach_row_counts(batch: PreSplitBatch, counts: Iterable[RowCounts]) -> PreSplitBatch: ...


@overload
def attach_row_counts(batch: Batch, counts: Iterable[RowCounts]) -> BatchDict: ...


def attach_row_counts(batch: Batch, counts: Iterable[RowCounts]) -> Batch:
    """Returns the batch with these counts of its rows, one for each row."""
    if isinstance(batch, PreSplitBatch):
        remaining = iter(counts)

        def attach_next_counts(microbatch: Batch) -> BatchDict:
            return attach_row_counts(microbatch, islice(remaining, num_rows(microbatch)))

        return batch.map(attach_next_counts)
    return {**batch, ROWS_KEY: list(counts)}


def without_row_counts(batch: Batch) -> BatchDict:
    """Returns the batch without the counts of its rows."""
    return {key: value for key, value in batch.items() if key != ROWS_KEY}


def row_counts_of(batch: Batch) -> Sequence[RowCounts]:
    """Returns the counts of each row. If the batch has none yet, each row is one sample, with uncounted tokens."""
    if isinstance(batch, PreSplitBatch):
        counts: list[RowCounts] = []
        for microbatch in batch.microbatches:
            counts += row_counts_of(microbatch)
        return counts
    return batch.get(ROWS_KEY) or [RowCounts()] * len(text_of(batch))


def is_counted(batch: object) -> bool:
    """Returns whether the tokens of all rows were counted.

    Counts without a ``rule`` only mark repeated samples and dummy rows.
    """
    if not isinstance(batch, Mapping):
        return False
    rows = batch.get(ROWS_KEY)
    return bool(rows) and all(row.rule is not None for row in rows)


def num_rows(batch: Batch) -> int:
    """Returns the number of rows of the batch, which :func:`.text_of` tells."""
    return sum(len(text_of(microbatch)) for microbatch in microbatches_of(batch))


def num_samples(batch: Batch) -> int:
    """Returns the number of samples of the dataset in the batch."""
    return sum(row.samples for row in row_counts_of(batch))
