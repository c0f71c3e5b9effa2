# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Takes a program from a YAML file to its exit status. A mistake of the user is one line on the screen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from composer_tokacc.programs.config_checks import check_config, check_folders
from composer_tokacc.programs.errors import ConfigError, building, is_of_host, refuse
from composer_tokacc.programs.machine_faults import fault_of_machine, has_lost_rank
from composer_tokacc.programs.process import keep_what_is_loaded, let_children_die
from composer_tokacc.programs.schema import TrainConfig, load_config
from composer_tokacc.refusals import RefusalError

SECONDS_FOR_LAUNCHER = 10.0
"""Composer's launcher ends all ranks within these seconds after one has failed."""


def run_program(
    program: Callable[[TrainConfig], int | None],
    path: str,
    overrides: Sequence[str],
    *,
    num_ranks: int | None = None,
    trains: bool = False,
) -> int:
    """Runs a program on a YAML file and returns its exit status, 2 with one line for a mistake of the user.

    A bug of this package, and an error of the user's own code, leave their traceback. So does every error at the log
    level debug.

    Args:
        program: Takes the config and returns the status, None for 0.
        path: The YAML file.
        overrides: ``key=value`` each.
        num_ranks: Ranks that the run is planned for. Default: all ranks of this launch.
        trains: Whether the program trains on this machine and writes the folders of the config.
    """
    keep_what_is_loaded()
    is_checked = False
    try:
        config = load_config(path, overrides)
        level = config.trainer.get('python_log_level')
        if level is not None:
            with building('trainer.python_log_level'):
                logging.getLogger('composer_tokacc').setLevel(str(level).upper())
        check_config(config, num_ranks=num_ranks)
        if trains:
            check_folders(config)
        is_checked = True
        return program(config) or 0
    except Exception as error:
        let_children_die()
        message = _message_of(error)
        if not message:
            raise
        if has_lost_rank(error):
            # The launcher prints the line of the rank that failed first, and ends this rank before it prints another.
            time.sleep(SECONDS_FOR_LAUNCHER)
        # A mistake of the config is raised on all ranks.
        on_all_ranks = isinstance(error, ConfigError) and not is_checked
        return refuse(
            error,
            message,
            on_all_ranks=on_all_ranks,
        )


def _message_of(error: Exception) -> str:
    """Returns the message for the user; empty for an error that needs its traceback."""
    # Before the faults of the machine: such an error may have an OSError as its cause, which would count as a fault.
    if isinstance(error, RefusalError):
        return str(error)
    fault = fault_of_machine(error)
    if fault:
        return fault
    if is_of_host(error):
        return f'{type(error).__name__}: {error}. `trainer.python_log_level=debug` shows where'
    return ''
