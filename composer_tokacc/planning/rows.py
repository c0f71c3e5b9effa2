# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The rows of one plan: checked, with their caps and cost; in an order, with the reach of a microbatch from each.

Costs are in units of one token through the dense layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from composer_tokacc.planning.compiled import compiled

__all__ = ['CostModel', 'OrderedRows', 'Rows']


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost of a microbatch of ``n`` rows of width ``w``: ``n * (w + w^2 / quadratic) + vision + launch``.

    The unit is the time of one token position in the dense layers, so that the cost of a short row is its width.

    Args:
        quadratic: Width at which attention costs as much as the dense layers; six times the hidden size for a
            standard transformer block (hidden size 4096 by default). ``math.inf`` for no quadratic term.
        vision_per_token: Cost of one image token in the vision tower, where that is all that is known of it.
        vision_per_image: Cost of the tower that does not depend on the patches of the image, and
        vision_per_patch: that of each patch, and
        vision_per_square: that of the patches squared: attention over the whole of an image.
        launch: Cost of starting a microbatch, whatever is in it. Zero would make microbatches of one row free.
        document: Cost of starting attention for one document of a packed row.
        seconds_per_token: Seconds of one unit where the model was fitted to measured times. Plans do not use it.

    Example:
        >>> CostModel(quadratic=1000.0).rows(np.array([100, 200]))
        array([110., 240.])
    """

    quadratic: float = 6 * 4096.0
    vision_per_token: float = 0.0
    vision_per_image: float = 0.0
    vision_per_patch: float = 0.0
    vision_per_square: float = 0.0
    launch: float = 128.0
    document: float = 8.0
    seconds_per_token: float | None = None

    def __post_init__(self) -> None:
        if not self.quadratic > 0:
            raise ValueError(f'`quadratic` must be positive, got: {self.quadratic}. Use math.inf for no such term.')
        names = ('vision_per_token', 'vision_per_image', 'vision_per_patch', 'vision_per_square', 'launch', 'document')
        for name in names:
            value = getattr(self, name)
            if not 0 <= value < float('inf'):
                raise ValueError(f'`{name}` must be finite and not negative, got: {value}.')

    def rows(self, widths: np.ndarray) -> np.ndarray:
        """Cost of one row at each width, without vision and launch, float64 of the same shape."""
        widths = np.asarray(widths, dtype=np.float64)
        return widths + widths * widths / self.quadratic

    def tower(self, image_tokens: np.ndarray, patches: np.ndarray | None = None) -> np.ndarray:
        """Cost of each sample in the vision tower, float64 (n,): ``vision_cost`` of :func:`.plan_microbatches`.

        Args:
            image_tokens: Image tokens of each sample, (n,).
            patches: Patches that the tower computes for it, (n,), taken for those of one image; None where unknown.

        Example:
            >>> CostModel(vision_per_image=5.0, vision_per_patch=0.1).tower(np.array([64, 0]), np.array([256, 0]))
            array([30.6,  0. ])
        """
        cost = np.asarray(image_tokens) * self.vision_per_token
        if patches is None:
            return cost
        patches = np.asarray(patches, dtype=np.float64)
        return cost + (
            (patches > 0) * self.vision_per_image
            + patches * self.vision_per_patch
            + patches * patches * self.vision_per_square
        )

    def packed(self, lengths: Sequence[int]) -> float:
        """Cost of a microbatch that is one packed row of documents, without vision."""
        return float(self.rows(np.array(lengths)).sum()) + self.document * len(lengths) + self.launch


@dataclass(frozen=True, kw_only=True)
class OrderedRows:
    """Rows in the order in which they are cut.

    From the longest to the shortest, a contiguous cut is optimal for padded rectangles: swapping two rows of different
    length between two microbatches never narrows either of them. Widths and costs then never increase.
    """

    order: np.ndarray
    """Index of each row in the caller's list, int64 (n,)."""
    widths: np.ndarray
    """Width of a microbatch whose widest row it is, int64 (n,)."""
    row_costs: np.ndarray
    """Cost of one row of that width, without vision, float64 (n,)."""
    vision: np.ndarray
    """Cost in the vision tower of all rows before each row, float64 (n + 1,). Never decreases."""
    reach: np.ndarray
    """Where a microbatch that starts at the row must end at the latest, int64 (n,). Never decreases."""

    def __len__(self) -> int:
        return len(self.order)


