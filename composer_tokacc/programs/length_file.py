# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A table of lengths from a CSV file, for sizing a run whose data is elsewhere, and samples that stand for its own."""

from __future__ import annotations

import csv
import gzip
from typing import Any

import numpy as np
from PIL import Image

from composer_tokacc.data import LengthTable
from composer_tokacc.programs.models import tokenizer_of
from composer_tokacc.programs.schema import ConfigError

__all__ = ['StandIns', 'read_lengths']

_COLUMNS = {'tokens': 'lengths', 'image_tokens': 'image_tokens', 'loss_tokens': 'loss_tokens',
            'vision_patches': 'vision_patches'}  # fmt: skip
_SIDES = (336, 1344)
"""Pixels of a small and a large image, which differ in tokens wherever the size decides."""


def read_lengths(path: str) -> LengthTable:
    """Reads one line a sample: ``tokens``, and perhaps ``image_tokens``, ``loss_tokens``, ``vision_patches``.

    Raises:
        ConfigError: For a file that cannot be read, an unknown column, or a line that is no sample.
    """
    try:
        with gzip.open(path, 'rt') if path.endswith('.gz') else open(path, encoding='utf-8-sig') as file:
            lines = csv.reader(file)
            names = [name.strip() for name in next(lines, [])]
            if 'tokens' not in names or not set(names) <= _COLUMNS.keys():
                raise ConfigError(
                    f'`lengths` must have the column tokens, and perhaps {", ".join(list(_COLUMNS)[1:])}, got: '
                    f'{", ".join(names)} in {path}. Rename or remove the others'
                )
            rows = [_row(path, lines.line_num, line, len(names)) for line in lines if line]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f'`lengths` must be a CSV file, plain or .gz, got: {path} ({error})') from error
    if not rows:
        raise ConfigError(f'`lengths` must hold at least one sample, got: none in {path}')
    columns = dict(zip((_COLUMNS[name] for name in names), np.array(rows, dtype=np.int32).T.copy(), strict=True))
    for name in _COLUMNS.values():
        columns.setdefault(name, np.zeros(len(rows), dtype=np.int32))
    return LengthTable(**columns)


def _row(path: str, number: int, line: list[str], num_columns: int) -> list[int]:
    try:
        values = [int(value) for value in line]
        if len(values) != num_columns or min(values) < 0 or max(values) > 2**31 - 1:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f'`lengths` must have {num_columns} whole numbers a line, got: {",".join(line)} (line {number} of {path})'
        ) from None
    return values


class StandIns:
    """Samples for the memory model, which must see no more than an image or none, small or large.

    Args:
        table: Of the run's data.
        processor: Of the run.
    """

    def __init__(self, table: LengthTable, processor: Any) -> None:
        self.image_tokens = table.image_tokens
        self.processor = processor

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A sample with an image where the table has one; the large image is that of the row with most."""
        images, content = [], [{'type': 'text', 'text': 'a'}]
        if self.image_tokens[index]:
            side = _SIDES[self.image_tokens[index] == self.image_tokens.max()]
            images, content = [Image.new('RGB', (side, side))], [{'type': 'image'}, *content]
        text = self.processor.apply_chat_template([{'role': 'user', 'content': content}], tokenize=False)
        made = self.processor if images else tokenizer_of(self.processor)
        sample = dict(made(text=text, return_tensors='pt', **({'images': images} if images else {})))
        return {**sample, 'labels': sample['input_ids'].clone(), 'num_images': [len(images)]}
