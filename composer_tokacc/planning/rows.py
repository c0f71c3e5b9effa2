# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The rows of a plan: their checked sizes, their order for a cut, and the latest end of a microbatch under the caps.

A row is one line of a padded batch. The planner and the samplers plan before batches exist, so there a row is a sample.
For the split it is a row of the device batch, which may hold several packed samples.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from composer_tokacc.planning.compiled import compiled
from composer_tokacc.planning.options import CAPPED_SIZES, CutOptions, Table
from composer_tokacc.refusals import InvalidInputError


@dataclass(frozen=True, kw_only=True)
class OrderedRows:
    """Rows in the order in which they are cut. A microbatch holds neighbours.

    Usually they are sorted from the longest to the shortest, so ``widths`` and ``row_costs`` never increase. Then
    microbatches of neighbours have the least padding. For example lengths 8, 7, 2, 1 in two microbatches of two rows
    need 2 positions of padding, and 8, 1, 7, 2 need 12.
    """

    order: np.ndarray
    """Index of each row in the :class:`Rows` that were ordered, int64 (n,)."""
    widths: np.ndarray
    """Length of each row, rounded up: the width of a microbatch in which it is the longest row, int64 (n,)."""
    row_costs: np.ndarray
    """Cost of one row of that width, without vision, float64 (n,)."""
    vision_before: np.ndarray
    """Running sum: the cost in the vision encoder of all rows before each row, float64 (n + 1,). Never decreases."""
    reach: np.ndarray
    """Latest end of a microbatch that starts at the row, int64 (n,): the index after its last row. Never decreases."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.order)


class Rows:
    """Checked rows with the caps and costs of their microbatches.

    The tables are explained at :func:`.plan_microbatches`, and ``max_width`` at :func:`.cut_rows`.
    """

    def __init__(
        self,
        lengths: Table,
        options: CutOptions,
        *,
        image_tokens: Table | None = None,
        loss_tokens: Table | None = None,
        vision_cost: Table | None = None,
        max_width: int | None = None,
    ) -> None:
        self.options = options
        self._max_width = max_width
        """Width of the collated batch. Widths are not rounded up beyond it. None: not collated yet."""
        self.lengths = checked_table('lengths', lengths, least=1)
        num_rows = len(self.lengths)
        self.sizes = checked_sizes({'image_tokens': image_tokens, 'loss_tokens': loss_tokens}, options, num_rows)
        """Tables of image tokens and loss tokens, int64 (n,), by name. A size without a cap may have no table."""
        self.vision_cost = options.cost.vision(self.image_tokens)
        """Cost of each row in the vision encoder, float64 (n,)."""
        if vision_cost is not None:
            self.vision_cost = checked_table('vision_cost', vision_cost, num_rows, dtype=np.float64)

    def of(self, indices: np.ndarray) -> Rows:
        """Returns the rows with these indices, with the same options."""
        rows = copy.copy(self)
        rows.lengths = self.lengths[indices]
        rows.sizes = {}
        for size, table in self.sizes.items():
            rows.sizes[size] = table[indices]
        rows.vision_cost = self.vision_cost[indices]
        return rows

    @property
    def image_tokens(self) -> np.ndarray:
        """Image tokens of each row, int64 (n,). Zeros if there is no table."""
        return self.sizes.get('image_tokens', np.zeros_like(self.lengths))

    @property
    def caps(self) -> np.ndarray:
        """The token budget, then those caps of :data:`.CAPPED_SIZES` that are set, int64 (number of caps,)."""
        caps = [self.options.max_tokens, *self.options.caps.values()]
        return np.array(caps, dtype=np.int64)

    @property
    def capped_sizes(self) -> np.ndarray:
        """The sizes of each row that have a cap, in the order of :attr:`caps`, int64 (number of caps, n).

        Lengths come first. Their cap is the token budget. It limits the sum of the lengths in a microbatch only if rows
        are packed. If they are padded, it limits the number of rows times the width.
        """
        tables = [self.lengths]
        for size in self.options.caps:
            tables.append(self.sizes[size])
        return np.stack(tables)

    @property
    def is_over(self) -> np.ndarray:
        """Which rows break a cap by themselves, and are therefore placed alone, bool (n,)."""
        is_over_cap = self.capped_sizes > self.caps[:, np.newaxis]
        return np.any(is_over_cap, axis=0)

    def by_length(self, members: np.ndarray | None = None) -> OrderedRows:
        """Returns the rows (or the ``members`` among them) from the longest to the shortest, ties by index."""
        if members is None:
            members = np.arange(len(self.lengths))
        longest_first = np.argsort(-self.lengths[members], kind='stable')
        return self.in_order(members[longest_first])

    def in_order(self, order: np.ndarray) -> OrderedRows:
        """Returns the rows with the indices ``order``, in this order, with their widths, costs and reach."""
        options = self.options
        # Widths are not rounded up beyond the token budget, nor beyond the collated width.
        limit = options.max_tokens
        if self._max_width is not None:
            limit = min(limit, self._max_width)
        widths = padded_widths(self.lengths[order], options.width_multiple, limit)
        # Lengths are not summed up, because their cap, the token budget, limits the padded widths.
        summed_sizes = self.capped_sizes[1:, order]
        caps_of_sums = self.caps[1:]
        running_sums = np.zeros((len(caps_of_sums), len(order) + 1), dtype=np.int64)
        running_sums[:, 1:] = np.cumsum(summed_sizes, axis=1)
        running_vision = np.cumsum(self.vision_cost[order])
        return OrderedRows(
            order=order,
            widths=widths,
            row_costs=options.cost.rows(widths),
            vision_before=np.concatenate([[0.0], running_vision]),
            reach=_reach(widths, options.max_tokens, running_sums, caps_of_sums),
        )


def padded_widths(
    lengths: np.ndarray,
    multiple: int,
    limit: int,
) -> np.ndarray:
    """Returns lengths rounded up to a multiple, but not past a limit, int64 (n,). Lengths over the limit stay."""
    rounded_up = -(-lengths // multiple) * multiple
    return np.maximum(lengths, np.minimum(rounded_up, limit))


def checked_table(
    name: str,
    values: Table,
    num_samples: int | None = None,
    *,
    least: int = 0,
    dtype: type = np.int64,
    sample_ids: Sequence[str] | None = None,
) -> np.ndarray:
    """Returns a table as an array, (n,).

    Raises ValueError unless there is one number for each of ``num_samples`` samples, and all numbers are finite, at
    least ``least``, and, for int64, integers below 2**31.

    Without ``num_samples`` the table may have any length except 0. ``sample_ids`` are names of the samples, for the
    message.
    """
    try:
        table = np.asarray(values)
    except ValueError as error:  # ragged
        raise InvalidInputError(f'`{name}` must have one number per sample, got: {values!r:.80} ({error}).') from error
    if num_samples is None:
        num_samples = table.size
    if table.shape != (num_samples,):
        raise InvalidInputError(
            f'`{name}` must have one entry per sample, got: shape {table.shape} for {num_samples} samples, in a '
            f'{type(values).__name__}.'
        )
    if num_samples == 0:
        raise InvalidInputError(f'`{name}` must hold at least one sample, got: none.')
    # Kinds of numpy: signed and unsigned integers, floats.
    if dtype is np.int64:
        kinds = 'iu'
        expected = 'integers'
        end = 2**31  # so that the product of two numbers fits into int64
    else:
        kinds = 'iuf'
        expected = 'numbers'
        end = np.inf
    if table.dtype.kind not in kinds:
        raise InvalidInputError(f'`{name}` must be {expected}, got: {table.dtype}.')
    is_good = (table >= least) & (table < end)  # False for NaN
    if not is_good.all():
        first_bad = int(is_good.argmin())
        bound = f'below {end}' if table[first_bad] >= end else f'at least {least}'
        sample = f'sample {first_bad}'
        if sample_ids is not None:
            sample += f' ("{sample_ids[first_bad]}")'
        raise InvalidInputError(f'`{name}` must be finite and {bound}, got: {table[first_bad]} at {sample}.')
    return table.astype(dtype)


def checked_sizes(
    tables: Mapping[str, Table | None],
    options: CutOptions,
    num_samples: int,
) -> dict[str, np.ndarray]:
    """Returns the tables that are not None, int64 (n,), by name. Raises ValueError if the table of a cap is None."""
    checked = {}
    for size, table in tables.items():
        if table is not None:
            checked[size] = checked_table(size, table, num_samples)
        elif size in options.caps:
            raise InvalidInputError(f'`{size}` must be given with `{CAPPED_SIZES[size]}`, got: None.')
    return checked


@compiled
def _reach(
    widths: np.ndarray,
    max_tokens: int,
    running_sums: np.ndarray,
    caps: np.ndarray,
) -> np.ndarray:
    """Returns for each row the latest end of a microbatch that starts there, int64 (n,). Rows may have any order.

    The end is the position after the last row of the microbatch.

    Args:
        widths: Width of each row, (n,).
        max_tokens: Token budget: a cap on the number of rows times the greatest width.
        running_sums: Each size whose sum has a cap, summed over all rows before each row, int64 (sizes, n + 1).
        caps: Cap on the sum of each of these sizes, int64 (sizes,).
    """
    n = len(widths)
    reach = np.zeros(n, dtype=np.int64)
    # A further row never makes a microbatch smaller in any size. So the first row that breaks a cap ends it.
    for start in range(n):
        end = start + 1  # a row over a cap is placed alone
        width = widths[start]
        while end < n:
            width = max(width, widths[end])
            fits = (end + 1 - start) * width <= max_tokens
            for size in range(len(caps)):
                size_of_rows = running_sums[size, end + 1] - running_sums[size, start]
                fits = fits and size_of_rows <= caps[size]
            if not fits:
                break
            end += 1
        reach[start] = end
    return reach
