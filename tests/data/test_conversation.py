# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Conversations as tokens: loss on answers and their ending tokens, control tokens in texts, bad processors."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.data.chat_template import AnswerSpan
from composer_tokacc.data.conversation import ConversationEncoder, _spans_of
from composer_tokacc.data.records import BadSampleError, Record
from composer_tokacc.refusals import InvalidInputError
from tests.data.chat_processors import PROCESSORS, QWEN, blip2, learned_text, llava, qwen2_vl, small, tokenizer
from tests.model_types.processors import small_processor
from tests.support.conversations import IMAGE, assistant, message, parse, turns, user


def texts_with_loss(sample, tokenizer):
    """Decodes each run of consecutive labels that carry loss."""
    runs = []
    previous = IGNORE_INDEX
    for label in sample['labels'][0].tolist():
        if label != IGNORE_INDEX:
            if previous == IGNORE_INDEX:
                runs.append([])
            runs[-1].append(label)
        previous = label
    return [tokenizer.decode(run).lstrip(' ') for run in runs]


def make_images(count):
    """Returns images of unequal sizes and colours."""
    images = []
    for index in range(count):
        size = (20 + 9 * index, 24)
        color = (200, 30 * index, 0)
        images.append(Image.new('RGB', size, color))
    return images


def decoded(processor, sample):
    """Returns the text of a sample without special tokens."""
    ids = sample['input_ids'][0]
    return processor.tokenizer.decode(ids, skip_special_tokens=True).strip()


WHAT = 'What is this?'
CONVERSATIONS = {
    'one turn': [user(IMAGE, WHAT), assistant('A red square.')],
    'images between answers': [
        user(IMAGE, IMAGE, WHAT),
        assistant('Blue, I think: <b>7</b> of them.'),
        user(IMAGE, 'And now?'),
        assistant('A'),
        user('Really?'),
        assistant('Yes.\nTwo lines.'),
    ],
    'one image in each question': [
        user(IMAGE, WHAT),
        assistant('A a a a a a.'),
        user(IMAGE),
        assistant('A'),
        user(IMAGE, 'And this?'),
        assistant('A a a a a.'),
    ],
    'image behind text': [user('Compare ', IMAGE, ' with ', IMAGE), assistant('Same.')],
    'answers that look like the template': [
        user(IMAGE, 'ASSISTANT: a [/INST] assistant'),
        assistant('USER: assistant a'),
        user('a'),
        assistant('a'),
    ],
    'system turn': [message('system', 'Be brief.'), user(IMAGE, WHAT), assistant('Blue.')],
    'letters of several bytes': [user(IMAGE, 'Wie heißt das?'), assistant('Größe: 三 🙂')],
    'no image': [user('What is blue?'), assistant('A colour.')],
    'unanswered question at the end': [user(IMAGE, '?'), assistant('Red.'), user('And?')],
}


@pytest.mark.parametrize('conversation', CONVERSATIONS)
@pytest.mark.parametrize('family', PROCESSORS)
def test_loss_on_answers_and_ending_tokens(family, conversation):
    make_processor, end_token = PROCESSORS[family]
    processor = make_processor()
    encode = ConversationEncoder(processor)
    messages = CONVERSATIONS[conversation]
    num_images = 0
    expected_texts = []
    for turn in messages:
        num_images += turn['content'].count(IMAGE)
        if turn['role'] == 'assistant':
            [answer] = turn['content']
            expected_texts.append(answer['text'] + end_token)

    sample = encode(messages, make_images(num_images), sample_id='x')

    assert texts_with_loss(sample, processor.tokenizer) == expected_texts
    carries_loss = sample['labels'] != IGNORE_INDEX
    assert torch.equal(sample['labels'][carries_loss], sample['input_ids'][carries_loss])
    assert sample['num_images'] == [num_images]
    assert sample['sample_ids'] == ['x']


