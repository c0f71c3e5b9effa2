# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs a program on a YAML file and returns its exit status. A mistake of the user is one line on the screen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from torch.distributed.checkpoint.api import CheckpointException

from composer_tokacc.programs.config_checks import check_config, check_folders
from composer_tokacc.programs.errors import ConfigError, building, is_of_host, refuse
from composer_tokacc.programs.machine_faults import fault_of_machine, has_lost_rank
from composer_tokacc.programs.process import ignore_dead_children, keep_what_is_loaded
from composer_tokacc.programs.schema import TrainConfig, load_config
from composer_tokacc.refusals import RefusalError

SECONDS_FOR_LAUNCHER = 10.0
"""After one rank has failed, Composer's launcher ends all others within this time."""


def run_program(
    program: Callable[[TrainConfig], int | None],
    path: str,
    overrides: Sequence[str],
    *,
    num_ranks: int | None = None,
    trains: bool = False,
    reads_data: bool = True,
) -> int:
    """Runs a program on a YAML file and returns its exit status.

    After a mistake of the user, a fault of the machine or an error of a host (Composer, torch, see
    ``errors.HOST_PACKAGES``), it prints one line and returns 2. A mistake that is found before the program begins
    counts as one of all ranks. Then only the first rank of each node prints the line, and the others return 0, see
    :func:`.refuse`. A bug of this package and an error of the user's own code are raised. At the log level debug the
    traceback of every error is printed.

    Args:
        program: Takes the config and returns the status, None for 0.
        path: The YAML file.
        overrides: ``key=value`` each.
        num_ranks: Ranks that the run is planned for. Default: all ranks of this launch.
        trains: Whether the program trains on this machine and writes the folders of the config.
        reads_data: Whether the program reads the data. If not, the config need not say where they are.
    """
    keep_what_is_loaded()  # switches garbage collection on again, but not for objects that exist already
    has_begun = False
    try:
        config = load_config(path, overrides, reads_data=reads_data)
        level = config.trainer.get('python_log_level')
        if level is not None:
            with building('trainer.python_log_level'):
                logging.getLogger('composer_tokacc').setLevel(str(level).upper())
        check_config(config, num_ranks=num_ranks, reads_data=reads_data)
        if trains:
            check_folders(config)
        has_begun = True
        return program(config) or 0
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
        ignore_dead_children()  # removes torch's handler of SIGCHLD, which could raise in the lines below
        message = _message_of(error)
        if not message:
            raise
        if has_lost_rank(error):
            # Usually another rank failed first and has printed its line, and the launcher ends this rank during the
            # sleep. If a rank did not answer, but has not failed, this rank prints its own line afterwards.
            time.sleep(SECONDS_FOR_LAUNCHER)
        # Before the program begins, every rank checks the same config, so all of them find the same mistake.
        on_all_ranks = isinstance(error, ConfigError) and not has_begun
        return refuse(error, message, on_all_ranks=on_all_ranks)


def _message_of(error: BaseException) -> str:
    """Returns the message for the user. It is empty for a bug, which needs its traceback."""
    # Also a ConfigError. Before fault_of_machine(), which would count it as a fault if an OSError is its cause.
    if isinstance(error, RefusalError):
        return str(error)
    fault = fault_of_machine(error)
    if fault:
        return fault
    if isinstance(error, CheckpointException):
        failure, _ = next(iter(error.failures.values()))  # of one rank, because str(error) has the tracebacks of all
        return (
            f'a sharded checkpoint must be written and read as a whole, got: {type(failure).__name__}: {failure}. If '
            'it was read, name another one in `trainer.load_path`; if it was written, look at the disk of '
            '`trainer.save_folder`'
        )
    if is_of_host(error):
        return f'{type(error).__name__}: {error}. `trainer.python_log_level=debug` shows where'
    return ''
