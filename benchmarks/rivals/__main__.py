# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Trains with other trainers and with ours on the same samples, first weights, memory and machine.

    make bench-rivals                                  # everything, in the environment that has the other trainers
    python -m benchmarks.rivals --sets 'lognormal 0.9' --rivals hf ours_sampler --ranks 1 --rounds 1
    python -m benchmarks.rivals --report               # writes the pages again, from the results

Each contender trains several epochs of each set of lengths. The first epoch is inspected: samples, first gradient,
memory, eval loss. The epochs after it are timed, and the contenders take turns. Results are cells of
results/rivals.json: one for each contender, model, set of lengths and number of ranks. Cells that are not measured
again stay in the file. COMPOSER_TOKACC_LENGTHS names the folder of real length tables.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.machine import COMPOSER, environment, machine, versions
from benchmarks.record import ROOT, Row, parser_of, read, write_rows
from benchmarks.rivals.contenders import CONTENDERS
from benchmarks.rivals.data import MODELS, SETS
from benchmarks.rivals.report import RESULTS_FILE, write_pages

PACKAGES = ('mosaicml', 'torch', 'transformers', 'accelerate', 'online-dynamic-batching')
# `trl` and `ours_all_logits` are only measured on data with few labels, by benchmarks.logits.
USUAL = [name for name in CONTENDERS if name not in ('trl', 'ours_all_logits')]
# Seconds for all rounds of one set.
LIMIT = 3600


def launch(ranks: int, sizes: Row, **plan: Any) -> list[Row]:
    """Measures on several ranks. Returns the cells that were written before the end or the limit.

    `sizes` are arguments of `Sizes`. `plan` are the other arguments of `benchmarks.rivals.speed.measure`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'cells.json'
        launcher = [COMPOSER, '-n', str(ranks), '-m', 'benchmarks.rivals.speed']
        # ODB makes a gloo group for each loader. Without GLOO_SOCKET_IFNAME, ranks may not reach each other.
        variables = environment(TOKENIZERS_PARALLELISM='false', GLOO_SOCKET_IFNAME='lo')
        command = [*launcher, str(path), json.dumps(sizes), json.dumps(plan)]
        process = subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True)
        try:
            process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        finally:
            # Ends loader processes that a package left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return json.loads(path.read_text()) if path.exists() else []


def keep(path: Path, cells: list[Row]) -> None:
    """Writes the cells into the results file. A cell replaces the old cell of the same contender, model, set and ranks.

    If a contender hung or died, its new cell has no rounds. Such a cell does not replace an old cell with rounds.
    """
    results = read(path)
    measured_on = {'machine': machine(), 'versions': versions(PACKAGES)}
    merged = {key_of(cell): cell for cell in results.get('cells', [])}
    for cell in cells:
        key = key_of(cell)
        if 'rounds' in cell or 'rounds' not in merged.get(key, {}):
            merged[key] = {**cell, 'measured_on': measured_on}
    results['cells'] = list(merged.values())
    write_rows(path, results)


def key_of(cell: Row) -> tuple[str, str, int, str]:
    return cell['model'], cell['set'], cell['ranks'], cell['rival']


def main() -> None:
    parser = parser_of(__doc__, report=True)
    parser.add_argument('--models', nargs='+', choices=MODELS, default=MODELS)
    parser.add_argument('--sets', nargs='+', choices=SETS, default=SETS)
    parser.add_argument('--rivals', nargs='+', choices=CONTENDERS, default=USUAL)
    parser.add_argument('--ranks', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--rounds', type=int, default=5)
    arguments = parser.parse_args()
    path = arguments.results / RESULTS_FILE.name
    if not arguments.report:
        for ranks, model, set_name in product(arguments.ranks, arguments.models, arguments.sets):
            sizes = {'model': model}
            cells = launch(ranks, sizes, set_name=set_name, names=arguments.rivals, rounds=arguments.rounds)
            keep(path, cells)
    if path == RESULTS_FILE:
        write_pages(read(path))


if __name__ == '__main__':
    main()
