# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Mistakes of the user, each told in one line with the key of the YAML file. Loads no host."""

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
"""Characters of a message on the screen: a value may be a whole file."""
HOSTS = frozenset({'composer', 'torch', 'transformers', 'peft', 'streaming', 'bitsandbytes', 'accelerate'})
"""Packages whose errors in a run are told in one line. Code of the user keeps its traceback."""
_CLASS_OF_REFUSAL = re.compile(r'\b(?:BadSample|Config|InvalidInput|NotExact)Error: ')
"""Torch puts the traceback of a loader process, and this at its end, before the message of a refusal."""


class ConfigError(InvalidInputError):
    """A mistake in a config. The programs print it in one line, without a traceback, and end with status 2.

    Args:
        path: The key of the config, such as ``loader.num_workers``; or empty.
        message: The mistake, the value and the remedy. It follows the key in a sentence: "must be ..., got: ...".
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
    """Turns any error while a part of the config is built into one line with its key.

    These errors pass unchanged: a ConfigError, which has its key; a bug of this package, which needs its traceback; a
    fault of the machine, which gets its line from :func:`.fault_of_machine`.
    """
    try:
        yield
    except ConfigError:
        raise
    except RefusalError as error:
        raise PartError(path, str(error)) from error
    except Exception as error:
        # A missing package of a host is not a bug of this package, even if the import stands in our code.
        is_our_bug = _package_that_raised(error) == 'composer_tokacc' and not isinstance(error, ImportError)
        if is_our_bug or fault_of_machine(error):
            raise
        raise PartError(path, f'{type(error).__name__}: {error}') from error


def is_of_host(error: BaseException) -> bool:
    """Returns whether code of one of the ``HOSTS`` raised an error."""
    return _package_that_raised(error) in HOSTS


def _package_that_raised(error: BaseException) -> str:
    """Returns the top package of the innermost frame."""
    module = ''
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # Skips the methods by which a mode of this package calls functions of torch. It does not cause their errors.
        if not frame.f_code.co_name.startswith('__torch_'):
            module = str(frame.f_globals.get('__name__'))
    # From this module torch raises errors of loader processes again. They may come from the user's dataset.
    return '' if module == 'torch._utils' else module.partition('.')[0]


def local_folder(path: str, folder: str) -> Path:
    """Returns a folder by its name. Refuses ``~`` and URLs, because Python would make a folder of that very name."""
    if folder.startswith('~') or '://' in folder:
        raise ConfigError(path, f'must be written out, got: {folder}, which would be a folder of that name')
    return Path(folder)


def unknown_name(kind: str, name: str, known_names: Iterable[str]) -> str:
    """Returns a message that refuses a name and suggests the nearest one: "has no key lrr. Did you mean lr?"."""
    choices = sorted(set(known_names))
    nearest = difflib.get_close_matches(name, choices, n=1)
    if nearest:
        return f'has no {kind} {name}. Did you mean {nearest[0]}?'
    listed = ', '.join(choices[:40])
    if len(choices) > 40:
        listed += ', ...'
    return f'has no {kind} {name}. Known: {listed}'


def one_line(error: Exception | str) -> str:
    """Returns the message of a mistake as the user reads it: one line of limited length."""
    message = _CLASS_OF_REFUSAL.split(str(error))[-1]
    return f'error: {shorten(message)}'


def shorten(text: object, limit: int = LONGEST_LINE) -> str:
    """Returns a text on one line. A long one loses its middle, because the remedy is at its end."""
    line = ' '.join(str(text).split())
    if len(line) <= limit:
        return line
    half = limit // 2
    return f'{line[:half]} ... {line[-half:]}'


def refuse(error: Exception, message: str = '', *, on_all_ranks: bool = False) -> int:
    """Prints a mistake in one line and returns the exit status. At the log level debug its traceback is logged.

    Args:
        error: The mistake.
        message: The line to print. Default: the error's own message.
        on_all_ranks: Whether all ranks meet the mistake, such as a wrong key of the config. Then only the first rank
            of a node prints it and returns 2. The others return 0, because Composer's launcher ends all ranks as soon
            as one fails, perhaps before the first rank has printed the line.
    """
    log.debug('The error was raised here:', exc_info=error)
    local_rank = os.environ.get('LOCAL_RANK', '0')
    if on_all_ranks and local_rank.isdecimal() and int(local_rank) > 0:
        return 0
    print(one_line(message or error), file=sys.stderr, flush=True)
    return 2
