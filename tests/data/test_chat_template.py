# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Templates that change answers, write no end, or write media only in some turns."""

from __future__ import annotations

import logging

import pytest
import torch
from PIL import Image

from composer_tokacc.data import BadSampleError, ConversationEncoder, LlavaDataset, chat_template
from tests.data.chat_processors import QWEN, llava, qwen2_vl, small, tokenizer
from tests.support.conversations import turns, write_json

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
THOUGHT_1, THOUGHT_2 = '<think>\nA colour.\n</think>\n\nRed.', '<think>Another</think>Blue.'
CONVERSATION = [
    {'role': 'user', 'content': 'What is blood?'},
    {'role': 'assistant', 'content': THOUGHT_1},
    {'role': 'user', 'content': 'And the sky?'},
    {'role': 'assistant', 'content': THOUGHT_2},
]


def qwen3():
    words = tokenizer('<|im_start|>', '<|im_end|>', eos_token='<|im_end|>')
    words.chat_template = QWEN3
    return words


def learned(sample, words):
    labels = sample['labels'][0]
    return words.decode(labels[labels != -100])


def test_dropped_thoughts_are_refused_with_remedy():
    with pytest.raises(ValueError, match=r'must write the assistant turns as they are.*`dataset\.train_on=last`'):
        ConversationEncoder(qwen3())(CONVERSATION)


def test_last_answer_with_its_thought():
    """The ids are those of the template, and the labels those of the reply to its generation prompt."""
    words = qwen3()
    sample = ConversationEncoder(words, train_on='last')(CONVERSATION)
    text = words.apply_chat_template(CONVERSATION, tokenize=False)
    assert 'A colour.' not in text
    assert sample['input_ids'][0].tolist() == words(text)['input_ids']
    prompt = words.apply_chat_template(CONVERSATION[:-1], tokenize=False, add_generation_prompt=True)
    reply = text.removeprefix(prompt).rstrip('\n')
    assert learned(sample, words) == reply == '<think>\nAnother\n</think>\n\nBlue.<|im_end|>'


def test_last_answer_without_thought():
    """It follows the empty thought that the template writes."""
    words = qwen3()
    conversation = [*CONVERSATION[:3], {'role': 'assistant', 'content': 'Blue.'}]
    sample = ConversationEncoder(words, train_on='last')(conversation)
    text = words.apply_chat_template(conversation, tokenize=False)
    assert sample['input_ids'][0].tolist() == words(text)['input_ids']
    assert learned(sample, words) == 'Blue.<|im_end|>'


def test_weight_0_of_a_record():
    words = qwen3()
    weighted = [CONVERSATION[0], {**CONVERSATION[1], 'weight': 0}, *CONVERSATION[2:]]
    expected = ConversationEncoder(words, train_on='last')(CONVERSATION)
    sample = ConversationEncoder(words)(weighted)
    assert torch.equal(sample['input_ids'], expected['input_ids'])
    assert torch.equal(sample['labels'], expected['labels'])


def test_template_that_drops_every_thought():
    words = qwen3()
    words.chat_template = QWEN3.replace('loop.index0 > ns.last_query and', 'false and')
    for train_on in ('all', 'last'):
        with pytest.raises(ValueError, match='must write the assistant turns as they are'):
            ConversationEncoder(words, train_on=train_on)(CONVERSATION)


def test_train_on_last_with_plain_template():
    processor = small()
    every, last = (ConversationEncoder(processor, train_on=option) for option in ('all', 'last'))
    plain = [{**message, 'content': message['content'].replace('<think>', '')} for message in CONVERSATION]
    assert torch.equal(every(plain)['input_ids'], last(plain)['input_ids'])
    assert learned(last(plain), processor.tokenizer) == 'Another</think>Blue.<|end|>'
    (unexpanded,) = last.encode_unexpanded([[dict(message, content=parts(message)) for message in plain]])
    assert torch.equal(unexpanded['labels'], last(plain)['labels'])
    with pytest.raises(ValueError, match='last answer must carry loss'):
        last([*plain[:3], {**plain[3], 'weight': 0}])
    with pytest.raises(ValueError, match="`train_on` must be 'all' or 'last', got: 'first'"):
        ConversationEncoder(processor, train_on='first')


