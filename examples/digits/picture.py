# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Draws a picture of a run: the loss, the padding with and without trimming, and held-out samples with answers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer_tokacc.programs.answers import Answer

__all__ = ['Curves', 'draw_result']

Curves = Mapping[str, tuple[Sequence[int], Sequence[float]]]

_INK, _OURS, _STOCK, _WRONG = '#333333', '#1f6f8b', '#c9a15a', '#b23a48'
_COLUMNS, _ROWS = 4, 2
_LOSSES = {'loss': ('training', _OURS, ''), 'eval_loss': ('held-out', _INK, 'o')}
_PADDING = {
    'stock_padding': ('without trimming', _STOCK, ''),
    'padding': ('microbatches of this run', _OURS, ''),
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
    shown = _choose(answers)
    num_rows = -(-len(shown) // _COLUMNS)
    figure = Figure(figsize=(12, 3.6 + 2.1 * num_rows), layout='constrained')
    FigureCanvasAgg(figure)
    heights = [3.6, 2.1 * num_rows] if shown else [3.6]
    top, *bottom = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flat
    left, right = top.subplots(1, 2)
    _draw_curves(left, curves, _LOSSES, title='Loss per token', yscale='log')
    _draw_curves(right, curves, _PADDING, title='Share of computed positions that is padding', ylim=(0, 1))
    if bottom:
        bottom[0].suptitle('Held-out samples, answered by generation', fontsize=10, color=_INK)
        cells = bottom[0].subplots(num_rows, _COLUMNS, squeeze=False).flat
        for cell, answer in zip(cells, [*shown, *[None] * (num_rows * _COLUMNS - len(shown))], strict=True):
            _draw_answer(cell, answer)
    figure.savefig(str(path), dpi=120)


def _choose(answers: Sequence[Answer]) -> list[Answer]:
    """Returns the answers that are drawn: those with images, from few to many, then text-only ones.

    No two answers with images have the same question and number of images. One place or more is left for text-only
    answers.
    """
    room = _COLUMNS * _ROWS
    answer_of_kind = {}
    for answer in answers:
        if answer.images:
            kind = (len(answer.images), answer.question)
            answer_of_kind.setdefault(kind, answer)
    with_images = [answer_of_kind[kind] for kind in sorted(answer_of_kind)]
    num_shown = min(room - 1, len(with_images))
    positions = np.linspace(0, len(with_images) - 1, num_shown).round().astype(int) if num_shown else []
    text_only = [answer for answer in answers if not answer.images]
    return [with_images[position] for position in positions] + text_only[: room - num_shown]


def _draw_curves(axes: Any, curves: Curves, lines: Mapping[str, tuple[str, str, str]], **settings: Any) -> None:
    """Draws the curves that ``lines`` names. Its values are the label, colour and marker of each curve."""
    for name, (label, color, marker) in lines.items():
        steps, values = curves.get(name, ((), ()))
        if len(steps):
            axes.plot(steps, values, label=label, color=color, marker=marker, linewidth=1)
    axes.set(xlabel='step', **settings)
    axes.spines[['top', 'right']].set_visible(False)
    axes.title.set_fontsize(10)
    if axes.has_data():
        axes.legend(frameon=False, fontsize=8)


def _draw_answer(axes: Any, answer: Answer | None) -> None:
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    if answer is None:
        return
    if answer.images:
        axes.imshow(_strip([np.asarray(image) / 255 for image in answer.images]), interpolation='nearest')
    else:
        axes.text(0.5, 0.5, 'text only', ha='center', va='center', color=_INK, fontsize=8, style='italic')
    axes.set_title(_fold(answer.question, 84), fontsize=8, color=_INK)
    caption = _fold(answer.generated or '(nothing)', 126)
    if not answer.is_right:
        caption += '\n' + _fold(f'expected: {answer.expected}', 126)
    axes.set_xlabel(caption, fontsize=8, color=_OURS if answer.is_right else _WRONG)


def _fold(text: str, num_characters: int) -> str:
    return '\n'.join(textwrap.wrap(textwrap.shorten(text, num_characters, placeholder=' ...'), 42))


def _strip(images: Sequence[np.ndarray]) -> np.ndarray:
    """Joins images into one, at most six in a row, with white lines between them."""
    height = max(image.shape[0] for image in images)
    width = max(image.shape[1] for image in images)
    num_columns = min(len(images), 6)
    num_rows = -(-len(images) // num_columns)
    canvas = np.ones((num_rows * (height + 1), num_columns * (width + 1), 3))
    for i, image in enumerate(images):
        top, left = i // num_columns * (height + 1), i % num_columns * (width + 1)
        canvas[top : top + image.shape[0], left : left + image.shape[1]] = image
    return canvas
