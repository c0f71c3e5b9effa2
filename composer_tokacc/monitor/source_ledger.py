# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Sums for each source of data in a step: loss, number and weight of its tokens, and its computed positions.

The source of a row is a name in the batch's list ``source``. A token is a label that carries loss.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from composer_tokacc.batch import Batch, labels_of
from composer_tokacc.checks.logits import logits_of, token_losses_at
from composer_tokacc.labelled import LabelledPositions
from composer_tokacc.monitor.step_counts import rows_with_positions
from composer_tokacc.row_counts import RowCounts, is_counted, row_counts_of

log = logging.getLogger(__name__)

MOST_SOURCES = 64
"""Most sources that are logged by name. There must be a limit, because ``source`` may differ in every row."""
LONGEST_NAME = 200
"""Most characters of a source in the name of a metric, which has about 30 other characters, and perhaps a checksum."""
OTHERS = 'others'
"""Name under which all further sources are logged together."""


class SourceSums(NamedTuple):
    """Sums of one source in a step."""

    loss: float = 0.0  # cross-entropies of its tokens, not weighted
    tokens: float = 0.0  # number of its tokens
    tokens_without_logits: float = 0.0  # those of its tokens whose cross-entropy is not known
    weight: float = 0.0  # weights of its tokens
    positions: float = 0.0  # number of its computed positions, padding included

    def plus(self, other: SourceSums) -> SourceSums:
        """Returns these sums, each with the other one added."""
        return SourceSums(
            loss=self.loss + other.loss,
            tokens=self.tokens + other.tokens,
            tokens_without_logits=self.tokens_without_logits + other.tokens_without_logits,
            weight=self.weight + other.weight,
            positions=self.positions + other.positions,
        )


