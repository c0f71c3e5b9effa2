# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What each source of data gave to a step: the loss of its tokens, their number and weight, and what they cost."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from composer.utils import dist

from composer_tokacc.batch import Batch
from composer_tokacc.checks.logits import CHUNK, logits_of, whole_vocabulary
from composer_tokacc.counting import counted_tokens, loss_mask
from composer_tokacc.labelled import batch_at_logits, places_of
from composer_tokacc.row_counts import RowCounts, count_rows, is_counted, rows_of, sources_of

log = logging.getLogger(__name__)

MOST_SOURCES = 64
"""Sources that are told apart; a collator's ``source`` may be another one for every row."""
OTHERS = 'others'
"""Name of the sources beyond these."""
MOST_UNREAD = 2**20
"""Logits that may wait for the end of a step: 4 MiB."""
SUMS = ('loss', 'tokens', 'weight', 'positions')
"""What is added up of each source: the losses of its tokens, their number, what they weigh, and computed positions."""


class _Part(NamedTuple):
    """What one microbatch gave, by row, or by document of a packed row."""

    shares: Sequence[RowCounts]  # of rows, or of documents of a packed row
    width: int | None  # of each row; None: a document takes its own tokens
    has_losses: bool  # False: the model gives no logits


class _Unread(NamedTuple):
    """What the losses of a microbatch's tokens will be read from."""

    logits: torch.Tensor
    text: Mapping[str, Any]  # its labels, and what the rule asks for
    rule: str
    counted: torch.Tensor | None  # by nobody before: which tokens carry loss
    num_tokens: int  # that carry loss