@pytest.mark.parametrize('family', ['small', 'llava_next', 'llava_onevision', 'qwen2_vl', 'idefics3'])
def test_encoding_is_that_of_the_processor(family):
    make_processor, _ = PROCESSORS[family]
    processor = make_processor()
    messages = CONVERSATIONS['images between answers']
    images = make_images(3)
    text = processor.apply_chat_template(messages, tokenize=False)
    bos_token = processor.tokenizer.bos_token
    has_bos = bos_token is not None and text.startswith(bos_token)
    expected = processor(text=[text], images=[images], return_tensors='pt', add_special_tokens=not has_bos)
    expected_keys = {*expected, 'labels', 'sample_ids', 'num_images'}
    if hasattr(processor, 'video_processor'):
        expected_keys.add('num_videos')
    encode = ConversationEncoder(processor)

    sample = encode(messages, images)

    assert sample.keys() == expected_keys
    for key, value in expected.items():
        assert torch.equal(sample[key], value), key


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('family', ['small', 'qwen2_vl'])
def test_nothing_is_cut_to_a_saved_length(family, side, tmp_path):
    """A tokenizer that has truncated a text saves the length. Processors cut each later text to it."""
    make_processor, _ = PROCESSORS[family]
    processor = make_processor()
    long_question = ' '.join(['word'] * 20)
    messages = [user(IMAGE, long_question), assistant('Red.')]
    images = make_images(1)
    expected = ConversationEncoder(processor)(messages, images)
    processor.tokenizer.truncation_side = side
    processor.tokenizer('a b c', truncation=True, max_length=16)
    processor.save_pretrained(tmp_path)
    loaded = type(processor).from_pretrained(tmp_path)
    loaded.chat_template = processor.chat_template
    settings = loaded.tokenizer.init_kwargs
    assert settings['max_length'] == 16

    sample = ConversationEncoder(loaded)(messages, images)

    assert torch.equal(sample['input_ids'], expected['input_ids'])
    assert torch.equal(sample['labels'], expected['labels'])
    assert loaded.tokenizer.init_kwargs['max_length'] == 16, "the user's processor has changed"


@pytest.mark.parametrize('family', ['llava_next', 'llava_onevision', 'idefics3'])
def test_empty_turns_are_those_of_the_template(family):
    make_processor, _ = PROCESSORS[family]
    processor = make_processor()
    messages = [
        {'role': 'system', 'content': ''},
        {'role': 'user', 'content': ''},
        {'role': 'assistant', 'content': 'Red.'},
    ]
    record = parse({'messages': messages})
    messages_of_parts = [message('system', ''), message('user', ''), message('assistant', 'Red.')]
    expected = processor.apply_chat_template(messages_of_parts, tokenize=False)
    encode = ConversationEncoder(processor)

    sample = encode(record.messages())

    text = processor.tokenizer.decode(sample['input_ids'][0])
    assert text.strip() == expected.strip()


@pytest.mark.parametrize(
    ('role', 'messages'),
    [
        ('tool', [user('6 x 7?'), assistant('So?'), message('tool', '42'), assistant('42.')]),
        ('system', [user('q'), assistant('a'), message('system', 'a'), user('b')]),
    ],
)
def test_dropped_turn_that_stands_elsewhere(role, messages):
    """The template drops a turn whose text also stands in an answer."""
    processor = small()
    ConversationEncoder(processor)(messages)
    without_role = f"for message in messages if message['role'] != '{role}'"
    processor.chat_template = processor.chat_template.replace('for message in messages', without_role)
    encode = ConversationEncoder(processor)
    # Nothing is lost of an empty turn. It must not show that turns of this role are written.
    with_empty_turn = [message(role) if turn['role'] == role else turn for turn in messages]
    encode(with_empty_turn)

    with pytest.raises(ValueError, match=f'must write what the {role} says'):
        encode(messages)


def test_dropped_text_that_stands_elsewhere():
    """The template writes only the first text of a turn."""
    processor = small()
    processor.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>"
        "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
        "{{ (message['content'] | selectattr('text') | first).text }}<|end|>{% endfor %}"
    )
    encode = ConversationEncoder(processor)
    images = make_images(1)
    encode([user(IMAGE, 'Is it red?'), assistant('Yes.')], images)
    question_of_two_texts = user('Is it red?', IMAGE, 'red')

    with pytest.raises(ValueError, match='must write what the user says'):
        encode([question_of_two_texts, assistant('Yes.')], images)


