# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes the model of a Composer checkpoint as a Hugging Face folder: weights or LoRA adapter, configs, processor.

    python -m composer_tokacc.export runs/x/checkpoints/latest-rank0.pt exported/ [merge=true]

`merge=true` adds a LoRA adapter to the weights of its base model, for servers that load only complete models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from composer_tokacc.programs.errors import ConfigError, local_folder, refuse
from composer_tokacc.programs.process import silence_harmless_warnings

__all__ = ['main']


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status: 2, with one line, for a mistake of the user.

    Args:
        arguments: As in the module's docstring; None takes them from the command line.
    """
    parser = argparse.ArgumentParser(
        'python -m composer_tokacc.export',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('checkpoint', type=Path)
    parser.add_argument('folder')
    parser.add_argument('merge', nargs='?', choices=['merge=true'])
    parsed = parser.parse_args(arguments)
    silence_harmless_warnings()  # of torch, Composer and Transformers
    # Imported here, because the import takes seconds and the usage errors above must not wait for it.
    from composer_tokacc.programs.export_folder import export_checkpoint

    try:
        folder = local_folder('FOLDER', parsed.folder)
        export_checkpoint(parsed.checkpoint, folder, merge=parsed.merge is not None)
    except ConfigError as error:
        return refuse(error)
    print(f'written to {parsed.folder}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
