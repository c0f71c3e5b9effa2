# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What README and docs say to type works, or is marked with the reason why it is not run."""

from __future__ import annotations

import re

import pytest

from composer_tokacc.programs import ConfigError
from tests.docs import snippets
from tests.docs.dry_run import commands_of, dry_run
from tests.docs.snippets import LANGUAGES, PAGES, REASONS, blocks_of, check_as_in, check_lines, run_page
from tests.support.launch import ROOT

# These lie where commands are typed: in a checkout, or where `python -m composer_tokacc.examples` has put them.
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.xdist_group('ranks')]
SHIPPED = ('yamls', 'examples', 'overrides.txt')


def _cases():
    for page in PAGES:
        blocks = [block for block in blocks_of(page) if block.runs or block.mark == 'dry run']
        if blocks:
            slow = any(block.runs and block.language == 'bash' for block in blocks)
            yield pytest.param(page, marks=SLOW if slow else [])


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
def test_every_block_has_a_known_language_and_runs_or_says_why_not(page):
    for block in blocks_of(page):
        known = block.language in (*LANGUAGES, 'text') or block.language.startswith('{')
        assert known, f'{page}, line {block.line}: ```{block.language}; commands and code run, output is ```text'
        if block.mark in REASONS:
            allowed = REASONS[block.mark]
            assert block.reason in allowed, f'{page}, line {block.line}: {block.reason}; allowed: {allowed}'
        if block.mark == 'as in':
            check_as_in(block)


def test_a_block_has_the_mark_in_the_line_before_it_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(snippets, 'ROOT', tmp_path)
    marks = ['<!-- not run: it needs a GPU -->\n', '<!-- after: names.py -->\n', 'Text.\n', '<!-- needs: no_such -->\n']
    (tmp_path / 'page.md').write_text('\n'.join(f'{mark}```python\n1\n```\n' for mark in marks))
    found = blocks_of('page.md')
    assert [(block.mark, block.reason) for block in found] == [
        ('not run', 'it needs a GPU'), ('after', 'names.py'), ('', ''), ('needs', 'no_such'),
    ]  # fmt: skip
    assert [block.runs for block in found] == [False, True, True, False]


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
        ("pip install 'composer_tokacc[lara]'", 'lara'),
        ('uv pip install --overrides override.txt -e .', 'override.txt'),
        ('conda install composer_tokacc', 'no dry run is known'),
    ],
)  # fmt: skip
def test_a_dry_run_finds_what_does_not_exist(line, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((AssertionError, ConfigError, ValueError), match=re.escape(said)):
        dry_run(line)


def test_commands_are_split_as_a_shell_would():
    text = "a -x 'b c' > file  # said\nOMP=1 d && e \\\n  f=g  # h\n"
    assert list(commands_of(text)) == [['a', '-x', 'b c'], ['d'], ['e', 'f=g']]


def test_a_block_that_stands_elsewhere_is_held_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(snippets, 'ROOT', tmp_path)
    for page, first, second in (('other', '', 'dry run: installs'), ('page', 'as in: other.md', 'as in: other.md')):
        text = f'<!-- {first} -->\n```bash\necho a  # first\n```\n<!-- {second} -->\n```bash\necho b\n```\n'
        (tmp_path / f'{page}.md').write_text(text)
    first, second = blocks_of('page.md')
    check_as_in(first)
    with pytest.raises(AssertionError):  # which is not run there
        check_as_in(second)


def test_a_part_of_a_yaml_file_is_held_to_the_names_of_its_section(tmp_path):
    (tmp_path / 'page.md').write_text('```yaml\ndataset:\n  vidoe: {fps: 1}\n```\n')
    with pytest.raises(ConfigError, match=r'has no key vidoe. Did you mean video\?'):
        run_page(str(tmp_path / 'page.md'), tmp_path)


@pytest.mark.parametrize('page', PAGES)
def test_code_is_fenced(page):
    """Indented blocks would not run."""
    text = re.sub(r'^( *)```.*?^\1```$', '', (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r'\n\n((?: {4}|\t)\S.*)', text)
    assert not [line for line in found if not re.match(r' *([-*]|\d+\.) ', line)]


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_to_files_and_headings(page):
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
def test_commands_within_lines_exist(page, monkeypatch):
    if page == 'docs/streaming.md':
        pytest.importorskip('streaming')
    monkeypatch.chdir(ROOT)
    check_lines(page)


@pytest.mark.parametrize('file', sorted(path.name for path in ROOT.glob('yamls/*.yaml')))
def test_commands_at_the_head_of_a_yaml_file_are_taken(file, monkeypatch):
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


def test_error_messages_end_in_anchors_that_exist():
    for path in (ROOT / 'composer_tokacc').rglob('*.py'):
        for page, anchor in re.findall(r'(docs/[\w/]+\.md)(?:#([\w-]+))?', path.read_text()):
            assert (ROOT / page).exists(), f'{path}: {page}'
            assert not anchor or anchor in _anchors((ROOT / page).read_text()), f'{path}: {page}#{anchor}'


def test_commands_of_llm_foundrys_page_are_those_of_its_target():
    """None of them runs here: its environment takes seven gigabytes."""
    target = (ROOT / 'Makefile').read_text().replace('$(VENV_FOUNDRY)/bin/', '')
    blocks = blocks_of('examples/llm_foundry/README.md')
    commands = [
        re.sub(r'\s+#.*', '', line) for one in blocks if one.language == 'bash' for line in one.text.splitlines()
    ]
    assert commands[0] == 'make example-llm-foundry'
    assert len(commands) == 4
    assert [command for command in commands[1:] if f'\t{command}\n' not in target] == []


def test_readme_is_short_and_answers_first():
    lines = (ROOT / 'README.md').read_text().splitlines()
    assert len(lines) < 130
    first_screen = '\n'.join(lines[:25])
    for question in ('What do I gain?', 'What do I give up?', 'When not to use it?'):
        assert question in first_screen


def test_the_first_page_of_the_site_shows_picture_lines_figures_and_doors_on_one_screen():
    page = (ROOT / 'docs' / 'index.md').read_text().split('```{toctree}')[0]
    assert len(page.splitlines()) < 45
    for part in (
        'figures/token_weights.svg',
        '# 3',
        'made: headline',
        'trainer.md',
        'quickstart.md',
        'token_weights.md',
    ):
        assert part in page, part
