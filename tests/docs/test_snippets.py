# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Commands and code of README and docs work, or say why they are not run. Links and anchors exist."""

from __future__ import annotations

import re

import pytest

from composer_tokacc.programs import ConfigError
from tests.docs.dry_run import dry_run
from tests.docs.snippets import LANGUAGES, PAGES, REASONS, blocks_of, check_as_in, check_lines, run_page
from tests.support.launch import ROOT

SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
SHIPPED = ('yamls', 'examples', 'overrides.txt')
"""Files in the current folder of a reader: a checkout, or the folder of ``python -m composer_tokacc.examples``."""


def _pages_that_run():
    for page in PAGES:
        blocks = [block for block in blocks_of(page) if block.runs or block.mark == 'dry run']
        if not blocks:
            continue
        has_commands = any(block.runs and block.language == 'bash' for block in blocks)
        marks = SLOW if has_commands else []
        yield pytest.param(page, marks=marks)


@pytest.mark.parametrize('page', _pages_that_run())
def test_page_runs(page, tmp_path, monkeypatch):
    if page != 'docs/quickstart.md':  # its reader begins in an empty folder
        for name in SHIPPED:
            (tmp_path / name).symlink_to(ROOT / name)
    if page == 'CONTRIBUTING.md':
        (tmp_path / 'tests').mkdir()
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path)
    for path in tmp_path.glob('tests/*'):
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path


@pytest.mark.parametrize('page', PAGES)
def test_blocks_run_or_say_why_not(page):
    for block in blocks_of(page):
        place = f'{page}, line {block.line}'
        is_directive = block.language.startswith('{')
        assert is_directive or block.language in (*LANGUAGES, 'text'), f'{place}: output is marked as ```text'
        if block.mark in REASONS:
            assert block.reason in REASONS[block.mark], place
        if block.mark == 'as in':
            check_as_in(block)


@pytest.mark.parametrize(
    ('command', 'problem'),
    [
        ('make dmo', "'dmo'"),
        ('composer -n 2 -m composer_tokacc.trian yamls/digits.yaml', 'composer_tokacc.trian'),
        ('composer -n 2 -m composer_tokacc.train yamls/digit.yaml', 'yamls/digit.yaml'),
        ('composer -n 2 -m composer_tokacc.train yamls/digits.yaml optimiser.lr=1', 'optimiser'),
        ('composer -n 3 -m composer_tokacc.train yamls/digits.yaml', 'got: 64 on 3 ranks'),
        ('composer -n 8 --world_size 16 --node_rank 2 -m composer_tokacc.train yamls/digits.yaml', 'world_size'),
        ('python -m composer_tokacc.size yamls/digits.yaml num_rank=8', 'num_rank'),
        ('python -m benchmarks.gpu --lenghts DIR', 'benchmarks.gpu does not take: --lenghts DIR'),
        ("pip install '.[lara]'", 'lara'),
        ('pip install composer_tokacc', 'on no index'),
        ('uv pip install --overrides override.txt -e .', 'override.txt'),
        ('conda install composer_tokacc', 'no dry run is known'),
    ],
)
def test_dry_run_finds_mistakes(command, problem, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((AssertionError, ConfigError, ValueError), match=re.escape(problem)):
        dry_run(command)


@pytest.mark.parametrize('page', PAGES)
def test_targets_of_links_exist(page):
    text = (ROOT / page).read_text()
    text_without_blocks = re.sub(r'^( *)```.*?^\1```$', '', text, flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r'\]\((?!https?:)([^)\s]+)\)', text_without_blocks):
        name, _, anchor = target.partition('#')
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f'{page}: {target}'
        if anchor and path.suffix == '.md':
            linked_text = path.read_text()
            included = re.search(r'```\{include\} (\S+)', linked_text)
            if included:
                linked_text = (path.parent / included[1]).read_text()
            assert anchor in _anchors(linked_text), f'{page}: {target}'


@pytest.mark.parametrize('page', PAGES)
def test_commands_in_lines_exist(page, monkeypatch):
    if page == 'docs/streaming.md':
        pytest.importorskip('streaming')
    monkeypatch.chdir(ROOT)
    check_lines(page)


@pytest.mark.parametrize('file', sorted(path.name for path in ROOT.glob('yamls/*.yaml')))
def test_commands_of_yaml_files_are_accepted(file, monkeypatch):
    if file == 'llava_streaming.yaml':
        pytest.importorskip('streaming')
    monkeypatch.chdir(ROOT)
    lines = (ROOT / 'yamls' / file).read_text().splitlines()
    text = '\n'.join(line.removeprefix('#') for line in lines if line.startswith('#'))
    commands = re.findall(r'^ +(composer (?:[^\n\\\[]|\\\n)+)', text, re.MULTILINE)
    assert commands
    for command in commands:
        dry_run(command)


def _anchors(text: str) -> set[str]:
    """Returns the anchors of headings, as GitHub and MyST make them."""
    anchors = set()
    for heading in re.findall(r'^#+ (.+)$', text, re.MULTILINE):
        words = re.sub(r'[^\w\- ]', '', heading.lower())
        anchors.add(words.replace(' ', '-'))
    return anchors


def test_anchors_of_error_messages_exist():
    for path in (ROOT / 'composer_tokacc').rglob('*.py'):
        for page, anchor in re.findall(r'(docs/[\w/]+\.md)(?:#([\w-]+))?', path.read_text()):
            assert (ROOT / page).exists(), f'{path}: {page}'
            if anchor:
                text = (ROOT / page).read_text()
                assert anchor in _anchors(text), f'{path}: {page}#{anchor}'


def test_llm_foundry_page_matches_its_target():
    """These commands are not run, because their environment takes seven gigabytes."""
    target = (ROOT / 'Makefile').read_text().replace('$(VENV_FOUNDRY)/bin/', '')
    commands = []
    for block in blocks_of('examples/llm_foundry/README.md'):
        if block.language == 'bash':
            commands += [re.sub(r'\s+#.*', '', line) for line in block.text.splitlines()]
    assert commands[0] == 'make example-llm-foundry'
    assert len(commands) == 4
    for command in commands[1:]:
        assert f'\t{command}\n' in target
