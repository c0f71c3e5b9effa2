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
from tests.support.text import packed_row

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
    results = read(report.RESULTS_FILE)
    parts = report.parts_of(results)
    text = page.read_text()
    assert text == filled(text, parts), 'python -m benchmarks.rivals --report'


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
    title = report.TITLES['odb']

    lines = report.ratios(cells).splitlines()

    [row] = [line for line in lines if line.startswith(f'| {title} |')]
    texts = row.split('|')
    least_case = texts[3].strip()
    faster_cases = texts[5]
    assert least_case in faster_cases


def test_contender_over_cap_is_named():
    cells = measured_cells()
    nothing_over_cap = 'over the cap, in all sets: none.'
    assert nothing_over_cap in report.reached_the_model(cells)

    cells[0]['within_cap'] = False
    assert nothing_over_cap not in report.reached_the_model(cells)


def cell_of_speeds(rival, speeds, *, measured_on):
    """Returns the cell of a rival that trained this many tokens a second in each round."""
    return {
        'rival': rival,
        'rounds': [{'tokens_per_second': value} for value in speeds],
        'tokens_per_second': speed.quartiles(speeds),
        'measured_on': measured_on,
    }


def test_rounds_of_two_runs():
    ours = cell_of_speeds('ours', [10.0, 30.0, 40.0], measured_on='a run')
    odb = cell_of_speeds('odb', [30.0, 10.0, 20.0], measured_on='a run')
    odb_of_another_run = {**odb, 'measured_on': 'another run'}

    median_of_ratios = report.against([ours, odb], 'odb')
    ratio_of_medians = report.against([ours, odb_of_another_run], 'odb')

    assert median_of_ratios == pytest.approx(2.0)  # of 1/3, 3 and 2
    assert ratio_of_medians == pytest.approx(30 / 20)


def test_number_of_packed_rows():
    sizes = Sizes(model='llama')
    all_lengths, _ = lengths_of('lognormal 0.9', sizes.mean)
    lengths = Samples(sizes, all_lengths).lengths
    results = read(report.RESULTS_FILE)
    cells = report.cells_of_set(results['cells'], report.SHOWN_SET)
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


def cells_in(path):
    return json.loads(path.read_text())['cells']


def test_hung_contender_keeps_its_cell(tmp_path):
    """A contender that hung has no rounds. Its earlier ones are kept until it is measured again."""
    path = tmp_path / 'results.json'
    without_rounds = {'model': 'llama', 'set': 'digits', 'ranks': 1, 'rival': 'odb'}
    first_odb = {**without_rounds, 'rounds': [1]}
    hf = {**without_rounds, 'rival': 'hf', 'rounds': [2]}
    second_odb = {**without_rounds, 'rounds': [3]}

    program.keep(path, [first_odb])
    program.keep(path, [without_rounds, hf])
    kept = cells_in(path)
    program.keep(path, [second_odb])
    replaced = cells_in(path)

    rounds_of_rivals = [(cell['rival'], cell['rounds']) for cell in kept]
    assert rounds_of_rivals == [('odb', [1]), ('hf', [2])]
    assert replaced[0]['rounds'] == [3]


def trained_model(sizes, lr=0.0):
    model = new_model(sizes)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def loss_of(model, samples, indices):
    batch = collate([samples[index] for index in indices])
    return model(**batch).loss


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
    tokens_of_first_step = lengths[3] + lengths[1] + lengths[4]
    tokens_of_second_step = lengths[0] + lengths[2] + lengths[5]
    assert trace.tokens == [tokens_of_first_step, tokens_of_second_step]
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
    batch = collate([samples[1], dummy, unknown])

    with watched(model, samples) as trace:
        model(**batch).loss.backward()
        optimizer.step()

    assert trace.indices == [[1, UNKNOWN]]
    assert trace.num_dummy_rows == 1


def test_documents_are_samples():
    sizes, samples = small_samples()
    model, optimizer = trained_model(sizes)
    documents = []
    for index in (4, 7):
        document = {key: samples[index][key][None] for key in ('input_ids', 'labels')}
        documents.append(document)
    row = packed_row(documents)

    with watched(model, samples) as trace:
        model(**row, use_cache=False).loss.backward()
        optimizer.step()

    assert trace.indices == [[4, 7]]
    assert trace.positions == trace.tokens


def own_shuffle():
    """Returns two global batches of 8 samples in the order from which Transformers' BatchRebalanceSampler starts."""
    generator = torch.Generator().manual_seed(42)
    order = torch.randperm(16, generator=generator).tolist()
    return [order[:8], order[8:]]


SAMPLES = list(range(16))


@pytest.mark.parametrize(
    ('global_batches', 'kind'),
    [
        pytest.param([SAMPLES[:8], SAMPLES[8:]], 'the same', id='in order'),
        pytest.param([SAMPLES[7::-1], SAMPLES[:7:-1]], 'the same', id='each reversed'),
        pytest.param([SAMPLES[:7], SAMPLES[7:]], 'by length', id='of unequal size'),
        pytest.param(own_shuffle(), 'of a shuffle of its own', id='shuffled'),
    ],
)
def test_kinds_of_global_batches(global_batches, kind):
    assert speed.membership(global_batches, 16, 8) == kind


def test_reference_equals_one_forward():
    sizes, samples = small_samples(model='llava')
    indices = range(6)
    model = new_model(sizes)
    loss_of(model, samples, indices).backward()

    gradient = speed.whole_gradient(new_model(sizes), samples, indices)

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
    is_exact = cell['gradient_error'] < 1e-6
    is_ours = name != 'composer'
    assert is_exact is is_ours, cell['gradient_error']
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
    workers = 1 if name == 'odb' else 0

    cell = inspected(name, workers=workers)

    assert cell['every_sample_once']
    assert cell['unknown_rows'] == 0
    assert cell['filler_rows'] == 0
    has_same_batches = cell['global_batches'] == 'the same'
    assert has_same_batches is keeps_batches
