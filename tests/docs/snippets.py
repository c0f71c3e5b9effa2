# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Fenced blocks of the README and the site. The blocks of a page run one after the other.

A comment in the line before a block changes that:

``<!-- after: tests/docs/names.py -->``    runs that file before, for names that a reader has already (``model``)
``<!-- needs: streaming -->``              runs only if that package is installed
``<!-- as in: docs/quickstart.md -->``     does not run: that page has its commands, or that file has its YAML lines
``<!-- dry run: needs a GPU -->``          the programs of its commands read their arguments and stop
``<!-- not run: ... -->``                  nothing is checked

``REASONS`` lists the reasons that the last two may give.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from omegaconf import OmegaConf

from composer_tokacc.programs import TrainConfig, load_config
from composer_tokacc.programs.config_checks import check_config
from tests.docs.dry_run import commands_of, dry_run
from tests.support.launch import ROOT, environment, launch_program
from tests.support.loaded import run_loaded

__all__ = ['LANGUAGES', 'PAGES', 'REASONS', 'Block', 'blocks_of', 'check_as_in', 'check_lines', 'run_page']

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *ROOT.glob('*.md'),
        *ROOT.glob('docs/**/*.md'),
        *ROOT.glob('composer_tokacc/*/*.md'),
        *ROOT.glob('examples/*/*.md'),
    )
    if '_build' not in path.parts
)
LANGUAGES = ('python', 'bash', 'yaml')
_FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$', re.DOTALL | re.MULTILINE
)
REASONS = {
    'dry run': ('needs a GPU', 'needs a checkpoint of the hub', 'installs', 'takes minutes'),
    'not run': ('llm-foundry takes seven gigabytes', 'another environment'),
}
_COMMAND = re.compile(r'(\w+=\w+ )?(python -m|composer -n|make|pip|uv) \S')
_OVERRIDE = re.compile(rf'({"|".join(field.name for field in fields(TrainConfig))})\.[\w.]+=\S')
_OURS = re.compile(
    r'(?:python|composer -n (?P<ranks>\d)) -m (?P<module>composer_tokacc\.[\w.]+)(?P<arguments>[^>|&;$]*)$'
)
_EXAMPLE = re.compile(r'composer -n (?P<ranks>\d) (?P<script>examples/\w+\.py)(?P<arguments>[^>|&;$]*)$')
"""A script of the examples on several ranks."""
_PYTHON = re.compile(r'python (?P<arguments>[^>|&;$]+?)(?: > (?P<output>\S+))?$')
_MARK = re.compile(r'<!-- (not run|dry run|as in|after|needs): ((?:(?!-->).)+) -->\s*\Z', re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    mark: str
    """``not run``, ``dry run``, ``as in``, ``after``, ``needs``, or nothing."""
    reason: str
    """The text behind the mark."""

    @property
    def runs(self) -> bool:
        """Whether it is run here."""
        if self.language not in LANGUAGES or self.mark in ('not run', 'dry run', 'as in'):
            return False
        return self.mark != 'needs' or find_spec(self.reason) is not None


def blocks_of(page: str) -> list[Block]:
    content = (ROOT / page).read_text()
    blocks = []
    for fence in _FENCE.finditer(content):
        mark = _MARK.search(content[: fence.start()])
        blocks.append(
            Block(
                language=fence['language'],
                text=textwrap.dedent(fence['text']),
                line=content.count('\n', 0, fence.start()) + 1,
                mark=mark[1] if mark else '',
                reason=' '.join(mark[2].split()) if mark else '',
            )
        )
    return blocks


def run_page(page: str, folder: Path) -> None:
    """Runs the blocks of a page. They share the folder, which must be the current one, and their Python names."""
    names: dict[str, Any] = {'__name__': 'snippets'}
    for block in blocks_of(page):
        if block.mark == 'dry run':
            dry_run(block.text)
        if not block.runs:
            continue
        if block.mark == 'after':
            _run_python((ROOT / block.reason).read_text(), block.reason, 1, names)
        if block.language == 'python':
            _run_python(block.text, page, block.line + 1, names)
        elif block.language == 'bash':
            _run_bash(block, page, folder)
        else:
            _check_yaml(block, folder)


def check_as_in(block: Block) -> None:
    """Asserts that the named file has the block's YAML lines, or that the named pages run all of its commands."""
    if block.language == 'yaml':
        sections = yaml.safe_load(block.text)
        file = yaml.safe_load((ROOT / block.reason).read_text())
        assert sections == {key: file[key] for key in sections}
        return
    commands_run = []
    for page in block.reason.split():
        for other in blocks_of(page):
            if other.runs:
                commands_run += commands_of(other.text)
    for command in commands_of(block.text):
        assert command in commands_run


def check_lines(page: str) -> None:
    """Dry-runs the commands within a page's sentences, and each ``section.key=value``, in the current folder."""
    if page == 'CHANGELOG.md':  # it names commands that are gone
        return
    text = re.sub(r'<!--.*?-->', '', (ROOT / page).read_text(), flags=re.DOTALL)
    for span in re.findall(r'`([^`]+)`', _FENCE.sub('', text)):
        command = ' '.join(span.split())
        if _OVERRIDE.match(command):
            file = 'llava_streaming' if page == 'docs/streaming.md' else 'llava_json'
            command = f'python -m composer_tokacc.train yamls/{file}.yaml {command}'
        has_placeholder = '...' in command or ' W ' in command
        if not _COMMAND.match(command) or has_placeholder:
            continue
        if 'llava_json.yaml' in command and 'dataset.path' not in command:
            command += ' dataset.path=data.json'
        if 'llava_streaming.yaml' in command and 'dataset.local' not in command:
            command += ' dataset.local=shards'
        dry_run(command.replace(' run.yaml', ' yamls/digits.yaml'))


def _run_python(text: str, path: str, line: int, names: dict[str, Any]) -> None:
    # Empty lines before the text let a traceback name the lines of the page.
    exec(compile('\n' * (line - 1) + text, str(ROOT / path), 'exec'), names)


def _run_bash(block: Block, page: str, folder: Path) -> None:
    """Runs lines with a program of this package in this process or by standing ranks, and the others by bash.

    Python is started with torch loaded, which a fresh process would import for seconds.
    """
    lines = block.text.replace('\\\n', ' ').splitlines()
    for runner, group in groupby(lines, key=_runner_of):
        if runner is not None:
            for line in group:
                runner(line, folder)
            continue
        path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
        done = subprocess.run(
            ['bash', '-euo', 'pipefail', '-c', '\n'.join(group)],
            cwd=folder,
            env={**environment(), 'PATH': path},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, f'{page}, line {block.line}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}'


def _runner_of(line: str) -> Callable[[str, Path], None] | None:
    """Returns the function that runs a line in a folder. None: bash runs it."""
    if _OURS.match(line) or _EXAMPLE.match(line):
        return _run_program
    if _PYTHON.match(line):
        return _run_python_command
    return None


def _run_python_command(line: str, folder: Path) -> None:
    command = _PYTHON.match(line)
    assert command
    arguments = shlex.split(command['arguments'], comments=True)
    done = run_loaded(arguments, folder=folder, environment=environment())
    assert done.returncode == 0, f'{line}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}'
    if command['output']:
        (folder / command['output']).write_text(done.stdout)


def _run_program(line: str, folder: Path) -> None:
    command = _OURS.match(line) or _EXAMPLE.match(line)
    assert command
    arguments = shlex.split(command['arguments'], comments=True)
    if 'script' in command.groupdict():
        module = command['script'].removesuffix('.py').replace('/', '.')
    else:
        module = command['module']
        if command['ranks'] in (None, '1'):
            assert importlib.import_module(module).main(arguments) == 0, line
            return
    dry_run(line)  # checks the launcher's own arguments, which standing ranks do not read
    launch_program(module, *arguments, ranks=int(command['ranks']), folder=folder)


def _check_yaml(block: Block, folder: Path) -> None:
    """Lays the block over a complete YAML file, which the programs must accept."""
    sections = yaml.safe_load(block.text)
    file, data = ('llava_json', 'dataset.path=data.json')
    if block.reason == 'streaming':
        file, data = ('llava_streaming', 'dataset.local=null')
    config = OmegaConf.load(ROOT / 'yamls' / f'{file}.yaml')
    if 'size' in sections.get('microbatching', {}):  # short for a name that the complete file has
        del config['microbatching']['device_train_microbatch_size']
    path = folder / 'snippet.yaml'
    OmegaConf.save(OmegaConf.merge(config, OmegaConf.create(sections)), path)
    with mock.patch.object(torch.cuda, 'is_available', return_value=True):  # most readers have a GPU
        check_config(load_config(path, [data]), num_ranks=1)
