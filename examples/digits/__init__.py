# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The demo: a small LLaVA learns to read scanned digits, then answers questions about digits it has never seen."""

from examples.digits.dataset import DigitsDataset, build_digits_processor
from examples.digits.model import digits_model_config
from examples.digits.report import answer_and_draw

__all__ = ['DigitsDataset', 'answer_and_draw', 'build_digits_processor', 'digits_model_config']
