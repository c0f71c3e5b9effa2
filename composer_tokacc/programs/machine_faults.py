# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Errors that are the machine's, which hosts raise deep inside, and in words that do not say what to do."""

from __future__ import annotations

import errno
import os
import re
import resource
import traceback


def fault_of_machine(error: BaseException | None) -> str:
    """Returns what the machine lacked, in one line; empty where an error, and what it came from, is of another kind."""
    while error is not None:
        # From a loader process only the text comes.
        number = re.search(r'\[Errno (\d+)\]', str(error))
        code = getattr(error, 'errno', None) or (int(number[1]) if number else None)
        text = ' '.join(str(error).split())[-300:] or type(error).__name__
        # Torch's own of a full disk says only that it is not where it should be.
        if code in (errno.ENOSPC, errno.EDQUOT) or 'unexpected pos' in text:
            return f'the disk must have room for checkpoints and results, got: {text}'
        if code in (errno.EMFILE, errno.ENFILE) or 'Too many open files' in text:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f'the limit of open files (`ulimit -Hn`) must leave room for ranks and loader processes, got: {limit}. '
                'Raise it, for example to 65536, or lower `loader.num_workers`'
            )
        if code == errno.EADDRINUSE or 'EADDRINUSE' in text:
            return (
                f'the port where the ranks meet must be free, got: {os.environ.get("MASTER_PORT", "")}, taken by '
                'another program. Start again, or give the launcher one that is free: `composer --master_port PORT`'
            )
        frames = traceback.walk_tb(error.__traceback__)
        if 'DataLoader worker (pid' in text or (
            isinstance(error, ConnectionError | EOFError)
            and any(frame.f_globals.get('__name__') == 'torch.utils.data.dataloader' for frame, _ in frames)
        ):
            return (
                f'processes that read samples must live as long as the run, got: {text.rstrip(". ")}. Mostly the '
                'machine has run out of memory: see its log, and lower `loader.num_workers` or `loader.prefetch_factor`'
            )
        error = error.__cause__ or error.__context__
    return ''
