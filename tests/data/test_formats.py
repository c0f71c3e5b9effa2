# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Files as other projects document them: each is used as meant, or refused by name; nothing is dropped."""

from __future__ import annotations

import base64
import gzip
import json

import pytest
from PIL import Image

from composer_tokacc.data import BadSampleError, LlavaDataset
from composer_tokacc.data.files import read_raw_records
from composer_tokacc.data.formats import parse_record
from composer_tokacc.data.media import decode_media, open_files
from tests.data.chat_processors import small
from tests.support.conversations import parse, png, write_json

RED, BLUE = png(), png((0, 0, 255))
RED_TEXT = base64.b64encode(RED).decode()
RED_URI = f'data:image/png;base64,{RED_TEXT}'
QUESTION, ANSWER = {'role': 'user', 'content': '<image>Which colour?'}, {'role': 'assistant', 'content': 'Red.'}


@pytest.fixture
def folder(tmp_path):
    for name, content in (('red.png', RED), ('blue.png', BLUE)):
        (tmp_path / name).write_bytes(content)
    return tmp_path


def said(record):
    return [(turn.role, turn.text) for turn in record.turns]


def seen(record):
    names = {(255, 0, 0): 'red', (0, 0, 255): 'blue'}
    images = decode_media(record, open_files(record)).get('image', [])
    return [names[image.getpixel((0, 0))] for image in images]


def user(content):
    return {'role': 'user', 'content': content}


def answered(text):
    return {'role': 'assistant', 'content': text}


def asked_with(*parts):
    return {'messages': [user(list(parts)), ANSWER]}


def text_of(text):
    return {'messages': [user(text), ANSWER]}


def from_value(*pairs):
    return [{'from': speaker, 'value': text} for speaker, text in pairs]


TEXT = {'type': 'text', 'text': 'Which colour?'}
PLAIN = [('user', '<image>Which colour?'), ('assistant', 'Red.')]

RED_IMAGE = {'image': 'red.png'}
SHOWN = {'type': 'image', 'image': 'red.png'}

