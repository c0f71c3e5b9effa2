# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: runs of a YAML file under FSDP2 that end with sharded checkpoints.

For each run rank 0 saves the logits of the trained model, still sharded, as ``logits.pt`` in its ``report.folder``.
Arguments: a JSON list with the overrides of each run, and the YAML file. Returns the paths of the logits.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ['FSDP_VERSION'] = '2'

import torch
from composer.loggers import InMemoryLogger
from composer.utils import dist

from composer_tokacc.programs.build import build_parts, build_trainer
from composer_tokacc.programs.schema import load_config


def main(overrides_of_runs: str, path: str) -> list[str]:
    files = []
    for overrides in json.loads(overrides_of_runs):
        config = load_config(path, overrides)
        parts = build_parts(config)
        trainer = build_trainer(config, parts, InMemoryLogger())
        trainer.fit()
        assert trainer.state.fsdp_enabled
        folder = Path(config.report['folder'])
        with torch.no_grad():
            logits = parts.model.eval().model(**torch.load(folder / 'batch.pt')).logits
        file = str(folder / 'logits.pt')
        files.append(file)
        if dist.get_global_rank() == 0:
            torch.save(logits, file)
        trainer.close()
    return files
