# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The way of a program from a YAML file to an exit status."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from composer_tokacc.data import BadSampleError
from composer_tokacc.programs.config_checks import check_config, check_machine
from composer_tokacc.programs.errors import ConfigError, in_words_of, one_line, refuse
from composer_tokacc.programs.machine_faults import fault_of_machine
from composer_tokacc.programs.process import DIST_TIMEOUT, keep_what_is_loaded, let_children_die
from composer_tokacc.programs.ranks import RankWatch
from composer_tokacc.programs.schema import TrainConfig, load_config


def run_program(
    program: Callable[[TrainConfig], int | None],
    path: str,
    overrides: Sequence[str],
    *,
    num_ranks: int | None = None,
    trains: bool = False,
) -> int:
    """Runs a program on a YAML file and returns its exit status, 2 with one line for a mistake of the user's.

    Args:
        program: Takes the config and returns the exit status, None for 0.
        path: The YAML file.
        overrides: ``key=value`` each.
        num_ranks: Ranks that the run is planned for; None: those of this launch.
        trains: Whether it trains here and now, so that this machine must be able to.
    """
    keep_what_is_loaded()
    try:
        config = load_config(path, overrides)
        check_config(config, num_ranks=num_ranks)
        if trains:
            check_machine(config)
    except ConfigError as error:
        return refuse(error, on_all_ranks=True)
    watch = RankWatch(config.trainer.get('dist_timeout', DIST_TIMEOUT))
    try:
        with in_words_of(config):
            return program(config) or 0
    except (ConfigError, BadSampleError) as error:
        return 2 if watch.tell(one_line(error), 2) else refuse(error)
    except Exception as error:
        let_children_die()
        if fault := fault_of_machine(error):
            return 2 if watch.tell(one_line(fault), 2) else refuse(ConfigError(fault))
        if watch.tell(traceback.format_exc(), 1):
            return 1
        raise
    finally:
        watch.stop()
