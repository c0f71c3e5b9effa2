# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Draws the questions about digits, and writes prompts and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ['DIGIT_WORDS', 'QUESTIONS', 'WORDS', 'DigitsQuestion', 'draw_question']

DIGIT_WORDS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')

QUESTIONS = {'read': 'read the digits', 'spell': 'spell in words', 'count': 'count the images', 'sum': 'add the digits'}

WORDS = (*(str(digit) for digit in range(10)), *DIGIT_WORDS, *dict.fromkeys(' '.join(QUESTIONS.values()).split()))

TEXT_ONLY_SHARE = 0.2
# So small a model would need hours to learn longer sums.
MAX_SUMMANDS = 2
# Share of samples that get one of the three largest numbers of digits, so that nearly every batch has a long sample.
LONG_SHARE = 0.1


@dataclass(frozen=True)
class DigitsQuestion:
    """A question about digits, which are shown as scans or written in the question.

    Args:
        kind: One of :data:`QUESTIONS`.
        num_digits: Number of digits.
        has_images: Whether the digits are shown as scans.
    """

    kind: str
    num_digits: int
    has_images: bool

    def prompt(self, digits: Sequence[int]) -> str:
        """Returns the text of the user."""
        return QUESTIONS[self.kind] if self.has_images else f'{QUESTIONS[self.kind]} {_spaced(digits)}'

    def answer(self, digits: Sequence[int]) -> str:
        """Returns the right answer."""
        if self.kind == 'read':
            return _spaced(digits)
        if self.kind == 'spell':
            return ' '.join(DIGIT_WORDS[digit] for digit in digits)
        return _spaced(str(sum(digits) if self.kind == 'sum' else len(digits)))


def draw_question(rng: np.random.Generator, *, max_images: int) -> DigitsQuestion:
    """Draws a question: mostly about one or two digits, seldom about many. A batch is padded to its longest sample."""
    sizes = np.arange(1, max_images + 1)
    weights = sizes**-2.5
    weights *= (1 - LONG_SHARE) / weights.sum()
    weights[-3:] += LONG_SHARE / len(weights[-3:])
    num_digits = int(rng.choice(sizes, p=weights))
    has_images = rng.random() >= TEXT_ONLY_SHARE
    kinds = ['read', 'spell', 'count'] if has_images else ['read', 'spell']
    if num_digits <= MAX_SUMMANDS:
        kinds.append('sum')
    return DigitsQuestion(str(rng.choice(kinds)), num_digits, has_images)


def _spaced(characters: Sequence[int] | str) -> str:
    return ' '.join(str(character) for character in characters)
