# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Chat templates that change answers, write no ending token, or write media only in some turns."""

from __future__ import annotations

import itertools
import logging
import re

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken
from tokenizers.normalizers import Replace
from tokenizers.processors import TemplateProcessing

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.data import BadSampleError, ConversationEncoder, LlavaDataset, chat_template
from tests.data.chat_processors import QWEN, assert_same, learned_text, llava, qwen2_vl, small, tokenizer
from tests.support.conversations import IMAGE, assistant, message, turns, user, write_json

# The part of Qwen/Qwen3-8B's template about assistant turns: thoughts of earlier turns are dropped, and the last turn
# gets an empty thought if it has none.
QWEN3 = (
    '{%- set ns = namespace(last_query=messages|length - 1, found=false) %}'
    '{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}'
    "{%- if not ns.found and message.role == 'user' %}"
    '{%- set ns.last_query = index %}{%- set ns.found = true %}{%- endif %}{%- endfor %}'
    "{%- for message in messages %}{%- if message.role != 'assistant' %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- else %}{%- set content = message.content %}{%- set thought = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    '{%- if loop.index0 > ns.last_query and (loop.last or thought) %}'
    "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content.lstrip('\\n') + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CONVERSATION = [
    {'role': 'user', 'content': 'What is blood?'},
    {'role': 'assistant', 'content': '<think>\nA colour.\n</think>\n\nRed.'},
    {'role': 'user', 'content': 'And the sky?'},
    {'role': 'assistant', 'content': '<think>Another</think>Blue.'},
]
PLAIN = [{'role': 'user', 'content': 'What?'}, {'role': 'assistant', 'content': 'Red.'}] * 2


def qwen3():
    words = tokenizer('<|im_start|>', '<|im_end|>', eos_token='<|im_end|>')
    words.chat_template = QWEN3
    return words


def in_parts(messages):
    """Returns the messages with a list of parts as content, as processors take them."""
    return [message(plain['role'], plain['content']) for plain in messages]


def test_last_answer_with_its_thought():
    """The ids are the template's, and the labels are its reply to the generation prompt."""
    words = qwen3()
    sample = ConversationEncoder(words, train_on='last')(CONVERSATION)
    text = words.apply_chat_template(CONVERSATION, tokenize=False)
    assert 'A colour.' not in text
    assert sample['input_ids'][0].tolist() == words(text)['input_ids']
    prompt = words.apply_chat_template(CONVERSATION[:-1], tokenize=False, add_generation_prompt=True)
    reply = text.removeprefix(prompt).rstrip('\n')
    assert learned_text(sample, words) == reply == '<think>\nAnother\n</think>\n\nBlue.<|im_end|>'


def test_thought_of_last_answer_only():
    words = qwen3()
    sample = ConversationEncoder(words)([*PLAIN[:2], *CONVERSATION[2:]])
    thought = '<think>\nAnother\n</think>\n\nBlue.'
    assert learned_text(sample, words) == f'Red.<|im_end|>{thought}<|im_end|>'


def test_last_answer_without_thought():
    """The template writes an empty thought before the answer, which must carry no loss."""
    words = qwen3()
    conversation = [*CONVERSATION[:3], {'role': 'assistant', 'content': 'Blue.'}]
    sample = ConversationEncoder(words, train_on='last')(conversation)
    text = words.apply_chat_template(conversation, tokenize=False)
    assert sample['input_ids'][0].tolist() == words(text)['input_ids']
    assert learned_text(sample, words) == 'Blue.<|im_end|>'


def test_weight_0_of_a_record():
    words = qwen3()
    first_question, first_answer, *last_turns = CONVERSATION
    weighted = [first_question, {**first_answer, 'weight': 0}, *last_turns]
    expected = ConversationEncoder(words, train_on='last')(CONVERSATION)
    assert_same(ConversationEncoder(words)(weighted), expected)


def test_dropped_thoughts_are_refused_with_remedy():
    words = qwen3()
    message = r'must write the assistant turns as they are.*`dataset\.train_on=last`'
    with pytest.raises(ValueError, match=message):
        ConversationEncoder(words)(CONVERSATION)
    words.chat_template = QWEN3.replace('loop.index0 > ns.last_query and', 'false and')  # drops every thought
    for train_on in ('all', 'last'):
        with pytest.raises(ValueError, match=message):
            ConversationEncoder(words, train_on=train_on)(CONVERSATION)


