# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: runs of a small LLaVA on shards, one after the other. Returns the results of each run.

Arguments: the folder of the shards, a JSON list of runs (the keyword arguments of :func:`run`) and, if this file is
launched as a program, the file for the results.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
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

GLOBAL_BATCH = 8
SLOT_TOKENS = 160
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
    """Records the samples of every step by rank, and a hash of the parameters after it."""

    def __init__(self) -> None:
        self.steps: dict[str, Any] = {}
        self.samples_of_rank: list[str] = []

    def batch_start(self, state: Any, logger: Any) -> None:
        self.samples_of_rank = [str(name) for name in state.batch['sample_ids']]

    def batch_end(self, state: Any, logger: Any) -> None:
        step = int(state.timestamp.batch) - 1
        self.steps[str(step)] = {
            'samples': dist.all_gather_object(self.samples_of_rank),
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
    """Runs one Trainer. Returns its steps, and the length and batch size of its loader.

    Args:
        shards: Folder of the shards.
        exchange: Whether the loader is the exchanging one, not the stock one.
        folder: Where checkpoints are saved.
        load_path: Checkpoint to resume from.
        duration: Duration of the run.
        num_workers: Workers of the loader.
        drop_last: Whether the loader drops the last, incomplete batch.
        shuffle: Whether the dataset is shuffled.
        dropout: Dropout of the attention.
        learn: Whether the weights are trained. If not, the errors of gradient and loss of each step are returned, too.
        kill_at: The batch at which the last rank is killed. None: it is not killed.
    """
    texts = LlavaStreamingDataset.texts(shards)
    processor = build_small_processor(texts, vocab_size=300, patch_size=16)
    text_config = {**CONFIG['text_config'], 'attention_dropout': dropout}
    model = build_model(config={**CONFIG, 'text_config': text_config}, processor=processor, seed=1)
    layout = BatchLayout.for_model(model)
    collate = VisionLanguageCollator(processor, layout=layout)
    size = GLOBAL_BATCH // dist.get_world_size()
    dataset = LlavaStreamingDataset(
        processor=processor, local=shards, batch_size=size, shuffle=shuffle, shuffle_seed=4, num_canonical_nodes=2
    )
    loader_options = {
        'batch_size': size,
        'collate_fn': collate,
        'num_workers': num_workers,
        'persistent_workers': num_workers > 0,
        'drop_last': drop_last,
    }
    loader: DataLoader
    if exchange:
        ids = image_token_ids(processor)
        loader = ExchangingDataLoader(dataset, max_tokens=2 * SLOT_TOKENS, image_token_ids=ids, **loader_options)
    else:
        loader = StreamingDataLoader(dataset, generator=torch.Generator(), **loader_options)
    see_steps = SeeSteps()
    callbacks: list[Any] = [see_steps, RestoreRandomState()]
    if kill_at is not None:
        callbacks.append(KillRank(rank=dist.get_world_size() - 1, batch=kill_at))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if learn:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.0)
    options = {'callbacks': callbacks, 'load_path': load_path, 'seed': 5, 'max_duration': duration, **saving(folder)}
    data = token_data_spec(loader, slot_tokens=SLOT_TOKENS, layout=layout)
    recorder = fit(model, data, optimizer=optimizer, **options)
    result: dict[str, Any] = {'steps': see_steps.steps, 'length': len(loader), 'batch_size': loader.batch_size}
    if not learn:
        result['errors'] = errors_of_steps(model, dataset, collate, see_steps, recorder)
    dist.barrier()
    recorder.trainer.close()
    return result


def errors_of_steps(
    model: Any, dataset: Any, collate: Any, see_steps: SeeSteps, recorder: GradientRecorder
) -> list[tuple[float, float]]:
    """Returns the errors of gradient and loss of each step, compared with one forward over the samples of all ranks."""
    index_of_name = {}
    for index in range(dataset.size):
        name = dataset[index]['sample_ids'][0]
        index_of_name[name] = index
    losses = recorder.logged('loss/train/total')
    errors = []
    for step, gradients, loss in zip(see_steps.steps.values(), recorder.steps, losses, strict=True):
        names = sorted(chain.from_iterable(step['samples']))
        batch = collate([dataset[index_of_name[name]] for name in names])
        expected, expected_loss = reference_gradients(unwrapped(model).model, batch)
        loss_error = abs(loss - expected_loss) / expected_loss
        errors.append((relative_error(gradients, expected), loss_error))
    return errors


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
