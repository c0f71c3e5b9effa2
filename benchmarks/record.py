# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Arguments of benchmarks, and their results files, whole or not at all: one may be killed while it writes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / 'results'


def parser_of(doc: str | None, *, results: Path | None = RESULTS, lengths: bool = False) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring.

    Args:
        doc: The docstring.
        results: Default of ``--results``; None: the benchmark takes none.
        lengths: Whether it takes ``--lengths``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if results is not None:
        parser.add_argument('--results', type=Path, default=results)
    if lengths:
        parser.add_argument('--lengths', type=Path, help='folder of tables, by default COMPOSER_TOKACC_LENGTHS')
    return parser


def write(path: Path, found: Any) -> None:
    """Writes figures as JSON."""
    write_at_once(path, json.dumps(found, indent=1) + '\n')


def write_at_once(path: Path, text: str) -> None:
    """Writes a file, beside it first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix('.part')
    begun.write_text(text)
    begun.replace(path)
