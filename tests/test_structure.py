# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rules of the house that a reader can rely on: a name is defined in one place, and named paths exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.support.launch import ROOT

PACKAGE = ROOT / 'composer_tokacc'
MODULES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob('*.py'))}
TREES = {name: ast.parse(text) for name, text in MODULES.items()}

EACH_HAS_ITS_OWN = {'__all__', '__getattr__', 'log'}


def test_names_are_defined_once():
    places = defaultdict(set)
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name.strip('_')].add(module)
            for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, 'target', None)]:
                if isinstance(target, ast.Name) and target.id not in EACH_HAS_ITS_OWN:
                    places[target.id.strip('_')].add(module)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_every_path_of_the_makefile_stands():
    named = set(re.findall(r'tests/[\w/]+(?:\.py)?', (ROOT / 'Makefile').read_text()))
    assert named
    assert not {path for path in named if not (ROOT / path).exists()}
