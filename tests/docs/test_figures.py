# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Figures of README and docs must agree with ``benchmarks/results``, and pages that scripts write with the scripts."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from benchmarks.encoders import table_of as table_of_encoders
from benchmarks.token_weights import table_of as table_of_weights
from tests.data.formats_page import page as formats_page
from tests.support.launch import ROOT


def results(name: str) -> Any:
    return json.loads((ROOT / 'benchmarks' / 'results' / f'{name}.json').read_text())


def row_of(page: str, beginning: str) -> list[str]:
    """Returns the cells of the only table row that begins so, without the first cell."""
    lines = (ROOT / page).read_text().splitlines()
    rows = [line for line in lines if line.startswith(f'| {beginning}')]
    assert len(rows) == 1, f'{page}: {len(rows)} rows begin with {beginning}'
    row = rows[0].replace('*', '').replace(' % padding', ' %')
    _, *cells = row.strip('|').split('|')
    return [cell.strip() for cell in cells]


def text_of(page: str) -> str:
    """Returns a page without its line breaks."""
    return ' '.join((ROOT / page).read_text().split())


def percent(share: float, digits: int = 0) -> str:
    """Returns a share as the pages write it, for example ``12 %``."""
    return f'{100 * share:.{digits}f} %'


@pytest.mark.parametrize('page', ['README.md', 'docs/benchmarks.md'])
@pytest.mark.parametrize(
    ('method', 'beginning'), [('stock', 'stock Composer |'), ('flag', 'stock, `acc'), ('ours', '`TokenAccumulation` +')]
)
def test_invariance(page, method, beginning):
    runs = [run for run in results('invariance')['runs'] if run['method'] == method]
    assert len(runs) == 9

    expected = []
    for figure, form in (('first_loss', '.5f'), ('last_loss', '.4f'), ('gradient_error', '.1e')):
        values = [run[figure] for run in runs]
        expected.append(f'{min(values):{form}} - {max(values):{form}}')
    assert row_of(page, beginning) == expected


def measured_cells(name: str, model: str, lengths: str) -> dict[str, Any]:
    """Returns the cells of a model on one rank with a set of lengths, by contender."""
    cells = {}
    for cell in results(name)['cells']:
        is_of_model = cell['model'] == model and cell['ranks'] == 1
        if is_of_model and cell['set'] == lengths and 'rounds' in cell:
            cells[cell['rival']] = cell
    return cells


def against_stock(cells: dict[str, Any], rival: str, figure: str = 'tokens_per_second') -> float:
    _, median, _ = cells[rival][figure]
    _, median_of_stock, _ = cells['composer'][figure]
    return median / median_of_stock


def speed_and_padding(cells: dict[str, Any], rival: str, figure: str = 'tokens_per_second') -> str:
    """Returns a cell of the table, for example ``1.7 (12 %)``."""
    padding = percent(cells[rival]['padded_share'])
    return f'{against_stock(cells, rival, figure):.1f} ({padding})'


@pytest.mark.parametrize('title', ['LLaVA', 'Llama'])
def test_speed_of_ragged_rows(title):
    cells = measured_cells('rivals', title.lower(), 'lognormal 0.9')
    expected = [speed_and_padding(cells, rival) for rival in ('composer', 'hf', 'ours', 'ours_packed')]
    assert row_of('docs/benchmarks.md', f'lognormal, variation 0.9, {title}') == expected


@pytest.mark.parametrize('title', ['LLaVA', 'Llama'])
def test_speed_without_padding(title):
    cells = measured_cells('rivals', title.lower(), 'no padding')
    speed = against_stock(cells, 'ours')
    speed_packed = against_stock(cells, 'ours_packed')
    row = row_of('docs/benchmarks.md', f'all rows of equal length, {title}')
    assert row == ['1.00', '', f'{speed:.2f}', f'{speed_packed:.2f}']
    assert 1 - speed < 0.045
    for page in ('README.md', 'docs/limits.md', 'docs/benchmarks.md'):
        assert 'cost up to 4 % of a step' in text_of(page), page


@pytest.mark.parametrize('model', ['smolvlm', 'qwen'])
def test_speed_on_real_tables(model):
    cells = measured_cells('logits', model, 'tables')
    expected = []
    for rival in ('composer', 'hf', 'ours_all_logits'):
        expected.append(speed_and_padding(cells, rival, 'tokens_per_processor_second'))
    assert row_of('docs/benchmarks.md', 'AI2D, ChartQA, DocVQA mixed, a quarter') == [*expected, '']


@pytest.mark.parametrize(('ranks', 'samples'), [(8, 16), (64, 32), (512, 32), (4096, 32)])
def test_balance_of_the_ranks(ranks, samples):
    cases = {}
    for case in results('scaling')['modelled']:
        is_of_size = case['ranks'] == ranks and case['samples a rank'] == samples
        if is_of_size and case['set'] == 'tables mixed':
            cases[case['method']] = case
    regrouped = cases['regrouped over ranks']
    assert row_of('docs/benchmarks.md', f'{ranks:,} x {samples}') == [
        f'{cases["stock Composer"]["slowest / mean"]:.2f}',
        f'{cases["LLaVA even chunks"]["slowest / mean"]:.2f}',
        f'{cases["NeMo-RL stride"]["slowest / mean"]:.2f}',
        f'{regrouped["slowest / mean"]:.3f}',
        f'{regrouped["times stock"]:.2f}x',
        f'{regrouped["share of bound"]:.2f}',
    ]


