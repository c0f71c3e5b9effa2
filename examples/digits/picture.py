# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Draws a picture of a run: the loss, the padding with and without trimming, and held-out samples with answers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from composer_tokacc.programs.answers import Answer

__all__ = ['Curves', 'draw_result']

Curves = Mapping[str, tuple[Sequence[int], Sequence[float]]]
"""The steps and the values of each curve, by its name."""

_INK = '#333333'
_OURS = '#1f6f8b'
_STOCK = '#c9a15a'
_WRONG = '#b23a48'
_NUM_COLUMNS = 4
_MAX_ROWS = 2
_CURVES_HEIGHT = 3.6  # inches
_ROW_HEIGHT = 2.1  # of a row of answers


class _Line(NamedTuple):
    """How a curve is drawn."""

    label: str
    color: str
    marker: str = ''


_LOSSES = {
    'loss': _Line('training', _OURS),
    'eval_loss': _Line('held-out', _INK, marker='o'),
}
_PADDING = {
    'stock_padding': _Line('without trimming', _STOCK),
    'padding': _Line('microbatches of this run', _OURS),
}


def draw_result(path: str | Path, curves: Curves, answers: Sequence[Answer] = ()) -> None:
    """Draws the picture of a run.

    Args:
        path: The file to write, in a format of matplotlib.
        curves: Steps and values of ``loss``, ``eval_loss``, ``padding`` and ``stock_padding``. Any may be missing.
        answers: Answers to held-out samples. Only as many are drawn as fit.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        # Not pyplot, which would look for a display and keep global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a picture needs matplotlib: pip install "composer_tokacc[plots]"') from error
    chosen_answers = _choose(answers)
    num_rows = math.ceil(len(chosen_answers) / _NUM_COLUMNS)
    heights = [_CURVES_HEIGHT]
    if chosen_answers:
        heights.append(_ROW_HEIGHT * num_rows)
    figure = Figure(figsize=(12, sum(heights)), layout='constrained')
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flatten()
    left, right = parts[0].subplots(1, 2)
    _draw_curves(left, curves, _LOSSES, title='Loss per token', yscale='log')
    _draw_curves(right, curves, _PADDING, title='Share of computed positions that is padding', ylim=(0, 1))
    if chosen_answers:
        _draw_answers(parts[1], chosen_answers, num_rows)
    figure.savefig(str(path), dpi=120)


def _choose(answers: Sequence[Answer]) -> list[Answer]:
    """Returns the answers that are drawn: those with images, from few to many, then text-only ones.

    No two answers with images have the same question and number of images. One place or more is left for text-only
    answers.
    """
    num_places = _NUM_COLUMNS * _MAX_ROWS
    text_only = []
    answer_of_kind: dict[tuple[int, str], Answer] = {}
    for answer in answers:
        if answer.images:
            kind = (len(answer.images), answer.question)
            answer_of_kind.setdefault(kind, answer)
        else:
            text_only.append(answer)
    with_images = [answer_of_kind[kind] for kind in sorted(answer_of_kind)]
    if len(with_images) >= num_places:
        # Evenly spread from few to many images.
        positions = np.linspace(0, len(with_images) - 1, num_places - 1).round().astype(int)
        with_images = [with_images[position] for position in positions]
    return with_images + text_only[: num_places - len(with_images)]


def _draw_curves(axes: Any, curves: Curves, lines: Mapping[str, _Line], **settings: Any) -> None:
    """Draws the curves that ``lines`` names, if they have any values. ``settings`` are properties of the axes."""
    for name, line in lines.items():
        steps, values = curves.get(name, ((), ()))
        if len(steps):
            axes.plot(steps, values, label=line.label, color=line.color, marker=line.marker, linewidth=1)
    axes.set(xlabel='step', **settings)
    axes.spines[['top', 'right']].set_visible(False)
    axes.title.set_fontsize(10)
    if axes.has_data():
        axes.legend(frameon=False, fontsize=8)


def _draw_answers(figure: Any, answers: Sequence[Answer], num_rows: int) -> None:
    """Draws a cell for each answer. Cells that are left over stay empty."""
    figure.suptitle('Held-out samples, answered by generation', fontsize=10, color=_INK)
    cells = figure.subplots(num_rows, _NUM_COLUMNS, squeeze=False).flatten()
    for cell in cells:
        cell.set(xticks=[], yticks=[])
        cell.spines[:].set_visible(False)
    for cell, answer in zip(cells, answers, strict=False):
        _draw_answer(cell, answer)


def _draw_answer(axes: Any, answer: Answer) -> None:
    """Draws the images of a sample, its question above, and the answer below: in red if it is wrong."""
    if answer.images:
        axes.imshow(_joined_images(answer.images), interpolation='nearest')
    else:
        axes.text(0.5, 0.5, 'text only', ha='center', va='center', color=_INK, fontsize=8, style='italic')
    axes.set_title(_shortened(answer.question, 84), fontsize=8, color=_INK)
    caption = _shortened(answer.generated or '(nothing)', 126)
    if not answer.is_right:
        caption += '\n' + _shortened(f'expected: {answer.expected}', 126)
    axes.set_xlabel(caption, fontsize=8, color=_OURS if answer.is_right else _WRONG)


def _shortened(text: str, num_characters: int) -> str:
    """Returns the beginning of a text, in lines of at most 42 characters."""
    beginning = textwrap.shorten(text, num_characters, placeholder=' ...')
    return '\n'.join(textwrap.wrap(beginning, 42))


def _joined_images(images: Sequence[Any]) -> np.ndarray:
    """Returns one image of all images, at most six in a row, with white lines between them."""
    arrays = [np.asarray(image) / 255 for image in images]
    cell_height = max(array.shape[0] for array in arrays) + 1
    cell_width = max(array.shape[1] for array in arrays) + 1
    num_columns = min(len(arrays), 6)
    num_rows = math.ceil(len(arrays) / num_columns)
    canvas = np.ones((num_rows * cell_height, num_columns * cell_width, 3))
    for number, array in enumerate(arrays):
        row, column = divmod(number, num_columns)
        top = row * cell_height
        left = column * cell_width
        height, width, _ = array.shape
        canvas[top : top + height, left : left + width] = array
    return canvas
