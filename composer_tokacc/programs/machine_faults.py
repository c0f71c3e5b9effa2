# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Faults of the machine: a full disk, no memory, a port in use, a rank that is gone. One row of a table for each."""

from __future__ import annotations

import errno
import os
import resource
import traceback
from dataclasses import dataclass


@dataclass(frozen=True)
class MachineFault:
    """One kind of fault. It matches an error by number, text or class. ``below`` narrows ``classes``."""

    message: str
    """The line for the user. It may contain ``{text}`` (of the error), ``{limit}`` (of open files) and ``{port}``."""
    errnos: tuple[int, ...] = ()
    """Numbers of an OSError. Torch has them only in the text of its own errors."""
    words: tuple[str, ...] = ()
    """Parts of the error's text. Torch raises plain RuntimeErrors for most faults."""
    classes: tuple[str, ...] = ()
    """Classes of the error, by name because this table must not load torch."""
    below: str = ''
    """Module of torch. An error of ``classes`` only counts if its traceback goes through this module."""

    def matches(self, error: BaseException, text: str) -> bool:
        """Returns whether an error is of this kind. ``text`` is its message on one line."""
        if isinstance(error, OSError) and error.errno in self.errnos:
            return True
        if any(phrase in text for phrase in self.words):
            return True
        if any(f'[Errno {number}]' in text or f'errno: {number} ' in text for number in self.errnos):
            return True
        class_names = [cls.__name__ for cls in type(error).__mro__]
        return any(name in class_names for name in self.classes) and self._has_passed(error)

    def _has_passed(self, error: BaseException) -> bool:
        modules = {frame.f_globals.get('__name__') for frame, _ in traceback.walk_tb(error.__traceback__)}
        return not self.below or self.below in modules


LONGEST_TEXT = 300
"""Characters of an error that are shown. Its end says most."""
LOST_RANK = MachineFault(
    'another rank ended, or did not answer within `trainer.dist_timeout`, got: {text}. Read what that rank wrote: the '
    'launcher prints it below, or writes it to the file of `composer --stdout`',
    words=(  # of gloo
        'Connection closed by peer',
        'Connection reset by peer',
        'Timed out waiting',
        'Application timeout caused pair closure',
    ),
    classes=('DistBackendError', 'DistNetworkError'),
)
# The first match wins: a port in use before rendezvous in general; a lost loader process before a lost rank.
FAULTS = (
    MachineFault(
        'the disk must have room for checkpoints and results, got: {text}',
        errnos=(errno.ENOSPC, errno.EDQUOT),
        words=('unexpected pos',),  # all that torch says of a full disk
    ),
    MachineFault(
        'the limit of open files (`ulimit -Hn`) must leave room for ranks and loader processes, got: {limit}. Raise '
        'it, for example to 65536, or lower `loader.num_workers`',
        errnos=(errno.EMFILE, errno.ENFILE),
        words=('Too many open files',),
    ),
    MachineFault(
        'files of the run must be in a place that can be written and read, got: {text}',
        classes=('IsADirectoryError', 'NotADirectoryError', 'PermissionError'),
    ),
    MachineFault(
        'the device must have memory for a microbatch, got: {text}. Lower `microbatching.slot_tokens` or '
        '`device_train_microbatch_size`, or set the latter to suggest',
        words=('CUDA error: out of memory',),
        classes=('OutOfMemoryError',),
    ),
    MachineFault(
        'the port where the ranks meet must be free, got: {port}, used by another program. Start again, or give the '
        'launcher a free port: `composer --master_port PORT`',
        errnos=(errno.EADDRINUSE,),
        words=('EADDRINUSE',),
    ),
    MachineFault(
        'the ranks must be able to meet at `MASTER_ADDR` and `MASTER_PORT`, got: {text}. Use `composer -n RANKS`',
        classes=('Exception',),
        below='torch.distributed.rendezvous',
    ),
    MachineFault(
        'the processes that read samples ended during the run, got: {text}. Usually the machine has run out of memory: '
        'see its log, and lower `loader.num_workers` or `loader.prefetch_factor`',
        words=('DataLoader worker (pid',),
        classes=('ConnectionError', 'EOFError'),
        below='torch.utils.data.dataloader',
    ),
    LOST_RANK,
)


def fault_of_machine(error: BaseException) -> str:
    """Returns the line for the user if a fault of the machine caused the error, else an empty text."""
    fault, text = _matching_fault(error)
    if fault is None:
        return ''
    return fault.message.format(
        text=text,
        # The soft limit. In a run allow_open_files() has set it to the hard one.
        limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        port=os.environ.get('MASTER_PORT', ''),
    )


def has_lost_rank(error: BaseException) -> bool:
    """Returns whether another rank ended or does not answer."""
    fault, _ = _matching_fault(error)
    return fault is LOST_RANK


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
