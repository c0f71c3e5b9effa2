# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The settings of a program's process."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from composer_tokacc.programs.process import repeat_lost_exits


class _SignalledInDestructor:
    """Gets a signal while its destructor runs."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __del__(self) -> None:
        signal.raise_signal(self._number)


def destroy_and_wait(number: int) -> None:
    """Gets the signal in a destructor. If it is repeated, the wait ends early."""
    signalled = _SignalledInDestructor(number)
    del signalled
    time.sleep(10)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signal_in_destructor_ends_process(monkeypatch, number):
    """Python ignores the SystemExit of a handler that runs in a destructor."""

    def exit_as_composer(number, frame):
        sys.exit(128 + number)

    monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)  # restores it afterwards
    earlier = signal.signal(number, exit_as_composer)
    try:
        repeat_lost_exits()
        with pytest.raises(SystemExit) as ended:
            destroy_and_wait(number)
        assert ended.value.code == 128 + number
    finally:
        signal.signal(number, earlier)


def test_other_errors_of_destructors_are_printed(monkeypatch, capsys):
    class Failing:
        def __del__(self):
            raise KeyError('a bug of the user')

    monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)
    repeat_lost_exits()
    failing = Failing()
    del failing
    assert 'a bug of the user' in capsys.readouterr().err
