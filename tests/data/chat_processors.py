# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Real processors of several families with the chat templates of their checkpoints, around a small BPE tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.data.processor import small_llava_processor, train_tokenizer
from tests.support.family_processors import build_processor

TEXTS = ['What is this? A red square. And now? Blue, I think: <b>7</b> of them.'] * 4

# llava-hf/llava-1.5-7b-hf: images first, no ending token, with {% generation %}.
VICUNA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{# Render all images first #}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\\n' }}{% endfor %}{# Render all text next #}{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# llava-hf/llava-v1.6-mistral-7b-hf.
MISTRAL = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ '<<SYS>>\\n' + message['content'][0]['text']"
    " + '\\n<</SYS>>\\n\\n' }}{% elif message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}"
    "{{' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'][0]['text'] + '</s> ' }}"
    '{% endif %}{% endfor %}'
)
# Qwen/Qwen2-VL-7B-Instruct: adds a system turn; white space behind the ending token.
QWEN = (
    '{% for message in messages %}{% if loop.first and message["role"] != "system" %}<|im_start|>system\n'
    'You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message["role"] }}\n'
    '{% if message["content"] is string %}{{ message["content"] }}<|im_end|>\n{% else %}'
    '{% for content in message["content"] %}{% if content["type"] == "image" %}'
    '<|vision_start|><|image_pad|><|vision_end|>{% elif "text" in content %}{{ content["text"] }}{% endif %}'
    '{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
# HuggingFaceTB/SmolVLM-Instruct: writes the first token itself.
SMOLVLM = (
    '<|im_start|>{% for message in messages %}{{message["role"] | capitalize}}'
    '{% if message["content"][0]["type"] == "image" %}{{":"}}{% else %}{{": "}}{% endif %}'
    '{% for line in message["content"] %}{% if line["type"] == "text" %}{{line["text"]}}'
    '{% elif line["type"] == "image" %}{{ "<image>" }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}'
    '{% if add_generation_prompt %}{{ "Assistant:" }}{% endif %}'
)


@cache
def _tokenizer_json() -> str:
    return train_tokenizer(TEXTS, vocab_size=512).backend_tokenizer.to_str()


def tokenizer(*special: str, class_name: str = '', **role_tokens: Any) -> Any:
    """Returns a byte-level BPE tokenizer with further special tokens.

    Args:
        special: Tokens that are added in addition to ``<image>``.
        class_name: The class that the processor insists on up to transformers 4.
        role_tokens: Tokens that have a role, such as ``eos_token``.
    """
    tokenizer_class = transformers.PreTrainedTokenizerFast
    if class_name and transformers.__version__.startswith('4.'):
        tokenizer_class = getattr(transformers, class_name)
    options = {'pad_token': '<pad>', 'unk_token': '<unk>', 'padding_side': 'right', **role_tokens}
    wrapped = tokenizer_class(tokenizer_object=Tokenizer.from_str(_tokenizer_json()), **options)
    wrapped.add_special_tokens({'additional_special_tokens': ['<image>', *special]})
    return wrapped


def chat_processor(name: str, template: str, make_tokenizer: Callable[..., Any], **options: Any) -> Any:
    """Returns the processor of a family with this chat template."""
    processor = build_processor(name, make_tokenizer, **options)
    processor.chat_template = template
    return processor


LLAMA_TOKENIZER = partial(tokenizer, '<s>', '</s>', bos_token='<s>', eos_token='</s>')
QWEN_TOKENIZER = partial(tokenizer, '<|im_start|>', '<|im_end|>', eos_token='<|im_end|>')


def small() -> Any:
    """Returns the processor of a small LLaVA: images of 16 x 16 pixels, and a tokenizer trained on TEXTS."""
    return small_llava_processor(train_tokenizer(TEXTS, vocab_size=512), image_size=16, patch_size=8)


def llava() -> Any:
    processor = small_llava_processor(LLAMA_TOKENIZER(), image_size=16, patch_size=8)
    processor.chat_template = VICUNA
    return processor


def llava_next() -> Any:
    return chat_processor('llava_next', MISTRAL, LLAMA_TOKENIZER)


def llava_onevision() -> Any:
    template = QWEN.replace('<|vision_start|><|image_pad|><|vision_end|>', '<image>')
    return chat_processor('llava_onevision', template, QWEN_TOKENIZER)


def qwen2_vl(name: str = 'qwen2_vl') -> Any:
    return chat_processor(name, QWEN, QWEN_TOKENIZER)


def idefics3() -> Any:
    make_tokenizer = partial(tokenizer, '<|im_start|>', bos_token='<|im_start|>', eos_token='<end_of_utterance>')
    return chat_processor('idefics3', SMOLVLM, make_tokenizer)


# Processors of query transformers write the placeholders themselves, so the template writes nothing for an image.
# InstructBLIP also gives the text to a second tokenizer.
WITHOUT_IMAGES = VICUNA.replace("{{ '<image>\\n' }}", '')


def blip2(**options: Any) -> Any:
    return chat_processor('blip2', WITHOUT_IMAGES, LLAMA_TOKENIZER, **options)


def instructblip(name: str = 'instructblip', **options: Any) -> Any:
    return chat_processor(name, WITHOUT_IMAGES, LLAMA_TOKENIZER, qformer_tokenizer=tokenizer(), **options)


def instructblipvideo() -> Any:
    return instructblip('instructblipvideo')


# Processor and the token that ends an answer.
PROCESSORS = {
    'small': (small, '<|end|>'),
    'llava': (llava, '</s>'),
    'llava_next': (llava_next, '</s>'),
    'llava_onevision': (llava_onevision, '<|im_end|>'),
    'qwen2_vl': (qwen2_vl, '<|im_end|>'),
    'idefics3': (idefics3, '<end_of_utterance>'),
}


def learned_text(sample: dict[str, Any], tokenizer: Any) -> str:
    """Decodes the labels of a sample that carry loss."""
    labels = sample['labels'][0]
    return tokenizer.decode(labels[labels != IGNORE_INDEX])


def assert_same(sample: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares two samples, entry by entry."""
    assert sample.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert sample[key].dtype == value.dtype, key
            assert torch.equal(sample[key], value), key
        else:
            assert sample[key] == value, key
