# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs Python in a new process that has loaded torch and Transformers already, which takes five seconds otherwise.

A server loads them once and is forked for each run. It has not loaded Composer or this package. So a run may check that
they are not imported, and it imports the files of this package as they are. The launcher of Composer runs in this way,
too. Its ranks are forked from it, see ``forking_launcher.py``, or new processes of Python, see ``launch_nodes()``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOADED = ['torch', 'transformers.models.llama.modeling_llama', 'transformers.trainer', 'torchmetrics']


def run_loaded(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], timeout: float = 540
) -> subprocess.CompletedProcess:
    """Runs ``python ARGUMENTS`` in a folder. Returns the output and the exit status, which the caller checks.

    Args:
        arguments: As Python takes them: ``FILE ...``, ``-m MODULE ...`` or ``-c CODE ...``.
        folder: The current folder of the run.
        environment: All variables of the run. Torch was loaded without them, so those that it reads when it is imported
            have no effect.
        timeout: Seconds after which the run is ended, and raises.
    """
    with tempfile.TemporaryDirectory() as outputs:
        stdout, stderr = Path(outputs, 'stdout'), Path(outputs, 'stderr')
        process = start_loaded(arguments, folder=folder, environment=environment, stdout=stdout, stderr=stderr)
        try:
            process.join(timeout)
            if process.exitcode is None:
                raise TimeoutError(f'python {arguments} took more than {timeout} s')
        finally:
            kill_loaded(process)
        return subprocess.CompletedProcess(arguments, process.exitcode, stdout.read_text(), stderr.read_text())


def start_loaded(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], stdout: Path, stderr: Path
) -> Any:
    """Starts ``python ARGUMENTS`` in a session of its own, so that it can be killed together with its children.

    See :func:`run_loaded`. Both outputs may be the same file. Returns a process of multiprocessing.
    """
    server = multiprocessing.get_context('forkserver')
    server.set_forkserver_preload(LOADED)
    files = (str(stdout), str(stderr))
    process = server.Process(target=_run, args=(list(arguments), str(folder), dict(environment), files))
    process.start()
    return process


def kill_loaded(process: Any) -> None:
    """Kills a process of :func:`start_loaded`, if it has not ended, and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not have begun its session yet. Then it has no children either
    process.join()


def _run(arguments: list[str], folder: str, environment: dict[str, str], files: tuple[str, str]) -> None:
    """Does in the forked process what Python does when it starts."""
    os.setsid()
    outputs = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in files]
    redirect_outputs(*outputs)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    paths = [path for path in environment.get('PYTHONPATH', '').split(os.pathsep) if path]
    sys.path[:0] = [folder, *paths]
    run_python(arguments)


def redirect_outputs(stdout: int, stderr: int) -> None:
    """Makes this process write to these files, which are given by their descriptors.

    Python's streams are opened again, because they keep whether one can seek in their first file. They stay open.
    """
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout = open(1, 'w', buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, 'w', buffering=1, closefd=False, errors='backslashreplace')  # noqa: SIM115


def run_python(arguments: list[str]) -> None:
    """Does what ``python ARGUMENTS`` does, in this process. Replaces the first folder of ``sys.path``."""
    option, *others = arguments
    if option == '-m':
        sys.argv = others
        sys.path[0] = os.getcwd()
        runpy.run_module(others[0], run_name='__main__', alter_sys=True)
    elif option == '-c':
        sys.argv = ['-c', *others[1:]]
        sys.path[0] = os.getcwd()
        exec(compile(others[0], '<string>', 'exec'), {'__name__': '__main__'})
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(option).resolve().parent)
        runpy.run_path(option, run_name='__main__')
