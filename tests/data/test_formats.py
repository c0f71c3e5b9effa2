# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Files as other projects document them: each is read as it is meant, or refused by name. Nothing is dropped."""

from __future__ import annotations

import base64
import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken

from composer_tokacc.data import BadSampleError, LlavaDataset
from composer_tokacc.data.files import read_raw_records
from composer_tokacc.data.formats import parse_record
from composer_tokacc.data.llama_factory import DatasetEntry
from composer_tokacc.data.media import decode_media, open_files
from composer_tokacc.data.records import RawRecord
from tests.data.chat_processors import learned_text, small
from tests.support.conversations import DATASET_NAME, parse, png, turns, write_dataset_info, write_json

RED = png()
BLUE = png('blue')
RED_TEXT = base64.b64encode(RED).decode()
RED_URI = f'data:image/png;base64,{RED_TEXT}'
UPPERCASE_RED_URI = f'DATA:image/png;BASE64,{RED_TEXT}'
WAV_TEXT = base64.b64encode(b'RIFF').decode()
WAV_URI = f'data:audio;base64,{WAV_TEXT}'
COLOUR_NAMES = {(255, 0, 0): 'red', (0, 0, 255): 'blue'}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'red.png').write_bytes(RED)
    (tmp_path / 'blue.png').write_bytes(BLUE)
    return tmp_path


def lines_of(record):
    """Returns a line for each turn and each medium of a record."""
    lines = []
    for turn in record.turns:
        suffix = '' if turn.carries_loss else ' (no loss)'
        lines.append(f'{turn.role}: {turn.text}{suffix}')
    for medium in record.media:
        lines.append(f'{medium.modality} {", ".join(medium.names)}')
    return lines


def image_colours(record):
    """Returns the name of each image's colour, as it is decoded."""
    images = decode_media(record, open_files(record)).get('image', [])
    return [COLOUR_NAMES[image.getpixel((0, 0))] for image in images]


def user_turn(content):
    return {'role': 'user', 'content': content}


def assistant_turn(text):
    return {'role': 'assistant', 'content': text}


def part(part_type, **entries):
    return {'type': part_type, **entries}


def ask(*parts):
    """Returns a record with one question of these parts."""
    return {'messages': [user_turn(list(parts)), ANSWER]}


def ask_text(text, **keys):
    return {'messages': [user_turn(text), ANSWER], **keys}


def about_red(**keys):
    """Returns a good record of a question about the red image, with some keys changed or added."""
    return {'messages': [QUESTION, ANSWER], 'image': 'red.png', **keys}


def with_answer(**entries):
    """Returns the good record with entries added to its answer."""
    return about_red(messages=[QUESTION, {**ANSWER, **entries}])


QUESTION = user_turn('<image>Which colour?')
ANSWER = assistant_turn('Red.')
TEXT = part('text', text='Which colour?')
RED_PART = part('image', image='red.png')
RED_AS_BYTES = {'bytes': RED, 'path': None}
PLAIN_TURNS = ('user: <image>Which colour?', 'assistant: Red.')
LINES_ABOUT_RED = [*PLAIN_TURNS, 'image red.png']


@dataclass(frozen=True)
class Example:
    """A record as a project documents it, and the lines that it is read as, see `lines_of`."""

    record: dict[str, Any]
    lines: Sequence[str]


def example_about_red(record, *, name='red.png'):
    """Returns an example that is read as the plain question about one image.

    ``name`` is the image's name in error messages: its file, or what holds its bytes.
    """
    return Example(record, [*PLAIN_TURNS, f'image {name}'])


