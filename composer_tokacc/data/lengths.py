# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Lengths of all samples of a dataset with the run's processor, and which are bad; kept in a file.

Known by reading all samples once, or most of them by the headers of their images; see :mod:`.sizes`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from composer.utils import dist
from torch.utils.data import ConcatDataset, DataLoader
from tqdm.auto import tqdm

from composer_tokacc.cache import cache_folder, fingerprint, keep, load_kept, whole_file
from composer_tokacc.data.identity import class_name, identify_data, identify_processor, identify_vocabulary
from composer_tokacc.data.records import BadSampleError
from composer_tokacc.data.sizes import SHRINK_STEPS, RowSizes, TableRow, patch_size_of

TABLE_VERSION = 7
"""Goes up with every change of what a table holds, so that files of older versions are not read."""
TABLE_COLUMNS = ('lengths', 'image_tokens', 'loss_tokens', 'vision_patches', SHRINK_STEPS)
FEWEST_FOR_WORKERS = 512
"""Starting processes takes longer than reading fewer samples than these."""
FEWEST_FOR_HEADERS = 512
"""So few samples are always read: their bad ones are known at the start then."""
NUM_CHECKED = 64
"""Samples that are read in any case, to see whether headers say the same."""

log = logging.getLogger(__name__)

OnError = Literal['raise', 'skip']


@dataclass(frozen=True, kw_only=True)
class LengthTable:
    """Sizes of all samples of a dataset, by index, each int32 (n,)."""

    lengths: np.ndarray
    """Tokens, image tokens included."""
    image_tokens: np.ndarray
    """Tokens that stand for images, videos and audio, among them."""
    loss_tokens: np.ndarray
    """Positions that carry loss under the causal shift."""
    vision_patches: np.ndarray
    """Patches that the vision encoder computes, before a resampler or a merge makes image tokens of them."""
    shrink_steps: np.ndarray = None  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]  # zeros
    """Steps by which the budgets of its media were lowered so that it fits; 0: it fits as it is."""
    errors: dict[int, str] = field(default_factory=dict)
    """Why a sample cannot be used, by index; all its sizes are 0."""

    def __post_init__(self) -> None:
        if self.shrink_steps is None:
            object.__setattr__(self, SHRINK_STEPS, np.zeros_like(self.lengths))
        if len(sizes := {np.shape(getattr(self, name)) for name in TABLE_COLUMNS}) > 1:
            raise ValueError(f'The columns of a length table must be of one shape (n,), got: {sorted(sizes)}.')

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, indices: Sequence[int]) -> LengthTable:
        """Returns the table of some of the samples, none of them bad, in the given order."""
        return LengthTable(**{name: getattr(self, name)[list(indices)] for name in TABLE_COLUMNS})

    def save(self, path: Path) -> None:
        """Writes the table; a reader sees the whole file or none, even if several processes write at once."""
        arrays = {name: getattr(self, name) for name in TABLE_COLUMNS}
        arrays['bad'] = np.array(list(self.errors), np.int64)
        arrays['reasons'] = np.array(list(self.errors.values()), np.str_)
        with whole_file(path) as written:
            np.savez_compressed(written, **arrays)

    @classmethod
    def load(cls, path: Path) -> LengthTable:
        """Reads what :meth:`save` wrote."""
        with np.load(path, allow_pickle=False) as arrays:
            if missing := sorted({'bad', 'reasons', *TABLE_COLUMNS} - {*arrays}):
                raise ValueError(f'`path` must be a saved length table, got: {path} without {missing}.')
            errors = dict(zip(arrays['bad'].tolist(), arrays['reasons'].tolist(), strict=True))
            return cls(**{name: arrays[name] for name in TABLE_COLUMNS}, errors=errors)

    @classmethod
    def from_parts(cls, tables: Sequence[LengthTable]) -> LengthTable:
        """Joins the tables of datasets that follow one another."""
        starts = accumulate(map(len, tables), initial=0)
        pairs = [(start, table) for start, table in zip(starts, tables, strict=False)]
        errors = {start + index: reason for start, table in pairs for index, reason in table.errors.items()}
        columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in TABLE_COLUMNS}
        return cls(**columns, errors=errors)


