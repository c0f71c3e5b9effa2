# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The house rules that a reader counts on: short modules, short functions, a name that stands in one place."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.support.launch import ROOT

PACKAGE = ROOT / 'composer_tokacc'
MODULES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob('*.py'))}
TREES = {name: ast.parse(text) for name, text in MODULES.items()}

EACH_HAS_ITS_OWN = {'__all__', '__getattr__', 'log'}


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> int:
    """Lines of a function without its docstring, comments and blank lines."""
    docstring = function.body[0] if ast.get_docstring(function) else None
    skipped = range(docstring.lineno, (docstring.end_lineno or 0) + 1) if docstring else ()
    lines = enumerate(text.splitlines()[function.lineno - 1 : function.end_lineno], function.lineno)
    return sum(
        bool(line.strip()) and not line.strip().startswith('#') for number, line in lines if number not in skipped
    )


def test_no_module_is_longer_than_450_lines():
    assert not {name: text.count('\n') for name, text in MODULES.items() if text.count('\n') > 450}


def test_no_function_has_more_than_40_lines_of_code():
    functions = {
        f'{name}:{node.name}': code_lines(node, MODULES[name])
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert not {name: lines for name, lines in functions.items() if lines > 40}


def test_no_class_or_constant_is_defined_in_two_modules():
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
