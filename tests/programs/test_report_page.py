# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A run leaves a page and a file of metrics. They have all that was logged, and load nothing from the network."""

from __future__ import annotations

import errno
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composer.core import Event, Timestamp
from composer.loggers import InMemoryLogger

from composer_tokacc import TokenAccumulation, TokenMonitor, token_data_spec
from composer_tokacc.programs import ConfigError, TrainConfig
from composer_tokacc.programs.metrics_file import JsonLines, Series, read_metrics
from composer_tokacc.programs.report_page import MOST_POINTS, write_page
from composer_tokacc.programs.run_result import FinishedRun, _sources, summarize, write_report
from tests.support.programs import result_of
from tests.support.text import ragged_batch, text_model
from tests.support.training import loader, logged, train

SHAPE = [(4, 2), (9, 7), (6, 1)]


def lines_in(path):
    """Returns the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_of(page):
    """Returns the points of each line that a page draws."""
    lines = []
    for points in re.findall(r'<polyline [^>]*points="(.*?)"', page):
        line = []
        for point in points.split():
            x, y = point.split(',')
            line.append((float(x), float(y)))
        lines.append(line)
    return lines


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """The folder and the logger of a run of five steps. Its rows are of two sources."""
    folder = tmp_path_factory.mktemp('run')
    batch = {**ragged_batch(SHAPE), 'source': ['a', 'b<', 'a']}
    batches = [batch] * 5
    _, memory, trainer = train(
        text_model(),
        token_data_spec(loader(*batches)),
        algorithms=[TokenAccumulation()],
        callbacks=[TokenMonitor()],
        loggers=[JsonLines(str(folder))],
        max_duration='5ba',
        microbatch_size=3,
    )
    trainer.close()
    return folder, memory


def test_lines_match_other_loggers(run):
    folder, memory = run
    lines = lines_in(folder / 'metrics.jsonl')
    for name in ('loss/train/total', 'token_monitor/seconds_p99', 'token_monitor/source/a/loss'):
        values = [(line['step'], line[name]) for line in lines if name in line]
        expected_values = enumerate(logged(memory, name), start=1)
        assert values == list(expected_values)


def test_page_draws_what_was_logged(run, tmp_path):
    folder, _ = run
    (tmp_path / 'result.png').write_bytes(b'PNG')
    path = tmp_path / 'report.html'

    write_page(path, 'a <b>', [('loss', '1 < 2')], read_metrics(folder))

    page = path.read_text()
    assert 'a <b>' not in page, 'names are escaped'
    assert 'http' not in page, 'nothing is loaded from the network'
    (image,) = re.findall('(?:src|href)="(.*?)"', page)
    assert image.startswith('data:image/png;base64,')
    captions = re.findall('<figcaption>(.*?)</figcaption>', page)
    assert {'Loss', 'Loss by source', 'Tokens a second', 'Seconds of a step', 'Padding'} <= set(captions)
    lines = lines_of(page)
    assert lines
    for line in lines:
        assert len(line) == 5, 'a point for each step'
        for x, y in line:
            assert 0 <= x <= 640
            assert 0 <= y <= 200


def page_of(folder, metrics):
    """Returns the page of a run with these metrics."""
    path = folder / 'report.html'
    write_page(path, 'run', [], metrics)
    return path.read_text()


def test_long_run_keeps_spikes(tmp_path):
    steps = list(range(5000))
    values = [float(step) for step in steps]
    values[1234] = 1e5
    values[3000] = -1e5
    values[-1] = values[-2] - 0.5  # neither the lowest nor the highest value of the last steps

    page = page_of(tmp_path, {'loss/train/total': Series(steps, values)})

    (line,) = lines_of(page)
    assert MOST_POINTS / 2 < len(line) <= MOST_POINTS
    xs, ys = zip(*line, strict=True)
    assert list(xs) == sorted(xs)
    steps_per_pixel = (len(steps) - 1) / (xs[-1] - xs[0])
    last_distance = steps_per_pixel * (xs[-1] - xs[-2])
    assert last_distance < 1.5, 'the last two steps are drawn'
    assert min(ys) == 10, 'the spikes reach both ends of the axis'
    assert max(ys) == 180, 'the spikes reach both ends of the axis'


def test_single_value_has_a_mark(tmp_path):
    """An evaluation at the end of a run gives one point. A line of one point cannot be seen."""
    metrics = {
        'metrics/eval/a': Series([8], [1.5]),
        'metrics/eval/b': Series([4, 8], [2.0, 1.0]),
    }
    page = page_of(tmp_path, metrics)
    assert page.count('<circle') == 1


# The result of a run.


def state_at(step):
    return SimpleNamespace(run_name='run', timestamp=Timestamp(batch=step))


def summarize_run(parts, metrics=None, *, last_step=0):
    """Returns the result of a run of a second that began at step 0."""
    return summarize(state_at(last_step), metrics or {}, parts, first_step=0, seconds=1.0)


WITHOUT_DATA = SimpleNamespace(train_dataset=None, eval_dataset=None, processor=None)
PARTS = SimpleNamespace(source=WITHOUT_DATA, model=None)


def report_run(report, result, metrics=None):
    """Writes the files of a run. ``report`` is the section of the YAML file. Returns the printed summary."""
    config = TrainConfig(report=report)
    return write_report(config, PARTS, result, metrics or {}, InMemoryLogger(), [])


def test_attributes_of_a_users_dataset_are_not_ours():
    """A dataset of the user may have attributes with the names of LlavaDataset's."""
    dataset = SimpleNamespace(skipped=['a'], fitted=True, datasets=None)
    source = SimpleNamespace(train_dataset=dataset, eval_dataset=None)
    result = summarize_run(SimpleNamespace(source=source))
    assert result['skipped'] == []
    assert result['fitted'] == []


