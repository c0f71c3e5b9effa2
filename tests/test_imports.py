# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which modules an import loads, each in a fresh process, and which rooms may import which."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

import composer_tokacc
from tests.support.launch import ROOT

APPLICATION = {'data', 'sizing', 'programs', 'train', 'size', 'look', 'verify', 'export'}
"""Rooms and programs that the plugin does not need."""
APPLICATION_NAMES = {'SizingReport', 'suggest_microbatching', 'verify_invariance'}
PLUGIN_NAMES = sorted(set(composer_tokacc.__all__) - APPLICATION_NAMES)


def loaded(statement: str) -> set[str]:
    """Returns the modules that a fresh interpreter has loaded after a statement."""
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
    """Returns the rooms of this package among some modules."""
    return {name.split('.')[1] for name in modules if name.startswith('composer_tokacc.')}


@pytest.mark.parametrize(
    ('statement', 'loaded_rooms', 'hosts'),
    [
        ('import composer_tokacc', {'lazy'}, set()),
        ('import composer_tokacc.planning', {'lazy', 'planning', 'refusals'}, {'numpy'}),
        ('from composer_tokacc import plan_microbatches', {'lazy', 'planning', 'refusals'}, {'numpy'}),
        ('import composer_tokacc.model_structure', {'lazy', 'model_structure'}, {'numpy', 'torch'}),
    ],
)
def test_loaded_rooms_and_hosts(statement, loaded_rooms, hosts):
    modules = loaded(statement)
    assert rooms(modules) == loaded_rooms
    assert modules & {'torch', 'composer', 'transformers', 'numpy'} <= hosts


UNNEEDED = {
    'RegroupingBatchSampler': {'algorithm', 'checks', 'data_spec', *APPLICATION},
    'TokenAccumulation': {'sampling', *APPLICATION},
    'suggest_microbatching': {'algorithm', 'checks', 'data_spec', 'data', 'programs'},
    ', '.join(PLUGIN_NAMES): APPLICATION,
}
"""Rooms that an import of these names must not load."""
# Composer and transformers take seconds to load, so they are loaded once. Each statement runs in a fork.
LOAD_IN_FORKS = """
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
    command = [sys.executable, '-c', LOAD_IN_FORKS, json.dumps(statements)]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()[-len(UNNEEDED) :]
    for (names, unneeded), line in zip(UNNEEDED.items(), lines, strict=True):
        loaded_rooms = rooms(set(json.loads(line)))
        assert loaded_rooms - {'lazy'}, names
        assert not loaded_rooms & unneeded, names


NEEDS_COMPOSER = {'TokenAccumulation', 'TokenMonitor', 'SkipReadBatches', 'SizingReport', 'suggest_microbatching'}
MISSING = ('composer', 'transformers', 'numba', 'scipy', 'filelock', 'yaml', 'psutil', 'PIL', 'omegaconf', 'tqdm')


def test_plain_loops_need_torch_and_numpy():
    """Everything that has nothing to do with a Composer run works without other packages."""
    names = sorted(set(composer_tokacc.__all__) - NEEDS_COMPOSER)
    modules = loaded(
        'from importlib.abc import MetaPathFinder\n'
        'class RefuseMissing(MetaPathFinder):\n'
        '    def find_spec(self, name, path=None, target=None):\n'
        f'        if name.split(".")[0] in {MISSING}: raise ModuleNotFoundError(name)\n'
        'sys.meta_path.insert(0, RefuseMissing())\n'
        f'from composer_tokacc import {", ".join(names)}\n'
        'import composer_tokacc.data_spec.split, composer_tokacc.weights, composer_tokacc.sampling\n'
        'lengths = [9, 2, 7, 3, 3, 8]\n'
        'plan = plan_microbatches(lengths, max_tokens=9, num_ranks=2)\n'
        'indices = []\n'
        'for microbatches in plan.ranks:\n'
        '    for microbatch in microbatches:\n'
        '        indices += microbatch.indices\n'
        'assert sorted(indices) == [0, 1, 2, 3, 4, 5]'
    )
    assert {'sampling', 'layout', 'data_spec', 'checks', 'invariance', 'algorithm'} <= rooms(modules)
    assert not modules & set(MISSING)


ORDER = (
    'lazy',
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
    'row_counts',
    'checks',
    'sampling',
    'data_spec',
    'algorithm',
    'monitor',
    # The application: what a run needs in addition to the plugin.
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
"""Rooms from the bottom to the top. Each may import those before it."""


def imported_rooms(path):
    """Yields the rooms that a module imports, also within functions and only for a type checker."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('composer_tokacc.'):
            yield (node.module or '').split('.')[1]


@pytest.mark.parametrize('room', ORDER)
def test_rooms_import_downwards(room):
    folder = ROOT / 'composer_tokacc' / room
    paths = folder.glob('*.py') if folder.is_dir() else [folder.with_suffix('.py')]
    allowed = set(ORDER[: ORDER.index(room) + 1])
    for path in paths:
        assert set(imported_rooms(path)) <= allowed, path


def test_order_names_every_room():
    for path in (ROOT / 'composer_tokacc').iterdir():
        is_room = path.suffix == '.py' or path.is_dir()
        if is_room and path.stem not in ('__init__', '__pycache__'):
            assert path.stem in ORDER


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts).removesuffix('.__init__')


def imported_modules(path, modules):
    """Returns which of the modules a file imports from, also within functions and only for a type checker."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                # A name may itself be a module of the package that it is imported from.
                full_name = f'{node.module}.{alias.name}'
                imported.add(full_name if full_name in modules else node.module)
    return imported & modules


def test_imports_have_no_circle():
    path_of = {module_name(path): path for path in (ROOT / 'composer_tokacc').rglob('*.py')}
    del path_of['composer_tokacc']  # its `__init__` names everything
    imports = {module: imported_modules(path, path_of.keys()) - {module} for module, path in path_of.items()}
    TopologicalSorter(imports).prepare()  # raises CycleError


def test_public_names_are_listed_and_typed():
    for name in composer_tokacc.__all__:
        assert getattr(composer_tokacc, name).__name__ == name
    assert set(composer_tokacc.__all__) <= set(dir(composer_tokacc))
    with pytest.raises(AttributeError, match="no attribute 'token_dataspec'"):
        _ = composer_tokacc.token_dataspec
    # Editors and pyright read the imports under TYPE_CHECKING. They must be those that are made on first use.
    tree = ast.parse((ROOT / 'composer_tokacc' / '__init__.py').read_text())
    module_of_name = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('composer_tokacc.'):
            for alias in node.names:
                module_of_name[alias.name] = node.module
    del module_of_name['on_first_use']
    assert module_of_name == {name: f'composer_tokacc.{room}' for name, room in composer_tokacc._ROOMS.items()}
    assert set(module_of_name) == set(composer_tokacc.__all__)
