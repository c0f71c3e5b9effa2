# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The families' own processors around a word tokenizer and image processors of a few pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ['ENCODERS', 'WORDS', 'SampleEncoder']

WORDS = tuple(f'{first}{second}' for first in 'bdfgklmnprst' for second in 'aeiou')
IMAGE_SIZE, PATCH_SIZE = 16, 4
# LLaVA-NeXT and OneVision tile an image into one of these, besides the whole image.
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
_MEAN_STD = {'image_mean': [0.5] * 3, 'image_std': [0.5] * 3}
_SQUARE = {'height': IMAGE_SIZE, 'width': IMAGE_SIZE}


class SampleEncoder:
    """Turns words and images into what a processor returns for one sample, plus ``labels``.

    Args:
        processor: The family's processor, or a tokenizer.
        image_text: What stands for an image in the text; None: a text model.
        text_processor: What encodes samples without images, where the processor refuses them.
        nested_images: Whether the processor wants a list of images for each text.
    """

    def __init__(
        self,
        processor: Any,
        *,
        image_text: str | None = None,
        text_processor: Any = None,
        nested_images: bool = False,
    ) -> None:
        self.processor = processor
        self.tokenizer: PreTrainedTokenizerFast = getattr(processor, 'tokenizer', processor)
        self.image_text = image_text
        self.text_processor = text_processor or processor
        self.nested_images = nested_images

    @property
    def takes_images(self) -> bool:
        """Whether the family has images at all."""
        return self.image_text is not None

    @property
    def pad_token_id(self) -> int:
        """Id of the padding token."""
        return self.tokenizer.convert_tokens_to_ids('<pad>')

    def token_id(self, token: str) -> int:
        """Id of a token."""
        return self.tokenizer.convert_tokens_to_ids(token)

    def __call__(
        self, gaps: Sequence[Sequence[str]], answer: Sequence[str], images: Sequence[Image.Image]
    ) -> dict[str, Any]:
        """Encodes ``gap image gap image ... answer``; the answer's tokens carry the loss."""
        text = ' '.join(gaps[0])
        for gap in gaps[1:]:
            text += f'{self.image_text}{" ".join(gap)}'
        text = f'{text} {" ".join(answer)}'
        if images:
            nested = [list(images)] if self.nested_images else list(images)
            encoded = self.processor(images=nested, text=[text], return_tensors='pt')
        else:
            encoded = self.text_processor(text=[text], return_tensors='pt')
        row = dict(encoded)
        return {**row, 'labels': _answer_labels(row['input_ids'], len(answer))}


def _answer_labels(input_ids: torch.Tensor, num_answer_tokens: int) -> torch.Tensor:
    labels = torch.full_like(input_ids, -100)
    labels[:, -num_answer_tokens:] = input_ids[:, -num_answer_tokens:]
    return labels


def word_tokenizer(*special: str, class_name: str = '', **named: str) -> PreTrainedTokenizerFast:
    """One token a word.

    Args:
        special: Further special tokens.
        class_name: The class that the family's processor insists on up to transformers 4.
        named: Special tokens that become attributes of the tokenizer (``image_token``).
    """
    special = ('<pad>', '<unk>', '<s>', '</s>', *special, *named.values())
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*special, *WORDS]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    extra = {'extra_special_tokens': named} if named else {}
    is_named = class_name and int(transformers.__version__.split('.')[0]) < 5
    tokenizer_class = getattr(transformers, class_name) if is_named else PreTrainedTokenizerFast
    wrapped = tokenizer_class(
        tokenizer_object=tokenizer, pad_token='<pad>', unk_token='<unk>', bos_token='<s>', eos_token='</s>', **extra
    )
    for name, token in named.items():
        assert getattr(wrapped, name) == token
        assert getattr(wrapped, f'{name}_id') == vocab[token]
    return wrapped


def _square_processor(name: str) -> Any:
    return getattr(transformers, name)(size=_SQUARE, crop_size=_SQUARE, do_center_crop=False, **_MEAN_STD)


def _video_processor(name: str) -> dict[str, Any]:
    """Processors want one since 4.53; no sample has a video."""
    cls = getattr(transformers, name, None)
    return {} if cls is None else {'video_processor': cls()}


def _llama() -> SampleEncoder:
    return SampleEncoder(word_tokenizer())


def _llava() -> SampleEncoder:
    processor = transformers.LlavaProcessor(
        image_processor=_square_processor('CLIPImageProcessor'),
        tokenizer=word_tokenizer('<image>'),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy='default',
        num_additional_image_tokens=1,
    )
    return SampleEncoder(processor, image_text='<image>')


def _llava_next() -> SampleEncoder:
    image_processor = transformers.LlavaNextImageProcessor(
        size={'shortest_edge': IMAGE_SIZE}, crop_size=_SQUARE, image_grid_pinpoints=PINPOINTS, **_MEAN_STD
    )
    processor = transformers.LlavaNextProcessor(
        image_processor=image_processor,
        tokenizer=word_tokenizer('<image>'),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy='default',
        num_additional_image_tokens=1,
    )
    return SampleEncoder(processor, image_text='<image>')


def _llava_onevision() -> SampleEncoder:
    processor = transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(
            size=_SQUARE, image_grid_pinpoints=PINPOINTS, **_MEAN_STD
        ),
        tokenizer=word_tokenizer('<image>', '<video>'),
        num_image_tokens=(IMAGE_SIZE // PATCH_SIZE) ** 2,
        vision_feature_select_strategy='full',
        **_video_processor('LlavaOnevisionVideoProcessor'),
    )
    return SampleEncoder(processor, image_text='<image>', nested_images=True)


def _qwen(name: str) -> SampleEncoder:
    image_processor = transformers.Qwen2VLImageProcessor(
        patch_size=PATCH_SIZE, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=512, **_MEAN_STD
    )
    special = ('<|image_pad|>', '<|video_pad|>', '<|vision_start|>', '<|vision_end|>')
    tokenizer = word_tokenizer(*special, class_name='Qwen2TokenizerFast')
    processor = getattr(transformers, name)(
        image_processor=image_processor, tokenizer=tokenizer, **_video_processor('Qwen2VLVideoProcessor')
    )
    return SampleEncoder(processor, image_text='<|vision_start|><|image_pad|><|vision_end|>')


def _idefics3() -> SampleEncoder:
    # SmolVLM's own processor writes the same, but wants a package for videos that nothing else here needs. Images
    # larger than a tile are cut into tiles, besides the whole image: several tensors for one placeholder.
    image_processor = transformers.Idefics3ImageProcessor(
        size={'longest_edge': 2 * IMAGE_SIZE}, max_image_size={'longest_edge': IMAGE_SIZE}, **_MEAN_STD
    )
    tiles = [f'<row_{row}_col_{col}>' for row in range(1, 7) for col in range(1, 7)]
    tokenizer = word_tokenizer('<image>', '<fake_token_around_image>', '<global-img>', '<end_of_utterance>', *tiles)
    processor = transformers.Idefics3Processor(
        image_processor=image_processor, tokenizer=tokenizer, image_seq_len=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4
    )
    return SampleEncoder(processor, image_text='<image>', nested_images=True)


ENCODERS: dict[str, Callable[[], SampleEncoder]] = {
    'llama': _llama,
    'llava': _llava,
    'llava_next': _llava_next,
    'llava_onevision': _llava_onevision,
    'qwen2_vl': lambda: _qwen('Qwen2VLProcessor'),
    'qwen2_5_vl': lambda: _qwen('Qwen2_5_VLProcessor'),
    'idefics3': _idefics3,
    'smolvlm': _idefics3,
}