# Name -> record, what is said, images. The names of keys are those of each project's own documentation.
FORMATS = {
    'VILA': (
        {'id': '1', **RED_IMAGE, 'conversations': from_value(('human', '<image>Which colour?'), ('gpt', 'Red.'))},
        PLAIN,
        ['red'],
    ),
    'LLaMA-Factory alpaca': (
        {
            'instruction': 'Which colour?',
            'input': '<image>',
            'output': 'Red.',
            'system': 'Be brief.',
            'history': [['Hello?', 'Hi.'], ['Ready?', 'Yes.']],
            'images': ['red.png'],
        },
        [
            ('system', 'Be brief.'),
            ('user', 'Hello?'),
            ('assistant', 'Hi.'),
            ('user', 'Ready?'),
            ('assistant', 'Yes.'),
            ('user', 'Which colour?\n<image>'),
            ('assistant', 'Red.'),
        ],
        ['red'],
    ),
    'alpaca without input': (
        {'instruction': 'Which colour has blood?', 'input': '', 'output': 'Red.'},
        [('user', 'Which colour has blood?'), ('assistant', 'Red.')],
        [],
    ),
    'LLaMA-Factory ShareGPT with an observation': (
        {
            'conversations': from_value(
                ('human', 'Weather?'), ('gpt', 'Let me look.'), ('observation', 'sunny'), ('gpt', 'Sunny.')
            ),
            'system': '',
        },
        [('user', 'Weather?'), ('assistant', 'Let me look.'), ('tool', 'sunny'), ('assistant', 'Sunny.')],
        [],
    ),
    'OpenAI image_url': (
        {
            'messages': [
                {'role': 'developer', 'content': 'Be brief.'},
                user([TEXT, {'type': 'image_url', 'image_url': {'url': RED_URI, 'detail': 'low'}}]),
                ANSWER,
            ]
        },
        [('system', 'Be brief.'), ('user', 'Which colour?<image>'), ('assistant', 'Red.')],
        ['red'],
    ),
    'OpenAI input_image': (
        asked_with({'type': 'input_image', 'image_url': RED_URI}, {'type': 'input_text', 'text': 'Which colour?'}),
        PLAIN,
        ['red'],
    ),
    'Qwen2-VL': (asked_with(SHOWN, TEXT), PLAIN, ['red']),
    'Qwen2-VL base64': (asked_with({'type': 'image', 'image': f'data:image;base64,{RED_TEXT}'}, TEXT), PLAIN, ['red']),
    'transformers': (asked_with({'type': 'image', 'base64': RED_TEXT}, TEXT), PLAIN, ['red']),
    'TRL messages': ({'images': ['red.png'], **asked_with({'type': 'image'}, TEXT)}, PLAIN, ['red']),
    'TRL messages of a table': (
        {
            'images': [{'bytes': RED, 'path': None}],
            **asked_with({'type': 'image', 'text': None, 'index': 0}, {**TEXT, 'index': None}),
        },
        PLAIN,
        ['red'],
    ),
    'TRL prompt and completion': (
        {
            'images': ['red.png', 'blue.png'],
            'prompt': [user('Which colour?'), answered('Red?'), user('And?')],
            'completion': [answered('Blue.')],
        },
        [('user', '<image><image>Which colour?'), ('assistant', 'Red?'), ('user', 'And?'), ('assistant', 'Blue.')],
        ['red', 'blue'],
    ),
    'ms-swift': ({'messages': [QUESTION, ANSWER], 'images': [{'bytes': None, 'path': 'red.png'}]}, PLAIN, ['red']),
    'ms-swift bytes': (
        {'messages': [QUESTION, ANSWER], 'images': [{'bytes': RED_TEXT, 'path': 'x.png'}]},
        PLAIN,
        ['red'],
    ),
    'ms-swift query': (
        {'query': '<image>Which colour?', 'response': 'Red.', 'images': ['red.png'], 'history': []},
        PLAIN,
        ['red'],
    ),
    'Monkey beside a list': (
        {
            'image': 'blue.png',
            'conversations': from_value(
                ('user', '<img>red.png</img><image>Which colours?'), ('assistant', 'Red, blue.')
            ),
        },
        [('user', '<image><image>Which colours?'), ('assistant', 'Red, blue.')],
        ['red', 'blue'],
    ),
    'The Cauldron': (
        {
            'images': [{'bytes': RED, 'path': None}],
            'texts': [
                {'user': 'Which colour?', 'assistant': 'Red.', 'source': 'VQAv2'},
                {'user': 'Sure?', 'assistant': 'Yes.', 'source': 'VQAv2'},
            ],
        },
        [*PLAIN, ('user', 'Sure?'), ('assistant', 'Yes.')],
        ['red'],
    ),
    'FineVision': (
        {
            'images': [{'bytes': RED, 'path': None}],
            'source': 'vqav2',
            'relevance_ratings': [5],
            'texts': [{'user': 'Which colour?', 'assistant': 'Red.'}],
        },
        PLAIN,
        ['red'],
    ),
    'VideoChat2 image': (
        {'image': 'red.png', 'QA': [{'i': '', 'q': 'Which colour?', 'a': 'Red.'}]},
        PLAIN,
        ['red'],
    ),
    'image of a tool': (
        {
            'images': ['red.png', 'blue.png'],
            'messages': [
                QUESTION,
                ANSWER,
                {'role': 'tool', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'found'}]},
                answered('Blue.'),
            ],
        },
        [*PLAIN, ('tool', '<image>found'), ('assistant', 'Blue.')],
        ['red', 'blue'],
    ),
    'data URI in capitals, image and images the same': (
        {
            'image': RED_URI.replace('data:', 'DATA:').replace('base64', 'BASE64'),
            'images': [RED_URI.replace('data:', 'DATA:').replace('base64', 'BASE64')],
            'messages': [QUESTION, ANSWER],
        },
        PLAIN,
        ['red'],
    ),
}

