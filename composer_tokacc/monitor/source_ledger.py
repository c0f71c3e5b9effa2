# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Sums up a step for each source of data: the losses of its tokens, their number, their weight, and positions.

The source of a row is a name in the batch's list ``source``. A token is a label that carries loss.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import add
from typing import Any, NamedTuple

import torch
from composer.devices import Device
from composer.utils import dist

from composer_tokacc.batch import IGNORE_INDEX, Batch, labels_of
from composer_tokacc.checks.logits import at_predictions, logits_of, token_losses_at
from composer_tokacc.counting import counted_tokens, loss_mask
from composer_tokacc.labelled import batch_at_logits, places_of
from composer_tokacc.monitor.step_counts import rows_with_positions, rule_of
from composer_tokacc.row_counts import RowCounts

log = logging.getLogger(__name__)

MOST_SOURCES = 64
"""Most sources that are logged by name. There must be a limit, because ``source`` may differ in every row."""
OTHERS = 'others'
"""Name under which all further sources are logged together."""


class SourceSums(NamedTuple):
    """Sums of one source in a step. Ranks exchange them as a list of numbers in the order of the fields."""

    loss: float = 0.0  # of the cross-entropies of tokens, not weighted; NaN if the model gives no logits
    tokens: float = 0.0  # number of tokens
    weight: float = 0.0  # of the weights of tokens
    positions: float = 0.0  # number of computed positions, padding included

    def plus(self, numbers: Sequence[float]) -> SourceSums:
        """Returns these sums, each with one of the numbers added. The numbers are in the order of the fields."""
        return SourceSums(*map(add, self, numbers))


