# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a program does to its process as a whole.

No other module touches garbage collection, signals, limits, warnings or the end of the process. Heavy imports are made
when they are needed, so that ``--help`` is there at once.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

DIST_TIMEOUT = 300.0
"""Composer's own default, in seconds."""


def prepare(description: str | None, *, says_so: bool = False) -> None:
    """Answers ``--help``, and switches off garbage collection until all is loaded: a fifth of that time, for nothing.

    Called by a program before its imports, which take ten seconds and more.
    """
    if {'-h', '--help'} & set(sys.argv[1:]):
        command_line(description).parse_args(['--help'])
    gc.disable()
    if sys.stdout is not None:  # closed
        sys.stdout.reconfigure(errors='backslashreplace')  # type: ignore[union-attr]  # as that of errors is
    if says_so:
        say('loading torch, Composer and Transformers ...')
    from composer_tokacc.compat import put_back_torch_names

    put_back_torch_names()


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the YAML file as ``config`` and the usage of the description; overrides are left over."""
    usage = next(line.strip() for line in (description or '').splitlines() if '-m composer_tokacc.' in line)
    parser = argparse.ArgumentParser(
        usage=usage, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', metavar='FILE.yaml')
    return parser


def say(text: str) -> None:
    """Prints what is being done, behind the seconds since the start, on the first rank: some of it takes long."""
    import psutil

    if os.environ.get('RANK', '0') == '0':
        seconds = time.time() - psutil.Process().create_time()
        print(f'[{seconds:4.0f} s] {text}', file=sys.stderr, flush=True)


@contextmanager
def while_somebody_reads() -> Iterator[None]:
    """Ends what is printed without a word where nobody reads on, as in ``... | head``."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's end would tell of it


def keep_what_is_loaded() -> None:
    """Switches garbage collection on again, without what :func:`prepare` has loaded since: that is never garbage.

    Python's end looks through all that Composer and Transformers hold, again and again: 8 s of nothing on the screen.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    atexit.register(gc.freeze)


def let_children_die() -> None:
    """Takes torch's handler away, which tells again and again, wherever it is, that a loader process was killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def allow_open_files() -> None:
    """Raises this process's limit of open files to what it may be: each tensor from a loader process needs one."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def share_cores(num_processes: int) -> None:
    """Gives torch its share of the cores: by default each rank would start a thread on every core of its node."""
    import torch

    if 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(max((os.cpu_count() or 1) // num_processes, 1))


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silences the hosts' warnings where they would come over and over."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


def end_process(message: str, status: int, *, delay: float = 0.0) -> None:
    """Ends this process from any thread, as its main thread may wait in a collective for ever."""
    if message:
        sys.stdout.flush()
        print(f'\n{message}', file=sys.stderr, flush=True)
    time.sleep(delay)
    os._exit(status)
