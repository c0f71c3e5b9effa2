# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``metrics.jsonl``: the log of a run, one line of JSON a step. Result and page of the run are made from it."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from composer.core import Event, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from composer_tokacc.cache import whole_file
from composer_tokacc.programs.errors import building

METRICS_FILE = 'metrics.jsonl'

Series = tuple[list[int], list[float]]
"""Steps, and a finite value for each."""


class JsonLines(LoggerDestination):
    """Writes the numbers that are logged in a step as one line of ``metrics.jsonl``, on the first rank.

    A resumed run goes on after the step of its checkpoint. Lines of later steps that a killed run has left are removed.

    Args:
        folder: Folder of the file. May contain ``{run_name}``.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._path: Path | None = None
        """The file; None before the first event, and on other ranks."""
        self._line: dict[str, float | None] = {}

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Prepares the file at the start of a fit or an evaluation, and writes a line for each step and evaluation."""
        if event in (Event.FIT_START, Event.EVAL_START):  # a run with nothing left to train may still be evaluated
            self._open(state)
        elif event in (Event.BATCH_END, Event.EVAL_END, Event.FIT_END):
            self._write(state)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Adds the numbers among the metrics to the next line.

        NaN and infinity become null, because JSON has no word for them.
        """
        for name, value in metrics.items():
            if np.ndim(value) != 0:
                continue
            try:
                number = float(value)
            except (TypeError, ValueError):  # a callback of the user may log a text
                continue
            self._line[name] = number if math.isfinite(number) else None

    def close(self, state: State, logger: Logger) -> None:
        """Writes numbers that were logged at last."""
        self._write(state)

    def _open(self, state: State) -> None:
        if dist.get_global_rank() or self._path is not None:
            return
        path = Path(self.folder.format(run_name=state.run_name)) / METRICS_FILE
        with building('report.folder'):
            path.parent.mkdir(parents=True, exist_ok=True)
        start_lines(path, state.timestamp.batch.value)
        self._path = path

    def _write(self, state: State) -> None:
        line = {'step': state.timestamp.batch.value, **self._line}
        has_numbers = bool(self._line)
        self._line = {}  # before writing: on a full disk Composer calls close() afterwards
        if self._path is not None and has_numbers:
            with self._path.open('a', encoding='utf-8') as file:
                file.write(json.dumps(line) + '\n')


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of the file, without one that a killed process has left half written."""
    lines = []
    for text in path.read_text(encoding='utf-8', errors='replace').splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get('step'), int):
            lines.append(line)
    return lines


def start_lines(path: Path, step: int) -> None:
    """Prepares a file of lines for a run that goes on after ``step``: keeps the lines up to it, and none for step 0."""
    if not step or not path.exists():
        path.write_text('')
        return
    text = ''
    for line in _read_lines(path):
        if line['step'] <= step:
            text += json.dumps(line) + '\n'
    with whole_file(path) as new_file:
        new_file.write_text(text, encoding='utf-8')


def read_metrics(folder: Path) -> dict[str, Series]:
    """Returns all that a run has logged, by name; nothing without the file. Values that are not finite are left out.

    If a step was logged twice, as by a second evaluation of a finished run, its last value counts.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        return {}
    values_by_name: dict[str, dict[int, float]] = {}
    for line in _read_lines(path):
        step = line.pop('step')
        for name, value in line.items():
            if isinstance(value, int | float):
                values_by_name.setdefault(name, {})[step] = float(value)
    metrics = {}
    for name, values in values_by_name.items():
        metrics[name] = list(values.keys()), list(values.values())
    return metrics


def select(metrics: Mapping[str, Series], pattern: str) -> dict[str, Series]:
    """Returns the metrics that match a pattern, under short names.

    A short name is the text that the star stands for: ``loss`` for ``eval/loss`` and ``eval/*``. Without a star in the
    pattern it is the last part of the name.
    """
    start, _, end = pattern.partition('*')
    selected = {}
    for name in fnmatch.filter(metrics, pattern):
        short_name = name.removeprefix(start).removesuffix(end) or name.rpartition('/')[2]
        selected[short_name] = metrics[name]
    return selected
