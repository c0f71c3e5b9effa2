# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Records and the files that they name: a data file is read, then every sample of it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from PIL import Image

from composer_tokacc.data import BadSampleError, LlavaDataset
from tests.data.chat_processors import small
from tests.support.clips import sine, write_encoded_sound, write_sound, write_video
from tests.support.family_media import MEDIA
from tests.trials.outcomes import WORKS, refusal

Make = Callable[[Path], Any]
"""From a folder to records."""
Write = Callable[[Path], Any]
"""What writes one file."""
SAMPLE = 'sample "a"'
"""Every line about a sample names its id."""


def read_records(folder: Path, processor: str, make: Make, options: dict[str, Any] | None = None) -> str:
    """``make(folder)`` writes files and gives the records, or the data file's path."""
    options = options or {}
    made = make(folder)
    path = made if isinstance(made, Path) else folder / 'data.json'
    if not isinstance(made, Path):
        path.write_text(made if isinstance(made, str) else json.dumps(made))
    if options.get('on_error') == 'skip':
        options = {**options, 'lengths_folder': folder / 'lengths', 'num_workers': 0}

    def read() -> None:
        dataset = LlavaDataset(path, _processor(processor), **options)
        for index in range(len(dataset)):
            dataset[index]

    return refusal(read, BadSampleError, ValueError)


@functools.cache
def _processor(name: str) -> Any:
    return small() if name == 'image' else MEDIA[name]().processor


def record(kind: str = '', *files: str, answer: str = 'A red square.', sample_id: str = 'a') -> dict[str, Any]:
    turns = [{'from': 'human', 'value': f'<{kind}>' * len(files) + 'What is this?'}, {'from': 'gpt', 'value': answer}]
    media = {'image': list(files)} if kind == 'image' else {f'{kind}s': list(files)} if kind else {}
    return {'id': sample_id, **media, 'conversations': turns}


def of_text(text: str) -> Make:
    return lambda folder: text


def of_bytes(content: bytes, name: str = 'data.json') -> Make:
    """A data file of these bytes."""

    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def of_record(**given: Any) -> Make:
    return lambda folder: [record(**given)]


def of_file(kind: str, name: str, write: Write, **given: Any) -> Make:
    return lambda folder: (write(folder / name), [{**record(kind, name), **given}])[1]


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
    """Three unlike pictures in one file."""
    first, *others = (Image.new('RGB', (16, 16), (shade, 0, 0)) for shade in (10, 120, 250))
    first.save(path, save_all=True, append_images=others)


def changed(write: Write, change: Callable[[bytes], bytes]) -> Write:
    return lambda path: (write(path), path.write_bytes(change(path.read_bytes())))


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
    write_sound(path, sound if channels == 1 else np.repeat(sound[:, None], channels, axis=1))


def transport_stream(path: Path) -> None:
    write_video(path, [10 * shade for shade in range(25)] * 2, codec='mpeg2video')


def playlist_to(target: str) -> Write:
    """A playlist in the image folder whose only segment lies outside of it."""

    def write(path: Path) -> None:
        outside = path.parent.with_name('outside.ts')
        transport_stream(outside)
        name = target.format(outside=outside)
        path.write_text(f'#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{name}\n#EXT-X-ENDLIST\n')

    return write


def eps(path: Path) -> None:
    path.write_text('%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n0 0 16 16 rectfill\nshowpage\n')


def in_a_folder(make: Make) -> Make:
    """Files lie a folder deeper than the trial's own, so that there is an outside."""

    def make_deeper(folder: Path) -> Path:
        (folder / 'media').mkdir()
        path = folder / 'media' / 'data.json'
        path.write_text(json.dumps(make(folder / 'media')))
        return path

    return make_deeper


_TURNS = '[{"from": "human", "value": "A?"}, {"from": "gpt", "value": "B."}]'
TWICE = f'[{{"id": "a", "conversations": [], "conversations": {_TURNS}}}]'
CONTROL = 'Yes.<|end|>No.'
SKIP = {'on_error': 'skip'}
animation = functools.partial(write_video, codec='gif', pixels='rgb8')
IMAGE, VIDEO, AUDIO = 'image', 'qwen2_vl', 'qwen2_audio'

RECORDS: dict[str, tuple[Any, ...]] = {
    # name: (processor, what makes the records, perhaps options, what the line names)
    # records
    'a conversation': (IMAGE, of_record(), WORKS),
    'a conversation about a picture': (IMAGE, of_file('image', 'a.png', picture), WORKS),
    'an empty answer': (IMAGE, of_record(answer=''), SAMPLE),
    'an empty file': (IMAGE, of_text(''), 'data.json'),
    'a file that is not there': (IMAGE, lambda folder: folder / 'none.json', 'none.json'),
    'a folder as the file': (IMAGE, lambda folder: folder, 'table'),
    'an empty parquet': (IMAGE, of_bytes(b'', 'a.parquet'), 'a.parquet'),
    'a parquet of no rows': (IMAGE, an_empty_parquet, 'a.parquet'),
    'a damaged parquet': (IMAGE, of_bytes(b'PAR1' + bytes(200) + b'PAR1', 'a.parquet'), 'a.parquet'),
    'a pipe as the file': (IMAGE, pipe_as_file, 'a.json'),
    # pictures
    'a picture that is not there': (IMAGE, of_file('image', 'a.png', lambda path: None), SAMPLE),
    'a dangling link': (IMAGE, of_file('image', 'a.png', dangling_link), SAMPLE),
    'a looping link': (IMAGE, of_file('image', 'a.png', looping_link), SAMPLE),
    'a dangling link under skip': (IMAGE, beside_a_good_one(of_file('image', 'a.png', dangling_link)), SKIP, WORKS),
    'half a picture': (IMAGE, of_file('image', 'a.png', half(picture)), SAMPLE),
    'an animated PNG as a picture': (IMAGE, of_file('image', 'a.png', pages), SAMPLE),
    'a TIFF of many pages': (IMAGE, of_file('image', 'a.tiff', pages), SAMPLE),
    'an EPS, which calls a program': (IMAGE, of_file('image', 'a.eps', eps), 'EPS'),
    # videos
    'a playlist of a file elsewhere': (
        VIDEO,
        in_a_folder(of_file('video', 'v.m3u8', playlist_to('{outside}'))),
        SAMPLE,
    ),
    # sounds
    'a sound of eight channels': (AUDIO, of_file('audio', 'a.wav', functools.partial(long_wav, channels=8)), WORKS),
    'a sound of one value': (AUDIO, of_file('audio', 'a.wav', lambda path: write_sound(path, sine(0.6)[:1])), SAMPLE),
    'half an Ogg Opus': (
        AUDIO,
        of_file('audio', 'a.ogg', half(functools.partial(write_encoded_sound, codec='libopus'))),
        SAMPLE,
    ),
    # control tokens in a user's text
    'control tokens in an answer': (IMAGE, of_record(answer=CONTROL), WORKS),
    'control tokens in an answer, refused': (IMAGE, of_record(answer=CONTROL), {'control_tokens': 'refuse'}, '<|end|>'),
    'control tokens in an answer, as text': (IMAGE, of_record(answer=CONTROL), {'control_tokens': 'text'}, WORKS),
    'control tokens that the tokenizer cannot write': (
        VIDEO,
        of_record(answer='A</s>'),
        {'control_tokens': 'text'},
        '</s>',
    ),
    'control tokens of another word': (IMAGE, of_record(), {'control_tokens': 'drop'}, 'control_tokens'),
}
