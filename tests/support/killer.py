# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Callbacks that end their own process: as a machine that goes away, one that hangs, a bug, or a bad sample would."""

from __future__ import annotations

import os
import signal

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from composer_tokacc.data import BadSampleError


class KillRank(Callback):
    """Kills one rank at the start of a batch, without any chance to clean up."""

    def __init__(self, *, rank: int, batch: int) -> None:
        self.rank = rank
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == self.rank and int(state.timestamp.batch) == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


class StopRank(KillRank):
    """Stops one rank at the start of a batch: it neither goes on nor ends."""

    def batch_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == self.rank and int(state.timestamp.batch) == self.batch:
            os.kill(os.getpid(), signal.SIGSTOP)


class FailOnRank(KillRank):
    """Raises on one rank at the start of a batch."""

    def __init__(self, *, rank: int, batch: int, bad_sample: bool) -> None:
        super().__init__(rank=rank, batch=batch)
        self.bad_sample = bad_sample

    def batch_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == self.rank and int(state.timestamp.batch) == self.batch:
            raise BadSampleError('sample "s7" cannot be read') if self.bad_sample else KeyError('a bug of ours')
