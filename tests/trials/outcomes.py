# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the line says of an input that was tried, or nothing where it works."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.launch import ROOT

LLAVA = str(ROOT / 'yamls' / 'llava_json.yaml')
WORKS = ''
LONGEST = 60
"""Seconds, after which an input hangs; also a file that nobody writes to is waited for no longer."""


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Ends what takes longer by a TimeoutError."""

    def end(*_: Any) -> None:
        raise TimeoutError(f'still running after {seconds} s')

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refusal(run: Callable[[], Any], *errors: type[Exception]) -> str:
    """The line of an error of the kinds that users see; any other is none, and raised."""
    try:
        with within(LONGEST):
            run()
    except errors as error:
        return str(error)
    return WORKS


def run_program(main: Callable[[list[str]], int], arguments: list[str]) -> str:
    """The last line that a program ends with, whose status must then be 2."""
    screen, written = io.StringIO(), io.StringIO()
    with within(LONGEST), contextlib.redirect_stderr(screen), contextlib.redirect_stdout(written):
        status = main(arguments)
    if not status:
        return WORKS
    assert status == 2, f'status {status}: {screen.getvalue()}{written.getvalue()}'
    return screen.getvalue().strip().splitlines()[-1]
