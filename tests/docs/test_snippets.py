# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What README and docs say to type works, or is marked with the reason why it is not run."""

from __future__ import annotations

import re

import pytest

from composer_tokacc.programs import ConfigError
from tests.docs.dry_run import dry_run
from tests.docs.snippets import LANGUAGES, PAGES, REASONS, blocks_of, check_as_in, check_lines, run_page
from tests.support.launch import ROOT

# These lie where commands are typed: in a checkout, or where `python -m composer_tokacc.examples` has put them.
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
RANKS = pytest.mark.xdist_group('ranks')
SHIPPED = ('yamls', 'examples', 'overrides.txt')


def _cases():
    for page in PAGES:
        blocks = [block for block in blocks_of(page) if block.runs or block.mark == 'dry run']
        if blocks:
            slow = any(block.runs and block.language == 'bash' for block in blocks)
            marks = [*SLOW] if slow else []
            if any(block.launches_ranks for block in blocks):
                marks.append(RANKS)
            yield pytest.param(page, marks=marks)


@pytest.mark.parametrize('page', _cases())
def test_page_runs(page, tmp_path, monkeypatch):
    if page != 'docs/quickstart.md':  # which begins in an empty folder
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
        known = block.language in (*LANGUAGES, 'text') or block.language.startswith('{')
        assert known, f'{page}, line {block.line}: ```{block.language}; commands and code run, output is ```text'
        if block.mark in REASONS:
            allowed = REASONS[block.mark]
            assert block.reason in allowed, f'{page}, line {block.line}: {block.reason}; allowed: {allowed}'
        if block.mark == 'as in':
            check_as_in(block)


@pytest.mark.parametrize(
    ('line', 'said'),
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
def test_dry_run_finds_what_is_missing(line, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((AssertionError, ConfigError, ValueError), match=re.escape(said)):
        dry_run(line)


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r'^( *)```.*?^\1```$', '', (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r'\]\((?!https?:)([^)\s]+)\)', text):
        name, _, anchor = target.partition('#')
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f'{page}: {target}'
        if anchor and path.suffix == '.md':
            included = re.search(r'```\{include\} (\S+)', path.read_text())
            whole = (path.parent / included[1]).read_text() if included else path.read_text()
            assert anchor in _anchors(whole), f'{page}: {target}'


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
    """Of headings, as GitHub and MyST make them."""
    headings = re.findall(r'^#+ (.+)$', text, re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


def test_anchors_of_error_messages_exist():
    for path in (ROOT / 'composer_tokacc').rglob('*.py'):
        for page, anchor in re.findall(r'(docs/[\w/]+\.md)(?:#([\w-]+))?', path.read_text()):
            assert (ROOT / page).exists(), f'{path}: {page}'
            assert not anchor or anchor in _anchors((ROOT / page).read_text()), f'{path}: {page}#{anchor}'


def test_llm_foundry_page_matches_its_target():
    """None of them runs here: its environment takes seven gigabytes."""
    target = (ROOT / 'Makefile').read_text().replace('$(VENV_FOUNDRY)/bin/', '')
    blocks = blocks_of('examples/llm_foundry/README.md')
    commands = [
        re.sub(r'\s+#.*', '', line) for one in blocks if one.language == 'bash' for line in one.text.splitlines()
    ]
    assert commands[0] == 'make example-llm-foundry'
    assert len(commands) == 4
    assert [command for command in commands[1:] if f'\t{command}\n' not in target] == []
