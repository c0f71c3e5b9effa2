# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Describes the machine that a figure was measured on, and runs a benchmark on several ranks."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cpuinfo
import torch
from composer.utils import dist, get_device

from benchmarks.record import ROOT, Row

# Composer's launcher sets these. A Trainer that runs without the launcher sets them too, and leaves them.
RANK_VARIABLES = {'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR'}
COMPOSER = str(Path(sys.executable).with_name('composer'))
PACKAGES = ('mosaicml', 'torch', 'transformers', 'numpy', 'numba')


def machine() -> Row:
    """Returns the processor, its load and the versions of the packages."""
    return {
        'processor': _processor(),
        'cores': os.cpu_count() or 0,
        'load_average': round(os.getloadavg()[0], 2),
        'python': platform.python_version(),
        **versions(PACKAGES),
    }


@functools.cache
def _processor() -> str:
    """Returns the name of the processor. Cached, because looking it up takes half a second."""
    return cpuinfo.get_cpu_info().get('brand_raw', platform.machine())


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    installed = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def environment_without_rank() -> dict[str, str]:
    """Returns the environment of this process without the variables of a rank. A new launch must not inherit them."""
    return {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}


def environment(**variables: str) -> dict[str, str]:
    """Returns the environment of a new process: one thread, and imports from this checkout."""
    return {**environment_without_rank(), 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), **variables}


def on_ranks(numbers_of_ranks: Sequence[int], module: str, **arguments: Any) -> list[Row]:
    """Calls `measure_on_ranks` of a module on each of these numbers of ranks. Returns what rank 0 returned each time.

    Arguments and rows travel as JSON. Composer's launcher starts :func:`main` in a process for each rank.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'rows.json'
        for ranks in numbers_of_ranks:
            launcher = [COMPOSER, '-n', str(ranks), '-m', 'benchmarks.machine']
            command = [*launcher, module, json.dumps(arguments), str(path)]
            subprocess.run(command, check=True, cwd=ROOT, env=environment())
            rows += json.loads(path.read_text())
    return rows


def main() -> None:
    """Runs on each rank for :func:`on_ranks`."""
    module, arguments, path = sys.argv[1:]
    join_ranks()
    rows = importlib.import_module(module).measure_on_ranks(**json.loads(arguments))
    if dist.get_global_rank() == 0:
        Path(path).write_text(json.dumps(rows))


def join_ranks() -> None:
    """Joins the ranks of this launch. Each gets one thread, because more threads slow down small models."""
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    dist.initialize_dist(get_device('cpu'))


if __name__ == '__main__':
    main()
