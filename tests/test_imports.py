# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which modules an import loads, each in a fresh process, and which rooms may import which."""

from __future__ import annotations

import ast
import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import composer
import pytest
import torch

import composer_tokacc
from tests.support.launch import ROOT, environment

APPLICATION = {'data', 'sizing', 'programs', 'train', 'size', 'look', 'verify', 'export'}
"""Rooms and programs that the plugin does not need."""
APPLICATION_NAMES = {'SizingReport', 'suggest_microbatching', 'verify_invariance'}
PLUGIN_NAMES = sorted(set(composer_tokacc.__all__) - APPLICATION_NAMES)


def loaded(*statements: str) -> list[set[str]]:
    """Returns the modules that a fresh interpreter has loaded after each of these statements."""
    lines = ['import json, sys']
    for statement in statements:
        lines += [statement, 'print(json.dumps(sorted(sys.modules)))']
    done = subprocess.run(
        [sys.executable, '-c', '\n'.join(lines)],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()[-len(statements) :]
    return [set(json.loads(line)) for line in printed]


def rooms(modules: set[str]) -> set[str]:
    """Returns the rooms of this package among some modules."""
    return {name.split('.')[1] for name in modules if name.startswith('composer_tokacc.')}


HOSTS = {'torch', 'composer', 'transformers', 'numpy'}


def test_planner_needs_only_numpy():
    package, planning, planner = loaded(
        'import composer_tokacc',
        'import composer_tokacc.planning',
        'from composer_tokacc import plan_microbatches',
    )
    assert rooms(package) == {'lazy'}
    assert not package & HOSTS
    for modules in (planning, planner):
        assert rooms(modules) == {'arguments', 'lazy', 'planning', 'refusals'}
        assert modules & HOSTS == {'numpy'}


def in_fork(function, *arguments):
    """Calls a function in a fork of this process. Torch and Composer, which take seconds, are loaded there already."""
    assert composer.__name__ in sys.modules
    with multiprocessing.get_context('fork').Pool(1) as forked:
        return forked.apply(function, arguments)


def forget(packages):
    """Lets the next import of these packages load them again."""
    for module in list(sys.modules):
        if module.partition('.')[0] in packages:
            del sys.modules[module]


def loaded_rooms(module, names=()):
    """Returns the rooms that these names of a module of the package load."""
    forget({'composer_tokacc'})
    imported = import_module(module)
    for name in names:
        getattr(imported, name)
    return rooms(set(sys.modules))


@pytest.mark.parametrize(
    ('names', 'unneeded'),
    [
        (['RegroupingBatchSampler'], {'algorithm', 'checks', 'data_spec', *APPLICATION}),
        (['TokenAccumulation'], {'sampling', *APPLICATION}),
        (['suggest_microbatching'], {'algorithm', 'checks', 'data_spec', 'data', 'programs'}),
        (PLUGIN_NAMES, APPLICATION),
    ],
    ids=['sampler', 'algorithm', 'sizing', 'plugin'],
)
def test_names_load_no_unneeded_room(names, unneeded):
    needed = in_fork(loaded_rooms, 'composer_tokacc', names)
    assert needed - {'lazy'}
    assert not needed & unneeded


def test_model_structure_needs_no_other_room():
    assert in_fork(loaded_rooms, 'composer_tokacc.model_structure') == {'lazy', 'model_structure'}


NEEDED_BY_TORCH = (
    'filelock',
    'fsspec',
    'functorch',
    'jinja2',
    'markupsafe',
    'mpmath',
    'networkx',
    'numpy',
    'numpy.libs',
    'nvidia',
    'sympy',
    'torch',
    'torchgen',
    'triton',
    'typing_extensions.py',
)
"""Torch, numpy, and the packages that pip installs with them."""
# A loader imports no FSDP, because that would double the number of modules that each of its workers imports. Then this
# imports all names that have nothing to do with a Composer run, runs the examples of their docstrings, and trains.
USE_WITHOUT_HOSTS = """
import doctest, runpy, sys, torch
import composer_tokacc
composer_tokacc.RegroupingDataLoader
assert 'torch.distributed.fsdp' not in sys.modules
import composer_tokacc.data_spec.split
needs_composer = {'TokenAccumulation', 'TokenMonitor', 'SkipReadBatches', 'SizingReport', 'suggest_microbatching'}
names = [name for name in composer_tokacc.__all__ if name not in needs_composer]
variables = {'torch': torch, **vars(composer_tokacc.planning)}
variables.update((name, getattr(composer_tokacc, name)) for name in names)
names.remove('verify_isolation')  # its example has a model of Transformers
for name in names:
    doctest.run_docstring_examples(variables[name], variables)
sys.path.insert(0, 'examples')
runpy.run_path('examples/plain_loop.py', run_name='__main__')
"""


def test_plain_loops_need_torch_and_numpy(tmp_path):
    """No other package can be found."""
    installed = Path(torch.__file__).parents[1]
    for name in NEEDED_BY_TORCH:
        if (installed / name).exists():
            (tmp_path / name).symlink_to(installed / name)
    done = subprocess.run(
        [sys.executable, '-S', '-c', USE_WITHOUT_HOSTS, str(tmp_path / 'last.pt')],
        cwd=ROOT,
        env={**environment(), 'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # A doctest that has failed would have printed something before.
    assert re.match(r'step 1: .*^step 8: ', done.stdout, re.DOTALL | re.MULTILINE), done.stdout


ORDER = (
    'lazy',
    'refusals',
    'arguments',
    'compat',
    'graph',
    'model_structure',
    'random_state',
    'batch',
    'collectives',
    'repeated_samples',
    'plan_agreement',
    'planning',
    'counting',
    'layout',
    'weights',
    'labelled',
    'row_counts',
    'checks',
    'sampling',
    'data_spec',
    'algorithm',
    'monitor',
    # The application
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


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts).removesuffix('.__init__')


MODULES = {module_name(path): path for path in (ROOT / 'composer_tokacc').rglob('*.py')}


@functools.cache
def imported_modules(path):
    """Returns our modules that a file imports from, also within functions and only for a type checker."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                # A name may itself be a module of the package that it is imported from.
                full_name = f'{node.module}.{alias.name}'
                imported.add(full_name if full_name in MODULES else node.module)
    return imported & MODULES.keys()


@pytest.mark.parametrize('room', ORDER)
def test_rooms_import_downwards(room):
    allowed = set(ORDER[: ORDER.index(room) + 1])
    for module, path in MODULES.items():
        if rooms({module}) == {room}:
            assert rooms(imported_modules(path)) <= allowed, path


def test_order_names_every_room():
    assert rooms(set(MODULES)) == set(ORDER)


def test_imports_have_no_circle():
    imports = {}
    for module, path in MODULES.items():
        if module != 'composer_tokacc':  # its `__init__` names everything
            imports[module] = imported_modules(path) - {module}
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
    expected_modules = {name: f'composer_tokacc.{module}' for name, module in composer_tokacc._MODULES.items()}
    assert module_of_name == expected_modules
    assert set(module_of_name) == set(composer_tokacc.__all__)
