# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Lengths of all samples of a dataset with the run's processor, and which are bad; kept in a file.

Known by reading all samples once, or most of them by the headers of their images; see :mod:`.headers`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from composer_tokacc.batch import IGNORE_INDEX, MODALITIES
from composer_tokacc.cache import cache_folder, fingerprint, keep, load_kept, whole_file
from composer_tokacc.data.headers import TableRow, rows_from_headers
from composer_tokacc.data.identity import class_name, identify_data, identify_processor, identify_vocabulary
from composer_tokacc.data.records import BadSampleError

TABLE_VERSION = 7
"""Goes up with every change of what a table holds, so that files of older versions are not read."""
SHRINK_STEPS = 'shrink_steps'
"""Entry of a sample whose media are made to fit, a list of one, while its dataset is measured."""
TABLE_COLUMNS = ('lengths', 'image_tokens', 'loss_tokens', 'vision_patches', SHRINK_STEPS)
FEWEST_FOR_WORKERS = 512
"""Starting processes takes longer than reading fewer samples than these."""
FEWEST_FOR_HEADERS = 512
"""So few samples are always read: their bad ones are known at the start then."""
NUM_CHECKED = 64
"""Samples that are read in any case, to see whether headers say the same."""
DEFAULT_PATCH_SIZE = 14
"""The commonest side of a patch, in pixels, for where neither model nor processor names one."""

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
            _raise_first(table.errors, on_error)
            return table
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
    row_of = partial(_row_of, image_token_ids(processor), patch_size_of(patch_size, processor))
    read_row = partial(_read_row, dataset, row_of)
    map_samples = partial(_map_samples, num_workers=num_workers, hide_bar=None if rank == 0 else True)
    rows: list[TableRow | str | None] = [None] * len(own)
    if _has_headers(dataset, on_error):
        rows = _checked(rows_from_headers(dataset, own, row_of, map_samples), own, read_row, len(dataset))
    unknown = [position for position, row in enumerate(rows) if row is None]
    read = map_samples(read_row, [own[position] for position in unknown], FEWEST_FOR_WORKERS)
    for position, row in zip(unknown, read, strict=False):
        rows[position] = row
        if isinstance(row, str) and on_error == 'raise':
            break  # the other ranks learn of it below, where they wait
    return _gathered(rows, own, len(dataset), on_error)


def _gathered(rows: Sequence[TableRow | str | None], own: range, num_samples: int, on_error: OnError) -> LengthTable:
    """Joins the rows of all ranks."""
    errors = {index: row for index, row in zip(own, rows, strict=True) if isinstance(row, str)}
    numbers = np.array([row if isinstance(row, tuple) else (0,) * len(TABLE_COLUMNS) for row in rows], np.int32)
    table, all_errors = np.zeros((num_samples, len(TABLE_COLUMNS)), dtype=np.int32), {}
    for rank, (part, part_errors) in enumerate(_gather((numbers.reshape(-1, len(TABLE_COLUMNS)), errors))):
        table[rank :: own.step] = part
        all_errors |= part_errors
    _raise_first(all_errors, on_error)
    columns = dict(zip(TABLE_COLUMNS, table.T.copy(), strict=True))
    return LengthTable(**columns, errors=dict(sorted(all_errors.items())))


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


def image_token_ids(processor: Any) -> tuple[int, ...]:
    """Returns ids of the tokens that stand for images, videos and audio, as the processor declares them."""
    tokenizer = getattr(processor, 'tokenizer', None)
    found = {getattr(owner, f'{name}_token_id', None) for owner in (processor, tokenizer) for name in MODALITIES}
    for name in MODALITIES:  # transformers < 4.52 gives some processors only the text of the token
        token = getattr(processor, f'{name}_token', None)
        if tokenizer is not None and token is not None:
            found.add(tokenizer.convert_tokens_to_ids(str(token)))
    # SmolVLM's name for a video is no token: its frames are images.
    found.discard(getattr(tokenizer, 'unk_token_id', None))
    return tuple(sorted(token_id for token_id in found if isinstance(token_id, int)))


def patch_size_of(*owners: Any) -> int:
    """Returns the side of a patch in pixels that the first of some owners names, else the commonest.

    Args:
        *owners: A number; a model's config, or its ``vision_config``; a processor, or its ``image_processor``; None.
    """
    for owner in owners:
        parts = (getattr(owner, 'vision_config', None), owner, getattr(owner, 'image_processor', None))
        for named in (owner, *(getattr(part, 'patch_size', None) for part in parts)):
            if isinstance(named, Mapping):
                named = named.get('height')
            elif isinstance(named, list | tuple):
                named = next(iter(named), None)
            named = getattr(named, 'height', named)  # SizeDict of transformers 5
            if isinstance(named, int) and named > 0:
                return named
    return DEFAULT_PATCH_SIZE


