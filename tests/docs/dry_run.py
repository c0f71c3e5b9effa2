# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Dry runs of commands: the program that a command starts reads its arguments, and then stops.

A program of this package reads its YAML file with the overrides, and checks the config for the launcher's number of
ranks. Other modules read their arguments. ``make`` runs with ``--dry-run``. Extras of ``pip`` must exist. So a target,
program, file, key or value that does not exist fails.
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
from types import ModuleType
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
"""Not checked."""
EVERYWHERE = ('pytest', 'venv')
"""Modules of other packages. Their arguments are not checked."""


class _ReadSoFar(Exception):
    """The program has read its arguments."""


def dry_run(text: str) -> None:
    """Reads every command of a block, in the current folder.

    Raises:
        AssertionError, ConfigError: Something in it does not exist, or is refused.
    """
    for command in commands_of(text):
        name, *arguments = command
        if name in SHELL:
            continue
        if name not in _READERS:
            raise AssertionError(f'no dry run is known of: {" ".join(command)}')
        _READERS[name](arguments)


def commands_of(text: str) -> Iterator[list[str]]:
    """Yields the words of each command, without comments, redirections and variables of the environment."""
    for line in text.replace('\\\n', ' ').splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        is_target_of_redirection = False
        for word in words:
            is_variable = not command and re.match(r'\w+=', word)
            if word in ('>', '>>'):
                is_target_of_redirection = True
            elif is_target_of_redirection:
                is_target_of_redirection = False
            elif word in ('&&', ';', '|'):
                yield command
                command = []
            elif not is_variable:
                command.append(word)
        if command:
            yield command


def _make(targets: Sequence[str]) -> None:
    done = subprocess.run(['make', '--dry-run', *targets], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _composer(arguments: Sequence[str]) -> None:
    """Lets the launcher read its arguments, then the program that it would launch."""
    variable_of_launcher = re.compile(r'(\w+_)?(RANK|SIZE)|MASTER_\w+')
    variables = {name: value for name, value in os.environ.items() if not variable_of_launcher.fullmatch(name)}
    with mock.patch.dict(os.environ, variables, clear=True), _command_line('composer', arguments):
        options = launcher._parse_args()
    if options.module_mode:
        _module(options.training_script, options.training_script_args, num_ranks=options.world_size)
    else:
        assert Path(options.training_script).exists(), options.training_script


def _python(arguments: Sequence[str]) -> None:
    if arguments[0] == '-m':
        _module(arguments[1], arguments[2:])
    else:
        assert Path(arguments[0]).exists(), arguments[0]


def _module(name: str, arguments: Sequence[str], *, num_ranks: int = 1) -> None:
    spec = find_spec(name)
    assert spec, f'no module {name}'
    if name in EVERYWHERE or not arguments:
        return
    is_package = spec.submodule_search_locations is not None
    module = importlib.import_module(f'{name}.__main__' if is_package else name)
    if hasattr(module, 'run_program'):
        _program_with_yaml(module, arguments, num_ranks)
        return
    with _command_line(name, arguments), _stop_after_arguments():
        try:
            module.main()
        except _ReadSoFar:
            return
    raise AssertionError(f'{name} reads no arguments')


def _program_with_yaml(module: ModuleType, arguments: Sequence[str], num_ranks: int) -> None:
    """Lets a program check its config, as on a machine with a GPU, because most readers have one."""

    def check(
        _program: Any,
        path: str,
        overrides: Sequence[str],
        *,
        num_ranks: int = num_ranks,
        reads_data: bool = True,
        **_: Any,
    ) -> int:
        config = load_config(path, overrides, reads_data=reads_data)
        check_config(config, num_ranks=num_ranks, reads_data=reads_data)
        return 0

    with_gpu = mock.patch.object(torch.cuda, 'is_available', return_value=True)
    with mock.patch.object(module, 'run_program', check), with_gpu:
        assert module.main(list(arguments)) == 0, f'{module.__name__} {" ".join(arguments)}'


@contextmanager
def _command_line(name: str, arguments: Sequence[str]) -> Iterator[None]:
    with mock.patch.object(sys, 'argv', [name, *arguments]):
        try:
            yield
        except SystemExit as error:
            raise AssertionError(f'{name} does not take: {" ".join(arguments)}') from error


@contextmanager
def _stop_after_arguments() -> Iterator[None]:
    """Ends programs as soon as they have read their arguments."""
    parse_known_args = argparse.ArgumentParser.parse_known_args
    parse_args = argparse.ArgumentParser.parse_args

    def stop_after(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
            # `parse_args` calls `parse_known_args`, which must not stop before the other has checked the rest.
            with mock.patch.object(argparse.ArgumentParser, 'parse_known_args', parse_known_args):
                method(self, args, namespace)
            raise _ReadSoFar

        return read

    with (
        mock.patch.object(argparse.ArgumentParser, 'parse_known_args', stop_after(parse_known_args)),
        mock.patch.object(argparse.ArgumentParser, 'parse_args', stop_after(parse_args)),
    ):
        yield


def _pip(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument('action', choices=['install'])
    parser.add_argument('packages', nargs='*')
    parser.add_argument('-e', dest='editable', action='append', default=[])
    parser.add_argument('--overrides', action='append', default=[])
    for option in ('--target', '--python-version', '--python-platform', '--only-binary', '--no-binary'):
        parser.add_argument(option)
    for option in ('--no-deps', '--upgrade', '--system'):
        parser.add_argument(option, action='store_true')
    with _command_line('pip', arguments):
        options = parser.parse_intermixed_args(arguments)
    for file in options.overrides:
        assert Path(file).exists() or (ROOT / file).exists(), file
    for package in (*options.packages, *options.editable):
        _check_package(package)


def _check_package(package: str) -> None:
    """Asserts that the extras of this package exist. It is installed from the current folder."""
    assert not package.startswith('composer_tokacc'), f'{package} is on no index; install from a clone'
    setup = ConfigParser()
    setup.read(ROOT / 'setup.cfg')
    requirement = Requirement(re.sub(r'^\.(?=\[|$)', 'composer_tokacc', package))
    extras: set[str] = set()
    if requirement.name == setup['metadata']['name']:
        extras = set(setup['options.extras_require'])
    assert requirement.extras <= extras, package


_READERS: dict[str, Callable[[Sequence[str]], None]] = {
    'composer': _composer,
    'make': _make,
    'pip': _pip,
    'python': _python,
    'uv': lambda arguments: _pip(arguments[1:]),
}
