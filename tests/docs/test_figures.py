# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Figures of README and docs are those of ``benchmarks/results``, and pages that programs write are theirs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks.encoders import table_of as table_of_encoders
from benchmarks.token_weights import table_of as table_of_weights
from tests.data.formats_page import page as formats_page
from tests.support.launch import ROOT


def results(name: str) -> Any:
    return json.loads((ROOT / 'benchmarks' / 'results' / f'{name}.json').read_text())


def row_of(page: str, beginning: str) -> list[str]:
    rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith(f'| {beginning}')]
    assert len(rows) == 1, f'{page}: {len(rows)} rows begin with {beginning}'
    return [cell.strip().replace('*', '').replace(' % padding', ' %') for cell in rows[0].strip('|').split('|')]


@pytest.mark.parametrize('page', ['README.md', 'docs/benchmarks.md'])
@pytest.mark.parametrize(
    ('method', 'beginning'), [('stock', 'stock Composer |'), ('flag', 'stock, `acc'), ('ours', '`TokenAccumulation` +')]
)
def test_invariance(page, method, beginning):
    runs = [run for run in results('invariance')['runs'] if run['method'] == method]
    assert len(runs) == 9

    def span(key, form):
        values = [run[key] for run in runs]
        return f'{min(values):{form}} - {max(values):{form}}'

    expected = [span('first_loss', '.5f'), span('last_loss', '.4f'), span('gradient_error', '.1e')]
    assert row_of(page, beginning)[1:] == expected


def cells_of_one_rank(name: str, model: str, lengths: str) -> dict[str, Any]:
    """Returns the cells of a model and a set of lengths by contender."""
    cells = results(name)['cells']
    return {
        cell['rival']: cell
        for cell in cells
        if (cell['model'], cell['set'], cell['ranks']) == (model, lengths, 1) and 'rounds' in cell
    }


def against_stock(cells: dict[str, Any], rival: str, figure: str = 'tokens_per_second') -> float:
    return cells[rival][figure][1] / cells['composer'][figure][1]


@pytest.mark.parametrize('title', ['LLaVA', 'Llama'])
def test_speed_where_rows_are_ragged(title):
    cells = cells_of_one_rank('rivals', title.lower(), 'lognormal 0.9')
    expected = []
    for rival in ('composer', 'hf', 'ours', 'ours_packed'):
        ratio = against_stock(cells, rival)
        expected.append(f'{ratio:.1f} ({cells[rival]["padded_share"]:.0%})'.replace('%', ' %'))
    assert row_of('docs/benchmarks.md', f'lognormal, variation 0.9, {title}')[1:] == expected


@pytest.mark.parametrize('title', ['LLaVA', 'Llama'])
def test_speed_where_nothing_is_padded(title):
    cells = cells_of_one_rank('rivals', title.lower(), 'no padding')
    ours, packed = (f'{against_stock(cells, rival):.2f}' for rival in ('ours', 'ours_packed'))
    row = row_of('docs/benchmarks.md', f'all rows of equal length, {title}')
    assert row[1:] == ['1.00', '', ours, packed]
    assert 0.02 <= 1 - against_stock(cells, 'ours') < 0.045
    for page in ('README.md', 'docs/limits.md', 'docs/benchmarks.md'):
        assert 'cost 2 to 4 % of a step' in ' '.join((ROOT / page).read_text().split()), page


@pytest.mark.parametrize('model', ['smolvlm', 'qwen'])
def test_speed_on_real_tables(model):
    cells = cells_of_one_rank('logits', model, 'tables')
    expected = []
    for rival in ('composer', 'hf', 'ours_all_logits'):
        ratio = against_stock(cells, rival, 'tokens_per_processor_second')
        expected.append(f'{ratio:.1f} ({cells[rival]["padded_share"]:.0%})'.replace('%', ' %'))
    assert row_of('docs/benchmarks.md', 'AI2D, ChartQA, DocVQA mixed, a quarter')[1:] == [*expected, '']


@pytest.mark.parametrize(('ranks', 'samples'), [(8, 16), (64, 32), (512, 32), (4096, 32)])
def test_balance_of_the_ranks(ranks, samples):
    found = {
        case['method']: case
        for case in results('scaling')['modelled']
        if (case['set'], case['ranks'], case['samples a rank']) == ('tables mixed', ranks, samples)
    }
    others = ('stock Composer', 'LLaVA even chunks', 'NeMo-RL stride')
    imbalance = [f'{found[name]["slowest / mean"]:.2f}' for name in others]
    ours = found['regrouped over ranks']
    assert row_of('docs/benchmarks.md', f'{ranks:,} x {samples}')[1:] == [
        *imbalance,
        f'{ours["slowest / mean"]:.3f}',
        f'{ours["times stock"]:.2f}x',
        f'{ours["share of bound"]:.2f}',
    ]


@pytest.mark.parametrize('family', ['LLaVA-1.5', 'Qwen2.5-VL'])
def test_lengths_from_headers(family):
    found = results('lengths')
    case, other = found['144 sizes'][family], found['every size another'][family]
    assert row_of('docs/data.md', f'{family} |')[1:] == [
        f'{case["reading_seconds"]["processor"]:.0f} s',
        f'{case["headers_seconds"]["processor"]:.1f} s ({case["times_faster"]["processor"]:.0f} times faster)',
        f'{other["times_faster"]["processor"]:.1f} times faster',
    ]


