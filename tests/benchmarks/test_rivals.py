# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark against the real packages: its eyes, its adapters, and that its page is made from its results file."""

from __future__ import annotations

import copy
import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import chain

import pytest
import torch
import transformers

from benchmarks.record import filled
from benchmarks.rivals import __main__ as program
from benchmarks.rivals import adapters, report, speed
from benchmarks.rivals.contenders import CONTENDERS
from benchmarks.rivals.data import Samples, Sizes, build_processor, collate, lengths_of, new_model
from benchmarks.rivals.probe import watched
from benchmarks.rivals.report import BOUND, CONTENDER_TITLES, TRAINER_TITLES
from composer_tokacc import verify_invariance
from composer_tokacc.invariance import relative_error
from composer_tokacc.planning import pack_lengths
from tests.support.launch import ROOT
from tests.support.text import text_model, text_rows

if transformers.__version__.startswith('4.'):
    pytest.skip('rivals run with Transformers 5', allow_module_level=True)

SIZES = Sizes(model='llama', hidden=64, layers=1, mean=16, samples=32, global_batch=16, microbatch=2, workers=0)
ROWS = [(4, 2), (14, 11), (9, 9), (6, 1)]


def small_samples(**changes):
    sizes = replace(SIZES, **changes)
    return sizes, Samples(sizes, lengths_of('lognormal 0.9', sizes.mean))


# ---- the page


@pytest.mark.parametrize('page', report.PAGES, ids=lambda page: page.name)
def test_the_page_shows_the_results_file(page):
    assert page.read_text() == filled(page.read_text(), report.parts_of(report.read())), (
        'python -m benchmarks.rivals report'
    )


def test_every_table_of_the_results_is_on_a_page_once():
    made = [name for page in report.PAGES for name in re.findall(r'<!-- made: (\w+) -->', page.read_text())]
    assert sorted(set(made)) == sorted(report.parts_of(report.read()))
    assert len(made) == len(set(made)) + 1  # where it was measured stands on both


def test_results_have_a_title_for_every_row_and_settings_for_every_cell():
    results = report.read()
    assert {row['trainer'] for row in results['exactness']} == set(TRAINER_TITLES) == set(adapters.ADAPTERS)
    assert {cell['rival'] for cell in results['cells']} <= set(CONTENDER_TITLES) == set(CONTENDERS)
    for row in [*results['exactness'], *results['cells']]:
        assert row['measured_on']['versions']['transformers']
        assert 'error' in row or 'trainer' in row or row['settings']


def test_a_rival_that_is_faster_is_named_with_its_cell_and_so_is_who_breaks_the_cap():
    cells = [cell for cell in copy.deepcopy(report.read()['cells']) if 'rounds' in cell]
    for one in next(cell for cell in cells if cell['rival'] == 'odb')['rounds']:
        for figure in ('tokens_per_second', 'tokens_per_processor_second'):
            one[figure] *= 1000
    [row] = [line for line in report.ratios(cells).splitlines() if line.startswith(f'| {CONTENDER_TITLES["odb"]} |')]
    assert row.split('|')[3].strip() in row.split('|')[5]
    rivals = [cell for cell in cells if cell['rival'] != BOUND]
    assert 'over the cap, in all sets: none.' in report.reached_the_model(rivals)
    rivals[0]['within_cap'] = False
    assert 'over the cap, in all sets: none.' not in report.reached_the_model(rivals)


def test_rounds_of_two_runs_are_not_held_to_each_other():
    rounds = {'ours': [10.0, 30.0, 20.0], 'odb': [30.0, 10.0, 20.0]}
    cells = [
        {
            'rival': name, 'rounds': [{'tokens_per_second': one} for one in speeds],
            'tokens_per_second': speed.quartiles(speeds),
            'measured_on': {'machine': {'cores': 2, 'load_average': 0.5}},
        } for name, speeds in rounds.items()
    ]  # fmt: skip
    cells[0]['rounds'][2]['tokens_per_second'] = 40.0
    assert report.against(cells, 'odb') == pytest.approx(2.0)
    cells[1]['measured_on'] = {'machine': {'cores': 2, 'load_average': 0.6}}
    assert report.against(cells, 'odb') == pytest.approx(1.0)