WAV_URI = f'data:audio;base64,{base64.b64encode(b"RIFF").decode()}'

# Record, text of the question, modalities and names of the files.
VIDEO, AUDIO, FRAMES = ('video', ['a.mp4']), ('audio', ['a.wav']), ('video', ['f1.png', 'f2.png'])
EMBEDDED = ('audio', ['data:audio'])
MEDIA = {
    'LLaMA-Factory ShareGPT': (
        {
            **text_of('<image><video>What<audio>?<video>'),
            'images': ['a.png'],
            'videos': ['a.mp4', ['f1.png', 'f2.png']],
            'audios': ['a.wav'],
        },
        '<image><video>What<audio>?<video>',
        [('image', ['a.png']), VIDEO, AUDIO, FRAMES],
    ),
    'Video-LLaVA': ({'video': 'a.mp4', **text_of('<video>\nWhat?')}, '<video>\nWhat?', [VIDEO]),
    'VideoChat2': (
        {
            'video': 'a.mp4',
            'QA': [
                {'i': 'Look at the video.', 'q': 'What happens?', 'a': 'Red.'},
                {'i': 'Look at the video.', 'q': 'And then?', 'a': 'Blue.'},
            ],
        },
        '<video>What happens?',
        [VIDEO],
    ),
    'VideoChat2 caption': ({'video': 'a.mp4', 'QA': [{'i': 'Describe it.', 'q': '', 'a': 'Red.'}]}, '<video>', [VIDEO]),
    'LLaVA-Video': ({'video': 'a.mp4', **text_of('<image>\nWhat?')}, '<video>\nWhat?', [VIDEO]),
    'VILA': (
        {'video': 'a.mp4', 'sound': 'a.wav', **text_of('<vila/video><sound>What?')},
        '<video><audio>What?',
        [VIDEO, AUDIO],
    ),
    'Qwen2-VL': (
        asked_with({'type': 'video', 'video': 'file:///tmp/a.mp4'}, {'type': 'video', 'video': ['f1.png', 'f2.png']}),
        '<video><video>',
        [('video', ['/tmp/a.mp4']), FRAMES],
    ),
    'Qwen2-Audio': (asked_with({'type': 'audio', 'audio_url': 'a.wav'}, TEXT), '<audio>Which colour?', [AUDIO]),
    'transformers': (
        asked_with({'type': 'video', 'path': 'a.mp4'}, {'type': 'audio', 'path': 'a.wav'}, TEXT),
        '<video><audio>Which colour?',
        [VIDEO, AUDIO],
    ),
    'OpenAI input_audio': (
        asked_with({'type': 'input_audio', 'input_audio': {'data': WAV_URI.partition(',')[2], 'format': 'wav'}}, TEXT),
        '<audio>Which colour?',
        [EMBEDDED],
    ),
    'vLLM': (
        asked_with({'type': 'audio_url', 'audio_url': {'url': WAV_URI}}, {'type': 'video_url', 'video_url': 'a.mp4'}),
        '<audio><video>',
        [EMBEDDED, VIDEO],
    ),
    'TRL': ({'videos': ['a.mp4'], 'prompt': [user('What?')], 'completion': [ANSWER]}, '<video>What?', [VIDEO]),
    'ms-swift': (
        {'query': '<video><audio>What?', 'response': 'Red.', 'videos': [{'path': 'a.mp4'}], 'audios': ['a.wav']},
        '<video><audio>What?',
        [VIDEO, AUDIO],
    ),
}


