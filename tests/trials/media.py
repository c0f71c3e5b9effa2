# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Pictures, videos and sounds that are cut, damaged, of another kind, or larger than a machine."""

from __future__ import annotations

import gzip
import struct
import wave
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.support.clips import write_encoded_sound, write_sound, write_video
from tests.trials.outcomes import WORKS
from tests.trials.records import (
    AUDIO,
    IMAGE,
    SAMPLE,
    VIDEO,
    Make,
    Write,
    changed,
    cut,
    half,
    long_wav,
    of_file,
    pages,
    picture,
    record,
    transport_stream,
)


def noise(path: Path, **options: Any) -> None:
    Image.effect_noise((256, 256), 50).convert('RGB').save(path, **options)


def followed_by(write: Write, more: bytes) -> Write:
    return changed(write, lambda content: content + more)


def with_zeros(write: Write) -> Write:
    """Some bytes in the middle are lost."""

    def damage(content: bytes) -> bytes:
        start = len(content) * 6 // 10
        return content[:start] + bytes(min(200, len(content) - start)) + content[start + 200 :]

    return changed(write, damage)


def with_another_bit(content: bytes) -> bytes:
    place = len(content) * 6 // 10
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


def of(content: bytes) -> Write:
    return lambda path: path.write_bytes(content)


