# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tests the benchmark for GPUs with tiny sizes on a CPU."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu
from benchmarks.timed_steps import CPU


@pytest.mark.slow
def test_rehearsal_of_all_parts(tmp_path, monkeypatch):
    monkeypatch.delenv('COMPOSER_TOKACC_LENGTHS', raising=False)
    monkeypatch.setattr('sys.argv', ['gpu', '--rehearse', '--results', str(tmp_path)])
    gpu.main()
    results = {}
    for path in tmp_path.glob('*.json'):
        file = json.loads(path.read_text())
        assert file['machine']['torch']
        assert 'error' not in file['result'], file['result']['traceback']
        results[path.stem] = file['result']
    assert sorted(results) == [
        'exactness',
        'logits',
        'memory',
        'memory_checkpointing',
        'out_of_memory',
        'speed_1.0',
        'speed_tables',
    ]
    # Speed on a CPU says nothing about a GPU, so only exactness, counts and padding are tested.
    assert results['exactness']['holds']
    assert results['exactness']['errors']['fp32']['stock 1'] > 0.01
    assert results['out_of_memory']['holds']
    assert results['out_of_memory']['attempts'] == [32, 16, 8]
    assert len(results['memory']['shapes']) == len(gpu.MEMORY_SHAPES)
    assert all(result['times_as_fast'] > 1 for result in results['logits'].values())
    methods = results['speed_1.0']['methods']
    assert all(method['tokens_per_second'] > 0 for method in methods.values())
    padding = {name: method['padding'] for name, method in methods.items()}
    assert padding['stock'] > padding['ours'] >= padding['packing']
    assert padding['packing'] == 0
    assert results['speed_tables']['source'].startswith('SYNTHETIC')


def test_failed_part_keeps_its_traceback(tmp_path):
    def fail():
        raise RuntimeError('no such kernel')

    gpu.record(tmp_path, 'part', CPU, fail)
    result = json.loads((tmp_path / 'part.json').read_text())['result']
    assert 'no such kernel' in result['error']
    assert 'in fail' in result['traceback']


@pytest.mark.parametrize('variation', gpu.TARGETS)
def test_length_sets_have_their_variation(variation):
    lengths, _ = gpu.FULL.lengths_of(variation)
    assert lengths.std() / lengths.mean() == pytest.approx(variation, rel=0.01)
    assert lengths.max() <= 8192
