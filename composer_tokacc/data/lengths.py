# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures all samples of a dataset with the run's processor, and keeps the lengths and the bad samples in a file.

All samples are read, except those of a large :class:`.LlavaDataset` with ``on_error='raise'``. Most of these are
measured from the headers of their images, see :mod:`.sizes`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from composer.utils import dist
from torch.utils.data import ConcatDataset

from composer_tokacc.arguments import check_choice
from composer_tokacc.cache import (
    cache_folder,
    fingerprint,
    keep,
    load_kept,
    whole_file,
)
from composer_tokacc.collectives import gather_if_grouped
from composer_tokacc.data.identity import (
    class_name,
    identify_data,
    identify_processor,
    identify_tokenization,
    identify_vocabulary,
)
from composer_tokacc.data.records import BadSampleError
from composer_tokacc.data.sizes import (
    SampleMeasurer,
    TableRow,
    map_samples,
    patch_size_of,
)
from composer_tokacc.refusals import InvalidInputError

TABLE_VERSION = 10
"""Increased when the content of a table changes, so that files of older versions are not read."""
TABLE_COLUMNS = ('lengths', 'image_tokens', 'loss_tokens', 'vision_patches', 'shrink_steps')
"""Attributes of :class:`LengthTable` that hold a number for each sample, in the order of the fields of
:class:`.TableRow`."""
MAX_SAMPLES_TO_READ = 512
"""Up to this number of samples, all are read, so that the bad ones are known at the start."""
NUM_CHECKED_ROWS = 64
"""If headers are used, the ranks together still read this number of samples, to check their rows from headers."""

log = logging.getLogger(__name__)

OnError = Literal['raise', 'skip']
MeasuredRow = TableRow | str | None
"""The row of a sample, the reason why it is bad, or None if it was not measured, because another one is bad."""