def length_table(
    dataset: Any,
    processor: Any,
    *,
    folder: str | os.PathLike[str] | None = None,
    patch_size: int | None = None,
    num_workers: int | None = None,
    on_error: OnError = 'raise',
) -> LengthTable:
    """Returns the length table of a dataset, from its file if it was read before with the same processor.

    Under ``torch.distributed`` every rank must call it; they share the work, and one of each node writes the file.

    Args:
        dataset: Map-style, or a ``ConcatDataset`` of such, each with a file of its own; samples hold ``input_ids`` and
            ``labels`` of shape ``(1, length)``. Used where there are such: a ``fingerprint`` method, see
            ``table_name``; ``measured``, a pair of a patch size and the table that was made with it; and over 512
            samples ``unexpanded``, as :class:`.LlavaDataset` has it: most are not read then (``'raise'`` only), and a
            file that is damaged behind its header is found by whoever reads it.
        processor: Its Hugging Face processor or tokenizer.
        folder: Where tables are kept. Default: ``composer_tokacc/lengths`` in the user's cache folder.
        patch_size: Side of the vision encoder's patches in pixels, for ``vision_patches`` alone. None: what the
            processor declares, or 14, the commonest (Idefics3, Gemma3, InternVL, ... declare nothing).
        num_workers: Processes on each rank. None: one for each CPU core that the ranks of this node leave it.
        on_error: What to do with a sample that raises :class:`.BadSampleError`: ``'raise'``, or ``'skip'``: keep the
            reason in ``errors``, for which all samples are read.

    Raises:
        BadSampleError: For the first bad sample (``'raise'``), on all ranks.
    """
    if not len(dataset):
        raise ValueError('`dataset` must hold at least one sample, got: none.')
    patch_size = patch_size_of(patch_size, processor)
    options: dict[str, Any] = {'patch_size': patch_size, 'num_workers': num_workers, 'on_error': on_error}
    if isinstance(dataset, ConcatDataset):
        return LengthTable.from_parts(
            [length_table(part, processor, folder=folder, **options) for part in dataset.datasets]
        )
    measured = getattr(dataset, 'measured', None)
    if measured is not None and measured[0] == patch_size:
        return measured[1]
    if measured is not None and measured[1].shrink_steps.any():  # with other patches
        table = build_length_table(dataset, processor, **options)
        return replace(table, shrink_steps=measured[1].shrink_steps)
    folder = Path(cache_folder('lengths') if folder is None else folder)
    name = table_name(dataset, processor, patch_size=patch_size)
    # A table from headers does not know all bad samples, and must not be taken for one that does.
    paths = [folder / f'{name}{ending}.npz' for ending in ['', *['-headers'] * _has_headers(dataset, on_error)]]
    for path in paths:
        table = load_kept(path, LengthTable.load)
        if all(_gather(table is not None)):
            assert table is not None
            return _checked_table(table, on_error)
    table = build_length_table(dataset, processor, **options)
    if dist.get_local_rank() == 0:
        keep(paths[-1], table.save, hint='Set `loader.lengths_folder` to a folder that can be written.')
    return table


