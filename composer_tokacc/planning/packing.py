# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows grouped for packing: by the sum of their lengths, without any padding."""

from __future__ import annotations

import numpy as np

from composer_tokacc.planning.options import Table


def pack_lengths(
    lengths: Table,
    max_tokens: int,
    image_tokens: Table | None = None,
    max_image_tokens: int | None = None,
) -> list[list[int]]:
    """Groups rows so that their lengths and their image tokens sum to at most the caps: first fit, longest first.

    First-fit-decreasing needs at most 11/9 of the fewest groups, plus one (Dosa 2007). A row over the cap goes alone.

    Returns:
        Row indices of each group, longest first, so that rows of one length, which attention computes at once, are
        beside each other; groups in order of their longest row.

    Example:
        >>> pack_lengths([7, 2, 8, 2, 2], 10)
        [[2, 1], [0, 3], [4]]
    """
    sizes = np.array([lengths, [0] * len(lengths) if image_tokens is None else image_tokens]).T
    caps = np.array([max_tokens, np.inf if max_image_tokens is None else max_image_tokens])
    # So far: every longer row is in a group, and `room` is what each group has left of both caps.
    groups: list[list[int]] = []
    room: list[np.ndarray] = []
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fit = next((index for index, left in enumerate(room) if (sizes[row] <= left).all()), None)
        if fit is None:
            groups.append([])
            room.append(caps)
            fit = len(groups) - 1
        groups[fit].append(row)
        room[fit] = room[fit] - sizes[row]
    return groups