@dataclass(frozen=True, kw_only=True)
class LengthTable:
    """Sizes of all samples of a dataset, by index, each int32 (n,)."""

    lengths: np.ndarray
    """Tokens of the sample, image tokens included."""
    image_tokens: np.ndarray
    """The tokens among them that stand for images, videos and audio."""
    loss_tokens: np.ndarray
    """Positions that carry loss under the causal shift."""
    vision_patches: np.ndarray
    """Patches that the vision encoder computes, before a resampler or a merge makes image tokens of them."""
    shrink_steps: np.ndarray = None  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    """Steps by which `fit.py` makes a sample's media smaller. 0: the sample fits as it is. The default is all 0."""
    errors: dict[int, str] = field(default_factory=dict)
    """Reasons why samples cannot be used, by index. All sizes of such a sample are 0."""

    def __post_init__(self) -> None:
        if self.shrink_steps is None:
            # The dataclass is frozen, so a plain assignment would raise an error.
            object.__setattr__(self, 'shrink_steps', np.zeros_like(self.lengths))
        shapes = {np.shape(getattr(self, name)) for name in TABLE_COLUMNS}
        if len(shapes) > 1:
            raise InvalidInputError(f'The columns of a length table must be of one shape (n,), got: {sorted(shapes)}.')

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, indices: Sequence[int]) -> LengthTable:
        """Returns the table of some good samples, in the order of ``indices``. It has no ``errors``."""
        rows = list(indices)
        columns = {name: getattr(self, name)[rows] for name in TABLE_COLUMNS}
        return LengthTable(**columns)

    def save(self, path: Path) -> None:
        """Writes the table. A reader sees the complete file or none, even if several processes write at once."""
        arrays = {name: getattr(self, name) for name in TABLE_COLUMNS}
        arrays['bad'] = np.array(list(self.errors), np.int64)
        arrays['reasons'] = np.array(list(self.errors.values()), np.str_)
        with whole_file(path) as unfinished:
            np.savez_compressed(unfinished, **arrays)

    @classmethod
    def load(cls, path: Path) -> LengthTable:
        """Reads the file that :meth:`save` wrote."""
        with np.load(path, allow_pickle=False) as arrays:
            indices = arrays['bad'].tolist()
            reasons = arrays['reasons'].tolist()
            errors = dict(zip(indices, reasons, strict=True))
            columns = {name: arrays[name] for name in TABLE_COLUMNS}
            return cls(**columns, errors=errors)

    @classmethod
    def from_parts(cls, tables: Sequence[LengthTable]) -> LengthTable:
        """Joins the tables of datasets that follow one another."""
        errors = {}
        start = 0
        for table in tables:
            for index, reason in table.errors.items():
                errors[start + index] = reason
            start += len(table)
        columns = {}
        for name in TABLE_COLUMNS:
            parts = [getattr(table, name) for table in tables]
            columns[name] = np.concatenate(parts)
        return cls(**columns, errors=errors)

    @classmethod
    def from_rows(cls, rows: Sequence[MeasuredRow]) -> LengthTable:
        """Makes a table of the rows of all samples, in their order. The numbers of a bad or unmeasured sample are 0."""
        errors = {}
        numbers = np.zeros((len(rows), len(TABLE_COLUMNS)), np.int32)
        for index, row in enumerate(rows):
            if isinstance(row, str):
                errors[index] = row
            elif row is not None:
                numbers[index] = row
        columns = dict(zip(TABLE_COLUMNS, numbers.T.copy(), strict=True))
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
    """Returns the length table of a dataset, from its file if it was measured before with the same processor.

    Under ``torch.distributed`` every rank must call it. The ranks share the work, and one rank of each node writes the
    file.

    A dataset may have these methods and attributes, which are then used:

    - The method ``fingerprint()`` identifies the data, see ``table_name()``.
    - The attribute ``measured`` is a length table of the dataset's own. It is returned as it is, without any check.
    - The method ``unexpanded`` of :class:`.LlavaDataset`, only together with its ``encoder`` and ``shapes_of_videos``.
      For each index it returns the tokens before placeholders are expanded, and the sizes of the images. If the
      dataset has them, ``on_error`` is ``'raise'``, and there are more than 512 samples, most samples are measured from
      headers. A file that is damaged after its header is then noticed only in training.

    Args:
        dataset: A map-style dataset, or a ``ConcatDataset`` of some, each with its own file. Samples hold ``input_ids``
            and ``labels`` of shape ``(1, length)``.
        processor: The dataset's Hugging Face processor or tokenizer.
        folder: Folder of the tables. Default: ``composer_tokacc/lengths`` in the user's cache folder.
        patch_size: Side of the vision encoder's patches in pixels, used only for ``vision_patches``. None: the size
            that the processor names, or 14, the most common, if it names none (Idefics3, Gemma3, InternVL, ...).
        num_workers: Processes on each rank. None: the CPU cores of the node, divided among its ranks.
        on_error: Handling of a sample that raises :class:`.BadSampleError`. ``'raise'``, or ``'skip'``: keep the reason
            in ``errors``. With ``'skip'`` the first start reads all samples, and later starts only the bad ones.

    Raises:
        BadSampleError: For the first bad sample (``'raise'``), on all ranks.
        ValueError: If ``on_error`` is unknown, or if the dataset or a part of it is empty, or has no good sample with a
            label.
    """
    check_choice('on_error', on_error, ('raise', 'skip'))
    if not len(dataset):
        raise InvalidInputError('`dataset`, and each part of a ConcatDataset, must hold samples, got: none.')
    patch_size = patch_size_of(patch_size, processor)
    options: dict[str, Any] = {
        'patch_size': patch_size,
        'num_workers': num_workers,
        'on_error': on_error,
    }
    if isinstance(dataset, ConcatDataset):
        tables = [length_table(part, processor, folder=folder, **options) for part in dataset.datasets]
        return LengthTable.from_parts(tables)
    measured = getattr(dataset, 'measured', None)
    if isinstance(measured, LengthTable):  # an attribute of a user's class may be something else
        return measured
    name = table_name(dataset, processor, patch_size=patch_size)
    if _uses_headers(dataset, on_error):
        # Another file, because a table from headers may lack some bad samples, which a run with 'skip' must know.
        name += '-headers'
    folder = Path(cache_folder('lengths') if folder is None else folder)
    path = folder / f'{name}.npz'
    table = load_kept(path, LengthTable.load)
    # Bad samples are read again, because the user may have repaired a file, or installed a decoder.
    is_usable = table is not None and not table.errors
    # If any rank cannot load its file, or has bad samples in it, all ranks measure together.
    are_all_usable = all(gather_if_grouped(is_usable))
    if table is not None and are_all_usable:
        return _check_table(table, on_error)
    table = build_length_table(dataset, processor, earlier=table, **options)
    if dist.get_local_rank() == 0:
        keep(
            path,
            table.save,
            hint='Set `loader.lengths_folder` to a folder that can be written.',
        )
    return table


def build_length_table(
    dataset: Any,
    processor: Any,
    *,
    num_workers: int | None = None,
    patch_size: int | None = None,
    on_error: OnError = 'raise',
    earlier: LengthTable | None = None,
) -> LengthTable:
    """Measures every sample of a dataset. Every rank must call it. The table is not kept in a file.

    Arguments and errors are those of :func:`length_table`, except that an empty dataset has an empty table. Samples
    that are good in ``earlier`` are not measured again, unless headers are used.
    """
    check_choice('on_error', on_error, ('raise', 'skip'))
    # A script that a launcher starts may have no process group. Then each rank measures all samples.
    rank = 0
    num_ranks = 1
    if dist.is_initialized():
        rank = dist.get_global_rank()
        num_ranks = dist.get_world_size()
    if num_workers is None:
        num_workers = (os.cpu_count() or 1) // dist.get_local_world_size()
    map_items = partial(map_samples, num_workers=num_workers, shows_bar=rank == 0)
    measurer = SampleMeasurer(dataset, processor, patch_size_of(patch_size, processor), map_items)
    indices = range(rank, len(dataset), num_ranks)
    rows: list[MeasuredRow] = [None] * len(dataset)
    for rows_of_rank in gather_if_grouped(_measure_rows(measurer, indices, on_error, earlier)):
        for index, row in rows_of_rank.items():
            rows[index] = row
    return _check_table(LengthTable.from_rows(rows), on_error)


