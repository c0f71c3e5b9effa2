# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The same plan on every rank and in every process, also if the cache of compiled code is damaged or missing."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import composer_tokacc

PACKAGE = Path(composer_tokacc.__file__).parent

# Each script runs in a new process.
PLANS = """
import numpy as np
from composer_tokacc.planning import CostModel, CutOptions, cut_rows, plan_microbatches
rng = np.random.default_rng(7)
for trial in range(12):
    num_samples = int(rng.integers(1, 90))
    drawn = rng.lognormal(5, rng.uniform(0, 1.2), num_samples)
    lengths = np.clip(drawn, 1, 4096).astype(int)
    images = rng.integers(0, 3, num_samples) * 64
    max_tokens = int(lengths.max() * rng.uniform(0.8, 6))
    cost = CostModel(quadratic=3000.0, vision_per_token=0.37, launch=float(rng.uniform(0, 90)))
    for objective in ('ddp', 'fsdp'):
        print(
            plan_microbatches(
                lengths,
                num_ranks=4,
                max_tokens=max_tokens,
                image_tokens=images,
                max_image_tokens=400,
                objective=objective,
                cost=cost,
            )
        )
    for regroup in (True, False):
        print(cut_rows(lengths, CutOptions(max_tokens=max_tokens, cost=cost, regroup=regroup)))
"""
# Prints a cut, and the class of the cache of its compiled code.
ONE_CUT = """
from composer_tokacc.planning import CutOptions, cut_rows, cuts
print(cut_rows([7, 2, 8, 2, 2], CutOptions(max_tokens=16)), end=' ')
print(type(getattr(cuts.least_padded_cut, '_cache', None)).__name__)
"""
CUT = '[[0, 2], [1, 3, 4]]'
LEAST_PADDED_CUTS = """
import numpy as np
from composer_tokacc.planning import CutOptions, Rows
from composer_tokacc.planning.cuts import least_padded_cuts
rng = np.random.default_rng(7)
for trial in range(4000):
    rows = Rows(rng.integers(1, 60, 60), CutOptions(max_tokens=int(rng.integers(60, 400))))
    print([bounds.tolist() for bounds in least_padded_cuts(rows.by_length())])
"""


def run_script(script: str, root: Path = PACKAGE.parent, **variables: str) -> str:
    """Returns what a script prints in a new process, which imports the package in `root`."""
    environment = {'PYTHONPATH': str(root), **variables}
    for key, value in os.environ.items():
        if not key.startswith('NUMBA_'):
            environment.setdefault(key, value)
    process = subprocess.run(
        [sys.executable, '-c', script],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
def test_hash_seed_and_compilation_change_nothing():
    """An index out of bounds raises in interpreted code. Compiled code would read other memory."""
    compiled = run_script(PLANS, PYTHONHASHSEED='1')
    interpreted = run_script(PLANS, PYTHONHASHSEED='2', NUMBA_DISABLE_JIT='1')

    assert len(compiled) > 1000
    is_same = compiled == interpreted  # by itself, so that pytest does not print a long comparison
    assert is_same, 'another plan'


@pytest.mark.slow
def test_processor_changes_nothing():
    """Numpy rounds some functions differently if the processor has AVX512. On others both runs are the same."""
    features = 'AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL'

    cuts = run_script(LEAST_PADDED_CUTS)
    cuts_without_features = run_script(LEAST_PADDED_CUTS, NPY_DISABLE_CPU_FEATURES=features)

    is_same = cuts == cuts_without_features
    assert is_same, 'other cuts'


@pytest.fixture
def installed(tmp_path) -> Path:
    """Returns the folder of a copy of the planner. Nothing was compiled there yet."""
    package = tmp_path / 'composer_tokacc'
    without_cache = shutil.ignore_patterns('__pycache__')
    shutil.copytree(PACKAGE / 'planning', package / 'planning', ignore=without_cache)
    shutil.copy(PACKAGE / 'refusals.py', package)
    (package / '__init__.py').touch()
    return tmp_path


def cache_of(installed: Path) -> Path:
    """Returns the folder into which Python and numba write compiled code."""
    return installed / 'composer_tokacc' / 'planning' / '__pycache__'


@pytest.mark.slow
def test_no_folder_can_be_written(installed):
    """Neither the folder of the package nor the user's. Files take the place of folders, which also stops root."""
    blocked = installed / 'blocked'
    blocked.touch()
    cache_of(installed).touch()

    printed = run_script(ONE_CUT, installed, HOME=str(blocked), XDG_CACHE_HOME=str(blocked))

    assert printed == f'{CUT} NullCache\n'


@pytest.mark.slow
def test_disk_is_full(installed):
    """Files can be made, but nothing can be written into them."""
    on_full_disk = 'import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))' + ONE_CUT

    printed = run_script(on_full_disk, installed, PYTHONDONTWRITEBYTECODE='1')

    assert printed.startswith(CUT)


@pytest.mark.slow
def test_damaged_cache_is_compiled_again(installed):
    """Numba keeps the code and an index. The first run writes them."""
    printed = run_script(ONE_CUT, installed)
    assert printed.startswith(CUT)
    files = sorted(cache_of(installed).glob('cuts.least_padded_cut*.nb?'))
    assert [file.suffix for file in files] == ['.nbc', '.nbi']

    for file in files:
        file.write_bytes(b'damaged')
        printed = run_script(ONE_CUT, installed)
        assert printed.startswith(CUT), file


def test_numba_that_does_not_fit(monkeypatch):
    """Numba raises ImportError if it does not fit the release of numpy, as this module without any name does."""
    monkeypatch.setitem(sys.modules, 'numba', ModuleType('numba'))

    names = runpy.run_path(str(PACKAGE / 'planning' / 'compiled.py'))

    compiled = names['compiled']
    assert compiled(max) is max