# Keys are named as in each project's own documentation.
FORMATS = {
    'VILA': example_about_red({'id': '1', 'image': 'red.png', 'conversations': turns('<image>Which colour?', 'Red.')}),
    'LLaMA-Factory alpaca': Example(
        {
            'instruction': 'Which colour?',
            'input': '<image>',
            'output': 'Red.',
            'system': 'Be brief.',
            'history': [['Hello?', 'Hi.'], ['Ready?', 'Yes.']],
            'images': ['red.png'],
        },
        [
            'system: Be brief.',
            'user: Hello?',
            'assistant: Hi.',
            'user: Ready?',
            'assistant: Yes.',
            'user: Which colour?\n<image>',
            'assistant: Red.',
            'image red.png',
        ],
    ),
    'alpaca without input': Example(
        {'instruction': 'Which colour has blood?', 'input': '', 'output': 'Red.'},
        ['user: Which colour has blood?', 'assistant: Red.'],
    ),
    'LLaMA-Factory ShareGPT with an observation': Example(
        {
            'conversations': [
                {'from': 'human', 'value': 'Weather?'},
                {'from': 'gpt', 'value': 'Let me look.'},
                {'from': 'observation', 'value': 'sunny'},
                {'from': 'gpt', 'value': 'Sunny.'},
            ],
            'system': '',
        },
        ['user: Weather?', 'assistant: Let me look.', 'tool: sunny', 'assistant: Sunny.'],
    ),
    'OpenAI image_url': Example(
        {
            'messages': [
                {'role': 'developer', 'content': 'Be brief.'},
                user_turn([TEXT, part('image_url', image_url={'url': RED_URI, 'detail': 'low'})]),
                ANSWER,
            ]
        },
        [
            'system: Be brief.',
            'user: Which colour?<image>',
            'assistant: Red.',
            'image data:image/png',
        ],
    ),
    'OpenAI input_image': example_about_red(
        ask(part('input_image', image_url=RED_URI), part('input_text', text='Which colour?')),
        name='data:image/png',
    ),
    'Qwen2-VL': example_about_red(ask(RED_PART, TEXT)),
    'Qwen2-VL base64': example_about_red(
        ask(part('image', image=f'data:image;base64,{RED_TEXT}'), TEXT),
        name='data:image',
    ),
    'transformers': example_about_red(
        ask(part('image', base64=RED_TEXT), TEXT),
        name='data:image',
    ),
    'TRL messages': example_about_red({'images': ['red.png'], **ask(part('image'), TEXT)}),
    'TRL messages of a table': example_about_red(
        {'images': [RED_AS_BYTES], **ask(part('image', text=None, index=0), {**TEXT, 'index': None})},
        name='in the record',
    ),
    'TRL prompt and completion': Example(
        {
            'images': ['red.png', 'blue.png'],
            'prompt': [user_turn('Which colour?'), assistant_turn('Red?'), user_turn('And?')],
            'completion': [assistant_turn('Blue.')],
        },
        [
            'user: <image><image>Which colour?',
            'assistant: Red? (no loss)',
            'user: And?',
            'assistant: Blue.',
            'image red.png',
            'image blue.png',
        ],
    ),
    'ms-swift': example_about_red({'messages': [QUESTION, ANSWER], 'images': [{'bytes': None, 'path': 'red.png'}]}),
    'ms-swift bytes': example_about_red(
        {'messages': [QUESTION, ANSWER], 'images': [{'bytes': RED_TEXT, 'path': 'x.png'}]},
        name='data:image',
    ),
    'ms-swift query': example_about_red(
        {'query': '<image>Which colour?', 'response': 'Red.', 'images': ['red.png'], 'history': []}
    ),
    'Monkey, `<img>` beside the key `image`': Example(
        {
            'image': 'blue.png',
            'conversations': [
                {'from': 'user', 'value': '<img>red.png</img><image>Which colours?'},
                {'from': 'assistant', 'value': 'Red, blue.'},
            ],
        },
        [
            'user: <image><image>Which colours?',
            'assistant: Red, blue.',
            'image red.png',
            'image blue.png',
        ],
    ),
    'The Cauldron': Example(
        {
            'images': [RED_AS_BYTES],
            'texts': [
                {'user': 'Which colour?', 'assistant': 'Red.', 'source': 'VQAv2'},
                {'user': 'Sure?', 'assistant': 'Yes.', 'source': 'VQAv2'},
            ],
        },
        [*PLAIN_TURNS, 'user: Sure?', 'assistant: Yes.', 'image in the record'],
    ),
    'FineVision': example_about_red(
        {
            'images': [RED_AS_BYTES],
            'source': 'vqav2',
            'relevance_ratings': [5],
            'texts': [{'user': 'Which colour?', 'assistant': 'Red.'}],
        },
        name='in the record',
    ),
    'VideoChat2 image': example_about_red({'image': 'red.png', 'QA': [{'i': '', 'q': 'Which colour?', 'a': 'Red.'}]}),
    'image of a tool': Example(
        {
            'images': ['red.png', 'blue.png'],
            'messages': [
                QUESTION,
                ANSWER,
                {'role': 'tool', 'content': [part('image'), part('text', text='found')]},
                assistant_turn('Blue.'),
            ],
        },
        [
            *PLAIN_TURNS,
            'tool: <image>found',
            'assistant: Blue.',
            'image red.png',
            'image blue.png',
        ],
    ),
    'data URI in capitals, image and images the same': example_about_red(
        about_red(image=UPPERCASE_RED_URI, images=[UPPERCASE_RED_URI]),
        name='DATA:image/png',
    ),
    'LLaMA-Factory ShareGPT, videos and audio': Example(
        ask_text(
            '<image><video>What<audio>?<video>',
            images=['red.png'],
            videos=['a.mp4', ['f1.png', 'f2.png']],
            audios=['a.wav'],
        ),
        [
            'user: <image><video>What<audio>?<video>',
            'assistant: Red.',
            'image red.png',
            'video a.mp4',
            'audio a.wav',
            'video f1.png, f2.png',
        ],
    ),
    'Video-LLaVA': Example(
        ask_text('<video>\nWhat?', video='a.mp4'),
        ['user: <video>\nWhat?', 'assistant: Red.', 'video a.mp4'],
    ),
    'VideoChat2': Example(
        {
            'video': 'a.mp4',
            'QA': [
                {'i': 'Look at the video.', 'q': 'What happens?', 'a': 'Red.'},
                {'i': 'Look at the video.', 'q': 'And then?', 'a': 'Blue.'},
            ],
        },
        [
            'system: Look at the video.',
            'user: <video>What happens?',
            'assistant: Red.',
            'user: And then?',
            'assistant: Blue.',
            'video a.mp4',
        ],
    ),
    'VideoChat2 caption': Example(
        {'video': 'a.mp4', 'QA': [{'i': 'Describe it.', 'q': '', 'a': 'Red.'}]},
        ['system: Describe it.', 'user: <video>', 'assistant: Red.', 'video a.mp4'],
    ),
    'LLaVA-Video': Example(
        ask_text('<image>\nWhat?', video='a.mp4'),
        ['user: <video>\nWhat?', 'assistant: Red.', 'video a.mp4'],
    ),
    'VILA, videos and audio': Example(
        ask_text('<vila/video><sound>What?', video='a.mp4', sound='a.wav'),
        ['user: <video><audio>What?', 'assistant: Red.', 'video a.mp4', 'audio a.wav'],
    ),
    'Qwen2-VL, videos': Example(
        ask(part('video', video='file:///tmp/a.mp4'), part('video', video=['f1.png', 'f2.png'])),
        ['user: <video><video>', 'assistant: Red.', 'video /tmp/a.mp4', 'video f1.png, f2.png'],
    ),
    'Qwen2-Audio': Example(
        ask(part('audio', audio_url='a.wav'), TEXT),
        ['user: <audio>Which colour?', 'assistant: Red.', 'audio a.wav'],
    ),
    'transformers, videos and audio': Example(
        ask(part('video', path='a.mp4'), part('audio', path='a.wav'), TEXT),
        ['user: <video><audio>Which colour?', 'assistant: Red.', 'video a.mp4', 'audio a.wav'],
    ),
    'OpenAI input_audio': Example(
        ask(part('input_audio', input_audio={'data': WAV_TEXT, 'format': 'wav'}), TEXT),
        ['user: <audio>Which colour?', 'assistant: Red.', 'audio data:audio'],
    ),
    'vLLM': Example(
        ask(part('audio_url', audio_url={'url': WAV_URI}), part('video_url', video_url='a.mp4')),
        ['user: <audio><video>', 'assistant: Red.', 'audio data:audio', 'video a.mp4'],
    ),
    'TRL, videos': Example(
        {'videos': ['a.mp4'], 'prompt': [user_turn('What?')], 'completion': [ANSWER]},
        ['user: <video>What?', 'assistant: Red.', 'video a.mp4'],
    ),
    'ms-swift, videos and audio': Example(
        {'query': '<video><audio>What?', 'response': 'Red.', 'videos': [{'path': 'a.mp4'}], 'audios': ['a.wav']},
        ['user: <video><audio>What?', 'assistant: Red.', 'video a.mp4', 'audio a.wav'],
    ),
}


