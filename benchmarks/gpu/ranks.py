# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""(g) Two processes on one GPU: DDP, FSDP1 and FSDP2, each held to one forward over all rows.

NCCL takes two ranks of one GPU for a mistake unless they seem to be on two hosts, and may refuse even so; then gloo is
tried, which lacks collectives that FSDP needs. So this shows that the wrappers work, not how fast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.scale import Scale
from benchmarks.gpu.store import Store
from benchmarks.machine import free_port
from benchmarks.record import ROOT

TIMEOUT = {'cuda': 90, 'cpu': 300}  # a rehearsal may share its cores
LIMIT = 1e-5


def launch(wrapper: str, backend: str, device: str) -> dict[str, Any]:
    """Two processes, each a node of its own with one rank, so that both take device 0."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / 'found.json'
        ranks = []
        for rank in range(2):
            environment = {
                **os.environ, 'RANK': str(rank), 'WORLD_SIZE': '2', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1',
                'NODE_RANK': str(rank), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port),
                'NCCL_HOSTID': f'host{rank}', 'NCCL_SOCKET_IFNAME': 'lo', 'NCCL_IB_DISABLE': '1',
                'GLOO_SOCKET_IFNAME': 'lo', 'FSDP_VERSION': '2' if wrapper == 'fsdp2' else '1',
                'PYTHONPATH': f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}',
            }  # fmt: skip
            command = [sys.executable, '-m', 'benchmarks.gpu.two_ranks', wrapper, backend, device, str(found)]
            log = (Path(folder) / f'{rank}.log').open('w+')
            process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            ranks.append((process, log))
        try:
            for process, _ in ranks:
                process.wait(TIMEOUT[device])
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process, _ in ranks:
                process.kill()
                process.wait()
        said = ''
        for _, log in ranks:
            log.seek(0)
            said += log.read()[-2500:]
            log.close()
        if not found.exists():
            raise RuntimeError(
                f'{wrapper} over {backend} gave nothing within {TIMEOUT[device]} s. The ranks said: {said}'
            )
        return json.loads(found.read_text())


def measure(wrapper: str, backends: list[str], device: str) -> dict[str, Any]:
    """With the first backend that works; the others' failures beside it."""
    failures = {}
    for backend in list(backends):
        try:
            result = launch(wrapper, backend, device)
        except RuntimeError as error:
            failures[backend] = str(error)[-3000:]
            # What one wrapper cannot do over it, the next need not try.
            backends.remove(backend)
            continue
        result['holds'] = max(result['errors'].values()) <= LIMIT
        return {'backend': backend, **result, 'failures': failures}
    raise RuntimeError(f'No backend left for {wrapper}: {failures}')


def run(scale: Scale, store: Store) -> None:
    device = scale.device
    backends = ['nccl', 'gloo'] if device.is_gpu else ['gloo']
    for wrapper in ('ddp', 'fsdp2', 'fsdp1') if device.is_gpu else ('ddp',):
        store.measure(f'g_ranks_{wrapper}', lambda w=wrapper: measure(w, backends, device.name))