def test_train_on_last_with_plain_template():
    processor = small()
    first_question, first_answer, last_question, _ = CONVERSATION
    last_answer = {'role': 'assistant', 'content': 'Blue.'}
    messages = [first_question, first_answer, last_question, last_answer]
    encode_last = ConversationEncoder(processor, train_on='last')
    sample = encode_last(messages)
    assert torch.equal(sample['input_ids'], ConversationEncoder(processor)(messages)['input_ids'])
    assert learned_text(sample, processor.tokenizer) == 'Blue.<|end|>'
    (unexpanded,) = encode_last.encode_unexpanded([in_parts(messages)])
    assert torch.equal(unexpanded['labels'], sample['labels'])
    with pytest.raises(ValueError, match="`train_on` must be 'all' or 'last', got: 'first'"):
        ConversationEncoder(processor, train_on='first')
    with pytest.raises(ValueError, match='last answer must carry loss'):
        encode_last([first_question, first_answer, last_question, {**last_answer, 'weight': 0}])


def test_options_change_identity_only_if_set(tmp_path):
    path = write_json(tmp_path, [{'conversations': turns('Hi?', 'Yes.')}])

    def identity_with(**options):
        return LlavaDataset(path, small(), **options).identity()

    default = identity_with()
    assert identity_with(train_on='all', add_end_token=True) == default
    train_on_last = identity_with(train_on='last')
    no_end_token = identity_with(add_end_token=False)
    assert len({default, train_on_last, no_end_token}) == 3


@pytest.fixture
def warnings(caplog):
    """Captures warnings. The one about an added token is printed once in a process, so it is allowed again."""
    chat_template._warn_of_added_token.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


def test_added_end_token_is_named_once(warnings):
    encoder = ConversationEncoder(llava())
    ConversationEncoder(llava())
    (line,) = warnings.messages
    assert '</s>' in line
    assert 'dataset.add_end_token=false' in line
    assert learned_text(encoder(PLAIN), encoder.tokenizer) == 'Red.</s>Red.</s>'


def test_text_stays_as_written(warnings):
    processor = llava()
    encode = ConversationEncoder(processor, add_end_token=False)
    sample = encode(PLAIN)
    text = processor.apply_chat_template(in_parts(PLAIN), tokenize=False)
    assert sample['input_ids'][0].tolist() == processor.tokenizer(text)['input_ids']
    assert learned_text(sample, processor.tokenizer) == 'Red.Red.'
    # The last character has several tokens, one for each byte.
    smile = encode([{'role': 'user', 'content': 'What?'}, {'role': 'assistant', 'content': 'Red 🙂'}])
    assert learned_text(smile, processor.tokenizer) == 'Red 🙂'
    assert not warnings.messages


def test_end_token_behind_last_turn_only(warnings):
    """The template ends the conversation, not each turn. The ends of other answers are added, unless told otherwise."""
    processor = llava()
    processor.chat_template += "{{ '</s>' }}"
    added = ConversationEncoder(processor)(PLAIN)
    assert len(warnings.messages) == 1
    as_written = ConversationEncoder(processor, add_end_token=False)(PLAIN)
    assert learned_text(added, processor.tokenizer).split() == ['Red.</s>Red.', '</s>']
    assert learned_text(as_written, processor.tokenizer).split() == ['Red.Red.', '</s>']


def test_answer_that_has_no_tokens():
    """The tokenizer removes all characters of one answer. The other conversations are encoded."""
    words = tokenizer('<s>', '</s>', bos_token='<s>', eos_token='</s>')
    words.backend_tokenizer.normalizer = Replace('\ufe0f', '')
    words.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    encoder = ConversationEncoder(words, add_end_token=False)
    removed = [user('What?'), assistant('\ufe0f')]
    kept, refused = encoder.encode_unexpanded([in_parts(PLAIN), removed])
    assert kept is not None
    assert refused is None
    with pytest.raises(ValueError, match='must have tokens'):
        encoder(removed)


