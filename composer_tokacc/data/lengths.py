# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How long each sample of a dataset is with the run's processor, and which are bad; kept in a file.

Known by reading all samples once, or most of them by the headers of their images; see :mod:`.headers`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from composer.utils import dist
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from tqdm.auto import tqdm

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.data.formats import KINDS, BadSampleError
from composer_tokacc.data.headers import Row, rows_from_headers
from composer_tokacc.data.identity import class_name, identify_data, identify_processor, identify_vocabulary
from composer_tokacc.data.media import DEFAULT_PATCH_SIZE, count_patches, declared_patch_size

__all__ = [
    'LengthTable',
    'build_length_table',
    'cache_folder',
    'chosen_patch_size',
    'fingerprint',
    'image_token_ids',
    'length_table',
]

VERSION = 5
"""Goes up with every change of what a table holds, so that files of older versions are not read."""
COLUMNS = ('lengths', 'image_tokens', 'loss_tokens', 'vision_patches')
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
        return LengthTable(**{name: getattr(self, name)[list(indices)] for name in COLUMNS})

    def save(self, path: Path) -> None:
        """Writes the table; a reader sees the whole file or none, even if several processes write at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = {name: getattr(self, name) for name in COLUMNS}
        bad, reasons = list(self.errors), list(self.errors.values())
        with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
            written = Path(unfinished) / path.name
            np.savez_compressed(written, **columns, bad=np.array(bad, np.int64), reasons=np.array(reasons, np.str_))
            os.replace(written, path)

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
            without arguments is used where there is one; see ``fingerprint``. So is ``measured``, a pair of a patch
            size and the table that was made with it.
        processor: Its Hugging Face processor or tokenizer.
        folder: Where tables are kept. Default: ``composer_tokacc/lengths`` in the user's cache folder.
        patch_size: As for ``build_length_table``.
        num_workers: Likewise.
        on_error: Likewise.

    Raises:
        BadSampleError: For the first bad sample (``'raise'``), on all ranks.
    """
    if isinstance(dataset, ConcatDataset):
        tables = [
            length_table(
                part, processor, folder=folder, patch_size=patch_size, num_workers=num_workers, on_error=on_error
            )
            for part in dataset.datasets
        ]
        starts = accumulate(map(len, tables), initial=0)
        errors = {
            start + index: reason
            for start, table in zip(starts, tables, strict=False)
            for index, reason in table.errors.items()
        }
        columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in COLUMNS}
        return LengthTable(**columns, errors=errors)
    patch_size = chosen_patch_size(processor, patch_size)
    measured = getattr(dataset, 'measured', None)
    if measured is not None and measured[0] == patch_size:
        return measured[1]
    folder = cache_folder('lengths') if folder is None else folder
    name = fingerprint(dataset, processor, patch_size=patch_size)
    # A table from headers does not know all bad samples, and must not be taken for one that does.
    endings = ('', '-headers') if _has_headers(dataset, on_error) else ('',)
    paths = [Path(folder) / f'{name}{ending}.npz' for ending in endings]
    for path in paths:
        table = _kept_table(path)
        if all(_gather(table is not None)):
            assert table is not None
            _raise_first(table.errors, on_error)
            return table
    table = build_length_table(dataset, processor, num_workers=num_workers, patch_size=patch_size, on_error=on_error)
    if dist.get_local_rank() == 0:
        try:
            table.save(paths[-1])
        except OSError as error:
            log.warning(
                'The lengths of the samples cannot be kept in %s (%s); the next run measures them again. Set '
                '`loader.lengths_folder` to a folder that can be written.', folder, error.strerror
            )  # fmt: skip
    return table


def cache_folder(name: str) -> Path:
    """One of this package's folders in the user's cache folder, there or not."""
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'composer_tokacc' / name


