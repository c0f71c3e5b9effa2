# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Callbacks that end their own process, as a lost machine, a hanging one, a bug or a bad sample would."""

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
    """Stops the rank: it neither goes on nor ends."""

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
    if isinstance(file, io.BytesIO):  # not a checkpoint: torch pickles storages for the workers of a loader
        file.write(complete.getvalue())
        return
    file.write(complete.getvalue()[: complete.tell() // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