def test_other_work_in_the_middle_of_a_set_leaves_processor_time_to_compare():
    quiet = {'tokens_per_second': 10.0, 'tokens_per_processor_second': 5.0, 'load_average': 0.5}
    cells = [
        {
            'rival': name, 'rounds': [quiet, {**quiet, 'tokens_per_processor_second': of_cpu, 'load_average': load}],
            'tokens_per_second': [10.0] * 3, 'tokens_per_processor_second': [of_cpu] * 3,
            'measured_on': {'machine': {'cores': 2, 'load_average': 0.5}},
        } for name, of_cpu, load in (('ours', 15.0, 0.5), ('odb', 5.0, 3.5))
    ]  # fmt: skip
    assert report.against(cells, 'odb') == pytest.approx(2.0)  # 1 and 3, round by round
    cells[1]['rounds'][1]['load_average'] = 0.5
    assert report.against(cells, 'odb') == pytest.approx(1.0)


def test_packed_rows_of_an_epoch_are_as_many_as_the_page_says():
    sizes = Sizes(model='llama')
    lengths = Samples(sizes, lengths_of('lognormal 0.9', sizes.mean)).lengths
    cells = {
        cell['rival']: cell for cell in report.read()['cells']
        if (cell['model'], cell['ranks'], cell['set']) == ('llama', 1, report.SHOWN)
    }  # fmt: skip
    steps = lengths.reshape(-1, sizes.global_batch)
    packed = sum(len(pack_lengths(step.tolist(), cells['ours_packed']['cap'])) for step in steps)
    full = cells['bound']['settings']['microbatches']
    page = ' '.join(report.PAGES[-1].read_text().split())
    assert f'{packed} of them an epoch, where the bound has {full})' in page


# ---- the program


def test_what_is_measured_again_leaves_the_other_curves_and_their_machine(tmp_path, monkeypatch):
    path = tmp_path / 'rivals.json'
    busy, quiet = ({'machine': {'cores': 2, 'load_average': load}, 'versions': {}} for load in (9.0, 0.1))
    found = {'set': 'digits', 'sizes': {'samples': 64}}
    both = {part: {name: {'at': part} for name in ('hf', 'odb')} for part in ('curves', 'stalls')}
    monkeypatch.setattr(program, 'measured_on', lambda: busy)
    program.keep_longer(path, {**found, **both})
    monkeypatch.setattr(program, 'measured_on', lambda: quiet)
    program.keep_longer(path, {**found, 'curves': {'odb': {'at': 'again'}}})
    longer = json.loads(path.read_text())['longer']
    assert {part: list(longer[part]) for part in both} == {part: ['hf', 'odb'] for part in both}
    assert [one['at'] for one in longer['curves'].values()] == ['curves', 'again']
    assert longer['curves']['odb']['measured_on'] == quiet
    assert [one['measured_on'] for one in longer['stalls'].values()] == [busy, busy]
    program.keep_longer(path, {**found, 'sizes': {'samples': 32}, 'curves': {'odb': {'at': 'other sizes'}}})
    longer = json.loads(path.read_text())['longer']
    assert list(longer['curves']) == ['odb']
    assert 'stalls' not in longer


def test_a_rival_that_stood_still_leaves_the_row_that_it_has(tmp_path):
    path, keys = tmp_path / 'results.json', ('set', 'rival')
    measured, still = {'set': 'digits', 'rival': 'odb', 'rounds': [1]}, {'set': 'digits', 'rival': 'odb'}
    program.keep(path, 'cells', [still], *keys)
    program.keep(path, 'cells', [measured], *keys)
    program.keep(path, 'cells', [{**still, 'error': 'died'}], *keys)
    program.keep(path, 'cells', [still, {'set': 'digits', 'rival': 'hf', 'rounds': [2]}], *keys)
    rows = json.loads(path.read_text())['cells']
    assert [(row['rival'], row.get('rounds')) for row in rows] == [('odb', [1]), ('hf', [2])]
    program.keep(path, 'cells', [{**measured, 'rounds': [3]}], *keys)
    assert json.loads(path.read_text())['cells'][0]['rounds'] == [3]


REFUSED = {
    **{
        f'{name} {value}': (['speed', 'curves', name, value], f'`{name}` must be at least')
        for name, value in (('--steps', '20'), ('--ranks', '0'), ('--rounds', '0'), ('--microbatch', '0'),
                            ('--workers', '-1'), ('--limit', '0'))
    },
    'curves of a rival that has none': (['curves', '--rivals', 'trl'], "got: ['trl']"),
    'an epoch of one step': (['speed', '--samples', '64', '--results', '{new}'], 'two or more whole global batches'),
    'parts of steps': (['speed', '--samples', '100', '--results', '{new}'], 'two or more whole global batches'),
    'other sizes than those that are there': (
        ['speed', '--rivals', 'hf', '--samples', '128'], '`--results` must be of the same sizes',
    ),
    'results over their picture': (['speed', '--results', 'mine.png'], '`--results` must be a .json file'),
}  # fmt: skip


