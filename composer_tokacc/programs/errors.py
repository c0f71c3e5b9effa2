# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Mistakes of the user's in one line, in the words of the YAML file. Loads nothing of the hosts."""

from __future__ import annotations

import difflib
import dis
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class ConfigError(ValueError):
    """A mistake of the user's, said in one line; the programs print it without a traceback and end with status 2."""


@contextmanager
def must(
    requirement: str, got: Any, *kinds: type[BaseException], remedy: str = '', raises: type[ValueError] = ConfigError
) -> Iterator[None]:
    """Puts what a host raises against a value into our words: the requirement, the value, what the host says.

    With ``raises=ValueError`` the requirement names an argument by its own name, for :func:`in_words_of`.
    """
    try:
        yield
    except kinds as error:
        said = words_of(error)
        shown = said if got is None else f'{got} ({said})'
        raise raises(f'{requirement}, got: {shown}{remedy}') from error


@contextmanager
def in_words_of(config: Any) -> Iterator[None]:
    """Makes a :class:`ConfigError` of what the owner of an argument says against its value in a config, a dataclass.

    Only of a plain ValueError, TypeError or RuntimeError that this package raises: those of torch, Transformers or
    Streaming, and faults of the program, keep their type and their traceback. An argument gets its path: ``freeze``
    becomes ``model.freeze``.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        if type(error) not in (ValueError, TypeError, RuntimeError) or not raised_here(error):
            raise
        message = ' '.join(str(error).split())
        if named := re.match(r'`(\w+)', message):
            places = dict(_places_of(named[1], asdict(config)))
            # Two sections may have the key: the message says which value it was.
            said = (path for path, value in places.items() if value is not None and str(value) in message)
            path = next(said, next(iter(places), named[1]))
            message = f'`{path}{message[named.end() :]}'
        raise ConfigError(message) from error


def _places_of(name: str, section: Mapping[str, Any], path: str = '') -> Iterator[tuple[str, Any]]:
    """Gives path and value of every key of that name."""
    for key, value in section.items():
        if key == name:
            yield f'{path}{key}', value
        elif isinstance(value, Mapping):
            yield from _places_of(name, value, f'{path}{key}.')


def raised_here(error: BaseException) -> bool:
    """Returns whether a ``raise`` of this package raised an error, rather than a host or a fault in a line of ours."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not str(last.tb_frame.f_globals.get('__name__')).startswith('composer_tokacc.'):
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == 'RAISE_VARARGS'


def words_of(error: BaseException) -> str:
    """Returns what an error says in one line, behind its kind where it says one word or nothing, as a KeyError does."""
    said = ' '.join(str(error).split())
    return said if ' ' in said else f'{type(error).__name__} {said}'.rstrip()


@contextmanager
def taken_by(what: str, *, of: str) -> Iterator[None]:
    """Makes a :class:`ConfigError` of what code of others raises against its arguments; ``of`` names their sections."""
    try:
        yield
    except (ValueError, TypeError, ArithmeticError, FileNotFoundError) as error:
        if raised_here(error):
            raise
        raise ConfigError(f'{of} must be what {what} takes, got: {words_of(error)}') from error


def local_folder(what: str, folder: str) -> Path:
    """Returns the path of a folder that a user names; refuses what only a shell or a store of objects can read."""
    if folder.startswith('~') or '://' in folder:
        raise ConfigError(f'{what} must be written out, got: {folder}, which would be a folder of that name')
    return Path(folder)


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Returns one line that refuses ``name`` and suggests the nearest of ``known``."""
    known = sorted(set(known))
    nearest = difflib.get_close_matches(name, known, n=1)
    listed = ', '.join(known[:40]) + (', ...' if len(known) > 40 else '')
    hint = f'Did you mean {nearest[0]}?' if nearest else f'Known: {listed}'
    return f'{what} must be a known name, got: {name}. {hint}'


def one_line(error: Exception | str) -> str:
    """Returns what the user reads of a mistake."""
    # From a worker process the message comes behind the worker's traceback.
    message = str(error).rpartition('BadSampleError: ')[2]
    return f'error: {" ".join(message.split())}'


def refuse(error: Exception, *, on_all_ranks: bool = False) -> int:
    """Prints a mistake in one line and returns the exit status: 2, or 0 for a rank that another one speaks for.

    ``on_all_ranks``: every rank meets it for certain, as in a config before anything is built. The first of a node then
    speaks for the others, which end as if all were well: Composer's launcher ends all ranks for one that fails, perhaps
    before it has spoken, and prints what each of them wrote.
    """
    log.debug('The mistake was found here:', exc_info=error)
    rank = os.environ.get('LOCAL_RANK', '0')
    if on_all_ranks and rank.isdecimal() and int(rank) > 0:
        return 0
    print(one_line(error), file=sys.stderr, flush=True)
    return 2
