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
# Processors.
IMAGE = 'image'
VIDEO = 'qwen2_vl'
AUDIO = 'qwen2_audio'


@dataclass(frozen=True)
class Reading:
    """A data file that is read with a processor and options of the dataset."""

    make: Make
    expected: str
    processor: str = IMAGE
    options: dict[str, Any] | None = None

    def run(self, folder: Path) -> str:
        path = self._data_file(folder)
        options = dict(self.options or {})
        if options.get('on_error') == 'skip':
            options.update(lengths_folder=folder / 'lengths', num_workers=0)

        def read() -> None:
            dataset = LlavaDataset(path, _processor(self.processor), **options)
            for index in range(len(dataset)):
                dataset[index]

        return refusal(read, BadSampleError, ValueError)

    def _data_file(self, folder: Path) -> Path:
        """Makes the files of the trial. Returns the path of the data file."""
        content = self.make(folder)
        if isinstance(content, Path):
            return content
        text = content if isinstance(content, str) else json.dumps(content)
        path = folder / 'data.json'
        path.write_text(text)
        return path


@functools.cache
def _processor(name: str) -> Any:
    return small() if name == IMAGE else MEDIA[name]().processor


def of_image(
    file: str,
    write: Write,
    expected: str,
    *,
    processor: str = IMAGE,
    options: dict[str, Any] | None = None,
) -> Reading:
    """Reads a record about an image."""
    make = of_file('image', file, write)
    return Reading(make, expected, processor, options)


def of_video(
    file: str,
    write: Write,
    expected: str,
    *,
    options: dict[str, Any] | None = None,
) -> Reading:
    """Reads a record about a video."""
    make = of_file('video', file, write)
    return Reading(make, expected, VIDEO, options)


def of_audio(file: str, write: Write, expected: str) -> Reading:
    """Reads a record about a sound."""
    make = of_file('audio', file, write)
    return Reading(make, expected, AUDIO)


def record(
    modality: str = '',
    *files: str,
    answer: str = 'A red square.',
    sample_id: str = 'a',
) -> dict[str, Any]:
    """Returns a record that asks about files of a modality, or about nothing."""
    placeholders = f'<{modality}>' * len(files)
    question = f'{placeholders}What is this?'
    entries: dict[str, Any] = {'id': sample_id, 'conversations': turns(question, answer)}
    if modality:
        entries[f'{modality}s'] = list(files)
    return entries


def of_text(text: str) -> Make:
    return lambda folder: text


def of_bytes(content: bytes, name: str = 'data.json') -> Make:
    """Makes a data file of these bytes."""

    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content)
        return path

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
    schema = pyarrow.schema({'id': pyarrow.string(), 'conversations': pyarrow.string()})
    table = schema.empty_table()
    path = folder / 'a.parquet'
    pyarrow.parquet.write_table(table, path)
    return path


def pipe_as_file(folder: Path) -> Path:
    path = folder / 'a.json'
    os.mkfifo(path)
    return path


def beside_a_good_one(make: Make) -> Make:
    """Makes the records of a trial, and one without a fault."""
    good_record = record(sample_id='good')
    return lambda folder: [*make(folder), good_record]


def picture(path: Path, **options: Any) -> None:
    red_square = Image.new('RGB', (16, 16), (200, 20, 20))
    red_square.save(path, **options)


def pages(path: Path) -> None:
    """Three different pictures in one file."""
    dark = Image.new('L', (16, 16), 10)
    grey = Image.new('L', (16, 16), 120)
    bright = Image.new('L', (16, 16), 250)
    dark.save(path, save_all=True, append_images=[grey, bright])


def changed(write: Write, change: Callable[[bytes], bytes]) -> Write:
    """Writes a file and changes its bytes."""

    def write_changed(path: Path) -> None:
        write(path)
        content = path.read_bytes()
        path.write_bytes(change(content))

    return write_changed


def cut(write: Write, share: float) -> Write:
    """Writes only the first share of the bytes of a file."""

    def beginning(content: bytes) -> bytes:
        num_bytes = int(len(content) * share)
        return content[:num_bytes]

    return changed(write, beginning)


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
    shades = range(0, 250, 10)
    write_video(path, [*shades, *shades], codec='mpeg2video')