@pytest.mark.parametrize('name', FORMATS)
def test_record_is_what_its_project_means(folder, name):
    example = FORMATS[name]
    record = parse(example.record, folder)
    assert lines_of(record) == list(example.lines)
    modalities = [medium.modality for medium in record.media]
    types = []
    for message in record.messages():
        types += [item['type'] for item in message['content'] if item['type'] != 'text']
    assert types == modalities
    assert '<' not in ''.join(record.texts)
    if set(modalities) == {'image'}:
        colours = ['blue' if name == 'blue.png' else 'red' for medium in record.media for name in medium.names]
        assert image_colours(record) == colours


def test_line_breaks_around_placeholders():
    """Those beside a placeholder are left out, because chat templates write their own. All others stay."""
    question = '\nLines:\n\n<image>\n<image>\nOne.\n\nTwo.\n'
    messages = [{'role': 'system', 'content': 'Rules:\n'}, user_turn(question), ANSWER]
    record = parse({'messages': messages, 'images': ['a.png', 'b.png']})
    system, asked, _ = record.messages()
    assert system['content'] == [{'type': 'text', 'text': 'Rules:\n'}]
    texts = [item.get('text') for item in asked['content']]
    assert texts == ['\nLines:', None, None, 'One.\n\nTwo.\n']


def test_file_url(folder):
    (folder / 'a b.png').write_bytes(BLUE)
    image = part('image_url', image_url={'url': f'{folder.as_uri()}/a%20b.png'})
    record = parse(ask(image, TEXT), folder / 'elsewhere')
    assert image_colours(record) == ['blue']


