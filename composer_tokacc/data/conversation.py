# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Encodes one conversation with its media as a training sample. Only the answers of the assistant carry loss.

The chat template writes the conversation as a text with one placeholder for each medium. The processor encodes this
text, and expands each placeholder to all tokens of its medium. The answers are found in the text first, and from there
in the tokens. An example with an image of three tokens::

    text        U <image> A Red.
    input_ids   U I I I A Red .
    labels      - - - - - Red .
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from tokenizers import Encoding

from composer_tokacc.arguments import check_choice, check_count, check_kind
from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.data.chat_template import (
    AnswerSpan,
    ChatTemplate,
    Rendered,
    only_last_learned,
    owner_of_template,
    text_message,
    text_of,
)
from composer_tokacc.data.control_tokens import (
    ControlTokenPolicy,
    ControlTokens,
)
from composer_tokacc.data.media import decode_media
from composer_tokacc.data.records import (
    DecodedMedia,
    EncodedSample,
    MediaFile,
    Message,
    Record,
    check_message,
)
from composer_tokacc.data.videos import Video, VideoSampling
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.weights import LOSS_WEIGHTS

TrainOn = Literal['all', 'last']
"""Answers that carry loss: all of a conversation, or only the last."""

PROCESSOR_PARTS = {
    'image': ('image_processor',),
    'video': ('video_processor',),
    'audio': ('feature_extractor', 'audio_processor'),
}
"""By modality: the attributes of a processor that may hold its part, which turns these media into tensors. If there are
both attributes for audio, the second is used, as in Transformers."""

ARGUMENTS_OF_TOKENIZER = ('max_length', 'truncation', 'padding', 'min_pixels', 'max_pixels')
"""Arguments of a tokenizer that its processor must not pass on, see :func:`_without_arguments_of_tokenizer`."""


@dataclass
class AudioWindow:
    """The audio that a feature extractor reads at once. It may cut off what is longer."""

    length: int | None
    """Audio samples of the window. None: no audio is cut off."""
    longest_read: int = 0
    """Length, in audio samples, of the longest audio that was read to its end. Only longer ones are tried."""


