# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Draws the questions about digits, and writes prompts and answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ['DIGIT_WORDS', 'QUESTIONS', 'WORDS', 'DigitsQuestion', 'draw_question']

DIGIT_WORDS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')
QUESTIONS = {
    'read': 'read the digits',
    'spell': 'spell in words',
    'count': 'count the images',
    'sum': 'add the digits',
}
"""The text of the user, by the kind of the question."""

_words_of_questions = ' '.join(QUESTIONS.values()).split()
WORDS = (*map(str, range(10)), *DIGIT_WORDS, *dict.fromkeys(_words_of_questions))
"""All words of questions and answers, each once."""

TEXT_ONLY_SHARE = 0.2
# A model this small would need hours to learn longer sums.
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
        question = QUESTIONS[self.kind]
        if self.has_images:
            return question
        return f'{question} {_spaced(digits)}'

    def answer(self, digits: Sequence[int]) -> str:
        """Returns the right answer. Numbers are written digit by digit: 12 is ``1 2``."""
        if self.kind == 'read':
            return _spaced(digits)
        if self.kind == 'spell':
            return ' '.join(DIGIT_WORDS[digit] for digit in digits)
        if self.kind == 'sum':
            return _spaced(str(sum(digits)))
        return _spaced(str(len(digits)))


def draw_question(rng: np.random.Generator, *, max_images: int) -> DigitsQuestion:
    """Draws a question: mostly about one or two digits, seldom about many, as in real data."""
    num_digits = _draw_num_digits(rng, max_images)
    has_images = rng.random() >= TEXT_ONLY_SHARE
    kinds = ['read', 'spell']
    if has_images:
        kinds.append('count')
    if num_digits <= MAX_SUMMANDS:
        kinds.append('sum')
    kind = str(rng.choice(kinds))
    return DigitsQuestion(kind, num_digits, has_images)


def _draw_num_digits(rng: np.random.Generator, largest: int) -> int:
    """Draws a number of digits from 1 to the largest: mostly small by a power law, and one time in ten large."""
    numbers = np.arange(1, largest + 1)
    weights = numbers**-2.5
    weights *= (1 - LONG_SHARE) / weights.sum()
    longest = weights[-3:]  # a view, so the next line changes the weights
    longest += LONG_SHARE / len(longest)
    return int(rng.choice(numbers, p=weights))


def _spaced(characters: Iterable[int | str]) -> str:
    """Returns the characters with spaces between them, because each is a token of its own."""
    return ' '.join(str(character) for character in characters)
