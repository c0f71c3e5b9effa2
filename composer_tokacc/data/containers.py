# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Opens files of videos and audio with PyAV, and refuses files that are cut or damaged.

A file is checked in two ways: by the mark of its end, if its format has one, and by its duration. Error messages call a
file "it", because the caller puts its name before the message.

A timestamp is the moment at which a frame is shown, as a whole number in the units of its stream's ``time_base``, a
fraction of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from composer_tokacc.data.records import MediaFile
from composer_tokacc.refusals import InvalidInputError

if TYPE_CHECKING:
    from av import Packet
    from av.container import InputContainer

MAX_MISSING_SHARE = 0.05
"""Share of a duration that may be missing, because the durations in headers are rounded or estimated. A fixed number of
seconds may be missing in addition, see :func:`least_seconds`."""
MEDIA_CONTAINERS = 'aiff,asf,au,avi,flac,flv,gif,ivf,matroska,mov,mp3,mxf,nistsphere,ogg,tta,wav,wv'
"""Containers that are read, by FFmpeg's names. Each is a single file. Playlists are not read, because they name other
files, which may lie outside of the media folder. Transport streams, elementary streams, caf, nut, voc and w64 are not
read, because they may end anywhere, so a missing half could not be noticed."""
NUM_FIRST_BYTES = 4096
"""Bytes at the start of a file that are searched for the mark of its format, and for the segment of a Matroska file."""
NUM_LAST_BYTES = 27 + 255 + 255 * 255
"""Bytes at the end of a file in which the mark of its end is looked for. They hold the longest page of an Ogg file: a
header, a size for each of 255 segments, and 255 bytes in each. A GIF file needs fewer."""
MIN_UNKNOWN_SIZE = 2**31 - 2**16
"""From this value on, the size in the header of a WAV or AIFF file means that the size is unknown. So does 0. Programs
that write to a pipe write 0, or a size near 2**31 or 2**32 bytes."""


@contextmanager
def open_stream(file: MediaFile, modality: Literal['video', 'audio']) -> Iterator[tuple[InputContainer, Any]]:
    """Opens a file with PyAV. Yields the container and its first stream of the modality.

    Refuses a file without its end, without such a stream, or of a format that is not supported. The stream must not be
    used afterwards, because its memory is freed when the container is closed.
    """
    import av.error
    import av.logging

    if isinstance(file, PathLike):
        with open(file, 'rb') as opened:
            _check_marked_end(opened)
        # The absolute path, because FFmpeg takes a name such as `12:30.mp4` for an address.
        source = os.path.abspath(file)
    else:
        _check_marked_end(file)
        file.seek(0)
        source = file
    # The errors of PyAV hold FFmpeg's reason only if a log level is set. PANIC prints nothing. A level that the user or
    # torchvision (before 0.23) has set is kept. The level is not restored, because errors may come until the container
    # is closed, and other threads may read files at the same time.
    if av.logging.get_level() is None:
        av.logging.set_level(av.logging.PANIC)
    try:
        container = av.open(
            source,
            mode='r',
            options={'format_whitelist': MEDIA_CONTAINERS},
            metadata_errors='replace',  # tags may be in any encoding. They are not read
        )
    except av.error.ArgumentError as error:
        # `log` is FFmpeg's reason. Not `str(error)`, because it has the name of the file, too.
        if 'Format not on whitelist' not in str(error.log):
            raise
        raise InvalidInputError(
            f'it is in a container that is not supported. Convert it to mp4, mkv or wav. Supported: {MEDIA_CONTAINERS}'
        ) from error
    with container:
        streams = _streams_of(container, modality)
        if not streams:
            raise InvalidInputError(f'it holds no {modality}')
        stream = streams[0]
        if stream.codec_context is None:
            raise InvalidInputError('it is in a codec that is not known. Convert it to mp4, flac or wav')
        # One thread, because several may deadlock: they wait for Python to write a log line, and Python waits for them.
        stream.codec_context.thread_count = 1
        yield container, stream


def _streams_of(container: InputContainer, modality: Literal['video', 'audio']) -> list[Any]:
    """Returns the streams of a modality. The picture on the cover of a song is no video, although PyAV says so."""
    from av.stream import Disposition

    streams = getattr(container.streams, modality)
    return [stream for stream in streams if not stream.disposition & Disposition.attached_pic]


def _check_marked_end(file: BinaryIO) -> None:
    """Refuses an Ogg, Matroska, WAV, AIFF or GIF file whose end is missing.

    These formats mark the end or say the size, and FFmpeg may read such a file up to the missing part without an error.
    Other formats (mp4, FLAC, MP3) are not checked here. If the end of such a file is missing, FFmpeg or
    :func:`check_duration` raises an error.
    """
    file.seek(0)
    head = file.read(NUM_FIRST_BYTES)
    file_size = file.seek(0, os.SEEK_END)
    file.seek(max(0, file_size - NUM_LAST_BYTES))
    last_bytes = file.read()
    is_complete = True
    if head.startswith(b'OggS'):
        is_complete = _ends_with_last_ogg_page(last_bytes)
    elif head.startswith(b'\x1aE\xdf\xa3'):  # also WebM
        is_complete = _is_complete_matroska(file, file_size, head)
    elif head.startswith(b'RIFF') and head[8:12] == b'WAVE':
        is_complete = _has_complete_chunk(file, file_size, b'data', 'little')
    elif head.startswith(b'FORM') and head[8:12] in (b'AIFF', b'AIFC'):
        is_complete = _has_complete_chunk(file, file_size, b'SSND', 'big')
    elif head.startswith(b'GIF8'):
        is_complete = last_bytes.rstrip(b'\0').endswith(b';')  # the trailer. Zeros may follow it
    if not is_complete:
        raise InvalidInputError('its end is missing')


