# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""LLaVA conversations from MDS shards, streamed; the samples are those of LlavaDataset."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from streaming import Stream, StreamingDataset  # pyright: ignore[reportMissingImports]
from streaming.base.format import reader_from_json  # pyright: ignore[reportMissingImports]

from composer_tokacc.data.control_tokens import ControlTokens
from composer_tokacc.data.conversation import ConversationEncoder
from composer_tokacc.data.records import PathLike
from composer_tokacc.data.to_mds import from_row
from composer_tokacc.data.videos import VideoSampling


class LlavaStreamingDataset(StreamingDataset):
    """What ``python -m composer_tokacc.data.to_mds`` wrote; a sample equals that of :class:`.LlavaDataset`.

    Order, sharing among ranks, downloads, caching and resumption are StreamingDataset's.

    Args:
        processor: Hugging Face processor; for text alone a tokenizer will do.
        max_length: Longest sample allowed, in tokens, image tokens included. Nothing is ever truncated.
        video: As for :class:`.LlavaDataset`, and ``control_tokens``.
        streams: Several sources: :class:`streaming.Stream`, or a mapping of names to their arguments (``local``,
            ``remote``, ``proportion``, ...) as a YAML file has them, whose samples carry that name as ``source``.
        **kwargs: Further arguments of :class:`streaming.StreamingDataset`: ``local``, ``remote``, ``shuffle``,
            ``shuffle_seed``, ``batch_size`` (of one rank), ``num_canonical_nodes``, ``cache_limit``, ...

    Raises:
        BadSampleError: On reading, for a file that cannot be decoded or a sample over ``max_length``; names it.
        ValueError: For shards of other columns, or as StreamingDataset does.
    """

    def __init__(
        self,
        *,
        processor: Any,
        max_length: int | None = None,
        video: Mapping[str, Any] | None = None,
        control_tokens: ControlTokens = 'warn',
        streams: Sequence[Stream] | Mapping[str, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        self._stream_names = list(streams) if isinstance(streams, Mapping) and len(streams) > 1 else []
        if isinstance(streams, Mapping):
            streams = [Stream(**arguments) for arguments in streams.values()]
        options: dict[str, Any] = {'max_length': max_length, 'control_tokens': control_tokens}
        self.encoder = ConversationEncoder(processor, video=VideoSampling(**(video or {})), **options)
        super().__init__(streams=streams, **kwargs)

    def get_item(self, sample_id: int, retry: int = 7) -> dict[str, Any]:
        """Returns a sample by its number in the shards; downloads its shard where it is not there yet."""
        record, files = from_row(super().get_item(sample_id, retry))
        sample = self.encoder.encode_record(record, list(map(BytesIO, files)))
        if not self._stream_names:
            return sample
        return {**sample, 'source': [self._stream_names[self.stream_per_shard[self.spanner[sample_id][0]]]]}

    @staticmethod
    def texts(*folders: PathLike) -> Iterator[str]:
        """Yields the text of every turn, from the first of some folders that has all shards, uncompressed."""
        folder = next((folder for folder in map(Path, folders) if _holds_all_shards(folder)), None)
        if folder is None:
            raise ValueError(
                f'`local` or `remote` must be a folder with all shards to train a tokenizer on their text, got: '
                f'{", ".join(map(str, folders))}. Copy them there, or set `model.pretrained`, which has a tokenizer.'
            )
        for shard in json.loads((folder / 'index.json').read_text())['shards']:
            reader = reader_from_json(str(folder), None, shard)
            for row in map(reader.get_item, range(len(reader))):
                yield from from_row(row)[0].texts

    def identity(self) -> str:
        """Changes with samples and bytes of each shard, in order, and the frames of videos; not with their place."""
        spelled = ['text'] * (self.encoder.control.option == 'text')
        return repr(([(shard.samples, shard.get_raw_size()) for shard in self.shards], self.encoder.video, *spelled))

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """As StreamingDataset's, but right between two epochs.

        There Composer has begun to count the next epoch, from 0 samples, and StreamingDataset would put these to the
        epoch that it iterated last, so that a run resumed there goes through the same order a second time.
        """
        state = super().state_dict(num_samples, from_beginning)
        if from_beginning and num_samples == 0:
            state['epoch'] = max(state['epoch'], self.next_epoch)
        return state


def _holds_all_shards(folder: Path) -> bool:
    index = folder / 'index.json'
    if not index.is_file():
        return False
    return all((folder / shard['raw_data']['basename']).is_file() for shard in json.loads(index.read_text())['shards'])
