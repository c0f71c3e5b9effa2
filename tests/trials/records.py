# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Records and the files that they name. Each trial reads a data file, then every sample of it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from PIL import Image

from composer_tokacc.data import BadSampleError, LlavaDataset
from tests.data.chat_processors import small
from tests.support.clips import sine, write_sound, write_video
from tests.support.conversations import turns
from tests.support.families import MEDIA
from tests.trials.outcomes import WORKS, refusal

Write = Callable[[Path], Any]
"""Writes one file."""
Make = Callable[[Path], Any]
"""Writes files into a folder. Returns the path of the data file, or its text, or its records."""
SAMPLE = 'sample "a"'
"""Every line about a sample names its id."""
IMAGE, VIDEO, AUDIO = 'image', 'qwen2_vl', 'qwen2_audio'
"""Processors."""


@dataclass(frozen=True)
class Reading:
    """A data file that is read with a processor and options of the dataset."""

    make: Make
    expected: str
    processor: str = IMAGE
    options: dict[str, Any] | None = None

    def run(self, folder: Path) -> str:
        content = self.make(folder)
        path = content if isinstance(content, Path) else folder / 'data.json'
        if isinstance(content, str):
            path.write_text(content)
        elif not isinstance(content, Path):
            path.write_text(json.dumps(content))
        options = dict(self.options or {})
        if options.get('on_error') == 'skip':
            options.update(lengths_folder=folder / 'lengths', num_workers=0)

        def read() -> None:
            dataset = LlavaDataset(path, _processor(self.processor), **options)
            for index in range(len(dataset)):
                dataset[index]

        return refusal(read, BadSampleError, ValueError)


@functools.cache
def _processor(name: str) -> Any:
    return small() if name == IMAGE else MEDIA[name]().processor


def of_image(
    file: str, write: Write, expected: str, *, processor: str = IMAGE, options: dict[str, Any] | None = None
) -> Reading:
    """Reads a record about an image."""
    return Reading(of_file('image', file, write), expected, processor, options)


def of_video(file: str, write: Write, expected: str, *, options: dict[str, Any] | None = None) -> Reading:
    """Reads a record about a video."""
    return Reading(of_file('video', file, write), expected, VIDEO, options)


def of_audio(file: str, write: Write, expected: str) -> Reading:
    """Reads a record about a sound."""
    return Reading(of_file('audio', file, write), expected, AUDIO)


def record(modality: str = '', *files: str, answer: str = 'A red square.', sample_id: str = 'a') -> dict[str, Any]:
    """Returns a record that asks about files of a modality, or about nothing."""
    placeholders = f'<{modality}>' * len(files)
    conversation = turns(f'{placeholders}What is this?', answer)
    entries: dict[str, Any] = {'id': sample_id, 'conversations': conversation}
    if modality:
        entries[f'{modality}s'] = list(files)
    return entries


def of_text(text: str) -> Make:
    return lambda folder: text


def of_bytes(content: bytes, name: str = 'data.json') -> Make:
    """Makes a data file of these bytes."""

    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def of_record(**options: Any) -> Make:
    return lambda folder: [record(**options)]


def of_file(modality: str, file: str, write: Write) -> Make:
    """Makes a record that names a file."""

    def make(folder: Path) -> list[dict[str, Any]]:
        write(folder / file)
        return [record(modality, file)]

    return make


def an_empty_parquet(folder: Path) -> Path:
    schema = pyarrow.schema([('id', pyarrow.string()), ('conversations', pyarrow.string())])
    pyarrow.parquet.write_table(schema.empty_table(), folder / 'a.parquet')
    return folder / 'a.parquet'


def pipe_as_file(folder: Path) -> Path:
    os.mkfifo(folder / 'a.json')
    return folder / 'a.json'


def beside_a_good_one(make: Make) -> Make:
    return lambda folder: [*make(folder), record(sample_id='good')]


def picture(path: Path, **options: Any) -> None:
    Image.new('RGB', (16, 16), (200, 20, 20)).save(path, **options)


def pages(path: Path) -> None:
    """Three different pictures in one file."""
    first, *others = [Image.new('L', (16, 16), shade) for shade in (10, 120, 250)]
    first.save(path, save_all=True, append_images=others)


