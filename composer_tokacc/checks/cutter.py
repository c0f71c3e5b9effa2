# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The interface of the class that cuts batches, for the checks: rules to try, and microbatches that are cut by them.

The classes are in `data_spec`. The checks do not import them, because `data_spec` imports the checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from composer_tokacc.batch import Batch
from composer_tokacc.layout import RowFacts

RulesT = TypeVar('RulesT', bound='Rules')


class Rules(Protocol):
    """How the rows of a microbatch are trimmed or packed."""

    @property
    def packing(self) -> str:
        """How a microbatch's rows become one packed row, see ``CutRules.packing``. ``''``: rows are not packed."""
        ...

    def with_earlier_width(self: RulesT, earlier: RulesT, side: str) -> RulesT:
        """Returns these rules, but trims padding on ``side``, ``'left'`` or ``'right'``, only up to the earlier width.

        The check calls it if it has trimmed no row. Then it has shown nothing about a new width. If these rules keep
        such padding, they stay as they are.
        """
        ...

    def cuts_like(self: RulesT, other: RulesT) -> bool:
        """Returns whether both trim, pack and add dummy rows in the same way. Ignores the widths that were proven."""
        ...


class Cutter(Protocol[RulesT]):
    """Makes microbatches of rows by rules."""

    @property
    def rules(self) -> RulesT:
        """The rules by which the run cuts its batches now."""
        ...

    @property
    def must_pack(self) -> bool:
        """Whether the run stops if rows cannot be packed."""
        ...

    def candidates(self, facts: RowFacts, earlier: RulesT) -> Iterator[RulesT]:
        """Yields the rules to try on some rows, the cheapest first. ``earlier`` are the rules proven on other rows."""
        ...

    def largest_packed_row(self, facts_of_batches: Sequence[RowFacts], microbatch_size: float) -> int:
        """Returns the most tokens that a packed row of these batches can have. 0: rows are not packed.

        ``microbatch_size`` is Composer's ``device_train_microbatch_size``, see :func:`.token_budget`.
        """
        ...

    def assemble(self, facts: RowFacts, rows: Sequence[int], rules: RulesT) -> Batch:
        """Returns the microbatch of some rows, packed by the rules, or trimmed as narrow as the rules allow.

        Args:
            facts: Facts about the batch that holds the rows. They hold the batch itself, too.
            rows: Indices of the rows in the batch.
            rules: The rules.
        """
        ...