def _kept_table(path: Path) -> LengthTable | None:
    """The table in a file; None where there is none, or what is left of one."""
    try:
        return LengthTable.load(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # whatever numpy and zlib raise on a damaged file
        log.warning('The table of lengths %s is damaged (%s); the samples are measured again.', path, error)
        return None


def build_length_table(
    dataset: Any,
    processor: Any,
    *,
    num_workers: int | None = None,
    patch_size: int | None = None,
    on_error: OnError = 'raise',
) -> LengthTable:
    """Measures every sample of a dataset once, in parallel.

    Args:
        dataset: Map-style; samples hold ``input_ids`` and ``labels`` of shape ``(1, length)``. With ``outlines``, as
            :class:`.LlavaDataset` has it, and over 512 samples, most are not read (``'raise'`` only): a file that is
            damaged behind its header is then found by whoever reads it.
        processor: Its Hugging Face processor or tokenizer.
        num_workers: Processes on each rank. None: one for each CPU core that the ranks of this node leave it.
        patch_size: Side of the vision tower's patches in pixels, for ``vision_patches``. None: what the processor
            declares; where it declares nothing (Idefics3, Gemma3, InternVL, ...), 14, the commonest, so that the column
            is then pixels in squares of 14 rather than patches. Nothing else in the table depends on it.
        on_error: What to do with a sample that raises :class:`.BadSampleError`: ``'raise'``, or ``'skip'``: keep the
            reason in ``errors``, for which all samples are read.

    Raises:
        BadSampleError: For the first bad sample (``'raise'``), on all ranks.
    """
    # A script of the user's may come here under the launcher, before there is a process group: each reads all, then.
    rank, num_ranks = (dist.get_global_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if num_workers is None:
        num_workers = (os.cpu_count() or 1) // dist.get_local_world_size()
    share = range(rank, len(dataset), num_ranks)
    sizes = _Sizes(dataset, image_token_ids(processor), chosen_patch_size(processor, patch_size))
    mapped = partial(_mapped, num_workers=num_workers, hide_bar=None if rank == 0 else True)
    rows: list[Row | str | None] = [None] * len(share)
    if _has_headers(dataset, on_error):
        rows = _checked(rows_from_headers(dataset, share, sizes.row_of, mapped), share, sizes, len(dataset))
    open_rows = [position for position, row in enumerate(rows) if row is None]
    read = mapped(sizes, [share[position] for position in open_rows], FEWEST_FOR_WORKERS)
    for position, row in zip(open_rows, read, strict=False):
        rows[position] = row
        if isinstance(row, str) and on_error == 'raise':
            break  # the other ranks learn of it below, where they wait
    table = np.zeros((len(dataset), len(COLUMNS)), dtype=np.int32)
    every_error: dict[int, str] = {}
    errors = {index: row for index, row in zip(share, rows, strict=True) if isinstance(row, str)}
    numbers = np.array([row if isinstance(row, tuple) else (0,) * len(COLUMNS) for row in rows], np.int32)
    for other, (part, part_errors) in enumerate(_gather((numbers.reshape(-1, len(COLUMNS)), errors))):
        table[other::num_ranks] = part
        every_error |= part_errors
    _raise_first(every_error, on_error)
    every_error = dict(sorted(every_error.items()))
    return LengthTable(**dict(zip(COLUMNS, table.T.copy(), strict=True)), errors=every_error)


def fingerprint(dataset: Any, processor: Any, *, patch_size: int | None = None) -> str:
    """A name that changes with the data, the processor, its tokenizer, the chat template, or the patch size.

    The data's part is ``dataset.fingerprint()`` where there is such a method, or :func:`.identify_data`. A length that
    is wrong because that overlooked a change costs balance among ranks, and no more: the split measures every row and
    keeps the cap.
    """
    own = getattr(dataset, 'fingerprint', None)
    parts = [
        VERSION,
        class_name(dataset),
        len(dataset),
        chosen_patch_size(processor, patch_size),
        identify_processor(processor),
        identify_vocabulary(processor),
        identify_data(dataset) if own is None else own(),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


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


class _Sizes:
    """For a sample of a dataset a row of the table, in the order of its columns, or why the sample is bad."""

    def __init__(self, dataset: Any, image_token_ids: tuple[int, ...], patch_size: int) -> None:
        self.dataset = dataset
        self.image_token_ids = torch.tensor(image_token_ids)
        self.patch_size = patch_size

    def __call__(self, index: int) -> Row | str:
        try:
            return self.row_of(self.dataset[index])
        except BadSampleError as error:
            return str(error)

    def row_of(self, sample: Mapping[str, Any]) -> Row:
        ids = sample['input_ids']
        num_image_tokens = int(torch.isin(ids, self.image_token_ids).sum())
        num_loss_tokens = int((sample['labels'][:, 1:] != IGNORE_INDEX).sum())
        return ids.shape[1], num_image_tokens, num_loss_tokens, count_patches(sample, self.patch_size)


class _Mapped(Dataset):
    """Results of a function for some items."""

    def __init__(self, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
        self.function = function
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> Any:
        return self.function(self.items[position])


def _has_headers(dataset: Any, on_error: OnError) -> bool:
    """Whether most samples need not be read. Ranks that skip bad ones must agree on them, so there all are read."""
    return on_error == 'raise' and len(dataset) > FEWEST_FOR_HEADERS and hasattr(dataset, 'outlines')


def _mapped(
    function: Callable[[Any], Any], items: Sequence[Any], fewest: int, *, num_workers: int, hide_bar: bool | None
) -> Iterator[Any]:
    """Results of a function for some items, made by worker processes where there are more than ``fewest``."""
    # Own generator: a scan must not move the random numbers of the run.
    loader = DataLoader(
        _Mapped(function, items),
        batch_size=None,
        num_workers=num_workers if len(items) > fewest else 0,
        generator=torch.Generator(),
        collate_fn=_unchanged,
    )
    yield from tqdm(loader, desc='measuring samples', disable=hide_bar, leave=False)


def _unchanged(value: Any) -> Any:
    return value


def _checked(rows: Sequence[Row | None], share: range, sizes: _Sizes, num_samples: int) -> list[Row | str | None]:
    """The rows if those of a random sample are what reading says, on all ranks; else none of them."""
    chosen = set(np.random.default_rng(0).choice(num_samples, NUM_CHECKED, replace=False).tolist())
    checked: list[Row | str | None] = list(rows)
    wrong = ''
    for position, index in enumerate(share):
        if index in chosen and (row := rows[position]) is not None:
            checked[position] = read = sizes(index)
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
    """The values of all ranks."""
    return dist.all_gather_object(value) if dist.is_initialized() else [value]