class ConversationEncoder:
    """Encodes conversations: runs a processor on the messages and media of each, and adds ``labels``.

    Answers are found through the chat template, see ``ChatTemplate``. Some templates do not write an ending token
    (LLaVA-1.5). Then the tokenizer's ``eos_token`` is added after each answer, as LLaVA's own training code does: a
    model that never sees an end does not learn to stop.

    Args:
        processor: A Hugging Face processor, or a tokenizer for text only. Needs a chat template and a fast tokenizer.
        max_length: Longest sample allowed, in tokens, image tokens included. ``None``: no limit.
        video: The frames to take of a video. ``None``: two frames a second. A processor that joins frames into patches
            gets at least the frames of one patch.
        control_tokens: Handling of control tokens in texts, such as ``<|im_end|>``. ``'warn'``: encode them as control
            tokens, and warn of the first sample that has one. ``'text'``: encode their characters. ``'refuse'``: refuse
            the sample.
        train_on: ``'all'`` answers carry loss, or only the ``'last'`` one of a conversation. Templates of reasoning
            models drop the thoughts of earlier answers. Conversations with such thoughts need ``'last'``.
        add_end_token: Whether to add the ending token after answers that the chat template leaves open.

    Raises:
        ValueError: If an option is wrong, the processor lacks a chat template, a fast tokenizer, an ending token or
            (BLIP) ``num_query_tokens``, or the template cannot write a question and its answer.
    """

    def __init__(
        self,
        processor: Any,
        *,
        max_length: int | None = None,
        video: VideoSampling | None = None,
        control_tokens: ControlTokens = 'warn',
        train_on: TrainOn = 'all',
        add_end_token: bool = True,
    ) -> None:
        if max_length is not None:
            check_count('max_length', max_length)
        check_choice('train_on', train_on, ('all', 'last'))
        check_choice('add_end_token', add_end_token, (True, False))
        # It may be a copy, with a copied tokenizer.
        processor = _without_arguments_of_tokenizer(processor)
        tokenizer = getattr(processor, 'tokenizer', processor)
        template_owner = owner_of_template(processor)
        _check_processor(processor, tokenizer, template_owner)
        self.max_length = max_length
        self.train_on = train_on
        self.adds_end_token = add_end_token
        self.media_options: Mapping[str, Mapping[str, Any]] = {}
        """``images_kwargs`` and ``videos_kwargs`` for the processor. `FittingEncoder` makes media smaller with them."""
        self.parts = _parts_of(processor)
        """The processor's parts by modality. Media of a modality without a part are refused. Empty for a tokenizer."""
        self.video = _with_frames_of_patch(self.parts.get('video'), video)
        self._audio_window = AudioWindow(_length_of_window(self.parts.get('audio')))
        """See `_check_ends_of_audios`. The copies that `FittingEncoder` makes of this encoder share it."""
        self._has_query_tokens = hasattr(processor, 'num_query_tokens')
        """Whether the processor (of BLIP) writes query tokens for media, in place of placeholders of the template."""
        self.template = ChatTemplate(
            template_owner,
            tokenizer,
            takes_media=bool(self.parts),
            add_end_token=add_end_token,
        )
        self.control_policy = ControlTokenPolicy(control_tokens, processor, self.template.control_tokens)
        # With control_tokens=text these are copies again, which get a few more tokens.
        self.processor = self.control_policy.processor
        self.tokenizer = self.control_policy.tokenizer

    def __call__(
        self,
        messages: Sequence[Message],
        images: Sequence[Image.Image | torch.Tensor] = (),
        *,
        videos: Sequence[Video] = (),
        audios: Sequence[np.ndarray] = (),
        sample_id: str = '',
    ) -> EncodedSample:
        """Encodes one conversation.

        Args:
            messages: ``{'role': 'system' | 'user' | 'assistant' | 'tool', 'content': ...}``. The content is a text, or
                a list of ``{'type': 'image'}`` and ``{'type': 'text', 'text': ...}``. The text of an assistant turn
                carries loss, unless the turn has ``'weight': 0``. ``id``, ``index`` and ``timestamp`` are ignored. A
                value under any other key is refused.
            images: One per ``{'type': 'image'}``, in order: PIL images, or uint8 tensors ``(3, height, width)``.
            videos: One per ``{'type': 'video'}``, in order.
            audios: One per ``{'type': 'audio'}``, in order: float arrays ``(samples,)`` at the processor's own rate.
            sample_id: Name of the sample. It is the only entry of ``sample_ids``.

        Returns:
            The processor's entries for a batch of one row, ``labels`` of shape ``(1, length)``, not shifted, and
            the lists ``sample_ids`` and ``num_images``. Also ``num_videos`` and ``num_audios`` if the processor has a
            part for them.

        Raises:
            ValueError: If a message has a wrong form, the number of media is wrong, the processor or its template
                cannot encode the conversation, the sample is longer than ``max_length``, the processor cuts off the
                end of an audio, or a text has a control token that ``control_tokens`` refuses.
        """
        if not messages:
            raise InvalidInputError(f'`messages` must hold at least one turn, got: {messages!r}. Leave the sample out.')
        checked_messages = [check_message(message) for message in messages]
        media = {'image': images, 'video': videos, 'audio': audios}
        self._check_media(checked_messages, media)
        texts = [text_of(message) for message in checked_messages]
        # For callers without a record. The texts of a record have passed this check in `check_takes_media`.
        self.control_policy.check(texts, _error_of_conversation)
        # With control_tokens=text, `render` writes stand-ins for the control tokens in the messages. At the end,
        # `spell` replaces them, see ControlTokenPolicy.
        rendered = self.render(checked_messages)
        encoded = self._encode(rendered.text, media)
        self._check_ends_of_audios(encoded, rendered.text, media)
        if self._has_query_tokens:
            self._check_query_tokens(encoded)
            self._hide_answers_from_qformer(encoded, rendered)
        spans = self._find_token_spans(rendered, encoded['input_ids'][0])
        encoded['labels'] = _labels_of(encoded['input_ids'], spans)
        sample: EncodedSample = {
            **self.control_policy.spell(encoded),
            'sample_ids': [sample_id],
        }
        self._check_length(sample)
        # A sample without media has these keys, too, because only samples with the same keys can be collated.
        for modality, items in media.items():
            if modality == 'image' or modality in self.parts:
                sample[f'num_{modality}s'] = [len(items)]
        return sample

    def encode_record(
        self,
        record: Record,
        files: Sequence[MediaFile],
        *,
        shapes_only: bool = False,
    ) -> EncodedSample:
        """Encodes a record. Records with equal content give equal samples, wherever their files are.

        Args:
            record: The conversation. If it has a weight, this is the ``loss_weights`` of every label of the sample.
            files: One path or open file for each file of ``record.media``.
            shapes_only: Decode only as much of the media as the shapes of the sample need. Images are then black.

        Raises:
            BadSampleError: If the record or one of its files cannot be used.
            ValueError: If the record needs PyAV, which cannot be imported.
            RuntimeError: If the processor, or this package, fails with any other error than a ValueError.
        """
        self.check_takes_media(record)
        media = self.decode(record, files, shapes_only=shapes_only)
        try:
            sample = self(
                record.messages(),
                media.get('image', ()),
                videos=media.get('video', ()),
                audios=media.get('audio', ()),
                sample_id=record.sample_id,
            )
        except ValueError as error:
            raise record.error(error) from error
        except Exception as error:
            # Perhaps a bug. on_error=skip must not hide it, so BadSampleError is not raised.
            named_error = record.error(f'{type(error).__name__}: {error}')
            raise RuntimeError(str(named_error)) from error
        if record.loss_weights is not None:
            sample[LOSS_WEIGHTS] = torch.full(sample['labels'].shape, record.loss_weights)
        return sample

    def decode(
        self,
        record: Record,
        files: Sequence[MediaFile],
        *,
        shapes_only: bool = False,
    ) -> DecodedMedia:
        """Decodes the media of a record, see ``data.media.decode_media``. Resamples audio to the processor's rate."""
        # Without a part for audio the rate does not matter, because `check_takes_media` has refused records with audio.
        sampling_rate = getattr(self.parts.get('audio'), 'sampling_rate', 16000)
        return decode_media(
            record,
            files,
            video=self.video,
            sampling_rate=sampling_rate,
            shapes_only=shapes_only,
        )

    def identity_of_options(self) -> list[tuple[str, object]]:
        """Returns name and value of the options that change samples, for fingerprints of data.

        Options with their default are left out, so that fingerprints in checkpoints of earlier releases still match.
        The callers add ``video``, and the caps of a `FittingEncoder`. In this class ``max_length`` and
        ``control_tokens='refuse'`` change no sample: they only decide which samples are refused.
        """
        options: list[tuple[str, object]] = []
        if self.control_policy.option == 'text':
            options.append(('control_tokens', 'text'))
        if self.train_on != 'all':
            options.append(('train_on', self.train_on))
        if not self.adds_end_token:
            options.append(('add_end_token', False))
        return options

    def encode_unexpanded(self, conversations: Sequence[Sequence[Message]]) -> list[dict[str, torch.Tensor] | None]:
        """Encodes conversations without expanding placeholders, to find the lengths of samples.

        This is much faster than a whole sample, because the processor and the checks of media do not run.

        Args:
            conversations: The messages of each. Their content must be a list of parts.

        Returns:
            ``input_ids`` and ``labels`` of each, ``(1, length)``. None for a conversation that cannot be encoded.
        """
        rendered_conversations: dict[int, Rendered] = {}  # by the index of the conversation
        for index, messages in enumerate(conversations):
            with suppress(Exception):  # encoding the whole sample raises the error again
                rendered_conversations[index] = self.render(messages)
        texts = [rendered.text for rendered in rendered_conversations.values()]
        encodings = self._tokenize(texts)
        samples: list[dict[str, torch.Tensor] | None] = [None] * len(conversations)
        for (index, rendered), encoding in zip(rendered_conversations.items(), encodings, strict=True):
            with suppress(InvalidInputError):  # an answer has no tokens. The whole sample raises this error again
                spans = _spans_of(encoding, rendered.answers)
                input_ids = torch.tensor([encoding.ids])
                labels = _labels_of(input_ids, spans)
                samples[index] = self.control_policy.spell({'input_ids': input_ids, 'labels': labels})
        return samples

    def _tokenize(self, texts: Sequence[str]) -> list[Encoding]:
        """Returns the tokens of rendered texts, with the places of their characters. Placeholders are not expanded."""
        encodings: list[Encoding] = []
        # The tokenizer is much faster for many texts at once, but one call has one `add_special_tokens`. So a call gets
        # consecutive texts that need the same value. Nearly always, these are all texts.
        for add_special_tokens, group in groupby(texts, self._adds_special_tokens):
            tokens = self.tokenizer(
                list(group),
                add_special_tokens=add_special_tokens,
                # Not needed. They would take a third of the time.
                return_attention_mask=False,
                return_token_type_ids=False,
            )
            encodings.extend(tokens.encodings)
        return encodings

    def has_room(self, num_tokens: int, num_image_tokens: int) -> bool:
        """Tells whether a sample is within the caps of the encoder. This class has only ``max_length``.

        Args:
            num_tokens: All tokens of the sample.
            num_image_tokens: The tokens that stand for images, videos and audio. `FittingEncoder` has a cap on them.
        """
        return self.max_length is None or num_tokens <= self.max_length

    def check_takes_media(self, record: Record) -> None:
        """Refuses a record for media that the processor or the chat template would drop, or for control tokens.

        Some control tokens only give a warning, see ``ControlTokenPolicy.check``.

        Raises:
            BadSampleError: If the record is refused.
        """
        for turn in record.turns:
            for placeholder in turn.placeholders:
                modality = placeholder['modality']
                if modality not in self.parts:
                    attributes = ' or '.join(f'`{attribute}`' for attribute in PROCESSOR_PARTS[modality])
                    raise record.error(f'has {modality}s, but the processor takes none; use one with {attributes}')
                if not self._has_query_tokens and not self.template.has_placeholders(turn.role, modality):
                    raise record.error(
                        f'has {modality}s in a turn of the {turn.role}, but the chat template writes no placeholder '
                        'for each; set another one'
                    )
        # This comes last, because it warns only of the first record with control tokens. That should be a good record.
        self.control_policy.check(record.texts, record.error)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Writes a conversation as the text for the processor, and finds the answers that carry loss in it.

        Applies the options first: ``train_on``, and stand-ins for control tokens with ``control_tokens='text'``.
        """
        if self.train_on == 'last':
            messages = only_last_learned(messages)
        prepared = []
        for message in messages:
            if message['role'] == 'assistant':
                # Templates treat white space around an answer in different ways, so it is removed. No media are lost,
                # because answers hold only text.
                answer = text_message('assistant', text_of(message).strip())
                message = {**message, 'content': answer['content']}
            prepared.append(self.control_policy.hide(message))
        return self.template.render(prepared)

    def _check_media(self, messages: Sequence[Message], media: DecodedMedia) -> None:
        """Refuses media that do not match the parts of the messages, or that the processor cannot take.

        Otherwise a tokenizer would drop all media silently, and BLIP's processors would drop parts without media.
        """
        for modality, items in media.items():
            num_parts = 0
            for message in messages:
                num_parts += sum(part['type'] == modality for part in message['content'])
            if num_parts != len(items):
                raise InvalidInputError(
                    f'`{modality}s` must hold one for each part of this type in `messages`, got: {len(items)} for '
                    f'{num_parts} parts.'
                )
            if items and modality not in self.parts:
                name = type(self.processor).__name__
                raise InvalidInputError(f'`{modality}s` must be left out, because {name} takes none. Use another.')

    def _check_ends_of_audios(
        self,
        encoded: Mapping[str, torch.Tensor],
        text: str,
        media: DecodedMedia,
    ) -> None:
        """Refuses an audio whose end the processor cuts off silently.

        No attribute of a processor says whether it does so. If an audio is longer than the window, Qwen2-Audio and
        Gemma 4 read one window, Qwen3-ASR reads all, and Audio Flamingo 3 reads windows up to a limit. So it is tried:
        the last window is replaced by noise, and the sample is encoded again. If this changes no tensor, the processor
        has not read the last window.

        Args:
            encoded: The entries that the processor made of the sample.
            text: The rendered conversation.
            media: The media of the sample.
        """
        window = self._audio_window.length
        if window is None:
            return
        for index, audio in enumerate(media['audio']):
            length = len(audio)
            if length <= window or length <= self._audio_window.longest_read:
                continue
            audios = list(media['audio'])
            audios[index] = _with_noise_at_end(audio, window)
            encoded_with_noise = self._encode(text, {**media, 'audio': audios})
            if all(torch.equal(value, encoded_with_noise[key]) for key, value in encoded.items()):
                rate = self.parts['audio'].sampling_rate
                raise InvalidInputError(
                    f'an audio must be read to its end, but {type(self.processor).__name__}, whose window is '
                    f'{window / rate:g} s ({window} audio samples at {rate} Hz), cuts it off, got: {length} audio '
                    'samples. Cut it'
                )
            self._audio_window.longest_read = length

    def _check_length(self, sample: EncodedSample) -> None:
        """Refuses a sample that is longer than ``max_length``."""
        length = sample['input_ids'].shape[1]
        if self.max_length is None or length <= self.max_length:
            return
        raise InvalidInputError(
            f'`max_length` must be at least the length of the sample, got: {self.max_length} < {length} tokens. Raise '
            'it, or leave the sample out. `dataset` has options for this: on_error=skip, or fit=true for media.'
        )

    def _adds_special_tokens(self, text: str) -> bool:
        """Tells whether special tokens, such as BOS, must be added to a rendered text.

        Follows Transformers' ``apply_chat_template(tokenize=True)``. A processor adds them, unless the text
        begins with the BOS token. A tokenizer, or a processor without any part for media, adds none.
        """
        bos = self.tokenizer.bos_token
        return bool(self.parts) and not (bos and text.startswith(bos))

    def _encode(self, text: str, media: DecodedMedia) -> dict[str, torch.Tensor]:
        """Runs the processor on one conversation, and corrects its entries.

        Raises ValueError if the processor raises it or an arithmetic error. Other errors are raised as they are.
        """
        arguments: dict[str, Any] = {
            'text': [text],
            'return_tensors': 'pt',
            'add_special_tokens': self._adds_special_tokens(text),
        }
        if not self.parts:
            return dict(self.tokenizer(**arguments))
        for name, values in self.media_options.items():
            arguments[name] = dict(values)
        self._add_media(arguments, media)
        try:
            encoded = dict(self.processor(**arguments))
        except (ValueError, ArithmeticError) as error:
            # With the name of the processor, because a message such as 'math domain error' says nothing by itself.
            raise InvalidInputError(f'{type(self.processor).__name__} cannot encode it: {error}') from error
        if not self._has_query_tokens:  # BLIP gets videos as images, and `_check_query_tokens` checks them
            self._check_joined_pixels(encoded, media)
            self._set_seconds_per_grid(encoded, media['video'])
        if media['audio']:
            self._add_mask_of_audio(encoded)
        return encoded

    def _add_media(self, arguments: dict[str, Any], media: DecodedMedia) -> None:
        """Adds the media and their settings to the arguments of the processor."""
        if self._has_query_tokens:  # BLIP's processors take images and videos in one list
            images = list(media['image'])
            images.extend(video.frames for video in media['video'])
            if images:
                arguments['images'] = images
            return
        if media['image']:
            # A list of images for each text, and there is one text. In a flat list, each image would count as the only
            # image of a text. Then OneVision's processor would cut each into tiles, which its model expects only if a
            # text has a single image.
            arguments['images'] = [list(media['image'])]
        if media['video']:
            videos = []
            metadata = []
            for video in media['video']:
                videos.append(video.frames)
                metadata.append(dict(video.metadata))
            arguments['videos'] = videos
            videos_kwargs = arguments.setdefault('videos_kwargs', {})
            videos_kwargs['video_metadata'] = metadata
            videos_kwargs['do_sample_frames'] = False  # `VideoSampling` has chosen the frames
        if media['audio']:
            arguments['audio'] = list(media['audio'])
            arguments['audio_kwargs'] = {'sampling_rate': self.parts['audio'].sampling_rate}

    def _check_joined_pixels(self, encoded: Mapping[str, torch.Tensor], media: DecodedMedia) -> None:
        """Refuses a video with an image or another video, if the processor joins their pixels wrongly (SmolVLM).

        SmolVLM's processor writes all into one row ``(1, images and frames, 3, height, width)``. InternVL's joins
        pixels, too, but rightly: ``(images and frames, 3, height, width)``, in the order of the text.
        """
        num_media = len(media['video']) + len(media['image'])
        if not media['video'] or num_media < 2:
            return
        if 'pixel_values_videos' in encoded:  # videos have a tensor of their own
            return
        if encoded['pixel_values'].dim() == 5:
            name = type(self.processor).__name__
            raise InvalidInputError(
                f'{name} takes one video in a conversation, and no image with it. Split the conversation'
            )

    def _set_seconds_per_grid(self, encoded: dict[str, torch.Tensor], videos: Sequence[Video]) -> None:
        """Replaces the seconds between two patches in time by the real ones (Qwen-Omni, Qwen2.5-VL).

        Qwen-Omni's processor assumes two frames a second. In Transformers 4.57 Qwen2.5-VL's processor did so, too.
        """
        for key in ('video_second_per_grid', 'second_per_grid_ts'):
            if key not in encoded:
                continue
            frames_per_patch = self.parts['video'].temporal_patch_size
            seconds = []
            for video in videos:
                # The frames are spread evenly over the whole video.
                seconds_per_frame = video.metadata['duration'] / len(video.frames)
                seconds.append(frames_per_patch * seconds_per_frame)
            encoded[key] = torch.tensor(seconds)

    def _add_mask_of_audio(self, encoded: dict[str, torch.Tensor]) -> None:
        """Adds the mask of a single audio if the processor writes one only for several (Phi-4 multimodal).

        The collator may pad the audio to the length of another one, and the mask tells the model what is padding.
        """
        keys: list[str] = getattr(self.parts['audio'], 'model_input_names', [])  # the features are the first
        for key in keys[1:]:
            if key.endswith('attention_mask') and key not in encoded:
                encoded[key] = torch.ones(encoded[keys[0]].shape[:2], dtype=torch.bool)

    def _check_query_tokens(self, encoded: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError if the number of query tokens does not match the images (BLIP).

        The model puts the outputs of the query transformer in the place of these tokens, and does not check their
        number. For any number of images, the processor writes the tokens of one image, or (InstructBLIPVideo) of one
        clip of four frames. Without images it writes none.
        """
        pixels = encoded.get('pixel_values')
        expected = 0
        if pixels is not None:
            # (images, 3, height, width) or (clips, frames, 3, height, width). An image is one frame.
            num_frames = pixels.shape[:-3].numel()
            expected = self.processor.num_query_tokens * num_frames
        token = getattr(self.processor, 'image_token', None) or self.processor.video_token
        token_id = self.tokenizer.convert_tokens_to_ids(str(token))
        num_tokens = int((encoded['input_ids'] == token_id).sum())
        if num_tokens != expected:
            raise InvalidInputError(
                f'`processor` must write {expected} query tokens for the media of a sample, got: {num_tokens}. It '
                'takes one image, or one clip of four frames, for which the chat template must write nothing.'
            )

    def _hide_answers_from_qformer(self, encoded: dict[str, torch.Tensor], rendered: Rendered) -> None:
        """Replaces the text that the query transformer reads (InstructBLIP) by the instruction.

        The instruction is the text before the first answer that carries loss. The processor gives the query transformer
        the whole text, so that it would read the answers. Without images the model does not run the query transformer,
        so its text is only removed. Raises ValueError if the instruction is too long.

        Args:
            encoded: The entries of the processor, which are changed.
            rendered: The conversation.
        """
        if 'qformer_input_ids' not in encoded:  # BLIP-2, whose query transformer reads no text
            return
        for key in ('input_ids', 'attention_mask'):
            del encoded[f'qformer_{key}']
        if encoded.get('pixel_values') is None:
            return
        instruction = rendered.text
        if rendered.answers:
            instruction = rendered.text[: rendered.answers[0].start]
        instruction = self.control_policy.unhide(instruction)
        tokenizer = self.processor.qformer_tokenizer
        # Not verbose, because a text that is too long is refused below.
        instruction_tokens = tokenizer([instruction], return_tensors='pt', verbose=False)
        length = instruction_tokens['input_ids'].shape[1]
        if length > tokenizer.model_max_length:
            raise InvalidInputError(
                'the text before the first answer must fit into the query transformer, got: '
                f'{length} > {tokenizer.model_max_length} tokens. Shorten it.'
            )
        for key in ('input_ids', 'attention_mask'):
            encoded[f'qformer_{key}'] = instruction_tokens[key]

    def _find_token_spans(self, rendered: Rendered, input_ids: torch.Tensor) -> list[tuple[int, int]]:
        """Finds the positions ``[start, end)`` of each answer in ``input_ids``.

        The tokenizer tells which characters a token holds, but only for the text, whose placeholders are not expanded.
        So each answer is first found in the tokens of the text, and then in ``input_ids`` by its last token. A
        placeholder expands only to tokens of media. So if the last token is the k-th of its id in the text, it is also
        the k-th of this id in ``input_ids``.

        In the example at the top, the text has the tokens ``[U, I, A, Red, .]``. The first ``.`` is at 4 in the text,
        and at 6 in ``input_ids``. So the answer, which has two tokens, begins at 5.

        Raises:
            ValueError: If an answer has no tokens, or is not found, because the processor has changed more than
                placeholders.
        """
        (encoding,) = self._tokenize([rendered.text])
        text_ids = torch.tensor(encoding.ids)
        spans_in_text = _spans_of(encoding, rendered.answers)
        spans = []
        for answer, span_in_text in zip(rendered.answers, spans_in_text, strict=True):
            span = _span_in_ids(input_ids, text_ids, span_in_text)
            if span is None:
                answer_text = rendered.text[answer.start : answer.end]
                name = type(self.processor).__name__
                raise InvalidInputError(
                    f'`processor` must expand only placeholders, but {name} writes other tokens for '
                    f'{answer_text[:200]!r}.'
                )
            spans.append(span)
        return spans


