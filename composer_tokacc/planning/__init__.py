# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Pure functions that cut a global batch into microbatches under a token budget, and assign them to ranks. No torch."""

from typing import TYPE_CHECKING

from composer_tokacc.arguments import check_choice, check_count, check_kind, check_state
from composer_tokacc.lazy import on_first_use
from composer_tokacc.planning.cuts import cut_rows, pack_lengths
from composer_tokacc.planning.options import (
    CAPPED_SIZES,
    CostModel,
    CutOptions,
    Table,
    mean_samples,
    token_budget,
)
from composer_tokacc.planning.rows import Rows, checked_sizes, checked_table, padded_widths

if TYPE_CHECKING:
    from composer_tokacc.planning.plan import (
        Microbatch,
        MicrobatchPlan,
        PlanStats,
        lower_bound,
        plan_microbatches,
        plan_rows,
    )

__all__ = [
    'CAPPED_SIZES',
    'CostModel',
    'CutOptions',
    'Microbatch',
    'MicrobatchPlan',
    'PlanStats',
    'Rows',
    'Table',
    'check_choice',
    'check_count',
    'check_kind',
    'check_state',
    'checked_sizes',
    'checked_table',
    'cut_rows',
    'lower_bound',
    'mean_samples',
    'pack_lengths',
    'padded_widths',
    'plan_microbatches',
    'plan_rows',
    'token_budget',
]

# Loaded on first use. A training step only cuts the batch of its rank; samplers and sizing make whole plans.
_NAMES_OF_PLANS = ('Microbatch', 'MicrobatchPlan', 'PlanStats', 'lower_bound', 'plan_microbatches', 'plan_rows')

__getattr__, __dir__ = on_first_use(__name__, dict.fromkeys(_NAMES_OF_PLANS, 'plan'))
