# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Fenced blocks of the README and the site, run page by page in the order in which they are read.

A mark in the line before a block changes that:

``<!-- after: tests/docs/names.py -->``    it leans on names that every reader has (``model``), defined there
``<!-- needs: streaming -->``              it runs where that package is
``<!-- as in: docs/quickstart.md -->``     its commands are run by that page; its YAML lines stand in that file
``<!-- dry run: needs a GPU -->``          its commands are read by the programs that they name, and go no further
``<!-- not run: ... -->``                  not even that

The reasons of the last two are those of ``REASONS``, no others.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import textwrap
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
"""A script of the examples on several ranks. On one rank it is started as typed."""
_MARK = re.compile(r'<!-- (not run|dry run|as in|after|needs): ((?:(?!-->).)+) -->\s*\Z', re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    mark: str
    """``not run``, ``dry run``, ``as in``, ``after``, ``needs``, or nothing."""
    reason: str
    """Behind the mark."""

    @property
    def launches_ranks(self) -> bool:
        """Whether a command of it is run by ranks that stay."""
        return self.runs and self.language == 'bash' and re.search(r'composer -n [2-9]', self.text) is not None

    @property
    def runs(self) -> bool:
        """Whether it is run here."""
        if self.language not in LANGUAGES or self.mark in ('not run', 'dry run', 'as in'):
            return False
        return self.mark != 'needs' or find_spec(self.reason) is not None


def blocks_of(page: str) -> list[Block]:
    content, blocks = (ROOT / page).read_text(), []
    for found in _FENCE.finditer(content):
        mark = _MARK.search(content[: found.start()])
        blocks.append(
            Block(
                language=found['language'],
                text=textwrap.dedent(found['text']),
                line=content.count('\n', 0, found.start()) + 1,
                mark=mark[1] if mark else '',
                reason=' '.join(mark[2].split()) if mark else '',
            )
        )
    return blocks


def run_page(page: str, folder: Path) -> None:
    """Runs the blocks of a page in a folder, the current one, which they share, as they share their Python names."""
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
    """Asserts that every command of a block is run by a page that it names, or its YAML lines those of the file."""
    if block.language == 'yaml':
        lines, whole = yaml.safe_load(block.text), yaml.safe_load((ROOT / block.reason).read_text())
        assert lines == {key: whole[key] for key in lines}
        return
    others = [other for page in block.reason.split() for other in blocks_of(page) if other.runs]
    run = [command for other in others for command in commands_of(other.text)]
    assert [command for command in commands_of(block.text) if command not in run] == []


def check_lines(page: str) -> None:
    """Dry runs of the commands within a page's lines, and of each ``section.key=value``, in the current folder."""
    text = _FENCE.sub('', re.sub(r'<!--.*?-->', '', (ROOT / page).read_text(), flags=re.DOTALL))
    for span in re.findall(r'`([^`]+)`', text if page != 'CHANGELOG.md' else ''):  # which names what is gone
        command = ' '.join(span.split())
        if _OVERRIDE.match(command):
            file = 'llava_streaming' if page == 'docs/streaming.md' else 'llava_json'
            command = f'python -m composer_tokacc.train yamls/{file}.yaml {command}'
        if not _COMMAND.match(command) or '...' in command or ' W ' in command:
            continue
        for file, needed in (('llava_json', 'dataset.path=data.json'), ('llava_streaming', 'dataset.local=shards')):
            if f'{file}.yaml' in command and needed.split('=')[0] not in command:
                command += f' {needed}'
        dry_run(command.replace(' run.yaml', ' yamls/digits.yaml'))


def _run_python(text: str, path: str, line: int, names: dict[str, Any]) -> None:
    # With the lines of the page, so that a traceback names them.
    exec(compile('\n' * (line - 1) + text, str(ROOT / path), 'exec'), names)


def _run_bash(block: Block, page: str, folder: Path) -> None:
    """Lines that only call a program of this package are run in this process, or by ranks that stay: fresh ones import
    for seconds.
    """
    lines = block.text.replace('\\\n', ' ').splitlines()
    for is_known, group in groupby(lines, key=lambda line: bool(_OURS.match(line) or _EXAMPLE.match(line))):
        if is_known:
            for line in group:
                _run_program(line, folder)
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


def _run_program(line: str, folder: Path) -> None:
    example = _EXAMPLE.match(line)
    if example:
        dry_run(line)  # which reads the launcher's own arguments
        module = example['script'].removesuffix('.py').replace('/', '.')
        arguments = shlex.split(example['arguments'], comments=True)
        launch_program(module, *arguments, ranks=int(example['ranks']), folder=folder)
        return
    found = _OURS.match(line)
    assert found
    module, arguments = found['module'], shlex.split(found['arguments'], comments=True)
    if found['ranks'] in (None, '1'):
        assert importlib.import_module(module).main(arguments) == 0, line
        return
    dry_run(line)  # which reads the launcher's own arguments
    launch_program(module, *arguments, ranks=int(found['ranks']), folder=folder)


def _check_yaml(block: Block, folder: Path) -> None:
    """A part of a run's file is laid over one that is whole, and held to what the programs take."""
    given = yaml.safe_load(block.text)
    file, data = ('llava_json', 'dataset.path=data.json')
    if block.reason == 'streaming':
        file, data = ('llava_streaming', 'dataset.local=null')
    whole = OmegaConf.load(ROOT / 'yamls' / f'{file}.yaml')
    if 'size' in given.get('microbatching', {}):  # short for a name that the whole file has
        del whole['microbatching']['device_train_microbatch_size']
    whole = OmegaConf.merge(whole, OmegaConf.create(given))
    path = folder / 'snippet.yaml'
    OmegaConf.save(whole, path)
    with mock.patch.object(torch.cuda, 'is_available', return_value=True):  # pages speak to those who have a GPU
        check_config(load_config(path, [data]), num_ranks=1)
