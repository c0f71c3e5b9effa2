# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Several ranks under the real composer launcher (gloo, CPU): for one run, or waiting for one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import environment_of_no_rank, free_port

ROOT = Path(__file__).resolve().parents[2]
MOST_STANDING = 4
"""In each of two workers of pytest. Each rank that stays grows to 1.8 GiB."""


def environment() -> dict[str, str]:
    """That of a launch: the package and the tests are found, a rank keeps to one thread, and no other has its port."""
    path = f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}'
    own = {'OMP_NUM_THREADS': '1', 'PYTHONPATH': path, 'MASTER_PORT': str(free_port())}
    return {**environment_of_no_rank(), **own}


def command(folder: str, arguments: Sequence[str], ranks: int) -> list[str]:
    """``composer -n RANKS arguments``; ranks other than the first write to files in the folder."""
    composer = str(Path(sys.executable).with_name('composer'))
    files = ['--stdout', f'{folder}/rank{{rank}}.out', '--stderr', f'{folder}/rank{{rank}}.err']
    return [composer, '-n', str(ranks), *files, *arguments]


def launch(arguments: Sequence[str], *, ranks: int, timeout: float = 540) -> subprocess.CompletedProcess:
    """``composer -n RANKS arguments``, from the repository's root."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command(folder, arguments, ranks),
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        for path in sorted(Path(folder).iterdir()):
            text = f'\n--- {path.name}\n{path.read_text()}'
            if path.suffix == '.out':
                done.stdout += text
            else:
                done.stderr += text
    return done


def launch_nodes(arguments: Sequence[str], *, nodes: int, ranks: int, timeout: float = 540) -> list[str]:
    """As many launchers on this machine as nodes, with so many ranks each; the screens of all, which must end well."""
    composer = Path(sys.executable).with_name('composer')
    common = [
        str(composer),
        '-n',
        str(ranks),
        '--world_size',
        str(nodes * ranks),
        '--master_addr',
        '127.0.0.1',
        '--master_port',
        str(free_port()),
    ]
    started = [
        subprocess.Popen(
            [*common, '--node_rank', str(node), *arguments],
            cwd=ROOT,
            env=environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for node in range(nodes)
    ]
    with ThreadPoolExecutor(nodes) as readers:  # a full pipe would stop its writer
        screens = list(readers.map(lambda process: process.communicate(timeout=timeout)[0], started))
    for process, screen in zip(started, screens, strict=True):
        assert process.returncode == 0, screen[-6000:]
    return screens


def launch_json(script: str, *arguments: str, ranks: int) -> Any:
    """What the ``main`` of a script returns on rank 0, as JSON has it; run by ranks that stay.

    Starting them, with all that Composer imports, takes longer than most of what they run.
    """
    if ranks not in _standing:
        while sum(_standing) + ranks > MOST_STANDING and _standing:
            _standing.pop(min(_standing)).close()
        _standing[ranks] = _Ranks(ranks)
    try:
        return _standing[ranks].run(script, *arguments)
    except BaseException:
        _standing.pop(ranks).close()
        raise


def launch_program(module: str, *arguments: str, ranks: int, folder: Path = ROOT) -> str:
    """What a program prints that ends well, in this folder; run by ranks that stay."""
    return launch_json('tests/ranks/program.py', str(folder), module, *arguments, ranks=ranks)


def close_ranks() -> None:
    """Ends those that stay."""
    while _standing:
        _standing.popitem()[1].close()


class _Ranks:
    """Ranks of one launch, each at the other end of a socket."""

    def __init__(self, num_ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = self._folder.name
        with socket.socket(socket.AF_UNIX) as server, open(f'{folder}/launcher.out', 'w') as output:
            server.bind(f'{folder}/socket')
            server.listen(num_ranks)
            server.settimeout(300)
            self._launcher = subprocess.Popen(
                command(folder, ['-m', 'tests.support.serve', f'{folder}/socket'], num_ranks),
                cwd=ROOT,
                env=environment(),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            self._connections = [server.accept()[0] for _ in range(num_ranks)]

    def run(self, script: str, *arguments: str) -> Any:
        """See :func:`launch_json`."""
        result = Path(self._folder.name) / 'result.json'
        told = json.dumps([script, *arguments, str(result)])
        try:
            for connection in self._connections:
                connection.sendall(f'{told}\n'.encode())
            done = all(connection.recv(1) for connection in self._connections)
        except (BrokenPipeError, ConnectionResetError):
            done = False
        if not done:
            self._launcher.wait(60)  # it says who has crashed
            printed = [path.read_text()[-6000:] for path in sorted(result.parent.glob('*.[oe]*'))]
            raise AssertionError('\n'.join(printed))
        return json.loads(result.read_text())

    def close(self) -> None:
        """Ends them, whatever they are doing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        self._launcher.wait()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


_standing: dict[int, _Ranks] = {}