def test_special_tokens_are_those_of_the_template():
    """A tokenizer that adds a first and a last token to texts adds none to a conversation."""
    words = tokenizer('<s>', '</s>', bos_token='<s>', eos_token='</s>')
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single='<s> $A </s>', special_tokens=[(token, words.convert_tokens_to_ids(token)) for token in ('<s>', '</s>')]
    )
    words.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}</s>{% endfor %}"
    )
    expected = words.apply_chat_template(PLAIN, return_dict=True)['input_ids']
    encoder = ConversationEncoder(words)
    sample = encoder(PLAIN)
    assert sample['input_ids'][0].tolist() == expected
    (unexpanded,) = encoder.encode_unexpanded([in_parts(PLAIN)])
    assert torch.equal(unexpanded['input_ids'], sample['input_ids'])
    assert torch.equal(unexpanded['labels'], sample['labels'])
    assert learned_text(sample, words).count('Red.</s>') == 2


def test_template_that_writes_the_date(monkeypatch):
    """Midnight comes after the first of the renderings that are compared."""
    encoder = ConversationEncoder(qwen3())
    apply = encoder.template.apply
    days = itertools.chain(['Monday'], itertools.repeat('Tuesday'))
    monkeypatch.setattr(encoder.template, 'apply', lambda messages, **options: next(days) + apply(messages, **options))
    assert encoder.render(in_parts(PLAIN)).text.startswith('Tuesday')


def test_line_break_that_is_a_token():
    """Gemma's tokenizer has added tokens of line breaks. They are no part of an ending."""
    words = tokenizer('<|im_start|>', '<|im_end|>', eos_token='<|im_end|>')
    words.add_tokens([AddedToken('\n', normalized=False)])
    words.chat_template = QWEN
    sample = ConversationEncoder(words)(PLAIN)
    assert learned_text(sample, words) == 'Red.<|im_end|>Red.<|im_end|>'


def test_token_that_begins_turns_ends_none(warnings):
    words = tokenizer('<|start|>', '<|end|>', eos_token='<|end|>')
    words.chat_template = (
        "{% for message in messages %}<|start|>{{ message['role'] }}:{{ message['content'] }}{% endfor %}<|end|>"
    )
    assert learned_text(ConversationEncoder(words)(PLAIN), words) == 'Red.<|end|>Red.<|end|>'
    assert len(warnings.messages) == 1


@pytest.mark.parametrize(
    ('turn', 'start', 'last_end'),
    [
        ('<|end|>{}:Q', '', '<|end|>'),  # between all turns, also before the first
        ('{}:Q<|end|>', '<|start|><|end|>', ''),  # an empty system turn (EXAONE 4)
    ],
)
def test_token_that_also_begins_ends_answers(turn, start, last_end, warnings):
    """The ending token is not the `eos_token`, and the conversation begins with it."""
    words = tokenizer('<|start|>', '<|end|>', '</s>', eos_token='</s>')
    written_turn = turn.format('{{ m.role }}').replace('Q', '{{ m.content }}')
    words.chat_template = f'{start}{{% for m in messages %}}{written_turn}{{% endfor %}}{last_end}'
    assert learned_text(ConversationEncoder(words)(PLAIN), words) == 'Red.<|end|>Red.<|end|>'
    assert not warnings.messages


def test_last_answer_that_ends_like_questions():
    """Questions and the last answer have one ending, and earlier answers have another."""
    words = tokenizer('<|end|>', '<|next|>', '</s>', eos_token='</s>')
    words.chat_template = (
        '{% for m in messages %}{{ m.role }}:{{ m.content }}'
        "{% if m.role == 'user' or loop.last %}<|end|>{% else %}<|next|>{% endif %}{% endfor %}"
    )
    assert ConversationEncoder(words).template.end_token == '<|end|>'


@pytest.mark.parametrize(
    'default', ['', '<|start|>system:Be brief.<|end|>', '<|start|>system:Be brief.<|end|>No tools.<|end|>']
)
def test_last_answer_that_is_left_open(default, warnings):
    """The last answer gets the ending of the earlier ones, and no answer gets the `eos_token` as a second ending."""
    words = tokenizer('<|start|>', '<|end|>', '</s>', eos_token='</s>')
    words.chat_template = (
        default + '{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}'
        '{% if not loop.last %}<|end|>{% endif %}{% endfor %}'
    )
    sample = ConversationEncoder(words)(PLAIN)
    text = words.apply_chat_template(PLAIN, tokenize=False)
    assert words.decode(sample['input_ids'][0]) == f'{text}<|end|>'
    assert learned_text(sample, words) == 'Red.<|end|>Red.<|end|>'
    assert len(warnings.messages) == 1


