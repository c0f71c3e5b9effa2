# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The page and the lines that a run leaves: all that was logged, and nothing from the network."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from composer.core import Callback, Event, Timestamp

from composer_tokacc import TokenMonitor
from composer_tokacc.programs import ConfigError
from composer_tokacc.programs.metrics_file import JsonLines, read_metrics
from composer_tokacc.programs.report_page import MOST_POINTS, write_page
from tests.support.text import collate, text_model, text_rows
from tests.support.training import loader, train

SHAPE = [(4, 2), (9, 7), (6, 1)]


class Page(HTMLParser):
    """Collects what a browser would draw, and would fetch."""

    def __init__(self, text):
        super().__init__()
        self.open, self.fetched, self.captions, self.points = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        given = dict(attrs)
        self.fetched += [value for name, value in given.items() if name in ('src', 'href')]
        if tag == 'polyline':
            self.points.append([tuple(map(float, point.split(','))) for point in given['points'].split()])

    def handle_data(self, data):
        if self.open and self.open[-1] == 'figcaption':
            self.captions.append(data)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass


class Attached(Callback):
    """Hands what is logged to one destination more."""

    def __init__(self, destination):
        self.destination = destination

    def fit_start(self, state, logger):
        logger.destinations = (*logger.destinations, self.destination)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp('run')
    batch = {**collate(text_rows(SHAPE)), 'source': ['a', 'b<', 'a']}
    lines = JsonLines(str(folder))
    _, memory, trainer = train(
        text_model(),
        loader(*[batch] * 5),
        callbacks=[TokenMonitor(), lines, Attached(lines)],
        max_duration='5ba',
        microbatch_size=3,
    )
    trainer.close()
    return folder, memory


def test_lines_match_other_loggers(run):
    folder, memory = run
    lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    for name in ('loss/train/total', 'token_monitor/seconds_p99', 'token_monitor/source/a/loss'):
        found = [(line['step'], line[name]) for line in lines if name in line]
        assert found == list(enumerate((float(value) for _, value in memory.data[name]), start=1))


def test_page_draws_what_was_logged(run, tmp_path):
    folder, _ = run
    (tmp_path / 'result.png').write_bytes(b'PNG')
    write_page(tmp_path / 'report.html', 'a <b>', [('loss', '1 < 2')], read_metrics(folder))
    text = (tmp_path / 'report.html').read_text()
    page = Page(text)
    assert all(found.startswith('data:image/png;base64,') for found in page.fetched)
    assert len(page.fetched) == 1
    assert 'http' not in text
    assert {'Loss', 'Loss by source', 'Tokens a second', 'Seconds of a step', 'Padding'} <= set(page.captions)
    assert 'a <b>' not in text
    assert all(0 <= x <= 640 and 0 <= y <= 200 for line in page.points for x, y in line)
    assert {len(line) for line in page.points} == {5}


def test_long_run_is_drawn_by_means(tmp_path):
    metrics = {'loss/train/total': (list(range(5000)), [float(step) for step in range(5000)])}
    write_page(tmp_path / 'report.html', 'long', [], metrics)
    (line,) = Page((tmp_path / 'report.html').read_text()).points
    assert len(line) == MOST_POINTS
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted((y for _, y in line), reverse=True)


def state_at(step):
    return SimpleNamespace(run_name='run', timestamp=Timestamp(batch=step))


def test_resumed_run_replaces_later_lines(tmp_path):
    lines = JsonLines(str(tmp_path))
    lines.run_event(Event.FIT_START, state_at(0), None)
    for step in (1, 2, 3):
        lines.log_metrics({'loss': step, 'bad': float('nan')})
        lines.run_event(Event.BATCH_END, state_at(step), None)
    lines.close(state_at(3), None)
    with (tmp_path / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 4, "lo')  # of a killed process
    lines = JsonLines(str(tmp_path))
    lines.run_event(Event.FIT_START, state_at(2), None)
    lines.log_metrics({'loss': 30})
    lines.run_event(Event.BATCH_END, state_at(3), None)
    lines.close(state_at(3), None)
    assert read_metrics(tmp_path) == {'loss': ([1, 2, 3], [1.0, 2.0, 30.0])}


def test_a_full_disk_is_met_once(tmp_path):
    (tmp_path / 'metrics.jsonl').symlink_to('/dev/full')
    lines = JsonLines(str(tmp_path))
    lines.run_event(Event.FIT_START, state_at(0), None)
    lines.log_metrics({'loss': 1})
    with pytest.raises(OSError, match='No space left'):
        lines.run_event(Event.BATCH_END, state_at(1), None)
    lines.close(state_at(1), None)  # Composer calls it at exit


def test_a_report_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match=r'^`report.folder`: FileExistsError: '):
        JsonLines(str(tmp_path / 'file')).run_event(Event.FIT_START, SimpleNamespace(run_name='run'), None)
