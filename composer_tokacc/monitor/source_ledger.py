# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Sums of each source of data in a step: losses of its tokens, their number and weight, and computed positions."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from composer.devices import Device
from composer.utils import dist

from composer_tokacc.batch import Batch, labels_of
from composer_tokacc.checks.logits import CHUNK, logits_of, whole_vocabulary
from composer_tokacc.counting import counted_tokens, loss_mask
from composer_tokacc.labelled import batch_at_logits, places_of
from composer_tokacc.monitor.step_counts import SourcePart, rule_of, source_parts

log = logging.getLogger(__name__)

MOST_SOURCES = 64
"""Number of sources that have sums of their own. A collator may write another ``source`` for every row."""
OTHERS = 'others'
"""Name of all further sources together."""
MOST_UNREAD = 2**20
"""Number of logits that may be kept until the end of a step: 4 MiB."""


@dataclass
class SourceSums:
    """Sums of one source. Ranks exchange them as a list of numbers in the order of the fields."""

    loss: float = 0.0  # NaN if the model gives no logits
    tokens: float = 0.0
    weight: float = 0.0
    positions: float = 0.0

    def add(self, loss: float, tokens: float, weight: float, positions: float) -> None:
        """Adds to each sum."""
        self.loss += loss
        self.tokens += tokens
        self.weight += weight
        self.positions += positions

    def pack(self) -> list[float]:
        """Returns the numbers that are sent to the other ranks."""
        return [self.loss, self.tokens, self.weight, self.positions]


class _Unread(NamedTuple):
    """Logits whose losses are not computed yet."""

    logits: torch.Tensor
    labels: torch.Tensor
    is_counted: torch.Tensor  # labels that carry loss
    num_tokens: int  # number of these
    rule: str


