# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The source of samples that a config names."""

from composer_tokacc.programs.file_source import FileSource
from composer_tokacc.programs.schema import TrainConfig
from composer_tokacc.programs.shard_source import ShardSource
from composer_tokacc.programs.source import Source


def source_of(config: TrainConfig) -> Source:
    """Returns the source that ``dataset.name`` stands for."""
    return (ShardSource if config.dataset.get('name') == 'llava_streaming' else FileSource)(config)
