# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The names that users call stay as they are, or are changed on purpose."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import composer_tokacc
from tests.public_api import surface

RECORDED = Path(__file__).with_name('public_api.txt')


def test_public_api_matches_the_file():
    difference = difflib.unified_diff(
        RECORDED.read_text().splitlines(),
        surface().splitlines(),
        'tests/public_api.txt',
        'the package',
        lineterm='',
        n=1,
    )
    text = '\n'.join(difference)
    assert not text, f'{text}\n\nIf meant: python -m tests.public_api > tests/public_api.txt (CONTRIBUTING.md)'


def test_every_public_name_is_listed():
    lines = RECORDED.read_text().split('\n\n')[0].splitlines()
    names = {re.match(r'(class )?(\w*)', line)[2] for line in lines}
    assert set(composer_tokacc.__all__) <= names