class SourceLedger:
    """Sums up the rows of a step by source, over all ranks. The ranks need not have the same sources."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Sources that any rank has seen so far. The list is the same on all ranks."""
        self._is_full = False
        """Whether no further name is added. It is the same on all ranks."""
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forgets the microbatches of the step, before they are computed for the first time or again."""
        self._rows: list[tuple[RowCounts, int]] = []  # each row with its number of positions
        # For each microbatch, the losses of its tokens in the order of the rows, float32 (tokens,) on the device.
        self._losses: list[torch.Tensor] = []

    def note(self, batch: Batch, outputs: Any, rule: str, *, has_logits: bool) -> None:
        """Notes a microbatch if any of its rows has a source. If its tokens were counted, nothing waits for the device.

        Args:
            batch: The microbatch.
            outputs: Outputs of the model.
            rule: The loss rule, if nobody has counted the tokens.
            has_logits: Whether the model returns logits. If not, its outputs hold hidden states in their place.
        """
        rows = rows_with_positions(batch, rule)
        if not rows:  # no row of the microbatch has a source
            return
        self._rows += rows
        num_tokens = sum(row.loss_tokens for row, _ in rows)
        losses = None
        if has_logits:
            losses = _token_losses(batch, outputs, rule, num_tokens)
        if losses is None:
            losses = torch.full((num_tokens,), math.nan)
        self._losses.append(losses)

    def gather(self, numbers: Sequence[float], device: Device) -> tuple[torch.Tensor, dict[str, SourceSums]]:
        """Adds up the sums of all ranks, and gathers other numbers of the ranks, in one collective.

        If a source is new on any rank, there are two more collectives: the ranks exchange the new names, and gather
        again.

        Args:
            numbers: Other numbers of this rank. All ranks have equally many.
            device: Composer's device. The process group works on it.

        Returns:
            The other numbers of each rank, float64 ``(ranks, numbers)``, and the sums of each source over all ranks.
        """
        rank_sums = self._sums_of_rank()
        new_names = []
        if not self._is_full:
            new_names = sorted(rank_sums.keys() - set(self.names))
        # Each rank sends its other numbers, how many new names it has, and its sums.
        num_numbers = len(numbers)
        table = self._table(rank_sums)
        gathered = _all_gather([*numbers, len(new_names), *table], device)
        num_new_names = gathered[:, num_numbers]
        if num_new_names.any():
            names_of_ranks = dist.all_gather_object(new_names)
            self._learn(names_of_ranks)
            # Now the table has a row for each new name, so it is sent again.
            table = self._table(rank_sums)
            gathered = _all_gather([*numbers, 0, *table], device)
        sums_over_ranks = gathered[:, num_numbers + 1 :].sum(dim=0)
        num_fields = len(SourceSums._fields)
        rows = sums_over_ranks.view(-1, num_fields).tolist()
        sums = {}
        for name, row in zip(self.names, rows, strict=True):
            sums[name] = SourceSums(*row)
        return gathered[:, :num_numbers], sums

    def _sums_of_rank(self) -> dict[str, SourceSums]:
        """Returns the sums of each source on this rank. Waits for the device."""
        losses: list[float] = []
        for tensor in self._losses:
            losses += tensor.tolist()
        sums: dict[str, SourceSums] = {}
        start = 0
        # A plain loop, because numpy takes longer for a few rows.
        for row, positions in self._rows:
            end = start + row.loss_tokens
            loss = sum(losses[start:end])
            start = end
            if row.source is not None:
                name = _loggable(row.source)
                numbers = (loss, row.loss_tokens, row.loss_weight, positions)
                earlier = sums.get(name, SourceSums())
                sums[name] = earlier.plus(numbers)
        return sums

    def _table(self, rank_sums: Mapping[str, SourceSums]) -> list[float]:
        """Returns the sums of this rank as one list, in the order of ``names``.

        A source without a name in the list counts as ``OTHERS``. If ``OTHERS`` has no place in the list either, the
        source is left out. That happens only before the ranks exchange new names.
        """
        table = {name: SourceSums() for name in self.names}
        for name, sums in rank_sums.items():
            logged_name = name if name in table else OTHERS
            if logged_name in table:
                table[logged_name] = table[logged_name].plus(sums)
        return list(chain.from_iterable(table.values()))

    def _learn(self, names_of_ranks: Iterable[Sequence[str]]) -> None:
        """Adds the new names of all ranks. If there are too many, cuts the list off and adds ``OTHERS``."""
        names = set().union(*names_of_ranks)
        new_names = names - set(self.names)
        self.names += sorted(new_names)
        if len(self.names) > MOST_SOURCES:
            self._is_full = True
            del self.names[MOST_SOURCES:]
            if OTHERS not in self.names:  # a source may have this name
                self.names.append(OTHERS)
            log.warning(
                'Rows have more than %d sources. The others are logged together, as `%s`. Let `source` name the file '
                'or the part of a mixture, or set TokenMonitor(sources=False).',
                MOST_SOURCES,
                OTHERS,
            )


def _all_gather(numbers: Sequence[float], device: Device) -> torch.Tensor:
    """Returns the numbers of all ranks, float64 ``(ranks, numbers)`` on the CPU. Waits for the device."""
    on_host = torch.tensor(numbers, dtype=torch.float64)
    on_device = device.tensor_to_device(on_host)
    received = dist.all_gather(on_device)
    return torch.stack(list(received)).cpu()


def _token_losses(batch: Batch, outputs: Any, rule: str, num_tokens: int) -> torch.Tensor | None:
    """Returns the cross-entropy of each token of a microbatch, float32 ``(tokens,)``, row after row.

    None if the outputs have no logits that fit the labels. Does not wait for the device if the tokens were counted.

    Args:
        batch: The microbatch.
        outputs: Outputs of the model.
        rule: The loss rule, if nobody has counted the tokens.
        num_tokens: The number of tokens.
    """
    logits = logits_of(outputs)
    if logits is None:
        return None
    rule_of_counts = rule_of(batch)
    rule = rule_of_counts or rule
    at_logits = batch_at_logits(batch, logits, rule, num_tokens)
    if at_logits is None:
        return None
    labelled, _ = at_logits  # has labels in the shape of the logits
    if rule_of_counts is None:
        is_counted = counted_tokens(labelled, rule)
    else:
        # counted_tokens() would look for documents, and wait for the device. That is not needed, because whoever
        # counted the tokens has also masked the first label of each document.
        is_counted = loss_mask(labelled, rule)
    labels = labels_of(labelled).masked_fill(~is_counted, IGNORE_INDEX)
    targets = at_predictions(labels, rule).flatten()
    running_count = (targets != IGNORE_INDEX).cumsum(dim=0)
    positions = places_of(running_count, range(1, num_tokens + 1))  # of the first token, the second, ..., the last
    return token_losses_at(logits, positions, targets[positions])


@lru_cache(maxsize=4096)
def _loggable(source: str) -> str:
    """Replaces the characters that MLflow refuses in the name of a metric. All loggers accept the other characters."""
    return re.sub(r'[^\w\-. ]', '_', source, flags=re.ASCII) or '_'
