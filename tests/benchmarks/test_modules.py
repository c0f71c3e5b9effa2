# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Benchmarks run seldom: each module must still find what it takes of the package."""

from __future__ import annotations

import importlib

import pytest

from tests.support.launch import ROOT

MODULES = sorted(
    '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    for path in (ROOT / 'benchmarks').rglob('*.py')
    if path.stem != '__init__'
)


@pytest.mark.parametrize('name', MODULES)
def test_a_benchmark_can_be_imported(name):
    importlib.import_module(name)