def _error_of_conversation(reason: str) -> InvalidInputError:
    """Returns the error for a conversation that is no record, so that it has no name."""
    return InvalidInputError(f'the conversation {reason}')


def _without_arguments_of_tokenizer(processor: Any) -> Any:
    """Returns a processor that does not pass some arguments of its tokenizer on to each call.

    Transformers keeps the arguments that a tokenizer was made with, and a processor passes them on to its tokenizer and
    to all its parts, where they override the settings of the part. Two kinds of them must not be passed on:

    - ``max_length``, ``truncation`` and ``padding``. ``tokenizer.json`` has a ``max_length`` if the tokenizer was saved
      after it had truncated a text. Texts and audio would then be cut off silently.
    - ``min_pixels`` and ``max_pixels``, as from ``AutoProcessor.from_pretrained(name, max_pixels=...)``. The image
      processor already has them as its ``size``. In a call they would take the place of the smaller ``size`` with which
      `FittingEncoder` makes media smaller.

    Returns the processor itself if its tokenizer has none of them, otherwise a shallow copy with a copied tokenizer.
    """
    tokenizer: Any = getattr(processor, 'tokenizer', None)
    arguments: Mapping[str, Any] = getattr(tokenizer, 'init_kwargs', {})
    if all(arguments.get(name) is None for name in ARGUMENTS_OF_TOKENIZER):
        return processor
    other_arguments = {name: value for name, value in arguments.items() if name not in ARGUMENTS_OF_TOKENIZER}
    tokenizer = copy(tokenizer)
    tokenizer.init_kwargs = other_arguments
    processor = copy(processor)
    processor.tokenizer = tokenizer
    return processor


