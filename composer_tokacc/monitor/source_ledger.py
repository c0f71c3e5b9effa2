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

import numpy as np
import torch
import torch.nn.functional as F
from composer.utils import dist

from composer_tokacc.batch import Batch
from composer_tokacc.checks.logits import CHUNK, logits_of, whole
from composer_tokacc.counting import count_tokens, counted_tokens, loss_mask
from composer_tokacc.metadata import SourceShare, metadata_of, sources_of

log = logging.getLogger(__name__)

NOTHING = SourceShare(None, 0, 0, 0.0)
"""Of a dummy row."""
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

    shares: Sequence[SourceShare]
    positions: Sequence[int]
    has_losses: bool  # False: the model gives no logits

    @property
    def num_tokens(self) -> int:
        return sum(share.loss_tokens for share in self.shares)


class _Unread(NamedTuple):
    """What the losses of a microbatch's tokens will be read from."""

    logits: torch.Tensor
    text: Mapping[str, Any]  # its labels, and what the rule asks for
    rule: str
    counted: torch.Tensor | None  # by nobody before: which tokens carry loss
    num_tokens: int


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
        facts = metadata_of(batch)
        rows: Any = facts.get('sources') or _counted(batch, rule)
        if rows is None:
            return
        is_packed, is_counted = isinstance(rows[0], list), 'rule' in facts
        shares = [share or NOTHING for share in (rows[0] if is_packed else rows)]
        logits, labels = logits_of(outputs), batch['labels']
        has_losses = logits is not None and logits.shape[:2] == labels.shape
        positions = [share.real_tokens for share in shares] if is_packed else [labels.shape[1]] * len(shares)
        self._parts.append(part := _Part(shares, positions, has_losses))
        if logits is not None and has_losses:
            counted = None if is_counted else counted_tokens(batch, rule)
            text = {name: batch[name] for name in ('labels', 'attention_mask') if name in batch}
            rule = facts['rule'][0] if is_counted else rule
            self._unread.append(_Unread(logits.detach(), text, rule, counted, part.num_tokens))
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
        """This rank's sums of each source; reads the device once."""
        shares = [share for part in self._parts for share in part.shares]
        positions = [number for part in self._parts for number in part.positions]
        names = [None if share.source is None else _loggable(share.source) for share in shares]
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        owners, tokens = np.array([places[name] for name in names], int), [share.loss_tokens for share in shares]
        self._read()
        losses = torch.cat(self._losses).cpu().numpy() if self._losses else np.zeros(0)
        if not all(part.has_losses for part in self._parts):
            losses = _with_unknown(self._parts, losses)
        table = (
            np.bincount(owners.repeat(tokens), losses, len(places)),
            *(
                np.bincount(owners, values, len(places))
                for values in (tokens, [one.weight for one in shares], positions)
            ),
        )
        rows = np.stack(table, axis=1).tolist()
        return {name: row for name, row in zip(places, rows, strict=True) if name is not None}

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


def _counted(batch: Batch, rule: str) -> list[SourceShare] | None:
    """Returns the shares of rows that nobody has counted."""
    names = sources_of(batch)
    if names is None:
        return None
    counts = count_tokens(batch, rule)
    return [
        SourceShare(name, tokens, real, float(tokens))
        for name, tokens, real in zip(names, counts.loss_generating, counts.real, strict=True)
    ]


def _token_losses(parts: Sequence[_Unread]) -> torch.Tensor:
    """Returns the loss of each counted token, float32 (tokens,), row after row.

    As their number is known, nothing waits for the device.
    """
    flat, labels, counted = (_joined(tensors) for tensors in zip(*map(_in_line, parts), strict=True))
    total, size = sum(part.num_tokens for part in parts), max(CHUNK // flat.shape[-1], 1)
    # Labels may have changed since, then places are missing or left over: the step is refused.
    places = counted.nonzero_static(size=total)[:, 0] if counted.device.type == 'cpu' else _places(counted, total)
    before = places - 1 if parts[0].rule != 'unshifted' else places  # in the same row: a first column never counts
    chunks = [(before, places)] if total <= size else zip(before.split(size), places.split(size), strict=True)
    losses = [F.cross_entropy(whole(flat[some]).float(), labels[wanted], reduction='none') for some, wanted in chunks]
    return _joined(losses)


def _in_line(part: _Unread) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns logits, labels and whether these count, of all rows one after the other."""
    counted = loss_mask(part.text, part.rule) if part.counted is None else part.counted
    return part.logits.flatten(0, 1), part.text['labels'].flatten(), counted.flatten()


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([*tensors]) if len(tensors) > 1 else tensors[0]  # logits of a large model are not copied


def _places(counted: torch.Tensor, total: int) -> torch.Tensor:
    """Returns where a mask is set; for a device whose ``nonzero`` the host waits for."""
    ordinals = counted.cumsum(dim=0)
    places = torch.searchsorted(ordinals, torch.arange(1, total + 1, device=counted.device))
    return places.clamp_(max=len(ordinals) - 1)


def _with_unknown(parts: Sequence[_Part], known: np.ndarray) -> np.ndarray:
    """Returns the losses of all parts, NaN for those without."""
    found = np.full(sum(part.num_tokens for part in parts), math.nan)
    found[np.repeat([part.has_losses for part in parts], [part.num_tokens for part in parts])] = known
    return found


@lru_cache(maxsize=4096)
def _loggable(source: str) -> str:
    """Returns a name that every logger takes; MLflow refuses others."""
    return re.sub(r'[^\w\-. ]', '_', source, flags=re.ASCII) or '_'
