# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Conversations in the files that people have, with any Hugging Face processor that has a chat template."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from composer_tokacc.data.conversation import ConversationEncoder
from composer_tokacc.data.files import image_folder, read_raw_records
from composer_tokacc.data.formats import BadSampleError, EmbeddedFile, Record, parse_record
from composer_tokacc.data.lengths import LengthTable, chosen_patch_size, length_table
from composer_tokacc.data.media import VideoSampling

__all__ = ['LlavaDataset']

log = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]


class LlavaDataset(Dataset):
    r"""Conversations about images, videos and sounds, loss on the assistant's turns only, ending tokens included.

    A record is ``{"id": ..., "image": "a.jpg" | ["a.jpg", ...], "conversations": [{"from": "human", "value":
    "<image>\nWhat is this?"}, {"from": "gpt", "value": "A cat."}, ...]}``, or one of the other formats in
    :data:`.formats.FORMATS`; ``docs/data.md`` has a table of them.

    Bad samples are never replaced and never dropped in passing, so that every rank has the same samples at the same
    indices:

    - ``on_error='raise'``: a bad line, a missing file, or media that do not match their placeholders raise at the
      start; an unreadable file or a sample over ``max_length`` raises when it is read.
    - ``on_error='skip'``: every sample is read once, in parallel, the ranks sharing the work; bad ones are left out and
      counted (:attr:`skipped`, :meth:`skip_report`). What was found is kept with the lengths, so that later runs on the
      same files read nothing twice. A file that breaks after that still raises.

    Args:
        path: JSON, JSONL or parquet file, ``dataset_info.json#name``, folder saved by ``datasets``, or
            ``hf://datasets/owner/name#split``; or several.
        processor: Hugging Face processor; for text alone a tokenizer will do.
        image_dir: Folder that names of images, videos and sounds start from. ``None``: the folder of the file.
        video: Arguments of :class:`.VideoSampling`: ``num_frames``, or ``fps``; ``min_frames``, ``max_frames``.
        max_length: Longest sample allowed, in tokens, image tokens included. Nothing is ever truncated.
        on_error: ``'raise'`` or ``'skip'``.
        num_workers: Processes that read the samples (``skip`` only). ``None``: all cores.
        lengths_folder: Where what was found is kept (``skip`` only), see :func:`.length_table`.
        patch_size: Of the vision tower, for the lengths that are kept with it; see there.

    Raises:
        BadSampleError: For the first bad sample (``raise``), or when no sample is good (``skip``).
        ValueError: If a file is missing, empty, in no known format, or a JSON array with a syntax error, or a decoder
            of videos is not installed.
    """

    def __init__(
        self,
        path: PathLike | Sequence[PathLike],
        processor: Any,
        *,
        image_dir: PathLike | None = None,
        video: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        on_error: str = 'raise',
        num_workers: int | None = None,
        lengths_folder: PathLike | None = None,
        patch_size: int | None = None,
    ) -> None:
        if on_error not in ('raise', 'skip'):
            raise ValueError(f"`on_error` must be 'raise' or 'skip', got: {on_error!r}.")
        self.encoder = ConversationEncoder(processor, max_length=max_length, video=VideoSampling(**(video or {})))
        self.measured: tuple[int, LengthTable] | None = None
        self.records: list[Record] = []
        self.folders: list[Path] = []
        self.skipped: list[str] = []
        folder_listings: dict[Path, set[str]] = {}
        for file in _paths(path):
            folder = image_folder(file) if image_dir is None else Path(image_dir)
            for raw in read_raw_records(file):
                try:
                    record = parse_record(raw)
                    self._check_media(record, folder, folder_listings)
                except BadSampleError as error:
                    if on_error == 'raise':
                        raise
                    self.skipped.append(str(error))
                else:
                    self.records.append(record)
                    self.folders.append(folder)
        if on_error == 'skip':
            self._skip_unreadable(patch_size, folder=lengths_folder, num_workers=num_workers)
        if not self.records:
            reason = f' First: {self.skipped[0]}' if self.skipped else ''
            raise ValueError(f'`path` must hold at least one good sample, got: {path} with none.{reason}')

    @staticmethod
    def texts(path: PathLike | Sequence[PathLike]) -> Iterator[str]:
        """Yields the text of every turn, without placeholders: what a tokenizer can be trained on."""
        for file in _paths(path):
            for raw in read_raw_records(file):
                try:
                    yield from parse_record(raw).texts
                except BadSampleError:
                    continue  # the dataset reports it

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records[index]
        return self.encoder.encode_record(record, record.files(self.folders[index]))

    def fingerprint(self) -> str:
        """Changes with the conversations, the size of files, the content of embedded ones, and what is made of them."""
        digest = hashlib.sha256(repr((self.encoder.max_length, self.encoder.video)).encode())
        for record, folder in zip(self.records, self.folders, strict=True):
            media = [
                (medium.kind, medium.names, [_size_of(file, folder) for file in medium.files])
                for medium in record.media
            ]
            digest.update(repr((record.sample_id, record.source, record.turns, media)).encode())
        return digest.hexdigest()

    def skip_report(self) -> str:
        """One line for the end of a run: how many samples were left out, and why the first was."""
        total = len(self.records) + len(self.skipped)
        first = f'; first: {self.skipped[0]}' if self.skipped else ''
        return f'skipped {len(self.skipped)} of {total} samples{first}'

    def _check_media(self, record: Record, folder: Path, listings: dict[Path, set[str]]) -> None:
        self.encoder.check_takes_media(record)
        for medium in record.media:
            for file in (folder / file for file in medium.files if isinstance(file, str)):
                if file.parent not in listings:  # one listing of a folder instead of one question a file
                    listings[file.parent] = set(os.listdir(file.parent)) if file.parent.is_dir() else set()
                if file.name not in listings[file.parent]:
                    raise record.error(f'{medium.kind} file {file} does not exist; is `image_dir` right?')

    def _skip_unreadable(self, patch_size: int | None, **options: Any) -> None:
        if not self.records:
            return
        patch_size = chosen_patch_size(self.encoder.processor, patch_size)
        table = length_table(self, self.encoder.processor, patch_size=patch_size, on_error='skip', **options)
        good = [index for index in range(len(self.records)) if index not in table.errors]
        self.skipped += table.errors.values()
        self.records = [self.records[index] for index in good]
        self.folders = [self.folders[index] for index in good]
        self.measured = patch_size, table.select(good)
        if self.skipped:
            log.warning(self.skip_report())


def _size_of(file: str | EmbeddedFile, folder: Path) -> int:
    return os.stat(folder / file).st_size if isinstance(file, str) else file.checksum


def _paths(path: PathLike | Sequence[PathLike]) -> list[PathLike]:
    return [path] if isinstance(path, (str, os.PathLike)) else list(path)