def parts(message):
    return [{'type': 'text', 'text': message['content']}]


def test_options_change_identity_only_if_set(tmp_path):
    path = write_json(tmp_path, [{'conversations': turns('Hi?', 'Yes.')}])
    options = [{}, {'train_on': 'all', 'add_end_token': True}, {'train_on': 'last'}, {'add_end_token': False}]
    identities = [LlavaDataset(path, small(), **option).identity() for option in options]
    assert identities[0] == identities[1]
    assert len(set(identities)) == 3


PLAIN = [{**message, 'content': 'Red.' if index % 2 else 'What?'} for index, message in enumerate(CONVERSATION)]


def test_added_end_token_is_named_once(caplog):
    chat_template._warn_of_added_token.cache_clear()
    with caplog.at_level(logging.WARNING):
        encoder = ConversationEncoder(llava())
        ConversationEncoder(llava())
    (line,) = caplog.messages
    assert '</s>' in line
    assert 'dataset.add_end_token=false' in line
    assert learned(encoder(PLAIN), encoder.tokenizer) == 'Red.</s>Red.</s>'


def test_text_stays_as_written(caplog):
    chat_template._warn_of_added_token.cache_clear()
    processor = llava()
    encoder = ConversationEncoder(processor, add_end_token=False)
    written = [{**message, 'content': parts(message)} for message in PLAIN]
    text = processor.apply_chat_template(written, tokenize=False)
    assert encoder(PLAIN)['input_ids'][0].tolist() == processor.tokenizer(text)['input_ids']
    assert learned(encoder(PLAIN), encoder.tokenizer) == 'Red.Red.'
    assert not caplog.messages


def test_end_token_behind_last_turn_only(caplog):
    """A template that ends a conversation, not each turn: the token is trained where the template writes it."""
    chat_template._warn_of_added_token.cache_clear()
    processor = llava()
    processor.chat_template += "{{ '</s>' }}"
    with caplog.at_level(logging.WARNING):
        added = ConversationEncoder(processor)
    assert len(caplog.messages) == 1
    as_written = ConversationEncoder(processor, add_end_token=False)
    assert learned(added(PLAIN), processor.tokenizer).split() == ['Red.</s>Red.', '</s>']
    assert learned(as_written(PLAIN), processor.tokenizer).split() == ['Red.Red.', '</s>']


@pytest.mark.parametrize('make', [small, qwen2_vl])
def test_template_with_ends_says_nothing(make, caplog):
    chat_template._warn_of_added_token.cache_clear()
    ConversationEncoder(make())
    assert not caplog.messages


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
    """It is encoded as the processor encodes the template's own text."""
    processor = make()
    sample = LlavaDataset(write_tool_record(tmp_path), processor)[0]
    texts = ('Look up a red square.', 'Searching.', 'found', 'A red square.')
    roles = ('user', 'assistant', 'tool', 'assistant')
    messages = [
        {'role': role, 'content': [{'type': 'text', 'text': text}]} for role, text in zip(roles, texts, strict=True)
    ]
    messages[2]['content'].insert(0, {'type': 'image'})
    text = processor.apply_chat_template(messages, tokenize=False)
    expected = processor(text=[text], images=[Image.open(tmp_path / 'red.png')], return_tensors='pt')
    assert sample['num_images'] == [1]
    assert torch.equal(sample['input_ids'], expected['input_ids'])
    assert torch.equal(sample['pixel_values'], expected['pixel_values'])


def test_dropped_images_of_tools_are_refused(tmp_path):
    processor = qwen2_vl()
    image = '{% if content["type"] == "image" %}'
    assert image in QWEN
    processor.chat_template = QWEN.replace(image, '{% if content["type"] == "image" and message["role"] == "user" %}')
    with pytest.raises(
        BadSampleError, match=r'"a" .*has images in the turn of a tool, but the chat template writes no'
    ):
        LlavaDataset(write_tool_record(tmp_path), processor)
