# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Token-budget microbatches: pure functions that cut and share a global batch. No Composer and no torch here."""

from composer_tokacc.planning.cuts import cut
from composer_tokacc.planning.plan import Microbatch, MicrobatchPlan, PlanStats, lower_bound, plan_microbatches
from composer_tokacc.planning.rows import CostModel, Rows

__all__ = ['CostModel', 'Microbatch', 'MicrobatchPlan', 'PlanStats', 'Rows', 'cut', 'lower_bound', 'plan_microbatches']
