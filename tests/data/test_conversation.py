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
    return [Image.new('RGB', (20 + 9 * index, 24), (200, 30 * index, 0)) for index in range(count)]


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
    messages = CONVERSATIONS[conversation]
    num_images = sum(message['content'].count(IMAGE) for message in messages)
    sample = ConversationEncoder(processor)(messages, make_images(num_images), sample_id='x')
    answers = [message['content'][0]['text'] for message in messages if message['role'] == 'assistant']
    assert texts_with_loss(sample, processor.tokenizer) == [answer + end_token for answer in answers]
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
    sample = ConversationEncoder(processor)(messages, images)
    text = processor.apply_chat_template(messages, tokenize=False)
    bos_token = processor.tokenizer.bos_token
    has_bos = bos_token is not None and text.startswith(bos_token)
    expected = processor(text=[text], images=[images], return_tensors='pt', add_special_tokens=not has_bos)
    added_keys = {'labels', 'sample_ids', 'num_images'}
    if hasattr(processor, 'video_processor'):
        added_keys.add('num_videos')
    assert set(sample) == {*expected, *added_keys}
    for key, value in expected.items():
        assert torch.equal(sample[key], value), key


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('family', ['small', 'qwen2_vl'])
def test_nothing_is_cut_to_a_saved_length(family, side, tmp_path):
    """A tokenizer that has truncated a text saves the length. Processors cut each later text to it."""
    make_processor, _ = PROCESSORS[family]
    processor = make_processor()
    question = ' '.join(['word'] * 20)
    expected = ConversationEncoder(processor)([user(IMAGE, question), assistant('Red.')], make_images(1))
    processor.tokenizer.truncation_side = side
    processor.tokenizer('a b c', truncation=True, max_length=16)
    processor.save_pretrained(tmp_path)
    loaded = type(processor).from_pretrained(tmp_path)
    loaded.chat_template = processor.chat_template
    assert loaded.tokenizer.init_kwargs['max_length'] == 16
    sample = ConversationEncoder(loaded)([user(IMAGE, question), assistant('Red.')], make_images(1))
    assert torch.equal(sample['input_ids'], expected['input_ids'])
    assert torch.equal(sample['labels'], expected['labels'])
    assert loaded.tokenizer.init_kwargs['max_length'] == 16, "the user's processor has changed"


@pytest.mark.parametrize('family', ['llava_next', 'llava_onevision', 'idefics3'])
def test_empty_turns_are_those_of_the_template(family):
    make_processor, _ = PROCESSORS[family]
    processor = make_processor()
    texts = {'system': '', 'user': '', 'assistant': 'Red.'}
    record = parse({'messages': [{'role': role, 'content': text} for role, text in texts.items()]})
    sample = ConversationEncoder(processor)(record.messages())
    expected = processor.apply_chat_template([message(role, text) for role, text in texts.items()], tokenize=False)
    assert processor.tokenizer.decode(sample['input_ids'][0]).strip() == expected.strip()


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
    processor.chat_template = processor.chat_template.replace(
        'for message in messages', f"for message in messages if message['role'] != '{role}'"
    )
    encode = ConversationEncoder(processor)
    # Nothing is lost of an empty turn. It must not show that turns of this role are written.
    encode([message(role) if turn['role'] == role else turn for turn in messages])
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
    encode([user(IMAGE, 'Is it red?'), assistant('Yes.')], make_images(1))
    with pytest.raises(ValueError, match='must write what the user says'):
        encode([user('Is it red?', IMAGE, 'red'), assistant('Yes.')], make_images(1))


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
    result = message('tool', '{"place": "Zürich"}\n')
    sample = ConversationEncoder(processor)([user('Where?'), assistant('So?'), result, assistant('There.')])
    text = processor.tokenizer.decode(sample['input_ids'][0])
    assert r'<|tool|>"{\"place\": \"Zürich\"}\n"<|end|>' in text


