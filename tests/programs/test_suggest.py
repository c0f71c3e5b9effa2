# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The size that ``microbatching.size=suggest`` takes for a run, with a memory model of round numbers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from composer_tokacc.data import LengthTable
from composer_tokacc.programs import ConfigError, load_config, rehearsal, sources, suggest
from composer_tokacc.programs.build import build_parts
from composer_tokacc.programs.length_tables import StandIns
from composer_tokacc.programs.schema import ModelConfig, TrainConfig
from composer_tokacc.programs.sources import source_of
from composer_tokacc.sizing import BatchShape, MemoryModel
from tests.sizing.test_suggestion import memory_model, sizes_of
from tests.test_size import YAML


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


SHAPE = BatchShape(rows=4, width=64)
# A trace takes time for each layer.
FEW_LAYERS = {
    'dataset.num_samples': 16,
    'model.config.text_config.num_hidden_layers': 1,
    'model.config.vision_config.num_hidden_layers': 1,
}


@functools.cache
def traced_data() -> tuple[Any, Any, LengthTable]:
    """Returns the dataset of the traced runs, its processor, and the sizes of its samples."""
    source = source_of(config_of(FEW_LAYERS))
    return source.train_dataset, source.processor, source.train_table


def traced_memory(settings: Mapping[str, Any]) -> MemoryModel:
    config = config_of({**FEW_LAYERS, **settings})
    return suggest.memory_of_run(config, *traced_data())


@pytest.fixture
def calibrations(monkeypatch, tmp_path):
    """The folder that keeps the memory models."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    return tmp_path / 'composer_tokacc' / 'memory'


def test_stand_ins_have_their_own_calibration(calibrations, monkeypatch):
    """A table of lengths may be that of the dataset, but a made-up image stands for every medium of a sample."""
    traces = mock.Mock(side_effect=[memory_model(), memory_model()])
    monkeypatch.setattr(suggest, 'calibrate_fake', traces)
    dataset, processor, table = traced_data()
    config = config_of(FEW_LAYERS)
    source = source_of(config)
    stand_ins = StandIns(table, processor, source.model_config(processor))

    for traced_dataset in (stand_ins, dataset, dataset):
        suggest.memory_of_run(config, traced_dataset, processor, table)

    assert traces.call_count == 2
    assert len(list(calibrations.iterdir())) == 2


def test_decoder_of_bart_is_traced(calibrations):
    """Only the decoder of BART is built. The config of the whole BART says that labels are not at the text."""
    sizes = {'d_model': 16, 'decoder_layers': 1, 'decoder_attention_heads': 2, 'decoder_ffn_dim': 16}
    model = ModelConfig(config={'model_type': 'bart', 'vocab_size': 50, **sizes})
    config = TrainConfig(model=model, algorithms={'token_accumulation': None}, trainer={'device': 'cpu'})
    table = sizes_of([5, 20])
    samples = StandIns(table, None, source_of(config).model_config(None))
    assert suggest.memory_of_run(config, samples, None, table).peak(SHAPE) > 0
    assert suggest._flop_coefficients(config, samples, None, table) is not None


@pytest.mark.parametrize('precision', ['amp_bf16', 'AMP_BF16', 'amp_fp8'])
def test_precision_of_a_trace(precision):
    assert suggest._traced_precision(config_of({'trainer.precision': precision})) == 'amp_bf16'


@pytest.mark.slow
def test_run_without_a_gpu_is_traced_on_the_cpu(monkeypatch, calibrations):
    """Composer takes the CPU then, and float32. Half precision would need about half of the memory."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    without_device = traced_memory({'trainer.device': 'null'})
    on_cpu = traced_memory({'trainer.device': 'cpu'})
    on_gpu = traced_memory({'trainer.device': 'gpu'})
    assert without_device == on_cpu
    assert without_device.peak(SHAPE) > on_gpu.peak(SHAPE)


NUM_RANKS = 4
BYTES_OF_FLOAT32 = 4


def sharded_memory(**settings: Any) -> dict[str, float]:
    """Returns bytes by term on one of the ranks. FSDP gathers one layer at a time, so there are two."""
    options = {'trainer.precision': 'amp_bf16', 'model.config.text_config.num_hidden_layers': 2}
    for name, value in settings.items():
        options[f'trainer.parallelism_config.fsdp.{name}'] = value
    return traced_memory(options).terms(SHAPE, num_ranks=NUM_RANKS)


@pytest.mark.slow
def test_settings_of_fsdp_change_its_memory(monkeypatch, calibrations):
    """The weights of the model are in float32. It computes in bfloat16."""
    full_shard = sharded_memory(sharding_strategy='FULL_SHARD')
    num_weights = full_shard['parameters'] * NUM_RANKS / BYTES_OF_FLOAT32
    assert 'autocast copies of weights' not in full_shard

    one_copy = sharded_memory(sharding_strategy='NO_SHARD')
    assert one_copy['parameters'] == BYTES_OF_FLOAT32 * num_weights

    two_replicas = sharded_memory(sharding_strategy='HYBRID_SHARD', data_parallel_replicate_degree=2)
    for name in ('parameters', 'gradients', 'optimizer states'):
        assert two_replicas[name] == 2 * full_shard[name]
    assert two_replicas['gathered by FSDP'] == full_shard['gathered by FSDP']

    keeps_gathered = sharded_memory(sharding_strategy='SHARD_GRAD_OP')
    assert keeps_gathered['parameters'] == full_shard['parameters']
    # All weights are there at once, two bytes each, and the gradients of most.
    assert keeps_gathered['gathered by FSDP'] > 2 * num_weights
    assert keeps_gathered['gathered by FSDP'] > full_shard['gathered by FSDP']

    in_float32 = sharded_memory(mixed_precision='FULL')
    assert in_float32['gathered by FSDP'] > 1.5 * full_shard['gathered by FSDP']
    assert in_float32['autocast copies of weights'] > 0

    monkeypatch.setenv('FSDP_VERSION', '2')
    assert sharded_memory(reshard_after_forward='true') == full_shard
    assert sharded_memory(reshard_after_forward='false') == keeps_gathered
    # A trace of a large model takes minutes. One is for weights in float32, one for weights in bfloat16.
    assert len(list(calibrations.iterdir())) == 2