def changed(write: Write, change: Callable[[bytes], bytes]) -> Write:
    """Writes a file and changes its bytes."""

    def write_changed(path: Path) -> None:
        write(path)
        path.write_bytes(change(path.read_bytes()))

    return write_changed


def cut(write: Write, share: float) -> Write:
    return changed(write, lambda content: content[: int(len(content) * share)])


def half(write: Write) -> Write:
    return cut(write, 0.5)


def looping_link(path: Path) -> None:
    path.symlink_to(path)


def dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name('nothing.png'))


def long_wav(path: Path, *, channels: int = 1) -> None:
    sound = sine(0.6)
    if channels > 1:
        sound = np.stack([sound] * channels, axis=1)
    write_sound(path, sound)


def transport_stream(path: Path) -> None:
    write_video(path, [10 * shade for shade in range(25)] * 2, codec='mpeg2video')


def playlist_to(target: str) -> Write:
    """Writes a playlist whose only segment is outside of the folder of the data."""

    def write(path: Path) -> None:
        outside = path.parent.with_name('outside.ts')
        transport_stream(outside)
        name = target.format(outside=outside)
        path.write_text(f'#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{name}\n#EXT-X-ENDLIST\n')

    return write


def eps(path: Path) -> None:
    path.write_text('%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n0 0 16 16 rectfill\nshowpage\n')


def in_a_folder(make: Make) -> Make:
    """Makes the files one folder deeper, so that a file next to that folder is outside."""

    def make_deeper(folder: Path) -> Path:
        (folder / 'media').mkdir()
        path = folder / 'media' / 'data.json'
        path.write_text(json.dumps(make(folder / 'media')))
        return path

    return make_deeper


CONTROL = 'Yes.<|end|>No.'
SKIP = {'on_error': 'skip'}

RECORDS: dict[str, Reading] = {
    # records
    'a conversation': Reading(of_record(), WORKS),
    'a conversation about a picture': of_image('a.png', picture, WORKS),
    'an empty file': Reading(of_text(''), 'data.json'),
    'a file that is not there': Reading(lambda folder: folder / 'none.json', 'does not exist'),
    'a folder as the file': Reading(lambda folder: folder, 'table'),
    'a parquet of no rows': Reading(an_empty_parquet, 'a.parquet'),
    'a damaged parquet': Reading(of_bytes(b'PAR1' + bytes(200) + b'PAR1', 'a.parquet'), 'a.parquet'),
    'a pipe as the file': Reading(pipe_as_file, 'a.json'),
    # pictures
    'a dangling link': of_image('a.png', dangling_link, SAMPLE),
    'a looping link': of_image('a.png', looping_link, SAMPLE),
    'a dangling link under skip': Reading(
        beside_a_good_one(of_file('image', 'a.png', dangling_link)), WORKS, options=SKIP
    ),
    'half a picture': of_image('a.png', half(picture), SAMPLE),
    'an animated PNG as a picture': of_image('a.png', pages, SAMPLE),
    'a TIFF of many pages': of_image('a.tiff', pages, SAMPLE),
    'an EPS, for which Pillow calls a program': of_image('a.eps', eps, 'EPS'),
    # videos
    'a playlist of a file elsewhere': Reading(
        in_a_folder(of_file('video', 'v.m3u8', playlist_to('{outside}'))), SAMPLE, processor=VIDEO
    ),
    # sounds
    'a sound of eight channels': of_audio('a.wav', functools.partial(long_wav, channels=8), WORKS),
    'a sound of one value': of_audio('a.wav', lambda path: write_sound(path, sine(0.6)[:1]), SAMPLE),
    # control tokens in a user's text
    'control tokens in an answer': Reading(of_record(answer=CONTROL), WORKS),
    'control tokens in an answer, refused': Reading(
        of_record(answer=CONTROL), '<|end|>', options={'control_tokens': 'refuse'}
    ),
    'control tokens in an answer, as text': Reading(
        of_record(answer=CONTROL), WORKS, options={'control_tokens': 'text'}
    ),
    'control tokens that the tokenizer cannot write': Reading(
        of_record(answer='A</s>'), '</s>', processor=VIDEO, options={'control_tokens': 'text'}
    ),
    'an unknown value of control_tokens': Reading(of_record(), 'control_tokens', options={'control_tokens': 'drop'}),
}
