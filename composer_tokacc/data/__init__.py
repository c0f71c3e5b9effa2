# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Datasets, collators and small processors."""

from composer_tokacc.data.collator import VisionLanguageCollator
from composer_tokacc.data.conversation import ConversationEncoder
from examples.digits.dataset import DigitsDataset, build_digits_processor
from examples.digits.model import digits_model_config
from composer_tokacc.data.llava import LlavaDataset, conversation_texts
from composer_tokacc.data.processor import build_small_processor
from composer_tokacc.data.formats import BadSampleError

__all__ = [
    'BadSampleError',
    'ConversationEncoder',
    'DigitsDataset',
    'LlavaDataset',
    'VisionLanguageCollator',
    'build_digits_processor',
    'build_small_processor',
    'conversation_texts',
    'digits_model_config',
]
