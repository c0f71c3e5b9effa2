# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: a rank that runs the scripts it is told through a socket, until that is closed."""

from __future__ import annotations

import json
import runpy
import socket
import sys

from composer.utils import dist, get_device

from tests.support.lookups import shorten_lookups


def main(path: str) -> None:
    """Each line is a script with its arguments; an error ends this rank, and so all of them."""
    shorten_lookups()
    dist.initialize_dist(get_device('cpu'), timeout=120.0)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        for line in connection.makefile():
            sys.argv = json.loads(line)
            runpy.run_path(sys.argv[0], run_name='__main__')
            connection.sendall(b'.')


if __name__ == '__main__':
    main(sys.argv[1])
