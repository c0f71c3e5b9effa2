# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Settings of a program's process: garbage collection, signals, limits, warnings, stdout. No other module changes them.

Also parses the command line and prints progress lines. Imports torch and other heavy packages inside the functions
that need them, so that ``--help`` appears at once.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

DIST_TIMEOUT = 300.0
"""Seconds that a rank waits for the others, if ``trainer.dist_timeout`` is not given. This is Composer's default."""
SECONDS_BEFORE_REPEAT = 0.1
"""When a signal is sent once more. Destructors and callbacks of weak references have ended by then."""
_IMPORTED_AT = time.monotonic()
"""When the program started: it imports this module first."""
HARMLESS_WARNINGS = (
    'Detected comparison between a string and Precision',  # Composer compares its own enum
    'No device id is provided via `init_process_group`',  # torch's barrier() chooses a device; each rank has only one
    'using the device under current context',  # the same warning in newer releases
    '`is_gradient_checkpointing` is deprecated',  # peft with Transformers 5
)
"""Words in warnings that Composer, torch and other hosts give in a healthy run. The user can do nothing about them."""


def prepare(description: str | None, *, announces: bool = False) -> None:
    """Prepares the process of a program before its imports, which take ten seconds and more.

    Answers ``--help`` and usage errors at once. Switches garbage collection off until :func:`keep_what_is_loaded`,
    because it would take a fifth of the time of the imports and find nothing. Makes stdout escape characters that the
    terminal lacks. Silences the hosts' harmless warnings. Repeats signals that Python loses.

    Args:
        description: The program's docstring.
        announces: Whether to say that the imports begin.
    """
    command_line(description).parse_known_args()  # exits for --help and for a missing file name
    gc.disable()
    if sys.stdout is not None:  # None if the user closed it
        # An answer may have characters that the terminal lacks. They are escaped, as stderr does, and raise no error.
        sys.stdout.reconfigure(errors='backslashreplace')  # type: ignore[union-attr]
    if announces:
        say('loading torch, Composer and Transformers ...')
    silence_harmless_warnings()
    repeat_lost_exits()


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose ``parse_known_args()`` returns the YAML file as ``config``, and the overrides as the rest.

    Args:
        description: The program's docstring. Its line with the command is the usage. None (``python -OO``): argparse
            writes the usage.
    """
    lines = (description or '').splitlines()
    usage = next((line.strip() for line in lines if '-m composer_tokacc.' in line), None)
    parser = argparse.ArgumentParser(
        usage=usage, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', metavar='FILE.yaml')
    return parser


def say(text: str) -> None:
    """Prints what the program does next, and the seconds since its start, on the first rank."""
    if os.environ.get('RANK', '0') == '0':
        print(f'[{time.monotonic() - _IMPORTED_AT:4.0f} s] {text}', file=sys.stderr, flush=True)


@contextmanager
def while_somebody_reads() -> Iterator[None]:
    """Ends the block quietly when the reader of a pipe closes it (``| head``)."""
    try:
        yield
    except BrokenPipeError:
        # Python flushes stdout when it exits, and would report the closed pipe once more.
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())


def keep_what_is_loaded() -> None:
    """Switches garbage collection on again if prepare() has switched it off. It then skips all present objects.

    They belong to modules, which are never garbage. At exit nothing is collected at all, because Python would look
    through all objects of Composer and Transformers several times. This takes 8 seconds, with nothing on the screen.
    """
    if not gc.isenabled():
        gc.freeze()  # collections skip all present objects from now on
        gc.enable()
    atexit.register(gc.freeze)


def repeat_lost_exits() -> None:
    """Sends this process a signal once more if Python has lost the exit that Composer's handler raises at the signal.

    At SIGTERM and SIGINT Composer's handler calls ``sys.exit``. If the signal arrives while a destructor or the
    callback of a weak reference runs, Python only prints this SystemExit, and the process would go on.
    """

    def handle(unraisable: sys.UnraisableHookArgs) -> None:
        exit_status = unraisable.exc_value.code if isinstance(unraisable.exc_value, SystemExit) else None
        if exit_status not in (128 + signal.SIGTERM, 128 + signal.SIGINT):
            sys.__unraisablehook__(unraisable)
            return
        # Later, because an exit that is raised in this function would be lost, too.
        repeat = threading.Timer(SECONDS_BEFORE_REPEAT, os.kill, (os.getpid(), exit_status - 128))
        repeat.daemon = True  # a process that ends by itself does not wait for it
        repeat.start()

    sys.unraisablehook = handle


def ignore_dead_children() -> None:
    """Removes torch's handler of SIGCHLD, so that the error of a killed loader process can be reported.

    The handler raises an error whenever a loader process dies, at any line of this process: also while the first error
    is reported.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def allow_open_files() -> None:
    """Raises the limit of open files as far as the system allows. Each tensor from a loader process is an open file."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def share_cores(num_processes: int) -> None:
    """Limits torch's threads to this process's share of the cores, unless the user has set ``OMP_NUM_THREADS``.

    By default each rank would start a thread on every core of the node.

    Args:
        num_processes: Ranks of this node.
    """
    import torch

    if 'OMP_NUM_THREADS' not in os.environ:
        num_cores = os.cpu_count() or 1
        torch.set_num_threads(max(num_cores // num_processes, 1))


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silences all warnings while the block runs."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


def silence_harmless_warnings() -> None:
    """Silences the warnings of hosts that are known to be harmless, so that only others show on the screen."""
    for words in HARMLESS_WARNINGS:
        warnings.filterwarnings('ignore', message=f'.*{words}')