def name_of_file(run: FinishedRun, file: Path) -> list[tuple[str, str]]:
    """Reports a run, as a function of the user does."""
    return [('file', file.name)]


def test_report_gets_a_path(tmp_path):
    report = {'folder': str(tmp_path), 'name': f'{__name__}.name_of_file', 'file': 'folder/notes.txt'}
    result = summarize_run(PARTS)

    summary = report_run(report, result)

    words_of_lines = [line.split() for line in summary.splitlines()]
    assert ['file', 'notes.txt'] in words_of_lines


def log_steps(folder, metrics_of_steps, *, first_step=1):
    """Logs the metrics of some steps, as a run that begins with the first of them."""
    lines = JsonLines(str(folder))
    lines.run_event(Event.FIT_START, state_at(first_step - 1), None)
    for step, metrics in enumerate(metrics_of_steps, start=first_step):
        lines.log_metrics(metrics)
        lines.run_event(Event.BATCH_END, state_at(step), None)
    last_step = first_step + len(metrics_of_steps) - 1
    lines.close(state_at(last_step), None)


def test_resumed_run_replaces_later_lines(tmp_path):
    log_steps(tmp_path, [{'loss': 1}, {'loss': 2}, {'loss': 3}])
    path = tmp_path / 'metrics.jsonl'
    with path.open('a') as file:
        file.write('{"step": 4, "lo')  # of a killed process

    log_steps(tmp_path, [{'loss': 30}], first_step=3)

    assert read_metrics(tmp_path) == {'loss': ([1, 2, 3], [1.0, 2.0, 30.0])}


@pytest.mark.parametrize(
    'metrics',
    [
        pytest.param({'phase': 'warm-up', 'nothing': None}, id='text and None'),
        pytest.param({'vector': torch.ones(1), 'complex': torch.tensor(1j)}, id='vector and complex number'),
        pytest.param({'rows': [[1, 2], [3]], 'large': 10**400}, id='list and too large number'),
        pytest.param({'step': 70.5}, id='name of our own entry'),
    ],
)
def test_only_numbers_are_written(metrics, tmp_path):
    """Composer lets a callback of the user log anything."""
    metrics_of_step = {'loss': torch.tensor(1.5), **metrics}
    log_steps(tmp_path, [metrics_of_step])
    assert read_metrics(tmp_path) == {'loss': ([1], [1.5])}


