# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""All evidence from one GPU of 24 GB or more, in one command of about 8 minutes.

    python -m benchmarks.gpu --lengths DIR             # all parts; run again, it goes on with what is missing
    python -m benchmarks.gpu --parts b c               # some of them
    python -m benchmarks.gpu --rehearse --results DIR  # the same code on a CPU, tiny: a minute

(a) gradient exactness in fp32, and in bf16 against bf16's own noise; (b) real tokens a second, MFU and memory of four
ways to cut the same global batches, and the bound, for lognormal lengths and real tables; (c) what the algorithm
costs a step, its host syncs, the idle gap at its read; (d) host cost between steps with page-locked images;
(e) predicted against measured peak memory; (f) 'auto' through a real out-of-memory; (g) two ranks on the one GPU.

Every part runs in a process of its own and writes each result at once into results/gpu/, with machine and versions. A
part that fails writes its traceback there, and the others go on. Needs torch 2.7 or newer, transformers 4.57 or newer
and Composer, with or without its pins (docs/benchmarks.md: how a machine without network gets what it lacks). DIR holds
tables `tokens,image_tiles` as .csv.gz; without it the tables are synthetic ones.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.device import CPU, GPU
from benchmarks.gpu import exactness, memory, out_of_memory, overhead, pinned, ranks, speed
from benchmarks.gpu.report import write_report
from benchmarks.gpu.scale import FULL, REHEARSAL, for_memory
from benchmarks.gpu.store import Store
from benchmarks.record import parser_of

RESULTS = Path(__file__).resolve().parents[1] / 'results' / 'gpu'
# The short ones first, so that a run that is cut off has most answers.
PARTS = {
    'a': exactness, 'c': overhead, 'd': pinned, 'f': out_of_memory, 'b': speed, 'e': memory, 'g': ranks,
}  # fmt: skip


def run_apart(part: str, given: argparse.Namespace, seconds: float) -> None:
    """A part in a process of its own: one that loses the GPU, or hangs, takes no other with it."""
    command = [sys.executable, '-m', 'benchmarks.gpu', '--alone', '--parts', part, '--results', str(given.results)]
    if given.lengths:
        command += ['--lengths', str(given.lengths)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f'part {part}: stopped after {seconds:.0f} s; what it had measured is kept', flush=True)
    finally:
        if process.poll() is None:
            # The ranks that it started as well: they would go on with the GPU.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    warnings.simplefilter('ignore')
    parser = parser_of(__doc__, results=RESULTS)
    parser.add_argument('--parts', nargs='*', choices=PARTS, default=list(PARTS))
    parser.add_argument('--lengths', type=Path, help='folder of real length tables')
    parser.add_argument('--minutes', type=float, default=8.0, help='when this is spent, no further part is started')
    parser.add_argument('--rehearse', action='store_true', help='tiny sizes on the CPU')
    parser.add_argument('--alone', action='store_true', help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rehearse and given.results == RESULTS:
        parser.error("--rehearse must be given --results, so that its figures are not taken for a GPU's")
    if not given.rehearse and not torch.cuda.is_available():
        parser.error('a GPU that torch can use is needed, got: none. Give --rehearse for tiny sizes on the CPU')
    if given.alone or given.rehearse:
        scale = REHEARSAL if given.rehearse else for_memory(FULL, GPU.total_bytes())
        store = Store(given.results, CPU if given.rehearse else GPU)
        for part in given.parts:
            PARTS[part].run(replace(scale, lengths=given.lengths), store)
    else:
        ends = time.monotonic() + 60 * given.minutes
        for part in given.parts:
            left = ends - time.monotonic()
            if left < 20:
                print(f'part {part}: not started, the time is spent; run the command again', flush=True)
                continue
            run_apart(part, given, left)
    if not given.alone:
        write_report(given.results)


if __name__ == '__main__':
    main()