def _measure_rows(
    measurer: SampleMeasurer,
    indices: Sequence[int],
    on_error: OnError,
    earlier: LengthTable | None,
) -> dict[int, TableRow | str]:
    """Returns the rows of this rank's samples, by index. Every rank must call it, see :func:`_verified_rows`.

    Samples without a row from headers or ``earlier`` are read. With ``'raise'``, this ends after the first bad one.

    Args:
        measurer: Measures samples of the dataset.
        indices: The samples of this rank.
        on_error: See :func:`length_table`.
        earlier: A table of these samples. The rows of its good samples are taken from it. It is not used with headers:
            one rank may have such a table and another none, but all ranks must take part in the check of the headers.
    """
    rows: dict[int, TableRow | str] = {}
    if _uses_headers(measurer.dataset, on_error):
        rows = _verified_rows(measurer.from_headers(indices), measurer)
    elif earlier is not None:
        for index in set(indices).difference(earlier.errors):
            numbers = [int(getattr(earlier, name)[index]) for name in TABLE_COLUMNS]
            rows[index] = TableRow(*numbers)
    missing_indices = [index for index in indices if index not in rows]
    read_rows = measurer.map_items(measurer.read, missing_indices)
    for index, row in zip(missing_indices, read_rows, strict=True):
        rows[index] = row
        if isinstance(row, str) and on_error == 'raise':
            break  # the error is raised when the ranks have exchanged their rows, on all of them together
    return rows


def table_name(dataset: Any, processor: Any, *, patch_size: int | None = None) -> str:
    """Returns a name that changes with the data, the processor, its tokenizer, the chat template, or the patch size.

    The data are identified by ``dataset.fingerprint()`` if there is such a method, because ``identity()`` of
    :class:`.LlavaDataset` leaves out what only lengths or messages about bad samples depend on. Otherwise they are
    identified by :func:`.identify_data`. If a change of the data is not noticed, a length may be wrong. Then the ranks
    are balanced less well. Microbatches still keep their cap, because they are cut by the lengths in the batch.
    """
    if callable(getattr(dataset, 'fingerprint', None)):
        identity = dataset.fingerprint()
    else:
        identity = identify_data(dataset)
    parts = [
        TABLE_VERSION,
        class_name(dataset),
        len(dataset),
        patch_size_of(patch_size, processor),
        identify_processor(processor),
        identify_vocabulary(processor),
        identify_tokenization(processor),
        identity,
    ]
    return fingerprint(parts)


def _uses_headers(dataset: Any, on_error: OnError) -> bool:
    """Tells whether most samples are measured from headers. Not with ``'skip'``, which must find all bad samples."""
    return on_error == 'raise' and len(dataset) > MAX_SAMPLES_TO_READ and hasattr(dataset, 'unexpanded')


def _verified_rows(rows: Mapping[int, TableRow], measurer: SampleMeasurer) -> dict[int, TableRow | str]:
    """Returns the rows if they are right for some random samples, which are read. Every rank must call it.

    If a row is wrong on any rank, all ranks log a warning and return no rows, so that all samples are read. If a sample
    that was read is bad, the reason takes the place of its row.

    Args:
        rows: Rows of this rank's samples from their headers, by index.
        measurer: Reads samples.
    """
    num_samples = len(measurer.dataset)
    # Every rank and every run chooses the same samples, so that the result does not change between starts.
    generator = np.random.default_rng(0)
    chosen = set(generator.choice(num_samples, NUM_CHECKED_ROWS, replace=False).tolist())
    verified: dict[int, TableRow | str] = dict(rows)
    has_difference = False
    for index in chosen.intersection(rows):
        row = measurer.read(index)
        if isinstance(row, str):
            verified[index] = row
        elif row != rows[index]:
            has_difference = True
    if not any(gather_if_grouped(has_difference)):
        return verified
    log.warning('Sizes from headers are not those of the samples, so all %d samples are read.', num_samples)
    return {}


def _check_table(table: LengthTable, on_error: OnError) -> LengthTable:
    """Returns the table. Raises for a bad sample (``'raise'``), or if no label of a good sample carries loss."""
    if table.errors and on_error == 'raise':
        raise BadSampleError(table.errors[min(table.errors)])
    has_good_samples = len(table.errors) < len(table)
    if has_good_samples and not table.loss_tokens.any():
        raise InvalidInputError(
            '`dataset`, and each part of a ConcatDataset, must have labels to learn, got: samples whose labels are all '
            '-100. Mask fewer of them, or add turns of the assistant.'
        )
    return table
