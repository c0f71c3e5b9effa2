# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Recognises faults of the machine by a table: a full disk, no memory, a port in use, a rank that is gone."""

from __future__ import annotations

import os
import re
import resource
import traceback
from dataclasses import dataclass


@dataclass(frozen=True)
class MachineFault:
    """One kind of fault."""

    pattern: str
    """A regular expression. It is searched in one line about an error: the names of its classes, then the names of the
    modules in its traceback, the outermost first, then its text. Torch and gloo raise a plain RuntimeError for most
    faults, so the words of its text are searched."""
    message: str
    """The line for the user. It may contain ``{text}`` (of the error), ``{limit}`` (of open files) and ``{port}``."""


LONGEST_TEXT = 300
"""Most characters of an error's text in a message. The end of the text is shown, because it says most."""
LOST_RANK = MachineFault(
    # A connection to the Hugging Face hub may be closed or reset, too. So these words count only after the name of gloo
    # (from its file names) or of the module torch.distributed.
    r'(gloo|torch\.distributed).*(Connection closed by peer|Connection reset by peer|Timed out waiting)|'
    # Only gloo and torch.distributed have these words and classes.
    'Application timeout caused pair closure|DistBackendError|DistNetworkError|DistStoreError',
    'another rank ended, or did not answer within `trainer.dist_timeout`, got: {text}. Read what that rank wrote: the '
    'launcher prints it below, or writes it to the file of `composer --stdout`',
)
# The first match wins, so the order matters:
# - Memory of the device comes before memory of the machine, because the name OutOfMemoryError contains MemoryError. It
#   comes before a lost rank, because NCCL raises a DistBackendError for both.
# - A port in use comes before the rendezvous, because a rendezvous fails if its port is in use.
# - A lost loader process comes before a lost rank, because a reset connection may mean either.
FAULTS = (
    MachineFault(
        # The last one is all that torch.save() says of a full disk.
        r'No space left|Disk quota exceeded|unexpected pos \d+ vs \d+',
        'the disk must have room for checkpoints and results, got: {text}',
    ),
    MachineFault(
        'Too many open files',
        'the limit of open files (`ulimit -Hn`) must leave room for ranks and loader processes, got: {limit}. Raise '
        'it, for example to 65536, or lower `loader.num_workers`',
    ),
    MachineFault(
        'IsADirectoryError|NotADirectoryError|PermissionError|Read-only file system',
        'files of the run must be in a place that can be written and read, got: {text}',
    ),
    MachineFault(
        # The last two are NCCL's messages. Torch raises them as a DistBackendError.
        r"OutOfMemoryError|CUDA error: out of memory|Cuda failure (\d+ )?'out of memory'|Failed to CUDA calloc",
        'the device must have memory for a microbatch, got: {text}. Lower `microbatching.slot_tokens` or '
        '`device_train_microbatch_size`, or set the latter to suggest',
    ),
    MachineFault(
        'EADDRINUSE|Address already in use',
        'the port where the ranks meet must be free, got: {port}, used by another program. Start again, or give the '
        'launcher a free port: `composer --master_port PORT`',
    ),
    MachineFault(
        r'torch\.distributed\.rendezvous',
        'the ranks must be able to meet at `MASTER_ADDR` and `MASTER_PORT`, got: {text}. Use `composer -n RANKS`',
    ),
    MachineFault(
        # The second part means that torch's queue to a loader process is broken. It names modules, because a dataset
        # may raise these classes, too.
        r'DataLoader worker \(pid|(ConnectionError|EOFError).* torch\.utils\.data\.dataloader .*multiprocessing',
        'the processes that read samples ended during the run, got: {text}. Usually the machine has run out of memory: '
        'see its log, and lower `loader.num_workers` or `loader.prefetch_factor`',
    ),
    MachineFault(
        'MemoryError|Cannot allocate memory|DefaultCPUAllocator',  # the last one is torch's word on a CPU
        'the machine must have enough memory, got: {text}. Lower `microbatching.device_train_microbatch_size` or '
        '`slot_tokens`, or if samples were being read, `loader.num_workers` or `loader.prefetch_factor`',
    ),
    MachineFault(
        'Stale file handle',
        'the file system must answer, got: {text}. Mount it again, and start the run again',
    ),
    LOST_RANK,
)


def fault_of_machine(error: BaseException) -> str:
    """Returns the line for the user if a fault of the machine caused an error, else an empty text."""
    fault, text = _matching_fault(error)
    if fault is None:
        return ''
    # The message names `ulimit -Hn`, the hard limit. In a run the soft limit is as high, because allow_open_files() has
    # raised it.
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    port = os.environ.get('MASTER_PORT', '')
    return fault.message.format(text=text, limit=limit, port=port)


def has_lost_rank(error: BaseException) -> bool:
    """Returns whether an error arose because another rank ended or does not answer."""
    return _matching_fault(error)[0] is LOST_RANK


def _matching_fault(error: BaseException) -> tuple[MachineFault | None, str]:
    """Returns the first fault that the error or one of its causes matches, and the end of that error's text."""
    cause: BaseException | None = error
    searched: list[BaseException] = []
    while cause is not None and cause not in searched:  # an error may be its own cause: `raise error from error`
        searched.append(cause)
        text = ' '.join(str(cause).split())
        classes = [cls.__name__ for cls in type(cause).__mro__]
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        modules = [str(frame.f_globals.get('__name__')) for frame in frames]
        description = ' '.join([*classes, *modules, text])
        for fault in FAULTS:
            if re.search(fault.pattern, description):
                shown_text = text[-LONGEST_TEXT:].rstrip('. ')
                return fault, shown_text or type(cause).__name__
        # `__context__` is not followed, because a bug in the handler of another error needs its traceback.
        cause = cause.__cause__
    return None, ''
