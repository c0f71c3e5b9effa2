# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the programs share: the YAML file of a run, its checks, and what it names."""

from composer_tokacc.programs.schema import ConfigError, TrainConfig, load_config

__all__ = ['ConfigError', 'TrainConfig', 'load_config']
