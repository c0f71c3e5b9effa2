# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The machine that a figure was measured on, and how a benchmark starts its module on several ranks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist, get_device

from benchmarks.record import ROOT

# A Trainer leaves these in the environment of a process that has trained.
RANK_VARIABLES = {
    'RANK',
    'WORLD_SIZE',
    'LOCAL_RANK',
    'LOCAL_WORLD_SIZE',
    'NODE_RANK',
    'MASTER_ADDR',
}
COMPOSER = str(Path(sys.executable).with_name('composer'))
PACKAGES = ('mosaicml', 'torch', 'transformers', 'numpy', 'numba')


def machine() -> dict[str, str | int | float]:
    """Returns the processor, its load and the versions of the packages."""
    return {
        'processor': _processor(),
        'cores': os.cpu_count() or 0,
        'load_average': round(os.getloadavg()[0], 2),
        'python': platform.python_version(),
        **versions(PACKAGES),
    }


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    installed = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def environment_of_no_rank() -> dict[str, str]:
    """Returns the environment of this process without the variables of a rank."""
    return {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}


def environment(**variables: str) -> dict[str, str]:
    """Returns an environment for ranks of one thread each, in which Python imports the modules of this checkout."""
    return {
        **environment_of_no_rank(),
        'OMP_NUM_THREADS': '1',
        'PYTHONPATH': str(ROOT),
        **variables,
    }


def on_ranks(ranks: int, module: str, *arguments: str) -> Any:
    """Runs a module under the composer launcher. Returns the JSON that it wrote to the path in its first argument."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'results.json'
        command = [
            COMPOSER,
            '-n',
            str(ranks),
            '-m',
            module,
            str(path),
            *arguments,
        ]
        subprocess.run(command, check=True, cwd=ROOT, env=environment())
        return json.loads(path.read_text())


def join_ranks() -> None:
    """Joins the ranks of this launch, with one thread each: more only slow down small models."""
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    dist.initialize_dist(get_device('cpu'))


def free_port() -> int:
    """Returns a port at which ranks can meet.

    Composer's launcher takes a free port from the system. But the system may give the same port to another run before
    rank 0 has loaded torch and listens there. So this port is outside the range that the system chooses from.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(('127.0.0.1', port))
            return port


def _processor() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith('model name'):
            return line.split(':', 1)[1].strip()
    return platform.machine()
