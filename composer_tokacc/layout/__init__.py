# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How the entries of a multimodal batch belong to its rows, family by family."""

from composer_tokacc.batch import Batch
from composer_tokacc.layout.facts import (
    ROW_KINDS,
    RowFacts,
    describe,
    describe_all,
    kinds_of,
    media_entries,
    widest_like,
)
from composer_tokacc.layout.families import FAMILIES, Entry, Family, Media
from composer_tokacc.layout.layout import BatchLayout
from composer_tokacc.layout.pre_split import PreSplitBatch, microbatches_of

__all__ = ['FAMILIES', 'ROW_KINDS', 'Batch', 'BatchLayout', 'Entry', 'Family', 'Media', 'PreSplitBatch', 'RowFacts',
           'describe', 'describe_all', 'kinds_of', 'media_entries', 'microbatches_of', 'widest_like']  # fmt: skip