def png_of(width: int, height: int) -> Write:
    """A header of that size, and no pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack('>I', len(content)) + kind + content + struct.pack('>I', zlib.crc32(kind + content))

    header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    return of(b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(b'')) + chunk(b'IEND', b''))


def with_70_megabytes_of_text(path: Path) -> None:
    info = PngInfo()
    info.add_text('x', 'y' * 70_000_000, zip=True)
    picture(path, pnginfo=info)


def camera_picture(path: Path) -> None:
    picture(path, format='MPO', save_all=True, append_images=[Image.new('RGB', (16, 16))])


def frames(*sizes: tuple[int, int]) -> Make:
    def make(folder: Path) -> list[dict[str, Any]]:
        names = [f'{index}.png' for index in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            Image.new('RGB', size).save(folder / name)
        return [{**record('video', 'all'), 'videos': [names]}]

    return make


def animated(path: Path) -> None:
    first, *others = (Image.new('RGB', (32, 32), (40 * shade,) * 3) for shade in range(5))
    first.save(path, 'PNG', save_all=True, append_images=others, duration=100)


def live(path: Path) -> None:
    """As a browser records: no length in the header."""
    with av.open(str(path), 'w', format='webm', options={'live': '1'}) as container:
        stream: Any = container.add_stream('libvpx', rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, 'yuv420p'
        for shade in range(10):
            pixels = np.full((32, 32, 3), 20 * shade, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format='rgb24')))
        container.mux(stream.encode())


def pcm(path: Path, *, width: int = 2, channels: int = 1, frames: int = 9600) -> None:
    with wave.open(str(path), 'wb') as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(16000)
        file.writeframes(b'\1' * (width * channels * frames))


def pcm_with(place: int, form: str, value: int, *, frames: int = 9600) -> Write:
    """A WAV with another number in its header."""

    def write(path: Path) -> None:
        pcm(path, frames=frames)
        content = bytearray(path.read_bytes())
        struct.pack_into(form, content, place, value)
        path.write_bytes(content)

    return write


def values(value: float) -> Write:
    return lambda path: write_sound(path, np.full(9600, value, np.float32))


GIF, MPEG4 = partial(write_video, codec='gif', pixels='rgb8'), write_video
FFV1 = partial(write_video, codec='ffv1')
FLV, WEBM = partial(write_video, codec='flv'), partial(write_video, codec='libvpx')
OPUS, MP3, FLAC = (partial(write_encoded_sound, codec=codec) for codec in ('libopus', 'libmp3lame', 'flac'))
BARE_MP3 = partial(MP3, rate=16000, write_xing='0', id3v2_version='0')
NO_IMAGE, NO_CONTAINER = 'no image of a known format', 'container that is not supported'

FILES: dict[str, tuple[str, str, Write, str]] = {
    # name: (processor, file, what writes it, what the line names)
    'a picture of 0 columns': (IMAGE, 'a.png', png_of(0, 16), SAMPLE),
    'a picture of 60,000 x 60,000': (IMAGE, 'a.png', png_of(60000, 60000), 'pixels'),
    'a picture of one pixel': (VIDEO, 'a.png', lambda path: Image.new('RGB', (1, 1)).save(path), WORKS),
    'a picture of 20,000 x 1': (VIDEO, 'a.png', lambda path: Image.new('RGB', (20000, 1)).save(path), SAMPLE),
    'a picture of a camera with its preview': (IMAGE, 'a.jpg', camera_picture, WORKS),
    'a picture with 70 MB of text': (IMAGE, 'a.png', with_70_megabytes_of_text, SAMPLE),
    'a picture with a damaged EXIF': (IMAGE, 'a.jpg', partial(picture, exif=b'Exif\0\0MM\0*\xff\xff\xff\xff'), WORKS),
    'a picture in CMYK': (IMAGE, 'a.tiff', lambda path: Image.new('CMYK', (16, 16)).save(path), WORKS),
    'an empty picture': (IMAGE, 'a.png', of(b''), NO_IMAGE),
    'an icon': (IMAGE, 'a.ico', picture, NO_IMAGE),
    'an error page as a picture': (IMAGE, 'a.jpg', of(b'<html>404</html>'), NO_IMAGE),
    'a sequence of AVIF': (IMAGE, 'a.avif', pages, 'several images'),
    **{
        f'a cut {ending}': (IMAGE, f'a.{ending}', cut(noise, share), SAMPLE)
        for ending, share in [
            ('jpg', 0.98),
            ('png', 0.95),
            *((name, 0.9) for name in ('webp', 'bmp', 'tiff', 'gif', 'ppm', 'tga')),
            ('jp2', 0.5),
            ('avif', 0.9),
        ]
    },
    'a JPEG with damaged pixels, which say nothing of it': (IMAGE, 'a.jpg', with_zeros(noise), WORKS),
    'a picture of 32 bits a pixel': (
        IMAGE,
        'a.tiff',
        lambda path: Image.new('I', (16, 16), 200).save(path),
        'no known white',
    ),
    'a picture of floats': (IMAGE, 'a.tiff', lambda path: Image.new('F', (16, 16), 0.5).save(path), 'no known white'),
    'a picture of two colours': (IMAGE, 'a.png', lambda path: Image.new('1', (16, 16), 1).save(path), WORKS),
    'a picture of which nothing shows': (IMAGE, 'a.png', lambda path: Image.new('LA', (16, 16)).save(path), WORKS),
    'a picture of 3,000 x 10': (VIDEO, 'a.png', lambda path: Image.new('RGB', (3000, 10)).save(path), 'aspect ratio'),
    # videos
    'a GIF of one frame as a video': (VIDEO, 'a.gif', lambda path: GIF(path, [9]), WORKS),
    'an animated PNG as a video': (VIDEO, 'a.png', animated, WORKS),
    'an animated WebP as a video': (VIDEO, 'a.webp', pages, NO_CONTAINER),
    'a name that is a pattern': (VIDEO, '%03d.png', picture, NO_CONTAINER),
    'a whole transport stream': (VIDEO, 'a.ts', transport_stream, NO_CONTAINER),
    'a script that joins files': (VIDEO, 'a.txt', of(b"ffconcat version 1.0\nfile '../x.ts'\n"), NO_CONTAINER),
    'a manifest of DASH': (VIDEO, 'a.mpd', of(b'<?xml version="1.0"?><MPD><Period/></MPD>'), SAMPLE),
    'half a GIF': (VIDEO, 'a.gif', half(GIF), SAMPLE),
    'a video that a browser recorded': (VIDEO, 'a.webm', live, 'how long it is'),
    'an animated PNG that is cut': (VIDEO, 'a.png', cut(animated, 0.6), 'end is missing'),
    'a MP4 without its last bytes': (VIDEO, 'a.mp4', cut(MPEG4, 0.98), SAMPLE),
    'a MOV without its index': (VIDEO, 'a.mov', cut(MPEG4, 0.9), SAMPLE),
    'a FLV without its last bytes': (VIDEO, 'a.flv', cut(FLV, 0.85), SAMPLE),
    'a MP4 with zeros behind it': (VIDEO, 'a.mp4', followed_by(MPEG4, bytes(5000)), WORKS),
    'a video of 2 x 2 pixels': (VIDEO, 'a.mp4', partial(MPEG4, size=(2, 2)), WORKS),
    'a video of a frame a day': (VIDEO, 'a.mkv', partial(MPEG4, shades=[1, 2], times=[0, 86_400_000]), WORKS),
    'a video of odd sides': (VIDEO, 'a.mkv', partial(FFV1, size=(33, 17), pixels='yuv444p'), WORKS),
    'a video of 10 bits': (VIDEO, 'a.mkv', partial(FFV1, pixels='yuv420p10le'), WORKS),
    'a video in grey': (VIDEO, 'a.mkv', partial(FFV1, pixels='gray'), WORKS),
    'a video that lost bytes': (VIDEO, 'a.mkv', with_zeros(MPEG4), SAMPLE),
    'a FLV that lost bytes': (VIDEO, 'a.flv', with_zeros(partial(FLV, size=(256, 256))), 'is damaged'),
    'a bare stream of H.264': (VIDEO, 'a.h264', partial(MPEG4, codec='libx264'), NO_CONTAINER),
    # sounds
    'half a MP3': (AUDIO, 'a.mp3', half(MP3), 'it ends after'),
    'an Ogg Opus': (AUDIO, 'a.ogg', OPUS, WORKS),
    'an Ogg Opus without its last bytes': (AUDIO, 'a.ogg', cut(OPUS, 0.95), 'end is missing'),
    'an Ogg Opus with zeros behind it': (AUDIO, 'a.ogg', followed_by(OPUS, bytes(900)), WORKS),
    'a WAV of rate 0': (AUDIO, 'a.wav', pcm_with(24, '<I', 0), SAMPLE),
    'a WAV of rate 1': (AUDIO, 'a.wav', pcm_with(24, '<I', 1, frames=100), 'at most'),
    'a WAV of rate 384,000': (AUDIO, 'a.wav', pcm_with(24, '<I', 384000, frames=200_000), WORKS),
    'a WAV of a codec that nobody knows': (AUDIO, 'a.wav', pcm_with(20, '<H', 99), 'codec that is not known'),
    'a WAV that says it is shorter': (AUDIO, 'a.wav', pcm_with(40, '<I', 10), 'at least'),
    'a FLAC that lost bytes': (AUDIO, 'a.flac', with_zeros(FLAC), SAMPLE),
    'a FLAC with another bit': (AUDIO, 'a.flac', changed(FLAC, with_another_bit), 'CRC error'),
    'half a MP3 that does not say how long it is': (AUDIO, 'a.mp3', half(BARE_MP3), WORKS),
    'a WAV of a rate without end': (AUDIO, 'a.wav', pcm_with(24, '<I', 2**32 - 1), SAMPLE),
    'a WAV that says 65,535 channels': (AUDIO, 'a.wav', pcm_with(22, '<H', 65535), SAMPLE),
    'a WAV of 100 channels': (AUDIO, 'a.wav', partial(pcm, channels=100), SAMPLE),
    'a FLAC of 8 channels': (AUDIO, 'a.flac', partial(FLAC, channels=8), WORKS),
    'a sound of 1e30': (AUDIO, 'a.wav', values(1e30), 'finite'),
    'a list of sounds': (AUDIO, 'a.pls', of(b'[playlist]\nFile1=/etc/passwd\n'), SAMPLE),
    'a MIDI': (AUDIO, 'a.mid', of(b'MThd\0\0\0\6\0\0\0\1\0\x60MTrk\0\0\0\4\0\xff\x2f\0'), SAMPLE),
    'a gzip of a sound': (AUDIO, 'a.wav', changed(long_wav, gzip.compress), SAMPLE),
}
KINDS = {IMAGE: 'image', VIDEO: 'video', AUDIO: 'audio'}
LARGE = {'video': {'num_frames': 9000, 'max_frames': 9000}}
MEDIA: dict[str, tuple[Any, ...]] = {
    # as RECORDS
    **{
        name: (processor, of_file('image' if 'picture' in name else KINDS[processor], file, write), expected)
        for name, (processor, file, write, expected) in FILES.items()
    },
    'frames of unlike sizes': (VIDEO, frames((32, 32), (16, 16)), 'of one size'),
    'a list of one frame': (VIDEO, frames((32, 32)), WORKS),
    'more pixels of a video than a machine holds': (
        VIDEO,
        of_file('video', 'a.mp4', partial(MPEG4, size=(512, 512))),
        LARGE,
        'pixels',
    ),
}
