# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The user's files: formats, conversations, media, lengths, collator, shards."""

from composer_tokacc.data.collator import VisionLanguageCollator
from composer_tokacc.data.conversation import ConversationEncoder
from composer_tokacc.data.formats import BadSampleError
from composer_tokacc.data.hub import ask_hub
from composer_tokacc.data.lengths import LengthTable, image_token_ids, length_table
from composer_tokacc.data.llava import LlavaDataset
from composer_tokacc.data.media import VideoSampling
from composer_tokacc.data.processor import build_small_processor

__all__ = [
    'BadSampleError',
    'ConversationEncoder',
    'LengthTable',
    'LlavaDataset',
    'VideoSampling',
    'VisionLanguageCollator',
    'ask_hub',
    'build_small_processor',
    'image_token_ids',
    'length_table',
]
