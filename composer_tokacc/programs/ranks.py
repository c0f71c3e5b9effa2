# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Shows the user the error that came first, whichever rank it is on.

The launcher shows rank 0 of a node as it goes and the others only when they have ended; by then rank 0 has died of the
broken connection. So each rank tells its end to the store that torch's rendezvous has opened on rank 0, where a thread
of every rank reads it: the first rank of a node prints it and ends with its status, the others end in silence.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

from composer.utils import dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented there

from composer_tokacc.programs.process import end_process

_EVERY = 1.0
"""Seconds between two looks at the store."""
_TOLD = 'composer_tokacc/told'
_ALIVE, _DONE = 'composer_tokacc/alive/{}', 'done'


class RankWatch:
    """Watches the other ranks of a run from a thread of this one.

    Args:
        timeout: Seconds that collectives wait for. A rank that gives no sign of life for nine tenths of it counts as
            stopped, because the collectives would not say for whom they waited.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._patience = 0.9 * timeout
        self._is_first = dist.get_local_rank() == 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if dist.get_world_size() > 1:
            self._thread.start()

    def stop(self) -> None:
        """Ends the watch in order: this rank is not missed any more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _EVERY)

    def tell(self, message: str, status: int) -> bool:
        """Tells the first ranks why this one ends, if it is the first to; returns whether one of them prints it."""
        if dist.get_world_size() == 1 or not dist.is_initialized():
            return False
        text = f'{status} {message}'
        try:
            told = _connect(5.0).compare_set(_TOLD, '', text).decode()
        except RuntimeError:  # rank 0 has gone, and the store with it
            return False
        if self._is_first and told == text:
            self._stop.set()
            time.sleep(2 * _EVERY)  # the others end first: the launcher would show what they say to a closed connection
            return False
        time.sleep(6 * _EVERY)  # the thread ends this process
        return True

    def _watch(self) -> None:
        rank, num_ranks = dist.get_global_rank(), dist.get_world_size()
        try:
            store = _connect(self._timeout)  # one of its own: a store answers one question at a time
            seen = {other: ('', time.monotonic()) for other in range(num_ranks) if other != rank}
            beat = 0
            while not self._stop.wait(_EVERY):
                beat += 1
                store.set(_ALIVE.format(rank), str(beat))
                if store.check([_TOLD]):
                    status, _, message = store.get(_TOLD).decode().partition(' ')
                    self._end(message, int(status))
                if self._is_first:
                    self._miss(store, seen)
            store.set(_ALIVE.format(rank), _DONE)
        except RuntimeError:  # rank 0 has gone, which the launcher sees as well
            return

    def _miss(self, store: Any, seen: dict[int, tuple[str, float]]) -> None:
        """Ends the run if a rank, last seen with the given beat at the given time, has not been heard of for long."""
        for other, (last, since) in seen.items():
            key = _ALIVE.format(other)
            found = store.get(key).decode() if store.check([key]) else ''
            if found != last or found == _DONE:
                seen[other] = found, time.monotonic()
            elif time.monotonic() - since > self._patience:
                self._end(
                    f'error: every rank must answer, got: no sign of life from rank {other} for {self._patience:.0f} '
                    's. See whether its process is stopped or its machine hangs, or raise `trainer.dist_timeout`',
                    2,
                )

    def _end(self, message: str, status: int) -> None:
        """Ends this process, whose main thread may wait in a collective."""
        if self._stop.is_set():
            return
        if not self._is_first:
            end_process('', 0)
        end_process(message, status, delay=2 * _EVERY)  # as above


def _connect(timeout: float) -> Any:  # torch's stubs do not know `check`
    host, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
