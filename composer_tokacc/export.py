# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes the model of a Composer checkpoint as a Hugging Face folder: weights or LoRA adapter, configs, processor.

    python -m composer_tokacc.export runs/x/checkpoints/latest-rank0.pt exported/ [merge=true]

`merge=true` adds a LoRA adapter to the weights of its base model, for servers that load only complete models.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from composer_tokacc.programs.errors import ConfigError, local_folder, refuse
from composer_tokacc.programs.process import silence_harmless_warnings

__all__ = ['main']

USAGE = 'usage: python -m composer_tokacc.export CHECKPOINT FOLDER [merge=true]'


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status: 2, with one line, for a mistake of the user.

    Args:
        arguments: As in the module's docstring; None takes them from the command line.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (['-h'], ['--help']):
        print(__doc__)
        return 0
    merges = arguments[2:] == ['merge=true']
    if len(arguments) != 2 and not merges:
        print(USAGE, file=sys.stderr)
        return 2
    silence_harmless_warnings()  # of torch, Composer and Transformers
    # Imported here, because the import takes seconds and the usage errors above should not wait for it.
    from composer_tokacc.programs.export_folder import export_checkpoint

    checkpoint, folder = arguments[:2]
    try:
        export_checkpoint(Path(checkpoint), local_folder('FOLDER', folder), merge=merges)
    except ConfigError as error:
        return refuse(error)
    print(f'written to {folder}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
