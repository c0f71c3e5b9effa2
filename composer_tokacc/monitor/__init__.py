# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a run is watched by: padding, balance and speed of each step, and what each source of data gave to it."""

from composer_tokacc.monitor.token_monitor import Flops, TokenMonitor

__all__ = ['Flops', 'TokenMonitor']
