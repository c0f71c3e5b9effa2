# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Mistakes of the user, each told in one line with the key of the YAML file. Loads no host."""

from __future__ import annotations

import difflib
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from composer_tokacc.programs.machine_faults import fault_of_machine

log = logging.getLogger(__name__)

PACKAGE = str(Path(__file__).parents[1])
LONGEST_LINE = 1000
"""Characters of a message on the screen: a value may be a whole file."""
HOSTS = frozenset({'composer', 'torch', 'transformers', 'peft', 'streaming', 'bitsandbytes', 'accelerate'})
"""Packages whose errors in training are told in one line. Code of the user keeps its traceback."""


class ConfigError(ValueError):
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
    """An error of a part of a host: ``optimizer: TypeError: ...``."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__('', f'`{path}`: {message}')
        self.path = path
        self.message = message


@contextmanager
def building(path: str) -> Iterator[None]:
    """Turns any error while a part of the config is built into one line with its key.

    The traceback is logged at debug level. A bug in a line of this package keeps its type and its traceback, and so
    does a fault of the machine; see :func:`.fault_of_machine`.
    """
    try:
        yield
    except Exception as error:
        raise_in_one_line(path, error)


@contextmanager
def running(path: str) -> Iterator[None]:
    """Notes the key of a part on any error that it raises, and leaves the type of the error.

    For a forward, where Composer and the plugin catch errors by their type, such as a lack of memory.
    """
    try:
        yield
    except Exception as error:
        if not hasattr(error, 'config_path'):
            error.config_path = path  # type: ignore[attr-defined]
        raise


@contextmanager
def training() -> Iterator[None]:
    """Turns errors of Composer, torch or Transformers in a run into one line, with the key of the part or ``trainer``.

    Errors from other code, such as a dataset or a callback of the user, keep their traceback.
    """
    try:
        yield
    except Exception as error:
        if not is_of_host(error):
            raise
        raise_in_one_line('trainer', error)


def is_of_host(error: Exception) -> bool:
    """Returns whether code of Composer, torch or Transformers raised an error."""
    return _package_that_raised(error) in HOSTS


def raise_in_one_line(path: str, error: Exception) -> None:
    """Raises the error as a :class:`ConfigError` of the key, or unchanged if no key of the config is to blame.

    A part inside, such as a model whose forward an algorithm calls, has noted its own key.
    """
    path = getattr(error, 'config_path', path)
    if isinstance(error, ConfigError) or _names_a_sample(error) or fault_of_machine(error):
        raise error
    if raised_here(error):
        raise PartError(path, str(error)) from error
    # If a host's package lacks a name, the import in our line fails. That is not our bug.
    if _package_that_raised(error) == 'composer_tokacc' and not isinstance(error, ImportError):
        raise error
    raise PartError(path, f'{type(error).__name__}: {error}') from error


def raised_here(error: BaseException) -> bool:
    """Returns whether a ``raise`` statement of this package raised an error, rather than a line with a bug.

    The plugin refuses with plain ValueError, TypeError and RuntimeError, as its users expect.
    """
    if _package_that_raised(error) != 'composer_tokacc':
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or '').startswith('raise ')


def _package_that_raised(error: BaseException) -> str:
    """Returns the top package of the innermost frame."""
    module = ''
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # A mode of this package stands between a model and each function of torch.
        if not frame.f_code.co_name.startswith('__torch_'):
            module = str(frame.f_globals.get('__name__'))
    # Torch raises errors of loader processes again from here: the message has the traceback of the user's dataset.
    return '' if module == 'torch._utils' else module.partition('.')[0]


def _names_a_sample(error: Exception) -> bool:
    # The class is in a room that loads torch, which this module must not do.
    return type(error).__name__ == 'BadSampleError'


def local_folder(path: str, folder: str) -> Path:
    """Returns the folder that a user names. Refuses a name that only a shell or an object store can read."""
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
    """Returns a mistake as the user reads it: one line of limited length."""
    # A worker process puts its traceback before the message.
    message = str(error).rpartition('BadSampleError: ')[2]
    return f'error: {shorten(message)}'


def shorten(text: object, limit: int = LONGEST_LINE) -> str:
    """Returns a text on one line. A long one loses its middle, because the remedy is at its end."""
    line = ' '.join(str(text).split())
    if len(line) <= limit:
        return line
    half = limit // 2
    return f'{line[:half]} ... {line[-half:]}'


def refuse(error: Exception, *, on_all_ranks: bool = False) -> int:
    """Prints a mistake in one line and returns the exit status.

    Args:
        error: The mistake.
        on_all_ranks: Every rank is certain to meet it, as it is in a config before anything is built. Then only the
            first rank of a node prints it and returns 2. The others return 0, because Composer's launcher ends all
            ranks as soon as one fails, perhaps before the first has spoken.
    """
    log.debug('The mistake was found here:', exc_info=error)
    local_rank = os.environ.get('LOCAL_RANK', '0')
    if on_all_ranks and local_rank.isdecimal() and int(local_rank) > 0:
        return 0
    print(one_line(error), file=sys.stderr, flush=True)
    return 2
