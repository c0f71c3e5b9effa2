# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a run logged, as a line of JSON a step and as one page with its pictures inside, which needs no network."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from composer.core import State
from composer.loggers import InMemoryLogger, Logger, LoggerDestination
from composer.utils import dist
from PIL import Image

from composer_tokacc.programs.answers import Answer

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

Series = tuple[Sequence[int], Sequence[float]]

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


class JsonLines(LoggerDestination):
    """Writes what is logged in a step as one line of ``metrics.jsonl``, on the first rank; numbers alone.

    Args:
        folder: Where the file goes, ``{run_name}`` included. A resumed run writes on behind what is there.
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
        """Writes the line of the step."""
        self._write(state)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Writes a line of the evaluation."""
        self._write(state)

    def close(self, state: State, logger: Logger) -> None:
        """Closes the file."""
        self._write(state)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, state: State) -> None:
        if self._file is not None and self._line:
            self._file.write(json.dumps({'step': state.timestamp.batch.value, **self._line}) + '\n')
            self._file.flush()
        self._line = {}


def write_page(
    path: Path, title: str, lines: Sequence[tuple[str, str]], history: InMemoryLogger, answers: Sequence[Answer] = ()
) -> None:
    """Writes the page: the summary, a curve of everything in ``PANELS`` that was logged, answers, ``result.png``."""
    rows = ''.join(f'<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>' for name, text in lines)
    charts = ''.join(_chart(name, found) for name, patterns in PANELS if (found := _found(history, patterns)))
    picture = path.with_name('result.png')
    if picture.is_file():
        charts += f'<figure>{_embedded(picture.read_bytes(), "result")}</figure>'
    charts += ''.join(['<h2>Answers to samples of the eval set</h2>', *map(_answered, answers)] if answers else [])
    name = html.escape(title)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
        f'<h1>{name}</h1><table>{rows}</table>{charts}</html>\n',
        encoding='utf-8',
    )


def _answered(answer: Answer) -> str:
    """Returns a sample with its images, its question, what was expected and what the model said."""
    pictures = []
    for image in answer.images[:MOST_IMAGES]:
        pixels = Image.fromarray((np.asarray(image) * 255).round().astype(np.uint8))
        written = BytesIO()
        pixels.resize(_shown_size(*pixels.size), Image.Resampling.NEAREST).save(written, 'PNG')
        pictures.append(_embedded(written.getvalue(), f'image of {answer.sample_id}'))
    said = [('question', answer.question), ('expected', answer.expected), ('answer', answer.generated)]
    rows = ''.join(f'<tr><th>{name}</th><td>{html.escape(text)}</td></tr>' for name, text in said)
    mark = '&#10003;' if answer.is_right else '&#10007;'
    name = f'<figcaption>{html.escape(answer.sample_id)} {mark}</figcaption>'
    return f'<figure class="answer">{name}{" ".join(pictures)}<table>{rows}</table></figure>'


def _shown_size(width: int, height: int) -> tuple[int, int]:
    """Returns a size at which a scan of eight pixels can be seen, and a photograph leaves room."""
    scale = max(SMALLEST_SHOWN // max(width, height), 1)
    return width * scale, height * scale


def _embedded(data: bytes, text: str) -> str:
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'


def finite_series(history: InMemoryLogger, name: str) -> tuple[list[int], list[float]]:
    """Returns steps and finite values of a logged metric; empty where nothing logged it."""
    points = [(int(time.batch.value), float(value)) for time, value in history.data.get(name, [])]
    points = [(step, value) for step, value in points if math.isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]


def _found(history: InMemoryLogger, patterns: Sequence[str]) -> dict[str, Series]:
    """Returns the curves of some metrics by short name; a star stands for any part of a name."""
    found: dict[str, Series] = {}
    for pattern in patterns:
        start, _, end = pattern.partition('*')
        for name in history.data:
            if name == pattern or ('*' in pattern and name.startswith(start) and name.endswith(end)):
                short = name[len(start) : len(name) - len(end)] if '*' in pattern else name.rpartition('/')[2]
                series = finite_series(history, name)
                if series[0]:
                    found[short] = series
    return found


def _chart(title: str, curves: Mapping[str, Series]) -> str:
    """Returns a figure with the curves, their least and largest value, and their last."""
    steps = [step for series in curves.values() for step in series[0]]
    values = [value for series in curves.values() for value in series[1]]
    left, right, low, high = min(steps), max(steps), min(values), max(values)
    parts, texts = [], []
    for number, (name, (at, of)) in enumerate(curves.items()):
        color = LINE_COLORS[number % len(LINE_COLORS)]
        points = ' '.join(
            f'{MARGIN + (WIDTH - 2 * MARGIN) * (step - left) / max(right - left, 1):.1f},'
            f'{HEIGHT - 20 - (HEIGHT - 30) * (value - low) / ((high - low) or 1):.1f}'
            for step, value in _thinned(at, of)
        )
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


def _thinned(steps: Sequence[int], values: Sequence[float]) -> list[tuple[float, float]]:
    groups = np.array_split(np.arange(len(steps)), min(len(steps), MOST_POINTS))
    return [(float(np.mean([steps[k] for k in some])), float(np.mean([values[k] for k in some]))) for some in groups]