@pytest.mark.parametrize(('data', 'question', 'media'), MEDIA.values(), ids=MEDIA.keys())
def test_videos_and_audio_of_each_project(data, question, media):
    record = parse(data)
    turns = [turn for turn in record.turns if turn.role != 'system']
    assert turns[0].text == question
    assert [(medium.modality, medium.names) for medium in record.media] == media
    first_question = next(message for message in record.messages() if message['role'] == 'user')
    parts = [part['type'] for part in first_question['content'] if part['type'] != 'text']
    assert parts == [modality for modality, _ in media]
    assert '<' not in ''.join(record.texts)


@pytest.mark.parametrize(('data', 'turns', 'images'), FORMATS.values(), ids=FORMATS.keys())
def test_record_is_what_its_project_means(folder, data, turns, images):
    record = parse(data, folder)
    assert said(record) == turns
    assert seen(record) == images


def test_instruction_of_videochat2_is_system_turn():
    spoken = said(parse(MEDIA['VideoChat2'][0]))
    assert spoken[0] == ('system', 'Look at the video.')
    assert spoken[2:] == [('assistant', 'Red.'), ('user', 'And then?'), ('assistant', 'Blue.')]


def test_line_breaks_around_placeholders():
    question = '\nLines:\n\n<image>\n<image>\nOne.\n\nTwo.\n'
    turns = [{'role': 'system', 'content': 'Rules:\n'}, {'role': 'user', 'content': question}, ANSWER]
    system, user, _ = parse({'messages': turns, 'images': ['a.png', 'b.png']}).messages()
    assert system['content'] == [{'type': 'text', 'text': 'Rules:\n'}]
    texts = [part.get('text') for part in user['content']]
    assert texts == ['\nLines:', None, None, 'One.\n\nTwo.\n']


def test_file_url(folder):
    (folder / 'a b.png').write_bytes(BLUE)
    part = {'type': 'image_url', 'image_url': {'url': f'{folder.as_uri()}/a%20b.png'}}
    assert seen(parse(asked_with(part, TEXT), folder / 'elsewhere')) == ['blue']


def turn(**entries):
    return {'messages': [QUESTION, {**ANSWER, **entries}], 'image': 'red.png'}


