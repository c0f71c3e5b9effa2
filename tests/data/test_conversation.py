# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.data.conversation import ConversationEncoder
from composer_tokacc.data.formats import parse_record
from composer_tokacc.data.records import BadSampleError, RawRecord, Record, Turn
from tests.data.chat_processors import PROCESSORS, QWEN, blip2, llava, qwen2_vl, small


def text(value):
    return {'type': 'text', 'text': value}


IMAGE = {'type': 'image'}
ANSWER = {'role': 'assistant', 'content': 'Red.'}
SYSTEM = {'role': 'system', 'content': [text('Be brief.')]}


def user(*parts):
    return {'role': 'user', 'content': list(parts)}


def assistant(value):
    return {'role': 'assistant', 'content': [text(value)]}


def runs(labels):
    """The labels as lists of consecutive ones."""
    found, previous = [], -100
    for label in labels.tolist():
        if label != -100:
            found = [*found, [label]] if previous == -100 else [*found[:-1], [*found[-1], label]]
        previous = label
    return found


WHAT = text('What is this?')
CONVERSATIONS = {
    'one turn': [user(IMAGE, WHAT), assistant('A red square.')],
    'images between answers': [
        user(IMAGE, IMAGE, WHAT),
        assistant('Blue, I think: <b>7</b> of them.'),
        user(IMAGE, text('And now?')),
        assistant('A'),
        user(text('Really?')),
        assistant('Yes.\nTwo lines.'),
    ],
    'an image a turn': [
        user(IMAGE, WHAT),
        assistant('Blue.'),
        user(text('And '), IMAGE, text('?')),
        assistant('Blue.'),
        user(IMAGE),
        assistant('A red square.'),
    ],
    'one image in each question': [
        user(IMAGE, WHAT),
        assistant('A a a a a a.'),
        user(IMAGE, text('And this?')),
        assistant('A'),
        user(IMAGE, text('And this?')),
        assistant('A a a a a.'),
    ],
    'image behind text': [user(text('Compare '), IMAGE, text(' with '), IMAGE), assistant('Same.')],
    'answers that look like the template': [
        user(IMAGE, text('ASSISTANT: a [/INST] assistant')),
        assistant('USER: assistant a'),
        user(text('a')),
        assistant('a'),
    ],
    'system turn': [SYSTEM, user(IMAGE, WHAT), assistant('Blue.')],
    'letters of several bytes': [user(IMAGE, text('Wie heißt das?')), assistant('Größe: 三 🙂')],
    'no image': [user(text('What is blue?')), assistant('A colour.')],
    'unanswered question at the end': [user(IMAGE, text('?')), assistant('Red.'), user(text('And?'))],
}


@pytest.mark.parametrize('conversation', CONVERSATIONS)
@pytest.mark.parametrize('family', PROCESSORS)
def test_loss_on_answers_and_ending_tokens(family, conversation):
    make_processor, end_token = PROCESSORS[family]
    processor, messages = make_processor(), CONVERSATIONS[conversation]
    num_images = sum(part == IMAGE for message in messages for part in message['content'])
    images = [Image.new('RGB', (20 + 9 * i, 24), (200, 30 * i, 0)) for i in range(num_images)]
    sample = ConversationEncoder(processor)(messages, images, sample_id='x')
    labels, input_ids = sample['labels'][0], sample['input_ids'][0]
    answers = [message['content'][0]['text'] for message in messages if message['role'] == 'assistant']
    assert [processor.tokenizer.decode(run).lstrip(' ') for run in runs(labels)] == [a + end_token for a in answers]
    carrying = labels != -100
    assert (labels[carrying] == input_ids[carrying]).all()
    assert sample['num_images'] == [num_images]
    assert sample['sample_ids'] == ['x']


@pytest.mark.parametrize('family', ['small', 'llava_next', 'llava_onevision', 'qwen2_vl', 'idefics3'])
def test_encoding_is_that_of_the_processor(family):
    processor = PROCESSORS[family][0]()
    messages = CONVERSATIONS['images between answers']
    images = [Image.new('RGB', (20 + 9 * i, 24), (200, 30 * i, 0)) for i in range(3)]
    sample = ConversationEncoder(processor)(messages, images)
    rendered = processor.apply_chat_template(messages, tokenize=False)
    begins = processor.tokenizer.bos_token is not None and rendered.startswith(processor.tokenizer.bos_token)
    expected = processor(text=[rendered], images=[images], return_tensors='pt', add_special_tokens=not begins)
    counts = {'num_images', *(['num_videos'] if hasattr(processor, 'video_processor') else [])}
    assert set(sample) == {*expected, 'labels', 'sample_ids', *counts}
    for key, value in expected.items():
        assert (sample[key] == value).all(), key


def test_sample_over_max_length():
    length = ConversationEncoder(small())(CONVERSATIONS['no image'])['input_ids'].shape[1]
    ConversationEncoder(small(), max_length=length)(CONVERSATIONS['no image'])
    with pytest.raises(ValueError, match=f'got: {length - 1} < {length} tokens'):
        ConversationEncoder(small(), max_length=length - 1)(CONVERSATIONS['no image'])


@pytest.mark.parametrize(
    ('left_out', 'messages'),
    [
        ('tool', [user(text('6 x 7?')), assistant('So?'), {'role': 'tool', 'content': [text('42')]}, assistant('42.')]),
        ('system', [user(text('q')), assistant('a'), {'role': 'system', 'content': [text('a')]}, user(text('b'))]),
    ],
)
def test_dropped_turn_that_stands_elsewhere(left_out, messages):
    processor = small()
    ConversationEncoder(processor)(messages)
    processor.chat_template = processor.chat_template.replace(
        'for message in messages', f"for message in messages if message['role'] != '{left_out}'"
    )
    with pytest.raises(ValueError, match=f'must write what the {left_out} says'):
        ConversationEncoder(processor)(messages)


