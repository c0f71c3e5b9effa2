# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes what a finished run leaves behind: a result as JSON and a summary on the screen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from composer.core import State
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel

from composer_tokacc.programs.answers import Answer
from composer_tokacc.programs.build import RunParts
from composer_tokacc.programs.export_folder import export_model
from composer_tokacc.programs.registry import import_by_name, without
from composer_tokacc.programs.report_page import finite_series, write_page
from composer_tokacc.programs.schema import OF_THE_REPORT, TrainConfig

_LOSS = 'loss/train/total'
_EVAL = 'metrics/eval/'
_MONITOR = 'token_monitor/'
_SOURCE = f'{_MONITOR}source/'
# Name in TokenMonitor, words, format.
_MONITOR_LINES = (
    ('device_batch_padding_ratio', 'padding had no microbatch been trimmed', '{:.1%}'),
    ('padding_ratio', 'padding really computed', '{:.1%}'),
    ('dummy_ratio', 'of it dummy rows, which keep ranks in step', '{:.1%}'),
    ('sample_weighting_error', 'weight that sample weighting would have misplaced', '{:.1%}'),
    ('rank_imbalance', 'slowest rank over the mean, in computed positions', '{:.3f}'),
    ('microbatches', 'microbatches a step, over all ranks', '{:.1f}'),
    ('real_tokens_per_second', 'real tokens a second', '{:,.0f}'),
    ('mfu', 'use of what the devices can do (MFU)', '{:.1%}'),
    ('seconds_p50', 'seconds of a step, median', '{:.3f}'),
    ('loader_seconds', 'of it waiting for data', '{:.3f}'),
)


@dataclass(kw_only=True)
class FinishedRun:
    """What a function under ``report.name`` gets, on rank 0; it returns lines of the summary, words and figure."""

    result: dict[str, Any]
    """Figures of the run; what is added to them goes to ``result.json``."""
    history: InMemoryLogger
    model: HuggingFaceModel
    eval_dataset: Any
    """None where ``dataset.eval`` is absent."""
    processor: Any
    folder: Path
    """Where ``result.json`` goes; exists."""
    is_sharded: bool

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns steps and finite values of a logged metric; empty where nothing logged it."""
        return finite_series(self.history, name)


def summarize(
    state: State, history: InMemoryLogger, parts: RunParts, *, first_step: int, seconds: float
) -> dict[str, Any]:
    """Returns the result of a run as JSON has it: ``eval`` of the last evaluation, ``token_monitor`` as means.

    ``seconds``, ``loss`` and ``token_monitor`` are of the steps after ``first_step``, at which this process began;
    ``skipped`` is a line for each dataset that left out bad samples.
    """
    _, losses = finite_series(history, _LOSS)
    names = {prefix: [name for name in history.data if name.startswith(prefix)] for prefix in (_EVAL, _MONITOR)}
    last = {name.removeprefix(_EVAL): finite_series(history, name)[1][-1:] for name in names[_EVAL]}
    monitored = [name for name in names[_MONITOR] if not name.startswith(_SOURCE)]
    means = {name.removeprefix(_MONITOR): finite_series(history, name)[1] for name in monitored}
    return {
        'run_name': state.run_name,
        'steps': int(state.timestamp.batch.value),
        'first_step': first_step,
        'epochs': int(state.timestamp.epoch.value),
        'samples': int(state.timestamp.sample.value),
        'tokens': int(state.timestamp.token.value),
        'seconds': round(seconds, 3),
        'loss': {'first': losses[0], 'last': losses[-1]} if losses else {},
        'eval': {name: values[0] for name, values in last.items() if values},
        'token_monitor': {name: float(np.mean(values)) for name, values in means.items() if values},
        'sources': _sources(history),
        'skipped': parts.skip_reports(),
        'fitted': parts.fitted(),
    }


def _sources(history: InMemoryLogger) -> dict[str, dict[str, float]]:
    """Returns what each source gave to the run: tokens in all, mean shares of the steps, its loss first and last."""
    found = {}
    for name in sorted({name.removeprefix(_SOURCE).partition('/')[0] for name in history.data if _SOURCE in name}):
        fields = ('tokens', 'weight', 'positions', 'loss')
        tokens, weight, positions, loss = (finite_series(history, f'{_SOURCE}{name}/{field}')[1] for field in fields)
        found[name] = {'tokens': sum(tokens), 'weight': float(np.mean(weight)), 'positions': float(np.mean(positions))}
        if loss:
            found[name] |= {'first_loss': loss[0], 'last_loss': loss[-1]}
    return found


def write_report(
    config: TrainConfig,
    parts: RunParts,
    result: dict[str, Any],
    history: InMemoryLogger,
    answers: Sequence[Answer] = (),
) -> str:
    """Writes ``result.json``, after the function under ``report.name`` has added to it; returns the summary."""
    folder = Path(config.report['folder'].format(run_name=result['run_name']))
    folder.mkdir(parents=True, exist_ok=True)
    lines = _lines(result)
    if 'name' in config.report:
        run = FinishedRun(
            result=result,
            history=history,
            model=parts.model,
            eval_dataset=parts.eval_dataset,
            processor=parts.processor,
            folder=folder,
            is_sharded=config.is_sharded,
        )
        lines += import_by_name('report', config.report['name'])(run, **without(config.report, *OF_THE_REPORT))
    (folder / 'result.json').write_text(json.dumps(result, indent=2) + '\n')
    if config.report.get('export'):
        export_model(parts.model, folder / 'exported')
        lines.append(('model for transformers', str(folder / 'exported')))
    lines.append(('written to', str(folder)))
    write_page(folder / 'report.html', result['run_name'], lines, history, answers)
    width = max(len(text) for text, _ in lines)
    return '\n'.join(f'{text:<{width}}  {value}' for text, value in lines)


def _lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    monitor, evaluation, loss = result['token_monitor'], result['eval'], result['loss']
    lines = [('steps', f'{result["steps"]} ({result["samples"]} samples, {result["seconds"]:.0f} s)')]
    if result['first_step']:
        lines = [
            ('steps', f'{result["steps"]} ({result["samples"]} samples)'),
            (
                'of which here',
                f'{result["steps"] - result["first_step"]} ({result["seconds"]:.0f} s), and of these all below',
            ),
        ]
    if loss:
        lines.append(('training loss, first to last step', f'{loss["first"]:.3f} -> {loss["last"]:.3f}'))
    if 'MaskedAccuracy' in evaluation:
        lines.append(('held-out token accuracy', f'{evaluation["MaskedAccuracy"]:.2%}'))
    lines += [(text, form.format(monitor[name])) for name, text, form in _MONITOR_LINES if name in monitor]
    for name, row in result['sources'].items():
        losses = f', loss {row["first_loss"]:.3f} -> {row["last_loss"]:.3f}' if 'first_loss' in row else ''
        text = f'{row["tokens"]:,.0f} tokens, {row["weight"]:.1%} of the weight, {row["positions"]:.1%} of the cost'
        lines.append((f'source {name}', text + losses))
    lines += [('bad samples', report) for report in result['skipped']]
    if fitted := result['fitted']:
        least = min(fitted, key=lambda one: one['share'])
        text = f'{len(fitted)} samples, to {least["share"]:.0%} at the least ("{least["sample"]}"); all: result.json'
        lines.append(('media made smaller to fit', text))
    return lines