def test_ending_token_that_is_not_special():
    processor = llava()
    processor.tokenizer.add_tokens([AddedToken('<|im_end|>', special=False, normalized=False)])
    processor.chat_template = QWEN
    sample = ConversationEncoder(processor)(CONVERSATIONS['no image'])
    assert learned_text(sample, processor.tokenizer) == 'A colour.<|im_end|>'
    assert '</s>' not in processor.tokenizer.decode(sample['input_ids'][0])


@pytest.mark.parametrize(
    'template_of_turn',
    ["{{ '<' + message['role'] + '>' + message['content'] }} ", "<{{ message['role'] }}>{{ message['content'] }} "],
)
def test_template_of_plain_strings(template_of_turn):
    processor = blip2()
    processor.chat_template = '{% for message in messages %}' + template_of_turn + '{% endfor %}'
    messages = [user(IMAGE, "What's this?"), assistant("It's red.")]
    sample = ConversationEncoder(processor)(messages, make_images(1))
    decoded = processor.tokenizer.decode(sample['input_ids'][0], skip_special_tokens=True)
    assert decoded.strip() == "<user>What's this? <assistant>It's red."


def test_role_that_no_record_has():
    """The template writes only parts, also in the turns of a role that it does not name."""
    processor = llava()
    messages = [message('developer', 'Be brief.'), user('What is blue?'), assistant('A colour.')]
    sample = ConversationEncoder(processor)(messages)
    decoded = processor.tokenizer.decode(sample['input_ids'][0], skip_special_tokens=True)
    assert decoded.strip() == 'DEVELOPER: Be brief. USER: What is blue? ASSISTANT: A colour.'


@pytest.mark.parametrize('modality', ['image', 'video'])
def test_media_without_a_placeholder_are_refused(modality):
    processor = qwen2_vl()
    assert 'video' not in processor.chat_template
    processor.chat_template = processor.chat_template.replace('<|vision_start|><|image_pad|><|vision_end|>', '')
    record = parse({'id': 'a', f'{modality}s': ['x'], 'conversations': turns(f'<{modality}>?', 'Red.')})
    with pytest.raises(
        BadSampleError, match=f'"a" .*has {modality}s in a turn of the user, but the chat template writes no'
    ):
        ConversationEncoder(processor).check_takes_media(record)


@pytest.mark.parametrize(
    ('make', 'parts', 'num_images', 'message'),
    [
        (lambda: small().tokenizer, [IMAGE], 1, 'takes none'),
        (lambda: small().tokenizer, [], 1, 'got: 1 for 0 parts'),
        (blip2, [IMAGE], 0, 'got: 0 for 1 parts'),
        (qwen2_vl, [IMAGE], 2, 'got: 2 for 1 parts'),
    ],
)
def test_media_that_would_be_dropped(make, parts, num_images, message):
    encode = ConversationEncoder(make())
    with pytest.raises(ValueError, match=f'`images` must .*{message}'):
        encode([user(*parts, WHAT), assistant('Red.')], make_images(num_images))


def test_messages_of_a_wrong_form_are_refused():
    """The encoder takes only the text of an answer, so an image in it would be dropped."""
    encoder = ConversationEncoder(small())
    with pytest.raises(ValueError, match='only text in answers'):
        encoder([user('Which colour?'), message('assistant', IMAGE, 'Red.')])
    with pytest.raises(ValueError, match='`messages` must hold at least one turn'):
        encoder([])


@pytest.mark.parametrize('key', ['reasoning_content', 'tool_calls', 'name'])
def test_keys_of_messages_are_not_dropped(key):
    """Chat templates read such keys, but the encoder hands on only the role and the content."""
    encoder = ConversationEncoder(small())
    with pytest.raises(ValueError, match=rf'`messages` must .*`{key}`'):
        encoder([user('Which colour?'), {**assistant('Red.'), key: 'Blood is red.'}])
    sample = encoder([user('Which colour?'), {**assistant('Red.'), key: None, 'id': 1, 'weight': 1}])
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
    answer = AnswerSpan(len(text) - 1, len(text))
    with pytest.raises(InvalidInputError, match='an answer must have tokens'):
        _spans_of(bert.encode(text), [answer])