def test_ending_token_that_is_not_special():
    processor = llava()
    processor.tokenizer.add_tokens([AddedToken('<|im_end|>', special=False, normalized=False)])
    processor.chat_template = QWEN
    sample = ConversationEncoder(processor)(CONVERSATIONS['no image'])
    assert processor.tokenizer.decode(sample['labels'][0][sample['labels'][0] != -100]) == 'A colour.<|im_end|>'
    assert '</s>' not in processor.tokenizer.decode(sample['input_ids'][0])


STRINGS = [
    "{{ '<' + message['role'] + '>' + message['content'] }} ",
    "<{{ message['role'] }}>{{ message['content'] }} ",
]


@pytest.mark.parametrize('written', STRINGS)
def test_template_of_plain_strings(written):
    processor = blip2()
    processor.chat_template = '{% for message in messages %}' + written + '{% endfor %}'
    question = user(IMAGE, text("What's this?"))
    sample = ConversationEncoder(processor)([question, assistant("It's red.")], [Image.new('RGB', (9, 9))])
    decoded = processor.tokenizer.decode(sample['input_ids'][0], skip_special_tokens=True)
    assert decoded.strip() == "<user>What's this? <assistant>It's red."


@pytest.mark.parametrize('kind', ['image', 'video'])
def test_media_without_a_placeholder_are_refused(kind):
    processor = qwen2_vl()  # whose template here knows no videos
    if kind == 'image':
        processor.chat_template = processor.chat_template.replace('<|vision_start|><|image_pad|><|vision_end|>', '')
    data = {'id': 'a', f'{kind}s': ['x'], 'messages': [{'role': 'user', 'content': f'<{kind}>?'}, ANSWER]}
    record = parse_record(RawRecord('data.json', 'line 1', data))
    with pytest.raises(BadSampleError, match=f'sample "a" .*has {kind}s, but the chat template writes no placeholder'):
        ConversationEncoder(processor).check_takes_media(record)


def test_processor_without_template_is_refused():
    processor = small()
    processor.chat_template = processor.tokenizer.chat_template = None
    with pytest.raises(ValueError, match='must have a chat template'):
        ConversationEncoder(processor)


SPOKEN = [
    {'role': 'user', 'content': [{'type': 'text', 'text': 'What is <|end|>?'}]},
    {'role': 'assistant', 'content': [{'type': 'text', 'text': 'Yes.<|end|><|user|> No.'}]},
]


def test_control_tokens_become_text():
    processor = small()
    tokenizer = processor.tokenizer
    vocabulary = tokenizer.get_vocab()
    (plain,), (spelled,) = (
        ConversationEncoder(processor, control_tokens=option)(SPOKEN)['input_ids'] for option in ('warn', 'text')
    )
    assert tokenizer.decode(spelled) == tokenizer.decode(plain)
    end, user = tokenizer.convert_tokens_to_ids(['<|end|>', '<|user|>'])
    assert [(ids == end).sum() for ids in (plain, spelled)] == [3, 1]
    assert [(ids == user).sum() for ids in (plain, spelled)] == [2, 1]
    assert tokenizer.get_vocab() == vocabulary


def test_labels_and_lengths_of_spelled_tokens():
    encoder = ConversationEncoder(small(), control_tokens='text')
    sample = encoder(SPOKEN)
    (unexpanded,) = encoder.encode_unexpanded([SPOKEN])
    assert unexpanded is not None
    for key in ('input_ids', 'labels'):
        assert torch.equal(unexpanded[key], sample[key])
    learned = sample['labels'][sample['labels'] != IGNORE_INDEX]
    assert encoder.tokenizer.decode(learned) == 'Yes.<|end|><|user|> No.<|end|>'
    assert sample['attention_mask'].shape == sample['input_ids'].shape
    encoder.max_length = sample['input_ids'].shape[1] - 1
    with pytest.raises(ValueError, match='max_length'):
        encoder(SPOKEN)


def test_first_control_token_is_named_once(caplog):
    turns = (Turn('user', 'A?'), Turn('assistant', 'B.<|end|>'))
    encoder = ConversationEncoder(small())
    for name in ('a', 'b'):
        encoder.encode_record(Record(sample_id=name, source='data.json', turns=turns, media=()), [])
    (line,) = [record.getMessage() for record in caplog.records if 'control token' in record.getMessage()]
    assert line.startswith('sample "a" (data.json): has the control token <|end|>')


def test_missing_tokenizer_is_named():
    processor = small()
    processor.tokenizer = None
    with pytest.raises(ValueError, match='must have a tokenizer, got: LlavaProcessor without'):
        ConversationEncoder(processor)


@pytest.mark.parametrize('longest_edge', [-1, 512])
def test_error_of_the_processor_names_it(longest_edge):
    """A message about its own arithmetic would else be taken for one about the sample."""
    processor = qwen2_vl()
    processor.image_processor.size = {'shortest_edge': 64, 'longest_edge': longest_edge}
    with pytest.raises(ValueError, match=r'Qwen2VLProcessor cannot encode it: '):
        ConversationEncoder(processor)([user(IMAGE, WHAT), assistant('A')], [Image.new('RGB', (3000, 2))])


def test_long_reason_loses_its_middle():
    record = Record(sample_id='a', source='data.json', turns=(), media=())
    message = str(record.error('x' * 200_000 + '. Take it out'))
    assert len(message) < 1100
    assert message.endswith('. Take it out')
