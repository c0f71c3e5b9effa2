# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a program does to its process as a whole, and its way from a command line to an exit status.

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
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_tokacc.programs.schema import TrainConfig

DIST_TIMEOUT = 300.0
"""Composer's own default, in seconds."""


def prepare(description: str | None, *, says_so: bool = False) -> None:
    """Answers ``--help``, and switches off garbage collection until all is loaded: a fifth of that time, for nothing.

    Called by a program before its imports, which take ten seconds and more.
    """
    if {'-h', '--help'} & set(sys.argv[1:]):
        command_line(description).parse_args(['--help'])
    gc.disable()
    if says_so:
        say('loading torch, Composer and Transformers ...')


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the YAML file as ``config``; what it does not know are overrides.

    The usage is the line of the description that calls the program.
    """
    usage = next(line.strip() for line in (description or '').splitlines() if '-m composer_tokacc.' in line)
    parser = argparse.ArgumentParser(
        usage=usage, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', metavar='FILE.yaml')
    return parser


def say(text: str) -> None:
    """Prints what is being done, behind the seconds since the start, on the first rank: some of it takes long."""
    import psutil

    if int(os.environ.get('RANK', '0')) == 0:
        seconds = time.time() - psutil.Process().create_time()
        print(f'[{seconds:4.0f} s] {text}', file=sys.stderr, flush=True)


def run_program(
    program: Callable[[TrainConfig], int | None],
    path: str,
    overrides: Sequence[str],
    *,
    num_ranks: int | None = None,
    trains: bool = False,
) -> int:
    """Runs a program on a YAML file and returns its exit status, 2 with one line for a mistake of the user's.

    Args:
        program: Takes the config and returns the exit status, None for 0.
        path: The YAML file.
        overrides: ``key=value`` each.
        num_ranks: Ranks that the run is planned for; None: those of this launch.
        trains: Whether it trains here and now, so that this machine must be able to.
    """
    from composer_tokacc.programs.config_checks import check_config, check_machine
    from composer_tokacc.programs.errors import ConfigError, in_words_of, refuse
    from composer_tokacc.programs.schema import load_config

    if not gc.isenabled():  # by `prepare`: what has been loaded is never garbage
        gc.freeze()
        gc.enable()
    # Python's end looks through all that Composer and Transformers hold, again and again: 8 s of nothing on the screen.
    atexit.register(gc.freeze)
    try:
        config = load_config(path, overrides)
        check_config(config, num_ranks=num_ranks)
        if trains:
            check_machine(config)
    except ConfigError as error:
        return refuse(error, on_all_ranks=True)

    def checked(config: TrainConfig) -> int | None:
        with in_words_of(config):
            return program(config)

    return _run_watched(checked, config)


def _run_watched(program: Callable[[TrainConfig], int | None], config: TrainConfig) -> int:
    """Runs a program so that what ends one rank is said once, by the rank that met it first."""
    from composer_tokacc.data import BadSampleError
    from composer_tokacc.programs.errors import ConfigError, one_line, refuse
    from composer_tokacc.programs.machine_faults import fault_of_machine
    from composer_tokacc.programs.ranks import RankWatch

    watch = RankWatch(config.trainer.get('dist_timeout', DIST_TIMEOUT))
    try:
        return program(config) or 0
    except (ConfigError, BadSampleError) as error:
        return 2 if watch.tell(one_line(error), 2) else refuse(error)
    except Exception as error:
        # Of a loader process that was killed torch's handler tells again and again, wherever this one is.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if fault := fault_of_machine(error):
            return 2 if watch.tell(one_line(fault), 2) else refuse(ConfigError(fault))
        if watch.tell(traceback.format_exc(), 1):
            return 1
        raise
    finally:
        watch.stop()


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
