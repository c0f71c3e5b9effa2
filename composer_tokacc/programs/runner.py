# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The way of a program from a YAML file to an exit status, and whose error the user sees.

The launcher shows rank 0 of a node as it goes and the others only when they have ended; by then rank 0 has died of the
broken connection. So each rank tells its end to the store that torch's rendezvous has opened on rank 0, where a thread
of every rank reads it: the first rank of a node prints it and ends with its status, the others end in silence.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from composer.core import Algorithm, Callback
from composer.optim import ComposerScheduler
from composer.utils import dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented there
from torch.optim import Optimizer
from transformers import PreTrainedModel

from composer_tokacc.data import BadSampleError
from composer_tokacc.programs.config_checks import check_config, check_machine
from composer_tokacc.programs.errors import ConfigError, in_words_of, one_line, refuse, words_of
from composer_tokacc.programs.process import DIST_TIMEOUT, end_process, keep_what_is_loaded, let_children_die
from composer_tokacc.programs.registry import class_by_name, named_parts
from composer_tokacc.programs.schema import TrainConfig, load_config

log = logging.getLogger(__name__)
_PARTS: Any = (Algorithm, Callback, Optimizer, ComposerScheduler)  # the last is a protocol to type checkers alone
_EVERY = 1.0
"""Seconds between two looks at the store."""
_TOLD = 'composer_tokacc/told'
_ALIVE, _DONE = 'composer_tokacc/alive/{}', 'done'
_LACKS: Sequence[tuple[str, Sequence[int | str], tuple[type[BaseException], ...], str]] = (
    # What a machine lacks, and what tells of it: an errno or words, or an error's class and a module that it passed.
    ('the disk must have room for checkpoints and results, got: {text}',
     (errno.ENOSPC, errno.EDQUOT, 'unexpected pos'), (), ''),  # torch's own of a full disk says no more
    ('the limit of open files (`ulimit -Hn`) must leave room for ranks and loader processes, got: {limit}. Raise it, '
     'for example to 65536, or lower `loader.num_workers`',
     (errno.EMFILE, errno.ENFILE, 'Too many open files'), (), ''),
    ('files of the run must be where they can be written and read, got: {text}',
     (), (IsADirectoryError, NotADirectoryError, PermissionError), ''),
    ('the device must have memory for a microbatch, got: {text}. Lower `microbatching.slot_tokens` or '
     '`device_train_microbatch_size`, or set the latter to suggest', (), (torch.OutOfMemoryError,), ''),
    ('the port where the ranks meet must be free, got: {port}, taken by another program. Start again, or give the '
     'launcher one that is free: `composer --master_port PORT`', (errno.EADDRINUSE, 'EADDRINUSE'), (), ''),
    ('the ranks must meet where `MASTER_ADDR` and `MASTER_PORT` say, got: {text}. Use `composer -n RANKS`',
     (), (BaseException,), 'torch.distributed.rendezvous'),
    ('processes that read samples must live as long as the run, got: {text}. Mostly the machine has run out of memory: '
     'see its log, and lower `loader.num_workers` or `loader.prefetch_factor`',
     ('DataLoader worker (pid',), (ConnectionError, EOFError), 'torch.utils.data.dataloader'),
)  # fmt: skip


def run_program(
    program: Callable[[TrainConfig], int | None],
    path: str,
    overrides: Sequence[str],
    *,
    num_ranks: int | None = None,
    trains: bool = False,
) -> int:
    """Runs a program on a YAML file and returns its exit status, 2 with one line for a mistake of the user's.

    The program takes the config and returns the status, None for 0. ``num_ranks`` are those that the run is planned
    for, None: of this launch; ``trains``: this machine must be able to.
    """
    keep_what_is_loaded()
    try:
        config = load_config(path, overrides)
        check_config(config, num_ranks=num_ranks)
        if level := config.trainer.get('python_log_level'):
            logging.getLogger('composer_tokacc').setLevel(level.upper())
        if trains:
            check_machine(config)
    except ConfigError as error:
        return refuse(error, on_all_ranks=True)
    watch = RankWatch(config.trainer.get('dist_timeout', DIST_TIMEOUT))
    try:
        with in_words_of(config):
            return program(config) or 0
    except (ConfigError, BadSampleError) as error:
        return 2 if watch.tell(one_line(error), 2) else refuse(error)
    except Exception as error:
        let_children_die()
        log.debug('The run failed here:', exc_info=error)
        if fault := fault_of_machine(error) or fault_of_part(error, config):
            return 2 if watch.tell(one_line(fault), 2) else refuse(ConfigError(fault))
        if watch.tell(traceback.format_exc(), 1):
            return 1
        raise
    finally:
        watch.stop()


