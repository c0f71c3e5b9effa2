# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Results files, whole or not at all: a benchmark may be killed while it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / 'results'


def write(path: Path, found: Any) -> None:
    """Writes figures as JSON."""
    write_at_once(path, json.dumps(found, indent=1) + '\n')


def write_at_once(path: Path, text: str) -> None:
    """Writes a file, beside it first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix('.part')
    begun.write_text(text)
    begun.replace(path)
