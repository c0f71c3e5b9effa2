# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The same plan on every rank, in every process, with and without numba."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import composer_tokacc.planning

PACKAGE = Path(composer_tokacc.planning.__file__).parent

SCRIPT = """
import sys, types
from pathlib import Path
without_numba, package = sys.argv[1] == 'without', Path(sys.argv[2])
if without_numba:
    sys.modules['numba'] = None
parent = types.ModuleType('composer_tokacc')  # the planner alone: it must not need the rest of the package
parent.__path__ = [str(package.parent)]
sys.modules['composer_tokacc'] = parent
import numpy as np
from composer_tokacc.planning import CostModel, cut, cut_in_order, plan_microbatches
from composer_tokacc.planning.compiled import HAS_NUMBA
assert HAS_NUMBA != without_numba
rng = np.random.default_rng(7)
for trial in range(12):
    n = int(rng.integers(1, 90))
    lengths = np.clip(rng.lognormal(5, rng.uniform(0, 1.2), n), 1, 4096).astype(int)
    images = rng.integers(0, 3, n) * 64
    cap = int(lengths.max() * rng.uniform(0.8, 6))
    cost = CostModel(quadratic=3000.0, vision_per_token=0.37, launch=float(rng.uniform(0, 90)))
    for objective in ('ddp', 'fsdp'):
        print(plan_microbatches(lengths, num_ranks=4, max_tokens=cap, image_tokens=images, max_image_tokens=400,
                                objective=objective, cost=cost))
    print(cut(lengths, cap, cost=cost), cut_in_order(lengths, cap, cost=cost))
    print(cut(lengths, 10**6, num_microbatches=5), cut_in_order(lengths, 10**6, num_microbatches=5))
assert not {'torch', 'composer'} & set(sys.modules)
"""


def _digest(numba: str, hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, '-c', SCRIPT, numba, str(PACKAGE)],
        env={**os.environ, 'PYTHONHASHSEED': hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1000
    return hashlib.sha256(done.stdout.encode()).hexdigest()


def test_hash_seed_does_not_matter_nor_does_numba():
    plain = _digest('without', '0')
    assert _digest('without', '12345') == plain
    pytest.importorskip('numba')
    assert _digest('with', '1') == plain, 'compiled and interpreted plans differ'


def test_planner_imports_neither_torch_nor_composer():
    for file in PACKAGE.glob('*.py'):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ''] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split('.')[0] not in ('torch', 'composer'), f'{file.name} imports {name}'
                assert not name.startswith('composer_tokacc') or name.startswith('composer_tokacc.planning')
