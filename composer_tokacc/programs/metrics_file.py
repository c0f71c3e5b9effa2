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
from typing import Any

from composer.core import Event, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from composer_tokacc.cache import whole_file
from composer_tokacc.programs.errors import building

METRICS_FILE = 'metrics.jsonl'
STEP = 'step'
"""Key of the step in a line. The other keys are names of metrics."""

Series = tuple[list[int], list[float]]
"""Steps in the order of the file, and a value for each step. NaN stands for every value that was not finite."""


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
        self._line: dict[str, float | None] = {}
        """Numbers by name that were logged since the last line."""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Prepares the file before the first step or evaluation. Writes a line after each, and after the fit."""
        if event in (Event.FIT_START, Event.EVAL_START):  # a run with nothing left to train may still be evaluated
            self._open(state)
        elif event in (Event.BATCH_END, Event.EVAL_END, Event.FIT_END):
            self._write(state)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Adds the numbers among the metrics to the next line. Leaves out arrays and values that are no numbers.

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
            self._line[name] = number if math.isfinite(number) else None

    def close(self, state: State, logger: Logger) -> None:
        """Writes the numbers that were logged after the last event."""
        self._write(state)

    def _open(self, state: State) -> None:
        """Finds the file. Removes lines of earlier runs and of steps that are trained again. Later calls do nothing."""
        if dist.get_global_rank() != 0 or self._path is not None:
            return
        path = Path(self.folder.format(run_name=state.run_name)) / METRICS_FILE
        with building('report.folder'):
            path.parent.mkdir(parents=True, exist_ok=True)
        keep_lines(path, until=state.timestamp.batch.value)
        self._path = path

    def _write(self, state: State) -> None:
        """Appends the numbers that were logged since the last line, if there are any."""
        line = {**self._line, STEP: state.timestamp.batch.value}
        has_numbers = bool(self._line)
        self._line = {}  # before writing, because that fails on a full disk, and close() would write the line again
        if self._path is not None and has_numbers:
            with self._path.open('a', encoding='utf-8') as file:
                file.write(json.dumps(line) + '\n')


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


def keep_lines(path: Path, *, until: int) -> None:
    """Removes the lines of steps after ``until`` from a file, and creates the file if it does not exist.

    With ``until=0`` a run begins, so all lines are removed, also those of step 0: they were written by another run.
    """
    if until == 0 or not path.exists():
        path.write_text('')
        return
    text = ''
    for line in _read_lines(path):
        if line[STEP] <= until:
            text += json.dumps(line) + '\n'
    with whole_file(path) as new_file:
        new_file.write_text(text, encoding='utf-8')


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
                steps, values = metrics.setdefault(name, ([], []))
                steps.append(step)
                values.append(float(value))
    return metrics


def finite_part(series: Series) -> Series:
    """Returns the steps of a metric in which its value was finite, and these values."""
    finite_steps = []
    finite_values = []
    for step, value in zip(*series, strict=True):
        if math.isfinite(value):
            finite_steps.append(step)
            finite_values.append(value)
    return finite_steps, finite_values


def select(metrics: Mapping[str, Series], pattern: str) -> dict[str, Series]:
    """Returns the metrics that match a pattern, under short names.

    A short name is the text that the star stands for: ``loss`` for ``eval/loss`` and ``eval/*``. Without a star in the
    pattern it is the last part of the name.

    Args:
        metrics: Metrics by name.
        pattern: A name, perhaps with one ``*``.
    """
    before_star, _, after_star = pattern.partition('*')
    selected = {}
    for name in fnmatch.filter(metrics, pattern):
        text_of_star = name.removeprefix(before_star).removesuffix(after_star)
        last_part = name.rpartition('/')[2]
        selected[text_of_star or last_part] = metrics[name]
    return selected
