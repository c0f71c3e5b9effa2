# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes and reads ``metrics.jsonl``, the log of a run: ``{"step": 3, "loss/train/total": 2.1}`` for each step.

The result and the page of the run are made from it.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from composer.core import Event, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from composer_tokacc.cache import whole_file
from composer_tokacc.programs.errors import building

METRICS_FILE = 'metrics.jsonl'
STEP = 'step'
"""Key of the step in a line. The other keys are names of metrics."""


class Series(NamedTuple):
    """The values of a metric, in the order of the file."""

    steps: list[int]
    """The step of each value."""
    values: list[float]
    """The values. NaN stands for every value that was not finite."""

    def finite(self) -> Series:
        """Returns the finite values and their steps."""
        finite_series = Series([], [])
        for step, value in zip(self.steps, self.values, strict=True):
            if math.isfinite(value):
                finite_series.steps.append(step)
                finite_series.values.append(value)
        return finite_series


NOT_LOGGED = Series([], [])
"""Stands for a metric that nothing logged."""


class JsonLines(LoggerDestination):
    """Writes the numbers that are logged in a step as one line of ``metrics.jsonl``, on the first rank.

    A resumed run keeps the lines up to the step of its checkpoint. Later steps are trained again, so their lines are
    removed.

    Args:
        folder: Folder of the file. May contain ``{run_name}``.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._path: Path | None = None
        """The file; None before the first event, and on other ranks."""
        self._numbers: dict[str, float | None] = {}
        """The numbers that were logged since the last line, by name of the metric. None: not finite."""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Prepares the file before the first step or evaluation. Writes a line after each, and after the fit."""
        if event in (Event.FIT_START, Event.EVAL_START):  # a run with nothing left to train may still be evaluated
            self._open(state)
        elif event in (Event.BATCH_END, Event.EVAL_END, Event.FIT_END):
            self._write(state)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Adds the numbers among the metrics to the next line. Leaves out arrays and all other values.

        NaN and infinity become null, because JSON has no numbers for them. A metric with the name ``step`` is replaced
        by the step of the line.
        """
        for name, value in metrics.items():
            if getattr(value, 'ndim', 0) != 0:  # `float` would also take an array with one value
                continue
            try:
                number = float(value)
            except (OverflowError, RuntimeError, TypeError, ValueError):
                # Not a number, or one that is too large for a float. A callback of the user may log anything.
                continue
            self._numbers[name] = number if math.isfinite(number) else None

    def close(self, state: State, logger: Logger) -> None:
        """Writes the numbers that were logged after the last event."""
        self._write(state)

    def _open(self, state: State) -> None:
        """Finds the file. Removes lines of earlier runs and of steps that are trained again. Later calls do nothing."""
        if dist.get_global_rank() != 0 or self._path is not None:
            return
        path = Path(self.folder.format(run_name=state.run_name)) / METRICS_FILE
        with building('report.folder'):  # an error names this key
            path.parent.mkdir(parents=True, exist_ok=True)
        begin_file(path, step=state.timestamp.batch.value)
        self._path = path

    def _write(self, state: State) -> None:
        """Appends the numbers that were logged since the last line, if there are any."""
        numbers = self._numbers
        self._numbers = {}  # before writing, because that fails on a full disk, and close() would write the line again
        if self._path is None or not numbers:
            return
        line = {**numbers, STEP: state.timestamp.batch.value}
        with self._path.open('a', encoding='utf-8') as file:
            file.write(json.dumps(line) + '\n')


def begin_file(path: Path, *, step: int) -> None:
    """Removes the lines of another run, or of steps that are trained again. Creates the file if it does not exist.

    Args:
        path: A file of JSON lines with the key ``step``.
        step: The number of steps that the run has trained when it begins. A run that resumes at step 100 keeps the
            lines up to step 100. A run that begins at step 0 keeps none: even lines of step 0 are of another run.
    """
    if step == 0 or not path.exists():
        path.write_text('')
    else:
        keep_lines(path, until=step)


def keep_lines(path: Path, *, until: int) -> None:
    """Removes the lines of steps after ``until`` from a file of JSON lines with the key ``step``."""
    text = ''
    for line in _read_lines(path):
        if line[STEP] <= until:
            text += json.dumps(line) + '\n'
    with whole_file(path) as new_file:
        new_file.write_text(text, encoding='utf-8')


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file, except broken ones, such as a line that a killed process wrote in part."""
    lines = []
    for text in path.read_text(encoding='utf-8', errors='replace').splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get(STEP), int):
            lines.append(line)
    return lines


def read_metrics(folder: Path) -> dict[str, Series]:
    """Returns the metrics of a run by name, from the ``metrics.jsonl`` in its folder. Empty if there is no such file.

    A step may have two values, for example if a finished run was evaluated again.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        return {}
    metrics: dict[str, Series] = {}
    for line in _read_lines(path):
        step = line.pop(STEP)
        for name, value in line.items():
            if value is None:  # the file has null for NaN and infinity
                value = math.nan
            if isinstance(value, int | float):
                series = metrics.setdefault(name, Series([], []))
                series.steps.append(step)
                series.values.append(float(value))
    return metrics


def select(metrics: Mapping[str, Series], pattern: str) -> dict[str, Series]:
    """Returns the metrics that match a pattern, under short names.

    If the pattern has a star, the short name is the text that the star stands for: ``source/*/loss`` finds
    ``source/books/loss``, and returns it under ``books``. If not, it is the last part of the name: ``loss/train/total``
    is returned under ``total``.

    Args:
        metrics: Metrics by name.
        pattern: A name, perhaps with one ``*``.
    """
    before_star, star, after_star = pattern.partition('*')
    selected = {}
    for name in fnmatch.filter(metrics, pattern):
        if star:
            short_name = name.removeprefix(before_star).removesuffix(after_star)
        else:
            short_name = name.rpartition('/')[2]
        selected[short_name] = metrics[name]
    return selected
