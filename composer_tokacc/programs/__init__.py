# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The YAML file of a run, and everything that the programs build from it."""

from typing import TYPE_CHECKING

from composer_tokacc.lazy import on_first_use

if TYPE_CHECKING:
    from composer_tokacc.programs.errors import ConfigError
    from composer_tokacc.programs.schema import TrainConfig, load_config

__all__ = ['ConfigError', 'TrainConfig', 'load_config']

# `--help` must not wait for the planner.
__getattr__, __dir__ = on_first_use(
    __name__,
    {'ConfigError': 'errors', 'TrainConfig': 'schema', 'load_config': 'schema'},
)
