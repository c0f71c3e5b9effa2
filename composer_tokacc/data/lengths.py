# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""One reading of a dataset with the run's processor: how long each sample is, and which are bad; kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from composer.utils import dist
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from tqdm.auto import tqdm

from composer_tokacc.counting import IGNORE_INDEX
from composer_tokacc.data.formats import KINDS, BadSampleError
from composer_tokacc.data.media import DEFAULT_PATCH_SIZE, count_patches, declared_patch_size

__all__ = ['LengthTable', 'build_length_table', 'chosen_patch_size', 'fingerprint', 'image_token_ids', 'length_table']

NUM_PROBES = 64
"""Samples whose encoding goes into the fingerprint of a dataset that has none of its own."""
VERSION = 4
"""Goes up with every change of what a table holds, so that files of older versions are not read."""
COLUMNS = ('lengths', 'image_tokens', 'loss_tokens', 'vision_patches')
FEWEST_FOR_WORKERS = 512
"""Starting processes takes longer than reading fewer samples than these."""

OnError = Literal['raise', 'skip']


@dataclass(frozen=True, kw_only=True)
class LengthTable:
    """Sizes of all samples of a dataset, by index, each int32 (n,)."""

    lengths: np.ndarray
    """Tokens, image tokens included."""
    image_tokens: np.ndarray
    """Tokens that stand for images, videos and sounds, among them."""
    loss_tokens: np.ndarray
    """Positions that carry loss under the causal shift."""
    vision_patches: np.ndarray
    """Patches that the vision tower computes, before a resampler or a merge makes image tokens of them."""
    errors: dict[int, str] = field(default_factory=dict)
    """Why a sample cannot be used, by index; all its sizes are 0."""

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, indices: Sequence[int]) -> LengthTable:
        """The table of some of the samples, none of them bad, in the given order."""
        return LengthTable(**{name: getattr(self, name)[list(indices)] for name in COLUMNS}, errors={})

    def save(self, path: Path) -> None:
        """Writes the table; a reader sees the whole file or none, even if several processes write at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = {name: getattr(self, name) for name in COLUMNS}
        bad, reasons = list(self.errors), list(self.errors.values())
        handle, name = tempfile.mkstemp(dir=path.parent, suffix='.npz')
        with os.fdopen(handle, 'wb') as file:
            np.savez_compressed(file, **columns, bad=np.array(bad, np.int64), reasons=np.array(reasons, np.str_))
        os.replace(name, path)

    @classmethod
    def load(cls, path: Path) -> LengthTable:
        """Reads what :meth:`save` wrote."""
        with np.load(path, allow_pickle=False) as arrays:
            errors = dict(zip(arrays['bad'].tolist(), arrays['reasons'].tolist(), strict=True))
            return cls(**{name: arrays[name] for name in COLUMNS}, errors=errors)


def length_table(
    dataset: Any,
    processor: Any,
    *,
    folder: str | os.PathLike[str] | None = None,
    patch_size: int | None = None,
    num_workers: int | None = None,
    on_error: OnError = 'raise',
) -> LengthTable:
    """The length table of a dataset, from its file if the same dataset was read before with the same processor.

    Under ``torch.distributed`` every rank must call it; they share the work, and one of each node writes the file.

    Args:
        dataset: Map-style, or a ``ConcatDataset`` of such, each with a file of its own. A ``fingerprint`` method
            without arguments is used where there is one; see :func:`fingerprint`. So is ``measured``, a pair of a patch
            size and the table that was made with it.
        processor: Its Hugging Face processor or tokenizer.
        folder: Where tables are kept. Default: ``composer_tokacc/lengths`` in the user's cache folder.
        patch_size: As for :func:`build_length_table`.
        num_workers: Likewise.
        on_error: Likewise.

    Raises:
        BadSampleError: For the first bad sample (``'raise'``), on all ranks.
    """
    if isinstance(dataset, ConcatDataset):
        tables = [
            length_table(part, processor, folder=folder, patch_size=patch_size, num_workers=num_workers)
            for part in dataset.datasets
        ]
        columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in COLUMNS}
        return LengthTable(**columns, errors={})
    patch_size = chosen_patch_size(processor, patch_size)
    measured = getattr(dataset, 'measured', None)
    if measured is not None and measured[0] == patch_size:
        return measured[1]
    if folder is None:
        folder = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'composer_tokacc' / 'lengths'
    path = Path(folder) / f'{fingerprint(dataset, processor, patch_size=patch_size)}.npz'
    if all(_gather(path.exists())):
        table = LengthTable.load(path)
        _raise_first(table.errors, on_error)
        return table
    table = build_length_table(dataset, processor, num_workers=num_workers, patch_size=patch_size, on_error=on_error)
    if dist.get_local_rank() == 0:
        table.save(path)
    return table


def build_length_table(
    dataset: Any,
    processor: Any,
    *,
    num_workers: int | None = None,
    patch_size: int | None = None,
    on_error: OnError = 'raise',
) -> LengthTable:
    """Reads every sample of a dataset once, in parallel.

    Args:
        dataset: Map-style; samples hold ``input_ids`` and ``labels`` of shape ``(1, length)``.
        processor: Its Hugging Face processor or tokenizer.
        num_workers: Processes on each rank. None: one for each CPU core that the ranks of this node leave it.
        patch_size: Side of the vision tower's patches in pixels, for ``vision_patches``. None: what the processor
            declares; where it declares nothing (Idefics3, Gemma3, InternVL, ...), 14, the commonest, so that the column
            is then pixels in squares of 14 rather than patches. Nothing else in the table depends on it.
        on_error: What to do with a sample that raises :class:`.BadSampleError`: ``'raise'``, or ``'skip'``: keep the
            reason in ``errors``.

    Raises:
        BadSampleError: For the first bad sample (``'raise'``), on all ranks.
    """
    # A script of the user's may come here under the launcher, before there is a process group: each reads all, then.
    rank, num_ranks = (dist.get_global_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if num_workers is None:
        num_workers = (os.cpu_count() or 1) // dist.get_local_world_size()
    share = range(rank, len(dataset), num_ranks)
    rows = _Sizes(dataset, share, image_token_ids(processor), chosen_patch_size(processor, patch_size))
    num_workers = num_workers if len(rows) > FEWEST_FOR_WORKERS else 0
    # Own generator: a scan must not move the random numbers of the run.
    loader = DataLoader(rows, batch_size=None, num_workers=num_workers, generator=torch.Generator())
    sizes, errors = np.zeros((len(share), len(COLUMNS)), dtype=np.int32), {}
    bar = tqdm(loader, desc='measuring samples', disable=True if rank else None, leave=False)
    for position, row in enumerate(bar):
        if isinstance(row, str):
            errors[share[position]] = row
            if on_error == 'raise':
                break  # the other ranks learn of it below, where they wait
        else:
            sizes[position] = row
    table = np.zeros((len(dataset), len(COLUMNS)), dtype=np.int32)
    every_error: dict[int, str] = {}
    for other, (part, part_errors) in enumerate(_gather((sizes, errors))):
        table[other::num_ranks] = part
        every_error |= part_errors
    _raise_first(every_error, on_error)
    every_error = dict(sorted(every_error.items()))
    return LengthTable(**dict(zip(COLUMNS, table.T.copy(), strict=True)), errors=every_error)


def fingerprint(dataset: Any, processor: Any, *, patch_size: int | None = None) -> str:
    """A name that changes with the data, the processor, its tokenizer, the chat template, or the patch size.

    The data's part is ``dataset.fingerprint()`` where there is such a method. Otherwise it is the number of samples and
    the token ids of 64 of them, evenly spread: a change of samples between those goes unnoticed. A length that is wrong
    for that reason costs balance among ranks, and no more: the split measures every row and keeps the cap.
    """
    parts = {
        'version': VERSION,
        'dataset': _name(dataset),
        'num_samples': len(dataset),
        'patch_size': chosen_patch_size(processor, patch_size),
        **_describe(processor),
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    own = getattr(dataset, 'fingerprint', None)
    if own is not None:
        digest.update(str(own()).encode())
    else:
        for index in np.unique(np.linspace(0, len(dataset) - 1, NUM_PROBES).astype(int)).tolist():
            digest.update(np.asarray(dataset[index]['input_ids']).tobytes())
    return digest.hexdigest()[:32]


def image_token_ids(processor: Any) -> tuple[int, ...]:
    """Ids of the tokens that stand for images, videos and sounds in `input_ids`, as the processor declares them."""
    tokenizer = getattr(processor, 'tokenizer', None)
    found = {getattr(owner, f'{kind}_token_id', None) for owner in (processor, tokenizer) for kind in KINDS}
    for kind in KINDS:  # transformers < 4.52 gives some processors only the text of the token
        token = getattr(processor, f'{kind}_token', None)
        if tokenizer is not None and token is not None:
            found.add(tokenizer.convert_tokens_to_ids(str(token)))
    # SmolVLM's name for a video is no token: its frames are images.
    found.discard(getattr(tokenizer, 'unk_token_id', None))
    return tuple(sorted(token_id for token_id in found if isinstance(token_id, int)))


def chosen_patch_size(processor: Any, given: int | None) -> int:
    """The given side of a patch, or the one that the processor declares, or the commonest."""
    return given or declared_patch_size(processor) or DEFAULT_PATCH_SIZE


class _Sizes(Dataset):
    """For each of some samples a row of the table, in the order of its columns, or why the sample is bad."""

    def __init__(self, dataset: Any, indices: range, image_token_ids: tuple[int, ...], patch_size: int) -> None:
        self.dataset = dataset
        self.indices = indices
        self.image_token_ids = torch.tensor(image_token_ids)
        self.patch_size = patch_size

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[int, ...] | str:
        try:
            sample = self.dataset[self.indices[position]]
        except BadSampleError as error:
            return str(error)
        ids = sample['input_ids']
        num_image_tokens = int(torch.isin(ids, self.image_token_ids).sum())
        num_loss_tokens = int((sample['labels'][:, 1:] != IGNORE_INDEX).sum())
        return ids.shape[1], num_image_tokens, num_loss_tokens, count_patches(sample, self.patch_size)


def _raise_first(errors: dict[int, str], on_error: OnError) -> None:
    if errors and on_error == 'raise':
        raise BadSampleError(errors[min(errors)])


def _describe(processor: Any) -> dict[str, Any]:
    """What of a processor decides how many tokens a sample has."""
    tokenizer = getattr(processor, 'tokenizer', processor)
    vocabulary = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, 'get_vocab') else []
    return {
        'processor': _name(processor),
        'config': processor.to_dict() if hasattr(processor, 'to_dict') else {},
        'parts': [
            getattr(getattr(processor, name, None), 'to_dict', dict)()
            for name in ('image_processor', 'video_processor', 'feature_extractor')
        ],
        'templates': [getattr(owner, 'chat_template', None) for owner in (processor, tokenizer)],
        'vocabulary': hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest(),
    }


def _name(thing: Any) -> str:
    return f'{type(thing).__module__}.{type(thing).__qualname__}'


def _gather(value: Any) -> list[Any]:
    """The values of all ranks."""
    return dist.all_gather_object(value) if dist.is_initialized() else [value]
