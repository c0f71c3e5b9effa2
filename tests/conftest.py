# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Hypothesis draws the same examples in every run, so that a failure is of the change at hand.

HYPOTHESIS_PROFILE=random draws others each time, to search for what nobody has thought of.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile('steady', derandomize=True)
settings.register_profile('random', derandomize=False)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'steady'))