@pytest.mark.parametrize('default', ['', '<s>', '<s>Be brief.'])
def test_token_between_all_turns_that_begins_them(default):
    """The template writes no ending. `<|turn|>` also stands before the first question, so it ends no answer."""
    words = tokenizer('<s>', '<|turn|>', '</s>', eos_token='</s>')
    words.chat_template = (
        f'{default}{{% for m in messages %}}<|turn|>{{{{ m.role }}}}:{{{{ m.content }}}}{{% endfor %}}'
    )
    assert learned_text(ConversationEncoder(words)(PLAIN), words) == 'Red.</s>Red.</s>'


def test_first_of_two_tokens_that_begin_turns():
    """The template writes no ending, but some text before the first question."""
    words = tokenizer('<s>', '<|turn|>', '<|text|>', '</s>', eos_token='</s>')
    words.chat_template = '<s>Be brief.{% for m in messages %}<|turn|>{{ m.role }}<|text|>{{ m.content }}{% endfor %}'
    assert learned_text(ConversationEncoder(words)(PLAIN), words) == 'Red.</s>Red.</s>'


@pytest.mark.parametrize('question_end', ['<|end|>', '', '<|next|>'])
@pytest.mark.parametrize('ending', ['<|end|>', ''])
@pytest.mark.parametrize('turn', ['<|start|>{}:', '<|{}|>'])
def test_prompt_that_is_always_written(turn, ending, question_end):
    """The template ends every conversation with a generation prompt (the first one of Llama 3). It is not learned."""
    words = tokenizer('<|start|>', '<|assistant|>', '<|end|>', '<|next|>', eos_token='<|end|>')
    turn_of_message = turn.format('{{ m.role }}')
    prompt = turn.format('assistant')
    end_of_turn = f"{{% if m.role == 'user' %}}{question_end}{{% else %}}{ending}{{% endif %}}"
    words.chat_template = (
        f'{{% for m in messages %}}{turn_of_message}{{{{ m.content }}}}{end_of_turn}{{% endfor %}}{prompt}'
    )
    sample = ConversationEncoder(words)(PLAIN)
    assert learned_text(sample, words) == 'Red.<|end|>Red.<|end|>'
    assert words.decode(sample['input_ids'][0]).endswith(f'Red.<|end|>{prompt}')


@pytest.mark.parametrize('make', [small, qwen2_vl])
def test_template_with_ends_says_nothing(make, warnings):
    ConversationEncoder(make())
    assert not warnings.messages