# Record and words of the message.
REFUSED = {
    'image on a network': (ask(part('image_url', image_url={'url': 'https://x/a.png'})), 'Download it'),
    'image by id': (ask(part('input_image', file_id='file-1')), '`file_id` of a part'),
    'unknown part': (ask(part('point', xy=[1, 2])), "got: 'point'"),
    'part without type': (ask({'image': 'red.png', 'text': 'x'}), 'got: None'),
    'sizes of an image': (ask({**RED_PART, 'max_pixels': 9}), '`max_pixels` of a part'),
    'images in another order': (
        {'images': ['red.png', 'blue.png'], **ask(part('image', index=1), part('image', index=0))},
        '`index` of image parts',
    ),
    'no part': (ask(None), 'must be an object, got: None'),
    'text null': (ask(part('text', text=None)), 'must be a string, got: None'),
    'content null': (with_answer(content=None), 'must be a string, got: NoneType'),
    'list as role': (with_answer(role=['assistant']), r"got: \['assistant'\]"),
    'two roles': (with_answer(**{'from': 'gpt'}), '`role` and `from` must not be given together'),
    'broken base64': (about_red(image='data:image/png;base64,???'), 'must be base64'),
    'segment of a video': (
        {'video': 'a.mp4', 'start': 3.5, 'end': 8, 'QA': [{'q': 'What?', 'a': 'Red.'}]},
        '`start` is not supported',
    ),
    'another instruction': (
        {
            'video': 'a.mp4',
            'QA': [{'i': 'Look.', 'q': 'What?', 'a': 'Red.'}, {'i': 'Listen.', 'q': 'And?', 'a': 'Yes.'}],
        },
        '`i` must be the same',
    ),
    'two answers of VideoChat2': (
        {'video': 'a.mp4', 'QA': [{'q': 'What?', 'a': 'Red.'}, {'q': '', 'a': 'Yes.'}]},
        '`q` may be empty only in',
    ),
    'unknown key of a pair': (
        {'images': ['red.png'], 'texts': [{'user': 'What?', 'assistant': 'Red.', 'reason': 'blood'}]},
        '`reason` of an entry of `texts`',
    ),
    'long key of a turn': (with_answer(**{'x' * 200_000: 1}), '`x+` of a turn'),
    'long key': (about_red(**{'y' * 200_000: 'a.png'}), '`y+` looks like an image'),
    'images beside image': (about_red(images=['blue.png']), 'must name the same files'),
    'more images than parts': ({**ask(RED_PART), 'image': 'red.png'}, 'got: 1 images'),
    'tool_calls': (with_answer(tool_calls=[{'type': 'function'}]), '`tool_calls` of a turn is not supported'),
    'function_call role': ({'conversations': [{'from': 'function_call', 'value': '{}'}]}, "got: 'function_call'"),
    'tools': (about_red(tools='[{}]'), '`tools` is not supported'),
    'system prompt': (about_red(system_prompt='Be brief.'), '`system_prompt` must not hold a text that no turn has'),
    'options of the template': (about_red(chat_template_kwargs={'enable_thinking': False}), '`chat_template_kwargs`'),
    'boxes of ms-swift': (
        {
            **ask_text('<image>Where is <ref-object>?', images=['red.png']),
            'objects': {'ref': ['the cat'], 'bbox': [[1, 2, 3, 4]]},
        },
        '`objects` is not supported',
    ),
    'preferences': (about_red(chosen={'from': 'gpt', 'value': 'x'}), '`chosen` is not supported'),
    'thinking': (with_answer(reasoning_content='Hm.'), '`reasoning_content` of a turn is not supported'),
    'weight 0.5': (with_answer(weight=0.5), 'must be 0 or 1'),
    'loss against weight': (with_answer(weight=1, loss=False), 'must not be given together'),
    'loss on a question': (about_red(messages=[{**QUESTION, 'weight': 1}, ANSWER]), 'only for an answer'),
    'no answer with loss': (with_answer(weight=0), 'at least one answer must carry loss'),
    'VILA video in a text': (ask_text('<vila/video>What happens?'), 'got: 0 videos and 1 placeholders'),
    'video in an answer': (with_answer(content=[part('video')]), 'a part of type video may stand only in turns'),
    'image in an answer': (
        {'messages': [user_turn('What?'), assistant_turn('<image>')], 'image': 'red.png'},
        'got: 1 images and 0 placeholders',
    ),
    'video without its placeholder': (ask_text('What happens?', videos=['a.mp4']), 'got: 1 videos and 0 pl'),
    'as many media of another kind': (
        ask_text('<video><audio>?', videos=['a.mp4', 'b.mp4']),
        'got: 2 videos and 1 placeholders',
    ),
    'image for a video beside an image': (
        ask_text('<image><image>?', image='red.png', video='a.mp4'),
        'the number of images must match .* got: 1 images and 2 placeholders',
    ),
    'rate of a video': (ask(part('video', video='a.mp4', fps=1.0)), '`fps` of a part of type video'),
    'video without frames': (ask_text('<video>?', videos=[[]]), 'got: 0 videos and 1 placeholders'),
    'decoded sound': (
        ask(part('audio', audio={'array': [0.1], 'sampling_rate': 8000})),
        r'`array` of a file object \(audio\) is not supported',
    ),
    'img without end': (ask_text('<img>red.png What is this?'), '`<img>` in a text'),
    'two conversations': (about_red(conversations=[{'from': 'human', 'value': 'x'}]), 'must hold one conversation'),
    'answer elsewhere': (
        about_red(messages=[QUESTION, ANSWER, QUESTION], images=['red.png'] * 2, image=None, response='Blue.'),
        "`response` must not hold a text that no turn has.*got: 'Blue.'",
    ),
    'earlier turns elsewhere': (
        {**ask_text('What?'), 'history': [['Hello?', 'Hi.']]},
        r"`history` must not hold .*, got: 'Hello\?'",
    ),
    'further input': (
        {'query': 'What?', 'input': 'A text.', 'response': 'Red.'},
        "`input` must not hold .*, got: 'A text.'",
    ),
    'answer to the last question': (
        {'messages': [QUESTION, ANSWER, QUESTION], 'images': ['red.png'] * 2, 'response': 'Red.'},
        "`response` must not hold .*, got: 'Red.'",
    ),
    'answer that only a question has': (ask_text('Red or blue?', output='blue'), "`output` must not .*, got: 'blue'"),
    'answer that names a role': (ask_text('What?', response='model'), "`response` must not .*, got: 'model'"),
    'system text elsewhere': (about_red(system_message='Be short.'), '`system_message` .* Write it into the turns'),
    'mask of a sample': (about_red(loss_mask=[0, 1]), 'Give each answer without loss `weight` 0'),
    'no conversation': ({'text': 'x', 'label': 3}, r"got the keys: \['id', 'label', 'text'\]"),
    'prompt as text': ({'prompt': 'Hello?', 'completion': 'Hi.'}, 'must be lists of turns'),
    'history': ({'instruction': 'a', 'output': 'b', 'history': [['a']]}, '`history` must hold pairs'),
    'two answers': (about_red(messages=[QUESTION, ANSWER, ANSWER]), 'must alternate'),
    'tool before an answer': (about_red(messages=[QUESTION, {'role': 'tool', 'content': '4'}]), 'alternate'),
    'number as image': (about_red(image=3), 'must be a file name or a list of file names, got: 3'),
    'lone surrogate': (ask_text('half \ud83d'), r"lone surrogate '\\ud83d'"),
    'lone surrogate in a name': (about_red(image='a\udc00.png'), r"lone surrogate '\\udc00'"),
}


