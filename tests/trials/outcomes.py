# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The outcome of a trial: the line that refuses an input, or an empty text if it works."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

WORKS = ''
LONGEST = 60
"""Seconds. An input that takes longer hangs, for example at a pipe that nobody writes to."""


class Trial(Protocol):
    """An input, and a part of the line that refuses it. Both texts are empty if the input works."""

    @property
    def expected(self) -> str: ...

    def run(self, folder: Path) -> str:
        """Tries the input in an empty folder. Returns the line."""
        ...


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises a TimeoutError if the block takes longer."""

    def fail(*_: Any) -> None:
        raise TimeoutError(f'still running after {seconds} s')

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refusal(run: Callable[[], Any], *errors: type[Exception]) -> str:
    """Returns the message of an error of these classes. Any other error is a bug, and raised."""
    try:
        with within(LONGEST):
            run()
    except errors as error:
        return str(error)
    return WORKS


def run_program(main: Callable[[list[str]], int], arguments: list[str]) -> str:
    """Returns the last line of stderr, or an empty text if the status is 0. Any other status must be 2."""
    errors = io.StringIO()
    output = io.StringIO()
    with within(LONGEST), contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        status = main(arguments)
    if status == 0:
        return WORKS
    assert status == 2, f'status {status}: {errors.getvalue()}{output.getvalue()}'
    return errors.getvalue().strip().splitlines()[-1]