def eps(path: Path) -> None:
    path.write_text('%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n0 0 16 16 rectfill\nshowpage\n')


def playlist_of_a_file_elsewhere(path: Path) -> None:
    """Writes a playlist whose only segment is outside of the folder of the data."""
    outside = path.parent.with_name('outside.ts')
    transport_stream(outside)
    path.write_text(f'#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{outside}\n#EXT-X-ENDLIST\n')


def in_a_folder(make: Make) -> Make:
    """Makes the files one folder deeper, so that a file next to that folder is outside."""

    def make_deeper(folder: Path) -> Path:
        deeper_folder = folder / 'media'
        deeper_folder.mkdir()
        records = make(deeper_folder)
        path = deeper_folder / 'data.json'
        path.write_text(json.dumps(records))
        return path

    return make_deeper


def file_that_is_not_there(folder: Path) -> Path:
    return folder / 'none.json'


def folder_as_file(folder: Path) -> Path:
    return folder


def sound_of_one_value(path: Path) -> None:
    tone = sine(0.6)
    write_sound(path, tone[:1])


RECORD_WITH_DANGLING_LINK = of_file('image', 'a.png', dangling_link)
RECORD_WITH_OUTER_PLAYLIST = of_file('video', 'v.m3u8', playlist_of_a_file_elsewhere)
DAMAGED_PARQUET = b'PAR1' + bytes(200) + b'PAR1'
CONTROL = 'Yes.<|end|>No.'
REFUSE = {'control_tokens': 'refuse'}
AS_TEXT = {'control_tokens': 'text'}
SKIP = {'on_error': 'skip'}

RECORDS: dict[str, Reading] = {
    # data files
    'a conversation': Reading(of_record(), WORKS),
    'a conversation about a picture': of_image('a.png', picture, WORKS),
    'an empty file': Reading(of_text(''), 'data.json'),
    'a file that is not there': Reading(file_that_is_not_there, 'does not exist'),
    'a folder as the file': Reading(folder_as_file, 'table'),
    'a parquet of no rows': Reading(an_empty_parquet, 'a.parquet'),
    'a damaged parquet': Reading(of_bytes(DAMAGED_PARQUET, 'a.parquet'), 'a.parquet'),
    'a pipe as the file': Reading(pipe_as_file, 'a.json'),
    # pictures
    'a dangling link': Reading(RECORD_WITH_DANGLING_LINK, SAMPLE),
    'a dangling link under skip': Reading(beside_a_good_one(RECORD_WITH_DANGLING_LINK), WORKS, options=SKIP),
    'a looping link': of_image('a.png', looping_link, SAMPLE),
    'half a picture': of_image('a.png', half(picture), SAMPLE),
    'an animated PNG as a picture': of_image('a.png', pages, SAMPLE),
    'a TIFF of many pages': of_image('a.tiff', pages, SAMPLE),
    'an EPS, for which Pillow calls a program': of_image('a.eps', eps, 'EPS'),
    # videos
    'a playlist of a file elsewhere': Reading(in_a_folder(RECORD_WITH_OUTER_PLAYLIST), SAMPLE, processor=VIDEO),
    # sounds
    'a sound of eight channels': of_audio('a.wav', functools.partial(long_wav, channels=8), WORKS),
    'a sound of one value': of_audio('a.wav', sound_of_one_value, SAMPLE),
    # control tokens in a user's text
    'control tokens in an answer': Reading(of_record(answer=CONTROL), WORKS),
    'control tokens in an answer, refused': Reading(of_record(answer=CONTROL), '<|end|>', options=REFUSE),
    'control tokens in an answer, as text': Reading(of_record(answer=CONTROL), WORKS, options=AS_TEXT),
    'control tokens that the tokenizer cannot write': Reading(
        of_record(answer='A</s>'),
        '</s>',
        processor=VIDEO,
        options=AS_TEXT,
    ),
    'an unknown value of control_tokens': Reading(of_record(), 'control_tokens', options={'control_tokens': 'drop'}),
}
