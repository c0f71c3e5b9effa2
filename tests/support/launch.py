# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Starts ranks with the real composer launcher (gloo, CPU), for one run, or for many runs one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import COMPOSER, environment_without_rank
from tests.support.loaded import kill_loaded, run_loaded, start_loaded

ROOT = Path(__file__).resolve().parents[2]
FORKING_LAUNCHER = ['-m', 'tests.support.forking_launcher']
MOST_WAITING_RANKS = 4
"""Most ranks that a worker of pytest keeps waiting. A rank needs up to 1.8 GiB."""


def environment() -> dict[str, str]:
    """Returns the environment of a launch, in which the package and the tests can be imported."""
    return {
        **environment_without_rank(),
        'OMP_NUM_THREADS': '1',
        'PYTHONPATH': f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}',
        'MASTER_PORT': str(free_port()),
    }


def free_port() -> int:
    """Returns a port at which ranks can meet.

    Composer's launcher takes a free port from the system. But the system may give the same port to another run before
    rank 0 has loaded torch and listens there. So this port is outside the range that the system chooses from.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(('127.0.0.1', port))
            return port


def command(folder: str, arguments: Sequence[str], ranks: int) -> list[str]:
    """Returns ``composer -n RANKS arguments``, with ranks that are forked from the launcher.

    All ranks but the first write to files in the folder.
    """
    files = ['--stdout', f'{folder}/rank{{rank}}.out', '--stderr', f'{folder}/rank{{rank}}.err']
    return [*FORKING_LAUNCHER, '-n', str(ranks), *files, *arguments]


def launch(arguments: Sequence[str], *, ranks: int, timeout: float = 540) -> subprocess.CompletedProcess:
    """Runs ``composer -n RANKS arguments`` in the root of the repository.

    Returns:
        The output of all ranks, and the exit status, which the caller checks.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = run_loaded(command(folder, arguments, ranks), folder=ROOT, environment=environment(), timeout=timeout)
        for path in sorted(Path(folder).iterdir()):
            text = f'\n--- {path.name}\n{path.read_text()}'
            if path.suffix == '.out':
                done.stdout += text
            else:
                done.stderr += text
    return done


def launch_nodes(arguments: Sequence[str], *, nodes: int, ranks: int, timeout: float = 540) -> list[str]:
    """Runs a launcher for each node, all on this machine, each with this number of ranks.

    These ranks are new processes of Python, as those of a user are.

    Returns:
        The output of each node. All of them must succeed.
    """
    options = f'-n {ranks} --world_size {nodes * ranks} --master_addr 127.0.0.1 --master_port {free_port()}'
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for node in range(nodes):
            screen = Path(folder) / f'node{node}'
            process = start_loaded(
                [COMPOSER, *options.split(), '--node_rank', str(node), *arguments],
                folder=ROOT,
                environment=environment(),
                stdout=screen,
                stderr=screen,
            )
            started.append((process, screen))
        screens = []
        try:
            for process, screen in started:
                process.join(timeout)
                screens.append(screen.read_text())
                assert process.exitcode == 0, screens[-1][-6000:]
        finally:
            for process, _ in started:
                kill_loaded(process)
    return screens


_waiting: dict[int, _Ranks] = {}
"""Ranks that wait for a run, by the number of ranks of their launch. So the sum of the keys is how many ranks wait."""


def launch_json(script: str, *arguments: str, ranks: int) -> Any:
    """Calls the ``main`` of a script on several ranks. Returns the result of rank 0, in the form of JSON.

    The ranks wait for the next call afterwards, because starting them takes longer than most runs.
    """
    if ranks not in _waiting:
        while _waiting and sum(_waiting) + ranks > MOST_WAITING_RANKS:
            _waiting.pop(min(_waiting)).close()
        _waiting[ranks] = _Ranks(ranks)
    try:
        return _waiting[ranks].run(script, *arguments)
    except BaseException:
        _waiting.pop(ranks).close()
        raise


def launch_program(module: str, *arguments: str, ranks: int, folder: Path = ROOT) -> str:
    """Runs a program in a folder, on ranks that wait afterwards. It must succeed. Returns its output."""
    return launch_json('tests/ranks/program.py', str(folder), module, *arguments, ranks=ranks)


def close_ranks() -> None:
    """Ends all ranks that wait."""
    while _waiting:
        _, ranks = _waiting.popitem()
        ranks.close()


class _Ranks:
    """The ranks of one launch. Each of them is connected by a socket; see ``serve.py``."""

    def __init__(self, num_ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = self._folder.name
        output = Path(folder) / 'launcher.out'
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f'{folder}/socket')
            server.listen(num_ranks)
            server.settimeout(300)
            self._launcher = start_loaded(
                command(folder, ['-m', 'tests.support.serve', f'{folder}/socket'], num_ranks),
                folder=ROOT,
                environment=environment(),
                stdout=output,
                stderr=output,
            )
            try:
                self._connections = [server.accept()[0] for _ in range(num_ranks)]
            except BaseException:
                kill_loaded(self._launcher)
                raise

    def run(self, script: str, *arguments: str) -> Any:
        """See :func:`launch_json`."""
        result = Path(self._folder.name) / 'result.json'
        order = json.dumps([script, *arguments, str(result)])
        try:
            for connection in self._connections:
                connection.sendall(f'{order}\n'.encode())
            # A rank sends one byte when it is done. If it has raised or crashed, its socket is closed without one.
            all_succeeded = all(connection.recv(1) for connection in self._connections)
        except (BrokenPipeError, ConnectionResetError):
            all_succeeded = False
        if not all_succeeded:
            self._launcher.join(60)  # it prints which rank has crashed
            files = [*result.parent.glob('*.out'), *result.parent.glob('*.err')]
            outputs = [path.read_text()[-6000:] for path in sorted(files)]
            raise AssertionError('\n'.join(outputs))
        return json.loads(result.read_text())

    def close(self) -> None:
        """Kills the ranks."""
        kill_loaded(self._launcher)
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()
