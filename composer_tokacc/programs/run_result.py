# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes the result of a run: ``result.json``, the summary on the screen, and the page.

A function of the user may add to the result and to the summary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from composer.core import State
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from torch.utils.data import ConcatDataset

from composer_tokacc.cache import whole_file
from composer_tokacc.data import LlavaDataset
from composer_tokacc.programs.answers import Answer
from composer_tokacc.programs.build import RunParts
from composer_tokacc.programs.export_folder import export_model
from composer_tokacc.programs.host_types import Processor, Section
from composer_tokacc.programs.metrics_file import NOT_LOGGED, Series, select
from composer_tokacc.programs.registry import report_function
from composer_tokacc.programs.report_page import write_page
from composer_tokacc.programs.schema import TrainConfig
from composer_tokacc.programs.sources import Source

MONITOR_LINES = (
    ('device_batch_padding_ratio', 'padding without trimming', '{:.1%}'),
    ('padding_ratio', 'padding with trimming', '{:.1%}'),
    ('dummy_ratio', 'of it dummy rows, which keep ranks in step', '{:.1%}'),
    ('sample_weighting_error', 'gradient weight that stock Composer gives to the wrong tokens', '{:.1%}'),
    ('rank_imbalance', 'slowest rank over the mean, in computed positions', '{:.3f}'),
    ('microbatches', 'microbatches a step, over all ranks', '{:.1f}'),
    ('real_tokens_per_second', 'real tokens a second', '{:,.0f}'),
    ('mfu', 'use of what the devices can do (MFU)', '{:.1%}'),
    ('seconds_p50', 'seconds of a step, running median', '{:.3f}'),
    ('loader_seconds', 'seconds of a step that a rank waits for data', '{:.3f}'),
)
"""Lines of the summary: name of the metric in TokenMonitor, description, format of the figure. "Of it" means: of the
padding in the line before."""


@dataclass(kw_only=True)
class FinishedRun:
    """The argument of the function under ``report.name``, which runs on rank 0.

    The function returns None, or further lines of the summary, as pairs of a description and a figure.
    """

    result: dict[str, Any]
    """Figures of the run, for ``result.json``. The function may add to them."""
    history: InMemoryLogger
    """Everything that was logged in this process: in a resumed run only since it was resumed."""
    model: HuggingFaceModel
    eval_dataset: Any
    """None without ``dataset.eval``."""
    processor: Processor
    folder: Path
    """The folder of ``result.json``. It exists."""
    is_sharded: bool
    """Whether the ranks divide the model by FSDP. Then rank 0 cannot run it alone."""
    metrics: dict[str, Series] = field(default_factory=dict)
    """Everything that was logged in the run, also before it was resumed, from ``metrics.jsonl``. NaN stands for values
    that were not finite."""

    def series(self, name: str) -> Series:
        """Returns the steps and the finite values of a logged metric, a pair of lists. Empty if nothing logged it."""
        return self.metrics.get(name, NOT_LOGGED).finite()


def result_folder(config: TrainConfig, run_name: str) -> Path:
    """Returns the folder of ``result.json``."""
    return Path(config.report['folder'].format(run_name=run_name))


def summarize(
    state: State,
    metrics: Mapping[str, Series],
    parts: RunParts,
    *,
    first_step: int,
    seconds: float,
) -> dict[str, Any]:
    """Returns the values for ``result.json``.

    The metrics under ``eval`` come from the last evaluation. A loss, or a metric of the evaluation, is None if it was
    not finite.

    Args:
        state: The state of the Trainer.
        metrics: Everything that was logged, also before the run was resumed.
        parts: Data and model.
        first_step: The step at which this process began; 0 unless the run was resumed.
        seconds: Time that this process trained.
    """
    loss = {}
    losses = metrics.get('loss/train/total', NOT_LOGGED).values
    if losses:
        loss = {'first': _or_none(losses[0]), 'last': _or_none(losses[-1])}
    last_evaluation = {}
    for name, series in select(metrics, 'metrics/eval/*').items():
        last_evaluation[name] = _or_none(series.values[-1])
    skipped = []
    fitted = []
    for dataset in _llava_datasets(parts.source):
        fitted += dataset.fitted()
        if dataset.skipped:
            skipped.append(dataset.skip_report())
    return {
        'run_name': state.run_name,
        'steps': state.timestamp.batch.value,
        'first_step': first_step,
        'epochs': state.timestamp.epoch.value,
        'samples': state.timestamp.sample.value,
        'tokens': state.timestamp.token.value,
        'seconds': round(seconds, 3),
        'loss': loss,
        'eval': last_evaluation,
        'token_monitor': _monitor_means(metrics),
        'sources': _sources(metrics),
        'skipped': skipped,
        'fitted': fitted,
    }


def _or_none(value: float) -> float | None:
    """Returns the value; None if it is not finite, because JSON has no number for that."""
    return value if math.isfinite(value) else None


def _llava_datasets(source: Source) -> list[LlavaDataset]:
    """Returns the datasets of a run that may skip bad samples or make images smaller to fit. No other class does."""
    datasets = [source.train_dataset]
    if isinstance(source.train_dataset, ConcatDataset):  # made from `dataset.parts`
        datasets = list(source.train_dataset.datasets)
    datasets.append(source.eval_dataset)
    return [dataset for dataset in datasets if isinstance(dataset, LlavaDataset)]


