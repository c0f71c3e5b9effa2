# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a figure was measured on, and a benchmark's own module on several ranks, under the composer launcher."""

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
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT

OF_A_RANK = {'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR'}
"""What a Trainer leaves in the environment of a process that has trained."""
COMPOSER = str(Path(sys.executable).with_name('composer'))
PACKAGES = ('mosaicml', 'torch', 'transformers', 'numpy', 'numba')


def machine() -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {'processor': _processor(), 'cores': os.cpu_count() or 0}
    found['load_average'] = round(os.getloadavg()[0], 2)
    found['python'] = platform.python_version()
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment_of_no_rank() -> dict[str, str]:
    """That of this process, for a launcher or a process alone."""
    return {key: value for key, value in os.environ.items() if key not in OF_A_RANK}


def environment(**more: str) -> dict[str, str]:
    """One thread a rank, and this checkout's own modules."""
    return {**environment_of_no_rank(), 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), **more}


def on_ranks(ranks: int, module: str, *arguments: str) -> Any:
    """Runs a module, whose first argument is the file for its JSON; gives what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / 'found.json'
        command = [COMPOSER, '-n', str(ranks), '-m', module, str(found), *arguments]
        subprocess.run(command, check=True, cwd=ROOT, env=environment())
        return json.loads(found.read_text())


def free_port() -> int:
    """A port for ranks to meet at.

    Not one that the system hands out, as Composer's launcher takes by itself: until rank 0 has loaded torch and listens
    there, the system may have handed it to a run beside this one.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(('127.0.0.1', port))
            return port


def _processor() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')), platform.machine())