def test_control_tokens_become_text():
    processor = small()
    tokenizer = processor.tokenizer
    vocabulary = tokenizer.get_vocab()
    as_tokens = ConversationEncoder(processor, control_tokens='warn')(SPOKEN)['input_ids'][0]
    as_text = ConversationEncoder(processor, control_tokens='text')(SPOKEN)['input_ids'][0]
    assert tokenizer.decode(as_text) == tokenizer.decode(as_tokens)
    # The template's own tokens stay: one ends the answer, and one begins the question.
    end, user = tokenizer.convert_tokens_to_ids(['<|end|>', '<|user|>'])
    assert as_tokens.tolist().count(end) == 3
    assert as_text.tolist().count(end) == 1
    assert as_tokens.tolist().count(user) == 2
    assert as_text.tolist().count(user) == 1
    assert tokenizer.get_vocab() == vocabulary


def test_labels_and_lengths_of_spelled_tokens():
    encoder = ConversationEncoder(small(), control_tokens='text')
    sample = encoder(SPOKEN)
    (unexpanded,) = encoder.encode_unexpanded([SPOKEN])
    for key in ('input_ids', 'labels'):
        assert torch.equal(unexpanded[key], sample[key])
    assert learned_text(sample, encoder.tokenizer) == 'Yes.<|end|><|user|> No.<|end|>'
    assert sample['attention_mask'].shape == sample['input_ids'].shape
    encoder.max_length = sample['input_ids'].shape[1]
    encoder(SPOKEN)
    encoder.max_length -= 1
    with pytest.raises(ValueError, match=f'max_length.*got: {encoder.max_length} < {encoder.max_length + 1} tokens'):
        encoder(SPOKEN)


def test_masks_of_images_follow_spelled_tokens():
    """Mllama's mask has a dimension along the text and two others. The reference has other text of the same length."""
    processor = transformers.MllamaProcessor(
        image_processor=small_processor('mllama', 'image'),
        tokenizer=tokenizer('<|image|>', '<|python_tag|>', '<s>', '</s>', bos_token='<s>', eos_token='</s>'),
    )
    processor.chat_template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{{ '<|image|>' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ eos_token }}{% endfor %}"
    )
    encoder = ConversationEncoder(processor, control_tokens='text')
    other_turns = [assistant('Red.'), user(IMAGE, '?'), assistant('Red.')]
    sample = encoder([user(IMAGE, 'A </s>?'), *other_turns], make_images(2))
    expected = encoder([user(IMAGE, 'A </z>?'), *other_turns], make_images(2))
    assert not torch.equal(sample['input_ids'], expected['input_ids'])
    for key, value in expected.items():
        if isinstance(value, torch.Tensor) and key != 'input_ids':
            assert torch.equal(sample[key], value), key


def test_first_control_token_is_named_once(caplog):
    encoder = ConversationEncoder(small())
    for name in ('a', 'b'):
        record = parse({'id': name, 'conversations': turns('A?', 'B.<|end|>')})
        encoder.encode_record(record, [])
    (line,) = [message for message in caplog.messages if 'control token' in message]
    assert line.startswith('sample "a" (data.json, line 3): has the control token <|end|>')


def test_control_tokens_of_a_direct_call(caplog):
    """Without a record, the texts of the messages are checked in the same way."""
    with pytest.raises(InvalidInputError, match=r'the conversation has the control token <\|end\|> in its text'):
        ConversationEncoder(small(), control_tokens='refuse')(SPOKEN)
    with pytest.raises(InvalidInputError, match=r'the conversation has `<image>` in a text where it stands for no'):
        ConversationEncoder(small())([user('Write <image>.'), assistant('Yes.')])
    assert not caplog.messages
    encoder = ConversationEncoder(small())
    encoder(SPOKEN)
    encoder(SPOKEN)
    (line,) = caplog.messages
    assert line.startswith('the conversation has the control token <|end|>')


