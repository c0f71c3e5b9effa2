# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The cut that a sampler planned, carried in the batch to the split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ['MICROBATCH_IDS', 'replay_cut']

MICROBATCH_IDS = 'microbatch_ids'
"""Per-row python list in the batch: which microbatch the row was planned into."""


def replay_cut(
    batch: Mapping[str, Any], lengths: Sequence[int], max_tokens: int, *, width_multiple: int = 1, max_width: int
) -> list[list[int]] | None:
    """The planned microbatches, where the batch carries them and they keep the cap by the rows' measured lengths.

    Args:
        batch: A device batch, perhaps with ``microbatch_ids``.
        lengths: Measured length of each row in tokens.
        max_tokens: Token budget of a microbatch, padding included. A single row may exceed it.
        width_multiple: What widths are rounded up to.
        max_width: Width of the device batch, which rounding does not exceed.

    Returns:
        Rows of each microbatch in the planned order, or None: there is no plan, or a microbatch would be too large
        because the plan was made for a larger budget or from lengths that were too short.
    """
    ids = batch.get(MICROBATCH_IDS)
    if ids is None or len(ids) != len(lengths):
        return None
    groups: dict[int, list[int]] = {}
    for row, number in enumerate(ids):
        groups.setdefault(number, []).append(row)
    for rows in groups.values():
        width = max(lengths[row] for row in rows)
        width = max(width, min(-(-width // width_multiple) * width_multiple, max_width))
        if len(rows) > 1 and len(rows) * width > max_tokens:
            return None
    return list(groups.values())
