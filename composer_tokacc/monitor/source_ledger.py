# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What each source of data gave to a step: the loss of its tokens, their number and weight, and what they cost."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
SUMS = ('loss', 'tokens', 'weight', 'positions')
"""What is added up of each source: the losses of its tokens, their number, what they weigh, and computed positions."""


class _Part(NamedTuple):
    """What one microbatch gave, by row, or by document of a packed row."""

    shares: Sequence[SourceShare]
    positions: Sequence[int]
    losses: torch.Tensor | None  # sums, float64 (shares,), on the device; None: the model gives no logits


class SourceLedger:
    """Adds up a step's rows by source, over all ranks, which need not have the same sources."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Sources seen so far by any rank, the same list on all."""
        self._parts: list[_Part] = []

    def begin_attempt(self) -> None:
        """Forgets what was noted of the step."""
        self._parts = []

    def note(self, batch: Batch, outputs: Any, rule: str) -> None:
        """Notes a microbatch whose rows carry ``source``; nothing waits for the device where they were counted."""
        facts = metadata_of(batch)
        rows: Any = facts.get('sources') or _counted(batch, rule)
        if rows is None:
            return
        is_packed = isinstance(rows[0], list)
        shares = [share or NOTHING for share in (rows[0] if is_packed else rows)]
        logits, labels = logits_of(outputs), batch['labels']
        losses = None
        if logits is not None and logits.shape[:2] == labels.shape:
            counted = loss_mask(batch, facts['rule'][0]) if 'rule' in facts else counted_tokens(batch, rule)
            shift = int(facts.get('rule', [rule])[0] != 'unshifted')
            losses = _losses(logits, labels, counted, [share.loss_tokens for share in shares], shift)
        positions = [share.real_tokens for share in shares] if is_packed else [labels.shape[1]] * len(shares)
        self._parts.append(_Part(shares, positions, losses))

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
        parts = [part.losses for part in self._parts if part.losses is not None]
        losses = iter(torch.cat(parts).tolist() if parts else [])
        sums: dict[str, list[float]] = {}
        for part in self._parts:
            for share, positions in zip(part.shares, part.positions, strict=True):
                loss = next(losses) if part.losses is not None else math.nan if share.loss_tokens else 0.0
                if share.source is not None:
                    row = sums.setdefault(_loggable(share.source), [0.0] * len(SUMS))
                    for place, value in enumerate((loss, share.loss_tokens, share.weight, positions)):
                        row[place] += value
        return sums

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


def _losses(
    logits: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor, counts: Sequence[int], shift: int
) -> torch.Tensor:
    """Returns the summed losses of each share, float64 (shares,), whose tokens follow one another, so many of each.

    As their number is known, nothing waits for the device. Labels are predicted ``shift`` positions ahead.
    """
    total, device = sum(counts), logits.device
    ordinals = counted.flatten().cumsum(dim=0)
    places = torch.searchsorted(ordinals, torch.arange(1, total + 1, device=device))
    places.clamp_(shift, len(ordinals) - 1)  # labels may have changed since; the step is refused then
    targets, flat = labels.flatten()[places].clamp_(min=0), logits.detach().flatten(0, 1)
    size = max(CHUNK // logits.shape[-1], 1)
    parts = [
        F.cross_entropy(whole(flat[some - shift]).float(), wanted, reduction='none')
        for some, wanted in zip(places.split(size), targets.split(size), strict=True)
    ]
    owners = torch.repeat_interleave(torch.tensor(counts), output_size=total).to(device, non_blocking=True)
    return flat.new_zeros(len(counts), dtype=torch.float64).index_add_(0, owners, torch.cat(parts).double())


def _loggable(source: str) -> str:
    """Returns a name that every logger takes; MLflow refuses others."""
    return re.sub(r'[^\w\-. ]', '_', source, flags=re.ASCII) or '_'