def _ends_with_last_ogg_page(last_bytes: bytes) -> bool:
    """Tells whether the last page in an Ogg file is complete, and marked as the last page of a stream.

    Args:
        last_bytes: The last bytes of the file, at least the longest page, or the whole file.
    """
    start = last_bytes.rfind(b'OggS')
    page = last_bytes[start:]
    if start < 0 or len(page) < 27:  # a header has 27 bytes
        return False
    # Byte 5 holds flags (4: the last page), byte 26 the number of segments. A byte for the size of each follows.
    is_marked = bool(page[5] & 4)
    num_segments = page[26]
    segment_sizes = page[27 : 27 + num_segments]
    return is_marked and len(page) >= 27 + num_segments + sum(segment_sizes)


def _is_complete_matroska(file: BinaryIO, file_size: int, head: bytes) -> bool:
    """Tells whether the segment of a Matroska file, which holds everything, ends inside the file.

    The segment begins with an id. Its size comes next, in one to eight bytes (EBML, RFC 8794, section 4). The first of
    these bytes begins with a zero bit for each further byte, and a 1. All bits after this 1 are the size. If each of
    them is 1, the writer did not know the size.

    Args:
        file: The open file.
        file_size: Its size in bytes.
        head: Its first bytes.
    """
    segment_id = b'\x18S\x80g'
    offset_of_id = head.find(segment_id)
    if offset_of_id < 0:
        return True  # FFmpeg reports the missing segment
    offset = offset_of_id + len(segment_id)
    file.seek(offset)
    size_bytes = file.read(8)
    if not size_bytes:
        return False
    # For example, the bytes 0x10 0x00 0x01 0x02 begin with 0b00010000. Its three zero bits say that the size has four
    # bytes. These zeros and the 1 take four of the 32 bits. The other 28 bits are the size: 0x102, or 258.
    num_zero_bits = 8 - size_bytes[0].bit_length()
    num_bytes = num_zero_bits + 1
    num_size_bits = 8 * num_bytes - num_bytes
    size_mask = (1 << num_size_bits) - 1
    segment_size = int.from_bytes(size_bytes[:num_bytes], 'big') & size_mask
    is_unknown = segment_size == size_mask
    return is_unknown or offset + num_bytes + segment_size <= file_size


def _has_complete_chunk(
    file: BinaryIO,
    file_size: int,
    chunk_id: bytes,
    byteorder: Literal['little', 'big'],
) -> bool:
    """Tells whether the chunk that holds the samples of a WAV or AIFF file ends inside the file.

    A chunk begins with its id and the length of its content in bytes, four bytes each.
    """
    offset = 12  # the first chunk comes after `RIFF` or `FORM`, the size of the file, and the name of the format
    while offset + 8 <= file_size:
        file.seek(offset)
        head = file.read(8)
        length = int.from_bytes(head[4:], byteorder)
        if head[:4] == chunk_id:
            is_unknown = length == 0 or length >= MIN_UNKNOWN_SIZE
            return is_unknown or offset + 8 + length <= file_size
        offset += 8 + length + length % 2  # chunks begin at even offsets
    return True  # FFmpeg reports the missing chunk


def check_duration(container: InputContainer, end: float) -> None:
    """Refuses a file that ends earlier than its header says.

    Args:
        container: The open file. Its header gives the duration of the longest stream.
        end: Time at which the last packet of any stream ends, in seconds.
    """
    if container.duration is None:
        raise InvalidInputError('it does not say how long it is. Write it again: `ffmpeg -i FILE -c copy other.mkv`')
    duration = container.duration / 1e6  # PyAV counts the times of a container in microseconds
    if container.format.name.startswith('matroska'):
        # The first frame may be later than 0. Some programs count the duration in the header from 0 all the same.
        start = 0.0
    else:
        start = (container.start_time or 0) / 1e6
    seconds = end - start
    if seconds < least_seconds(duration, container):
        raise InvalidInputError(f'it ends after {seconds:.1f} of {duration:.1f} s')


def least_seconds(duration: float, container: InputContainer) -> float:
    """Returns the shortest time, in seconds, that still counts as complete for a file or stream of this duration.

    For example 0.95 * 10 - 0.5 = 9.0 s of a video of 10 s.
    """
    # The last packet may have no duration. It holds one frame, up to 0.5 s of a video. The first packets of an audio
    # may fill the decoder, which returns nothing for them: up to 0.2 s (MP3 with 8,000 samples a second).
    tolerance = 0.5 if _streams_of(container, 'video') else 0.2
    return duration * (1 - MAX_MISSING_SHARE) - tolerance


def end_of(packet: Packet) -> float:
    """Returns the time at which a packet ends, in seconds. 0 if it has no time, or no content."""
    timestamp = timestamp_of(packet)
    if timestamp is None:
        return 0.0
    end = timestamp + (packet.duration or 0)
    return float(end * packet.time_base)


def timestamp_of(packet: Packet) -> int | None:
    """Returns the timestamp of the frame in a packet. None if the packet has no time, or no content.

    Some containers, such as AVI, say only when a frame is decoded. Then this time is taken.
    """
    if not packet.size:  # it only marks the end of a stream
        return None
    return packet.dts if packet.pts is None else packet.pts
