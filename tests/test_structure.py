# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rules that a reader can rely on: a name is defined in one place, and paths in the Makefile exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.support.launch import ROOT

PACKAGE = ROOT / 'composer_tokacc'
IN_MANY_MODULES = {'all', 'getattr', 'log'}
"""Names without their underscores that modules have in common."""


def names_defined_by(node):
    """Returns the names of a class, or of the variables of an assignment."""
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_names_are_defined_once():
    modules_of_name = defaultdict(set)
    for path in PACKAGE.rglob('*.py'):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            for name in names_defined_by(node):
                modules_of_name[name.strip('_')].add(path)
    repeated_names = {name for name, modules in modules_of_name.items() if len(modules) > 1}
    assert repeated_names <= IN_MANY_MODULES


def test_paths_of_the_makefile_exist():
    paths = set(re.findall(r'tests/[\w/]+(?:\.py)?', (ROOT / 'Makefile').read_text()))
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
