# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: the arguments of the Trainer on nodes of one rank that share a checkpoint folder."""

from __future__ import annotations

import json
import os

from composer.utils import dist

from composer_tokacc.programs.checkpoints import resume_on_shared_folder


def main(folder: str) -> list[str]:
    ranks_of_node = os.environ['LOCAL_WORLD_SIZE']
    os.environ['LOCAL_WORLD_SIZE'] = '1'
    arguments = resume_on_shared_folder({'autoresume': True, 'save_folder': folder, 'run_name': 'run'})
    os.environ['LOCAL_WORLD_SIZE'] = ranks_of_node
    return dist.all_gather_object(json.dumps(arguments))