@pytest.mark.parametrize('token', ['<|im_start|>', '<|im_end|>'])
def test_token_of_the_template_that_is_not_special(token):
    """Plain tokens that begin or end turns are control tokens, too. Such a tokenizer cannot spell them."""
    processor = llava()
    for added in ('<|im_start|>', '<|im_end|>', '<think>'):
        processor.tokenizer.add_tokens([AddedToken(added, special=False, normalized=False)])
    processor.chat_template = QWEN
    record = parse({'conversations': turns(f'What is {token}?', '<think>Hm.')})
    with pytest.raises(ValueError, match=f'the control token {re.escape(token)} '):
        ConversationEncoder(processor, control_tokens='refuse').encode_record(record, [])
    with pytest.raises(ValueError, match='cannot write the control token'):
        ConversationEncoder(processor, control_tokens='text').encode_record(record, [])
    thought = parse({'conversations': turns('What?', '<think>Hm.')})
    ConversationEncoder(processor, control_tokens='refuse').encode_record(thought, [])


def test_missing_part_of_processor_is_named():
    processor = small()
    processor.chat_template = None
    processor.tokenizer.chat_template = None
    with pytest.raises(ValueError, match='has no chat template'):
        ConversationEncoder(processor)
    processor.tokenizer = None
    with pytest.raises(ValueError, match='a LlavaProcessor that has no tokenizer'):
        ConversationEncoder(processor)


@pytest.mark.parametrize('longest_edge', [-1, 512])
def test_error_of_the_processor_names_it(longest_edge):
    """Without the name, a message about the processor's arithmetic would look like one about the sample."""
    processor = qwen2_vl()
    processor.image_processor.size = {'shortest_edge': 64, 'longest_edge': longest_edge}
    wide_image = Image.new('RGB', (3000, 2))
    with pytest.raises(ValueError, match=r'Qwen2VLProcessor cannot encode it: '):
        ConversationEncoder(processor)(CONVERSATIONS['one turn'], [wide_image])


def test_long_reason_loses_its_middle():
    record = Record(sample_id='a', source='data.json', turns=(), media=())
    message = str(record.error('x' * 200_000 + '. Take it out'))
    assert len(message) < 1100
    assert message.endswith('. Take it out')


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


def encode_sounds(encoder, *seconds):
    """Encodes a conversation with a silent sound of each length."""
    sounds = [np.zeros(round(16000 * length), dtype=np.float32) for length in seconds]
    parts = [{'type': 'audio'}] * len(sounds)
    return encoder([user(*parts, WHAT), assistant('A red square.')], audios=sounds)


def test_sounds_cut_off_are_refused():
    encoder = ConversationEncoder(hearing_processor('Gemma3n'))
    encode_sounds(encoder, 30)
    with pytest.raises(ValueError, match=r'audio .* window is 30 s .* got: 496000 audio samples'):
        encode_sounds(encoder, 1, 31)


def test_long_sounds_in_several_windows():
    processor = hearing_processor('AudioFlamingo3')
    processor.max_audio_len = 3
    encoder = ConversationEncoder(processor)
    assert encode_sounds(encoder, 2.3)['input_features'].shape[0] == 3
    with pytest.raises(ValueError, match=r'window is 1 s \(16000 .* got: 48001 audio samples'):
        encode_sounds(encoder, 48001 / 16000)


def test_part_named_audio_processor():
    """Phi-4 multimodal has no `feature_extractor`, and writes a mask only for several sounds."""
    encoder = ConversationEncoder(hearing_processor('Phi4Multimodal'))
    samples = [encode_sounds(encoder, 0.5), encode_sounds(encoder), encode_sounds(encoder, 0.3, 0.7)]
    assert [sample['num_audios'] for sample in samples] == [[1], [0], [2]]
    sounds = [np.zeros(round(16000 * length), dtype=np.float32) for length in (0.5, 0.3, 0.7)]
    expected = encoder.parts['audio'](sounds, sampling_rate=16000, return_tensors='pt')
    batch = VisionLanguageCollator(encoder.processor)(samples)
    for key, value in expected.items():
        assert torch.equal(batch[key], value)
