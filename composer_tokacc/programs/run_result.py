# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a run leaves behind: a line of JSON a step, a result, a summary, and a page with its pictures inside."""

from __future__ import annotations

import base64
import fnmatch
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from composer.core import State
from composer.loggers import InMemoryLogger, Logger, LoggerDestination
from composer.models import HuggingFaceModel
from composer.utils import dist
from PIL import Image
from torch.utils.data import ConcatDataset

from composer_tokacc.programs.answers import Answer
from composer_tokacc.programs.build import RunParts
from composer_tokacc.programs.export_folder import export_model
from composer_tokacc.programs.registry import import_by_name, without
from composer_tokacc.programs.schema import OF_THE_REPORT, TrainConfig

MOST_POINTS = 400
"""Points of a curve: each is the mean of as many steps as fall on it."""
MOST_IMAGES, SMALLEST_SHOWN = 12, 48
"""Of an answered sample: images that are shown, and the pixels that a small one is magnified to."""
LINE_COLORS = ('#2a78b5', '#c0392b', '#1f9d6b', '#8e5ea2', '#d98c1f', '#5f6b7a')
WIDTH, HEIGHT, MARGIN = 640, 200, 46

STYLE = """
body { font: 15px/1.4 sans-serif; max-width: 1340px; margin: 2em auto; color: #222 }
th { text-align: left; padding-right: 2em; font-weight: normal; color: #555 }
figure { display: inline-block; margin: .6em 0 } figcaption { font-weight: bold } img { max-width: 100% }
.answer { width: 620px; margin-right: 1em; vertical-align: top }
"""

Series = tuple[list[int], list[float]]

PANELS = (
    ('Loss', ('loss/train/total', 'token_accumulation/token_mean_loss')),
    ('Loss by source', ('token_monitor/source/*/loss',)),
    ('Share of the weight by source', ('token_monitor/source/*/weight',)),
    ('Tokens a second', ('token_monitor/tokens_per_second', 'token_monitor/real_tokens_per_second')),
    ('Seconds of a step', ('token_monitor/seconds_p50', 'token_monitor/seconds_p99', 'token_monitor/loader_seconds')),
    ('Model FLOPs utilization', ('token_monitor/mfu',)),
    ('Norm of the gradient', ('token_monitor/gradient_norm',)),
    ('Padding', ('token_monitor/device_batch_padding_ratio', 'token_monitor/padding_ratio')),
    ('Slowest rank over the mean', ('token_monitor/rank_imbalance',)),
    ('Peak memory, GiB', ('token_monitor/peak_memory_gib',)),
    ('Evaluation', ('metrics/eval/*',)),
)
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
        return series_of(self.history, name).get(name.rpartition('/')[2], ([], []))


def summarize(
    state: State, history: InMemoryLogger, parts: RunParts, *, first_step: int, seconds: float
) -> dict[str, Any]:
    """Returns the result of a run as JSON has it: ``eval`` of the last evaluation, ``token_monitor`` as means.

    ``seconds``, ``loss`` and ``token_monitor`` are of the steps after ``first_step``, at which this process began;
    ``skipped`` is a line for each dataset that left out bad samples.
    """
    losses = [value for _, values in series_of(history, 'loss/train/total').values() for value in values]
    evaluations, monitored = (series_of(history, pattern) for pattern in ('metrics/eval/*', 'token_monitor/*'))
    means = {name: float(np.mean(values)) for name, (_, values) in monitored.items()}
    train: Any = parts.train_dataset
    datasets = [*(train.datasets if isinstance(train, ConcatDataset) else [train]), parts.eval_dataset]
    return {
        'run_name': state.run_name,
        'steps': int(state.timestamp.batch.value),
        'first_step': first_step,
        'epochs': int(state.timestamp.epoch.value),
        'samples': int(state.timestamp.sample.value),
        'tokens': int(state.timestamp.token.value),
        'seconds': round(seconds, 3),
        'loss': {'first': losses[0], 'last': losses[-1]} if losses else {},
        'eval': {name: values[-1] for name, (_, values) in evaluations.items()},
        'token_monitor': {name: mean for name, mean in means.items() if not name.startswith('source/')},
        'sources': _sources({name: values for name, (_, values) in monitored.items() if name.startswith('source/')}),
        'skipped': [dataset.skip_report() for dataset in datasets if getattr(dataset, 'skipped', None)],
        'fitted': [one for dataset in datasets if hasattr(dataset, 'fitted') for one in dataset.fitted()],
    }


