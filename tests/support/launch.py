# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs a script on several ranks under the real composer launcher (gloo, CPU)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def launch(arguments: Sequence[str], *, ranks: int, timeout: float = 540) -> subprocess.CompletedProcess:
    """``composer -n RANKS arguments``, from the repository's root."""
    environment = {
        **os.environ,
        'OMP_NUM_THREADS': '1',
        'PYTHONPATH': f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}',
    }
    composer = Path(sys.executable).with_name('composer')
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(composer),
            '-n',
            str(ranks),
            '--stdout',
            f'{folder}/rank{{rank}}.out',
            '--stderr',
            f'{folder}/rank{{rank}}.err',
            *arguments,
        ]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
        for path in sorted(Path(folder).iterdir()):
            text = f'\n--- {path.name}\n{path.read_text()}'
            if path.suffix == '.out':
                done.stdout += text
            else:
                done.stderr += text
    return done


def launch_json(script: str, *arguments: str, ranks: int) -> dict[str, Any]:
    """Runs a script that writes its findings as JSON to the path in its last argument, from rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / 'result.json'
        done = launch([script, *arguments, str(result)], ranks=ranks)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
        return json.loads(result.read_text())