@pytest.mark.parametrize(('record', 'message'), REFUSED.values(), ids=REFUSED.keys())
def test_dropped_content_is_refused(record, message):
    """The message is one short line that can be encoded, even if the sample's id cannot."""
    with pytest.raises(BadSampleError, match=message) as raised:
        parse({'id': 'a\n\ud800', **record})
    line = str(raised.value)
    assert line.startswith('sample "a \\ud800" (data.json, line 3): ')
    assert '\n' not in line
    assert len(line) < 500
    line.encode()


@pytest.mark.parametrize(
    'copy',
    [
        {'prompt': ' <image>Which  colour?\n'},  # UltraChat: the first question
        {'prompt': 'Write a dialogue about colours.'},
        {'output': 'Red.<|im_end|>'},
        {'instruction': 'Which colour?', 'response': 'Red.'},  # Magpie
        {'instruction': [QUESTION], 'input': '', 'query': None},
    ],
)
def test_copies_of_turns_are_ignored(copy):
    assert parse(about_red(**copy)).turns == parse(about_red()).turns


@pytest.mark.parametrize('key', ['system_prompt', 'system_message'])
def test_copy_of_the_system_turn(key):
    """OpenHermes 2.5 has the system text of some conversations twice."""
    record = about_red(system='Be short.')
    assert parse({**record, key: 'Be short.'}).turns == parse(record).turns


def test_prompt_of_a_table_of_alpaca():
    """It has the whole sample with headings, also between the instruction and the input."""
    record = {'instruction': 'Which colour?', 'input': 'Blood.', 'output': 'Red.'}
    prompt = '### Instruction:\nWhich colour?\n\n### Input:\nBlood.\n\n### Output:\nRed.'
    assert parse({**record, 'prompt': prompt}).turns == parse(record).turns


def test_weight_0_of_an_answer(folder):
    weighted_turns = [
        QUESTION,
        {**ANSWER, 'weight': 0},
        user_turn('Sure?'),
        {**assistant_turn('Yes.'), 'weight': 1},
        user_turn('Really?'),
        {**assistant_turn('Red, yes.'), 'loss': True},
    ]
    plain_turns = [
        QUESTION,
        ANSWER,
        user_turn('Sure?'),
        assistant_turn('Yes.'),
        user_turn('Really?'),
        assistant_turn('Red, yes.'),
    ]
    path = write_json(folder, [about_red(messages=weighted_turns), about_red(messages=plain_turns)])
    dataset = LlavaDataset(path, small())
    weighted, plain = dataset[0], dataset[1]
    assert torch.equal(weighted['input_ids'], plain['input_ids'])
    tokenizer = dataset.encoder.tokenizer
    assert learned_text(weighted, tokenizer) == 'Yes.<|end|>Red, yes.<|end|>'
    assert learned_text(plain, tokenizer) == 'Red.<|end|>Yes.<|end|>Red, yes.<|end|>'


@pytest.mark.parametrize('empty', [None, ''])
def test_prompt_of_a_table_with_two_spellings(empty):
    """Turns have both keys of the role, and one of them is empty. Answers of the prompt carry no loss."""
    prompt = [
        {'role': 'user', 'from': empty, 'content': 'Which colour?', 'loss': False},
        {'role': empty, 'from': 'gpt', 'content': 'Red?'},
        {'role': empty, 'from': 'human', 'content': 'And?'},
    ]
    completion = [{'role': empty, 'from': 'gpt', 'content': 'Blue.'}]
    record = parse({'prompt': prompt, 'completion': completion})
    assert lines_of(record) == [
        'user: Which colour?',
        'assistant: Red? (no loss)',
        'user: And?',
        'assistant: Blue.',
    ]


@pytest.mark.parametrize(
    'question',
    [
        {'role': None, 'from': 'human', 'content': 'Which colour?'},
        {'from': 'human', 'value': 'Which colour?'},
        user_turn([TEXT]),
    ],
)
def test_media_before_the_question_of_a_prompt(question):
    record = parse({'prompt': [question], 'completion': [ANSWER], 'images': ['red.png']})
    assert lines_of(record) == LINES_ABOUT_RED


def test_no_tools_as_a_json_text(folder):
    assert image_colours(parse(about_red(tools='[]'), folder)) == ['red']


@pytest.mark.parametrize('image', [[None], {'bytes': None, 'path': None}, [{'bytes': None, 'path': ''}]])
@pytest.mark.parametrize('key', ['image', 'images', 'picture'])
def test_row_without_media_of_a_table(key, image):
    """Tables of pandas and polars have empty objects in the place of null."""
    record = parse(ask_text('Which colour?', **{key: image}))
    assert lines_of(record) == ['user: Which colour?', 'assistant: Red.']


