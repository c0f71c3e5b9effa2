# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Fenced blocks of the README and the site, run page by page in the order in which they are read.

A block that cannot run says why in the line before it, ``<!-- not run: it needs a GPU -->``. One that leans on names
that every reader has (``model``, ``train_dataloader``) names what defines them here,
``<!-- after: tests/docs/names.py -->``. One that needs a package which is not in every environment runs where that is,
``<!-- needs: streaming -->``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from omegaconf import OmegaConf

from composer_tokacc.programs import load_config
from composer_tokacc.programs.run import check_config
from tests.support.launch import ROOT, environment

__all__ = ['LANGUAGES', 'PAGES', 'Block', 'blocks_of', 'run_page']

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob('*.md'), *ROOT.glob('docs/**/*.md'), *ROOT.glob('composer_tokacc/*/*.md'),
                 *ROOT.glob('examples/*/*.md'))
    if '_build' not in path.parts
)  # fmt: skip
LANGUAGES = ('python', 'bash', 'yaml')
_FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$', re.DOTALL | re.MULTILINE
)
_MARK = re.compile(r'<!-- (not run|after|needs): ((?:(?!-->).)+) -->\s*\Z', re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    line: int
    mark: str
    """``not run``, ``after``, ``needs``, or nothing."""
    reason: str
    """Behind the mark."""

    @property
    def runs(self) -> bool:
        """Whether it is run here."""
        if self.language not in LANGUAGES or self.mark == 'not run':
            return False
        return self.mark != 'needs' or find_spec(self.reason) is not None


def blocks_of(page: str) -> list[Block]:
    """Every fenced block of a page, in order."""
    content, blocks = (ROOT / page).read_text(), []
    for found in _FENCE.finditer(content):
        mark = _MARK.search(content[: found.start()])
        blocks.append(Block(
            language=found['language'], text=textwrap.dedent(found['text']),
            line=content.count('\n', 0, found.start()) + 1,
            mark=mark[1] if mark else '', reason=' '.join(mark[2].split()) if mark else '',
        ))  # fmt: skip
    return blocks


def run_page(page: str, folder: Path) -> None:
    """Runs the blocks of a page in a folder, which they share, as they share their Python names."""
    names: dict[str, Any] = {'__name__': 'snippets'}
    for block in blocks_of(page):
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


def _run_python(text: str, path: str, line: int, names: dict[str, Any]) -> None:
    # With the lines of the page, so that a traceback names them.
    exec(compile('\n' * (line - 1) + text, str(ROOT / path), 'exec'), names)


def _run_bash(block: Block, page: str, folder: Path) -> None:
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    done = subprocess.run(
        ['bash', '-euo', 'pipefail', '-c', block.text], cwd=folder, env={**environment(), 'PATH': path},
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    told = f'{page}, line {block.line}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}'
    assert done.returncode == 0, told


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
