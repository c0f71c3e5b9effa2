# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Results, each written the moment it is measured, so that a run that is cut off goes on where it was."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import ComputeDevice
from benchmarks.record import write


@dataclass(frozen=True)
class Store:
    """A folder with one JSON file a result.

    Args:
        folder: Where.
        device: What all of it is measured on; written into every file.
    """

    folder: Path
    device: ComputeDevice

    def measure(self, name: str, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of this name: read if it is there, else measured. One that failed is measured again.

        A failure is a result too: its traceback is written in its place, and the rest goes on.
        """
        path = self.folder / f'{name}.json'
        known = _read(path)
        if 'error' not in known:
            print(f'{name}: kept from before', flush=True)
            return known
        started = time.perf_counter()
        try:
            result = function()
        except Exception as error:
            result = {'error': f'{type(error).__name__}: {error}'[:2000], 'traceback': traceback.format_exc()[-6000:]}
        seconds = round(time.perf_counter() - started, 2)
        written = {'machine': self.device.report(), 'seconds': seconds, 'result': result}
        write(path, written)
        print(f'{name}: {seconds} s{", FAILED: " + result["error"][:300] if "error" in result else ""}', flush=True)
        # A traceback, or Composer, may hold the last model.
        gc.collect()
        if self.device.is_gpu:
            torch.cuda.empty_cache()
        return result


def _read(path: Path) -> dict[str, Any]:
    """What was measured before; an error where that is nothing, or damaged."""
    try:
        return json.loads(path.read_text())['result']
    except (OSError, ValueError, KeyError, TypeError):
        return {'error': 'not there'}
