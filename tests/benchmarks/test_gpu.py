# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The GPU benchmark's own code on a CPU, and its readings of a profile and of warnings, which only a GPU makes."""

from __future__ import annotations

import json
import types
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.device import CPU
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import attainable, overhead, scale, speed
from benchmarks.gpu.report import write_report
from benchmarks.gpu.store import Store
from composer_tokacc import count_tokens

NAMES = {
    'a_exactness', 'b_throughput_1.0', 'b_throughput_tables', 'c_overhead', 'd_pinned', 'e_memory_text',
    'f_out_of_memory', 'g_ranks_ddp',
}  # fmt: skip


@pytest.mark.slow
def test_rehearsal_of_all_parts(tmp_path, monkeypatch):
    monkeypatch.setattr('sys.argv', ['gpu', '--rehearse', '--results', str(tmp_path)])
    program.main()
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob('*.json')}
    assert files.keys() == NAMES
    failed = {name: file['result']['traceback'] for name, file in files.items() if 'error' in file['result']}
    assert not failed
    results = {name: file['result'] for name, file in files.items()}
    assert all(file['machine']['torch'] for file in files.values())
    # Figures of a CPU mean nothing, but what is exact is exact anywhere, and what is counted is counted.
    assert results['a_exactness']['holds']
    assert results['a_exactness']['errors']['fp32']['stock 1'] > 0.01
    assert results['f_out_of_memory']['holds']
    assert results['f_out_of_memory']['attempts'] == [32, 16, 8]
    assert results['g_ranks_ddp']['holds']
    for method in ('stock', 'ours', 'packing'):
        assert results['b_throughput_1.0']['methods'][method]['tokens_per_second'] > 0
    padding = {method: found['padding'] for method, found in results['b_throughput_1.0']['methods'].items()}
    assert padding['stock'] > padding['ours'] >= padding['packing'] == 0
    assert 'rehearsal' in (tmp_path / 'section.md').read_text()


@pytest.mark.slow
def test_failed_part_is_written_and_measured_again_and_a_good_one_is_kept(tmp_path):
    store, calls = Store(tmp_path, CPU), []

    def fail():
        calls.append('fail')
        raise RuntimeError('no such kernel')

    assert 'no such kernel' in store.measure('a_part', fail)['error']
    assert 'in fail' in json.loads((tmp_path / 'a_part.json').read_text())['result']['traceback']
    assert store.measure('a_part', lambda: {'value': 1}) == {'value': 1}
    assert store.measure('a_part', fail) == {'value': 1}
    assert calls == ['fail']
    (tmp_path / 'a_part.json').write_text('{"result": {"val')  # killed while it wrote, or a full disk
    assert store.measure('a_part', lambda: {'value': 2}) == {'value': 2}
    write_report(tmp_path)  # nothing to draw


def event(name, device, start, end, **more):
    return types.SimpleNamespace(
        name=name, device_type=device, time_range=types.SimpleNamespace(start=start, end=end), **more
    )


def test_idle_gap_is_from_the_last_kernel_before_the_read_to_the_first_after():
    gpu, cpu = DeviceType.CUDA, DeviceType.CPU
    read = event(overhead.READ, cpu, 90, 130)
    kernels = [event('matmul', gpu, 10, 60), event('matmul', gpu, 60, 120), event('sgd', gpu, 180, 200)]
    # The annotation is repeated on the device's line, over the gap itself.
    repeated = event(overhead.READ, gpu, 90, 190, is_user_annotation=True)
    step = event('Optimizer.step#SGD.step', gpu, 100, 200)
    assert overhead.idle_gap([read, *kernels, repeated, step]) == {
        'gap_ms': 0.06, 'kernels_ms': pytest.approx(0.13), 'kernels': 3
    }  # fmt: skip
    # The host was ahead: the device was at work all the while.
    ahead = [event('matmul', gpu, 10, 160), event('sgd', gpu, 160, 200)]
    assert overhead.idle_gap([read, *ahead])['gap_ms'] == 0
    assert overhead.idle_gap([read]) is None


def test_syncs_are_told_by_the_line_of_the_package_that_waited(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, 'set_sync_debug_mode', modes.append)

    def wait(*args):
        warnings.warn('called a synchronizing CUDA operation', stacklevel=1)
        warnings.warn('something else', stacklevel=1)
        return torch.ones(1, 3, dtype=torch.bool)

    monkeypatch.setattr('composer_tokacc.counting.loss_mask', wait)
    found = Counter()
    with overhead.syncs_by_line(found):
        count_tokens({'labels': torch.ones(1, 3, dtype=torch.long)})
        wait()
    assert modes == ['warn', 'default']
    assert sum(found.values()) == 2
    assert overhead._ours(found) == 1
    assert any(line.startswith('composer_tokacc/counting.py:') for line in found)


def test_operations_of_the_model_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    from benchmarks.small_llava import make_rows
    from composer_tokacc import BatchLayout

    config = scale.REHEARSAL.config()
    rows = make_rows([24, 24], 0, config)
    batch = BatchLayout.for_model(config).concat(rows)
    model = scale.build_llava(config, CPU, attention='eager')
    with FlopCounterMode(display=False) as counter:
        model(**{key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}).loss.backward()
    counted = counter.get_total_flops()
    # Torch counts the whole square of attention, the projector and the patch embedding; we the causal half alone.
    expected = speed.model_flops(np.array([24, 24]), sum(batch['num_images']), scale.REHEARSAL)
    assert expected == pytest.approx(counted, rel=0.2)
    assert expected < counted


@pytest.mark.parametrize('variation', [0.29, 0.48, 0.8, 1.0])
def test_length_sets_have_the_variation_that_they_are_called_by(variation):
    lengths = speed.lengths_of(variation, scale.FULL)
    assert lengths.std() / lengths.mean() == pytest.approx(variation, rel=0.01)
    assert lengths.max() <= 8192


def test_positions_of_each_way_are_those_counted_by_hand():
    found = attainable.positions(np.array([8, 2, 2, 2]), microbatch=2)
    assert found == {'stock': 32, 'hugging_face': 20, 'ours': 14, 'none': 14}
