# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The YAML file of a run, and the classes that its names stand for."""

from composer_tokacc.programs.schema import ConfigError, TrainConfig, load_config

__all__ = ['ConfigError', 'TrainConfig', 'load_config']
