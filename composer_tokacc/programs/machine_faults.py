# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Faults of the machine: a full disk, no memory, a port in use, a rank that is gone. One row of a table for each."""

from __future__ import annotations

import errno
import os
import resource
import traceback
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class MachineFault:
    """One kind of fault."""

    matches: Callable[[BaseException, str], bool]
    """Whether an error, given with its text, is of this kind."""
    message: str
    """With ``{text}`` for the words of the error, ``{limit}`` for the limit of open files, ``{port}`` for the port."""


def _has_errno(*numbers: int) -> Callable[[BaseException, str], bool]:
    """Matches an OSError by its number. Torch writes the number into its own text."""

    def matches(error: BaseException, text: str) -> bool:
        if isinstance(error, OSError) and error.errno in numbers:
            return True
        return any(f'[Errno {number}]' in text or f'errno: {number} ' in text for number in numbers)

    return matches


def _has_words(*phrases: str) -> Callable[[BaseException, str], bool]:
    return lambda error, text: any(phrase in text for phrase in phrases)


def _is_a(*classes: type[BaseException]) -> Callable[[BaseException, str], bool]:
    return lambda error, text: isinstance(error, classes)


def _passed_through(module: str, *classes: type[BaseException]) -> Callable[[BaseException, str], bool]:
    """Matches an error of one of the classes that was raised below a module of torch."""

    def matches(error: BaseException, text: str) -> bool:
        if not isinstance(error, classes):
            return False
        frames = traceback.walk_tb(error.__traceback__)
        return any(frame.f_globals.get('__name__') == module for frame, _ in frames)

    return matches


def _is_out_of_memory(error: BaseException, text: str) -> bool:
    # By name: this table must not load torch.
    return type(error).__name__ == 'OutOfMemoryError' or 'CUDA error: out of memory' in text


LONGEST_TEXT = 300
"""Characters of an error that are shown. Its end says most."""
DISK = 'the disk must have room for checkpoints and results, got: {text}'
FILES = (
    'the limit of open files (`ulimit -Hn`) must leave room for ranks and loader processes, got: {limit}. Raise it, '
    'for example to 65536, or lower `loader.num_workers`'
)
PORT = (
    'the port where the ranks meet must be free, got: {port}, used by another program. Start again, or give the '
    'launcher a free port: `composer --master_port PORT`'
)
LOADER = (
    'the processes that read samples ended during the run, got: {text}. Usually the machine has run out of memory: see '
    'its log, and lower `loader.num_workers` or `loader.prefetch_factor`'
)
RANK = (
    'another rank ended, or did not answer within `trainer.dist_timeout`, got: {text}. Read what that rank wrote: the '
    'launcher prints it below, or writes it to the file of `composer --stdout`'
)
LOST_RANK = (
    'Connection closed by peer',
    'Connection reset by peer',
    'Timed out waiting',
    'Application timeout caused pair closure',
)
"""Words of gloo."""
FAULTS = (
    MachineFault(_has_errno(errno.ENOSPC, errno.EDQUOT), DISK),
    # Torch's own error for a full disk says no more than this.
    MachineFault(_has_words('unexpected pos'), DISK),
    MachineFault(_has_errno(errno.EMFILE, errno.ENFILE), FILES),
    MachineFault(_has_words('Too many open files'), FILES),
    MachineFault(
        _is_a(IsADirectoryError, NotADirectoryError, PermissionError),
        'files of the run must be in a place that can be written and read, got: {text}',
    ),
    MachineFault(
        _is_out_of_memory,
        'the device must have memory for a microbatch, got: {text}. Lower `microbatching.slot_tokens` or '
        '`device_train_microbatch_size`, or set the latter to suggest',
    ),
    MachineFault(_has_errno(errno.EADDRINUSE), PORT),
    MachineFault(_has_words('EADDRINUSE'), PORT),
    MachineFault(
        _passed_through('torch.distributed.rendezvous', Exception),
        'the ranks must be able to meet at `MASTER_ADDR` and `MASTER_PORT`, got: {text}. Use `composer -n RANKS`',
    ),
    MachineFault(_has_words('DataLoader worker (pid'), LOADER),
    MachineFault(_passed_through('torch.utils.data.dataloader', ConnectionError, EOFError), LOADER),
    # Errors of gloo are plain RuntimeErrors.
    MachineFault(_has_words(*LOST_RANK), RANK),
    MachineFault(lambda error, text: type(error).__name__ in ('DistBackendError', 'DistNetworkError'), RANK),
)


def fault_of_machine(error: BaseException) -> str:
    """Returns the fault of the machine in one line; empty if neither the error nor its causes say so."""
    fault, text = _matching_fault(error)
    if fault is None:
        return ''
    return fault.message.format(
        text=text,
        limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        port=os.environ.get('MASTER_PORT', ''),
    )


def has_lost_rank(error: BaseException) -> bool:
    """Returns whether another rank ended or does not answer."""
    fault, _ = _matching_fault(error)
    return fault is not None and fault.message is RANK


def _matching_fault(error: BaseException) -> tuple[MachineFault | None, str]:
    """Returns the first fault that the error or one of its causes matches, and the words of that error."""
    cause: BaseException | None = error
    while cause is not None:
        text = ' '.join(str(cause).split())
        for fault in FAULTS:
            if fault.matches(cause, text):
                return fault, text[-LONGEST_TEXT:].rstrip('. ') or type(cause).__name__
        cause = cause.__cause__ or cause.__context__
    return None, ''
