# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Callbacks that kill or stop their process, or raise in it, like a lost or hanging machine, a bug or a bad sample."""

from __future__ import annotations

import os
import signal

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from composer_tokacc.data import BadSampleError
from composer_tokacc.programs import runner


class OnRank(Callback):
    """Calls ``act`` on one rank at the start of a batch."""

    def __init__(self, *, rank: int, batch: int) -> None:
        self.rank = rank
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == self.rank and int(state.timestamp.batch) == self.batch:
            self.act()

    def act(self) -> None:
        raise NotImplementedError


class KillRank(OnRank):
    """Kills the rank, so that it cannot clean up."""

    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class StopRank(OnRank):
    """Stops the rank: it neither goes on nor ends. So the other ranks need not wait for the launcher to end them."""

    def __init__(self, *, rank: int, batch: int) -> None:
        super().__init__(rank=rank, batch=batch)
        runner.SECONDS_FOR_LAUNCHER = 0.0

    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class FailOnRank(OnRank):
    """Raises an error on the rank."""

    def __init__(self, *, rank: int, batch: int, bad_sample: bool) -> None:
        super().__init__(rank=rank, batch=batch)
        self.bad_sample = bad_sample

    def act(self) -> None:
        if self.bad_sample:
            raise BadSampleError('sample "s7" cannot be read')
        raise KeyError('a bug of ours')