def test_dropped_text_behind_a_second_image():
    """The template writes only the second part of a turn that begins with an image. The question stands there twice."""
    processor = small()
    processor.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>"
        "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
        "{{ message['content'][1 if message['content'][0]['type'] == 'image' else 0].text }}<|end|>{% endfor %}"
    )
    encode = ConversationEncoder(processor)
    first_turns = [user(IMAGE, 'Is it red?'), assistant('Yes.')]
    encode([*first_turns, user(IMAGE, 'Is it red?'), assistant('No.')], make_images(2))
    with pytest.raises(ValueError, match='must write what the user says'):
        encode([*first_turns, user(IMAGE, IMAGE, 'Is it red?'), assistant('No.')], make_images(3))


def test_result_of_a_tool_as_json():
    """Llama 3.1 and gpt-oss write it so."""
    processor = small()
    processor.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>{% for part in message['content'] %}"
        "{{ part.text | tojson if message['role'] == 'tool' else part.text }}{% endfor %}<|end|>{% endfor %}"
    )
    encode = ConversationEncoder(processor)
    result = message('tool', '{"place": "Zürich"}\n')

    sample = encode([user('Where?'), assistant('So?'), result, assistant('There.')])

    text = processor.tokenizer.decode(sample['input_ids'][0])
    assert r'<|tool|>"{\"place\": \"Zürich\"}\n"<|end|>' in text


def add_plain_tokens(processor, *tokens):
    """Adds tokens that are not special."""
    for token in tokens:
        plain_token = AddedToken(token, special=False, normalized=False)
        processor.tokenizer.add_tokens([plain_token])


def test_ending_token_that_is_not_special():
    processor = llava()
    add_plain_tokens(processor, '<|im_end|>')
    processor.chat_template = QWEN
    encode = ConversationEncoder(processor)

    sample = encode(CONVERSATIONS['no image'])

    assert learned_text(sample, processor.tokenizer) == 'A colour.<|im_end|>'
    text = processor.tokenizer.decode(sample['input_ids'][0])
    assert '</s>' not in text


@pytest.mark.parametrize(
    'template_of_turn',
    ["{{ '<' + message['role'] + '>' + message['content'] }} ", "<{{ message['role'] }}>{{ message['content'] }} "],
)
def test_template_of_plain_strings(template_of_turn):
    processor = blip2()
    processor.chat_template = '{% for message in messages %}' + template_of_turn + '{% endfor %}'
    messages = [user(IMAGE, "What's this?"), assistant("It's red.")]
    encode = ConversationEncoder(processor)

    sample = encode(messages, make_images(1))

    assert decoded(processor, sample) == "<user>What's this? <assistant>It's red."


def test_role_that_no_record_has():
    """The template writes only parts, also in the turns of a role that it does not name."""
    processor = llava()
    messages = [message('developer', 'Be brief.'), user('What is blue?'), assistant('A colour.')]
    encode = ConversationEncoder(processor)

    sample = encode(messages)

    assert decoded(processor, sample) == 'DEVELOPER: Be brief. USER: What is blue? ASSISTANT: A colour.'


@pytest.mark.parametrize('modality', ['image', 'video'])
def test_media_without_a_placeholder_are_refused(modality):
    processor = qwen2_vl()
    assert 'video' not in processor.chat_template
    processor.chat_template = processor.chat_template.replace('<|vision_start|><|image_pad|><|vision_end|>', '')
    encoder = ConversationEncoder(processor)
    conversation = turns(f'<{modality}>?', 'Red.')
    record = parse({'id': 'a', f'{modality}s': ['x'], 'conversations': conversation})

    message = f'"a" .*has {modality}s in a turn of the user, but the chat template writes no'
    with pytest.raises(BadSampleError, match=message):
        encoder.check_takes_media(record)


def small_tokenizer():
    return small().tokenizer


@pytest.mark.parametrize(
    ('make', 'parts', 'num_images', 'message'),
    [
        pytest.param(small_tokenizer, [IMAGE], 1, 'takes none', id='tokenizer, placeholder'),
        pytest.param(small_tokenizer, [], 1, 'got: 1 for 0 parts', id='tokenizer, no placeholder'),
        pytest.param(blip2, [IMAGE], 0, 'got: 0 for 1 parts', id='too few images'),
        pytest.param(qwen2_vl, [IMAGE], 2, 'got: 2 for 1 parts', id='too many images'),
    ],
)
def test_media_that_would_be_dropped(make, parts, num_images, message):
    encode = ConversationEncoder(make())
    messages = [user(*parts, WHAT), assistant('Red.')]
    images = make_images(num_images)

    with pytest.raises(ValueError, match=f'`images` must .*{message}'):
        encode(messages, images)