def _sources(logged: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Returns what each source gave to the run: tokens in all, mean shares of the steps, its loss first and last."""
    found = {}
    for name in sorted({name.split('/')[1] for name in logged}):
        fields = (f'source/{name}/{key}' for key in ('tokens', 'weight', 'positions', 'loss'))
        tokens, weight, positions, loss = (logged.get(field, []) for field in fields)
        found[name] = {'tokens': sum(tokens), 'weight': float(np.mean(weight)), 'positions': float(np.mean(positions))}
        if loss:
            found[name] |= {'first_loss': loss[0], 'last_loss': loss[-1]}
    return found


def write_report(
    config: TrainConfig, parts: RunParts, result: dict[str, Any], history: InMemoryLogger, answers: Sequence[Answer]
) -> str:
    """Writes ``result.json``, after the function under ``report.name`` has added to it; returns the summary."""
    folder = Path(config.report['folder'].format(run_name=result['run_name']))
    folder.mkdir(parents=True, exist_ok=True)
    lines = _lines(result)
    if 'name' in config.report:
        run = FinishedRun(
            result=result, history=history, model=parts.model, eval_dataset=parts.eval_dataset,
            processor=parts.processor, folder=folder, is_sharded=config.is_sharded,
        )  # fmt: skip
        lines += import_by_name('report', config.report['name'])(run, **without(config.report, *OF_THE_REPORT)) or ()
    (folder / 'result.json').write_text(json.dumps(result, indent=2, default=str) + '\n')
    if config.report.get('export'):
        export_model(parts.model, folder / 'exported')
        lines.append(('model for transformers', str(folder / 'exported')))
    lines.append(('written to', str(folder)))
    write_page(folder / 'report.html', result['run_name'], lines, history, answers)
    width = max(len(text) for text, _ in lines)
    return '\n'.join(f'{text:<{width}}  {value}' for text, value in lines)


def _lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    monitor, evaluation, loss = result['token_monitor'], result['eval'], result['loss']
    steps, seconds = result['steps'], f'{result["seconds"]:.0f} s'
    lines = [('steps', f'{steps} ({result["samples"]} samples, {seconds})')]
    if first := result['first_step']:
        here = f'{steps - first} ({seconds}), and of these all below'
        lines = [('steps', f'{steps} ({result["samples"]} samples)'), ('of which here', here)]
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


class JsonLines(LoggerDestination):
    """Writes what is logged in a step as one line of ``metrics.jsonl``, on the first rank; numbers alone.

    A resumed run writes on behind what is there. ``folder`` is where the file goes, ``{run_name}`` included.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._file: TextIO | None = None
        self._line: dict[str, float | None] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Opens the file."""
        if dist.get_global_rank() == 0 and self._file is None:
            path = Path(self.folder.format(run_name=state.run_name)) / 'metrics.jsonl'
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open('a' if state.timestamp.batch.value else 'w', encoding='utf-8')

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Takes numbers for the line; what is not finite is null, as JSON has no word for it."""
        values = {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
        self._line |= {name: value if math.isfinite(value) else None for name, value in values.items()}

    def batch_end(self, state: State, logger: Logger) -> None:
        """Writes the line of the step, or of an evaluation."""
        if self._file is not None and self._line:
            self._file.write(json.dumps({'step': state.timestamp.batch.value, **self._line}) + '\n')
            self._file.flush()
        self._line = {}

    eval_end = batch_end

    def close(self, state: State, logger: Logger) -> None:
        """Closes the file."""
        self.batch_end(state, logger)
        if self._file is not None:
            self._file.close()
            self._file = None


def write_page(
    path: Path, title: str, lines: Sequence[tuple[str, str]], history: InMemoryLogger, answers: Sequence[Answer] = ()
) -> None:
    """Writes the page: the summary, a curve of everything in ``PANELS`` that was logged, answers, ``result.png``."""
    rows = ''.join(f'<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>' for name, text in lines)
    panels = {name: {k: v for one in patterns for k, v in series_of(history, one).items()} for name, patterns in PANELS}
    charts = ''.join(_chart(name, curves) for name, curves in panels.items() if curves)
    picture = path.with_name('result.png')
    if picture.is_file():
        charts += f'<figure>{_embedded(picture.read_bytes(), "result")}</figure>'
    charts += ''.join(['<h2>Answers to samples of the eval set</h2>', *map(_answered, answers)] if answers else [])
    name = html.escape(title)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    path.write_text(f'{head}<h1>{name}</h1><table>{rows}</table>{charts}</html>\n', encoding='utf-8')


def _answered(answer: Answer) -> str:
    """Returns a sample with its images, its question, what was expected and what the model said."""
    pictures = []
    for image in answer.images[:MOST_IMAGES]:
        pixels, written = Image.fromarray((np.asarray(image) * 255).round().astype(np.uint8)), BytesIO()
        scale = max(SMALLEST_SHOWN // max(pixels.size), 1)  # a scan of eight pixels can be seen
        pixels.resize((pixels.width * scale, pixels.height * scale), Image.Resampling.NEAREST).save(written, 'PNG')
        pictures.append(_embedded(written.getvalue(), f'image of {answer.sample_id}'))
    said = [('question', answer.question), ('expected', answer.expected), ('answer', answer.generated)]
    rows = ''.join(f'<tr><th>{name}</th><td>{html.escape(text)}</td></tr>' for name, text in said)
    mark = '&#10003;' if answer.is_right else '&#10007;'
    name = f'<figcaption>{html.escape(answer.sample_id)} {mark}</figcaption>'
    return f'<figure class="answer">{name}{" ".join(pictures)}<table>{rows}</table></figure>'


def _embedded(data: bytes, text: str) -> str:
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'


def series_of(history: InMemoryLogger, pattern: str) -> dict[str, Series]:
    """Returns steps and finite values of logged metrics, by what a star stands for, or the last part of the name."""
    found: dict[str, Series] = {}
    start, _, end = pattern.partition('*')
    for name in fnmatch.filter(history.data, pattern):
        points = [(int(time.batch.value), float(value)) for time, value in history.data[name]]
        points = [(step, value) for step, value in points if math.isfinite(value)]
        if points:
            short = name.removeprefix(start).removesuffix(end) or name.rpartition('/')[2]
            found[short] = [step for step, _ in points], [value for _, value in points]
    return found


def _chart(title: str, curves: Mapping[str, Series]) -> str:
    """Returns a figure with the curves, their least and largest value, and their last."""
    steps, values = (np.concatenate(each) for each in zip(*curves.values(), strict=True))
    left, right, low, high = steps.min(), steps.max(), values.min(), values.max()
    parts, texts = [], []
    for number, (name, (at, of)) in enumerate(curves.items()):
        color = LINE_COLORS[number % len(LINE_COLORS)]
        thinned = [part.mean(axis=0) for part in np.array_split(np.transpose([at, of]), min(len(at), MOST_POINTS))]
        x, y = np.transpose(thinned)
        x = MARGIN + (WIDTH - 2 * MARGIN) * (x - left) / max(right - left, 1)
        y = HEIGHT - 20 - (HEIGHT - 30) * (y - low) / ((high - low) or 1)
        points = ' '.join(f'{across:.1f},{down:.1f}' for across, down in zip(x, y, strict=True))
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{points}"/>')
        texts.append(f'<span style="color:{color}">{html.escape(name)}: {of[-1]:.4g}</span>')
    axis = (
        f'<text x="2" y="14">{high:.3g}</text><text x="2" y="{HEIGHT - 20}">{low:.3g}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 4}">step {left}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 4}" text-anchor="end">{right}</text>'
        f'<path d="M{MARGIN} 8V{HEIGHT - 18}H{WIDTH - MARGIN}" fill="none" stroke="#bbb"/>'
    )
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><svg width="{WIDTH}" height="{HEIGHT}" font-size="11" '
        f'role="img">{axis}{"".join(parts)}</svg><br>{" &nbsp; ".join(texts)}</figure>'
    )
