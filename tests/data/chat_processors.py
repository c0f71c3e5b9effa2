# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Real processors of several families with the chat templates of their checkpoints, around a small BPE tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from composer_tokacc.data.processor import small_llava_processor, train_tokenizer

TEXTS = ['What is this? A red square. And now? Blue, I think: <b>7</b> of them.'] * 4
MEAN_STD = {'image_mean': [0.5] * 3, 'image_std': [0.5] * 3}
SQUARE = {'height': 16, 'width': 16}
PINPOINTS = [[16, 32], [32, 16], [32, 32]]

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
# Qwen/Qwen2-VL-7B-Instruct: a system turn of its own; white space behind the ending token.
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
def _trained() -> str:
    return train_tokenizer(TEXTS, vocab_size=512).backend_tokenizer.to_str()


def tokenizer(*special: str, class_name: str = 'PreTrainedTokenizerFast', **named: str) -> Any:
    """A byte-level BPE tokenizer with further special tokens, of the class that transformers 4 insists on."""
    is_named = int(transformers.__version__.split('.')[0]) < 5
    tokenizer_class = getattr(transformers, class_name if is_named else 'PreTrainedTokenizerFast')
    wrapped = tokenizer_class(
        tokenizer_object=Tokenizer.from_str(_trained()),
        pad_token='<pad>',
        unk_token='<unk>',
        padding_side='right',
        **named,
    )
    wrapped.add_special_tokens({'additional_special_tokens': ['<image>', *special]})
    return wrapped


def _video(name: str) -> dict[str, Any]:
    cls = getattr(transformers, name, None)
    return {} if cls is None else {'video_processor': cls()}


def _square_image_processor(name: str) -> Any:
    return getattr(transformers, name)(size=SQUARE, crop_size=SQUARE, do_center_crop=False, **MEAN_STD)


def small() -> Any:
    return small_llava_processor(train_tokenizer(TEXTS, vocab_size=512), image_size=16, patch_size=8)


def llava() -> Any:
    processor = small_llava_processor(
        tokenizer('<s>', '</s>', bos_token='<s>', eos_token='</s>'), image_size=16, patch_size=8
    )
    processor.chat_template = VICUNA
    return processor


def llava_next() -> Any:
    return transformers.LlavaNextProcessor(
        image_processor=transformers.LlavaNextImageProcessor(
            size={'shortest_edge': 16}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS, **MEAN_STD
        ),
        tokenizer=tokenizer('<s>', '</s>', bos_token='<s>', eos_token='</s>'),
        patch_size=4,
        vision_feature_select_strategy='default',
        num_additional_image_tokens=1,
        chat_template=MISTRAL,
    )


def llava_onevision() -> Any:
    return transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(
            size=SQUARE, image_grid_pinpoints=PINPOINTS, **MEAN_STD
        ),
        tokenizer=tokenizer('<video>', '<|im_start|>', '<|im_end|>', eos_token='<|im_end|>'),
        num_image_tokens=16,
        vision_feature_select_strategy='full',
        chat_template=QWEN.replace('<|vision_start|><|image_pad|><|vision_end|>', '<image>'),
        **_video('LlavaOnevisionVideoProcessor'),
    )


def qwen2_vl() -> Any:
    special = ('<|image_pad|>', '<|video_pad|>', '<|vision_start|>', '<|vision_end|>', '<|im_start|>', '<|im_end|>')
    return transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=512, **MEAN_STD
        ),
        tokenizer=tokenizer(*special, class_name='Qwen2TokenizerFast', eos_token='<|im_end|>'),
        chat_template=QWEN,
        **_video('Qwen2VLVideoProcessor'),
    )


def idefics3() -> Any:
    tiles = [f'<row_{row}_col_{col}>' for row in range(1, 4) for col in range(1, 4)]
    special = ('<fake_token_around_image>', '<global-img>', '<end_of_utterance>', '<|im_start|>', *tiles)
    return transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessor(
            size={'longest_edge': 32}, max_image_size={'longest_edge': 16}, **MEAN_STD
        ),
        tokenizer=tokenizer(*special, bos_token='<|im_start|>', eos_token='<end_of_utterance>'),
        image_seq_len=4,
        chat_template=SMOLVLM,
    )


# Query transformers: their processors write the placeholders themselves, so the template writes nothing for an image.


def _without_images(template: str) -> str:
    return template.replace("{{ '<image>\\n' }}", '')


def blip2(**options: Any) -> Any:
    processor = transformers.Blip2Processor(
        image_processor=transformers.BlipImageProcessor(size=SQUARE, **MEAN_STD),
        tokenizer=tokenizer('<s>', '</s>', bos_token='<s>', eos_token='</s>'),
        **{'num_query_tokens': 4, **options},
    )
    processor.chat_template = _without_images(VICUNA)
    return processor


def instructblip(**options: Any) -> Any:
    return _instructed('InstructBlipProcessor', {'image_processor': transformers.BlipImageProcessor}, options)


def instructblipvideo(**options: Any) -> Any:
    video_processor = {'video_processor': transformers.InstructBlipVideoVideoProcessor}
    return _instructed('InstructBlipVideoProcessor', video_processor, options)


def _instructed(name: str, media: dict[str, Any], options: dict[str, Any]) -> Any:
    """The text goes to a second tokenizer as well."""
    processor = getattr(transformers, name)(
        **{key: media_class(size=SQUARE, **MEAN_STD) for key, media_class in media.items()},
        tokenizer=tokenizer('<s>', '</s>', bos_token='<s>', eos_token='</s>'),
        qformer_tokenizer=tokenizer(),
        **{'num_query_tokens': 4, **options},
    )
    processor.chat_template = _without_images(VICUNA)
    return processor


# Processor and the token that ends an answer.
PROCESSORS = {
    'small': (small, '<|end|>'),
    'llava': (llava, '</s>'),
    'llava_next': (llava_next, '</s>'),
    'llava_onevision': (llava_onevision, '<|im_end|>'),
    'qwen2_vl': (qwen2_vl, '<|im_end|>'),
    'idefics3': (idefics3, '<end_of_utterance>'),
}


def assert_same(sample: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sample.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(sample[key], value) if isinstance(value, torch.Tensor) else sample[key] == value, key