@pytest.mark.parametrize('tag', ['<audio>', '<img>'])
def test_tag_in_a_question_of_text(tag):
    """The message says how to write it. Written so, it is text."""
    with pytest.raises(BadSampleError) as raised:
        parse(ask_text(f'How do I use {tag}?'))
    tag_as_text = tag.replace('>', ' >')
    assert f'`{tag_as_text}`' in str(raised.value)
    record = parse(ask_text(f'How do I use {tag_as_text}?'))
    assert record.texts[0] == f'How do I use {tag_as_text}?'


@pytest.mark.parametrize('sample_id', ['', ' ', None])
def test_record_without_id_is_named_by_its_place(sample_id):
    assert parse(ask_text('Which colour?', id=sample_id)).sample_id == 'line 3'


def test_tags_in_answers_are_text(folder):
    answer = 'HTML has\n<video>\n, <audio> and <img>.'
    pair = {'user': 'What has HTML?', 'assistant': answer}
    records = [about_red(messages=[QUESTION, assistant_turn(answer)]), {'images': ['red.png'], 'texts': [pair]}]
    dataset = LlavaDataset(write_json(folder, records), small())
    for sample in dataset:
        assert learned_text(sample, dataset.encoder.tokenizer) == f'{answer}<|end|>'
        assert sample['num_images'] == [1]


def test_tag_in_answer_that_is_a_token(folder):
    path = write_json(folder, [about_red(messages=[QUESTION, assistant_turn('An <image>.')])])
    with pytest.raises(BadSampleError, match='the tokenizer has this token'):
        LlavaDataset(path, small())
    dataset = LlavaDataset(path, small(), control_tokens='text')
    assert learned_text(dataset[0], dataset.encoder.tokenizer) == 'An <image>.<|end|>'


def test_tag_in_answer_that_is_a_plain_token(folder):
    """The tokenizer cannot write such a token as text, so the record is refused with every option."""
    path = write_json(folder, [about_red(messages=[QUESTION, assistant_turn('A <video>.')])])
    processor = small()
    processor.tokenizer.add_tokens([AddedToken('<video>', special=False, normalized=False)])
    for option in ('warn', 'refuse'):
        with pytest.raises(BadSampleError, match='the tokenizer has this token'):
            LlavaDataset(path, processor, control_tokens=option)
    dataset = LlavaDataset(path, processor, control_tokens='text')
    with pytest.raises(BadSampleError, match='cannot write the control token <video> as text'):
        dataset[0]


RECORDS = [about_red(id=f'r{index}', messages=[QUESTION, assistant_turn('Rød.')]) for index in range(3)]
LINES = '\n'.join(json.dumps(record, ensure_ascii=False) for record in RECORDS)
ENCODED = {
    'BOM': LINES.encode('utf-8-sig'),
    'UTF-16': LINES.encode('utf-16'),
    'UTF-16 without BOM': LINES.encode('utf-16-le'),
    'gzip': gzip.compress(LINES.encode()),
    'array with BOM': json.dumps(RECORDS).encode('utf-8-sig'),
    'Windows line ends': LINES.replace('\n', '\r\n').encode(),
}


@pytest.mark.parametrize('content', ENCODED.values(), ids=ENCODED.keys())
def test_encodings(folder, content):
    path = folder / 'data.jsonl'
    path.write_bytes(content)
    records = [parse_record(raw) for raw in read_raw_records(path)]
    assert [record.sample_id for record in records] == ['r0', 'r1', 'r2']
    for record in records:
        assert record.turns[1].text == 'Rød.'


# Content of the file and words of the message.
BROKEN_FILES = {
    'two arrays': (b'[{}]\n\n[{}]', r'one valid JSON array, got: .*data\.json: Extra data: line 3'),
    'cut UTF-16': ('[{}]\n'.encode('utf-16')[:-1], r"data\.json: 'utf-16-?l?e?' codec can't decode"),
    'entry of one line': (b'[{"id": 1}, {"id": ]', r'Expecting value: line 1 column 20'),
    'nested': (b'[' * 100_000, r'data\.json: maximum recursion depth'),
}


@pytest.mark.parametrize(('content', 'message'), BROKEN_FILES.values(), ids=BROKEN_FILES.keys())
def test_broken_file_is_refused(folder, content, message):
    (folder / 'data.json').write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        list(read_raw_records(folder / 'data.json'))
    assert '\n' not in str(raised.value)


def test_bad_line_costs_one_sample(folder):
    """Three lines are good. The next three are not UTF-8, and the last one is nested too deep."""
    deep = '{"id": ' + '[' * 100_000
    path = folder / 'data.jsonl'
    path.write_bytes(b'\n'.join([LINES.encode(), LINES.encode('latin-1'), deep.encode()]))
    dataset = LlavaDataset(path, small(), on_error='skip', lengths_folder=folder / 'lengths')
    assert [record.sample_id for record in dataset.records] == ['r0', 'r1', 'r2']
    assert len(dataset) == 3
    assert len(dataset.skipped) == 4
    latin = dataset.skipped[1]
    assert 'sample "r1" ' in latin
    assert 'data.jsonl, line 5' in latin
    assert latin.endswith("got: the lone surrogate '\\udcf8'. Save the file as UTF-8, or take it out")
    assert 'line 7): not valid JSON: brackets within brackets, too deep' in dataset.skipped[3]