class Rows:
    """Checked rows, what a microbatch of them may hold, and what it costs; see :func:`.cut` for the arguments.

    Raises:
        ValueError: One of them is out of range; the message says which and how to mend it.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        max_tokens: int,
        *,
        image_tokens: Sequence[int] | np.ndarray | None = None,
        vision_cost: Sequence[float] | np.ndarray | None = None,
        max_image_tokens: int | None = None,
        width_multiple: int = 1,
        max_width: int | None = None,
        cost: CostModel | None = None,
    ) -> None:
        for name, value in (('max_tokens', max_tokens), ('width_multiple', width_multiple)):
            if value < 1:
                raise ValueError(f'`{name}` must be at least 1, got: {value}.')
        if max_image_tokens is not None and max_image_tokens < 1:
            raise ValueError(f'`max_image_tokens` must be at least 1, got: {max_image_tokens}. Use None for no cap.')
        if max_image_tokens is not None and image_tokens is None:
            raise ValueError('`image_tokens` must be given with `max_image_tokens`, got: None.')
        self.lengths = _checked_lengths(lengths)
        longest = int(self.lengths.max())
        if max_width is not None and max_width < longest:
            raise ValueError(f'`max_width` must be at least the longest sample, got: {max_width} < {longest}.')
        self.image_tokens = _checked_image_tokens(image_tokens, len(self.lengths))
        self.max_tokens, self.max_image_tokens = max_tokens, max_image_tokens
        self.cost = CostModel() if cost is None else cost
        self.vision_cost = self.cost.tower(self.image_tokens)
        if vision_cost is not None:
            self.vision_cost = _checked_vision_cost(vision_cost, len(self.lengths))
        self._width_multiple, self._max_width = width_multiple, max_width

    @property
    def is_over(self) -> np.ndarray:
        """Which rows break a cap by themselves, and are therefore placed alone, bool (n,)."""
        over = self.lengths > self.max_tokens
        return over if self.max_image_tokens is None else over | (self.image_tokens > self.max_image_tokens)

    def by_length(self, members: np.ndarray | None = None) -> OrderedRows:
        """The rows (or the `members` among them) from the longest to the shortest, ties by index."""
        members = np.arange(len(self.lengths)) if members is None else members
        return self.in_order(members[np.argsort(-self.lengths[members], kind='stable')])

    def in_order(self, order: np.ndarray) -> OrderedRows:
        """The rows in the given order."""
        lengths = widths = self.lengths[order]
        if self._width_multiple > 1:
            # Rounding stops at the collated width, and breaks no cap that the row itself keeps.
            limit = min(self.max_tokens, self._max_width or self.max_tokens)
            rounded = -(-lengths // self._width_multiple) * self._width_multiple
            widths = np.maximum(lengths, np.minimum(rounded, limit))
        image_sums = np.concatenate([[0], np.cumsum(self.image_tokens[order])])
        image_cap = int(image_sums[-1]) if self.max_image_tokens is None else self.max_image_tokens
        return OrderedRows(
            order=order,
            widths=widths,
            row_costs=self.cost.rows(widths),
            vision=np.concatenate([[0.0], np.cumsum(self.vision_cost[order])]),
            reach=_reach(widths, image_sums, self.max_tokens, image_cap),
        )


def _checked_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or len(sizes) == 0:
        raise ValueError(f'`lengths` must hold at least one sample, got: shape {sizes.shape}.')
    if sizes.dtype.kind not in 'iu':
        raise ValueError(f'`lengths` must be integers, got: {sizes.dtype}. Pass token counts.')
    if int(sizes.min()) < 1:
        at = int(np.argmin(sizes))
        raise ValueError(f'`lengths` must be positive, got: {sizes[at]} at sample {at}. Leave empty samples out.')
    return sizes.astype(np.int64)


def _checked_image_tokens(image_tokens: Sequence[int] | np.ndarray | None, num_rows: int) -> np.ndarray:
    if image_tokens is None:
        return np.zeros(num_rows, dtype=np.int64)
    images = np.asarray(image_tokens)
    if images.shape != (num_rows,):
        raise ValueError(f'`image_tokens` must have one entry per sample, got: {len(images)} for {num_rows}.')
    if int(images.min()) < 0:
        at = int(np.argmin(images))
        raise ValueError(f'`image_tokens` must not be negative, got: {images[at]} at sample {at}.')
    return images.astype(np.int64)


def _checked_vision_cost(vision_cost: Sequence[float] | np.ndarray, num_rows: int) -> np.ndarray:
    costs = np.asarray(vision_cost, dtype=np.float64)
    if costs.shape != (num_rows,):
        raise ValueError(f'`vision_cost` must have one entry per sample, got: {len(costs)} for {num_rows}.')
    if not (np.isfinite(costs) & (costs >= 0.0)).all():
        at = int(np.argmin(np.isfinite(costs) & (costs >= 0.0)))
        raise ValueError(f'`vision_cost` must be finite and not negative, got: {costs[at]} at sample {at}.')
    return costs


@compiled
def _reach(widths, image_sums, max_tokens, max_image_tokens):  # noqa: ANN001, ANN202 - typed by numba
    """Latest end of a microbatch from each row under the caps, rows in any order, int64 (n,)."""
    n = len(widths)
    reach = np.zeros(n, dtype=np.int64)
    for start in range(n):
        end = start + 1  # a row over a cap is placed alone
        width = widths[start]
        while end < n:
            width = max(width, widths[end])
            over = (end + 1 - start) * width > max_tokens or image_sums[end + 1] - image_sums[start] > max_image_tokens
            if over:
                break
            end += 1
        reach[start] = end
    return reach
