# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the programs share: the YAML file of a run, its checks, and what it names."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_tokacc.programs.errors import ConfigError
    from composer_tokacc.programs.schema import TrainConfig, load_config

__all__ = ['ConfigError', 'TrainConfig', 'load_config']


def __getattr__(name: str) -> Any:
    """Loads a name on first use: ``--help`` must not wait for the planner."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(f'{__name__}.{"errors" if name == "ConfigError" else "schema"}'), name)