def test_image_in_an_answer_is_refused():
    """The encoder takes only the text of an answer, so the image would be dropped."""
    encode = ConversationEncoder(small())
    answer = message('assistant', IMAGE, 'Red.')

    with pytest.raises(ValueError, match='only text in answers'):
        encode([user('Which colour?'), answer])


def test_conversation_without_turns_is_refused():
    encode = ConversationEncoder(small())

    with pytest.raises(ValueError, match='`messages` must hold at least one turn'):
        encode([])


@pytest.mark.parametrize('key', ['reasoning_content', 'tool_calls', 'name'])
def test_keys_of_messages_are_not_dropped(key):
    """Chat templates read such keys, but the encoder hands on only the role and the content."""
    encode = ConversationEncoder(small())
    answer = assistant('Red.')
    answer[key] = 'Blood is red.'

    with pytest.raises(ValueError, match=rf'`messages` must .*`{key}`'):
        encode([user('Which colour?'), answer])


@pytest.mark.parametrize('key', ['reasoning_content', 'tool_calls', 'name'])
def test_keys_without_a_value_are_taken(key):
    """Neither does a template read ``id`` and ``weight``."""
    encoder = ConversationEncoder(small())
    answer = {**assistant('Red.'), key: None, 'id': 1, 'weight': 1}

    sample = encoder([user('Which colour?'), answer])

    assert learned_text(sample, encoder.tokenizer) == 'Red.<|end|>'


SPOKEN = [
    user('What is <|end|>?'),
    assistant('Yes.<|end|><|user|> No.'),
]


@pytest.mark.parametrize('text', ['Which colour?\u200b', '\u200b'])
def test_answer_without_tokens_is_refused(text):
    """Tokenizers such as BERT's drop characters that have no width. Of the second text nothing is left."""
    bert = Tokenizer(WordLevel({'[UNK]': 0}, unk_token='[UNK]'))
    bert.normalizer = BertNormalizer()
    bert.pre_tokenizer = BertPreTokenizer()
    encoding = bert.encode(text)
    last_character = AnswerSpan(len(text) - 1, len(text))

    with pytest.raises(InvalidInputError, match='an answer must have tokens'):
        _spans_of(encoding, [last_character])


def test_control_tokens_become_text():
    """The template's own tokens stay: one ends the answer, and one begins the question."""
    processor = small()
    tokenizer = processor.tokenizer
    vocabulary = tokenizer.get_vocab()
    end = vocabulary['<|end|>']
    user = vocabulary['<|user|>']
    encode_as_tokens = ConversationEncoder(processor, control_tokens='warn')
    encode_as_text = ConversationEncoder(processor, control_tokens='text')

    tokens = encode_as_tokens(SPOKEN)['input_ids'][0].tolist()
    spelled = encode_as_text(SPOKEN)['input_ids'][0].tolist()

    assert tokenizer.decode(spelled) == tokenizer.decode(tokens)
    assert tokens.count(end) == 3
    assert tokens.count(user) == 2
    assert spelled.count(end) == 1
    assert spelled.count(user) == 1
    assert tokenizer.get_vocab() == vocabulary


def test_labels_of_spelled_tokens():
    encoder = ConversationEncoder(small(), control_tokens='text')

    sample = encoder(SPOKEN)
    [unexpanded] = encoder.encode_unexpanded([SPOKEN])

    assert learned_text(sample, encoder.tokenizer) == 'Yes.<|end|><|user|> No.<|end|>'
    assert sample['attention_mask'].shape == sample['input_ids'].shape
    assert torch.equal(unexpanded['input_ids'], sample['input_ids'])
    assert torch.equal(unexpanded['labels'], sample['labels'])


def test_length_of_spelled_tokens():
    encoder = ConversationEncoder(small(), control_tokens='text')
    length = encoder(SPOKEN)['input_ids'].shape[1]
    encoder.max_length = length
    encoder(SPOKEN)

    encoder.max_length = length - 1

    with pytest.raises(ValueError, match=f'max_length.*got: {length - 1} < {length} tokens'):
        encoder(SPOKEN)


