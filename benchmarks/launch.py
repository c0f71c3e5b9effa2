# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A benchmark's own module on several ranks, under the composer launcher."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import environment_of_no_rank
from benchmarks.record import ROOT

COMPOSER = str(Path(sys.executable).with_name('composer'))


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