def _monitor_means(metrics: Mapping[str, Series]) -> dict[str, float]:
    """Returns the mean of each metric of TokenMonitor over the steps in which it was finite.

    Their names are without ``token_monitor/``. The metrics of the sources are left out, see :func:`_sources`.
    """
    means = {}
    for name, series in select(metrics, 'token_monitor/*').items():
        finite_values = series.finite().values
        if finite_values and not name.startswith('source/'):
            means[name] = fmean(finite_values)
    return means


def _sources(metrics: Mapping[str, Series]) -> dict[str, dict[str, float | None]]:
    """Returns the figures of each source: its loss tokens, two mean shares, its first and last loss.

    ``weight`` is its share of the weight of all tokens, ``positions`` its share of the computed positions. Both are
    means over all steps in which any source was logged. A source that was not logged in a step had a share of 0.
    """
    tokens_of_sources = select(metrics, 'token_monitor/source/*/tokens')
    logged_steps: set[int] = set()
    for tokens in tokens_of_sources.values():
        logged_steps.update(tokens.steps)
    sources = {}
    for name, tokens in sorted(tokens_of_sources.items()):
        # Read by their full names, because in a pattern a source such as `captions[en]` would not match itself.
        prefix = f'token_monitor/source/{name}'
        weights = metrics[f'{prefix}/weight'].values
        positions = metrics[f'{prefix}/positions'].values
        losses = metrics.get(f'{prefix}/loss', NOT_LOGGED).values
        source: dict[str, float | None] = {
            'tokens': sum(tokens.values),
            'weight': sum(weights) / len(logged_steps),
            'positions': sum(positions) / len(logged_steps),
        }
        if losses:
            source |= {'first_loss': _or_none(losses[0]), 'last_loss': _or_none(losses[-1])}
        sources[name] = source
    return sources


def write_report(
    config: TrainConfig,
    parts: RunParts,
    result: dict[str, Any],
    metrics: dict[str, Series],
    history: InMemoryLogger,
    answers: Sequence[Answer],
) -> str:
    """Writes ``result.json``, ``report.html`` and, with ``report.export``, the model. Returns the summary.

    Rank 0 calls it. First the function under ``report.name`` may add to the result and to the summary.

    Args:
        config: The run.
        parts: Data and model.
        result: See :func:`summarize`.
        metrics: Everything that was logged, also before the run was resumed.
        history: Everything that was logged in this process.
        answers: The model's answers in the last evaluation.
    """
    folder = result_folder(config, result['run_name'])
    folder.mkdir(parents=True, exist_ok=True)
    summary = _summary(result)
    add_to_result = report_function(config.report)
    if add_to_result is not None:
        run = FinishedRun(
            result=result,
            history=history,
            metrics=metrics,
            model=parts.model,
            eval_dataset=parts.source.eval_dataset,
            processor=parts.source.processor,
            folder=folder,
            is_sharded=config.is_sharded,
        )
        summary += add_to_result(run) or ()
    text = json.dumps(result, indent=2, default=str)
    with whole_file(folder / 'result.json') as new_file:
        new_file.write_text(f'{text}\n')
    if config.report.get('export'):
        export_model(parts.model, folder / 'exported')
        summary.append(('model for transformers', str(folder / 'exported')))
    summary.append(('written to', str(folder)))
    write_page(folder / 'report.html', result['run_name'], summary, metrics, answers)
    width = max(len(description) for description, _ in summary)
    return '\n'.join(f'{description:<{width}}  {figure}' for description, figure in summary)


def _first_to_last(first: float | None, last: float | None) -> str:
    """Returns two losses as text, such as ``2.100 -> 1.300``. A loss of None is shown as NaN."""
    texts = ['NaN' if loss is None else f'{loss:.3f}' for loss in (first, last)]
    return ' -> '.join(texts)


def _summary(result: Section) -> list[tuple[str, str]]:
    """Returns the lines of the summary as pairs of a description and a figure."""
    steps = result['steps']
    samples = result['samples']
    seconds = f'{result["seconds"]:.0f} s'
    lines = []
    if result['first_step']:  # the run was resumed, so the seconds are only for the steps since then
        lines.append(('steps', f'{steps} ({samples} samples)'))
        lines.append(('steps since this start', f'{steps - result["first_step"]} ({seconds})'))
    else:
        lines.append(('steps', f'{steps} ({samples} samples, {seconds})'))
    loss = result['loss']
    if loss:
        lines.append(('training loss, first to last step', _first_to_last(loss['first'], loss['last'])))
    accuracy = result['eval'].get('MaskedAccuracy')
    if accuracy is not None:
        lines.append(('held-out token accuracy', f'{accuracy:.2%}'))
    monitor = result['token_monitor']
    for name, description, form in MONITOR_LINES:
        if name in monitor:
            lines.append((description, form.format(monitor[name])))
    for name, source in result['sources'].items():
        lines.append((f'source {name}', _source_figures(source)))
    for report in result['skipped']:
        lines.append(('bad samples', report))
    if result['fitted']:
        # `share` is the part of the processor's budget for media that the sample was given.
        smallest = min(result['fitted'], key=lambda sample: sample['share'])
        figures = f'{len(result["fitted"])} samples, to {smallest["share"]:.0%} at the least ("{smallest["sample"]}")'
        lines.append(('media made smaller to fit', f'{figures}; all: result.json'))
    return lines


def _source_figures(source: Section) -> str:
    """Returns the text of the summary for a source, see :func:`_sources`."""
    figures = (
        f'{source["tokens"]:,.0f} tokens, {source["weight"]:.1%} of the weight, {source["positions"]:.1%} of the cost'
    )
    if 'first_loss' in source:
        figures += f', loss {_first_to_last(source["first_loss"], source["last_loss"])}'
    return figures