def _parts_of(processor: Any) -> dict[str, Any]:
    """Returns the parts of a processor that turn media into tensors, by modality."""
    parts = {}
    for modality, attributes in PROCESSOR_PARTS.items():
        for attribute in attributes:
            part = getattr(processor, attribute, None)
            if part is not None:
                parts[modality] = part
    return parts


def _check_processor(processor: Any, tokenizer: Any, template_owner: Any) -> None:
    """Raises ValueError if the processor lacks something that encoding needs."""
    problem = f'`processor` is a {type(processor).__name__} that has no'
    if tokenizer is None:
        raise InvalidInputError(
            f'{problem} tokenizer. Its folder has no tokenizer files: copy them there, or set `processor.tokenizer`.'
        )
    if not getattr(template_owner, 'chat_template', None):
        raise InvalidInputError(f'{problem} chat template. Set `processor.chat_template`.')
    if not getattr(tokenizer, 'is_fast', False):
        raise InvalidInputError(f'{problem} fast tokenizer. Load it with use_fast=True.')
    if hasattr(processor, 'num_query_tokens') and processor.num_query_tokens is None:
        # Without the number BLIP's processor drops the images.
        raise InvalidInputError(f'{problem} `num_query_tokens`. Set it as in the model.')


def _with_frames_of_patch(video_processor: Any, sampling: VideoSampling | None) -> VideoSampling:
    """Returns the sampling, or the default one, with at least as many frames as the processor joins into one patch.

    Qwen-VL's processors, for example, join two frames. They refuse a video of one frame.
    """
    if sampling is None:
        sampling = VideoSampling()
    check_kind('video', sampling, VideoSampling)
    frames_per_patch = getattr(video_processor, 'temporal_patch_size', None) or 1
    min_frames = max(sampling.min_frames, frames_per_patch)
    num_frames = sampling.num_frames
    if num_frames is not None:
        num_frames = max(num_frames, min_frames)
    return replace(sampling, num_frames=num_frames, min_frames=min_frames)