REFUSED = {
    'image on a network': (asked_with({'type': 'image_url', 'image_url': {'url': 'https://x/a.png'}}), 'Download it'),
    'listed image on a network': ({**turn(), 'image': 's3://bucket/a.png'}, 'Download it'),
    'image by id': (asked_with({'type': 'input_image', 'file_id': 'file-1'}), '`file_id` of a part'),
    'unknown part': (asked_with({'type': 'point', 'xy': [1, 2]}), "got: 'point'"),
    'part without type': (asked_with({'image': 'red.png', 'text': 'x'}), 'got: None'),
    'sizes of an image': (asked_with({**SHOWN, 'max_pixels': 9}), '`max_pixels` of a part'),
    'images in another order': (
        {'images': ['red.png', 'blue.png'], **asked_with({'type': 'image', 'index': 1}, {'type': 'image', 'index': 0})},
        '`index` of image parts',
    ),
    'no part': (asked_with(None), 'must be an object, got: None'),
    'text null': (asked_with({'type': 'text', 'text': None}), 'must be a string, got: None'),
    'content null': (turn(content=None), 'must be a string, got: NoneType'),
    'list as role': (turn(role=['assistant']), r"got: \['assistant'\]"),
    'two roles': (turn(**{'from': 'gpt'}), 'only one of `role`, `from`'),
    'broken base64': ({**turn(), 'image': 'data:image/png;base64,???'}, 'must be base64'),
    'data URI of text': ({**turn(), 'image': 'data:image/svg+xml,<svg/>'}, 'must be base64'),
    'bare base64': ({**turn(), 'image': 'iVBORw0KGgo' * 100}, 'Write bytes as `data:image/<type>;base64'),
    'part of a video': (
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
    'long key of a turn': (turn(**{'x' * 200_000: 1}), '`x+` of a turn'),
    'long key': ({**turn(), 'y' * 200_000: 'a.png'}, '`y+` looks like an image'),
    'images beside image': ({**turn(), 'images': ['blue.png']}, 'must name the same'),
    'more images than parts': ({**asked_with(SHOWN), 'image': 'red.png'}, 'got: 2 images'),
    'tool_calls': (turn(tool_calls=[{'type': 'function'}]), '`tool_calls` of a turn is not supported'),
    'function_call role': ({'conversations': [{'from': 'function_call', 'value': '{}'}]}, "got: 'function_call'"),
    'tools': ({**turn(), 'tools': '[{}]'}, '`tools` is not supported'),
    'preferences': ({**turn(), 'chosen': {'from': 'gpt', 'value': 'x'}}, '`chosen` is not supported'),
    'thinking': (turn(reasoning_content='Hm.'), '`reasoning_content` of a turn is not supported'),
    'weight 0.5': (turn(weight=0.5), 'must be 0 or 1'),
    'loss against weight': (turn(weight=1, loss=False), 'must be 0 or 1'),
    'loss on a question': ({'messages': [{**QUESTION, 'weight': 1}, ANSWER], **RED_IMAGE}, 'only for an answer'),
    'no answer with loss': (turn(weight=0), 'at least one answer must carry loss'),
    'VILA video in a text': (text_of('<vila/video>What happens?'), 'got: 0 videos and 1 placeholders'),
    'video in an answer': ({'messages': [QUESTION, answered('<video>')]}, '`<video>` may stand only in turns'),
    'video without its placeholder': ({**text_of('What happens?'), 'videos': ['a.mp4']}, 'got: 1 videos and 0 pl'),
    'as many media of another kind': (
        {**text_of('<video><audio>?'), 'videos': ['a.mp4', 'b.mp4']},
        'got: 2 videos and 1 placeholders',
    ),
    'image for a video beside an image': (
        {**text_of('<image><image>?'), **RED_IMAGE, 'video': 'a.mp4'},
        'the number of images must match .* got: 1 images and 2 placeholders',
    ),
    'rate of a video': (asked_with({'type': 'video', 'video': 'a.mp4', 'fps': 1.0}), '`fps` of a part of type video'),
    'video without frames': ({**text_of('<video>?'), 'videos': [[]]}, r'`video` must be a file name .* got: \[\]'),
    'decoded sound': (
        asked_with({'type': 'audio', 'audio': {'array': [0.1], 'sampling_rate': 8000}}),
        r'`array` of a file object \(audio\) is not supported',
    ),
    'img without end': (text_of('<img>red.png What is this?'), '`<img>` in a text'),
    'two conversations': ({**turn(), 'conversations': [{'from': 'human', 'value': 'x'}]}, 'must hold one conversation'),
    'no conversation': ({'text': 'x', 'label': 3}, r"got the keys: \['id', 'label', 'text'\]"),
    'prompt as text': ({'prompt': 'Hello?', 'completion': 'Hi.'}, 'must be lists of turns'),
    'history': ({'instruction': 'a', 'output': 'b', 'history': [['a']]}, '`history` must hold pairs'),
    'two answers': ({'messages': [QUESTION, ANSWER, ANSWER], **RED_IMAGE}, 'must alternate'),
    'tool before an answer': ({'messages': [QUESTION, {'role': 'tool', 'content': '4'}], **RED_IMAGE}, 'alternate'),
    'number as image': ({**turn(), 'image': 3}, 'must be a file name or a list of file names, got: 3'),
    'lone surrogate': (text_of('half \ud83d'), r"lone surrogate '\\ud83d'"),
    'lone surrogate in a name': ({**turn(), 'image': 'a\udc00.png'}, r"lone surrogate '\\udc00'"),
}


@pytest.mark.parametrize(('data', 'message'), REFUSED.values(), ids=REFUSED.keys())
def test_dropped_content_is_refused(data, message):
    with pytest.raises(BadSampleError, match=message) as raised:
        parse({'id': 'a\n\ud800', **data})
    assert str(raised.value).startswith('sample "a \\ud800" (data.json, line 3): ')
    assert '\n' not in str(raised.value)
    assert len(str(raised.value)) < 500
    str(raised.value).encode()


def test_weight_0_of_an_answer(folder):
    messages = [
        *(QUESTION, {**ANSWER, 'weight': 0}),
        *(user('Sure?'), {**answered('Yes.'), 'weight': 1}),
        *(user('Really?'), {**answered('Red, yes.'), 'loss': True}),
    ]
    without = [{key: value for key, value in message.items() if key not in ('weight', 'loss')} for message in messages]
    path = write_json(folder, [{'image': 'red.png', 'messages': turns} for turns in (messages, without)])
    dataset = LlavaDataset(path, small())
    weighted, plain = dataset[0], dataset[1]
    assert weighted['input_ids'].tolist() == plain['input_ids'].tolist()
    decode = dataset.encoder.tokenizer.decode
    spoken = [decode(sample['labels'][sample['labels'] != -100]) for sample in (weighted, plain)]
    assert spoken == ['Yes.<|end|>Red, yes.<|end|>', 'Red.<|end|>Yes.<|end|>Red, yes.<|end|>']


def test_trl_learns_the_completion_only():
    record = parse(FORMATS['TRL prompt and completion'][0])
    assert [turn.carries_loss for turn in record.turns if turn.role == 'assistant'] == [False, True]


RECORDS = [{'id': f'r{i}', 'image': 'red.png', 'messages': [QUESTION, {**ANSWER, 'content': 'Rød.'}]} for i in range(3)]
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
    (folder / 'data.jsonl').write_bytes(content)
    records = [parse_record(raw) for raw in read_raw_records(folder / 'data.jsonl')]
    assert [record.sample_id for record in records] == ['r0', 'r1', 'r2']
    assert {record.turns[1].text for record in records} == {'Rød.'}


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
    deep = '{"id": ' + '[' * 100_000
    (folder / 'data.jsonl').write_bytes(b'\n'.join([LINES.encode(), LINES.encode('latin-1'), deep.encode()]))
    dataset = LlavaDataset(folder / 'data.jsonl', small(), on_error='skip', lengths_folder=folder / 'lengths')
    assert [dataset[i]['sample_ids'] for i in range(len(dataset))] == [['r0'], ['r1'], ['r2']]
    assert len(dataset.skipped) == 4
    assert 'sample "r1" ' in dataset.skipped[1]
    assert dataset.skipped[1].endswith("got: the lone surrogate '\\udcf8'. Save the file as UTF-8, or take it out")
    assert 'data.jsonl, line 5' in dataset.skipped[1]
    assert 'line 7): not valid JSON: brackets within brackets, too deep' in dataset.skipped[3]


def test_entries_of_array_are_numbered(folder):
    record = {key: value for key, value in RECORDS[0].items() if key != 'id'}
    (folder / 'data.json').write_text(f'[{json.dumps(record)},\n{json.dumps(record)}, 7]')
    assert [raw.where for raw in read_raw_records(folder / 'data.json')] == ['entry 1', 'entry 2', 'entry 3']
    with pytest.raises(BadSampleError, match=r'sample "entry 3" \(.*data\.json, entry 3\): must be a JSON object'):
        LlavaDataset(folder / 'data.json', small())


def describe(folder, entry, records, name='own.json'):
    (folder / name).write_text(json.dumps(records))
    (folder / 'dataset_info.json').write_text(json.dumps({'other': {}, 'mine': entry}, indent=2))
    return f'{folder}/dataset_info.json#mine'


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
}


