# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The site: ``make docs``. Sphinx, furo, MyST and napoleon, as Composer's own."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util import logging

import composer_tokacc
from docs.figures import rooms
from tests.public_api import MODULES, public_names

project = 'composer_tokacc'
copyright = '2026, composer_tokacc authors'
version = release = composer_tokacc.__version__

extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.viewcode']
exclude_patterns = ['_build']
html_theme = 'furo'
html_title = f'composer_tokacc {version}'

myst_heading_anchors = 4

autodoc_mock_imports = ['streaming']  # wants transformers<5; everything else is imported as it is
autodoc_typehints = 'description'
autodoc_typehints_description_target = 'documented'
autodoc_preserve_defaults = True
autodoc_member_order = 'bysource'
autodoc_default_options = {'members': True, 'show-inheritance': True, 'no-value': True}
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False

# `-n` fails on every name that is not found. Those of other packages have their pages elsewhere: an inventory of each
# would have to be downloaded in every build.
_ELSEWHERE = (
    'torch',
    'composer',
    'transformers',
    'numpy',
    'np',
    'streaming',
    'collections',
    'fractions',
    'os',
    'pathlib',
    're',
    'typing',
)
# What annotations of packages without an inventory leave of theirs.
nitpick_ignore = [
    ('py:class', name)
    for name in (
        'Batch',
        'ControlTokens',
        'DataLoader',
        'DataSpec',
        'Dataset',
        'PathLike',
        'Stages',
        'Stream',
        'Table',
        'inf',
        'optional',
    )
]

# Pydantic's constraints, and names of ours that no page describes.
nitpick_ignore_regex = [
    ('py:.*', rf'({"|".join(_ELSEWHERE)})\..*'),
    ('py:class', r'FieldInfo|NoneType|Ge|Gt|Le|Lt|AllowInfNan|MinLen|MaxLen|Strict|[A-Z]\w*Validator'),
    ('py:class', r'pydantic\..*|composer_tokacc\.programs\.schema\._.*'),
    ('py:class', r'TrainOn|OnError|composer_tokacc\.(plan_agreement|layout\.readings|sampling\.progress)\..*'),
    ('py:class', r'composer_tokacc\.programs\.metrics_file\..*'),
]


def _skip_twice_listed(app: Any, what: str, name: str, obj: object, skip: bool, options: Any) -> bool | None:
    """A name of the package is described on the package's page alone, not again on that of its room."""
    if app.env.docname != 'api/package' and name in composer_tokacc.__all__:
        return True if getattr(composer_tokacc, name) is obj else None
    return None


def _help_as_it_stands(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Docstrings of programs are what ``--help`` prints."""
    if what == 'module' and app.env.docname == 'api/command_lines':
        lines[:] = ['.. code-block:: text', '', *(f'   {line}' for line in lines), '']


def _whole_text(docstring: Any) -> tuple[str, list[str]]:
    """Napoleon takes what stands before a colon for an attribute's type; here types are annotations."""
    lines = [docstring._lines.next(), *docstring._dedent(docstring._consume_to_end())]
    return '', docstring.__class__(lines, docstring._config).lines()


GoogleDocstring._consume_inline_attribute = _whole_text


def _every_public_name_is_described(app: Any, env: Any) -> None:
    """Constants and names of types have no docstring that autodoc would find: they are written on their pages."""
    described = {name.rpartition('.')[2] for name in env.get_domain('py').objects}
    for room in MODULES:
        module = import_module('.'.join(filter(None, ('composer_tokacc', room))))
        names = [name for name in public_names(module) if hasattr(module, '__all__') or not name.isupper()]
        for name in sorted(set(names) - described):
            logging.getLogger(__name__).warning('%s.%s is on no page of the API reference', module.__name__, name)


def _draw_rooms(app: Any) -> None:
    rooms.draw(Path(rooms.__file__).with_suffix('.svg'))


def setup(app: Any) -> None:
    """Sphinx's hook."""
    app.connect('builder-inited', _draw_rooms)
    app.connect('autodoc-skip-member', _skip_twice_listed)
    app.connect('autodoc-process-docstring', _help_as_it_stands)
    app.connect('env-check-consistency', _every_public_name_is_described)
