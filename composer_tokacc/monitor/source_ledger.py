# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Sums for each source of data in a step: losses of its tokens, their number and weight, and computed positions."""

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
import torch.nn.functional as F
from composer.devices import Device
from composer.utils import dist

from composer_tokacc.batch import Batch, labels_of
from composer_tokacc.checks.logits import CHUNK, logits_of, whole_vocabulary
from composer_tokacc.counting import counted_tokens, loss_mask
from composer_tokacc.labelled import batch_at_logits, places_of
from composer_tokacc.monitor.step_counts import counts_by_source, rule_of
from composer_tokacc.row_counts import RowCounts

log = logging.getLogger(__name__)

MOST_SOURCES = 64
"""Most sources that are logged by name. Needed because a collator may write another ``source`` for every row."""
OTHERS = 'others'
"""Name under which all further sources are logged together."""
MOST_UNREAD = 2**20
"""Most logits that are kept before their losses are computed: 4 MiB."""


class SourceSums(NamedTuple):
    """Sums of one source. Ranks exchange them as a list of numbers in the order of the fields."""

    loss: float = 0.0  # NaN if the model gives no logits
    tokens: float = 0.0
    weight: float = 0.0
    positions: float = 0.0

    def plus(self, numbers: Sequence[float]) -> SourceSums:
        """Returns the sums with a number added to each."""
        return SourceSums(*map(add, self, numbers))


class _KeptLogits(NamedTuple):
    """Logits of a microbatch whose losses are not computed yet."""

    logits: torch.Tensor
    labels: torch.Tensor
    is_counted: torch.Tensor  # which labels carry loss
    num_tokens: int  # how many labels carry loss
    rule: str


