# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A dataset of conversations in a file, for any Hugging Face processor that has a chat template."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from composer_tokacc.arguments import check_choice
from composer_tokacc.batch import MODALITIES
from composer_tokacc.cache import fingerprint_of_bytes
from composer_tokacc.data.control_tokens import ControlTokens
from composer_tokacc.data.conversation import ConversationEncoder, TrainOn
from composer_tokacc.data.files import read_records, read_texts
from composer_tokacc.data.fit import (
    FittingEncoder,
    find_pixel_coordinates,
    share_of,
)
from composer_tokacc.data.images import image_size
from composer_tokacc.data.lengths import LengthTable, OnError, length_table
from composer_tokacc.data.media import open_files
from composer_tokacc.data.records import (
    BadSampleError,
    DecodedMedia,
    EmbeddedFile,
    EncodedSample,
    PathLike,
    Record,
)
from composer_tokacc.data.sizes import ImageSizes
from composer_tokacc.data.videos import VideoSampling
from composer_tokacc.refusals import InvalidInputError

log = logging.getLogger(__name__)


class LlavaDataset(Dataset):
    """Conversations about images, videos and audio. Loss is on the answers of the assistant and their ending tokens.

    With several files each sample carries the name of its file as ``source``. If two of them have the same name, it is
    the path below the folder that all files have in common, such as ``a/train.json``.

    A bad sample is never replaced, and never dropped during training, so that every rank has the same samples at the
    same indices. With ``on_error='raise'`` a bad record raises at the start. An unreadable file, or a sample over
    ``max_length``, raises when it is read. (With ``fit`` most raise at the start, when all samples are measured.) With
    ``'skip'`` all samples are read at the start. Bad ones are left out and counted (``skipped``, :meth:`skip_report`).
    The result is kept in the length table, so that a later run reads only the bad ones again. The ranks share such
    work, so every rank must make the dataset.

    Args:
        path: JSON, JSONL or parquet file, ``dataset_info.json#name``, folder saved by ``datasets``, or
            ``hf://datasets/owner/name#split``; or several of these. ``docs/formats.md`` shows the formats of records.
        processor: Hugging Face processor. For text only, a tokenizer is enough.
        image_dir: Folder to which names of media are relative. ``None``: the folder of the file.
        allow_outside: Whether names may lead out of that folder: ``../``, absolute ones, links.
        video: Arguments of :class:`.VideoSampling`: ``num_frames``, or ``fps``; ``min_frames``, ``max_frames``.
        max_length: Longest sample allowed, in tokens, image tokens included. Nothing is ever truncated.
        fit: Whether to make images and videos of a sample over ``max_length`` or ``max_image_tokens`` smaller, see
            ``docs/data.md``. Then all samples are measured at the start. :meth:`fitted` lists the changed ones.
        max_image_tokens: Most tokens of a sample's media (``fit`` only).
        control_tokens: As for :class:`.ConversationEncoder`.
        train_on: ``'all'`` answers of a conversation, or only the ``'last'``; see :class:`.ConversationEncoder`.
        add_end_token: Whether to add the ending token after answers that the chat template leaves open.
        on_error: ``'raise'`` or ``'skip'``.
        num_workers: Processes on each rank that read the samples (``skip`` and ``fit`` only). ``None``: the CPU cores
            of the node, divided among its ranks.
        lengths_folder: Folder of the length table, which keeps the result (``skip`` and ``fit`` only), see
            :func:`.length_table`.
        patch_size: Side of the vision encoder's patches in pixels, for the same table. ``None``: the processor's.

    Raises:
        BadSampleError: For the first bad sample (``raise``).
        ValueError: If a file is missing, empty, in no known format, or a JSON array with a syntax error; if no sample
            is good; or if a decoder of videos is not installed.
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
        train_on: TrainOn = 'all',
        add_end_token: bool = True,
        on_error: OnError = 'raise',
        num_workers: int | None = None,
        lengths_folder: PathLike | None = None,
        patch_size: int | None = None,
    ) -> None:
        check_choice('on_error', on_error, ('raise', 'skip'))
        check_choice('allow_outside', allow_outside, (True, False))
        if max_image_tokens is not None and not fit:
            raise InvalidInputError(f'`max_image_tokens` must be left out without `fit`, got: {max_image_tokens}.')
        options: dict[str, Any] = {
            'max_length': max_length,
            'video': VideoSampling(**(video or {})),
            'control_tokens': control_tokens,
            'train_on': train_on,
            'add_end_token': add_end_token,
        }
        if fit:
            self.encoder: ConversationEncoder = FittingEncoder(processor, max_image_tokens=max_image_tokens, **options)
        else:
            self.encoder = ConversationEncoder(processor, **options)
        self.measured: LengthTable | None = None
        """Length table of `records`. None if the samples were not measured for ``skip`` or ``fit``."""
        self.records: list[Record] = []
        """The good records. A sample is encoded from its record when it is read."""
        self.skipped: list[str] = []
        """For each bad sample that was left out: the reason, which names the sample."""
        self._identity: str | None = None
        """Result of `identity`. None before the first call."""
        self._keep_good(
            read_records(path, image_dir=image_dir, allow_outside=allow_outside),
            on_error,
        )
        # Before `_measure`, which encodes the samples, and may leave out all records of a file.
        paths = {record.path for record in self.records}
        self._source_names = _names_of_files(paths)
        if self.records and (on_error == 'skip' or fit):
            self._measure(
                patch_size=patch_size,
                on_error=on_error,
                folder=lengths_folder,
                num_workers=num_workers,
            )
        if not self.records:
            first = f' The first is bad: {self.skipped[0]}' if self.skipped else ''
            raise InvalidInputError(
                f'`path` must hold at least one good sample, but {str(path)[:300]} has none.{first}'
            )

    def _keep_good(
        self,
        records: Iterable[Record | BadSampleError],
        on_error: OnError,
    ) -> None:
        """Keeps the good records. Raises the error of the first bad one, or keeps the errors of all in `skipped`."""
        for record in records:
            checked = self._check(record)
            if isinstance(checked, Record):
                self.records.append(checked)
            elif on_error == 'raise':
                raise checked
            else:
                self.skipped.append(str(checked))

    def _check(self, record: Record | BadSampleError) -> Record | BadSampleError:
        """Returns the record, or the error if reading it has failed or the encoder refuses it."""
        if isinstance(record, BadSampleError):
            return record
        try:
            self.encoder.check_takes_media(record)
        except BadSampleError as error:
            return error
        return record

    @staticmethod
    def texts(path: PathLike | Sequence[PathLike]) -> Iterator[str]:
        """Yields the text of every turn, without placeholders, to train a tokenizer on. Leaves out bad records."""
        return read_texts(path)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> EncodedSample:
        return self._encode(index)

    def _encode(self, index: int, *, shapes_only: bool = False) -> EncodedSample:
        """Encodes a sample. With ``fit``, its media are made smaller by the steps in the length table."""
        record = self.records[index]
        files = open_files(record)
        options = {}
        # Without `steps` the encoder searches for them. That is so while `_measure` runs, before there is a table.
        if self.measured is not None and isinstance(self.encoder, FittingEncoder):
            options['steps'] = int(self.measured.shrink_steps[index])
        sample = self.encoder.encode_record(record, files, shapes_only=shapes_only, **options)
        if self._source_names:
            sample['source'] = [self._source_names[record.path]]
        return sample

    def unexpanded(self, indices: Sequence[int]) -> list[tuple[EncodedSample, ImageSizes] | None]:
        """Returns samples with placeholders that are not expanded, and width and height of their images.

        This is enough to compute the length of a sample, see `sizes.py`. The result is None for samples that must be
        read to know their length: those with videos or audio, and bad ones.
        """
        conversations = [self.records[index].messages() for index in indices]
        samples = self.encoder.encode_unexpanded(conversations)
        results: list[tuple[EncodedSample, ImageSizes] | None] = []
        for index, sample in zip(indices, samples, strict=True):
            record = self.records[index]
            result = None
            if sample is not None and record.count('image') == len(record.media):
                with suppress(Exception):  # a file that is not an image. Reading the sample raises the error again
                    sizes = [image_size(file) for file in open_files(record)]
                    result = sample, tuple(sizes)
            results.append(result)
        return results

    def shapes_of_videos(self, index: int) -> EncodedSample | None:
        """Returns a sample of the right shapes. Decodes one frame of each video. None if the sample has no video.

        This is enough to measure the sample, and much faster than reading it.
        """
        if not self.records[index].count('video'):
            return None
        return self._encode(index, shapes_only=True)

    def decoded(self, index: int) -> DecodedMedia:
        """Returns images, videos and audio of a sample by modality, before the processor changes them."""
        record = self.records[index]
        return self.encoder.decode(record, open_files(record))

    def modalities(self, index: int) -> frozenset[str]:
        """Returns the modalities of a sample's media. Opens no file."""
        record = self.records[index]
        return frozenset(modality for modality in MODALITIES if record.count(modality))

    def identity(self) -> str:
        """Returns a fingerprint of the data a model is trained on, for checkpoints.

        It depends on the turns, the files, the weights of samples, and the options of the encoder that change samples
        (``max_length`` only with ``fit``). A media file counts with its name and its size in bytes, an embedded one
        with its content. The fingerprint does not depend on the folder of files, or the ids of samples.

        It is computed by the first call and kept, because the sizes of a million files may take minutes.
        """
        if self._identity is None:
            self._identity = _fingerprint_of(self._parts_of_identity())
        return self._identity

    def _parts_of_identity(self) -> Iterator[tuple[Any, ...]]:
        """Yields a part for each record, and one for each option that is not the default.

        The form of a part must not change, so that the data of checkpoints of earlier releases are recognized. For the
        same reason, a weight or an option that is not given adds nothing.
        """
        for record in self.records:
            media = []
            for medium in record.media:
                files = []
                for file in medium.files:
                    files.append(_identify_file(file, record.folder))
                media.append((medium.modality, files))
            sampling = self.encoder.video if record.count('video') else None
            if record.loss_weights is None:
                yield record.turns, media, sampling
            else:
                yield record.turns, media, sampling, record.loss_weights
        yield from self.encoder.identity_of_options()
        if isinstance(self.encoder, FittingEncoder):
            yield 'fit', self.encoder.max_length, self.encoder.max_image_tokens

    def fingerprint(self) -> str:
        """Returns a fingerprint for the length table: of all data that change lengths or messages about bad samples."""
        parts: list[tuple[Any, ...]] = [(self.identity(), self.encoder.max_length)]
        for record in self.records:
            names = [medium.names for medium in record.media]
            parts.append((record.sample_id, record.source, names))
        return _fingerprint_of(parts)

    def skip_report(self) -> str:
        """Returns one line that says how many samples were left out, and why the first one was."""
        total = len(self.records) + len(self.skipped)
        first = f'; first: {self.skipped[0]}' if self.skipped else ''
        return f'skipped {len(self.skipped)} of {total} samples{first}'

    def fitted(self) -> list[dict[str, Any]]:
        """Returns the samples whose media were made smaller.

        Each is a mapping: ``sample`` (its id), ``source`` (its file and place), ``tokens`` (its length now), and
        ``share`` (how much is left of the processor's budget for media, see ``share_of`` in ``data/fit.py``).
        """
        table = self.measured
        if table is None:
            return []
        changed_samples = []
        for index in table.shrink_steps.nonzero()[0].tolist():
            record = self.records[index]
            steps = int(table.shrink_steps[index])
            changed_samples.append(
                {
                    'sample': record.sample_id,
                    'source': record.source,
                    'tokens': int(table.lengths[index]),
                    'share': round(share_of(steps), 4),
                }
            )
        return changed_samples

    def _measure(self, **options: Any) -> None:
        """Measures all samples, with options of :func:`.length_table`. Leaves out the bad ones. Logs warnings."""
        table = length_table(self, self.encoder.processor, **options)
        good_indices = [index for index in range(len(table)) if index not in table.errors]
        self.records = [self.records[index] for index in good_indices]
        if table.errors:
            self._identity = None  # `length_table` has called `identity`, when the bad records were among them
        self.skipped.extend(table.errors.values())
        self.measured = table.select(good_indices)
        if self.skipped:
            log.warning(self.skip_report())
        self._warn_of_pixel_coordinates(self.measured)

    def _warn_of_pixel_coordinates(self, table: LengthTable) -> None:
        """Warns of the first sample whose media were made smaller and whose answers may hold pixel coordinates."""
        for index in table.shrink_steps.nonzero()[0].tolist():
            record = self.records[index]
            answers = [turn.text for turn in record.turns if turn.role == 'assistant']
            coordinates = find_pixel_coordinates('\n'.join(answers))
            if coordinates is not None:
                log.warning(
                    '`fit` has made media smaller whose answers may hold pixel coordinates, which it does not change. '
                    'The first: %s. If these are pixels of the original image, they are wrong now: see "Coordinates in '
                    'answers" in docs/data.md.',
                    f'sample "{record.sample_id}" ({record.source}) has {coordinates[:60]}',
                )
                return


def _names_of_files(paths: Iterable[str]) -> dict[str, str]:
    """Returns the name of each file by its path, with folders if two files would have the same name.

    The result is empty if all paths lead to one file.
    """
    files = {}
    names = {}
    for path in paths:
        files[path] = os.path.abspath(path)
        names[path] = os.path.basename(files[path])
    distinct_files = set(files.values())
    if len(distinct_files) < 2:
        return {}
    if len(set(names.values())) < len(distinct_files):
        common_folder = os.path.commonpath(distinct_files)
        for path, file in files.items():
            names[path] = os.path.relpath(file, common_folder)
    return names


def _fingerprint_of(parts: Iterable[tuple[Any, ...]]) -> str:
    """Returns a fingerprint in the form that the checkpoints of all releases hold."""
    texts = (repr(part).encode() for part in parts)
    return fingerprint_of_bytes(texts, length=64)


def _identify_file(file: str | EmbeddedFile, folder: Path) -> tuple[str, int]:
    """Returns name and size in bytes of a file. For an embedded file, no name and the checksum of its content."""
    if isinstance(file, EmbeddedFile):
        return '', file.checksum
    return os.path.basename(file), os.stat(folder / file).st_size
