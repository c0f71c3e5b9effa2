# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rules that a reader can rely on: a name is defined in one place, and docs and the Makefile name what exists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.support.launch import ROOT

PACKAGE = ROOT / 'composer_tokacc'
IN_MANY_MODULES = {'all', 'log'}
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


def words_of_files(file_name, page):
    """Returns the words of the files that a page may mean by a name such as ``step.py`` or ``checks/step.py``."""
    words = set()
    for folder in (ROOT, PACKAGE, page.parent):
        path = folder / file_name
        if path.is_file():
            words.update(re.findall(r'\w+', path.read_text()))
    return words


def test_names_are_in_the_files_of_the_docs():
    """Pages write "`Piece.fits` and `Piece.cut` of `data_spec/pieces.py`"."""
    names_in_a_file = re.compile(r'(`[\w.]+`(?:(?:,| and|, and) `[\w.]+`)*) of `([\w/]+\.py)`')
    pages = [ROOT / 'CONTRIBUTING.md', *ROOT.glob('docs/**/*.md'), *PACKAGE.glob('*/README.md')]
    num_found = 0
    for page in pages:
        text = ' '.join(page.read_text().split())
        for match in names_in_a_file.finditer(text):
            names, file_name = match.groups()
            missing = set(re.findall(r'\w+', names)) - words_of_files(file_name, page)
            assert not missing, f'{page}: {match.group()}'
            num_found += 1
    assert num_found


def test_calls_are_in_the_files_of_the_way_of_a_batch():
    """The list of calls in docs/architecture.md has lines such as "check_plans                   plan_agreement.py"."""
    page = ROOT / 'docs/architecture.md'
    _, _, section = page.read_text().partition('## The way of a batch')
    _, calls, *_ = section.split('```')
    # A line may begin with the name of a stage. Text without a file right after the call is a remark.
    call_and_files = re.compile(r'^[a-z]* +(\S.*?) {2,}([\w/]+\.py(?:, [\w/]+\.py)*)', re.MULTILINE)
    num_found = 0
    for match in call_and_files.finditer(calls):
        call, files = match.groups()
        words = set()
        for file_name in files.split(', '):
            words |= words_of_files(file_name, page)
        missing = set(re.findall(r'\w+', call)) - words
        assert not missing, match.group()
        num_found += 1
    assert num_found > 30
