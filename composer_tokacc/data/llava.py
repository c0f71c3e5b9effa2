# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Conversations in the files that people have, with any Hugging Face processor that has a chat template."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from composer_tokacc.cache import fingerprint
from composer_tokacc.data.control_tokens import ControlTokens
from composer_tokacc.data.conversation import ConversationEncoder
from composer_tokacc.data.files import read_records, read_texts
from composer_tokacc.data.fit import FittingEncoder, share_of
from composer_tokacc.data.images import image_size
from composer_tokacc.data.lengths import LengthTable, length_table
from composer_tokacc.data.media import open_files
from composer_tokacc.data.records import BadSampleError, EmbeddedFile, PathLike, Record
from composer_tokacc.data.sizes import SHRINK_STEPS, patch_size_of
from composer_tokacc.data.videos import VideoSampling
from composer_tokacc.planning import check_choice

log = logging.getLogger(__name__)


class LlavaDataset(Dataset):
    """Conversations about images, videos and audio, loss on the assistant's turns only, ending tokens included.

    With several files each sample carries the name of its own, ``source``.

    Bad samples are never replaced and never dropped in passing, so that every rank has the same samples at the same
    indices: with ``on_error='raise'`` a bad record raises at the start, an unreadable file or a sample over
    ``max_length`` when it is read. With ``'skip'`` every sample is read once, in parallel, the ranks sharing the work;
    bad ones are left out and counted (``skipped``, :meth:`skip_report`), and what was found is kept with the lengths.

    Args:
        path: JSON, JSONL or parquet file, ``dataset_info.json#name``, folder saved by ``datasets``, or
            ``hf://datasets/owner/name#split``; or several. ``docs/formats.md`` has the formats of records.
        processor: Hugging Face processor; for text alone a tokenizer will do.
        image_dir: Folder that names of media start from. ``None``: the folder of the file.
        allow_outside: Whether names may lead out of that folder: ``../``, absolute ones, links.
        video: Arguments of :class:`.VideoSampling`: ``num_frames``, or ``fps``; ``min_frames``, ``max_frames``.
        max_length: Longest sample allowed, in tokens, image tokens included. Nothing is ever truncated.
        fit: Make images and videos of a sample over ``max_length`` or ``max_image_tokens`` smaller, as ``docs/data.md``
            says. All samples are measured at the start then; ``fitted`` says what became of which.
        max_image_tokens: Most tokens of a sample's media (``fit`` only).
        control_tokens: As for :class:`.ConversationEncoder`.
        on_error: ``'raise'`` or ``'skip'``.
        num_workers: Processes that read the samples (``skip`` and ``fit`` only). ``None``: all cores.
        lengths_folder: Where what was found is kept (the same), see :func:`.length_table`.
        patch_size: Of the vision encoder, for the lengths that are kept with it; see there.

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
        allow_outside: bool = False,
        video: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        fit: bool = False,
        max_image_tokens: int | None = None,
        control_tokens: ControlTokens = 'warn',
        on_error: str = 'raise',
        num_workers: int | None = None,
        lengths_folder: PathLike | None = None,
        patch_size: int | None = None,
    ) -> None:
        check_choice('on_error', on_error, ('raise', 'skip'))
        check_choice('allow_outside', allow_outside, (True, False))
        if max_image_tokens is not None and not fit:
            raise ValueError(f'`max_image_tokens` must be left out without `fit`, got: {max_image_tokens}.')
        make = partial(FittingEncoder, max_image_tokens=max_image_tokens) if fit else ConversationEncoder
        sampling = VideoSampling(**(video or {}))
        self.encoder = make(processor, video=sampling, max_length=max_length, control_tokens=control_tokens)
        self.fits = fit
        self.measured: tuple[int, LengthTable] | None = None
        self.records: list[Record] = []
        self.folders: list[Path] = []
        self.skipped: list[str] = []
        self._read(read_records(path, image_dir=image_dir, allow_outside=allow_outside), on_error)
        if self.records and (on_error == 'skip' or fit):
            self._measure(patch_size, on_error=on_error, folder=lengths_folder, num_workers=num_workers)
        if not self.records:
            reason = ''.join(f' First: {one}' for one in self.skipped[:1])
            raise ValueError(f'`path` must hold at least one good sample, got: {path} with none.{reason}')

    def _read(self, records: Iterable[tuple[Record, Path] | BadSampleError], on_error: str) -> None:
        """Keeps the good records; the first bad one raises, or all are told."""
        for found in records:
            try:
                if isinstance(found, BadSampleError):
                    raise found
                self.encoder.check_takes_media(found[0])
            except BadSampleError as error:
                if on_error == 'raise':
                    raise
                self.skipped.append(str(error))
            else:
                self.records.append(found[0])
                self.folders.append(found[1])

    @staticmethod
    def texts(path: PathLike | Sequence[PathLike]) -> Iterator[str]:
        """Returns the text of every turn, without placeholders: what a tokenizer can be trained on."""
        return read_texts(path)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._encoded(index)

    def _encoded(self, index: int, *, shapes_only: bool = False) -> dict[str, Any]:
        record = self.records[index]
        known = {} if not self.fits or self.measured is None else {'steps': int(self.measured[1].shrink_steps[index])}
        files = open_files(record, self.folders[index])
        sample = self.encoder.encode_record(record, files, shapes_only=shapes_only, **known)
        if known:  # the length table has it; parts of a mixture that do not fit theirs have no such entry
            sample.pop(SHRINK_STEPS)
        return {**sample, 'source': [record.file_name]} if self._has_several_files else sample

    @cached_property
    def _has_several_files(self) -> bool:
        first = self.records[0].file_name
        return any(record.file_name != first for record in self.records)

    def unexpanded(self, indices: Sequence[int]) -> list[tuple[dict[str, Any], list[tuple[int, int]]] | None]:
        """Returns some samples before their placeholders are expanded, and image sizes: ``sizes`` needs no more.

        None for a sample that has to be read, be it for its videos, or only to learn what is wrong with it.
        """
        samples = self.encoder.encode_unexpanded([self.records[index].messages() for index in indices])
        found: list[tuple[dict[str, Any], list[tuple[int, int]]] | None] = [None] * len(samples)
        for position, (index, sample) in enumerate(zip(indices, samples, strict=True)):
            record = self.records[index]
            if sample is None or record.count('image') < len(record.media):
                continue
            with suppress(Exception):  # no image
                found[position] = sample, [image_size(file) for file in open_files(record, self.folders[index])]
        return found

    def shapes_of_videos(self, index: int) -> dict[str, Any] | None:
        """Returns a sample of the same shapes, one frame of each video decoded; None where there is no video."""
        return self._encoded(index, shapes_only=True) if self.records[index].count('video') else None

    def decoded(self, index: int) -> dict[str, list[Any]]:
        """Returns images, videos and audio of a sample by modality, as no processor has seen them yet."""
        record = self.records[index]
        return self.encoder.decode(record, open_files(record, self.folders[index]))

    def identity(self) -> str:
        """Changes with what a model is trained on: the turns, and the files by name and size, or embedded content.

        So it does with the frames that are taken of videos; not with where files lie, the ids of samples, or
        ``max_length``, which leaves out nothing in silence.
        """
        spelled = [('control_tokens', 'text')] if self.encoder.control.option == 'text' else []
        fitted = [('fit', self.encoder.max_length, self.encoder.max_image_tokens)] if self.fits else []
        return _all_digits(chain(self._identities(), spelled, fitted))

    def _identities(self) -> Iterator[tuple[Any, ...]]:
        for record, folder in zip(self.records, self.folders, strict=True):
            media = [(medium.modality, [_named(file, folder) for file in medium.files]) for medium in record.media]
            sampling = self.encoder.video if record.count('video') else None
            yield record.turns, media, sampling, *(() if record.loss_weights is None else (record.loss_weights,))

    def fingerprint(self) -> str:
        """Changes with all that decides on the length of a sample, or on what is said about a bad one."""
        named = ((one.sample_id, one.source, [medium.names for medium in one.media]) for one in self.records)
        return _all_digits(chain([(self.identity(), self.encoder.max_length)], named))

    def skip_report(self) -> str:
        """Returns one line: how many samples were left out, and why the first was."""
        total = len(self.records) + len(self.skipped)
        first = f'; first: {self.skipped[0]}' if self.skipped else ''
        return f'skipped {len(self.skipped)} of {total} samples{first}'

    def fitted(self) -> list[dict[str, Any]]:
        """Returns the samples whose media were made smaller: id, place, tokens now, and the share of the budgets."""
        if self.measured is None:
            return []
        table = self.measured[1]
        return [
            {'sample': one.sample_id, 'source': one.source, 'tokens': int(tokens), 'share': round(share_of(steps), 4)}
            for one, tokens, steps in zip(self.records, table.lengths, table.shrink_steps.tolist(), strict=True)
            if steps
        ]

    def _measure(self, patch_size: int | None, **options: Any) -> None:
        patch_size = patch_size_of(patch_size, self.encoder.processor)
        table = length_table(self, self.encoder.processor, patch_size=patch_size, **options)
        good = [index for index in range(len(self.records)) if index not in table.errors]
        self.skipped += table.errors.values()
        self.records = [self.records[index] for index in good]
        self.folders = [self.folders[index] for index in good]
        self.measured = patch_size, table.select(good)
        if self.skipped:
            log.warning(self.skip_report())


def _all_digits(parts: Iterable[tuple[Any, ...]]) -> str:
    """Returns a fingerprint as checkpoints of every release hold it."""
    return fingerprint((repr(part).encode() for part in parts), length=64)


def _named(file: str | EmbeddedFile, folder: Path) -> tuple[str, int]:
    if isinstance(file, EmbeddedFile):
        return '', file.checksum
    return os.path.basename(file), os.stat(folder / file).st_size
