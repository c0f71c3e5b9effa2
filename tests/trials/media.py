# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Pictures, videos and sounds that are cut, damaged, of another format, or too large for a machine."""

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
    SAMPLE,
    VIDEO,
    Make,
    Reading,
    Write,
    changed,
    cut,
    half,
    long_wav,
    of_audio,
    of_image,
    of_video,
    pages,
    picture,
    record,
    transport_stream,
)


def noise(path: Path, **options: Any) -> None:
    pixels = Image.effect_noise((256, 256), 50)
    pixels.convert('RGB').save(path, **options)


def followed_by(write: Write, more: bytes) -> Write:
    return changed(write, lambda content: content + more)


def with_zeros(write: Write) -> Write:
    """Replaces bytes behind the middle by zeros."""

    def damage(content: bytes) -> bytes:
        start = len(content) * 6 // 10
        end = min(start + 200, len(content))
        return content[:start] + bytes(end - start) + content[end:]

    return changed(write, damage)


def with_another_bit(content: bytes) -> bytes:
    changed_content = bytearray(content)
    changed_content[len(content) * 6 // 10] ^= 4
    return bytes(changed_content)


def of_bytes(content: bytes) -> Write:
    return lambda path: path.write_bytes(content)


def of_pillow(mode: str, size: tuple[int, int] = (16, 16), color: float = 0) -> Write:
    """Writes a picture of one color, in a mode of Pillow."""

    def write(path: Path) -> None:
        Image.new(mode, size, color).save(path)

    return write


def png_of(width: int, height: int) -> Write:
    """Writes a header of that size, and no pixels."""

    def chunk(chunk_type: bytes, content: bytes) -> bytes:
        length = struct.pack('>I', len(content))
        checksum = zlib.crc32(chunk_type + content)
        return length + chunk_type + content + struct.pack('>I', checksum)

    signature = b'\x89PNG\r\n\x1a\n'
    size = struct.pack('>II', width, height)
    depth_and_color = struct.pack('>BBBBB', 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    header = chunk(b'IHDR', size + depth_and_color)
    pixels = chunk(b'IDAT', zlib.compress(b''))
    end = chunk(b'IEND', b'')
    return of_bytes(signature + header + pixels + end)


def with_70_megabytes_of_text(path: Path) -> None:
    info = PngInfo()
    info.add_text('x', 'y' * 70_000_000, zip=True)
    picture(path, pnginfo=info)


def camera_picture(path: Path) -> None:
    preview = Image.new('RGB', (16, 16))
    picture(path, format='MPO', save_all=True, append_images=[preview])


def of_frames(*sizes: tuple[int, int]) -> Make:
    """Makes a record of a video that is a list of pictures."""

    def make(folder: Path) -> list[dict[str, Any]]:
        names = []
        for index, size in enumerate(sizes):
            Image.new('RGB', size).save(folder / f'{index}.png')
            names.append(f'{index}.png')
        return [record('video', names)]

    return make


def animated(path: Path) -> None:
    frames = []
    for shade in (0, 40, 80, 120, 160):
        frame = Image.new('L', (32, 32), shade)
        frames.append(frame)
    frames[0].save(path, 'PNG', save_all=True, append_images=frames[1:], duration=100)


def live(path: Path) -> None:
    """Writes a video as a browser records it, without a length in the header."""
    with av.open(str(path), 'w', format='webm', options={'live': '1'}) as container:
        stream: Any = container.add_stream('libvpx', rate=10)
        stream.width = 32
        stream.height = 32
        stream.pix_fmt = 'yuv420p'
        for shade in range(10):
            pixels = np.full((32, 32, 3), 20 * shade, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format='rgb24')
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def pcm(path: Path, *, channels: int = 1, frames: int = 9600) -> None:
    samples = b'\1' * (2 * channels * frames)
    with wave.open(str(path), 'wb') as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples)


PLACES_IN_HEADER = {
    'codec': (20, '<H'),
    'channels': (22, '<H'),
    'rate': (24, '<I'),
    'size': (40, '<I'),
}
"""The first byte of a number in the header of a WAV file, and its format."""


def pcm_with(field: str, value: int, *, frames: int = 9600) -> Write:
    """Writes a WAV with another number in its header."""

    def write(path: Path) -> None:
        pcm(path, frames=frames)
        content = bytearray(path.read_bytes())
        place, form = PLACES_IN_HEADER[field]
        struct.pack_into(form, content, place, value)
        path.write_bytes(content)

    return write


def up_to_segment(content: bytes) -> bytes:
    """Cuts a Matroska file behind the id of its segment, which holds everything."""
    segment_id = b'\x18S\x80g'
    return content[: content.index(segment_id) + len(segment_id)]


def sound_of(value: float) -> Write:
    samples = np.full(9600, value, np.float32)
    return partial(write_sound, samples=samples)


MPEG4 = write_video
GIF = partial(write_video, codec='gif', pixels='rgb8')
FFV1 = partial(write_video, codec='ffv1')
FLV = partial(write_video, codec='flv')
OPUS = partial(write_encoded_sound, codec='libopus')
MP3 = partial(write_encoded_sound, codec='libmp3lame')
FLAC = partial(write_encoded_sound, codec='flac')
AIFF = partial(write_encoded_sound, codec='pcm_s16be')
PCM = partial(write_encoded_sound, codec='pcm_s16le')
BARE_MP3 = partial(MP3, rate=16000, write_xing='0', id3v2_version='0')
LATIN_1_ARTIST = b'LIST\x14\0\0\0INFOIART\7\0\0\0Beyonc\xe9\0'
DAMAGED_EXIF = b'Exif\0\0MM\0*\xff\xff\xff\xff'
JOINING_SCRIPT = b"ffconcat version 1.0\nfile '../x.ts'\n"
DASH = b'<?xml version="1.0"?><MPD><Period/></MPD>'
PLAYLIST = b'[playlist]\nFile1=/etc/passwd\n'
MIDI = b'MThd\0\0\0\6\0\0\0\1\0\x60MTrk\0\0\0\4\0\xff\x2f\0'
NO_IMAGE = 'no image of a known format'
NO_CONTAINER = 'container that is not supported'

PICTURES: dict[str, Reading] = {
    'a picture of 0 columns': of_image('a.png', png_of(0, 16), SAMPLE),
    'a picture of 60,000 x 60,000': of_image('a.png', png_of(60000, 60000), 'pixels'),
    'a picture of one pixel': of_image('a.png', of_pillow('RGB', (1, 1)), WORKS, processor=VIDEO),
    'a picture of 20,000 x 1': of_image('a.png', of_pillow('RGB', (20000, 1)), 'aspect ratio', processor=VIDEO),
    'a picture of a camera with its preview': of_image('a.jpg', camera_picture, WORKS),
    'a picture with 70 MB of text': of_image('a.png', with_70_megabytes_of_text, SAMPLE),
    'a picture with a damaged EXIF': of_image('a.jpg', partial(picture, exif=DAMAGED_EXIF), WORKS),
    'a picture in CMYK': of_image('a.tiff', of_pillow('CMYK'), WORKS),
    'an empty picture': of_image('a.png', of_bytes(b''), NO_IMAGE),
    'an icon': of_image('a.ico', picture, NO_IMAGE),
    'an error page as a picture': of_image('a.jpg', of_bytes(b'<html>404</html>'), NO_IMAGE),
    'a sequence of AVIF': of_image('a.avif', pages, 'several images'),
    'a JPEG with damaged pixels, which no decoder notices': of_image('a.jpg', with_zeros(noise), WORKS),
    'a picture of 32 bits a pixel': of_image('a.tiff', of_pillow('I', color=200), 'no known white'),
    'a picture of floats': of_image('a.tiff', of_pillow('F', color=0.5), 'no known white'),
    'a picture of two colours': of_image('a.png', of_pillow('1', color=1), WORKS),
    'a transparent picture': of_image('a.png', of_pillow('LA'), WORKS),
    'a video as a picture': of_image('a.mp4', MPEG4, 'pip install pillow-heif'),
}
CUT_PICTURES = {
    'a.jpg': 0.98,
    'a.png': 0.95,
    'a.webp': 0.9,
    'a.bmp': 0.9,
    'a.tiff': 0.9,
    'a.gif': 0.9,
    'a.ppm': 0.9,
    'a.tga': 0.9,
    'a.jp2': 0.5,
    'a.avif': 0.9,
}
"""Which share of a file is left. A decoder notices that the rest is missing."""
for file_name, share_left in CUT_PICTURES.items():
    suffix = file_name.removeprefix('a.')
    PICTURES[f'a cut {suffix}'] = of_image(file_name, cut(noise, share_left), SAMPLE)

LARGE_VIDEO = partial(MPEG4, size=(512, 512))
MANY_FRAMES = {'video': {'num_frames': 9000, 'max_frames': 9000}}
VIDEOS: dict[str, Reading] = {
    'a GIF of one frame as a video': of_video('a.gif', partial(GIF, shades=[9]), WORKS),
    'an animated PNG as a video': of_video('a.png', animated, NO_CONTAINER),
    'an animated WebP as a video': of_video('a.webp', pages, NO_CONTAINER),
    'a name that is a pattern': of_video('%03d.png', picture, NO_CONTAINER),
    'a transport stream': of_video('a.ts', transport_stream, NO_CONTAINER),
    'a script that joins files': of_video('a.txt', of_bytes(JOINING_SCRIPT), NO_CONTAINER),
    'a manifest of DASH': of_video('a.mpd', of_bytes(DASH), SAMPLE),
    'half a GIF': of_video('a.gif', half(GIF), SAMPLE),
    'a video that a browser recorded': of_video('a.webm', live, 'how long it is'),
    'an MP4 without its last bytes': of_video('a.mp4', cut(MPEG4, 0.98), SAMPLE),
    'a MOV without its index': of_video('a.mov', cut(MPEG4, 0.9), SAMPLE),
    'an FLV without its last bytes': of_video('a.flv', cut(FLV, 0.85), SAMPLE),
    'an MP4 with zeros behind it': of_video('a.mp4', followed_by(MPEG4, bytes(5000)), WORKS),
    'a video of 2 x 2 pixels': of_video('a.mp4', partial(MPEG4, size=(2, 2)), WORKS),
    'a video of a frame a day': of_video('a.mkv', partial(MPEG4, shades=[1, 2], times=[0, 86_400_000]), WORKS),
    'a video of odd sides': of_video('a.mkv', partial(FFV1, size=(33, 17), pixels='yuv444p'), WORKS),
    'a video of 10 bits': of_video('a.mkv', partial(FFV1, pixels='yuv420p10le'), WORKS),
    'a video in grey': of_video('a.mkv', partial(FFV1, pixels='gray'), WORKS),
    'a video that lost bytes': of_video('a.mkv', with_zeros(MPEG4), SAMPLE),
    'an FLV that lost bytes': of_video('a.flv', with_zeros(partial(FLV, size=(256, 256))), 'is damaged'),
    'a stream of H.264 without a container': of_video('a.h264', partial(MPEG4, codec='libx264'), NO_CONTAINER),
    'a cut MKV': of_video('a.mkv', cut(MPEG4, 0.6), 'end is missing'),
    'an MKV that is cut before its content': of_video('a.mkv', changed(MPEG4, up_to_segment), 'end is missing'),
    'a cut AVI': of_video('a.avi', cut(MPEG4, 0.6), SAMPLE),
    'a video without frames': of_video('a.avi', partial(MPEG4, shades=[]), 'no frames that have a time'),
    'a text as a video': of_video('a.mp4', of_bytes(b'film ' * 99), 'cannot be read: '),
    'half a NUT': of_video('a.nut', half(MPEG4), NO_CONTAINER),
    'a video with too many pixels for a machine': of_video('a.mp4', LARGE_VIDEO, 'pixels', options=MANY_FRAMES),
    'frames of different sizes': Reading(of_frames((32, 32), (16, 16)), 'of one size', processor=VIDEO),
    'a list of one frame': Reading(of_frames((32, 32)), WORKS, processor=VIDEO),
}

SOUNDS: dict[str, Reading] = {
    'a video as a sound': of_audio('a.mp4', MPEG4, 'it holds no audio'),
    'half a WAV': of_audio('a.wav', half(long_wav), 'end is missing'),
    'half an AIFF': of_audio('a.aiff', half(AIFF), 'end is missing'),
    'half a CAF, whose end nobody would miss': of_audio('a.caf', half(PCM), NO_CONTAINER),
    'half a W64': of_audio('a.w64', half(PCM), NO_CONTAINER),
    'half a VOC': of_audio('a.voc', half(partial(write_encoded_sound, codec='pcm_u8')), NO_CONTAINER),
    'a WAV without samples': of_audio('a.wav', partial(pcm, frames=0), 'it holds no audio'),
    'a sound of NaN': of_audio('a.wav', sound_of(float('nan')), 'finite'),
    'half an MP3': of_audio('a.mp3', half(MP3), 'it ends after'),
    'an Ogg Opus': of_audio('a.ogg', OPUS, WORKS),
    'an Ogg Opus without its last bytes': of_audio('a.ogg', cut(OPUS, 0.95), 'end is missing'),
    'an Ogg Opus with zeros behind it': of_audio('a.ogg', followed_by(OPUS, bytes(900)), WORKS),
    'a WAV with a tag in Latin-1': of_audio('a.wav', followed_by(long_wav, LATIN_1_ARTIST), WORKS),
    'a WAV of rate 0': of_audio('a.wav', pcm_with('rate', 0), SAMPLE),
    'a WAV of rate 1': of_audio('a.wav', pcm_with('rate', 1, frames=100), 'cuts it off'),
    'a WAV of rate 384,000': of_audio('a.wav', pcm_with('rate', 384000, frames=200_000), WORKS),
    'a WAV of an unknown codec': of_audio('a.wav', pcm_with('codec', 99), 'codec that is not known'),
    'a WAV with too small a size in its header': of_audio('a.wav', pcm_with('size', 10), 'at least'),
    'a FLAC that lost bytes': of_audio('a.flac', with_zeros(FLAC), SAMPLE),
    'a FLAC with another bit': of_audio('a.flac', changed(FLAC, with_another_bit), 'CRC error'),
    'half an MP3 without a length in its header': of_audio('a.mp3', half(BARE_MP3), WORKS),
    'a WAV of the highest rate': of_audio('a.wav', pcm_with('rate', 2**32 - 1), SAMPLE),
    'a WAV with 65,535 channels in its header': of_audio('a.wav', pcm_with('channels', 65535), SAMPLE),
    'a WAV of 100 channels': of_audio('a.wav', partial(pcm, channels=100), SAMPLE),
    'a FLAC of 8 channels': of_audio('a.flac', partial(FLAC, channels=8), WORKS),
    'a sound of 1e30': of_audio('a.wav', sound_of(1e30), 'finite'),
    'a list of sounds': of_audio('a.pls', of_bytes(PLAYLIST), SAMPLE),
    'a MIDI': of_audio('a.mid', of_bytes(MIDI), SAMPLE),
    'a gzip of a sound': of_audio('a.wav', changed(long_wav, gzip.compress), SAMPLE),
}

MEDIA = {**PICTURES, **VIDEOS, **SOUNDS}
