# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Streams conversations from MDS shards. Gives the same samples as LlavaDataset."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from streaming import Stream, StreamingDataset  # pyright: ignore[reportMissingImports]
from streaming.base.format import reader_from_json  # pyright: ignore[reportMissingImports]

from composer_tokacc.data.control_tokens import ControlTokens
from composer_tokacc.data.conversation import ConversationEncoder, TrainOn
from composer_tokacc.data.records import EncodedSample, PathLike
from composer_tokacc.data.to_mds import from_row
from composer_tokacc.data.videos import VideoSampling
from composer_tokacc.refusals import InvalidInputError

ORDER_ARGUMENTS = (
    'shuffle',
    'shuffle_algo',
    'shuffle_block_size',
    'sampling_method',
    'sampling_granularity',
    'batching_method',
    'partition_algo',
)
"""Arguments of StreamingDataset that change the order of samples, and that its state does not hold."""


class LlavaStreamingDataset(StreamingDataset):
    """Reads the shards of ``python -m composer_tokacc.data.to_mds``. The samples equal those of :class:`.LlavaDataset`.

    StreamingDataset chooses the order, divides samples among ranks, downloads and caches shards, and resumes.

    Args:
        processor: Hugging Face processor. For text only, a tokenizer is enough.
        max_length: Longest sample allowed, in tokens, image tokens included. Nothing is ever truncated.
        video: As for :class:`.LlavaDataset`.
        control_tokens: The same.
        train_on: The same.
        add_end_token: The same.
        streams: Several sources: a list of :class:`streaming.Stream`, or, as in a YAML file, a mapping from the name of
            each stream to its arguments (``local``, ``remote``, ``proportion``, ...). If the mapping has several, each
            sample carries the name of its stream as ``source``.
        **kwargs: Further arguments of :class:`streaming.StreamingDataset`: ``local``, ``remote``, ``shuffle``,
            ``shuffle_seed``, ``batch_size`` (of one rank), ``num_canonical_nodes``, ``cache_limit``, ...

    Raises:
        BadSampleError: On reading, for a file that cannot be decoded or a sample over ``max_length``.
        ValueError: If the shards have other columns, or StreamingDataset refuses an argument.
    """

    def __init__(
        self,
        *,
        processor: Any,
        max_length: int | None = None,
        video: Mapping[str, Any] | None = None,
        control_tokens: ControlTokens = 'warn',
        train_on: TrainOn = 'all',
        add_end_token: bool = True,
        streams: Sequence[Stream] | Mapping[str, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        self._stream_names: list[str] = []
        """Names of the streams, by their index. Empty if there is one stream, or if they have no names."""
        if isinstance(streams, Mapping):
            if len(streams) > 1:
                self._stream_names = list(streams)
            streams = [Stream(**arguments) for arguments in streams.values()]
        self.encoder = ConversationEncoder(
            processor,
            max_length=max_length,
            video=VideoSampling(**(video or {})),
            control_tokens=control_tokens,
            train_on=train_on,
            add_end_token=add_end_token,
        )
        super().__init__(streams=streams, **kwargs)

    def get_item(self, sample_id: int, retry: int = 7) -> EncodedSample:
        """Encodes a sample. Downloads its shard if it is not there yet.

        Args:
            sample_id: Number of the sample, counted over all shards.
            retry: Most attempts of StreamingDataset to download the shard. The default is the same as there.
        """
        record, files = from_row(super().get_item(sample_id, retry))
        sample = self.encoder.encode_record(record, [BytesIO(content) for content in files])
        if self._stream_names:
            shard, _ = self.spanner[sample_id]  # the index of the shard, and of the sample in it
            stream = self.stream_per_shard[shard]
            sample['source'] = [self._stream_names[stream]]
        return sample

    @staticmethod
    def texts(*folders: PathLike) -> Iterator[str]:
        """Yields the text of every turn, without placeholders, to train a tokenizer on. Downloads nothing.

        Args:
            *folders: Reads the first of them that has all shards in uncompressed form.

        Raises:
            ValueError: No folder has them.
        """
        folder, shards = _first_readable(folders)
        for shard in shards:
            reader = reader_from_json(str(folder), None, shard)  # None: the shards are not in a folder of a split
            for row in range(len(reader)):
                record, _ = from_row(reader.get_item(row))
                yield from record.texts

    def identity(self) -> str:
        """Returns a text that identifies the data. It does not depend on the folder of the shards.

        It holds the number of samples and of bytes of each shard, and the options of the encoder that change samples.
        """
        sizes_of_shards = [(shard.samples, shard.get_raw_size()) for shard in self.shards]
        # Only the values of the options, because the text must equal that in checkpoints of earlier releases.
        options = [value for _, value in self.encoder.identity_of_options()]
        return repr((sizes_of_shards, self.encoder.video, *options))

    def identity_of_order(self) -> dict[str, Any]:
        """Returns the settings that decide the samples of an epoch and their order.

        A resumed run with other settings would repeat some samples and lose others.
        """
        order = {name: getattr(self, name) for name in ORDER_ARGUMENTS}
        # The number of samples that an epoch takes from each stream. It follows from their weights and `epoch_size`.
        order['samples_of_streams'] = [int(stream.choose) for stream in self.streams]
        return order

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Returns StreamingDataset's state, corrected between two epochs.

        Between two epochs, Composer already counts 0 samples of the next one. StreamingDataset would take this for the
        start of the epoch that it iterated last, and a resumed run would repeat the order of that epoch.

        Args:
            num_samples: Samples of the epoch that were trained on.
            from_beginning: Whether they are counted from the beginning of the epoch. If not, they are counted from the
                place at which the run was resumed.
        """
        state = super().state_dict(num_samples, from_beginning)
        if from_beginning and num_samples == 0:
            state['epoch'] = max(state['epoch'], self.next_epoch)
        return state


def _first_readable(folders: Sequence[PathLike]) -> tuple[Path, list[dict[str, Any]]]:
    """Returns the first folder that has all shards in uncompressed form, and the entries of its index.

    Raises ValueError if none has.
    """
    for folder in map(Path, folders):
        shards = _read_index(folder)
        if shards:
            return folder, shards
    names = ', '.join(str(folder) for folder in folders)
    raise InvalidInputError(
        '`local` or `remote` must be a folder with all shards to train a tokenizer on their text, got: '
        f'{names}. Copy them there, or set `model.pretrained`, which has a tokenizer.'
    )


def _read_index(folder: Path) -> list[dict[str, Any]]:
    """Returns the entries of the shards in a folder's index. Empty if the index or an uncompressed shard is missing."""
    index = folder / 'index.json'
    if not index.is_file():
        return []
    shards = json.loads(index.read_text())['shards']
    for shard in shards:
        if not (folder / shard['raw_data']['basename']).is_file():
            return []
    return shards
