# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Traces of a run's model: its memory, and the operations that it computes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch

from composer_tokacc.data import LengthTable
from composer_tokacc.programs import traces
from composer_tokacc.programs.length_tables import MadeUpSamples
from composer_tokacc.programs.schema import ModelConfig, TrainConfig
from composer_tokacc.programs.sources import source_of
from composer_tokacc.sizing import BatchShape, MemoryModel
from tests.programs.test_suggest import FEW_LAYERS, config_of
from tests.sizing.test_suggestion import memory_model, sizes_of

SHAPE = BatchShape(rows=4, width=64)


@functools.cache
def traced_data() -> tuple[Any, Any, LengthTable]:
    """Returns the dataset of the traced runs, its processor, and the sizes of its samples."""
    source = source_of(config_of(FEW_LAYERS))
    return source.train_dataset, source.processor, source.train_table


def traced_memory(settings: Mapping[str, Any]) -> MemoryModel:
    config = config_of({**FEW_LAYERS, **settings})
    return traces.memory_of_run(config, *traced_data())


@pytest.fixture
def calibrations(monkeypatch, tmp_path):
    """The folder that keeps the memory models."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    return tmp_path / 'composer_tokacc' / 'memory'


def test_stand_ins_have_their_own_calibration(calibrations, monkeypatch):
    """A table of lengths may be that of the dataset, but a made-up image stands for every medium of a sample."""
    calibrate = mock.Mock(side_effect=[memory_model(), memory_model()])
    monkeypatch.setattr(traces, 'calibrate_fake', calibrate)
    dataset, processor, table = traced_data()
    config = config_of(FEW_LAYERS)
    source = source_of(config)
    made_up_samples = MadeUpSamples(table, processor, source.model_config(processor))

    for traced_dataset in (made_up_samples, dataset, dataset):
        traces.memory_of_run(config, traced_dataset, processor, table)

    assert calibrate.call_count == 2
    assert len(list(calibrations.iterdir())) == 2


def test_decoder_of_bart_is_traced(calibrations):
    """Only the decoder of BART is built. The config of the whole BART says that labels are not at the text."""
    sizes = {'d_model': 16, 'decoder_layers': 1, 'decoder_attention_heads': 2, 'decoder_ffn_dim': 16}
    model = ModelConfig(config={'model_type': 'bart', 'vocab_size': 50, **sizes})
    config = TrainConfig(model=model, algorithms={'token_accumulation': None}, trainer={'device': 'cpu'})
    table = sizes_of([5, 20])
    samples = MadeUpSamples(table, None, source_of(config).model_config(None))
    assert traces.memory_of_run(config, samples, None, table).peak(SHAPE) > 0
    assert traces._flop_coefficients(config, samples, None, table) is not None


@pytest.mark.parametrize('precision', ['amp_bf16', 'AMP_BF16', 'amp_fp8'])
def test_precision_of_a_trace(precision):
    assert traces._traced_precision(config_of({'trainer.precision': precision})) == 'amp_bf16'


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
