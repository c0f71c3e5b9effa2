# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How each kind of input is tried: what its line says, or nothing where it works."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_tokacc.programs import ConfigError, load_config
from composer_tokacc.programs.config_checks import check_config
from tests.support.launch import ROOT

LLAVA = str(ROOT / 'yamls' / 'llava_json.yaml')
WORKS = ''
LONGEST = 60
"""Seconds, after which an input hangs; also a file that nobody writes to is waited for no longer."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An input.

    Args:
        name: A sentence.
        run: Tries it: ``run(given, folder)``, the folder being its own. Returns the line, or :data:`WORKS`.
        given: The input, as ``run`` takes it.
        expected: What the line names; :data:`WORKS`: none.
    """

    name: str
    run: Callable[[Any, Path], str]
    given: Any
    expected: str


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


def check_overrides(overrides: str, folder: Path) -> str:
    """A config, before anything is loaded."""
    given = [f'dataset.path={folder}/data.json', overrides]
    return refusal(lambda: check_config(load_config(LLAVA, given), num_ranks=1), ConfigError)


def run_program(main: Callable[[list[str]], int], arguments: list[str]) -> str:
    """The last line that a program ends with, whose status must then be 2."""
    screen, written = io.StringIO(), io.StringIO()
    with within(LONGEST), contextlib.redirect_stderr(screen), contextlib.redirect_stdout(written):
        status = main(arguments)
    if not status:
        return WORKS
    assert status == 2, f'status {status}: {screen.getvalue()}{written.getvalue()}'
    return screen.getvalue().strip().splitlines()[-1]