def test_balance_on_lognormal_lengths():
    times_stock = {}
    for case in results('scaling')['modelled']:
        if case['method'] == 'regrouped over ranks' and case['set'].startswith('lognormal'):
            times_stock[case['ranks']] = case['times stock']
    on_8_ranks = times_stock.pop(8)
    slowest = min(times_stock.values())
    fastest = max(times_stock.values())
    expected = f'{on_8_ranks:.1f} times as fast as stock on 8 ranks, and {slowest:.1f} to {fastest:.1f} times on 64'
    assert expected in text_of('docs/benchmarks.md')


def test_speed_of_composer_and_accelerate():
    medians = {}
    for cell in results('rivals')['cells']:
        if cell['model'] == 'llama' and cell['ranks'] == 2 and cell['set'] == 'lognormal 0.9':
            medians[cell['rival']] = cell['tokens_per_second'][1], cell['tokens_per_processor_second'][1]
    ratio, ratio_by_processor = np.divide(medians['accelerate_planned'], medians['ours_sampler'])
    page = text_of('docs/rivals_speed.md')
    assert f'accelerate trains {ratio:.2f} times as many real tokens a second as Composer' in page
    assert f'and {ratio_by_processor:.2f} times as many a second of processor time' in page


@pytest.mark.parametrize('family', ['LLaVA-1.5', 'Qwen2.5-VL'])
def test_lengths_from_headers(family):
    repeated_sizes = results('lengths')['144 sizes'][family]
    unequal_sizes = results('lengths')['every size another'][family]
    times_faster = repeated_sizes['times_faster']['processor']
    assert row_of('docs/data.md', f'{family} |') == [
        f'{repeated_sizes["reading_seconds"]["processor"]:.0f} s',
        f'{repeated_sizes["headers_seconds"]["processor"]:.1f} s ({times_faster:.0f} times faster)',
        f'{unequal_sizes["times_faster"]["processor"]:.1f} times faster',
    ]


def test_what_the_algorithm_costs():
    share = results('overhead')['shares']['with_all_reduce']
    for page in ('docs/benchmarks.md', 'docs/limits.md', 'composer_tokacc/algorithm/README.md'):
        assert f'{percent(share, digits=1)} of a step' in text_of(page)
    seconds = results('overhead')['seconds']
    check_seconds = f'{seconds["first_check"]:.1f} s'
    later_seconds = f'{seconds["later_check"]:.1f} s'
    assert f'takes {check_seconds} in the demo' in text_of('docs/trainer.md')
    assert f'In the demo this is {check_seconds}, and {later_seconds} in later steps' in text_of('docs/limits.md')
    assert f'first-batch check {check_seconds}, and a later check {later_seconds}' in text_of('docs/benchmarks.md')
    assert 3.5 <= seconds['later_check'] / seconds['step'] < 4.5
    assert 'takes as long as four steps of that model' in text_of('README.md')


def test_times_of_the_planner():
    figures = results('planning')
    small = '64 samples, 2 ranks'
    large = '512 samples, 8 ranks'
    small_without_numba = f'{1000 * figures["without_numba"][small]:.0f} ms'
    large_without_numba = f'{figures["without_numba"][large]:.1f} s'
    page = text_of('docs/trainer.md')
    assert f'{small_without_numba} a step for 64 samples on 2 ranks, {large_without_numba} for 512 on 8' in page
    small_with_numba = f'{1000 * figures["from_cache"][small]:.1f} ms'
    large_with_numba = f'{1000 * figures["from_cache"][large]:.0f} ms'
    docstring = text_of('composer_tokacc/planning/compiled.py')
    assert f'64 samples on 2 ranks takes {small_without_numba} instead of {small_with_numba}' in docstring
    assert f'512 samples on 8 ranks takes {large_without_numba} instead of {large_with_numba}' in docstring


def test_token_weights():
    rows = results('token_weights')['rows']
    page = (ROOT / 'docs' / 'token_weights.md').read_text()
    assert table_of_weights(rows) in page, 'python -m benchmarks.token_weights --report'
    spreads = [row['spread'] for row in rows if row['host'] == 'ours']
    assert max(spreads) < 1 + 1e-5
    rows_of_one_rank = [row for row in rows if row['subject'] == 'mixture' and row['ranks'] == 1]
    (stock,) = [row for row in rows_of_one_rank if row['host'] == 'composer']
    assert stock['source'] == 'real tables: ai2d, chartqa, docvqa'
    assert f'{stock["smallest"]:.2f} to {stock["largest"]:.2f} times their mean' in text_of('README.md')


