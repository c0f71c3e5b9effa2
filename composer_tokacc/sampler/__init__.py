# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""RegroupingBatchSampler: which rank computes which samples of a global batch, planned from a length table."""

from composer_tokacc.sampler.regrouping_sampler import PlannedBatch, RegroupingBatchSampler

__all__ = ['PlannedBatch', 'RegroupingBatchSampler']