class SourceLedger:
    """Sums up the rows of a step by source, over all ranks. The ranks need not have the same sources."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Sources that any rank has seen so far, the same list on all ranks."""
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forgets the microbatches of the step."""
        self._parts: list[SourcePart] = []
        self._losses: list[torch.Tensor] = []  # of each token of these parts, on the device
        self._unread: list[_Unread] = []  # microbatches whose losses will be next
        self._num_unread = 0  # logits

    def note(self, batch: Batch, outputs: Any, rule: str, *, has_logits: bool) -> None:
        """Notes a microbatch if its rows have sources. If its tokens were counted, nothing waits for the device.

        Args:
            batch: The microbatch.
            outputs: Outputs of the model.
            rule: The loss rule, if nobody has counted the tokens.
            has_logits: False if the outputs hold hidden states where others hold logits.
        """
        parts = source_parts(batch, rule)
        if not parts:
            return
        self._parts += parts
        num_tokens = sum(part.loss_tokens for part in parts)
        unread = None
        if has_logits:
            unread = _unread(batch, outputs, rule, num_tokens)
        if unread is None:
            self._read()
            self._losses.append(torch.full((num_tokens,), math.nan))
            return
        self._unread.append(unread)
        self._num_unread += unread.logits.numel()
        if self._num_unread > MOST_UNREAD:
            self._read()

    def _read(self) -> None:
        """Computes the losses of the logits that were kept. Beside a small model the number of calls is the cost."""
        if self._unread:
            self._losses.append(_token_losses(self._unread))
            self._unread = []
            self._num_unread = 0

    def gather(self, numbers: Sequence[float], device: Device) -> tuple[torch.Tensor, dict[str, SourceSums]]:
        """Gathers the numbers of a step from all ranks, in one collective.

        If a source is new on any rank, there are two more collectives: the ranks exchange the new names, and gather
        again.

        Args:
            numbers: Further numbers of this rank, equally many on all ranks.
            device: Composer's device, on which the process group works.

        Returns:
            The further numbers of each rank, float64 ``(ranks, numbers)``, and the sums of each source over all ranks.
        """
        rank_sums = self._sums()
        num_numbers = len(numbers)
        while True:
            new_names = sorted(rank_sums.keys() - set(self.names))
            if OTHERS in self.names:
                new_names = []
            packed = torch.tensor([*numbers, len(new_names), *self._table(rank_sums)], dtype=torch.float64)
            ranks = torch.stack(list(dist.all_gather(device.tensor_to_device(packed)))).cpu()
            if not ranks[:, num_numbers].any():
                break
            self._learn(dist.all_gather_object(new_names))
        total = ranks[:, num_numbers + 1 :].sum(dim=0).view(-1, len(fields(SourceSums)))
        sums = {name: SourceSums(*row) for name, row in zip(self.names, total.tolist(), strict=True)}
        return ranks[:, :num_numbers], sums

    def _sums(self) -> dict[str, SourceSums]:
        """Returns the sums of each source on this rank. Waits for the device."""
        self._read()
        losses: list[float] = []
        for tensor in self._losses:
            losses += tensor.tolist()
        sums: dict[str, SourceSums] = {}
        start = 0
        # A plain loop: for a few rows calls of numpy take longer.
        for part in self._parts:
            end = start + part.loss_tokens
            loss = sum(losses[start:end])
            start = end
            if part.source is not None:
                source_sums = sums.setdefault(_loggable(part.source), SourceSums())
                source_sums.add(loss, part.loss_tokens, part.loss_weight, part.positions)
        return sums

    def _table(self, rank_sums: Mapping[str, SourceSums]) -> list[float]:
        """Returns the sums of this rank in the order of the names, as one list. New names are left out."""
        table = {name: SourceSums() for name in self.names}
        for name, sums in rank_sums.items():
            row = table.get(name, table.get(OTHERS))
            if row is not None:
                row.add(*sums.pack())
        numbers: list[float] = []
        for row in table.values():
            numbers += row.pack()
        return numbers

    def _learn(self, names_of_ranks: Iterable[Sequence[str]]) -> None:
        """Adds new names, on all ranks the same. Names beyond the most are replaced by one."""
        new_names = set().union(*names_of_ranks) - set(self.names)
        self.names += sorted(new_names)
        if len(self.names) > MOST_SOURCES:
            self.names[MOST_SOURCES:] = [OTHERS]
            log.warning(
                'Rows have more than %d sources. The further ones are logged together, as `%s`. Let `source` name the '
                'file or the part of a mixture, or set TokenMonitor(sources=False).',
                MOST_SOURCES,
                OTHERS,
            )


def _unread(batch: Batch, outputs: Any, rule: str, num_tokens: int) -> _Unread | None:
    """Returns the logits of a microbatch with its labels; None if the outputs have no logits of its labels."""
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
        # The labels between documents are masked already. To look for them would wait for the device.
        is_counted = loss_mask(labelled, rule)
    return _Unread(logits.detach(), labels_of(labelled), is_counted, num_tokens, rule)


def _token_losses(unread: Sequence[_Unread]) -> torch.Tensor:
    """Returns the loss of each token, float32 ``(tokens,)``, row after row.

    The number of tokens is known, so nothing waits for the device.
    """
    logits = _joined([part.logits.flatten(0, 1) for part in unread])
    labels = _joined([part.labels.flatten() for part in unread])
    is_counted = _joined([part.is_counted.flatten() for part in unread])
    num_tokens = sum(part.num_tokens for part in unread)
    of_labels = places_of(is_counted.cumsum(dim=0), range(1, num_tokens + 1))
    of_predictions = of_labels
    if unread[0].rule != 'unshifted':
        of_predictions = of_labels - 1  # in the same row, because labels in column 0 do not count
    chunk_size = max(CHUNK // logits.shape[-1], 1)
    losses = []
    for predictions, targets in zip(of_predictions.split(chunk_size), of_labels.split(chunk_size), strict=True):
        chunk_logits = whole_vocabulary(logits[predictions]).float()
        losses.append(F.cross_entropy(chunk_logits, labels[targets], reduction='none'))
    return _joined(losses)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates tensors. A single one, such as the logits of a large model, is not copied."""
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


@lru_cache(maxsize=4096)
def _loggable(source: str) -> str:
    """Returns the name with characters that every logger accepts. MLflow refuses others."""
    return re.sub(r'[^\w\-. ]', '_', source, flags=re.ASCII) or '_'
