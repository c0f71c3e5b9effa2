# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The size that ``microbatching.size=suggest`` takes for a run, with a memory model of round numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from composer_tokacc.data import LengthTable
from composer_tokacc.programs import ConfigError, load_config, rehearsal, sources, suggest
from composer_tokacc.programs.build import build_parts
from composer_tokacc.programs.schema import TrainConfig
from tests.sizing.test_suggestion import memory_model, sizes_of
from tests.test_size import YAML

# A trace takes time for each layer.
FEW_LAYERS = {
    'dataset.num_samples': 16,
    'model.config.text_config.num_hidden_layers': 1,
    'model.config.vision_config.num_hidden_layers': 1,
}


def config_of(options: Mapping[str, Any]) -> TrainConfig:
    return load_config(YAML, [f'{key}={value}' for key, value in options.items()])


def random_sizes(num_samples: int, *, variation: float, longest: int = 1000) -> LengthTable:
    """Returns sizes of samples without images. The last sample is the longest."""
    drawn = np.random.default_rng(0).lognormal(4, variation, num_samples - 1)
    lengths = np.clip(drawn, 4, 1000).astype(np.int64)
    return sizes_of(np.append(lengths, longest))


def test_too_large_samples_are_named(monkeypatch):
    """The report has more warnings: smaller microbatches would have less padding with such a `width_multiple`."""
    monkeypatch.setattr(suggest.dist, 'get_world_size', lambda: 4)
    monkeypatch.setattr(suggest.dist, 'all_gather_object', lambda value: [value])
    monkeypatch.setattr(suggest, 'memory_of_run', lambda *arguments: memory_model())
    options = {
        'loader.global_batch_size': 128,
        'microbatching.width_multiple': 64,
        'microbatching.slot_tokens': 1000,
        'microbatching.device_memory_gib': 16,
    }
    table = random_sizes(4001, variation=0.7, longest=20_000)
    source = SimpleNamespace(config=config_of(options), train_dataset=[], processor=None, train_table=table)
    with pytest.raises(ConfigError, match='1 samples do not fit even alone') as raised:
        suggest.suggested_microbatch(source)
    assert 'sample 4000' in str(raised.value)


@pytest.mark.parametrize('regroups_ranks', [True, False])
def test_packing_is_compared_as_the_run_cuts(regroups_ranks):
    """Rows that are planned over the ranks have so little padding that packing costs more. Other rows are packed."""
    options = {
        'loader.global_batch_size': 64,
        'loader.regroup_ranks': regroups_ranks,
        'microbatching.packing': 'auto',
    }
    table = random_sizes(2000, variation=0.3, longest=150)
    report = suggest.suggest_for_run(config_of(options), memory_model(), table, num_ranks=4, gib=8.0)
    assert report.packing is not regroups_ranks


def test_samples_are_measured_once(monkeypatch, tmp_path):
    """The suggestion, the loader and the rehearsal share one table. Each scan of a large dataset takes minutes."""
    measure = mock.Mock(side_effect=sources.length_table)
    monkeypatch.setattr(sources, 'length_table', measure)
    for module in (suggest, rehearsal):
        monkeypatch.setattr(module, 'memory_of_run', lambda *arguments: memory_model())
    options = {
        'loader.global_batch_size': 8,
        'loader.lengths_folder': tmp_path,
        'microbatching.size': 'suggest',
        'microbatching.device_memory_gib': 16,
        'microbatching.rehearse': 'heaviest',
    }
    config = config_of({**FEW_LAYERS, **options})
    parts = build_parts(config)
    assert rehearsal.rehearsal_of(config, parts).memory is not None
    assert isinstance(parts.source.config.microbatching.device_train_microbatch_size, int)
    measure.assert_called_once()