def count_patches(sample: Mapping[str, Any], patch_size: int) -> int:
    """Counts the patches that a vision encoder computes for one sample; a class token is none.

    What the encoder is given but drops before its first block does not count: tiles that only fill up an image's row,
    and what surrounds an image smaller than its batch (Pixtral). Padding that it computes does: Mllama's unused
    tiles, and the margins of a tile.

    Args:
        sample: What the processor returns for it.
        patch_size: Side of a patch in pixels. Of no importance where the processor cuts the patches (Qwen-VL).
    """
    # Video-LLaVA's processor names images by themselves.
    images = sample.get('pixel_values', sample.get('pixel_values_images'))
    videos = sample.get('pixel_values_videos')
    num_patches = 0 if images is None else _patches_of(images, patch_size, sample.get('image_sizes'))
    if videos is not None and videos.dim() == 5:  # of clips all is computed, what is grey too
        videos = videos.flatten(0, 1)
    return num_patches + (0 if videos is None else _patches_of(videos, patch_size, None))


def _patches_of(pixels: torch.Tensor, patch_size: int, image_sizes: Any) -> int:
    """Counts patches of ``(..., channels, height, width)``, or of ``(..., values)`` where each entry is one already."""
    if pixels.dim() < 4:
        return pixels.shape[:-1].numel()
    if pixels.dim() == 4 and image_sizes is not None:
        return int((torch.as_tensor(image_sizes) // patch_size).prod(dim=1).sum())
    num_tiles = pixels.shape[:-3].numel()
    if pixels.dim() == 5 and not pixels.is_meta:
        # Idefics3 takes out tiles of nothing but zeros; LLaVA-NeXT and OneVision those that their processors add, which
        # are the same. Mllama (6 dimensions) computes all. Where only sizes are asked for (meta), no tile fills up.
        num_tiles = int(pixels.flatten(2).any(dim=2).sum())
    height, width = pixels.shape[-2:]
    return num_tiles * (height // patch_size) * (width // patch_size)


def _row_of(token_ids: tuple[int, ...], patch_size: int, sample: Mapping[str, Any]) -> TableRow:
    if missing := {'input_ids', 'labels'} - sample.keys():
        raise ValueError(f'`dataset` must give samples with `input_ids` and `labels`, got: one without {min(missing)}.')
    ids = sample['input_ids']
    num_image_tokens = int(torch.isin(ids, torch.tensor(token_ids)).sum())
    num_loss_tokens = int((sample['labels'][:, 1:] != IGNORE_INDEX).sum())
    steps = sample.get(SHRINK_STEPS, [0])[0]
    return ids.shape[1], num_image_tokens, num_loss_tokens, count_patches(sample, patch_size), steps


def _read_row(dataset: Any, row_of: Callable[[Mapping[str, Any]], TableRow], index: int) -> TableRow | str:
    """Returns a row of the table, in the order of its columns, or why the sample is bad."""
    try:
        return row_of(dataset[index])
    except BadSampleError as error:
        return str(error)


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


def _checked(
    rows: Sequence[TableRow | None], own: range, read_row: Callable[[int], TableRow | str], num_samples: int
) -> list[TableRow | str | None]:
    """Returns the rows if those of a random sample are what reading says, on all ranks; else none of them."""
    chosen = set(np.random.default_rng(0).choice(num_samples, NUM_CHECKED, replace=False).tolist())
    checked: list[TableRow | str | None] = list(rows)
    wrong = ''
    for position, index in enumerate(own):
        if index in chosen and (row := rows[position]) is not None:
            checked[position] = read = read_row(index)
            if read != row and not isinstance(read, str):
                wrong = f'sample {index}: {row} for {read}'
    first = next(filter(None, _gather(wrong)), None)
    if first is None:
        return checked
    log.warning('Sizes from headers are not those of the samples (%s), so all %d samples are read.', first, num_samples)
    return [None] * len(rows)


def _raise_first(errors: dict[int, str], on_error: OnError) -> None:
    if errors and on_error == 'raise':
        raise BadSampleError(errors[min(errors)])


def _gather(value: Any) -> list[Any]:
    """Returns the values of all ranks."""
    return dist.all_gather_object(value) if dist.is_initialized() else [value]
