# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Types of objects that come from hosts (Composer, torch, Transformers) or from the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase, ProcessorMixin

Section = Mapping[str, Any]
"""A section of a YAML file, or a part of a checkpoint. Its values have the types that JSON knows."""
Row = dict[str, Any]
"""A sample as a dataset returns it: tensors as in a batch of one row, and lists of one entry."""
Processor = ProcessorMixin | PreTrainedTokenizerBase
"""Turns samples into tensors. The processor of a text model is only a tokenizer."""


class SampleDataset(Protocol):
    """A dataset that is read by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...