class SourceLedger:
    """Sums up the rows of a step by source, over all ranks. The ranks need not have the same sources."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Sources that any rank has seen so far. The list is the same on all ranks."""
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forgets the microbatches of the step."""
        self._rows: list[tuple[RowCounts, int]] = []
        # Losses of the tokens of these rows, on the device, in the same order. The last ones may still be missing:
        # those of the kept logits.
        self._losses: list[torch.Tensor] = []
        self._kept: list[_KeptLogits] = []
        self._num_kept = 0  # number of kept logits

    def note(self, batch: Batch, outputs: Any, rule: str, *, has_logits: bool) -> None:
        """Notes a microbatch if its rows have sources. If its tokens were counted, nothing waits for the device.

        Args:
            batch: The microbatch.
            outputs: Outputs of the model.
            rule: The loss rule, if nobody has counted the tokens.
            has_logits: False if the outputs hold hidden states where others hold logits.
        """
        rows = counts_by_source(batch, rule)
        if not rows:
            return
        self._rows += rows
        num_tokens = sum(row.loss_tokens for row, _ in rows)
        kept = None
        if has_logits:
            kept = _kept_logits(batch, outputs, rule, num_tokens)
        if kept is None:
            self._compute_losses()
            self._losses.append(torch.full((num_tokens,), math.nan))
            return
        self._kept.append(kept)
        self._num_kept += kept.logits.numel()
        if self._num_kept > MOST_UNREAD:
            self._compute_losses()

    def _compute_losses(self) -> None:
        """Computes the losses of the kept logits.

        Small logits are kept and computed together, because with a small model the time goes into the number of calls.
        """
        if self._kept:
            self._losses.append(_token_losses(self._kept))
            self._kept = []
            self._num_kept = 0

    def gather(self, numbers: Sequence[float], device: Device) -> tuple[torch.Tensor, dict[str, SourceSums]]:
        """Gathers the numbers of a step from all ranks, in one collective.

        If a source is new on any rank, there are two more collectives: the ranks exchange the new names, and gather
        again.

        Args:
            numbers: Other numbers of this rank, to be sent along. All ranks have equally many.
            device: Composer's device, on which the process group works.

        Returns:
            The other numbers of each rank, float64 ``(ranks, numbers)``, and the sums of each source over all ranks.
        """
        rank_sums = self._sums()
        num_numbers = len(numbers)
        while True:
            new_names = sorted(rank_sums.keys() - set(self.names))
            if OTHERS in self.names:
                new_names = []  # there are enough names
            # A rank sends its other numbers, how many new names it has, and its sums.
            message = [*numbers, len(new_names), *self._table(rank_sums)]
            on_host = torch.tensor(message, dtype=torch.float64)
            on_device = device.tensor_to_device(on_host)
            received = dist.all_gather(on_device)
            ranks = torch.stack(list(received)).cpu()
            num_new_names = ranks[:, num_numbers]
            if not num_new_names.any():
                break
            self._learn(dist.all_gather_object(new_names))
        table = ranks[:, num_numbers + 1 :].sum(dim=0)
        rows = table.view(-1, len(SourceSums._fields)).tolist()
        sums = {}
        for name, row in zip(self.names, rows, strict=True):
            sums[name] = SourceSums(*row)
        return ranks[:, :num_numbers], sums

    def _sums(self) -> dict[str, SourceSums]:
        """Returns the sums of each source on this rank. Waits for the device."""
        self._compute_losses()
        losses: list[float] = []
        for tensor in self._losses:
            losses += tensor.tolist()
        sums: dict[str, SourceSums] = {}
        start = 0
        # This is a plain loop, because for a few rows numpy takes longer.
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
        """Returns the sums of this rank as one list, in the order of ``names``. Other sources count as ``OTHERS``.

        Without ``OTHERS`` among the names, other sources are left out.
        """
        table = {name: SourceSums() for name in self.names}
        for name, sums in rank_sums.items():
            row = name if name in table else OTHERS
            if row in table:
                table[row] = table[row].plus(sums)
        return list(chain.from_iterable(table.values()))

    def _learn(self, names_of_ranks: Iterable[Sequence[str]]) -> None:
        """Adds new names, the same on all ranks. Replaces the names beyond ``MOST_SOURCES`` by ``OTHERS``."""
        names = set().union(*names_of_ranks)
        new_names = names - set(self.names)
        self.names += sorted(new_names)
        if len(self.names) > MOST_SOURCES:
            self.names[MOST_SOURCES:] = [OTHERS]
            log.warning(
                'Rows have more than %d sources. The further ones are logged together, as `%s`. Let `source` name the '
                'file or the part of a mixture, or set TokenMonitor(sources=False).',
                MOST_SOURCES,
                OTHERS,
            )


def _kept_logits(batch: Batch, outputs: Any, rule: str, num_tokens: int) -> _KeptLogits | None:
    """Returns the logits of a microbatch with its labels; None if the outputs have no logits that fit the labels."""
    logits = logits_of(outputs)
    if logits is None:
        return None
    counted_rule = rule_of(batch)
    rule = counted_rule or rule
    at_logits = batch_at_logits(batch, logits, rule, num_tokens)
    if at_logits is None:
        return None
    labelled, _ = at_logits
    if counted_rule is None:
        is_counted = counted_tokens(labelled, rule)
    else:
        # The first labels of documents are masked already. To look for documents would wait for the device.
        is_counted = loss_mask(labelled, rule)
    return _KeptLogits(logits.detach(), labels_of(labelled), is_counted, num_tokens, rule)


def _token_losses(microbatches: Sequence[_KeptLogits]) -> torch.Tensor:
    """Returns the loss of each token, float32 ``(tokens,)``, row after row.

    The number of tokens is known, so nothing waits for the device.
    """
    # Rows are joined to one row of positions.
    logits = _joined([microbatch.logits.flatten(0, 1) for microbatch in microbatches])
    labels = _joined([microbatch.labels.flatten() for microbatch in microbatches])
    is_counted = _joined([microbatch.is_counted.flatten() for microbatch in microbatches])
    num_tokens = sum(microbatch.num_tokens for microbatch in microbatches)
    ordinals = is_counted.cumsum(dim=0)  # number of each counted label, from 1
    label_places = places_of(ordinals, range(1, num_tokens + 1))
    logit_places = label_places
    if microbatches[0].rule != 'unshifted':
        logit_places = label_places - 1  # in the same row, because labels in column 0 do not count
    # Logits in float32 take much memory, so they are computed in chunks.
    chunk_size = max(CHUNK // logits.shape[-1], 1)
    losses = []
    logit_chunks = logit_places.split(chunk_size)
    label_chunks = label_places.split(chunk_size)
    for at_logits, at_labels in zip(logit_chunks, label_chunks, strict=True):
        chunk_logits = whole_vocabulary(logits[at_logits]).float()
        losses.append(F.cross_entropy(chunk_logits, labels[at_labels], reduction='none'))
    return _joined(losses)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates tensors. A single tensor, such as the logits of a large model, is not copied."""
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


@lru_cache(maxsize=4096)
def _loggable(source: str) -> str:
    """Returns the name with only those characters that every logger accepts. MLflow refuses others."""
    return re.sub(r'[^\w\-. ]', '_', source, flags=re.ASCII) or '_'
