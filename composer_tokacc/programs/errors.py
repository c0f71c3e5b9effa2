# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Mistakes of the user, each told in one line with the key of the YAML file.

Imports neither torch nor Composer, so that a mistake on the command line is told at once.
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
"""Most characters of a message on the screen. It shows the wrong value, which may be as long as a file."""
HOSTS = frozenset({'composer', 'torch', 'transformers', 'peft', 'streaming', 'bitsandbytes', 'accelerate'})
"""Packages whose errors in a run are told in one line. An error of the user's own code keeps its traceback."""
_CLASS_OF_REFUSAL = re.compile(r'\b(?:BadSample|Config|InvalidInput|NotExact)Error: ')
"""If a loader process refuses something, torch puts the traceback of the process before the message. The traceback ends
in this, the name of the class."""


class ConfigError(InvalidInputError):
    """A mistake in a config. The programs print it in one line, without a traceback, and end with status 2.

    Args:
        path: The key of the config, such as ``loader.num_workers``. Empty if the mistake has no key.
        message: The mistake, the value and the remedy. It goes on after the key: "must be ..., got: ...".
    """

    def __init__(self, path: str, message: str) -> None:
        text = f'`{path}` {message}' if path else message
        super().__init__(' '.join(text.split()))
        self.path = path
        self.message = message

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        # Exceptions are pickled by their arguments, on the way from one rank to another.
        return type(self), (self.path, self.message)


class PartError(ConfigError):
    """An error that was raised while a part of the config was built: ``optimizer: TypeError: ...``."""

    def __init__(self, path: str, message: str) -> None:
        # The message is a complete sentence, so a colon separates it from the key.
        super().__init__('', f'`{path}`: {message}')
        self.path = path
        self.message = message


@contextmanager
def building(path: str) -> Iterator[None]:
    """Turns an error that is raised while a part of the config is built into one line with its key.

    Two kinds of errors pass unchanged: a ConfigError has its key, and a fault of the machine gets its line from
    :func:`.fault_of_machine`.
    """
    try:
        yield
    except ConfigError:
        raise
    except RefusalError as error:
        raise PartError(path, str(error)) from error
    except Exception as error:
        if fault_of_machine(error):
            raise
        raise PartError(path, f'{type(error).__name__}: {error}') from error


def is_of_host(error: BaseException) -> bool:
    """Returns whether code of one of the ``HOSTS`` raised an error in this process."""
    module = ''
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # By a method such as `__torch_function__` this package watches the calls of torch's functions. It does not
        # cause their errors.
        if not frame.f_code.co_name.startswith('__torch_'):
            module = str(frame.f_globals.get('__name__'))
    # In that module torch raises the errors of loader processes again. They may come from the user's dataset.
    return module != 'torch._utils' and module.partition('.')[0] in HOSTS


def local_folder(path: str, folder: str) -> Path:
    """Returns the folder that the user names under a key. Refuses ``~`` and URLs.

    Python does not know them. It would make a folder of that very name.

    Args:
        path: The key of the config, or the name of the argument.
        folder: The user's text.
    """
    if folder.startswith('~') or '://' in folder:
        raise ConfigError(
            path,
            f'must be a folder on this machine, got: {folder}, and Python would make a folder of that very name. Write '
            'the whole path, without ~',
        )
    return Path(folder)


def unknown_name(kind: str, name: str, known_names: Iterable[str]) -> str:
    """Returns a message that refuses a name: "has no key lrr. Did you mean lr?".

    Suggests the known name that is most like it. If none is like it, lists the known names.
    """
    choices = sorted(set(known_names))
    nearest = difflib.get_close_matches(name, choices, n=1)
    if nearest:
        return f'has no {kind} {name}. Did you mean {nearest[0]}?'
    listed = ', '.join(choices[:40])
    if len(choices) > 40:
        listed += ', ...'
    return f'has no {kind} {name}. Known: {listed}'


def one_line(error: Exception | str) -> str:
    """Returns the line that is printed for a mistake. Its length is limited."""
    message = _CLASS_OF_REFUSAL.split(str(error))[-1]
    return f'error: {shorten(message)}'


def shorten(text: object, limit: int = LONGEST_LINE) -> str:
    """Returns a text on one line. A text over the limit loses its middle, because the remedy is at its end."""
    line = ' '.join(str(text).split())
    if len(line) <= limit:
        return line
    half = limit // 2
    return f'{line[:half]} ... {line[-half:]}'


def refuse(error: Exception, message: str = '', *, on_all_ranks: bool = False) -> int:
    """Prints a mistake in one line and returns the exit status, 2. At the log level debug its traceback comes before.

    Args:
        error: The mistake.
        message: The message to print. Default: the error's own message.
        on_all_ranks: Whether the mistake is raised on all ranks, as a wrong key of the config is. Then only the first
            rank of each node prints it and returns 2. The others return 0, because Composer's launcher ends all ranks
            as soon as one fails, perhaps before the first rank has printed the line.
    """
    local_rank = os.environ.get('LOCAL_RANK', '0')
    if on_all_ranks and local_rank.isdecimal() and int(local_rank) > 0:
        return 0
    if log.isEnabledFor(logging.DEBUG):
        # Printed, because before the Trainer is built nobody handles records of the log.
        traceback.print_exception(error)
    print(one_line(message or error), file=sys.stderr, flush=True)
    return 2
