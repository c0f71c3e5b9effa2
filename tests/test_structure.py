# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rules that a reader can rely on: a name is defined in one place, and paths in the Makefile exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.support.launch import ROOT

PACKAGE = ROOT / 'composer_tokacc'
MODULES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob('*.py'))}
TREES = {name: ast.parse(text) for name, text in MODULES.items()}

IN_MANY_MODULES = {'__all__', '__getattr__', 'log'}


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
    for module, tree in TREES.items():
        for node in tree.body:
            for name in names_defined_by(node):
                modules_of_name[name.strip('_')].add(module)
    repeated = [name for name, modules in modules_of_name.items() if len(modules) > 1]
    assert set(repeated) <= {name.strip('_') for name in IN_MANY_MODULES}


def test_paths_of_the_makefile_exist():
    paths = set(re.findall(r'tests/[\w/]+(?:\.py)?', (ROOT / 'Makefile').read_text()))
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