def refusal(arguments, monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', ['rivals', *arguments])
    with pytest.raises(SystemExit):
        program.arguments()
    return capsys.readouterr().err


@pytest.mark.parametrize(('arguments', 'message'), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_measure_nothing_or_mix_results_is_refused(arguments, message, monkeypatch, capsys, tmp_path):
    arguments = [one.format(new=tmp_path / 'a.json') for one in arguments]
    assert message in refusal(arguments, monkeypatch, capsys)


@pytest.mark.parametrize('text', ['', '{', '[]', '{"cells": 3}'])
def test_results_that_are_none_are_refused_before_anything_is_measured(text, monkeypatch, capsys, tmp_path):
    path = tmp_path / 'mine.json'
    for arguments in (['speed', '--results', str(path)], ['speed', '--rivals', 'hf']):
        monkeypatch.setattr('sys.argv', ['rivals', *arguments])
        program.arguments()
    path.write_text(text)
    message = refusal(['speed', '--results', str(path)], monkeypatch, capsys)
    assert '`--results` must name a file of results or a new one' in message


# ---- the adapters


@pytest.mark.parametrize('name', ['hugging_face', 'lightning', 'accelerate', 'accelerate_by_tokens', 'plain_loop'])
def test_an_adapter_is_short_enough_to_copy(name):
    lines = [line for line in inspect.getsource(getattr(adapters, name)).splitlines() if line.strip()]
    assert len(lines) - 1 <= 25  # its docstring is none of them


@pytest.mark.parametrize(('name', 'needs', 'exact'), [
    ('plain', None, False), ('composer', None, False), ('composer_flag', None, False), ('ours', None, True),
    pytest.param('hf', 'accelerate', True, marks=pytest.mark.slow), ('accelerate', 'accelerate', False),
    ('accelerate_tokens', 'accelerate', True),
    ('lightning', 'lightning', False),
])  # fmt: skip
def test_an_adapter_shows_what_its_trainer_does(name, needs, exact, monkeypatch):
    if needs:
        pytest.importorskip(needs)
        for variable in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'):  # of tests before, in this process
            monkeypatch.delenv(variable, raising=False)
    model = text_model()
    gradients = adapters.ADAPTERS[name](model)

    def fresh(microbatches):
        model.zero_grad(set_to_none=True)
        return gradients(microbatches)

    def whole(batch):
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        return adapters.gradients_of(model)

    report = verify_invariance(
        fresh, text_rows(ROWS), reference=whole, microbatch_sizes=[1, 4], padding_sides=['right']
    )
    assert report.is_exact == exact, report
    alone = [case for case in report.cases if case.cut == 'in order' and case.microbatch_size == 4]
    assert [case.error for case in alone] == [pytest.approx(0, abs=1e-6)]


# ---- the eyes


def trained(sizes, lr=0.0):
    model = new_model(sizes)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def test_what_reached_the_model_is_seen():
    sizes, samples = small_samples()
    model, optimizer = trained(sizes, lr=0.1)
    parts = [[[3, 1], [4]], [[0, 2, 5]]]
    with watched(model, samples, inspect=True, curve=True) as seen:
        for step in parts:
            optimizer.zero_grad()
            for microbatch in step:
                model(**collate([samples[one] for one in microbatch])).loss.backward()
            with torch.no_grad():
                model(**collate([samples[9]]))  # a look is no step
            optimizer.step()
    lengths = samples.lengths
    assert seen.ids == [[3, 1, 4], [0, 2, 5]]
    assert seen.tokens == [sum(lengths[[3, 1, 4]]), sum(lengths[[0, 2, 5]])]
    assert seen.positions == [2 * max(lengths[[3, 1]]) + lengths[4], 3 * max(lengths[[0, 2, 5]])]
    assert seen.largest == max(2 * max(lengths[[3, 1]]), lengths[4], 3 * max(lengths[[0, 2, 5]]))
    assert [count for _, count in seen.losses] == [
        sum(int((samples[one]['labels'][1:] != -100).sum()) for one in chain.from_iterable(step)) for step in parts
    ]
    assert seen.saved > 0
    assert len(seen.ends) == len(seen.waits) == 2
    assert set(seen.gradient) == {name for name, _ in model.named_parameters()}


def test_rows_with_other_labels_are_told_from_samples_and_strangers_from_both():
    sizes, samples = small_samples()
    model, optimizer = trained(sizes)
    filler, stranger = samples[2], samples[3]
    filler['labels'][1:] = -100
    stranger['input_ids'] = stranger['input_ids'].flip(0) + 1
    with watched(model, samples) as seen:
        model(**collate([samples[1], filler, stranger])).loss.backward()
        optimizer.step()
    assert seen.ids == [[1, -1]]
    assert seen.fillers == 1


def test_documents_of_a_packed_row_are_samples():
    sizes, samples = small_samples()
    model, optimizer = trained(sizes)
    parts = [samples[4], samples[7]]
    row = {key: torch.cat([part[key] for part in parts])[None] for key in ('input_ids', 'labels')}
    positions = torch.cat([torch.arange(len(part['input_ids'])) for part in parts])[None]
    with watched(model, samples) as seen:
        model(**row, position_ids=positions, use_cache=False).loss.backward()
        optimizer.step()
    assert seen.ids == [[4, 7]]
    assert seen.positions == seen.tokens


def test_global_batches_are_told_apart():
    in_order = [list(range(8)), list(range(8, 16))]
    assert speed.membership(in_order, 16, 8) == 'the same'
    assert speed.membership([batch[::-1] for batch in in_order], 16, 8) == 'the same'
    assert speed.membership([list(range(7)), list(range(7, 16))], 16, 8) == 'by length'
    order = torch.randperm(16, generator=torch.Generator().manual_seed(42)).tolist()
    assert speed.membership([order[:8], order[8:]], 16, 8) == 'of a shuffle of its own'


def test_the_reference_is_one_forward_over_all():
    sizes, samples = small_samples(model='llava')
    found = speed.whole_gradient(new_model(sizes), samples, range(6))
    model = new_model(sizes)
    model(**collate([samples[one] for one in range(6)])).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative_error(found, expected)[0] < 1e-6
    assert speed.factor({name: 2 * value for name, value in found.items()}, expected) == pytest.approx(2.0)


def test_the_processor_makes_the_very_samples():
    _, samples = small_samples(model='llava')
    processor = build_processor()
    with_images = 0
    for sample, row in zip(samples, samples.messages(), strict=True):
        made = processor(images=row['images'] or None, text=row['prompt'] + row['completion'], return_tensors='pt')
        assert made['input_ids'][0].tolist() == sample['input_ids'].tolist()
        if 'pixel_values' in sample:
            with_images += 1
            assert torch.equal(made['pixel_values'], sample['pixel_values'])
    assert with_images > 5


@pytest.mark.parametrize(
    'name',
    ['ours', *(pytest.param(name, marks=pytest.mark.slow) for name in ('composer', 'ours_sampler', 'ours_packed'))],
)
def test_an_epoch_of_ours_keeps_the_global_batches_within_the_cap(name):
    sizes, samples = small_samples(model='llava')
    held_out = Samples(sizes, samples.lengths, seed=1, count=4)
    cell = speed.inspected(name, sizes, samples, held_out, {})
    assert cell['global_batches'] == 'the same'
    assert cell['every_sample_once']
    assert cell['within_cap']
    assert cell['steps'] == 2
    assert (cell['gradient_error'] < 1e-6) == (name != 'composer'), cell['gradient_error']
    assert cell['settings']['device_train_microbatch_size'] == 2


@pytest.mark.parametrize('name', ['odb', 'trl', 'lightning', pytest.param('hf_group', marks=pytest.mark.slow)])
def test_a_rival_sees_every_sample_once(name):
    pytest.importorskip({'odb': 'odb', 'trl': 'trl', 'lightning': 'lightning', 'hf_group': 'accelerate'}[name])
    sizes, samples = small_samples(model='llava', workers=1)
    cell = speed.inspected(name, sizes, samples, Samples(sizes, samples.lengths, seed=1, count=4), {})
    assert cell['every_sample_once']
    assert cell['unknown_rows'] == cell['filler_rows'] == 0
    assert (cell['global_batches'] == 'the same') == (name in ('trl', 'lightning'))


def test_the_program_ends_though_a_rival_leaves_a_loader_process_behind(tmp_path):
    pytest.importorskip('odb')
    results = tmp_path / 'results.json'
    command = [sys.executable, '-m', 'benchmarks.rivals', 'stalls', '--results', str(results), '--steps', '4']
    subprocess.run([*command, '--rivals', 'odb', 'ours_packed'], cwd=ROOT, check=True, timeout=240)
    assert list(json.loads(results.read_text())['longer']['stalls']) == ['odb', 'ours_packed']
