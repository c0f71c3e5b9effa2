# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A callback that kills its own process, as a machine that goes away would."""

from __future__ import annotations

import os
import signal

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist


class KillRank(Callback):
    """Kills one rank at the start of a batch, without any chance to clean up."""

    def __init__(self, *, rank: int, batch: int) -> None:
        self.rank = rank
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == self.rank and int(state.timestamp.batch) == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)
