# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Logs how a run goes: padding, balance of the ranks, speed, and the loss of each source of data.

``TokenMonitor`` counts each step on every rank, and gathers the counts of the ranks. A ``SourceLedger`` sums up rows by
their source. ``GradientNorm`` measures the gradient before it is clipped.
"""

from composer_tokacc.monitor.token_monitor import Flops, TokenMonitor

__all__ = ['Flops', 'TokenMonitor']