def test_entries_of_array_are_numbered(folder):
    record = json.dumps(about_red())
    (folder / 'data.json').write_text(f'[{record},\n{record}, 7]')
    assert [raw.where for raw in read_raw_records(folder / 'data.json')] == ['entry 1', 'entry 2', 'entry 3']
    with pytest.raises(BadSampleError, match=r'sample "entry 3" \(.*data\.json, entry 3\): must be a JSON object'):
        LlavaDataset(folder / 'data.json', small())


def describe(folder, entry, records):
    """Writes the records and a `dataset_info.json` with this entry for them, and returns the entry's path."""
    (folder / 'own.json').write_text(json.dumps(records))
    return write_dataset_info(folder, entry)


# Entry of `dataset_info.json`, and a record of its file.
DESCRIBED = {
    'alpaca': (
        {'columns': {'prompt': 'q', 'query': 'more', 'response': 'a', 'images': 'pics'}},
        {'q': '<image>Which colour?', 'more': '', 'a': 'Red.', 'pics': ['red.png'], 'system': 'not named, so not read'},
    ),
    'sharegpt': (
        {
            'formatting': 'sharegpt',
            'ranking': False,
            'columns': {'messages': 'dialogue', 'images': 'pics'},
            'tags': {'role_tag': 'who', 'content_tag': 'what', 'user_tag': 'I', 'assistant_tag': 'bot'},
        },
        {
            'dialogue': [{'who': 'I', 'what': '<image>Which colour?'}, {'who': 'bot', 'what': 'Red.'}],
            'pics': ['red.png'],
        },
    ),
    'openai': (
        {
            'formatting': 'sharegpt',
            'columns': {'messages': 'messages', 'images': 'images'},
            'tags': {'role_tag': 'role', 'content_tag': 'content', 'user_tag': 'user', 'assistant_tag': 'assistant'},
        },
        {'messages': [QUESTION, ANSWER], 'images': ['red.png']},
    ),
    'alpaca whose input is no column': (
        {'columns': {'prompt': 'instruction', 'response': 'output', 'images': 'images'}},
        {'instruction': '<image>Which colour?', 'input': 'In one word.', 'output': 'Red.', 'images': ['red.png']},
    ),
    'notes that are no columns': (
        {'columns': {'prompt': 'q', 'response': 'a', 'images': 'pics', 'chosen': None, 'tools': None}},
        {
            'q': '<image>Which colour?',
            'a': 'Red.',
            'pics': ['red.png'],
            'image_path': 'train/5.jpg',
            'prompt': 'Paint a.png',
            'chosen': 'Blue.',
            'tools': '[{}]',
        },
    ),
}


@pytest.mark.parametrize(('entry', 'record'), DESCRIBED.values(), ids=DESCRIBED.keys())
def test_dataset_info_of_llama_factory(folder, entry, record):
    path = describe(folder, {'file_name': 'own.json', **entry}, [record])
    (parsed,) = LlavaDataset(path, small()).records
    assert lines_of(parsed) == LINES_ABOUT_RED
    assert parsed.source == f'{folder}/own.json, entry 1'


@pytest.mark.parametrize('key', ['from', 'value'])
def test_untagged_key_of_turn_is_ignored(folder, key):
    """It must not replace the key that the tags name."""
    entry, record = DESCRIBED['openai']
    question, answer = record['messages']
    record = {**record, 'messages': [question, {**answer, key: 'gpt'}]}
    path = describe(folder, {'file_name': 'own.json', **entry}, [record])
    (parsed,) = LlavaDataset(path, small()).records
    assert lines_of(parsed) == LINES_ABOUT_RED


PAIR = {'instruction': 'Which colour?', 'output': 'Red.'}
PAIR_COLUMNS = {'columns': {'prompt': 'instruction', 'response': 'output'}}


@pytest.mark.parametrize(
    ('entry', 'key', 'value', 'remedy'),
    [
        ({}, 'images', ['red.png'], '"images": null'),
        ({}, 'weight', 3, 'loss_weights'),
        (PAIR_COLUMNS, 'image', 'red.png', '"images": null'),
        (PAIR_COLUMNS, 'video_path', 'a.mp4', '"videos": null'),
        (PAIR_COLUMNS, 'video', RED_URI, '"videos": null'),
        (PAIR_COLUMNS, 'chosen', 'Blue.', 'preferences'),
    ],
)
def test_media_and_refused_keys_that_are_no_columns(folder, entry, key, value, remedy):
    """The entry says nothing about them, and the sample would be trained without them."""
    path = describe(folder, {'file_name': 'own.json', **entry}, [{**PAIR, key: value}])
    with pytest.raises(BadSampleError, match=rf'`{key}( \(named by no column\))?` .*{remedy}'):
        LlavaDataset(path, small())


def test_unnamed_media_are_among_the_keys(folder):
    """The entry names no columns, and the record has other keys than LLaMA-Factory reads by default."""
    path = describe(folder, {'file_name': 'own.json'}, [{'question': 'Which colour?', 'image': 'red.png'}])
    with pytest.raises(BadSampleError, match=r"must hold one conversation.*got the keys: \['image'\]"):
        LlavaDataset(path, small())