def test_what_the_algorithm_costs():
    share = results('overhead')['shares']['with_all_reduce']
    for page in ('docs/benchmarks.md', 'docs/limits.md', 'composer_tokacc/algorithm/README.md'):
        assert f'{share:.1%}'.replace('%', ' %') + ' of a step' in (ROOT / page).read_text()


def test_what_tokens_weigh():
    rows = results('token_weights')['rows']
    page = (ROOT / 'docs' / 'token_weights.md').read_text()
    assert table_of_weights(rows) in page, 'python -m benchmarks.token_weights --hosts'
    [stock] = [row for row in rows if (row['subject'], row['host'], row['ranks']) == ('mixture', 'composer', 1)]
    assert stock['source'] == 'real tables: ai2d, chartqa, docvqa'
    span = f'{stock["smallest"]:.2f} to {stock["largest"]:.2f} times their mean'
    assert span in ' '.join((ROOT / 'README.md').read_text().split())
    assert all(row['spread'] < 1 + 1e-5 for row in rows if row['host'] == 'ours')


def test_speed_of_encoders():
    figures = results('encoders')
    assert table_of_encoders(figures) in (ROOT / 'docs' / 'encoders.md').read_text(), 'python -m benchmarks.encoders'
    assert figures['variation'] == pytest.approx(0.9, abs=0.05)
    packed = figures['methods'][-1]
    assert packed['method'] == 'three lines, packed'
    assert packed['against_stock'] >= 2.5


def test_memory_of_logits():
    figures = results('logits_memory')
    selected, everything = figures['labels'], figures['all']
    ratio = selected['positions_that_fit_in_80_gib'] / everything['positions_that_fit_in_80_gib']
    text = ' '.join((ROOT / 'README.md').read_text().split())
    assert f'needs {selected["gib"]:.1f} GiB beyond the model instead of {everything["gib"]:.1f}' in text
    assert f'{ratio:.1f} times as many positions fit in 80 GiB' in text


def test_results_of_a_gpu():
    exactness, memory = results('gpu/exactness')['result'], results('gpu/memory')['result']
    page = (ROOT / 'docs' / 'benchmarks.md').read_text()
    errors = exactness['errors']
    worst = {}
    for precision, cases in errors.items():
        worst[precision] = max(error for case, error in cases.items() if not case.startswith('stock'))
    assert f'fp32: {worst["fp32"]:.1e}, and {max(errors["fp32"].values()):.1f} in stock Composer' in page
    assert (
        f'bf16: {worst["amp_bf16"]:.5f}, as one forward in bf16 ({exactness["bf16_noise_of_one_forward"]:.5f})' in page
    )
    out_of_memory = results('gpu/out_of_memory')['result']
    assert out_of_memory['attempts'] == [32, 16, 8]
    assert f'to {out_of_memory["gradient_error"]:.1e}.' in page
    too_low = [-100 * shape['error'] for shape in memory['shapes']]
    assert {shape['microbatches'] for shape in memory['shapes']} == {1}
    assert f'{min(too_low):.1f} to {max(too_low):.1f} % too low' in page


def test_logits_on_a_gpu():
    page = (ROOT / 'docs' / 'logits.md').read_text()
    for title, name in (('SmolVLM-256M', 'smolvlm'), ('Qwen2.5-VL-3B', 'qwen')):
        figures = results('gpu/logits')['result'][name]
        seconds, peaks = ([figures[logits][key] for logits in ('all', 'labels')] for key in ('seconds', 'peak_gib'))
        times = f'{seconds[0]:.3f} s | {seconds[1]:.3f} s | {figures["times_as_fast"]:.2f}'
        assert f'| {title} | {times} | {peaks[0]:.1f} GiB | {peaks[1]:.1f} GiB |' in page


def test_formats_are_those_of_the_tests():
    page = (ROOT / 'docs' / 'formats.md').read_text()
    assert page == formats_page(), 'python -m tests.data.formats_page > docs/formats.md'


def test_families_of_the_matrix_are_counted():
    pytest.importorskip('transformers.models.auto.auto_mappings', reason='the page is of transformers 5')
    from tests.matrix.subjects import SUBJECTS

    assert f'{len(SUBJECTS)} families and variants' in (ROOT / 'docs' / 'limits.md').read_text()


def machines_of(found):
    """Of all figures of a results file, wherever they stand in it."""
    if isinstance(found, dict) and 'machine' in found:
        yield found['machine']
    elif isinstance(found, (dict, list)):
        for value in found.values() if isinstance(found, dict) else found:
            yield from machines_of(value)


def test_results_files_are_on_the_page():
    page = (ROOT / 'docs' / 'benchmarks.md').read_text()
    for path in (ROOT / 'benchmarks' / 'results').glob('*.json'):
        rows = [line for line in page.splitlines() if f'`{path.name}`' in line]
        assert rows, f'{path.name} is not in docs/benchmarks.md'
        named = rows[0].split(' | ')[2]
        machines = list(machines_of(json.loads(path.read_text())))
        letters = ['E' if machine['processor'].startswith('AMD') else 'X' for machine in machines]
        assert named.startswith(letters[0]), path.name
        assert set(re.findall(r'\b[EX]\b', named)) == set(letters), path.name