def test_last_figures_that_are_not_finite(tmp_path):
    """They must not be replaced by those of an earlier step."""
    metrics_of_source = {
        'token_monitor/source/a/tokens': 1,
        'token_monitor/source/a/weight': 1,
        'token_monitor/source/a/positions': 1,
    }
    first_step = {
        **metrics_of_source,
        'token_monitor/source/a/loss': 2,
        'loss/train/total': 2,
        'metrics/eval/Loss': 3,
        'token_monitor/mfu': 0.5,
    }
    diverged_step = {
        **metrics_of_source,
        'token_monitor/source/a/loss': math.nan,
        'loss/train/total': math.nan,
        'metrics/eval/Loss': math.inf,
        'token_monitor/mfu': math.nan,
    }
    log_steps(tmp_path, [first_step, diverged_step])
    metrics = read_metrics(tmp_path)
    result = summarize_run(PARTS, metrics, last_step=2)

    summary = report_run({'folder': str(tmp_path)}, result, metrics)

    written = result_of(tmp_path)
    assert written['loss'] == {'first': 2.0, 'last': None}
    assert written['eval'] == {'Loss': None}
    assert written['token_monitor'] == {'mfu': 0.5}
    assert written['sources']['a']['last_loss'] is None
    assert summary.count('2.000 -> NaN') == 2
    page = (tmp_path / 'report.html').read_text()
    assert 'total: nan' in page


@pytest.mark.parametrize('name', ['result.json', 'report.html'])
def test_earlier_result_survives_a_full_disk(name, tmp_path, monkeypatch):
    """A file of the result is replaced as a whole, so a reader never finds half of it."""
    file = tmp_path / name
    file.write_text('earlier')
    write_text = Path.write_text

    def run_out_of_disk(path, text, **options):
        if path.name != name:
            return write_text(path, text, **options)
        write_text(path, text[:10], **options)
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(Path, 'write_text', run_out_of_disk)
    result = summarize_run(PARTS)

    with pytest.raises(OSError, match='No space left'):
        report_run({'folder': str(tmp_path)}, result)

    assert file.read_text() == 'earlier'


def test_source_whose_name_is_a_pattern():
    """Each figure was 4 in the first step and 2 in the second. Tokens are added up, shares are averaged."""
    figures_of_steps = Series([1, 2], [4.0, 2.0])
    metrics = {}
    for name in ('tokens', 'weight', 'positions', 'loss'):
        metrics[f'token_monitor/source/captions[en]/{name}'] = figures_of_steps

    sources = _sources(metrics)

    expected = {'tokens': 6.0, 'weight': 3.0, 'positions': 3.0, 'first_loss': 4.0, 'last_loss': 2.0}
    assert sources == {'captions[en]': expected}


def test_shares_of_a_source_that_came_late():
    """It has all of the weight in the last of four steps, and is not logged before."""
    figures_of_early = Series([1, 2, 3, 4], [1.0, 1.0, 1.0, 0.0])
    figures_of_late = Series([4], [1.0])
    metrics = {}
    for name in ('tokens', 'weight', 'positions'):
        metrics[f'token_monitor/source/early/{name}'] = figures_of_early
        metrics[f'token_monitor/source/late/{name}'] = figures_of_late

    sources = _sources(metrics)

    assert sources['early'] == {'tokens': 3.0, 'weight': 0.75, 'positions': 0.75}
    assert sources['late'] == {'tokens': 1.0, 'weight': 0.25, 'positions': 0.25}


def test_full_disk_is_reported_once(tmp_path):
    (tmp_path / 'metrics.jsonl').symlink_to('/dev/full')
    lines = JsonLines(str(tmp_path))
    lines.run_event(Event.FIT_START, state_at(0), None)
    lines.log_metrics({'loss': 1})
    with pytest.raises(OSError, match='No space left'):
        lines.run_event(Event.BATCH_END, state_at(1), None)
    lines.close(state_at(1), None)  # as Composer does at exit


def test_report_folder_that_is_a_file(tmp_path):
    file = tmp_path / 'file'
    file.touch()
    lines = JsonLines(str(file))
    with pytest.raises(ConfigError, match=r'^`report.folder` cannot be used: FileExistsError: '):
        lines.run_event(Event.FIT_START, state_at(0), None)
