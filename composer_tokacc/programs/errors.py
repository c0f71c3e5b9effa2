# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Reports a mistake of the user in one line, with the key of the YAML file.

Imports neither torch nor Composer, so that a mistake on the command line is shown at once.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from composer_tokacc.programs.machine_faults import fault_of_machine
from composer_tokacc.refusals import InvalidInputError, RefusalError

log = logging.getLogger(__name__)

LONGEST_LINE = 1000
"""Largest number of characters of a message on the screen. Messages show the wrong value, which may be as long as a
file."""
HOST_PACKAGES = frozenset({'composer', 'torch', 'transformers', 'peft', 'streaming', 'bitsandbytes', 'accelerate'})
"""Packages whose errors in a run are reported in one line. An error of the user's own code keeps its traceback."""
_CLASS_BEFORE_MESSAGE = re.compile(r'\b(?:BadSample|Config|InvalidInput|NotExact)Error: ')
"""Matches the class of a refusal (:mod:`composer_tokacc.refusals`) before its message. If a loader process raises a
refusal, torch raises it again with the whole traceback as message."""


class ConfigError(InvalidInputError):
    """A mistake in a config. The programs print it in one line, without a traceback, and end with status 2.

    Args:
        path: The key of the config, such as ``loader.num_workers``. Empty if the mistake has no key.
        message: The mistake, the value and the remedy, such as "must be ..., got: ...". The key is put before it.
    """

    def __init__(self, path: str, message: str) -> None:
        # Ranks and loader processes send errors to each other. An exception is pickled with these arguments.
        super().__init__(path, message)
        self.path = path
        self.message = message

    def __str__(self) -> str:
        """Returns the line for the user."""
        text = f'`{self.path}` {self.message}' if self.path else self.message
        return ' '.join(text.split())


@contextmanager
def building(key: str) -> Iterator[None]:
    """Turns any error in the block into a :class:`ConfigError` with this key of the config.

    The block builds an object from the part of the config under this key. For example ``with building('optimizer'):``
    turns a TypeError of the optimizer's class into the message "`optimizer` cannot be used: TypeError: ...".

    Two kinds of errors pass unchanged: a ConfigError, which has its key already, and a fault of the machine, which is
    no mistake of the user.
    """
    try:
        yield
    except ConfigError:
        raise
    except RefusalError as error:  # its message is complete without its class
        raise ConfigError(key, f'cannot be used: {error}') from error
    except Exception as error:
        if fault_of_machine(error):
            raise
        raise ConfigError(key, f'cannot be used: {type(error).__name__}: {error}') from error


def is_of_host(error: BaseException) -> bool:
    """Returns whether code of one of the ``HOST_PACKAGES`` raised an error in this process."""
    raising_module = ''
    for frame, _ in traceback.walk_tb(error.__traceback__):  # the frame that raised it is the last one
        # Our `__torch_function__` calls a function of torch. If that function raises in C++, it has no frame of Python,
        # so ours is the last one. The error is torch's nevertheless, so such frames do not count.
        if not frame.f_code.co_name.startswith('__torch_'):
            raising_module = str(frame.f_globals.get('__name__'))
    if raising_module == 'torch._utils':
        return False  # it raises the errors of loader processes again, which may come from the user's dataset
    package = raising_module.partition('.')[0]
    return package in HOST_PACKAGES


def local_folder(key: str, folder: str) -> Path:
    """Returns the folder that the user names under a key. Refuses ``~`` and URLs.

    Python would make a folder of that very name, such as ``./~/runs``.

    Args:
        key: The key of the config, or the name of the argument.
        folder: The value of the key.
    """
    if folder.startswith('~') or '://' in folder:
        raise ConfigError(
            key,
            f'must be a folder on this machine, got: {folder}, and Python would make a folder of that very name. Write '
            'the whole path, without ~',
        )
    return Path(folder)


def unknown_name(kind: str, name: str, known_names: Iterable[str]) -> str:
    """Returns the message of a ConfigError that refuses a name: "has no key lrr. Did you mean lr?".

    Suggests the most similar known name. If none is similar, lists the known names.

    Args:
        kind: What the name stands for, such as "key".
        name: The unknown name.
        known_names: Names to choose from.
    """
    choices = sorted(set(known_names))
    nearest = difflib.get_close_matches(name, choices, n=1)
    if nearest:
        return f'has no {kind} {name}. Did you mean {nearest[0]}?'
    return f'has no {kind} {name}. Known: {shorten(", ".join(choices))}'


def one_line(error: BaseException | str) -> str:
    """Returns the line that is printed for a mistake, at most about ``LONGEST_LINE`` characters long."""
    # If a loader process raised the error, its message begins with the traceback, which is left out.
    *_, message = _CLASS_BEFORE_MESSAGE.split(str(error))
    return f'error: {shorten(message)}'


def shorten(text: object, limit: int = LONGEST_LINE) -> str:
    """Returns a text on one line. If it has more characters than ``limit``, leaves out its middle.

    The end stays, because a message has the remedy there.
    """
    line = ' '.join(str(text).split())
    if len(line) <= limit:
        return line
    half = limit // 2
    return f'{line[:half]} ... {line[-half:]}'


def refuse(error: BaseException, message: str = '', *, on_all_ranks: bool = False) -> int:
    """Prints a mistake in one line. Returns the exit status: 2, or 0 on a rank that leaves the mistake to another one.

    At the log level debug, prints the traceback first.

    Args:
        error: The mistake.
        message: The message to print. Default: the error's own message.
        on_all_ranks: Whether all ranks raise the same mistake, such as a wrong key of the config. Then only the first
            rank of each node prints it and returns 2. The others return 0: if one of them failed first, Composer's
            launcher could end the first rank before it has printed the line.
    """
    local_rank = os.environ.get('LOCAL_RANK', '0')  # perhaps not a number: the mistake may be this variable itself
    if on_all_ranks and local_rank.isdecimal() and local_rank != '0':
        return 0
    if log.isEnabledFor(logging.DEBUG):
        # Not logged, because before the Trainer is built no handler prints records of the log.
        traceback.print_exception(error)
    print(one_line(message or error), file=sys.stderr, flush=True)
    return 2
