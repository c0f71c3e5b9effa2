# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Reads the data of the user: files, conversations, media, lengths of samples, batches, shards."""

from composer_tokacc.data.collator import VisionLanguageCollator
from composer_tokacc.data.conversation import ConversationEncoder
from composer_tokacc.data.hub import ask_hub
from composer_tokacc.data.identity import (
    identify_data,
    identify_processor,
    identify_vocabulary,
)
from composer_tokacc.data.lengths import (
    TABLE_COLUMNS,
    LengthTable,
    length_table,
)
from composer_tokacc.data.llava import LlavaDataset
from composer_tokacc.data.processor import build_small_processor
from composer_tokacc.data.records import BadSampleError
from composer_tokacc.data.sizes import (
    count_patches,
    image_token_ids,
    patch_size_of,
)
from composer_tokacc.data.videos import VideoSampling

__all__ = [
    'TABLE_COLUMNS',
    'BadSampleError',
    'ConversationEncoder',
    'LengthTable',
    'LlavaDataset',
    'VideoSampling',
    'VisionLanguageCollator',
    'ask_hub',
    'build_small_processor',
    'count_patches',
    'identify_data',
    'identify_processor',
    'identify_vocabulary',
    'image_token_ids',
    'length_table',
    'patch_size_of',
]
