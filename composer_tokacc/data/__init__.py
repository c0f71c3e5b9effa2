# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Datasets, collators and small processors."""

from composer_tokacc.data.collator import VisionLanguageCollator
from composer_tokacc.data.digits import DigitsDataset, build_digits_processor

__all__ = ['DigitsDataset', 'VisionLanguageCollator', 'build_digits_processor']
