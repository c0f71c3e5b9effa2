# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Commands as far as they go without work: each is read by what would run it, and no further.

A program of this package reads its YAML file with the overrides and checks the config for as many ranks as the launcher
is told; other modules read their arguments; ``make`` says what it would do; extras asked of ``pip`` must exist.
So a target, program, file, key or value that does not exist fails.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from configparser import ConfigParser
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from composer.cli import launcher
from packaging.requirements import Requirement

from composer_tokacc.programs import load_config
from composer_tokacc.programs.config_checks import check_config
from tests.support.launch import ROOT

__all__ = ['commands_of', 'dry_run']

SHELL = ('printf', 'source')
"""Too short to be wrong."""
EVERYWHERE = ('pytest', 'venv')
"""Modules of others, whose arguments are theirs."""


class _ReadSoFar(Exception):
    """The program has read its arguments."""


def dry_run(text: str) -> None:
    """Reads every command of a block, in the current folder.

    Raises:
        AssertionError, ConfigError: Something in it does not exist, or is not taken.
    """
    for command in commands_of(text):
        name, *arguments = command
        if name in SHELL:
            continue
        if name not in _READERS:
            raise AssertionError(f'no dry run is known of: {" ".join(command)}')
        _READERS[name](arguments)


def commands_of(text: str) -> Iterator[list[str]]:
    """Words of each command; comments and redirections are left out."""
    for line in text.replace('\\\n', ' ').splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        kept = iter(words)
        for word in kept:
            if word in ('>', '>>'):
                next(kept)
            elif word in ('&&', ';', '|'):
                yield command
                command = []
            elif command or not re.match(r'\w+=', word):  # not a variable of the environment
                command.append(word)
        if command:
            yield command


def _make(targets: Sequence[str]) -> None:
    done = subprocess.run(['make', '--dry-run', *targets], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _composer(arguments: Sequence[str]) -> None:
    """Read by the launcher, then by what it would launch on so many ranks."""
    ours = re.compile(r'(\w+_)?(RANK|SIZE)|MASTER_\w+')
    alone = {name: value for name, value in os.environ.items() if not ours.fullmatch(name)}
    with mock.patch.dict(os.environ, alone, clear=True), _command_line('composer', arguments):
        given = launcher._parse_args()
    if not given.module_mode:
        assert Path(given.training_script).exists(), given.training_script
        return
    _module(given.training_script, given.training_script_args, num_ranks=given.world_size)


def _python(arguments: Sequence[str]) -> None:
    if arguments[0] == '-m':
        _module(arguments[1], arguments[2:])
    else:
        assert Path(arguments[0]).exists(), arguments[0]


def _module(name: str, arguments: Sequence[str], *, num_ranks: int = 1) -> None:
    found = find_spec(name)
    assert found, f'no module {name}'
    if name in EVERYWHERE or not arguments:
        return
    module = importlib.import_module(f'{name}.__main__' if found.submodule_search_locations else name)
    if hasattr(module, 'run_program'):  # the programs on a YAML file

        def check(_program: Any, path: str, overrides: Sequence[str], *, num_ranks: int = num_ranks, **_: Any) -> int:
            check_config(load_config(path, overrides), num_ranks=num_ranks)
            return 0

        # Pages speak to those who have a GPU.
        gpu = mock.patch.object(torch.cuda, 'is_available', return_value=True)
        with mock.patch.object(module, 'run_program', check), gpu:
            assert module.main(list(arguments)) == 0, f'{name} {" ".join(arguments)}'
        return
    with _command_line(name, arguments), _arguments_alone():
        try:
            module.main()
        except _ReadSoFar:
            return
    raise AssertionError(f'{name} reads no arguments')


@contextmanager
def _command_line(name: str, arguments: Sequence[str]) -> Iterator[None]:
    with mock.patch.object(sys, 'argv', [name, *arguments]):
        try:
            yield
        except SystemExit as error:
            raise AssertionError(f'{name} does not take: {" ".join(arguments)}') from error


@contextmanager
def _arguments_alone() -> Iterator[None]:
    """Programs end where they have read their arguments."""

    def ends(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
            with mock.patch.object(argparse.ArgumentParser, 'parse_known_args', known):
                method(self, args, namespace)
            raise _ReadSoFar

        return read

    known, whole = argparse.ArgumentParser.parse_known_args, argparse.ArgumentParser.parse_args
    with (
        mock.patch.object(argparse.ArgumentParser, 'parse_known_args', ends(known)),
        mock.patch.object(argparse.ArgumentParser, 'parse_args', ends(whole)),
    ):
        yield


def _pip(arguments: Sequence[str]) -> None:
    action, *given = arguments
    assert action == 'install', action
    setup = ConfigParser()
    setup.read(ROOT / 'setup.cfg')
    given = iter(given)
    for one in given:
        if one == '--overrides':
            file = next(given)
            assert Path(file).exists() or (ROOT / file).exists(), file
        elif one in ('--target', '--python-version', '--python-platform', '--only-binary'):
            next(given)
        elif one not in ('-e', '--no-deps', '--upgrade', '--system'):
            assert not one.startswith('composer_tokacc'), f'{one} is on no index; install from a clone'
            wanted = Requirement(re.sub(r'^\.(?=\[|$)', 'composer_tokacc', one))
            extras = setup['options.extras_require'] if wanted.name == setup['metadata']['name'] else ()
            assert wanted.extras <= set(extras), one


_READERS: dict[str, Callable[[Sequence[str]], None]] = {
    'composer': _composer,
    'make': _make,
    'pip': _pip,
    'python': _python,
    'uv': lambda arguments: _pip(arguments[1:]),
}
