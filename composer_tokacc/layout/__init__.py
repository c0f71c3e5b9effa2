# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which parts of each tensor of a multimodal batch belong to which row, family by family."""

from composer_tokacc.batch import Batch
from composer_tokacc.layout.facts import RowFacts, describe, describe_all
from composer_tokacc.layout.families import FAMILIES, Family, Media
from composer_tokacc.layout.layout import BatchLayout, media_entries
from composer_tokacc.layout.pre_split import PreSplitBatch, microbatches_of
from composer_tokacc.layout.tensors import Entry

__all__ = [
    'FAMILIES',
    'Batch',
    'BatchLayout',
    'Entry',
    'Family',
    'Media',
    'PreSplitBatch',
    'RowFacts',
    'describe',
    'describe_all',
    'media_entries',
    'microbatches_of',
]
