# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Mistakes of the user's: their class, and their words in those of the YAML file."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ['ConfigError', 'refuse', 'section', 'unknown_name']

log = logging.getLogger(__name__)


class ConfigError(ValueError):
    """A mistake of the user's, said in one line; the programs print it without a traceback and end with status 2."""


@contextmanager
def section(path: str, names: Iterable[str] = ()) -> Iterator[None]:
    """Makes a :class:`ConfigError` of what the owner of an argument says against its value.

    Only of a plain ValueError that this package raises: those of torch, Transformers or Streaming, and faults of the
    program, keep their type and their traceback.

    Args:
        path: Section of the YAML file, put before the argument's name: ``dataset`` makes ``path`` ``dataset.path``.
        names: Arguments that are keys of the section under the same name.
    """
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError or not _raised_here(error):
            raise
        message = ' '.join(str(error).split())
        named = next((name for name in names if message.startswith(f'`{name}`')), None)
        if named is not None:
            message = f'`{path}.{named}`{message.removeprefix(f"`{named}`")}'
        elif not message.startswith((f'`{path}`', f'`{path}.')):
            message = f'`{path}`: {message}'
        raise ConfigError(message) from error


def refuse(error: Exception, *, on_all_ranks: bool = False) -> int:
    """Says a mistake in one line; the chain of its causes is logged as debug.

    Args:
        error: The mistake.
        on_all_ranks: Whether every rank meets it for certain, as in a config before anything is built. The first rank
            of a node then speaks for the others, which end as if all were well: for every rank that fails, Composer's
            launcher ends the others, perhaps before they have spoken, and prints all that it wrote.

    Returns:
        The exit status: 2, or 0 for a rank that another one speaks for.
    """
    log.debug('The mistake was found here:', exc_info=error)
    if on_all_ranks and int(os.environ.get('LOCAL_RANK', '0')) > 0:
        return 0
    # From a worker process the message comes behind the worker's traceback.
    message = str(error).rpartition('BadSampleError: ')[2]
    print(f'error: {" ".join(message.split())}', file=sys.stderr, flush=True)
    return 2


def _raised_here(error: BaseException) -> bool:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and str(last.tb_frame.f_globals.get('__name__')).startswith('composer_tokacc.')


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """One line that refuses ``name`` and suggests the nearest of ``known``."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    listed = ', '.join(known) if len(known) <= 40 else f'{", ".join(known[:40])}, ...'
    return f'{what} must be a known name, got: {name}. ' + (
        f'Did you mean {nearest[0]}?' if nearest else f'Known: {listed}'
    )
