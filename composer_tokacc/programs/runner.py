# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Takes a program from a YAML file to its exit status, and one message to the screen.

Composer's launcher shows the first rank of a node while it runs, and the others only after the end. When another rank
fails, the first one waits for it in a collective, or meets a broken connection. So the rank that fails leaves its
message in the store of torch's rendezvous, where a thread of the first rank reads it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed
from composer.utils import dist, get_device
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented there

from composer_tokacc.data import BadSampleError
from composer_tokacc.programs.config_checks import check_config, check_folders
from composer_tokacc.programs.errors import ConfigError, building, is_of_host, one_line, raised_here, refuse
from composer_tokacc.programs.machine_faults import fault_of_machine, has_lost_rank
from composer_tokacc.programs.process import DIST_TIMEOUT, end_process, keep_what_is_loaded, let_children_die
from composer_tokacc.programs.schema import TrainConfig, load_config

log = logging.getLogger(__name__)

MESSAGE_KEY = 'composer_tokacc/message'
"""Key in the store for status and message of a rank that failed."""
SECONDS_TO_PRINT = 10.0
"""Seconds that a rank gives the first one to print its message. The launcher ends it as soon as the first has ended."""
INTERVAL = 1.0
"""Seconds between two looks at the store."""


def run_program(
    program: Callable[[TrainConfig], int | None],
    path: str,
    overrides: Sequence[str],
    *,
    num_ranks: int | None = None,
    trains: bool = False,
) -> int:
    """Runs a program on a YAML file and returns its exit status, 2 with one line for a mistake of the user.

    Args:
        program: Takes the config and returns the status, None for 0.
        path: The YAML file.
        overrides: ``key=value`` each.
        num_ranks: Ranks that the run is planned for. Default: all ranks of this launch.
        trains: Whether the program trains on this machine and writes the folders of the config.
    """
    keep_what_is_loaded()
    try:
        config = load_config(path, overrides)
        check_config(config, num_ranks=num_ranks)
        level = config.trainer.get('python_log_level')
        if level:
            logging.getLogger('composer_tokacc').setLevel(level.upper())
        if trains:
            with building('trainer.device'):
                get_device(config.trainer.get('device'))
            check_folders(config)
    except ConfigError as error:
        return refuse(error, on_all_ranks=True)
    try:
        with _hearing_other_ranks(config.trainer.get('dist_timeout', DIST_TIMEOUT)):
            return program(config) or 0
    except Exception as error:
        let_children_die()
        log.debug('The run failed here:', exc_info=error)
        # First of all, because such an error may come from an OSError, which is a fault of the machine by itself.
        if isinstance(error, ConfigError | BadSampleError):
            return _end(one_line(error), 2)
        if has_lost_rank(error):
            return _end_after_another_rank(fault_of_machine(error))
        fault = fault_of_machine(error)
        if fault:
            return _end(one_line(fault), 2)
        # With plain errors the plugin says why it cannot train.
        if raised_here(error):
            return _end(one_line(error), 2)
        if hasattr(error, 'config_path') and is_of_host(error):
            return _end(one_line(f'`{error.config_path}`: {type(error).__name__}: {error}'), 2)  # type: ignore[attr-defined]
        if not _is_behind_another_rank():
            raise
        return _end(traceback.format_exc(), 1)


def _is_behind_another_rank() -> bool:
    """Returns whether another rank of the node writes to the screen of the user."""
    return torch.distributed.is_initialized() and dist.get_local_rank() > 0


def _end(message: str, status: int) -> int:
    """Prints why this rank ends, on the screen of the first rank of the node."""
    if _is_behind_another_rank():
        try:
            _connect(SECONDS_TO_PRINT).set(MESSAGE_KEY, f'{status} {message}')
            time.sleep(SECONDS_TO_PRINT)
        except RuntimeError:  # rank 0 has ended, and its store with it
            pass
    print(message, file=sys.stderr, flush=True)
    return status


def _end_after_another_rank(fault: str) -> int:
    """Ends this rank because another one is gone. The first rank of a node prints the message of that rank."""
    if _is_behind_another_rank():
        time.sleep(SECONDS_TO_PRINT)
        return 2
    status, message = 2, one_line(fault)
    with suppress(RuntimeError):
        status, message = _message_in(_connect(SECONDS_TO_PRINT)) or (status, message)
    print(message, file=sys.stderr, flush=True)
    return status


@contextmanager
def _hearing_other_ranks(timeout: float) -> Iterator[None]:
    """Ends this process, if it is the first of its node, with the message of another rank as soon as that fails."""
    is_over = threading.Event()
    thread = threading.Thread(target=_listen, args=(is_over, timeout), daemon=True)
    if dist.get_world_size() > 1 and dist.get_local_rank() == 0 and 'MASTER_ADDR' in os.environ:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread.is_alive():
            thread.join(timeout=2 * INTERVAL)


def _listen(is_over: threading.Event, timeout: float) -> None:
    try:
        store = _connect(timeout)  # its own connection: a store answers one question at a time
        while not is_over.wait(INTERVAL):
            end = _message_in(store)
            if end is not None:
                status, message = end
                # The main thread may wait in a collective for ever.
                end_process(message, status)
    except RuntimeError:  # rank 0 has ended, which the launcher sees too
        return


def _message_in(store: TCPStore) -> tuple[int, str] | None:
    """Returns status and message of a rank that failed."""
    if not store.check([MESSAGE_KEY]):  # pyright: ignore[reportAttributeAccessIssue]  # torch's stubs lack it
        return None
    status, _, message = store.get(MESSAGE_KEY).decode().partition(' ')
    return int(status), message


def _connect(timeout: float) -> TCPStore:
    host, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