def _length_of_window(extractor: Any) -> int | None:
    """Returns the length, in audio samples, above which a feature extractor may cut off an audio.

    Whisper's extractor has it as the attribute ``n_samples``, Gemma 3n's as the default of the argument ``max_length``.
    With both, returns the shorter one. Returns None if there is no such length, or no extractor.
    """
    if extractor is None:
        return None
    lengths = []
    num_samples = getattr(extractor, 'n_samples', None)
    if isinstance(num_samples, int):
        lengths.append(num_samples)
    parameter = inspect.signature(type(extractor).__call__).parameters.get('max_length')
    if parameter is not None and isinstance(parameter.default, int):
        lengths.append(parameter.default)
    return min(lengths, default=None)


def _with_noise_at_end(audio: np.ndarray, window: int) -> np.ndarray:
    """Returns an audio with noise in the place of its last window, which may not be full."""
    start_of_last_window = (len(audio) - 1) // window * window
    noise = np.random.default_rng(0).standard_normal(len(audio) - start_of_last_window, dtype=np.float32)
    return np.concatenate([audio[:start_of_last_window], noise])


def _labels_of(input_ids: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns labels ``(1, length)``: the ids of the tokens in the spans, and ``IGNORE_INDEX`` everywhere else."""
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    for start, end in spans:
        labels[0, start:end] = input_ids[0, start:end]
    return labels


def _spans_of(encoding: Encoding, answers: Sequence[AnswerSpan]) -> list[tuple[int, int]]:
    """Returns for each answer the positions ``[start, end)`` of the tokens that hold its characters.

    Raises:
        ValueError: If an answer has no tokens. Some tokenizers remove some characters.
    """
    # Token i holds the characters [starts[i], ends[i]). `reshape`, because there may be no tokens at all.
    starts, ends = np.array(encoding.offsets).reshape(-1, 2).T
    spans = []
    for answer in answers:
        has_characters = (starts < answer.end) & (ends > answer.start)
        tokens = has_characters.nonzero()[0].tolist()
        if not tokens:
            raise InvalidInputError('an answer must have tokens, but the tokenizer has none for its characters')
        spans.append((tokens[0], tokens[-1] + 1))
    return spans


def _span_in_ids(
    input_ids: torch.Tensor,
    text_ids: torch.Tensor,
    span_in_text: tuple[int, int],
) -> tuple[int, int] | None:
    """Returns the positions ``[start, end)`` of an answer in ``input_ids``. None if other tokens are there.

    Args:
        input_ids: The tokens that the processor has written, ``(length,)``.
        text_ids: The tokens of the text, whose placeholders are not expanded, ``(length of the text,)``.
        span_in_text: The positions of the answer in ``text_ids``.
    """
    start, end = span_in_text
    last_token = text_ids[end - 1]
    places_in_text = (text_ids == last_token).nonzero()[:, 0]
    places_in_ids = (input_ids == last_token).nonzero()[:, 0]
    if len(places_in_text) != len(places_in_ids):
        return None
    # The mask is True at the k-th place in the text, so it selects the k-th place in the ids.
    is_last_token_of_answer = places_in_text == end - 1
    expanded_end = int(places_in_ids[is_last_token_of_answer]) + 1
    expanded_start = expanded_end - (end - start)
    if not torch.equal(input_ids[expanded_start:expanded_end], text_ids[start:end]):
        return None
    return expanded_start, expanded_end
