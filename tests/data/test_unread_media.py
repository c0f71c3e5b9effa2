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

# Keys in addition to the conversation, the key that is refused, and the key that the message recommends.
UNREAD = {
    'webdataset': ({'jpg': 'a.jpg'}, 'jpg', 'image'),
    # The unread key is the cause, not the number of images.
    'webdataset with a placeholder': ({'jpg': 'a.jpg', 'conversations': WITH_IMAGE}, 'jpg', 'image'),
    'webdataset bytes': ({'jpg': PNG}, 'jpg', 'image'),
    'webdataset base64': ({'png': BASE64}, 'png', 'image'),
    'webdataset video': ({'mp4': 'a.mp4'}, 'mp4', 'video'),
    'video named as an image': ({'image_2': 'a.mp4'}, 'image_2', 'video'),
    'images named as a video': ({'frames': ['a.jpg']}, 'frames', 'videos'),
    'picture': ({'picture': 'a.png'}, 'picture', 'image'),
    'frames': ({'frames': ['1.jpg', '2.jpg']}, 'frames', 'videos'),
    'media of strings': ({'media': ['a.png']}, 'media', 'images'),
    'media of objects': ({'media': [{'type': 'image', 'path': 'a.png'}]}, 'media', 'images'),
    'imagefolder': ({'file_name': 'a.png'}, 'file_name', 'image'),
    'NeMo': ({'audio_filepath': 'a.wav'}, 'audio_filepath', 'audio'),
    'Kaldi': ({'wav': 'a.flac'}, 'wav', 'audio'),
    'image_path': ({'image_path': 'train/a.png'}, 'image_path', 'image'),
    'img_path': ({'img_path': 'a'}, 'img_path', 'image'),
    'imgs': ({'imgs': ['a.png', 'b.png']}, 'imgs', 'images'),
    'MMMU': ({'image_1': {'bytes': PNG, 'path': None}, 'image_2': None}, 'image_1', 'image'),
    'image_url on a network': ({'image_url': 'https://x/a.png?w=3'}, 'image_url', 'image'),
    'url': ({'url': 'http://images.x/a.jpg'}, 'url', 'image'),
    'image_b64': ({'image_b64': BASE64}, 'image_b64', 'image'),
    'data URI': ({'screenshot': f'data:image/png;base64,{BASE64}'}, 'screenshot', 'image'),
    'data URI in capitals': ({'screenshot': f'DATA:IMAGE/PNG;BASE64,{BASE64}'}, 'screenshot', 'image'),
    'attachments': ({'attachments': [{'url': 'file:///tmp/a.webp'}]}, 'attachments', 'images'),
    'ActivityNet': ({'video_id': 'v_abc'}, 'video_id', 'video'),
    'COCO': ({'image_id': 139}, 'image_id', 'image'),
    'clip': ({'clip': 'a.webm'}, 'clip', 'video'),
    'video_path with an image': ({'image': 'a.png', 'video_path': 'b.mp4'}, 'video_path', 'video'),
    'video_name without ending': ({'image': 'a.png', 'video_name': 'b'}, 'video_name', 'video'),
    'second image': ({'image': 'a.png', 'image2': 'b.png'}, 'image2', 'image'),
    'mask': ({'image': 'a.png', 'mask': 'masks/b.png'}, 'mask', 'image'),
    'nested': ({'meta': {'files': {'left': 'a.HEIC'}}}, 'meta', 'image'),
    'speech': ({'speech': ['a.mp3']}, 'speech', 'audios'),
    'embedded table bytes': ({'thumbnail': b'\x00\x01'}, 'thumbnail', 'image'),
    'JPEG as base64': ({'pic': JPEG_BASE64}, 'pic', 'image'),
    'MP4 as base64': ({'clip': MP4_BASE64}, 'clip', 'video'),
    'GIF as base64': ({'pic': GIF_BASE64}, 'pic', 'image'),
}


@pytest.mark.parametrize(('keys', 'refused_key', 'recommended_key'), UNREAD.values(), ids=UNREAD.keys())
def test_unread_medium_is_refused(keys, refused_key, recommended_key):
    conversation = WITH_IMAGE if 'image' in keys else TURNS
    with pytest.raises(BadSampleError) as raised:
        parse({'id': 'a', 'conversations': conversation, **keys})
    message = str(raised.value)
    assert message.startswith(f'sample "a" (data.json, line 3): `{refused_key}` looks like ')
    assert f'Call it `{recommended_key}`, or take it out' in message
    assert len(message) < 300


# Keys that describe a sample and hold no medium.
NOTES = {
    'text': {'source': 'coco', 'caption': 'A red square.', 'split': 'train'},
    'numbers': {'image_width': 640, 'num_images': 0, 'frames': 32, 'score': 0.5, 'has_image': False},
    'nothing': {'image_path': None, 'video': '', 'jpg': [], 'frames': {}},
    'sentence': {'image_caption': 'A cat', 'media': 'on a mat, he said', 'credit': 'from https://x.com/a.jpg'},
    'code': {'language': 'a.py', 'text': 'data: 1, 2, 3'},
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