def test_masks_of_images_follow_spelled_tokens():
    """Mllama's mask has a dimension along the text and two others. The reference has other text of the same length."""
    words = tokenizer('<|image|>', '<|python_tag|>', '<s>', '</s>', bos_token='<s>', eos_token='</s>')
    images = small_processor('mllama', 'image')
    processor = transformers.MllamaProcessor(image_processor=images, tokenizer=words)
    processor.chat_template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{{ '<|image|>' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ eos_token }}{% endfor %}"
    )
    encode = ConversationEncoder(processor, control_tokens='text')
    spelled_token = user(IMAGE, 'A </s>?')
    plain_text = user(IMAGE, 'A </z>?')
    other_turns = [assistant('Red.'), user(IMAGE, '?'), assistant('Red.')]

    sample = encode([spelled_token, *other_turns], make_images(2))
    expected = encode([plain_text, *other_turns], make_images(2))

    assert not torch.equal(sample.pop('input_ids'), expected.pop('input_ids'))
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(sample[key], value), key


def test_first_control_token_is_named_once(caplog):
    encoder = ConversationEncoder(small())
    conversation = turns('A?', 'B.<|end|>')

    for name in ('a', 'b'):
        record = parse({'id': name, 'conversations': conversation})
        encoder.encode_record(record, [])

    [line] = [message for message in caplog.messages if 'control token' in message]
    assert line.startswith('sample "a" (data.json, line 3): has the control token <|end|>')


def test_control_tokens_of_a_direct_call(caplog):
    """Without a record, the texts of the messages are checked in the same way."""
    encode = ConversationEncoder(small())

    encode(SPOKEN)
    encode(SPOKEN)

    [line] = caplog.messages
    assert line.startswith('the conversation has the control token <|end|>')


@pytest.mark.parametrize(
    ('messages', 'control_tokens', 'reason'),
    [
        pytest.param(SPOKEN, 'refuse', r'the control token <\|end\|> in its text', id='control token'),
        pytest.param(
            [user('Write <image>.'), assistant('Yes.')],
            'warn',
            '`<image>` in a text where it stands for no',
            id='placeholder',
        ),
    ],
)
def test_refused_tokens_of_a_direct_call(messages, control_tokens, reason, caplog):
    encode = ConversationEncoder(small(), control_tokens=control_tokens)

    with pytest.raises(InvalidInputError, match=f'the conversation has {reason}'):
        encode(messages)

    assert not caplog.messages


@pytest.mark.parametrize('token', ['<|im_start|>', '<|im_end|>'])
def test_token_of_the_template_that_is_not_special(token):
    """Plain tokens that begin or end turns are control tokens, too. Such a tokenizer cannot spell them."""
    processor = llava()
    add_plain_tokens(processor, '<|im_start|>', '<|im_end|>', '<think>')
    processor.chat_template = QWEN
    refusing = ConversationEncoder(processor, control_tokens='refuse')
    spelling = ConversationEncoder(processor, control_tokens='text')
    record = parse({'conversations': turns(f'What is {token}?', '<think>Hm.')})
    record_without_token = parse({'conversations': turns('What?', '<think>Hm.')})

    refusing.encode_record(record_without_token, [])
    with pytest.raises(ValueError, match=f'the control token {re.escape(token)} '):
        refusing.encode_record(record, [])
    with pytest.raises(ValueError, match='cannot write the control token'):
        spelling.encode_record(record, [])


def test_missing_chat_template_is_named():
    processor = small()
    processor.chat_template = None
    processor.tokenizer.chat_template = None

    with pytest.raises(ValueError, match='has no chat template'):
        ConversationEncoder(processor)


def test_missing_tokenizer_is_named():
    processor = small()
    processor.tokenizer = None

    with pytest.raises(ValueError, match='a LlavaProcessor that has no tokenizer'):
        ConversationEncoder(processor)


@pytest.mark.parametrize('longest_edge', [-1, 512])
def test_error_of_the_processor_names_it(longest_edge):
    """Without the name, a message about the processor's arithmetic would look like one about the sample."""
    processor = qwen2_vl()
    processor.image_processor.size = {'shortest_edge': 64, 'longest_edge': longest_edge}
    encode = ConversationEncoder(processor)
    wide_image = Image.new('RGB', (3000, 2))

    with pytest.raises(ValueError, match=r'Qwen2VLProcessor cannot encode it: '):
        encode(CONVERSATIONS['one turn'], [wide_image])


