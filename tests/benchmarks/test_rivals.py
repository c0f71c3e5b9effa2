# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tests the benchmark against other trainers: its hooks, its contenders, and the pages with its results."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers

from benchmarks.adapters import gradients_of
from benchmarks.record import filled, read
from benchmarks.rivals import __main__ as program
from benchmarks.rivals import report, speed
from benchmarks.rivals.contenders import CONTENDERS
from benchmarks.rivals.data import UNKNOWN, Samples, Sizes, collate, lengths_of, new_model
from benchmarks.rivals.probe import watched
from composer_tokacc.invariance import relative_error
from composer_tokacc.planning import pack_lengths

if transformers.__version__.startswith('4.'):
    pytest.skip('rivals run with Transformers 5', allow_module_level=True)

SIZES = Sizes(
    model='llama',
    hidden=64,
    layers=1,
    mean=16,
    samples=16,
    global_batch=8,
    microbatch=2,
    workers=0,
)


def measured_cells():
    """Returns copies of the cells of the results file that have rounds."""
    return [cell for cell in read(report.RESULTS_FILE)['cells'] if 'rounds' in cell]


def small_samples(**changes):
    sizes = replace(SIZES, **changes)
    lengths, _ = lengths_of('lognormal 0.9', sizes.mean)
    return sizes, Samples(sizes, lengths)


@pytest.mark.parametrize('page', report.PAGES, ids=lambda page: page.name)
def test_pages_show_the_results(page):
    text = page.read_text()
    assert text == filled(text, report.parts_of(read(report.RESULTS_FILE))), 'python -m benchmarks.rivals --report'


def test_results_have_titles_and_settings():
    assert set(report.TITLES) == set(CONTENDERS)
    for cell in read(report.RESULTS_FILE)['cells']:
        assert cell['rival'] in report.TITLES
        assert cell['measured_on']['versions']['transformers']
        assert 'error' in cell or cell['settings']


def test_faster_rival_is_named():
    cells = measured_cells()
    odb = next(cell for cell in cells if cell['rival'] == 'odb')
    for each_round in odb['rounds']:
        each_round['tokens_per_second'] *= 1000
    odb['tokens_per_second'] = [1000 * speed for speed in odb['tokens_per_second']]
    lines = report.ratios(cells).splitlines()
    [row] = [line for line in lines if line.startswith(f'| {report.TITLES["odb"]} |')]
    texts = row.split('|')
    least_case = texts[3].strip()
    faster_cases = texts[5]
    assert least_case in faster_cases


def test_contender_over_cap_is_named():
    cells = measured_cells()
    assert 'over the cap, in all sets: none.' in report.reached_the_model(cells)
    cells[0]['within_cap'] = False
    assert 'over the cap, in all sets: none.' not in report.reached_the_model(cells)


def test_rounds_of_two_runs():
    cells = []
    for name, speeds in (('ours', [10.0, 30.0, 40.0]), ('odb', [30.0, 10.0, 20.0])):
        cells.append(
            {
                'rival': name,
                'rounds': [{'tokens_per_second': value} for value in speeds],
                'tokens_per_second': speed.quartiles(speeds),
                'measured_on': 'the same run',
            }
        )
    # The median of the ratios 1/3, 3 and 2.
    assert report.against(cells, 'odb') == pytest.approx(2.0)
    cells[1]['measured_on'] = 'another run'
    # The ratio of the medians 30 and 20.
    assert report.against(cells, 'odb') == pytest.approx(1.5)


def test_number_of_packed_rows():
    sizes = Sizes(model='llama')
    all_lengths, _ = lengths_of('lognormal 0.9', sizes.mean)
    lengths = Samples(sizes, all_lengths).lengths
    cells = report.cells_of_set(read(report.RESULTS_FILE)['cells'], report.SHOWN_SET)
    cells_of_llama = {}
    for cell in cells:
        if cell['model'] == 'llama' and cell['ranks'] == 1:
            cells_of_llama[cell['rival']] = cell
    cap = cells_of_llama['ours_packed']['cap']
    num_packed = 0
    for step in lengths.reshape(-1, sizes.global_batch):
        packed_rows = pack_lengths(step.tolist(), cap)
        num_packed += len(packed_rows)
    num_full = cells_of_llama['bound']['settings']['microbatches']
    page = ' '.join(report.PAGES[-1].read_text().split())
    assert f'{num_packed} microbatches an epoch instead of {num_full}' in page


def test_hung_contender_keeps_its_cell(tmp_path):
    path = tmp_path / 'results.json'
    cell = {'model': 'llama', 'set': 'digits', 'ranks': 1, 'rival': 'odb'}
    other = {**cell, 'rival': 'hf', 'rounds': [2]}
    program.keep(path, [{**cell, 'rounds': [1]}])
    program.keep(path, [cell, other])
    cells = json.loads(path.read_text())['cells']
    assert [row['rival'] for row in cells] == ['odb', 'hf']
    assert [row['rounds'] for row in cells] == [[1], [2]]
    program.keep(path, [{**cell, 'rounds': [3]}])
    cells = json.loads(path.read_text())['cells']
    assert cells[0]['rounds'] == [3]


def trained_model(sizes, lr=0.0):
    model = new_model(sizes)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def loss_of(model, samples, indices):
    outputs = model(**collate([samples[index] for index in indices]))
    return outputs.loss


