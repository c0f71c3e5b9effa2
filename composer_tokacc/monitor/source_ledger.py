# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What each source of data gave to a step: the loss of its tokens, their number and weight, and what they cost."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from composer.utils import dist

from composer_tokacc.batch import IGNORE_INDEX, Batch
from composer_tokacc.checks.logits import CHUNK, logits_of, places_of, whole_vocabulary
from composer_tokacc.counting import count_tokens, counted_tokens, loss_mask
from composer_tokacc.metadata import SourceShare, sources_of
from composer_tokacc.planning.compiled import compiled

log = logging.getLogger(__name__)

MOST_SOURCES = 64
"""Sources that are told apart; a collator's ``source`` may be another one for every row."""
OTHERS = 'others'
"""Name of the sources beyond these."""
SMALL_VOCABULARY = 1024
"""Up to which a plain loop on the CPU is faster than torch's calls, whose code each step must load anew."""
MOST_UNREAD = 2**20
"""Logits that may wait for the end of a step: 4 MiB."""
SUMS = ('loss', 'tokens', 'weight', 'positions')
"""What is added up of each source: the losses of its tokens, their number, what they weigh, and computed positions."""


class _Part(NamedTuple):
    """What one microbatch gave, by row, or by document of a packed row."""

    shares: Sequence[SourceShare | None]  # None: a dummy row
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
        self._losses: list[np.ndarray | torch.Tensor] = []  # of tokens, float32, part after part, on the device

    def note(self, batch: Batch, facts: Mapping[str, Any], outputs: Any, rule: str) -> None:
        """Notes a microbatch whose rows carry ``source``; nothing waits for the device where they were counted."""
        rows: Any = facts.get('sources') or _counted(batch, rule)
        if rows is None:
            return
        is_packed, is_counted = isinstance(rows[0], list), 'rule' in facts
        shares = rows[0] if is_packed else rows
        logits, labels = logits_of(outputs), batch['labels']
        has_losses = logits is not None and logits.shape[:2] == labels.shape
        self._parts.append(_Part(shares, None if is_packed else labels.shape[1], has_losses))
        if logits is not None and has_losses:
            counted = None if is_counted else counted_tokens(batch, rule)
            text = {name: batch[name] for name in ('labels', 'attention_mask') if name in batch}
            rule = facts['rule'][0] if is_counted else rule
            num_tokens = sum(facts['loss_tokens'] if is_counted else [share.loss_tokens for share in shares])
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
            for share in filter(None, part.shares):
                loss = math.nan if share.loss_tokens else 0.0
                if part.has_losses:
                    loss, start = sum(losses[start : start + share.loss_tokens]), start + share.loss_tokens
                if share.source is not None:
                    own = found.setdefault(_loggable(share.source), [0.0] * len(SUMS))
                    own[0] += loss
                    own[1] += share.loss_tokens
                    own[2] += share.weight
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


def _token_losses(parts: Sequence[_Unread]) -> np.ndarray | torch.Tensor:
    """Returns the loss of each counted token, float32 (tokens,), row after row.

    As their number is known, nothing waits for the device.
    """
    total = sum(part.num_tokens for part in parts)
    arrays = []
    with suppress(TypeError, RuntimeError):  # on another device, sharded, or of a type that numpy lacks
        arrays = [part.logits.numpy() for part in parts]
    if arrays and arrays[0].dtype == np.float32 and arrays[0].shape[-1] <= SMALL_VOCABULARY:
        found, place = np.zeros(total, np.float32), 0
        for array, part in zip(arrays, parts, strict=True):
            shift = int(part.rule != 'unshifted')
            place = _read_losses(array, _counted_labels(part).numpy(), shift, found, place)
        return found
    flat, labels, counted = (_joined(tensors) for tensors in zip(*map(_in_line, parts), strict=True))
    size = max(CHUNK // flat.shape[-1], 1)
    places = places_of(counted.cumsum(dim=0), range(1, total + 1))
    before = places - 1 if parts[0].rule != 'unshifted' else places  # in the same row: a first column never counts
    chunks = [(before, places)] if total <= size else zip(before.split(size), places.split(size), strict=True)
    losses = [
        F.cross_entropy(whole_vocabulary(flat[some]).float(), labels[wanted], reduction='none')
        for some, wanted in chunks
    ]
    return _joined(losses)


@compiled
def _read_losses(logits, labels, shift, found, place):  # noqa: ANN001, ANN202 - typed by numba
    """Writes the cross-entropy of each label from a place on; one call, where torch's twelve are cold in every step."""
    for row in range(labels.shape[0]):
        for column in range(shift, labels.shape[1]):
            label = labels[row, column]
            if label != IGNORE_INDEX and place < len(found):  # labels that have changed since: the step is refused
                scores = logits[row, column - shift]
                highest = scores.max()
                odds = 0.0
                for score in scores:
                    odds += math.exp(score - highest)
                known = 0 <= label < len(scores)  # nothing here would stop a read behind the end
                found[place] = math.log(odds) + highest - scores[label] if known else math.nan
                place += 1
    return place


def _counted_labels(part: _Unread) -> torch.Tensor:
    """Returns labels of which those that do not count are ignored; a first column that is shifted away aside."""
    if part.counted is None and part.rule != 'causal_attended':
        return part.text['labels']
    counted = loss_mask(part.text, part.rule) if part.counted is None else part.counted
    return part.text['labels'].masked_fill(~counted, IGNORE_INDEX)


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
