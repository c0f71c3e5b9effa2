# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: a rank that gets scripts through a socket and runs them, until the socket is closed."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import socket
import sys
from pathlib import Path


def serve(address: str) -> None:
    """Runs the script of each line that comes through the socket.

    A line is a JSON list: the script, the arguments of its ``main``, and a file for the result of rank 0. An error ends
    this rank, and so all ranks.
    """
    # Imported here, because workers of loaders import this module as their main module.
    from composer.utils import dist, get_device

    from tests.support.lookups import shorten_lookups_and_waits

    shorten_lookups_and_waits()  # again, in a rank that is forked
    # The fork server imports this once for all workers of a rank.
    multiprocessing.set_forkserver_preload(['tests.support.length_dataset'])
    dist.initialize_dist(get_device('cpu'), timeout=120.0)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        for line in connection.makefile():
            script, *arguments, path = json.loads(line)
            module = importlib.import_module(script.removesuffix('.py').replace('/', '.'))
            result = module.main(*arguments)
            if dist.get_global_rank() == 0:
                Path(path).write_text(json.dumps(result))
            connection.sendall(b'.')


if __name__ == '__main__':
    serve(sys.argv[1])