class RankWatch:
    """Watches the other ranks of a run from a thread of this one.

    A rank that gives no sign of life for nine tenths of ``timeout``, the seconds that collectives wait for, counts as
    stopped, because the collectives would not say for whom they waited.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout, self._patience = timeout, 0.9 * timeout
        self._is_first = dist.get_local_rank() == 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if dist.get_world_size() > 1 and 'MASTER_ADDR' in os.environ:
            self._thread.start()

    def stop(self) -> None:
        """Ends the watch in order: this rank is not missed any more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _EVERY)

    def tell(self, message: str, status: int) -> bool:
        """Tells the first ranks why this one ends, if it is the first to; returns whether one of them prints it."""
        if dist.get_world_size() == 1 or not dist.is_initialized():
            return False
        text = f'{status} {message}'
        try:
            told = _connect(5.0).compare_set(_TOLD, '', text).decode()
        except RuntimeError:  # rank 0 has gone, and the store with it
            return False
        if self._is_first and told == text:
            self._stop.set()
            time.sleep(2 * _EVERY)  # the others end first: the launcher would show what they say to a closed connection
            return False
        time.sleep(6 * _EVERY)  # the thread ends this process
        return True

    def _watch(self) -> None:
        rank, num_ranks = dist.get_global_rank(), dist.get_world_size()
        try:
            store = _connect(self._timeout)  # one of its own: a store answers one question at a time
            seen = {other: ('', time.monotonic()) for other in range(num_ranks) if other != rank}
            beat = 0
            while not self._stop.wait(_EVERY):
                beat += 1
                store.set(_ALIVE.format(rank), str(beat))
                if store.check([_TOLD]):
                    status, _, message = store.get(_TOLD).decode().partition(' ')
                    self._end(message, int(status))
                if self._is_first:
                    self._miss(store, seen)
            store.set(_ALIVE.format(rank), _DONE)
        except RuntimeError:  # rank 0 has gone, which the launcher sees as well
            return

    def _miss(self, store: Any, seen: dict[int, tuple[str, float]]) -> None:
        """Ends the run if a rank, last seen with the given beat at the given time, has not been heard of for long."""
        for other, (last, since) in seen.items():
            key = _ALIVE.format(other)
            found = store.get(key).decode() if store.check([key]) else ''
            if found != last or found == _DONE:
                seen[other] = found, time.monotonic()
            elif time.monotonic() - since > self._patience:
                self._end(
                    f'error: every rank must answer, got: no sign of life from rank {other} for {self._patience:.0f} '
                    's. See whether its process is stopped or its machine hangs, or raise `trainer.dist_timeout`',
                    2,
                )

    def _end(self, message: str, status: int) -> None:
        """Ends this process, whose main thread may wait in a collective."""
        if self._stop.is_set():
            return
        if not self._is_first:
            end_process('', 0)
        end_process(message, status, delay=2 * _EVERY)  # as above


def _connect(timeout: float) -> Any:  # torch's stubs do not know `check`
    host, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def fault_of_machine(error: BaseException | None) -> str:
    """Returns what the machine lacked, in one line; empty where an error, and what it came from, is of another kind."""
    while error is not None:
        text = ' '.join(str(error).split())  # from a loader process only this comes
        modules = {str(frame.f_globals.get('__name__')) for frame, _ in traceback.walk_tb(error.__traceback__)}
        for line, signs, kinds, module in _LACKS:
            words = [f'[Errno {sign}]' if isinstance(sign, int) else sign for sign in signs]
            if any(each in text for each in words) or (isinstance(error, kinds) and module in {'', *modules}):
                got = text[-300:].rstrip('. ') or type(error).__name__
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                return line.format(text=got, limit=limit, port=os.environ.get('MASTER_PORT', ''))
        error = error.__cause__ or error.__context__
    return ''


def fault_of_part(error: BaseException, config: TrainConfig) -> str:
    """Returns what a host's part says that failed in a run, by its key in the config; empty where none of them did.

    A part stands between the Trainer, which called it, and the line that raised. Classes of the user's keep their
    traceback, and so do faults between ranks and those of this package, be it a hook of ours in a forward.
    """
    keys = {class_by_name(kind, name): path for kind, path, name, _ in named_parts(config)}
    keys |= {class_by_name(kind, getattr(config, kind)['name']): kind for kind in ('optimizer', 'scheduler')}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get('__name__')) for frame in frames]
    # Not a mode of ours: it stands between a model and each of torch's functions.
    callers = (frame.f_globals.get('__name__') for frame in reversed(frames) if frame.f_code.co_name[:8] != '__torch_')
    caller = next((name for name in callers if not str(name).startswith('torch.')), '')
    between_ranks = modules[-1].startswith('torch.distributed') and '.checkpoint.' not in modules[-1]
    if between_ranks or str(caller).startswith('composer_tokacc.'):
        return ''
    blamed = ''
    for frame, module in zip(reversed(frames), reversed(modules), strict=True):
        part = frame.f_locals.get('self')
        if module.startswith('composer.trainer.'):
            blamed = blamed or ('trainer' if frame.f_code.co_name == '__init__' else '')
            break
        if isinstance(part, _PARTS):
            if not type(part).__module__.startswith(('composer.', 'torch.')):
                break
            blamed = keys.get(type(part), 'trainer')
        elif isinstance(part, PreTrainedModel) and type(part).__module__.startswith('transformers.'):
            blamed = blamed or 'model'  # a part may stand in its hooks
    fits = 'take what `dataset` and its processor make' if blamed == 'model' else 'work in this run'
    remedy = 'Change it; `trainer.python_log_level=DEBUG` shows where'
    return blamed and f'`{blamed}` must {fits}, got: {words_of(error).rstrip(".")} (in {modules[-1]}). {remedy}'
