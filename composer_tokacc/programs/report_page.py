# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``report.html``: the summary of a run, its curves and answers, in one file without anything from the network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from jinja2 import Environment
from PIL import Image

from composer_tokacc.cache import whole_file
from composer_tokacc.programs.answers import Answer
from composer_tokacc.programs.metrics_file import Series, select

MOST_POINTS = 400
"""Most points of a curve, see :func:`_drawn_indices`."""

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
"""Title of each chart, and the metrics in it. `*` stands for any name."""


# A chart is 640 x 200 pixels. Its curves keep 46 pixels to the left and to the right, 10 above and 20 below. At most 12
# images of an answered sample are shown.
TEMPLATE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
body { font: 15px/1.4 sans-serif; max-width: 1340px; margin: 2em auto; color: #222 }
th { text-align: left; padding-right: 2em; font-weight: normal; color: #555 }
figure { display: inline-block; margin: .6em 0 } figcaption { font-weight: bold } img { max-width: 100% }
.answer { width: 620px; margin-right: 1em; vertical-align: top }
.answer img { min-width: 48px; image-rendering: pixelated }
</style>
<h1>{{ title }}</h1>
<table>
{% for description, figure in summary %}<tr><th>{{ description }}</th><td>{{ figure }}</td></tr>
{% endfor %}</table>
{% set colors = ['#2a78b5', '#c0392b', '#1f9d6b', '#8e5ea2', '#d98c1f', '#5f6b7a'] %}
{% for chart in charts %}
<figure><figcaption>{{ chart.title }}</figcaption>
<svg width="640" height="200" font-size="11" role="img">
<text x="2" y="14">{{ '%.3g' | format(chart.high) }}</text>
<text x="2" y="180">{{ '%.3g' | format(chart.low) }}</text>
<text x="46" y="196">step {{ chart.first_step }}</text>
<text x="594" y="196" text-anchor="end">{{ chart.last_step }}</text>
<path d="M46 8V182H594" fill="none" stroke="#bbb"/>
{% for curve in chart.curves %}
{% set color = colors[loop.index0 % 6] %}
<polyline fill="none" stroke="{{ color }}" stroke-width="1.6" points="{% for across, up in curve.points %}
{{- '%.1f,%.1f ' | format(46 + 548 * across, 180 - 170 * up) }}{% endfor %}"/>
{% if curve.points | length == 1 %}{# a line of one point cannot be seen #}
{% set across, up = curve.points[0] %}
<circle fill="{{ color }}" r="3" cx="{{ 46 + 548 * across }}" cy="{{ 180 - 170 * up }}"/>
{% endif %}
{% endfor %}
</svg><br>
{% for curve in chart.curves %}
<span style="color:{{ colors[loop.index0 % 6] }}">{{ curve.name }}: {{ '%.4g' | format(curve.last) }}</span> &nbsp;
{% endfor %}
</figure>
{% endfor %}
{% if picture %}<figure><img alt="result" src="data:image/png;base64,{{ picture }}"></figure>{% endif %}
{% if answers %}<h2>Answers to samples of the eval set</h2>{% endif %}
{% for answer in answers %}
<figure class="answer">
<figcaption>{{ answer.sample_id }} {% if answer.is_right %}&#10003;{% else %}&#10007;{% endif %}</figcaption>
{% for image in answer.images[:12] %}
<img alt="image of {{ answer.sample_id }}" src="data:image/png;base64,{{ image | as_png }}">
{% endfor %}
<table>
<tr><th>question</th><td>{{ answer.question }}</td></tr>
<tr><th>expected</th><td>{{ answer.expected }}</td></tr>
<tr><th>answer</th><td>{{ answer.generated }}</td></tr>
</table>
</figure>
{% endfor %}
</html>
"""


@dataclass(kw_only=True)
class _Curve:
    """The curve of a metric in a chart."""

    name: str
    points: list[tuple[float, float]]
    """How far right and how far up each point is, from 0 to 1."""
    last: float
    """The last value that was logged. NaN if it was not finite."""


@dataclass(kw_only=True)
class _Chart:
    """A chart, as the template draws it."""

    title: str
    curves: list[_Curve]
    first_step: int
    last_step: int
    """The steps at the left and the right end."""
    low: float
    high: float
    """The values at the lower and the upper end."""


def write_page(
    path: Path,
    title: str,
    summary: Sequence[tuple[str, str]],
    metrics: Mapping[str, Series],
    answers: Sequence[Answer] = (),
) -> None:
    """Writes the page: the summary, a chart for each of ``PANELS`` with a finite value, ``result.png`` and the answers.

    Args:
        path: The file of the page. The user's function, which ``report.name`` names, may have put a ``result.png`` next
            to it.
        title: The name of the run.
        summary: The lines of the summary, as pairs of a description and a figure.
        metrics: Everything that was logged, by name.
        answers: The model's answers in the last evaluation.
    """
    picture = ''
    picture_path = path.with_name('result.png')
    if picture_path.is_file():
        picture = _as_text(picture_path.read_bytes())
    environment = Environment(autoescape=True)
    environment.filters['as_png'] = _as_png
    template = environment.from_string(TEMPLATE)
    page = template.render(title=title, summary=summary, charts=_charts(metrics), picture=picture, answers=answers)
    with whole_file(path) as new_file:
        new_file.write_text(page, encoding='utf-8')


def _as_text(data: bytes) -> str:
    """Returns bytes in base64, so that a page can hold them."""
    return base64.b64encode(data).decode()


def _as_png(image: Image.Image) -> str:
    """Returns a PNG file of an image in base64."""
    png = BytesIO()
    image.save(png, 'PNG')
    return _as_text(png.getvalue())


def _charts(metrics: Mapping[str, Series]) -> list[_Chart]:
    """Returns a chart for each of ``PANELS`` that has a finite value."""
    charts = []
    for title, patterns in PANELS:
        series_by_name = {}
        for pattern in patterns:
            for name, series in select(metrics, pattern).items():
                if series.finite().values:
                    series_by_name[name] = series
        if series_by_name:
            charts.append(_chart(title, series_by_name))
    return charts


def _chart(title: str, series_by_name: Mapping[str, Series]) -> _Chart:
    """Returns the chart of some metrics, each of which has a finite value.

    Values that were not finite are not drawn, but the axis includes their steps.
    """
    all_steps = np.concatenate([series.steps for series in series_by_name.values()])
    all_values = np.concatenate([series.finite().values for series in series_by_name.values()])
    first_step = all_steps.min()
    last_step = all_steps.max()
    low = all_values.min()
    high = all_values.max()
    # A single step or a constant curve must not divide by zero.
    num_steps = max(last_step - first_step, 1)
    height = (high - low) or 1
    curves = []
    for name, series in series_by_name.items():
        steps, values = series.finite()
        points = []
        for index in _drawn_indices(values):
            across = (steps[index] - first_step) / num_steps
            up = (values[index] - low) / height
            points.append((across, up))
        curves.append(_Curve(name=name, points=points, last=series.values[-1]))
    return _Chart(title=title, curves=curves, first_step=first_step, last_step=last_step, low=low, high=high)


def _drawn_indices(curve: Sequence[float]) -> list[int]:
    """Returns the indices of the values of a curve that are drawn, at most ``MOST_POINTS``.

    The values are divided into ranges of neighbours. The lowest and the highest value of each range are drawn, so no
    spike is lost. The first and the last value are drawn, too.
    """
    values = np.asarray(curve)
    num_ranges = MOST_POINTS // 2 - 1  # two points for each range, and two for the first and the last value
    num_ranges = min(num_ranges, len(values))  # no range is empty
    drawn = {0, len(values) - 1}
    for indices in np.array_split(np.arange(len(values)), num_ranges):
        values_of_range = values[indices]
        drawn.add(int(indices[values_of_range.argmin()]))
        drawn.add(int(indices[values_of_range.argmax()]))
    return sorted(drawn)
