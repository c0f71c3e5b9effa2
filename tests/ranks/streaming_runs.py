# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: runs of a small LLaVA on shards, one after the other. Returns the results of each run.

Arguments: the folder of the shards, a JSON list of runs (the keyword arguments of :func:`run`) and, if this file is
launched as a program, the file for the results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback
from composer.utils import dist, get_device
from streaming import StreamingDataLoader
from streaming.base.util import clean_stale_shared_memory  # pyright: ignore[reportMissingImports]
from torch.utils.data import DataLoader

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.data import VisionLanguageCollator, build_small_processor, image_token_ids
from composer_tokacc.data.llava_streaming import LlavaStreamingDataset
from composer_tokacc.programs.models import build_model
from composer_tokacc.sampling import ExchangingDataLoader, RestoreRandomState
from tests.support.killer import KillRank
from tests.support.training import (
    GradientRecorder,
    fit,
    reference_gradients,
    relative_error,
    saving,
    state_of,
    unwrapped,
)

GLOBAL_BATCH, SLOT_TOKENS = 8, 160
CONFIG = {
    'model_type': 'llava',
    'vision_config': {
        'model_type': 'clip_vision_model',
        'image_size': 32,
        'patch_size': 16,
        'hidden_size': 16,
        'intermediate_size': 32,
        'num_hidden_layers': 2,
        'num_attention_heads': 2,
    },
    'text_config': {
        'model_type': 'llama',
        'hidden_size': 32,
        'intermediate_size': 64,
        'num_hidden_layers': 2,
        'num_attention_heads': 2,
        'num_key_value_heads': 2,
    },
}


class SeeSteps(Callback):
    """The samples of every step by rank, and a hash of the parameters after it."""

    def __init__(self) -> None:
        self.steps: dict[str, Any] = {}
        self.mine: list[str] = []

    def batch_start(self, state: Any, logger: Any) -> None:
        self.mine = [str(name) for name in state.batch['sample_ids']]

    def batch_end(self, state: Any, logger: Any) -> None:
        self.steps[str(int(state.timestamp.batch) - 1)] = {
            'samples': dist.all_gather_object(self.mine),
            'counted': int(state.timestamp.sample),
            **state_of(state.model),
        }


def run(
    shards: str,
    *,
    exchange: bool = True,
    folder: str | None = None,
    load_path: str | None = None,
    duration: str = '11ba',
    num_workers: int = 0,
    drop_last: bool = False,
    shuffle: bool = True,
    dropout: float = 0.2,
    learn: bool = True,
    kill_at: int | None = None,
) -> dict[str, Any]:
    """One Trainer. Without `learn` also the error of every gradient against one forward over the global batch."""
    processor = build_small_processor(LlavaStreamingDataset.texts(shards), vocab_size=300, patch_size=16)
    config = {**CONFIG, 'text_config': {**CONFIG['text_config'], 'attention_dropout': dropout}}
    model = build_model(config=config, processor=processor, seed=1)
    layout = BatchLayout.for_model(model)
    size = GLOBAL_BATCH // dist.get_world_size()
    dataset = LlavaStreamingDataset(
        processor=processor, local=shards, batch_size=size, shuffle=shuffle, shuffle_seed=4, num_canonical_nodes=2
    )
    reading = {
        'batch_size': size,
        'collate_fn': VisionLanguageCollator(processor, layout=layout),
        'num_workers': num_workers,
        'persistent_workers': num_workers > 0,
        'drop_last': drop_last,
    }
    loader: DataLoader
    if exchange:
        ids = image_token_ids(processor)
        loader = ExchangingDataLoader(dataset, max_tokens=2 * SLOT_TOKENS, image_token_ids=ids, **reading)
    else:
        loader = StreamingDataLoader(dataset, generator=torch.Generator(), **reading)
    steps = SeeSteps()
    callbacks: list[Any] = [steps, RestoreRandomState()]
    if kill_at is not None:
        callbacks.append(KillRank(rank=dist.get_world_size() - 1, batch=kill_at))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2) if learn else torch.optim.SGD(parameters, lr=0.0)
    options = {'callbacks': callbacks, 'load_path': load_path, 'seed': 5, 'max_duration': duration, **saving(folder)}
    data = token_data_spec(loader, slot_tokens=SLOT_TOKENS, layout=layout)
    recorder = fit(model, data, optimizer=optimizer, **options)
    result: dict[str, Any] = {'steps': steps.steps, 'length': len(loader), 'batch_size': loader.batch_size}
    if not learn:
        result['errors'] = errors(
            model, dataset, reading['collate_fn'], steps, recorder, recorder.logged('loss/train/total')
        )
    dist.barrier()
    recorder.trainer.close()
    return result


def errors(
    model: Any, dataset: Any, collate: Any, steps: SeeSteps, recorder: GradientRecorder, losses: list[float]
) -> list[tuple[float, float]]:
    """Gradient and loss of every step against one forward over its samples, which the dataset gives by number."""
    numbers = {dataset[k]['sample_ids'][0]: k for k in range(dataset.size)}
    found = []
    for step, gradients, loss in zip(steps.steps.values(), recorder.steps, losses, strict=True):
        names = sorted(name for rank in step['samples'] for name in rank)
        batch = collate([dataset[numbers[name]] for name in names])
        expected, expected_loss = reference_gradients(unwrapped(model).model, batch)
        found.append((relative_error(gradients, expected), abs(loss - expected_loss) / expected_loss))
    return found


def main(shards: str, runs: str, path: str = '') -> list[dict[str, Any]]:
    clean_stale_shared_memory()
    results = []
    for arguments in json.loads(runs):
        results.append(run(shards, **arguments))
        if path and dist.get_global_rank() == 0:  # after each, because a later one may be killed
            Path(path).write_text(json.dumps(results))
    return results


if __name__ == '__main__':
    dist.initialize_dist(get_device('cpu'), timeout=60.0)
    main(*sys.argv[1:])
