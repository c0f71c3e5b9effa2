# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Callbacks that end their own process: as a machine that goes away, one that hangs, a bug, or a bad sample would."""

from __future__ import annotations

import io
import os
import signal
from typing import Any, BinaryIO

import torch
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


class KillWhileSaving(Callback):
    """Kills its process in the middle of writing the checkpoint after a batch. Half of the file is on the disk."""

    def __init__(self, *, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            torch.save = _save_half_and_die


_save = torch.save


def _save_half_and_die(content: Any, file: BinaryIO, **options: Any) -> None:
    complete = io.BytesIO()
    _save(content, complete, **options)
    if isinstance(file, io.BytesIO):  # torch pickles storages so, for processes of a loader
        file.write(complete.getvalue())
        return
    file.write(complete.getvalue()[: complete.tell() // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