def test_speed_of_encoders():
    figures = results('encoders')
    assert table_of_encoders(figures) in (ROOT / 'docs' / 'encoders.md').read_text(), 'python -m benchmarks.encoders'
    assert figures['variation'] == pytest.approx(0.9, abs=0.05)
    packed = figures['methods'][-1]
    assert packed['method'] == 'three lines, packed'
    assert packed['against_stock'] >= 2.5


def test_memory_of_logits():
    figures = results('logits_memory')
    at_labels = figures['labels']
    at_all_positions = figures['all']
    ratio = at_labels['positions_that_fit_in_80_gib'] / at_all_positions['positions_that_fit_in_80_gib']
    readme = text_of('README.md')
    assert f'needs {at_labels["gib"]:.1f} GiB beyond the model instead of {at_all_positions["gib"]:.1f}' in readme
    assert f'{ratio:.1f} times as many positions fit in 80 GiB' in readme
    errors = f'up to {percent(at_labels["residual"])} ({percent(at_all_positions["residual"])} for all logits)'
    assert errors in text_of('docs/logits.md')


def test_exactness_on_a_gpu():
    exactness = results('gpu/exactness')['result']
    page = text_of('docs/benchmarks.md')
    worst = {}
    for precision, errors in exactness['errors'].items():
        worst[precision] = max(error for case, error in errors.items() if not case.startswith('stock'))
    stock = max(exactness['errors']['fp32'].values())
    assert f'fp32: {worst["fp32"]:.1e}, and {stock:.1f} in stock Composer' in page
    noise = exactness['bf16_noise_of_one_forward']
    assert f'bf16: {worst["amp_bf16"]:.5f}, as one forward in bf16 ({noise:.5f})' in page


def test_memory_on_a_gpu():
    page = text_of('docs/benchmarks.md')
    out_of_memory = results('gpu/out_of_memory')['result']
    assert out_of_memory['attempts'] == [32, 16, 8]
    assert f'to {out_of_memory["gradient_error"]:.1e}.' in page
    shapes = results('gpu/memory')['result']['shapes']
    percent_too_low = [-100 * shape['error'] for shape in shapes]
    assert f'{min(percent_too_low):.1f} to {max(percent_too_low):.1f} % higher than predicted' in page


@pytest.mark.parametrize(
    ('beginning', 'method'),
    [
        ('slices in order, as stock', 'stock'),
        ('Hugging Face style', 'collate'),
        ('`token_data_spec` |', 'ours'),
        ('packed |', 'packing'),
    ],
)
def test_speed_on_a_gpu(beginning, method):
    figures = results('gpu/speed_tables')['result']['methods'][method]
    assert row_of('docs/benchmarks.md', beginning) == [
        f'{figures["tokens_per_second"]:,.0f}',
        f'{figures["against_stock"]:.2f}',
        percent(figures['padding']),
        ', '.join(f'{seconds:.1f}' for seconds in figures['first_pass_seconds']),
    ]


@pytest.mark.parametrize(('title', 'name'), [('SmolVLM-256M', 'smolvlm'), ('Qwen2.5-VL-3B', 'qwen')])
def test_logits_on_a_gpu(title, name):
    figures = results('gpu/logits')['result'][name]
    at_all_positions = figures['all']
    at_labels = figures['labels']
    assert row_of('docs/logits.md', f'{title} |') == [
        f'{at_all_positions["seconds"]:.3f} s',
        f'{at_labels["seconds"]:.3f} s',
        f'{figures["times_as_fast"]:.2f}',
        f'{at_all_positions["peak_gib"]:.1f} GiB',
        f'{at_labels["peak_gib"]:.1f} GiB',
    ]


def test_formats_are_those_of_the_tests():
    page = (ROOT / 'docs' / 'formats.md').read_text()
    assert page == formats_page(), 'python -m tests.data.formats_page > docs/formats.md'


def test_families_of_the_matrix_are_counted():
    pytest.importorskip('transformers.models.auto.auto_mappings', reason='the page is of transformers 5')
    from tests.matrix.subjects import SUBJECTS

    assert f'{len(SUBJECTS)} families and variants' in text_of('docs/limits.md')


def machines_of(figures: Any) -> list[Any]:
    """Returns the machines of all figures of a results file, however deep they are."""
    if isinstance(figures, dict):
        if 'machine' in figures:
            return [figures['machine']]
        figures = list(figures.values())
    machines = []
    if isinstance(figures, list):
        for value in figures:
            machines += machines_of(value)
    return machines


def test_results_files_are_on_the_page():
    """A row names the file and its machines: E for AMD EPYC, X for Intel Xeon. The first figures come first."""
    page = (ROOT / 'docs' / 'benchmarks.md').read_text()
    for path in (ROOT / 'benchmarks' / 'results').glob('*.json'):
        rows = [line for line in page.splitlines() if f'`{path.name}`' in line]
        assert rows, f'{path.name} is not in docs/benchmarks.md'
        _, _, machines_on_page, *_ = rows[0].split(' | ')
        letters = []
        for machine in machines_of(json.loads(path.read_text())):
            letters.append('E' if machine['processor'].startswith('AMD') else 'X')
        assert machines_on_page.startswith(letters[0]), path.name
        assert set(re.findall(r'\b[EX]\b', machines_on_page)) == set(letters), path.name