# Aya Vision ends an answer with two tokens. gpt-oss ends the last answer with another token than all other turns.
TWO_ENDING_TOKENS = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}: {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end_response|><|end_turn|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end_turn|>{% endif %}{% endfor %}"
)
OTHER_ENDING_TOKEN_AT_LAST = (
    "{% for message in messages %}<|start|>{{ message['role'] }}<|message|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize('num_turns', [2, 3, 4])
@pytest.mark.parametrize('template', [TWO_ENDING_TOKENS, OTHER_ENDING_TOKEN_AT_LAST])
def test_answers_with_several_ending_tokens(template, num_turns, warnings):
    """The ids are the template's, and the labels are what its own `generation` tags mark."""
    words = tokenizer(*re.findall(r'<\|\w+\|>', template), eos_token='<|end|>')
    words.chat_template = template
    expected = words.apply_chat_template(
        PLAIN[:num_turns], return_dict=True, return_assistant_tokens_mask=True, return_tensors='pt'
    )
    sample = ConversationEncoder(words)(PLAIN[:num_turns])
    assert torch.equal(sample['input_ids'], expected['input_ids'])
    assert torch.equal(sample['labels'] != IGNORE_INDEX, expected['assistant_masks'].bool())
    assert not warnings.messages


def test_each_ending_token_is_a_control_token():
    words = tokenizer(*re.findall(r'<\|\w+\|>', TWO_ENDING_TOKENS), eos_token='<|end|>')
    words.chat_template = TWO_ENDING_TOKENS

    template = ConversationEncoder(words).template

    assert template.end_token == '<|end_response|><|end_turn|>'
    assert template.control_tokens == {'<|turn|>', '<|end_response|>', '<|end_turn|>'}


TOOL_TURNS = [
    {'from': 'human', 'value': 'Look up a red square.'},
    {'from': 'gpt', 'value': 'Searching.'},
    {'from': 'observation', 'value': '<image>\nfound'},
    {'from': 'gpt', 'value': 'A red square.'},
]


def write_tool_record(folder):
    Image.new('RGB', (24, 20), (255, 0, 0)).save(folder / 'red.png')
    return write_json(folder, [{'id': 'a', 'image': 'red.png', 'conversations': TOOL_TURNS}])


@pytest.mark.parametrize('make', [small, qwen2_vl])
def test_image_of_a_tool_is_read(make, tmp_path):
    """The sample is the processor's own encoding of the template's text."""
    processor = make()
    sample = LlavaDataset(write_tool_record(tmp_path), processor)[0]
    messages = [
        user('Look up a red square.'),
        assistant('Searching.'),
        message('tool', IMAGE, 'found'),
        assistant('A red square.'),
    ]
    text = processor.apply_chat_template(messages, tokenize=False)
    expected = processor(text=[text], images=[Image.open(tmp_path / 'red.png')], return_tensors='pt')
    assert sample['num_images'] == [1]
    assert torch.equal(sample['input_ids'], expected['input_ids'])
    assert torch.equal(sample['pixel_values'], expected['pixel_values'])


def test_dropped_images_of_tools_are_refused(tmp_path):
    processor = qwen2_vl()
    if_image = '{% if content["type"] == "image" %}'
    if_image_of_user = '{% if content["type"] == "image" and message["role"] == "user" %}'
    assert if_image in QWEN
    processor.chat_template = QWEN.replace(if_image, if_image_of_user)
    path = write_tool_record(tmp_path)
    message = r'"a" .*has images in a turn of the tool, but the chat template writes no'
    with pytest.raises(BadSampleError, match=message):
        LlavaDataset(path, processor)


# Parts in turns of the user, as Pixtral and Llama 3.2 Vision write them.
PARTS_OF_USER = (
    "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
)


@pytest.mark.parametrize('string', ["message['content'] | trim", "'' + message['content']"])
@pytest.mark.parametrize('role', ['system', 'assistant'])
def test_roles_that_take_only_strings(role, string):
    """The template writes a list of parts as Python prints it, or raises. The user's turns need it for images."""
    processor = small()
    processor.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == '" + role + "' %}"
        '{{ ' + string + ' }}{% else %}' + PARTS_OF_USER + '{% endif %}<|end|>{% endfor %}'
    )
    conversation = [message('system', "It's 'brief'."), user(IMAGE, 'What?'), assistant("It's\nred.")]
    sample = ConversationEncoder(processor)(conversation, [Image.new('RGB', (8, 8))])
    text = processor.tokenizer.decode(sample['input_ids'][0]).replace('<image>', '')
    assert text == "<|system|>It's 'brief'.<|end|><|user|>What?<|end|><|assistant|>It's\nred.<|end|>"
    assert learned_text(sample, processor.tokenizer) == "It's\nred.<|end|>"


def test_trial_asks_for_no_prompt(monkeypatch):
    """A processor of a user may write a prompt by default, and its template may refuse one after an answer."""
    processor = small()
    processor.chat_template = (
        "{% if add_generation_prompt and messages[-1]['role'] == 'assistant' %}{{ raise_exception('open') }}{% endif %}"
        "{% for message in messages %}<|{{ message['role'] }}|>" + PARTS_OF_USER + '<|end|>{% endfor %}'
    )
    apply = processor.apply_chat_template

    def apply_with_prompt(messages, *, add_generation_prompt=True, **options):
        return apply(messages, add_generation_prompt=add_generation_prompt, **options)

    monkeypatch.setattr(processor, 'apply_chat_template', apply_with_prompt)
    answer = {'role': 'assistant', 'content': [{'type': 'text', 'text': text} for text in ('It is ', 'red.')]}
    encoder = ConversationEncoder(processor)
    assert learned_text(encoder([user('What?'), answer]), processor.tokenizer) == 'It is red.<|end|>'
