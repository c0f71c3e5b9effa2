# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Media under the keys of other projects are read, or refused by the key. No sample is trained without its media."""

from __future__ import annotations

import base64

import pytest

from composer_tokacc.data import BadSampleError
from tests.support.conversations import parse, png, turns

PNG = png()
BASE64 = base64.b64encode(PNG).decode()
JPEG_BASE64 = '/9j/4AAQSkZJRgABAQ' + 'A' * 60
GIF_BASE64 = 'R0lGODlh' + 'A' * 60
MP4_HEAD = b'\0\0\0\x20ftypmp42' + bytes(40)
MP4_BASE64 = base64.b64encode(MP4_HEAD).decode()
TURNS = turns('What is this?', 'A red square.')
WITH_IMAGE = turns('<image>What is this?', 'A red square.')

# The key that the message recommends -> records without their conversation. The last key of each is refused.
UNREAD = {
    'images': [
        {'jpg': 'a.jpg'},  # webdataset
        {'conversations': WITH_IMAGE, 'jpg': 'a.jpg'},  # the unread key is the cause, not the number of images
        {'jpg': PNG},
        {'png': BASE64},
        {'file_name': 'a.png'},  # imagefolder
        {'image_path': 'train/a.png'},
        {'img_path': 'a'},
        {'image_2': None, 'image_1': {'bytes': PNG, 'path': None}},  # MMMU
        {'image_url': 'https://x/a.png?w=3'},
        {'screenshot': f'data:image/png;base64,{BASE64}'},
        {'screenshot': f'DATA:IMAGE/PNG;BASE64,{BASE64}'},
        {'screenshot': f'data:;base64,{BASE64}'},
        {'screenshot': f'data:binary/octet-stream;base64,{BASE64}'},
        {'screenshot': 'data:image/svg+xml,%3Csvg%3E'},
        {'image_id': 139},  # COCO
        {'image_id_2': 139},
        {'image': 'a.png', 'image2': 'b.png'},
        {'image': 'a.png', 'mask': 'masks/b.png'},
        {'meta': {'files': {'left': 'a.HEIC'}}},
        {'thumbnail': b'\x00\x01'},
        {'pic': JPEG_BASE64},
        {'pic': GIF_BASE64},
        {'media': ['a.png']},
        {'media': [{'type': 'image', 'path': 'a.png'}]},
        {'attachments': [{'url': 'file:///tmp/a.webp'}]},
    ],
    'videos': [
        {'mp4': 'a.mp4'},
        {'image_2': 'a.mp4'},
        {'video_id': 'v_abc'},  # ActivityNet
        {'clip': 'a.webm'},
        {'clip': MP4_BASE64},
        {'image': 'a.png', 'video_path': 'b.mp4'},
        {'frames': ['a.jpg']},
    ],
    'audios': [
        {'audio_filepath': 'a.wav'},  # NeMo
        {'wav': 'a.flac'},  # Kaldi
        {'speech': ['a.mp3']},
    ],
}
CASES = []
for recommended_key, records in UNREAD.items():
    for record in records:
        CASES.append((recommended_key, record))


@pytest.mark.parametrize(('recommended_key', 'record'), CASES)
def test_unread_medium_is_refused(recommended_key, record):
    conversation = WITH_IMAGE if 'image' in record else TURNS
    with pytest.raises(BadSampleError) as raised:
        parse({'id': 'a', 'conversations': conversation, **record})
    *_, refused_key = record
    message = str(raised.value)
    assert message.startswith(f'sample "a" (data.json, line 3): `{refused_key}` looks like ')
    assert f'Call it `{recommended_key}` if it is one' in message
    assert len(message) < 300


def test_medium_of_a_placeholder_is_unread():
    """The message names the key, and not only the number of media."""
    with pytest.raises(BadSampleError, match='`image_url` looks like '):
        parse({'conversations': WITH_IMAGE, 'image_url': 'https://flickr.com/5.jpg'})


# Keys that describe a sample and hold no medium.
NOTES = {
    'text': {'source': 'coco', 'caption': 'A red square.', 'split': 'train'},
    'numbers': {'image_width': 640, 'num_images': 0, 'frames': 32, 'score': 0.5, 'has_image': False},
    'nothing': {'image_path': None, 'video': '', 'jpg': [], 'frames': {}},
    'sentence': {'image_caption': 'A cat', 'media': 'on a mat, he said', 'credit': 'from https://x.com/a.jpg'},
    'code': {'language': 'a.py', 'text': 'data: 1, 2, 3'},
    'data': {'years': 'data:2020,2021', 'topic': 'Data:science, ML', 'kind': 'data:images, labels'},
}


@pytest.mark.parametrize('notes', NOTES.values(), ids=NOTES.keys())
def test_notes_are_ignored(notes):
    assert parse({'conversations': TURNS, **notes}).media == ()


SOURCES = {
    'same name': {'file_name': 'train2017/a.png', 'image_name': 'a'},
    'address': {'url': 'https://flickr.com/5.jpg', 'coco_url': 'http://images.cocodataset.org/a.png'},
    'id': {'image_id': 139},
}


@pytest.mark.parametrize('source', SOURCES.values(), ids=SOURCES.keys())
def test_source_of_a_medium_is_ignored(source):
    record = parse({'conversations': WITH_IMAGE, 'image': 'coco/a.png', **source})
    assert [medium.names for medium in record.media] == [['coco/a.png']]