@pytest.mark.parametrize(('entry', 'record'), DESCRIBED.values(), ids=DESCRIBED.keys())
def test_dataset_info_of_llama_factory(folder, entry, record):
    dataset = LlavaDataset(describe(folder, {'file_name': 'own.json', **entry}, [record]), small())
    assert said(dataset.records[0]) == PLAIN
    assert seen(dataset.records[0]) == ['red']
    assert dataset.records[0].source == f'{folder}/own.json, entry 1'


def test_dataset_info_of_videos_and_audio(folder):
    columns = {'messages': 'dialogue', 'videos': 'films', 'audios': 'sounds'}
    entry = {'file_name': 'own.json', 'formatting': 'sharegpt', 'columns': columns}
    turns = [{'from': 'human', 'value': '<video><audio>?'}, {'from': 'gpt', 'value': 'Red.'}]
    path = describe(folder, entry, [{'dialogue': turns, 'films': ['a.mp4'], 'sounds': ['a.wav']}])
    (record,) = map(parse_record, read_raw_records(path))
    assert [(medium.modality, medium.names) for medium in record.media] == [('video', ['a.mp4']), ('audio', ['a.wav'])]


@pytest.mark.parametrize(
    ('entry', 'message'),
    [
        ({'file_name': 'own.json', 'ranking': True}, '`ranking` is not supported'),
        ({'file_name': 'own.json', 'num_samples': 5}, '`num_samples` is not supported'),
        ({'file_name': 'own.json', 'columns': {'videos': 'v', 'masks': 'm'}}, '`masks` is not supported'),
        ({'formatting': 'chatml', 'file_name': 'own.json'}, "`formatting` must be one of .* got: 'chatml'"),
        ({'ms_hub_url': 'x/y'}, '`ms_hub_url` is not supported'),
        ({'file_name': 'own.json', 'columns': ['images']}, r"`columns` must map names to names, got: \['images'\]"),
        ({'file_name': 'own.json', 'tags': {'role_tag': ['role']}}, '`tags` must map names to names'),
        ({'file_name': 3}, '`file_name` must be a string, got: 3'),
        ({'file_name': None}, '`file_name` or `hf_hub_url` must be given'),
        ({}, '`file_name` or `hf_hub_url` must be given'),
    ],
)
def test_unsupported_dataset_info_is_refused(folder, entry, message):
    with pytest.raises(ValueError, match=rf'dataset_info\.json#mine: {message}'):
        LlavaDataset(describe(folder, entry, [{}]), small())