def test_long_reason_loses_its_middle():
    record = Record(sample_id='a', source='data.json', turns=(), media=())
    long_reason = 'x' * 200_000

    error = record.error(f'{long_reason}. Take it out')

    assert len(str(error)) < 1100
    assert str(error).endswith('. Take it out')


HEARING = QWEN.replace(
    '{% elif "text" in content %}', '{% elif content["type"] == "audio" %}<sound>{% elif "text" in content %}'
)


def hearing_processor(name):
    """Returns a processor of sounds; a window of the feature extractor has one second, of Gemma 3n thirty."""
    if not hasattr(transformers, f'{name}Processor'):
        pytest.skip(f'needs the {name}Processor of a newer transformers')
    class_name = 'GPT2TokenizerFast' if name == 'Phi4Multimodal' else ''
    special = ('<sound>', '<boa>', '<eoa>', '<|im_start|>', '<|im_end|>')
    words = tokenizer(*special, class_name=class_name, eos_token='<|im_end|>')
    for kind, token in (('audio', '<sound>'), ('image', '<image>')):
        setattr(words, f'{kind}_token', token)
        setattr(words, f'{kind}_token_id', words.convert_tokens_to_ids(token))
    for part in ('boa', 'eoa', 'boi', 'eoi'):
        setattr(words, f'{part}_token', '<boa>' if part.startswith('bo') else '<eoa>')
    if name == 'Gemma3n':
        extractor = transformers.Gemma3nAudioFeatureExtractor()
        parts = (extractor, small_processor('llava', 'image'), words)
    elif name == 'Phi4Multimodal':
        model_type = 'phi4_multimodal'
        parts = (small_processor(model_type, 'image'), small_processor(model_type, 'audio'), words)
    else:
        parts = (transformers.WhisperFeatureExtractor(chunk_length=1), words)
    processor = getattr(transformers, f'{name}Processor')(*parts)
    processor.chat_template = HEARING
    return processor


def silence(seconds):
    """Returns a sound of 16,000 samples a second."""
    num_samples = round(16000 * seconds)
    return np.zeros(num_samples, dtype=np.float32)


def encode_sounds(encoder, *seconds):
    """Encodes a conversation with a silent sound of each length."""
    sounds = [silence(length) for length in seconds]
    parts = [{'type': 'audio'}] * len(sounds)
    messages = [user(*parts, WHAT), assistant('A red square.')]
    return encoder(messages, audios=sounds)


def test_sounds_cut_off_are_refused():
    encoder = ConversationEncoder(hearing_processor('Gemma3n'))
    encode_sounds(encoder, 30)
    with pytest.raises(ValueError, match=r'audio .* window is 30 s .* got: 496000 audio samples'):
        encode_sounds(encoder, 1, 31)


def test_long_sounds_in_several_windows():
    processor = hearing_processor('AudioFlamingo3')
    processor.max_audio_len = 3
    encoder = ConversationEncoder(processor)

    sample = encode_sounds(encoder, 2.3)

    assert len(sample['input_features']) == 3
    with pytest.raises(ValueError, match=r'window is 1 s \(16000 .* got: 48001 audio samples'):
        encode_sounds(encoder, 48001 / 16000)


def test_part_named_audio_processor():
    """Phi-4 multimodal has no `feature_extractor`, and writes a mask only for several sounds."""
    encoder = ConversationEncoder(hearing_processor('Phi4Multimodal'))
    collate = VisionLanguageCollator(encoder.processor)
    one_sound = encode_sounds(encoder, 0.5)
    no_sound = encode_sounds(encoder)
    two_sounds = encode_sounds(encoder, 0.3, 0.7)

    batch = collate([one_sound, no_sound, two_sounds])

    assert one_sound['num_audios'] == [1]
    assert no_sound['num_audios'] == [0]
    assert two_sounds['num_audios'] == [2]
    sounds = [silence(0.5), silence(0.3), silence(0.7)]
    expected = encoder.parts['audio'](sounds, sampling_rate=16000, return_tensors='pt')
    for key, value in expected.items():
        assert torch.equal(batch[key], value)
