# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which import loads what, each in a fresh process with the packages as they are installed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest

import composer_tokacc
from tests.support.launch import ROOT

BELOW = {'data', 'sizing', 'programs', 'train', 'size', 'look', 'verify', 'export'}
"""Rooms and programs under the line of the plugin."""
PLUGIN = sorted(set(composer_tokacc.__all__) - {'SizingReport', 'suggest_microbatching', 'verify_invariance'})


def loaded(statement: str) -> set[str]:
    """Modules that a fresh interpreter holds after a statement, beyond those of a bare one."""
    done = subprocess.run(
        [sys.executable, '-c', f'import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))'],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def rooms(modules: set[str]) -> set[str]:
    return {name.split('.')[1] for name in modules if name.startswith('composer_tokacc.')}


def test_the_package_alone_loads_nothing_of_the_hosts():
    modules = loaded('import composer_tokacc')
    assert rooms(modules) == {'faces'}
    assert not modules & {'torch', 'composer', 'transformers', 'numpy'}


def test_the_planner_loads_neither_torch_nor_composer():
    modules = loaded('from composer_tokacc import plan_microbatches\nimport composer_tokacc.planning')
    assert rooms(modules) == {'faces', 'planning', 'refusals'}
    assert not modules & {'torch', 'composer', 'transformers'}


UNNEEDED = {
    'RegroupingBatchSampler': {'algorithm', 'checks', 'data_spec', *BELOW},
    'TokenAccumulation': {'sampling', *BELOW},
    'suggest_microbatching': {'algorithm', 'checks', 'data_spec', 'data', 'programs'},
    ', '.join(PLUGIN): BELOW,
}
"""Rooms that an import of these names must not load."""
# The hosts take seconds to load: they are loaded once, and each statement runs in a process that is forked from there.
FORKS = """
import json, os, sys
import composer, transformers
for statement in json.loads(sys.argv[1]):
    if os.fork() == 0:
        exec(statement)
        print(json.dumps(sorted(sys.modules)), flush=True)
        os._exit(0)
    os.wait()
"""


def test_names_load_no_unneeded_room():
    statements = [f'from composer_tokacc import {names}' for names in UNNEEDED]
    command = [sys.executable, '-c', FORKS, json.dumps(statements)]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()[-len(UNNEEDED) :]
    for (names, unneeded), line in zip(UNNEEDED.items(), lines, strict=True):
        found = rooms(set(json.loads(line)))
        assert found - {'faces'}, names
        assert not found & unneeded, names


NEEDS_COMPOSER = {'TokenAccumulation', 'TokenMonitor', 'SkipReadBatches', 'SizingReport', 'suggest_microbatching'}
REFUSED = ('composer', 'transformers', 'numba', 'scipy', 'filelock', 'yaml', 'psutil', 'PIL', 'omegaconf', 'tqdm')


def test_the_engine_needs_neither_composer_nor_anything_else_but_torch_and_numpy():
    names = sorted(set(composer_tokacc.__all__) - NEEDS_COMPOSER)
    modules = loaded(
        'from importlib.abc import MetaPathFinder\n'
        'class Refuse(MetaPathFinder):\n'
        '    def find_spec(self, name, path=None, target=None):\n'
        f'        if name.split(".")[0] in {REFUSED}: raise ModuleNotFoundError(name)\n'
        'sys.meta_path.insert(0, Refuse())\n'
        f'from composer_tokacc import {", ".join(names)}\n'
        'import composer_tokacc.data_spec.split, composer_tokacc.weights, composer_tokacc.sampling\n'
        'lengths = [9, 2, 7, 3, 3, 8]\n'
        'plan = plan_microbatches(lengths, max_tokens=9, num_ranks=2)\n'
        'assert sorted(i for rank in plan.ranks for one in rank for i in one.indices) == [0, 1, 2, 3, 4, 5]'
    )
    assert {'sampling', 'layout', 'data_spec', 'checks', 'invariance', 'algorithm'} <= rooms(modules)
    assert not modules & set(REFUSED)


def test_the_structure_of_a_model_is_known_without_the_sizing_helper():
    assert rooms(loaded('import composer_tokacc.model_structure')) == {'faces', 'model_structure'}


ORDER = (
    'faces',
    'refusals',
    'compat',
    'model_structure',
    'random_state',
    'batch',
    'collectives',
    'repeated_samples',
    'plan_agreement',
    'planning',
    'layout',
    'counting',
    'weights',
    'labelled',
    'label_selector',
    'row_counts',
    'checks',
    'sampling',
    'data_spec',
    'algorithm',
    'monitor',
    # The application: what a run needs besides.
    'step_watch',
    'isolation',
    'invariance',
    'cache',
    'data',
    'sizing',
    'programs',
    'size',
    'look',
    'export',
    'pytest_plugin',
    'verify',
    'train',
    'examples',
)
"""Rooms, from the ground up: each may import those before it."""


def imported_rooms(path):
    """Rooms of ours that a module imports anywhere, for a type checker alone included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('composer_tokacc.'):
            yield (node.module or '').split('.')[1]


@pytest.mark.parametrize('room', ORDER)
def test_rooms_import_downwards(room):
    base = ROOT / 'composer_tokacc' / room
    below = set(ORDER[: ORDER.index(room) + 1])
    for path in base.glob('*.py') if base.is_dir() else [base.with_suffix('.py')]:
        assert set(imported_rooms(path)) <= below, path


def test_every_room_stands_in_the_order():
    rooms = {path.stem for path in (ROOT / 'composer_tokacc').iterdir() if path.suffix == '.py' or path.is_dir()}
    assert rooms - set(ORDER) <= {'__init__', '__pycache__', 'py'}


def test_no_modules_import_each_other_in_a_circle():
    """Imports within functions, and for a type checker alone, count as well."""
    paths = (ROOT / 'composer_tokacc').rglob('*.py')
    modules = {'.'.join(p.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__'): p for p in paths}
    del modules['composer_tokacc']  # the package's own face names everything
    imports: dict[str, set[str]] = {}
    for module, path in modules.items():
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = [(str(node.module), f'{node.module}.{alias.name}') for node in nodes for alias in node.names]
        imports[module] = {name if name in modules else face for face, name in names} - {module}
    while free := [module for module, found in imports.items() if not found & imports.keys()]:
        for module in free:
            del imports[module]
    assert not {module: found & imports.keys() for module, found in imports.items()}


def test_every_public_name_is_found_listed_and_typed():
    for name in composer_tokacc.__all__:
        assert getattr(composer_tokacc, name).__name__ == name
    assert set(composer_tokacc.__all__) <= set(dir(composer_tokacc))
    with pytest.raises(AttributeError, match="no attribute 'token_dataspec'"):
        _ = composer_tokacc.token_dataspec
    # What editors and pyright read must be what is loaded.
    tree = ast.parse((ROOT / 'composer_tokacc' / '__init__.py').read_text())
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('composer_tokacc.')
        for alias in node.names
        if alias.name != 'on_first_use'
    }
    assert typed == {name: f'composer_tokacc.{room}' for name, room in composer_tokacc._ROOMS.items()}
    assert set(typed) == set(composer_tokacc.__all__)
