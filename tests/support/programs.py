# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Command lines of programs that take seconds: a shipped YAML file, and the keys that they override."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_tokacc.programs import load_config
from composer_tokacc.programs.build import build_trainer_parts
from composer_tokacc.programs.config_checks import check_config
from tests.support.launch import ROOT

DIGITS = str(ROOT / 'yamls' / 'digits.yaml')
LLAVA = str(ROOT / 'yamls' / 'llava_json.yaml')

TINY_MODEL = [
    'model.config.text_config.hidden_size=32',
    'model.config.text_config.intermediate_size=64',
    'model.config.text_config.num_hidden_layers=2',
    'model.config.vision_config.hidden_size=16',
    'model.config.vision_config.intermediate_size=32',
]
QUIET = ['trainer.progress_bar=false', 'trainer.load_progress_bar=false']
# For a data file and its images, four samples a step.
TINY_LLAVA = [
    *TINY_MODEL,
    *QUIET,
    'dataset.processor.vocab_size=300',
    'loader.global_batch_size=4',
    'scheduler.t_warmup=1ba',
]
# For runs that test something else. The check takes a third of a short run.
UNCHECKED = 'algorithms.token_accumulation={loss_tokens: causal, check_loss: false}'
# 40 samples, 8 a step: five steps an epoch, so 12 steps end in the middle of the third.
TINY_DIGITS = [
    *TINY_MODEL,
    *QUIET,
    'dataset.num_samples=40',
    'dataset.eval.num_samples=12',
    'loader.global_batch_size=8',
    'microbatching.device_train_microbatch_size=2',
    'trainer.max_duration=12ba',
    'trainer.eval_interval=12ba',
    'scheduler.t_warmup=2ba',
    'report.answers=1',
    'report.answer_tokens=2',
    'report.num_samples=2',
    'report.max_new_tokens=4',
    'report.picture=false',
]


def result_of(folder: Path) -> dict[str, Any]:
    """Returns what a run has written about itself."""
    text = (folder / 'result.json').read_text()
    return json.loads(text)


def check_run(path: Path | str, overrides: Sequence[str], *, num_ranks: int) -> None:
    """Checks a config and builds the parts of its Trainer, as a program does before it loads data and model."""
    config = load_config(path, overrides)
    check_config(config, num_ranks=num_ranks)
    build_trainer_parts(config)
