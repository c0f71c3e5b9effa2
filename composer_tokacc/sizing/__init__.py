# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The sizing helper: how large may a microbatch be, and what is gained?"""

from composer_tokacc.sizing.report import SizingReport
from composer_tokacc.sizing.suggestion import suggest_microbatching

__all__ = ['SizingReport', 'suggest_microbatching']
