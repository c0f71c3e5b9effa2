# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: ranks that share a checkpoint folder. Returns the Trainer's arguments on each rank."""

from __future__ import annotations

import json

from composer.utils import dist

from composer_tokacc.programs.checkpoints import arguments_to_resume


def main(folder: str) -> list[str]:
    arguments = arguments_to_resume({'autoresume': True, 'save_folder': folder, 'run_name': 'run'})
    return dist.all_gather_object(json.dumps(arguments))
