# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The checks' view of the split: it proposes rules for cutting rows, and cuts rows by them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from composer_tokacc.batch import Batch
from composer_tokacc.layout import RowFacts

RulesT = TypeVar('RulesT', bound='Rules')


class Rules(Protocol):
    """How rows may be cut into microbatches."""

    @property
    def packing(self) -> str:
        """How the rows of a microbatch become one packed row; empty if they do not."""
        ...

    def with_side_of(self: RulesT, earlier: RulesT, side: str) -> RulesT:
        """Returns these rules, but takes the earlier ones for rows that are padded on ``side``."""
        ...

    def cuts_like(self: RulesT, other: RulesT) -> bool:
        """Returns whether both cut rows in the same way. They may be proven up to different widths."""
        ...


class Cutter(Protocol[RulesT]):
    """Cuts rows into microbatches."""

    @property
    def rules(self) -> RulesT:
        """The current rules."""
        ...

    @property
    def must_pack(self) -> bool:
        """Whether the user demands packed rows. Then the run stops if rows cannot be packed."""
        ...

    def candidates(self, facts: RowFacts, earlier: RulesT) -> Iterator[RulesT]:
        """Yields the rules to try on such rows, the cheapest first. ``earlier`` are the rules from earlier checks."""
        ...

    def largest_packed_row(self, facts_of_batches: Sequence[RowFacts], microbatch_size: float) -> int:
        """Returns the most tokens that a packed row of a batch can have. 0: rows are not packed."""
        ...

    def assemble(
        self,
        facts: RowFacts,
        rows: Sequence[int],
        rules: RulesT,
    ) -> Batch:
        """Returns the microbatch of some rows, cut and packed by the rules."""
        ...