def build_length_table(
    dataset: Any,
    processor: Any,
    *,
    num_workers: int | None = None,
    patch_size: int | None = None,
    on_error: OnError = 'raise',
) -> LengthTable:
    """Measures every sample of a dataset once, in parallel; arguments as for :func:`length_table`."""
    # A script of the user's may come here under the launcher, before there is a process group: each reads all, then.
    rank, num_ranks = (dist.get_global_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if num_workers is None:
        num_workers = (os.cpu_count() or 1) // dist.get_local_world_size()
    own = range(rank, len(dataset), num_ranks)
    sizes = RowSizes(dataset, processor, patch_size_of(patch_size, processor))
    map_samples = partial(_map_samples, num_workers=num_workers, hide_bar=None if rank == 0 else True)
    rows: list[TableRow | str | None] = [None] * len(own)
    if _has_headers(dataset, on_error):
        rows = _checked(sizes.from_headers(own, map_samples), own, sizes)
    unknown = [position for position, row in enumerate(rows) if row is None]
    read = map_samples(sizes.read, [own[position] for position in unknown], FEWEST_FOR_WORKERS)
    for position, row in zip(unknown, read, strict=False):
        rows[position] = row
        if isinstance(row, str) and on_error == 'raise':
            break  # the other ranks learn of it below, where they wait
    gathered: list[TableRow | str | None] = [None] * len(dataset)
    for other, part in enumerate(_gather(rows)):
        gathered[other::num_ranks] = part
    errors = {index: row for index, row in enumerate(gathered) if isinstance(row, str)}
    numbers = np.array([row if isinstance(row, tuple) else (0,) * len(TABLE_COLUMNS) for row in gathered], np.int32)
    return _checked_table(
        LengthTable(**dict(zip(TABLE_COLUMNS, numbers.T.copy(), strict=True)), errors=errors), on_error
    )


def table_name(dataset: Any, processor: Any, *, patch_size: int | None = None) -> str:
    """Returns what changes with the data, the processor, its tokenizer, the chat template, or the patch size.

    The data's part is ``dataset.fingerprint()`` where there is such a method, or :func:`.identify_data`. A length that
    is wrong because that overlooked a change costs balance among ranks, and no more: the split measures every row and
    keeps the cap.
    """
    own = getattr(dataset, 'fingerprint', None)
    parts = [
        TABLE_VERSION,
        class_name(dataset),
        len(dataset),
        patch_size_of(patch_size, processor),
        identify_processor(processor),
        identify_vocabulary(processor),
        identify_data(dataset) if own is None else own(),
    ]
    return fingerprint(parts)


def _map_samples(
    function: Callable[[Any], Any], items: Sequence[Any], fewest: int, *, num_workers: int, hide_bar: bool | None
) -> Iterator[Any]:
    """Yields results of a function for some items, made by worker processes where there are more than ``fewest``."""
    loader: Any = DataLoader(
        items,  # pyright: ignore[reportArgumentType]  # a sequence will do
        batch_size=None,
        num_workers=num_workers if len(items) > fewest else 0,
        generator=torch.Generator(),  # its own: a scan must not move the random numbers of the run
        collate_fn=function,  # runs in the workers
    )
    yield from tqdm(loader, desc='measuring samples', disable=hide_bar, leave=False)


def _has_headers(dataset: Any, on_error: OnError) -> bool:
    """Tells whether most samples need not be read: not where ranks skip bad ones, on which they must agree."""
    return on_error == 'raise' and len(dataset) > FEWEST_FOR_HEADERS and hasattr(dataset, 'unexpanded')


def _checked(rows: Sequence[TableRow | None], own: range, sizes: RowSizes) -> list[TableRow | str | None]:
    """Returns the rows if those of a random sample are what reading says, on all ranks; else none of them."""
    num_samples = len(sizes.dataset)
    chosen = set(np.random.default_rng(0).choice(num_samples, NUM_CHECKED, replace=False).tolist())
    checked: list[TableRow | str | None] = list(rows)
    wrong = ''
    for position, index in enumerate(own):
        if index in chosen and (row := rows[position]) is not None:
            checked[position] = read = sizes.read(index)
            if read != row and not isinstance(read, str):
                wrong = f'sample {index}: {row} for {read}'
    first = next(filter(None, _gather(wrong)), None)
    if first is None:
        return checked
    log.warning('Sizes from headers are not those of the samples (%s), so all %d samples are read.', first, num_samples)
    return [None] * len(rows)


def _checked_table(table: LengthTable, on_error: OnError) -> LengthTable:
    """Returns a table, measured or kept, that a run can be planned by."""
    if table.errors and on_error == 'raise':
        raise BadSampleError(table.errors[min(table.errors)])
    if len(table.errors) < len(table) and not table.loss_tokens.any():
        raise ValueError(
            '`dataset` must have labels to learn, got: samples whose labels are all -100. Mask fewer of them, or add '
            'turns of the assistant.'
        )
    return table


def _gather(value: Any) -> list[Any]:
    """Returns the values of all ranks."""
    return dist.all_gather_object(value) if dist.is_initialized() else [value]
