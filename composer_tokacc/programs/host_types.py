# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Types of objects that come from hosts or from the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase, ProcessorMixin

Section = Mapping[str, Any]
"""A mapping of a YAML file, or a part of a checkpoint: values of JSON."""
Row = dict[str, Any]
"""A row as a dataset gives it: tensors of one row, and lists of one entry."""
Processor = ProcessorMixin | PreTrainedTokenizerBase
"""A text model has a tokenizer only."""


class SampleDataset(Protocol):
    """A dataset that is read by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...
