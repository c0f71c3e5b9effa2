# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Composer's launcher with ranks that are forked from it. So they have loaded torch, Transformers and Composer already.

A new process of Python takes six seconds of processor time to import them. The arguments are those of ``composer``.

Forked ranks hash strings alike, so their sets have the same order. The ranks of a user do not, and code that depends on
this order may hang there. So the last of the ranks that wait for runs (``serve.py``) is a new process.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch
from composer.cli import launcher

from tests.support.loaded import redirect_outputs, run_python
from tests.support.lookups import shorten_lookups_and_waits


def start_rank(command: Sequence[str], **options: Any) -> ForkedRank | subprocess.Popen:
    """Starts a rank. Composer's launcher has set its environment, and calls this as ``subprocess.Popen``."""
    is_last = int(os.environ['RANK']) == int(os.environ['WORLD_SIZE']) - 1
    if is_last and 'tests.support.serve' in command:
        return subprocess.Popen(command, **options)
    return ForkedRank(command, **options)


class ForkedRank:
    """A rank, with what Composer's launcher uses of ``subprocess.Popen``."""

    def __init__(
        self, command: Sequence[str], *, stdout: IO | None = None, stderr: IO | None = None, text: bool = True
    ) -> None:
        python, *arguments = command
        assert python == sys.executable, command
        self.args = command
        self.stdout = stdout
        self.stderr = stderr
        # Starts its own workers as a new process would: `fork` is the default of Python on Linux.
        process = multiprocessing.get_context('fork').Process(target=_run_rank, args=(arguments, stdout, stderr))
        process.start()
        self._process = process
        self.pid = process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode


def _run_rank(arguments: list[str], stdout: IO | None, stderr: IO | None) -> None:
    """Does in the forked process what Python does when it starts and when it ends."""
    if stdout is not None and stderr is not None:  # None for the first rank, which writes where the launcher does
        redirect_outputs(stdout.fileno(), stderr.fileno())
    # What belongs to the launcher: its handlers of logging and of the exit, and its random numbers.
    logging.getLogger().handlers.clear()
    atexit._clear()
    random.seed()
    np.random.seed()
    torch.seed()
    if num_threads := os.environ.get('OMP_NUM_THREADS'):
        torch.set_num_threads(int(num_threads))  # torch reads the variable only when it is imported
    status = 0
    try:
        run_python(arguments)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())  # torch has set it, to begin each line with the rank
        status = 1
    finally:
        atexit._run_exitfuncs()
    sys.exit(status)


if __name__ == '__main__':
    shorten_lookups_and_waits()
    launcher.subprocess = SimpleNamespace(
        Popen=start_rank, STDOUT=subprocess.STDOUT, CalledProcessError=subprocess.CalledProcessError
    )
    sys.exit(launcher.main())
