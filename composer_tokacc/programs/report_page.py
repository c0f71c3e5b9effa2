# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``report.html``: the summary of a run, its curves and answers, in one file without anything from the network."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from composer_tokacc.programs.answers import Answer
from composer_tokacc.programs.metrics_file import Series, select

MOST_POINTS = 400
"""Most points of a curve. The steps are divided into at most half as many ranges. The lowest and the highest value of
each range are drawn, so no spike is lost. The first and the last value are drawn, too."""
MOST_IMAGES = 12
"""Most images of an answered sample that are shown."""
LINE_COLORS = ('#2a78b5', '#c0392b', '#1f9d6b', '#8e5ea2', '#d98c1f', '#5f6b7a')
WIDTH = 640
"""Width of a chart. This number and the next four are pixels."""
HEIGHT = 200
"""Height of a chart."""
MARGIN = 46
"""Space on the left and on the right of the curves."""
TOP = 10
"""Space above the curves."""
BOTTOM = 20
"""Space below the curves, for the steps."""

STYLE = """
body { font: 15px/1.4 sans-serif; max-width: 1340px; margin: 2em auto; color: #222 }
th { text-align: left; padding-right: 2em; font-weight: normal; color: #555 }
figure { display: inline-block; margin: .6em 0 } figcaption { font-weight: bold } img { max-width: 100% }
.answer { width: 620px; margin-right: 1em; vertical-align: top }
.answer img { min-width: 48px; image-rendering: pixelated }
"""

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
"""Title of each chart, and the metrics in it."""


def write_page(
    path: Path,
    title: str,
    lines: Sequence[tuple[str, str]],
    metrics: Mapping[str, Series],
    answers: Sequence[Answer] = (),
) -> None:
    """Writes the page: the summary, a chart for each of ``PANELS`` that was logged, ``result.png`` and the answers.

    Args:
        path: The file of the page. The function under ``report.name`` may have put a ``result.png`` next to it.
        title: The name of the run.
        lines: The summary, as pairs of a description and a figure.
        metrics: Everything that was logged.
        answers: The model's answers in the last evaluation.
    """
    rows = ''.join(_row(name, text) for name, text in lines)
    figures = []
    for caption, patterns in PANELS:
        curves: dict[str, Series] = {}
        for pattern in patterns:
            curves.update(select(metrics, pattern))
        if curves:
            figures.append(_chart(caption, curves))
    picture = path.with_name('result.png')
    if picture.is_file():
        figures.append(f'<figure>{_embedded(picture.read_bytes(), "result")}</figure>')
    if answers:
        figures.append('<h2>Answers to samples of the eval set</h2>')
        figures += [_answered(answer) for answer in answers]
    name = html.escape(title)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    path.write_text(f'{head}<h1>{name}</h1><table>{rows}</table>{"".join(figures)}</html>\n', encoding='utf-8')


def _row(name: str, text: str) -> str:
    """Returns the HTML of a row of a table."""
    return f'<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>'


def _answered(answer: Answer) -> str:
    """Returns the HTML of a sample: its images, its question, the expected text and the text of the model."""
    pictures = []
    for image in answer.images[:MOST_IMAGES]:
        png = BytesIO()
        image.save(png, 'PNG')
        pictures.append(_embedded(png.getvalue(), f'image of {answer.sample_id}'))
    rows = [
        _row('question', answer.question),
        _row('expected', answer.expected),
        _row('answer', answer.generated),
    ]
    mark = '&#10003;' if answer.is_right else '&#10007;'
    caption = f'<figcaption>{html.escape(answer.sample_id)} {mark}</figcaption>'
    return f'<figure class="answer">{caption}{" ".join(pictures)}<table>{"".join(rows)}</table></figure>'


def _embedded(data: bytes, text: str) -> str:
    """Returns the HTML of a PNG image, whose bytes are in the page itself. ``text`` stands for it in a text browser."""
    encoded = base64.b64encode(data).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{encoded}">'


def _chart(title: str, curves: Mapping[str, Series]) -> str:
    """Returns the HTML of a chart. Its axes name the ranges of steps and values, its legend the last values."""
    all_steps = np.concatenate([steps for steps, _ in curves.values()])
    all_values = np.concatenate([values for _, values in curves.values()])
    first_step = all_steps.min()
    last_step = all_steps.max()
    low = all_values.min()
    high = all_values.max()
    lines = []
    legends = []
    for number, (name, (steps, values)) in enumerate(curves.items()):
        color = LINE_COLORS[number % len(LINE_COLORS)]
        points = []
        for place in _drawn_places(values):
            step = steps[place]
            value = values[place]
            # Both in [0, 1]. A single step or a constant curve must not divide by zero.
            across = (step - first_step) / max(last_step - first_step, 1)
            up = (value - low) / ((high - low) or 1)
            x = MARGIN + (WIDTH - 2 * MARGIN) * across
            y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up
            points.append(f'{x:.1f},{y:.1f}')
            if len(steps) == 1:  # a line of one point cannot be seen
                lines.append(f'<circle fill="{color}" r="3" cx="{x:.1f}" cy="{y:.1f}"/>')
        lines.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{" ".join(points)}"/>')
        legends.append(f'<span style="color:{color}">{html.escape(name)}: {values[-1]:.4g}</span>')
    # The numbers in the text are pixels. They keep the labels beside the axes, clear of the curves.
    axes = (
        f'<text x="2" y="14">{high:.3g}</text><text x="2" y="{HEIGHT - BOTTOM}">{low:.3g}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 4}">step {first_step}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 4}" text-anchor="end">{last_step}</text>'
        f'<path d="M{MARGIN} 8V{HEIGHT - 18}H{WIDTH - MARGIN}" fill="none" stroke="#bbb"/>'
    )
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><svg width="{WIDTH}" height="{HEIGHT}" font-size="11" '
        f'role="img">{axes}{"".join(lines)}</svg><br>{" &nbsp; ".join(legends)}</figure>'
    )


def _drawn_places(curve: Sequence[float]) -> list[int]:
    """Returns the places of the lowest and the highest value of each range of steps, rising; also the first and last.

    So a long curve has few points, and no spike is lost.
    """
    values = np.asarray(curve)
    num_ranges = min(len(values), MOST_POINTS // 2 - 1)
    drawn = {0, len(values) - 1}
    for places in np.array_split(np.arange(len(values)), num_ranges):
        values_of_range = values[places]
        drawn.add(int(places[values_of_range.argmin()]))
        drawn.add(int(places[values_of_range.argmax()]))
    return sorted(drawn)