def test_hooks_record_the_samples():
    sizes, samples = small_samples()
    model, optimizer = trained_model(sizes, lr=0.1)
    with watched(model, samples) as trace:
        # A step of two microbatches, and a step of one.
        for microbatches in ([[3, 1], [4]], [[0, 2, 5]]):
            optimizer.zero_grad()
            for microbatch in microbatches:
                loss_of(model, samples, microbatch).backward()
            # A forward without gradients is not part of a step.
            with torch.no_grad():
                loss_of(model, samples, [9])
            optimizer.step()
    assert trace.indices == [[3, 1, 4], [0, 2, 5]]
    lengths = samples.lengths
    assert trace.tokens == [
        sum(lengths[[3, 1, 4]]),
        sum(lengths[[0, 2, 5]]),
    ]
    positions_of_3_and_1 = 2 * max(lengths[[3, 1]])
    positions_of_4 = lengths[4]
    positions_of_second_step = 3 * max(lengths[[0, 2, 5]])
    assert trace.positions == [
        positions_of_3_and_1 + positions_of_4,
        positions_of_second_step,
    ]
    assert trace.largest_microbatch == max(positions_of_3_and_1, positions_of_4, positions_of_second_step)
    assert len(trace.ends) == 2
    assert set(trace.gradient) == {name for name, _ in model.named_parameters()}


def test_hooks_count_dummy_rows():
    """A sample without labels is a dummy row. A row with other tokens and with labels is unknown."""
    sizes, samples = small_samples()
    model, optimizer = trained_model(sizes)
    dummy = samples[2]
    dummy['labels'][1:] = -100
    unknown = samples[3]
    unknown['input_ids'] = unknown['input_ids'].flip(0) + 1
    with watched(model, samples) as trace:
        model(**collate([samples[1], dummy, unknown])).loss.backward()
        optimizer.step()
    assert trace.indices == [[1, UNKNOWN]]
    assert trace.num_dummy_rows == 1


def test_documents_are_samples():
    sizes, samples = small_samples()
    model, optimizer = trained_model(sizes)
    documents = [samples[4], samples[7]]
    ids = torch.cat([document['input_ids'] for document in documents])
    labels = torch.cat([document['labels'] for document in documents])
    positions = torch.cat([torch.arange(len(document['input_ids'])) for document in documents])
    packed_row = {'input_ids': ids[None], 'labels': labels[None], 'position_ids': positions[None]}
    with watched(model, samples) as trace:
        model(**packed_row, use_cache=False).loss.backward()
        optimizer.step()
    assert trace.indices == [[4, 7]]
    assert trace.positions == trace.tokens


def test_kinds_of_global_batches():
    in_order = [list(range(8)), list(range(8, 16))]
    reversed_batches = [batch[::-1] for batch in in_order]
    unequal_batches = [list(range(7)), list(range(7, 16))]
    assert speed.membership(in_order, 16, 8) == 'the same'
    assert speed.membership(reversed_batches, 16, 8) == 'the same'
    assert speed.membership(unequal_batches, 16, 8) == 'by length'
    generator = torch.Generator().manual_seed(42)
    order = torch.randperm(16, generator=generator).tolist()
    assert speed.membership([order[:8], order[8:]], 16, 8) == 'of a shuffle of its own'


def test_reference_equals_one_forward():
    sizes, samples = small_samples(model='llava')
    gradient = speed.whole_gradient(new_model(sizes), samples, range(6))
    model = new_model(sizes)
    loss_of(model, samples, range(6)).backward()
    error, _ = relative_error(gradient, gradients_of(model))
    assert error < 1e-6


def inspected(name, **changes):
    sizes, samples = small_samples(model='llava', **changes)
    held_out = Samples(replace(sizes, samples=4), samples.lengths, seed=1)
    return speed.inspect_epoch(name, sizes, samples, held_out, {})


@pytest.mark.parametrize(
    'name',
    [
        'ours',
        pytest.param('composer', marks=pytest.mark.slow),
        pytest.param('ours_sampler', marks=pytest.mark.slow),
        pytest.param('ours_packed', marks=pytest.mark.slow),
    ],
)
def test_our_epochs_keep_the_cap(name):
    cell = inspected(name)
    assert cell['global_batches'] == 'the same'
    assert cell['every_sample_once']
    assert cell['within_cap']
    assert cell['steps'] == 2
    assert (cell['gradient_error'] < 1e-6) == (name != 'composer'), cell['gradient_error']
    assert cell['settings']['device_train_microbatch_size'] == 2


@pytest.mark.parametrize(
    ('name', 'package', 'keeps_batches'),
    [
        ('odb', 'odb', False),
        pytest.param('trl', 'trl', True, marks=pytest.mark.slow),
        ('accelerate_planned', 'accelerate', True),
        pytest.param('hf', 'accelerate', True, marks=pytest.mark.slow),
        pytest.param('hf_group', 'accelerate', False, marks=pytest.mark.slow),
        pytest.param('hf_rebalance', 'accelerate', False, marks=pytest.mark.slow),
        pytest.param('hf_planned', 'accelerate', True, marks=pytest.mark.slow),
    ],
)
def test_rival_sees_every_sample_once(name, package, keeps_batches):
    pytest.importorskip(package)
    cell = inspected(name, workers=1 if name == 'odb' else 0)
    assert cell['every_sample_once']
    assert cell['unknown_rows'] == cell['filler_rows'] == 0
    assert (cell['global_batches'] == 'the same') == keeps_batches