def test_missing_dataset_is_told_the_others(folder):
    path = describe(folder, {}, [])
    with pytest.raises(ValueError, match=r"got: 'yours', of: .*'mine'"):
        LlavaDataset(path.replace('#mine', '#yours'), small())
    with pytest.raises(BadSampleError, match=r'not valid JSON.*A file holds one array, or an object in each line'):
        LlavaDataset(path.replace('#mine', ''), small())


def decoded(path):
    record = parse(asked_with({'type': 'image', 'image': path.name}), path.parent)
    return decode_media(record, open_files(record))['image'][0]


def test_16_bits_are_scaled_not_clipped(tmp_path):
    for mode in ('I;16', 'I'):
        image = Image.new(mode, (2, 1))
        image.putpixel((0, 0), 257 * 100)
        image.putpixel((1, 0), 65535)
        image.save(tmp_path / 'deep.png')
        found = decoded(tmp_path / 'deep.png')
        assert [found.getpixel((x, 0)) for x in (0, 1)] == [(100,) * 3, (255,) * 3]


def test_embedded_images_change_the_fingerprint(folder):
    prints = set()
    for content in (RED, BLUE, RED):
        uri = f'data:image/png;base64,{base64.b64encode(content).decode()}'
        dataset = LlavaDataset(write_json(folder, [{'id': 'a', 'image': uri, 'messages': [QUESTION, ANSWER]}]), small())
        assert seen(dataset.records[0]) == ['red' if content == RED else 'blue']
        prints.add(dataset.fingerprint())
    assert len(prints) == 2