class SourceLedger:
    """Adds up a step's rows by source, over all ranks, which need not have the same sources."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Sources seen so far by any rank, the same list on all."""
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forgets what was noted of the step."""
        self._parts: list[_Part] = []
        self._unread: list[_Unread] = []
        self._num_unread = 0  # logits
        self._losses: list[torch.Tensor] = []  # of tokens, float32, part after part, on the device

    def note(self, batch: Batch, outputs: Any, rule: str) -> None:
        """Notes a microbatch whose rows carry ``source``; nothing waits for the device where they were counted."""
        was_counted = is_counted(batch)
        if not was_counted and sources_of(batch) is None:
            return
        rows = rows_of(batch) if was_counted else count_rows(batch, rule)
        is_packed = bool(rows[0].documents)
        shares = rows[0].documents if is_packed else rows
        if all(share.source is None for share in shares):
            return
        rule = rows[0].rule
        num_tokens = sum(row.loss_tokens for row in rows)
        logits, width = logits_of(outputs), batch['labels'].shape[1]
        compared = None if logits is None else batch_at_logits(batch, logits, rule, num_tokens)
        self._parts.append(_Part(shares, None if is_packed else width, compared is not None))
        if logits is not None and compared is not None:
            at_logits, _ = compared
            counted = None if was_counted else counted_tokens(batch, rule)
            text = {name: at_logits[name] for name in ('labels', 'attention_mask') if name in at_logits}
            self._unread.append(_Unread(logits.detach(), text, rule, counted, num_tokens))
            self._num_unread += logits.numel()
            if self._num_unread > MOST_UNREAD:
                self._read()

    def _read(self) -> None:
        """Reads the losses of what was noted; the fewer calls, the less they cost beside a small model."""
        if self._unread:
            self._losses.append(_token_losses(self._unread))
            self._unread, self._num_unread = [], 0

    def gather(self, values: Sequence[float], device: Any) -> tuple[torch.Tensor, dict[str, dict[str, float]]]:
        """Gathers a step's numbers of all ranks in one collective; one more where a source comes for the first time.

        Args:
            values: This rank's numbers besides, equally many on all ranks.
            device: Composer's, where the process group works.

        Returns:
            Those of all ranks, float64 ``(ranks, values)``, and the step's sums by source and field.
        """
        own = self._sums()
        while True:
            new = [] if OTHERS in self.names else sorted(own.keys() - set(self.names))
            mine = torch.tensor([*values, len(new), *self._table(own)], dtype=torch.float64)
            ranks = torch.stack([*dist.all_gather(device.tensor_to_device(mine))]).cpu()
            if not ranks[:, len(values)].any():
                break
            self._learn(dist.all_gather_object(new))
        sums = ranks[:, len(values) + 1 :].sum(dim=0).view(-1, len(SUMS)).tolist()
        found: dict[str, dict[str, float]] = {
            name: dict(zip(SUMS, row, strict=True)) for name, row in zip(self.names, sums, strict=True)
        }
        return ranks[:, : len(values)], found

    def _sums(self) -> dict[str, list[float]]:
        """This rank's sums of each source; reads the device. Plain loops cost less than numpy's calls here."""
        self._read()
        losses = [loss for part in self._losses for loss in part.tolist()]
        found: dict[str, list[float]] = {}
        start = 0
        for part in self._parts:
            for share in part.shares:
                loss = math.nan if share.loss_tokens else 0.0
                if part.has_losses:
                    loss, start = sum(losses[start : start + share.loss_tokens]), start + share.loss_tokens
                if share.source is not None:
                    own = found.setdefault(_loggable(share.source), [0.0] * len(SUMS))
                    own[0] += loss
                    own[1] += share.loss_tokens
                    own[2] += share.loss_weight
                    own[3] += part.width or share.real_tokens
        return found

    def _table(self, own: Mapping[str, list[float]]) -> list[float]:
        """Returns this rank's sums in the order of the names that all ranks know."""
        table = {name: [0.0] * len(SUMS) for name in self.names}
        for name, row in own.items():
            known = table.get(name) or table.get(OTHERS)
            if known is not None:
                known[:] = [before + value for before, value in zip(known, row, strict=True)]
        return [value for row in table.values() for value in row]

    def _learn(self, of_ranks: Sequence[Sequence[str]]) -> None:
        """Takes up new names, on all ranks the same; those beyond the most go under one."""
        self.names += sorted({name for names in of_ranks for name in names} - set(self.names))
        if len(self.names) > MOST_SOURCES:
            self.names[MOST_SOURCES:] = [OTHERS]
            log.warning(
                'Rows have more than %d sources: those beyond are logged together, as `%s`. Let `source` name the file '
                'or the part of a mixture, or set TokenMonitor(sources=False).', MOST_SOURCES, OTHERS,
            )  # fmt: skip


def _token_losses(parts: Sequence[_Unread]) -> torch.Tensor:
    """Returns the loss of each counted token, float32 (tokens,), row after row.

    As their number is known, nothing waits for the device.
    """
    total = sum(part.num_tokens for part in parts)
    joined = []
    for tensors in zip(*map(_in_line, parts), strict=True):
        joined.append(_joined(tensors))
    flat, labels, counted = joined
    size = max(CHUNK // flat.shape[-1], 1)
    places = places_of(counted.cumsum(dim=0), range(1, total + 1))
    before = places - 1 if parts[0].rule != 'unshifted' else places  # in the same row: a first column never counts
    chunks = [(before, places)] if total <= size else zip(before.split(size), places.split(size), strict=True)
    losses = [
        F.cross_entropy(whole_vocabulary(flat[some]).float(), labels[wanted], reduction='none')
        for some, wanted in chunks
    ]
    return _joined(losses)


def _in_line(part: _Unread) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns logits, labels and whether these count, of all rows one after the other."""
    counted = loss_mask(part.text, part.rule) if part.counted is None else part.counted
    return part.logits.flatten(0, 1), part.text['labels'].flatten(), counted.flatten()


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([*tensors]) if len(tensors) > 1 else tensors[0]  # logits of a large model are not copied


@lru_cache(maxsize=4096)
def _loggable(source: str) -> str:
    """Returns a name that every logger takes; MLflow refuses others."""
    return re.sub(r'[^\w\-. ]', '_', source, flags=re.ASCII) or '_'
