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

autodoc_mock_imports = ['streaming']  # it needs transformers<5, which the environment of the docs does not have
autodoc_typehints = 'description'
autodoc_typehints_description_target = 'documented'
autodoc_preserve_defaults = True
autodoc_member_order = 'bysource'
autodoc_default_options = {'members': True, 'show-inheritance': True, 'no-value': True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# With `-n` Sphinx fails on every name without a page. These packages have their pages elsewhere, and an inventory of
# each would have to be downloaded in every build.
_OTHER_PACKAGES = (
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
# Names in annotations that Sphinx sees without their package.
_SHORT_NAMES = (
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
nitpick_ignore = [('py:class', name) for name in _SHORT_NAMES]

# Names of other packages, constraints of pydantic, and names of ours that no page describes.
nitpick_ignore_regex = [
    ('py:.*', rf'({"|".join(_OTHER_PACKAGES)})\..*'),
    ('py:class', r'FieldInfo|NoneType|Ge|Gt|Le|Lt|AllowInfNan|MinLen|MaxLen|Strict|[A-Z]\w*Validator'),
    ('py:class', r'pydantic\..*|composer_tokacc\.programs\.schema\._.*'),
    ('py:class', r'TrainOn|OnError|composer_tokacc\.(plan_agreement|layout\.readings|sampling\.progress)\..*'),
    ('py:class', r'composer_tokacc\.programs\.metrics_file\..*'),
]


def _skip_public_names_of_rooms(
    app: Any,
    what: str,
    name: str,
    value: object,
    skip: bool,
    options: Any,
) -> bool | None:
    """Leaves out public names of the package on the pages of its rooms, because the page of the package has them."""
    is_on_page_of_package = app.env.docname == 'api/package'
    if not is_on_page_of_package and name in composer_tokacc.__all__ and getattr(composer_tokacc, name) is value:
        return True
    return None  # Sphinx decides


def _show_help_as_text(app: Any, what: str, name: str, value: object, options: Any, lines: list[str]) -> None:
    """Shows the docstrings of programs as they are, because ``--help`` prints them."""
    if what == 'module' and app.env.docname == 'api/command_lines':
        indented_lines = [f'   {line}' for line in lines]
        lines[:] = ['.. code-block:: text', '', *indented_lines, '']


def _text_of_attribute(docstring: Any) -> tuple[str, list[str]]:
    """Returns an empty type, and the complete docstring of an attribute. Replaces a method of napoleon.

    Napoleon would take the words before a colon for the type. Here types are in annotations.
    """
    first_line = docstring._lines.next()
    other_lines = docstring._dedent(docstring._consume_to_end())
    parsed = docstring.__class__([first_line, *other_lines], docstring._config)
    return '', parsed.lines()


GoogleDocstring._consume_inline_attribute = _text_of_attribute


def _warn_of_public_names_without_page(app: Any, env: Any) -> None:
    """Warns of public names that no page describes.

    Autodoc finds no docstring of a constant or of a type alias, so these are written on their pages by hand.
    """
    described = {name.rpartition('.')[2] for name in env.get_domain('py').objects}
    for room in MODULES:
        module_name = f'composer_tokacc.{room}' if room else 'composer_tokacc'
        module = import_module(module_name)
        names = set(public_names(module))
        if not hasattr(module, '__all__'):
            names = {name for name in names if not name.isupper()}
        for name in sorted(names - described):
            logging.getLogger(__name__).warning('%s.%s is on no page of the API reference', module_name, name)


def _draw_rooms(app: Any) -> None:
    """Draws the picture of the architecture page again."""
    rooms.draw(Path(rooms.__file__).with_suffix('.svg'))


def setup(app: Any) -> None:
    """Connects the functions of this file to events of Sphinx. Sphinx calls it."""
    app.connect('builder-inited', _draw_rooms)
    app.connect('autodoc-skip-member', _skip_public_names_of_rooms)
    app.connect('autodoc-process-docstring', _show_help_as_text)
    app.connect('env-check-consistency', _warn_of_public_names_without_page)
