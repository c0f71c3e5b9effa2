# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What README and docs say to type works, or is marked with the reason why it is not run."""

from __future__ import annotations

import re

import pytest
import yaml

from composer_tokacc.programs import ConfigError
from tests.docs import snippets
from tests.docs.snippets import LANGUAGES, PAGES, blocks_of, run_page
from tests.support.launch import ROOT

# These lie where commands are typed: in a checkout, or where `python -m composer_tokacc.examples` has put them.
SHIPPED = ('yamls', 'examples', 'overrides.txt')
NOT_RUN = re.compile(r'\S+( \S+){2,}')


def _cases():
    for page in PAGES:
        blocks = [block for block in blocks_of(page) if block.runs]
        if blocks:
            slow = any(block.language == 'bash' for block in blocks)
            yield pytest.param(page, marks=[pytest.mark.slow, pytest.mark.timeout(3600)] if slow else [])


@pytest.mark.parametrize('page', _cases())
def test_page_runs(page, tmp_path, monkeypatch):
    if page != 'docs/quickstart.md':  # which begins in an empty folder
        for name in SHIPPED:
            (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path)


@pytest.mark.parametrize('page', PAGES)
def test_every_block_has_a_known_language_and_every_mark_a_reason(page):
    for block in blocks_of(page):
        known = block.language in (*LANGUAGES, 'text') or block.language.startswith('{')
        assert known, f'{page}, line {block.line}: ```{block.language}; commands and code run, output is ```text'
        if block.mark == 'not run':
            assert NOT_RUN.fullmatch(block.reason), f'{page}, line {block.line}: why is it not run?'


def test_a_block_has_the_mark_in_the_line_before_it_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(snippets, 'ROOT', tmp_path)
    marks = ['<!-- not run: it needs a GPU -->\n', '<!-- after: names.py -->\n', 'Text.\n', '<!-- needs: no_such -->\n']
    (tmp_path / 'page.md').write_text('\n'.join(f'{mark}```python\n1\n```\n' for mark in marks))
    found = blocks_of('page.md')
    assert [(block.mark, block.reason) for block in found] == [
        ('not run', 'it needs a GPU'), ('after', 'names.py'), ('', ''), ('needs', 'no_such'),
    ]  # fmt: skip
    assert [block.runs for block in found] == [False, True, True, False]


def test_a_part_of_a_yaml_file_is_held_to_the_names_of_its_section(tmp_path):
    (tmp_path / 'page.md').write_text('```yaml\ndataset:\n  vidoe: {fps: 1}\n```\n')
    with pytest.raises(ConfigError, match=r'got: vidoe. Did you mean video\?'):
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


def _anchors(text: str) -> set[str]:
    """Of headings, as GitHub and MyST make them."""
    headings = re.findall(r'^#+ (.+)$', text, re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


def test_commands_of_llm_foundrys_page_are_those_of_its_target_and_its_lines_those_of_the_example():
    """None of them runs here: its environment takes seven gigabytes."""
    target = (ROOT / 'Makefile').read_text().replace('$(VENV_FOUNDRY)/bin/', '')
    blocks = blocks_of('examples/llm_foundry/README.md')
    commands = [
        re.sub(r'\s+#.*', '', line) for one in blocks if one.language == 'bash' for line in one.text.splitlines()
    ]
    assert commands[0] == 'make example-llm-foundry'
    assert len(commands) == 4
    assert [command for command in commands[1:] if f'\t{command}\n' not in target] == []
    (lines,) = (yaml.safe_load(one.text) for one in blocks if one.language == 'yaml')
    example = yaml.safe_load((ROOT / 'examples' / 'llm_foundry' / 'tiny.yaml').read_text())
    assert lines == {key: example[key] for key in lines}


def test_readme_is_short_and_answers_first():
    lines = (ROOT / 'README.md').read_text().splitlines()
    assert len(lines) < 130
    first_screen = '\n'.join(lines[:25])
    for question in ('What do I gain?', 'What do I give up?', 'When not to use it?'):
        assert question in first_screen
