# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a finished run leaves behind: a result as JSON, a summary on the screen, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from composer.core import State
from composer.loggers import InMemoryLogger

from examples.digits.answers import Answer

__all__ = ['print_summary', 'series', 'summarize', 'write_report']

_LOSS = 'loss/train/total'
_EVAL = 'metrics/eval/'
_MONITOR = 'token_monitor/'
_CURVES = {
    'loss': _LOSS,
    'eval_loss': f'{_EVAL}LanguageCrossEntropy',
    'padding': f'{_MONITOR}padding_ratio',
    'stock_padding': f'{_MONITOR}device_batch_padding_ratio',
}
# Name in TokenMonitor, words, format.
_MONITOR_LINES = (
    ('device_batch_padding_ratio', 'padding had no microbatch been trimmed', '{:.1%}'),
    ('padding_ratio', 'padding really computed', '{:.1%}'),
    ('sample_weighting_error', 'weight that sample weighting would have misplaced', '{:.1%}'),
    ('rank_imbalance', 'slowest rank over the mean, in computed positions', '{:.3f}'),
    ('microbatches', 'microbatches a step, over all ranks', '{:.1f}'),
    ('real_tokens_per_second', 'real tokens a second', '{:,.0f}'),
)


def series(history: InMemoryLogger, name: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of a logged metric; empty where nobody logged it."""
    points = [(int(time.batch.value), float(value)) for time, value in history.data.get(name, [])]
    points = [(step, value) for step, value in points if np.isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]


def summarize(state: State, history: InMemoryLogger, *, seconds: float) -> dict[str, Any]:
    """The result of a run.

    Args:
        state: the Trainer's state at the end.
        history: everything that was logged in this run; steps before a resume are not in it.
        seconds: wall-clock time of training, evaluations included.

    Returns:
        ``run_name``, ``steps``, ``epochs``, ``samples``, ``tokens``, ``seconds``; ``loss`` (first, last); ``eval``
        (last value of every metric) and ``token_monitor`` (mean over the steps).
    """
    _, losses = series(history, _LOSS)
    names = {prefix: [name for name in history.data if name.startswith(prefix)] for prefix in (_EVAL, _MONITOR)}
    last = {name.removeprefix(_EVAL): series(history, name)[1][-1:] for name in names[_EVAL]}
    means = {name.removeprefix(_MONITOR): series(history, name)[1] for name in names[_MONITOR]}
    return {
        'run_name': state.run_name,
        'steps': int(state.timestamp.batch.value),
        'epochs': int(state.timestamp.epoch.value),
        'samples': int(state.timestamp.sample.value),
        'tokens': int(state.timestamp.token.value),
        'seconds': round(seconds, 3),
        'loss': {'first': losses[0], 'last': losses[-1]} if losses else {},
        'eval': {name: values[0] for name, values in last.items() if values},
        'token_monitor': {name: float(np.mean(values)) for name, values in means.items() if values},
    }


def write_report(
    folder: str | Path,
    result: dict[str, Any],
    history: InMemoryLogger,
    answers: Sequence[Answer] = (),
    *,
    picture: bool = False,
) -> None:
    """Writes ``result.json`` and, on request, ``result.png`` into ``folder``.

    Raises:
        ImportError: when a picture is wanted and matplotlib is not installed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [{key: value for key, value in asdict(answer).items() if key != 'images'} for answer in answers]
    (folder / 'result.json').write_text(json.dumps({**result, 'answers': texts}, indent=2) + '\n')
    if picture:
        from examples.digits.picture import draw_result

        draw_result(folder / 'result.png', {key: series(history, name) for key, name in _CURVES.items()}, answers)


def print_summary(result: dict[str, Any], answers: Sequence[Answer], folder: str | Path) -> None:
    """Prints the result, one figure a line."""
    monitor, evaluation, loss = result['token_monitor'], result['eval'], result['loss']
    lines: list[tuple[str, str]] = [
        ('steps', f'{result["steps"]} ({result["samples"]} samples, {result["seconds"]:.0f} s)'),
    ]
    if loss:
        lines.append(('training loss, first to last step', f'{loss["first"]:.3f} -> {loss["last"]:.3f}'))
    if 'MaskedAccuracy' in evaluation:
        lines.append(('held-out token accuracy', f'{evaluation["MaskedAccuracy"]:.2%}'))
    if answers:
        num_right = sum(answer.is_right for answer in answers)
        lines.append(('held-out answers generated right', f'{num_right} of {len(answers)}'))
    lines += [(text, form.format(monitor[name])) for name, text, form in _MONITOR_LINES if name in monitor]
    lines += [('bad samples', report) for report in result.get('skipped', [])]
    lines.append(('written to', str(folder)))
    width = max(len(text) for text, _ in lines)
    print('\n' + '\n'.join(f'{text:<{width}}  {value}' for text, value in lines), flush=True)