@pytest.mark.parametrize('columns', [PAIR_COLUMNS['columns'], {}])
def test_notes_in_a_text_file_of_llama_factory(folder, columns):
    """Keys without a column are accepted, unless their name and their value say that they hold media.

    Keys that would be refused are accepted if the entry names them with null. Such an entry keeps its default columns.
    """
    columns = {**columns, 'weight': None}
    notes = {
        'prompt': 'Paint a.png',
        'source': 'b.mp4',
        'media': 'twitter',
        'image': None,
        'image_id': 5,
        'system': 'x',
        'weight': 3,
    }
    path = describe(folder, {'file_name': 'own.json', 'columns': columns}, [{**PAIR, **notes}])
    (record,) = LlavaDataset(path, small()).records
    assert lines_of(record) == ['user: Which colour?', 'assistant: Red.']


def test_dataset_info_of_videos_and_audio(folder):
    columns = {'messages': 'dialogue', 'videos': 'films', 'audios': 'sounds'}
    entry = {'file_name': 'own.json', 'formatting': 'sharegpt', 'columns': columns}
    record = {'dialogue': turns('<video><audio>?', 'Red.'), 'films': ['a.mp4'], 'sounds': ['a.wav']}
    path = describe(folder, entry, [record])
    (raw,) = read_raw_records(path)
    assert lines_of(parse_record(raw)) == ['user: <video><audio>?', 'assistant: Red.', 'video a.mp4', 'audio a.wav']


def test_dataset_info_of_the_hub():
    entry = DatasetEntry({'hf_hub_url': 'owner/name', 'subset': 'small', 'split': ['test']}, Path('data'))
    assert entry.path == 'hf://datasets/owner/name/small'
    assert entry.split == "['test']"  # no table has such a split, so it is refused by name


@pytest.mark.parametrize(
    ('entry', 'message'),
    [
        ({'file_name': 'own.json', 'ranking': True}, '`ranking` is not supported'),
        ({'file_name': 'own.json', 'columns': {'videos': 'v', 'masks': 'm'}}, '`masks` is not supported'),
        ({'formatting': 'chatml', 'file_name': 'own.json'}, "`formatting` must be one of .* got: 'chatml'"),
        ({'file_name': 'own.json', 'columns': ['images']}, r"`columns` must map names to names, got: \['images'\]"),
        ({'file_name': 'own.json', 'tags': {'role_tag': ['role']}}, '`tags` must map names to names'),
        ({'file_name': None}, '`file_name` or `hf_hub_url` must be given'),
    ],
)
def test_unsupported_dataset_info_is_refused(folder, entry, message):
    path = describe(folder, entry, [{}])
    with pytest.raises(ValueError, match=rf'dataset_info\.json#{DATASET_NAME}: {message}'):
        LlavaDataset(path, small())


def test_missing_dataset_and_broken_list(folder):
    path = describe(folder, {}, [])
    with pytest.raises(ValueError, match=rf"got: 'yours'\. It has .*'{DATASET_NAME}'"):
        LlavaDataset(path.replace(f'#{DATASET_NAME}', '#yours'), small())
    with pytest.raises(BadSampleError, match=r'not valid JSON.*A file holds one array, or an object in each line'):
        LlavaDataset(path.removesuffix(f'#{DATASET_NAME}'), small())
    (folder / 'dataset_info.json').write_text('{"a": {')
    with pytest.raises(ValueError, match=r'valid JSON file before the #, got: .*dataset_info\.json: Expecting'):
        LlavaDataset(path, small())


@pytest.mark.parametrize('mode', ['I;16', 'I'])
def test_16_bits_are_scaled_not_clipped(tmp_path, mode):
    deep = Image.new(mode, (2, 1))
    deep.putpixel((0, 0), 257 * 100)
    deep.putpixel((1, 0), 65535)
    deep.save(tmp_path / 'deep.png')
    record = parse(ask(part('image', image='deep.png')), tmp_path)
    (image,) = decode_media(record, open_files(record))['image']
    assert image.getpixel((0, 0)) == (100, 100, 100)
    assert image.getpixel((1, 0)) == (255, 255, 255)


def test_embedded_images_change_the_fingerprint(folder):
    fingerprints = []
    for content in (RED, BLUE, RED):
        uri = f'data:image/png;base64,{base64.b64encode(content).decode()}'
        path = write_json(folder, [about_red(id='a', image=uri)])
        dataset = LlavaDataset(path, small())
        assert image_colours(dataset.records[0]) == ['red' if content == RED else 'blue']
        fingerprints.append(dataset.fingerprint())
    red, blue, red_again = fingerprints
    assert red == red_again != blue


def test_value_that_is_nested_too_deep():
    """In Python 3.13 `json` decodes more brackets within brackets than a function of Python can walk through."""
    nested = []
    for _ in range(sys.getrecursionlimit()):
        nested = [nested]
    with pytest.raises(BadSampleError, match=r'"deep".*brackets within brackets, too deep'):
        parse_record(RawRecord('data.json', 'line 1', {'id': 'deep', 'messages': [QUESTION, ANSWER], 'note': nested}))
    with pytest.raises(BadSampleError, match=r'"line 1".*brackets within brackets, too deep'):
        parse_record(RawRecord('data.json', 'line 1', {'id': nested}))
