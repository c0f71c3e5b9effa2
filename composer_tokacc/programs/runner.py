# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Takes a program from a YAML file to its exit status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from composer.utils import get_device

from composer_tokacc.data import BadSampleError
from composer_tokacc.programs.config_checks import check_config, check_folders
from composer_tokacc.programs.errors import ConfigError, building, raised_here, refuse
from composer_tokacc.programs.machine_faults import fault_of_machine
from composer_tokacc.programs.process import keep_what_is_loaded, let_children_die
from composer_tokacc.programs.schema import TrainConfig, load_config

log = logging.getLogger(__name__)


def run_program(
    program: Callable[[TrainConfig], int | None],
    path: str,
    overrides: Sequence[str],
    *,
    num_ranks: int | None = None,
    trains: bool = False,
) -> int:
    """Runs a program on a YAML file and returns its exit status, 2 with one line for a mistake of the user.

    Args:
        program: Takes the config and returns the status, None for 0.
        path: The YAML file.
        overrides: ``key=value`` each.
        num_ranks: Ranks that the run is planned for. Default: all ranks of this launch.
        trains: Whether the program trains on this machine and writes the folders of the config.
    """
    keep_what_is_loaded()
    try:
        config = load_config(path, overrides)
        check_config(config, num_ranks=num_ranks)
        level = config.trainer.get('python_log_level')
        if level:
            logging.getLogger('composer_tokacc').setLevel(level.upper())
        if trains:
            with building('trainer.device'):
                get_device(config.trainer.get('device'))
            if not config.dry_run:
                check_folders(config)
    except ConfigError as error:
        return refuse(error, on_all_ranks=True)
    try:
        return program(config) or 0
    except (ConfigError, BadSampleError) as error:
        return refuse(error)
    except Exception as error:
        let_children_die()
        log.debug('The run failed here:', exc_info=error)
        fault = fault_of_machine(error)
        if fault:
            return refuse(ConfigError('', fault))
        if raised_here(error):  # the plugin says why it cannot train
            return refuse(error)
        raise
