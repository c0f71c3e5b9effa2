# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Imports each module of the benchmarks, because most of them are not run by tests."""

from __future__ import annotations

import importlib

import pytest

from tests.support.launch import ROOT

PATHS = [path for path in (ROOT / 'benchmarks').rglob('*.py') if path.stem != '__init__']
MODULES = sorted('.'.join(path.relative_to(ROOT).with_suffix('').parts) for path in PATHS)


@pytest.mark.parametrize('name', MODULES)
def test_benchmark_can_be_imported(name):
    importlib.import_module(name)