class SourceLedger:
    """Sums up the rows of a step by source, over all ranks. The ranks need not have the same sources."""

    def __init__(self) -> None:
        self._names: dict[str | None, str] = {}
        """The name in the log of each of the first ``MOST_SOURCES`` sources that any rank has seen. If there are more,
        the key None has the name of all others. The names are the same on all ranks."""
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forgets the microbatches of the step, before they are computed for the first time or again."""
        # Each row with its number of positions, and whether its tokens have logits.
        self._rows: list[tuple[RowCounts, int, bool]] = []
        # For each microbatch, the losses of its tokens in the order of the rows, float32 (tokens,) on the device.
        self._losses: list[torch.Tensor] = []

    def note(self, batch: Batch, outputs: Any, *, has_logits: bool) -> None:
        """Notes a microbatch if its tokens were counted, and if any of its rows has a source.

        Nothing waits for the device.

        Args:
            batch: The microbatch.
            outputs: Outputs of the model.
            has_logits: Whether the model returns logits. If not, its outputs hold hidden states in their place.
        """
        if not is_counted(batch):
            return
        rows = rows_with_positions(batch)
        if all(row.source is None for row, _ in rows):
            return
        num_tokens = sum(row.loss_tokens for row, _ in rows)
        losses = None
        if has_logits:
            losses = _token_losses(batch, outputs, num_tokens)
        # sums_of_rank() divides the losses among the rows by their numbers of tokens, so each token needs one.
        self._losses.append(torch.zeros(num_tokens) if losses is None else losses)
        for row, positions in rows:
            self._rows.append((row, positions, losses is not None))

    def sums_of_rank(self) -> dict[str, SourceSums]:
        """Returns the sums of each source on this rank, by the name in the batch. Waits for the device."""
        losses: list[float] = []
        for tensor in self._losses:
            losses += tensor.tolist()
        sums: dict[str, SourceSums] = {}
        start = 0
        # A plain loop, because numpy takes longer for a few rows.
        for row, positions, are_losses_known in self._rows:
            end = start + row.loss_tokens
            loss = sum(losses[start:end])
            start = end
            if row.source is not None:
                sums_of_row = SourceSums(
                    loss=loss,
                    tokens=row.loss_tokens,
                    tokens_without_logits=0 if are_losses_known else row.loss_tokens,
                    weight=row.loss_weight,
                    positions=positions,
                )
                earlier = sums.get(row.source, SourceSums())
                sums[row.source] = earlier.plus(sums_of_row)
        return sums

    def add_up(self, sums_of_ranks: Iterable[Mapping[str, SourceSums]]) -> dict[str, SourceSums]:
        """Returns the sums of each source over all ranks, by its name in the log. Gives new sources a name.

        Sources of earlier steps are included. Their sums are 0 if this step has no rows of them.

        Args:
            sums_of_ranks: The result of :meth:`sums_of_rank` on each rank.
        """
        all_sums: list[tuple[str, SourceSums]] = []
        for rank_sums in sums_of_ranks:
            all_sums += rank_sums.items()
        totals = dict.fromkeys(self._names.values(), SourceSums())
        # Two new sources may have the same name. Then _name_of() adds a checksum to the name of the second one. Which
        # one comes second must not depend on the number of ranks, but the order of rows does. So they are sorted.
        for source, sums in sorted(all_sums, key=itemgetter(0)):
            name = self._name_of(source)
            earlier = totals.get(name, SourceSums())
            totals[name] = earlier.plus(sums)
        return totals

    def _name_of(self, source: str) -> str:
        """Returns the name of a source in the log, and adds it to the names if there are not too many."""
        if source in self._names:
            return self._names[source]
        if len(self._names) >= MOST_SOURCES:
            return self._name_of_others()
        name = _loggable(source)
        if name in self._names.values():
            # Another source has this name. For example, Chinese words of the same length all become underscores.
            checksum = zlib.crc32(source.encode())
            name = f'{name}_{checksum:08x}'
        self._names[source] = name
        return name

    def _name_of_others(self) -> str:
        """Returns the name of all sources after the first ``MOST_SOURCES``. Warns at the first of them."""
        if None not in self._names:
            log.warning(
                'Rows have more than %d sources. The others are logged together, as `%s`. Let `source` name the '
                'file or the part of a mixture, or set TokenMonitor(sources=False).',
                MOST_SOURCES,
                OTHERS,
            )
            self._names[None] = OTHERS
        return OTHERS


def _token_losses(batch: Batch, outputs: Any, num_tokens: int) -> torch.Tensor | None:
    """Returns the cross-entropy of each token of a microbatch, float32 ``(tokens,)``, row after row.

    None if the outputs have no logits that fit the labels. Does not wait for the device.

    Args:
        batch: The microbatch. Its tokens must have been counted.
        outputs: Outputs of the model.
        num_tokens: The number of tokens.
    """
    logits = logits_of(outputs)
    if logits is None:
        return None
    rule = row_counts_of(batch)[0].rule
    assert rule is not None
    labels = labels_of(batch)
    labelled = LabelledPositions.from_batch(batch, rule, num_tokens)
    if logits.shape[:2] == labels.shape:
        # The model computed all logits. `logit_indices` are the positions that predict tokens. They may end with an
        # added position, which predicts none; see LabelledPositions.
        positions = labelled.logit_indices[:num_tokens]
    elif logits.shape[:2] == labelled.logits_shape:
        # The model computed logits only for the tokens, in their order, and perhaps for the added position behind them.
        positions = torch.arange(num_tokens, device=logits.device)
    else:
        return None
    targets = labels.flatten()[labelled.label_indices]
    return token_losses_at(logits, positions, targets)


def _loggable(source: str) -> str:
    """Returns a source as a part of the name of a metric, which all loggers accept.

    Other characters than ASCII letters, digits, ``_``, ``-``, ``.`` and spaces become ``_``: some logger refuses them,
    and ``/`` would begin another group of metrics. MLflow takes names of at most 250 characters, and no part that is
    ``.`` or ``..``.
    """
    name = re.sub(r'[^\w\-. ]', '_', source, flags=re.ASCII)
    name = name[-LONGEST_NAME:]  # the end of the path of a file tells more than its beginning
    return '_' if name in ('', '.', '..') else name
