# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""One conversation with its media -> one training sample, with loss on what the assistant says and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from tokenizers import Encoding

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.data.control_tokens import ControlTokenPolicy, ControlTokens
from composer_tokacc.data.media import decode_media
from composer_tokacc.data.records import MediaFile, Record, check_message
from composer_tokacc.data.videos import Video, VideoSampling
from composer_tokacc.planning import check_count, check_kind
from composer_tokacc.weights import LOSS_WEIGHTS

Message = Mapping[str, Any]

# The part of a processor that takes media of a modality, and the argument under which it is given them.
TAKEN_BY = {
    'image': ('image_processor', 'images'),
    'video': ('video_processor', 'videos'),
    'audio': ('feature_extractor', 'audio'),
}
# Python's lists of the rest take a third of the time of tokenizing.
_IDS_ALONE = {'return_attention_mask': False, 'return_token_type_ids': False}

MARKER = '\ue000{}\ue001'
"""Stands for a text, in private-use characters: no text holds them, no template strips them."""


class AnswerSpan(NamedTuple):
    """Characters ``[start, end)`` that carry loss: an answer with its ending token."""

    start: int
    end: int


class ConversationEncoder:
    """Turns messages and media into what the processor returns for one sample, plus ``labels``.

    The answers are found through the chat template itself: it is rendered with every answer replaced by a marker, and
    what stands between the markers is the same text that stands between the answers. So it needs no
    ``{% generation %}`` tags and knows no template by name. Where a template writes no ending token
    (LLaVA-1.5's), the tokenizer's ``eos_token`` is put behind each answer, as LLaVA's own training code does: a model
    that never sees an end cannot learn to stop.

    Args:
        processor: A Hugging Face processor, or a tokenizer for text alone. Needs a chat template and a fast tokenizer.
        max_length: Longest sample allowed, in tokens, image tokens included. ``None``: no limit.
        video: Which frames of a video are taken. ``None``: two a second.
        control_tokens: What to do with those in a user's text: ``'warn'`` of the first, encode them as ``'text'``, or
            ``'refuse'`` the sample.

    Raises:
        ValueError: If the processor has no chat template, or its tokenizer is not a fast one or has no way to end.
    """

    def __init__(
        self,
        processor: Any,
        *,
        max_length: int | None = None,
        video: VideoSampling | None = None,
        control_tokens: ControlTokens = 'warn',
    ) -> None:
        if max_length is not None:
            check_count('max_length', max_length)
        self.processor = processor
        self.max_length = max_length
        self.max_image_tokens: int | None = None
        self.tokenizer = getattr(processor, 'tokenizer', processor)
        parts = {modality: getattr(processor, name, None) for modality, (name, _) in TAKEN_BY.items()}
        self.parts = {modality: part for modality, part in parts.items() if part is not None}
        check_kind('video', video := video or VideoSampling(), VideoSampling)
        # A model that joins frames two by two refuses a single one.
        least = max(video.min_frames, getattr(self.parts.get('video'), 'temporal_patch_size', None) or 1)
        self.video = replace(video, min_frames=least)
        has_template = getattr(self._template_owner(), 'chat_template', None)
        has_queries = getattr(processor, 'num_query_tokens', 0) is not None  # without, BLIP's images would go nowhere
        for has_it, what, remedy in (
            (has_template, 'a chat template', 'Set `processor.chat_template`'),
            (getattr(self.tokenizer, 'is_fast', False), 'a fast tokenizer', 'Load it with use_fast=True'),
            (has_queries, '`num_query_tokens`', 'Set that of the model'),
        ):
            if not has_it:
                raise ValueError(f'`processor` must have {what}, got: {type(processor).__name__} without. {remedy}.')
        self.media_options: Mapping[str, Mapping[str, Any]] = {}
        """Further ``images_kwargs`` and ``videos_kwargs`` of every call of the processor."""
        # Templates of text models take plain strings.
        self._takes_parts = bool(self.parts) and self._writes_parts()
        self._written = {modality for modality in self.parts if self._writes_media(modality)}
        self._known_roles: set[tuple[str, ...]] = set()
        self.end_token = self._find_end_token()
        self.control = ControlTokenPolicy(control_tokens, processor, end_token=self.end_token)
        self.processor, self.tokenizer = self.control.processor, self.control.tokenizer

    def __call__(
        self,
        messages: Sequence[Message],
        images: Sequence[Any] = (),
        *,
        videos: Sequence[Video] = (),
        audios: Sequence[Any] = (),
        sample_id: str = '',
    ) -> dict[str, Any]:
        """Encodes one conversation.

        Args:
            messages: ``{'role': 'system' | 'user' | 'assistant', 'content': [{'type': 'image'} |
                {'type': 'text', 'text': ...}, ...]}``, or a text as ``content``, or the role ``tool``; the text of an
                assistant turn carries the loss, unless the turn has ``'weight': 0``.
            images: One per ``{'type': 'image'}``, in order, as PIL images.
            videos: One per ``{'type': 'video'}``.
            audios: One per ``{'type': 'audio'}``: float samples at the processor's own rate.
            sample_id: Goes with the sample as ``sample_ids``.

        Returns:
            The processor's entries with a batch dimension of 1, ``labels`` of shape ``(1, length)``, unshifted, and the
            lists ``sample_ids``, ``num_images``, and ``num_videos`` and ``num_audios`` where the processor takes such.

        Raises:
            ValueError: If the sample is longer than ``max_length``, or an audio than the processor takes.
        """
        for message in messages or [None]:
            check_message(message)
        messages = [
            {**one, **_said(one['role'], text)} if isinstance(text := one['content'], str) else one for one in messages
        ]
        media = {'image': images, 'video': videos, 'audio': audios}
        self._check_audio(audios)
        text, answers = self.render(messages)
        add_special_tokens = self._adds_special_tokens(text)
        encoded = self._encode(text, media, add_special_tokens)
        if hasattr(self.processor, 'num_query_tokens'):
            encoded = self._with_queries(encoded, text[: answers[0].start] if answers else text)
        spans = self._token_spans(text, answers, encoded['input_ids'][0], add_special_tokens)
        encoded = self.control.spell({**encoded, 'labels': _labels(encoded['input_ids'], spans)})
        length = encoded['input_ids'].shape[1]
        if self.max_length is not None and length > self.max_length:
            num_media = sum(map(len, media.values()))
            found = f'{self.max_length} < {length} tokens with {num_media} media'
            remedy = 'Raise it, or set on_error=skip' + ' or fit=true' * (num_media > 0)
            raise ValueError(f'`max_length` must be at least the sample, got: {found}. {remedy}.')
        counts = {f'num_{modality}s': [len(media[modality])] for modality in {'image': None, **self.parts}}
        return {**encoded, 'sample_ids': [sample_id], **counts}

    def encode_record(self, record: Record, files: Sequence[MediaFile], *, shapes_only: bool = False) -> dict[str, Any]:
        """Encodes a record, the same wherever it and its files come from.

        Args:
            record: The conversation; with ``loss_weights`` the sample has such, of the labels' shape.
            files: One path or open file for each file of ``record.media``.
            shapes_only: Decode of the media no more than the shapes of the sample need.
        """
        self.check_takes_media(record)
        media = self.decode(record, files, shapes_only=shapes_only)
        try:
            named = {f'{modality}s': items for modality, items in media.items()}
            sample = self(record.messages(), **named, sample_id=record.sample_id)
        except ValueError as error:
            raise record.error(error) from error
        except Exception as error:  # no bad sample that `skip` may drop
            raise RuntimeError(str(record.error(f'{type(error).__name__}: {error}'))) from error
        if record.loss_weights is not None:
            sample[LOSS_WEIGHTS] = torch.full(sample['labels'].shape, record.loss_weights)
        return sample

    def decode(self, record: Record, files: Sequence[MediaFile], *, shapes_only: bool = False) -> dict[str, list[Any]]:
        """Decodes the media of a record as the processor takes them, all or only their shapes."""
        rate = getattr(self.parts.get('audio'), 'sampling_rate', 16000)
        return decode_media(record, files, video=self.video, sampling_rate=rate, shapes_only=shapes_only)

    def encode_unexpanded(self, conversations: Sequence[Sequence[Message]]) -> list[dict[str, torch.Tensor] | None]:
        """Encodes samples without expanding their placeholders: much faster, because no processor is run.

        Returns:
            ``input_ids`` and ``labels`` of each, ``(1, length)``; None where a conversation must be refused.
        """
        rendered: list[tuple[str, list[AnswerSpan]] | None] = [None] * len(conversations)
        for i, messages in enumerate(conversations):
            with suppress(Exception):  # whoever encodes the whole sample says what is wrong with it
                rendered[i] = self.render(messages)
        samples: list[dict[str, torch.Tensor] | None] = [None] * len(rendered)
        for added in (True, False):
            rows = [(i, *one) for i, one in enumerate(rendered) if one and self._adds_special_tokens(one[0]) is added]
            if not rows:
                continue
            tokens = self.tokenizer([text for _, text, _ in rows], add_special_tokens=added, **_IDS_ALONE)
            for (i, _, answers), ids, encoding in zip(rows, tokens['input_ids'], tokens.encodings, strict=True):
                input_ids = torch.tensor([ids])
                labels = _labels(input_ids, [_tokens_of(encoding, answer) for answer in answers])
                samples[i] = self.control.spell({'input_ids': input_ids, 'labels': labels})
        return samples

    def has_room(self, num_tokens: int, num_image_tokens: int) -> bool:
        """Tells whether a sample of so many tokens, and of its media, is under the caps."""
        pairs = ((num_tokens, self.max_length), (num_image_tokens, self.max_image_tokens))
        return all(cap is None or count <= cap for count, cap in pairs)

    def check_takes_media(self, record: Record) -> None:
        """Refuses media that the processor does not take, which would drop them, and looks for control tokens."""
        self.control.check(record)
        for modality in (medium.modality for medium in record.media if medium.modality not in self._written):
            reason = 'the chat template writes no placeholder for each; set another'
            if modality not in self.parts:
                reason = f'the processor takes none; use one with `{TAKEN_BY[modality][0]}`'
            raise record.error(f'has {modality}s, but {reason}')

    def _check_audio(self, audios: Sequence[Any]) -> None:
        """Refuses what is longer than their window, which feature extractors cut off without a word."""
        extractor = self.parts.get('audio')
        limit, longest = getattr(extractor, 'n_samples', None), max(map(len, audios), default=0)
        if limit is not None and longest > limit:
            seconds, window = (count / getattr(extractor, 'sampling_rate', 1) for count in (longest, limit))
            found = f'{round(seconds, 3)} s. Cut it'
            raise ValueError(f'an audio must be at most {round(window, 3)} s, what the processor takes, got: {found}')

    def render(self, messages: Sequence[Message]) -> tuple[str, list[AnswerSpan]]:
        """Writes the conversation out, image placeholders not expanded yet, and finds the answers in it."""
        # Templates treat white space around an answer in different ways.
        stripped = (
            {**one, **_said('assistant', _text(one).strip())} if one['role'] == 'assistant' else one for one in messages
        )
        messages = [self.control.hide(message) for message in stripped]
        answers = [message for message in messages if message['role'] == 'assistant']
        text, *following = self._text_around_answers(messages)
        spans: list[AnswerSpan] = []
        written = text
        for message, after in zip(answers, following, strict=True):
            start, answer = len(text), _text(message)
            text, written = text + answer, written + answer + after
            ending = after[: len(after) - len(after.lstrip())] + self.end_token
            if not after.startswith(ending):  # the template ends no answer: LLaVA-1.5's writes a space there
                ending = self.end_token
                after = ending + after.lstrip(' ')
            if message.get('weight', 1):
                spans.append(AnswerSpan(start, len(text) + len(ending)))
            text += after
        if written != self._apply_template(messages):
            found = 'one that changes them or what stands around them. Use a training template'
            raise ValueError(f'`chat_template` must write the assistant turns as they are, got: {found}.')
        self._check_all_written(messages, written)
        return text, spans

    def _check_all_written(self, messages: Sequence[Message], written: str) -> None:
        """Checks that no role is left out, as templates do without a word with one that they do not know."""
        versions = [(messages, written)]
        # What is said may stand elsewhere too, markers do not; one sample tells of all with the same roles.
        if (roles := tuple(message['role'] for message in messages)) not in self._known_roles:
            marked = [_marked(message, position) for position, message in enumerate(messages)]
            versions.append((marked, self._apply_template(marked)))
        for message, text in ((message, text) for version, text in versions for message in version):
            if any(part['type'] == 'text' and part['text'].strip() not in text for part in message['content']):
                found = 'one that leaves it out. Set another, or write the text into the turn of another role'
                raise ValueError(f'`chat_template` must write what the {message["role"]} says, got: {found}.')
        self._known_roles.add(roles)

    def _writes_parts(self) -> bool:
        """Tells whether the template takes lists of parts: one for strings fails, or writes them as Python does."""
        self._takes_parts = True
        with suppress(TypeError, ValueError):
            return "'text': 'q'" not in self._apply_template([_said('user', 'q')])
        return False

    def _writes_media(self, modality: str) -> bool:
        """Tells whether the template writes something for each medium, or the processor does it by itself."""
        if hasattr(self.processor, 'num_query_tokens'):
            return True
        question = _said('user', 'q')
        with suppress(TypeError, ValueError):
            media = ([{'type': modality}] * count for count in range(3))
            asked = [{**question, 'content': [*some, *question['content']]} for some in media]
            none, one, two = (len(self._apply_template([message])) for message in asked)
            return none < one < two
        return False

    def _template_owner(self) -> Any:
        """Returns the processor, or the tokenizer: loaded from a folder, BLIP's processors drop their template."""
        return self.processor if getattr(self.processor, 'chat_template', None) else self.tokenizer

    def _apply_template(self, messages: Sequence[Message]) -> str:
        messages = [
            {'role': message['role'], 'content': message['content'] if self._takes_parts else _text(message)}
            for message in messages
        ]
        try:
            return self._template_owner().apply_chat_template(messages, tokenize=False)
        except (TemplateError, ArithmeticError) as error:
            found = f'{type(error).__name__}: {error}'
            raise ValueError(f'`chat_template` must write such messages, got: {found}. Set another.') from error

    def _text_around_answers(self, messages: Sequence[Message]) -> list[str]:
        """Returns what the template writes before the first answer, between two, and after the last."""
        answers = {i: _marked(message, i) for i, message in enumerate(messages) if message['role'] == 'assistant'}
        rest, pieces = self._apply_template([answers.get(i, message) for i, message in enumerate(messages)]), []
        for answer in answers.values():
            piece, _, rest = rest.partition(_text(answer))
            pieces.append(piece)
        return [*pieces, rest]

    def _find_end_token(self) -> str:
        """Returns the token that the template puts behind an answer, or the tokenizer's ``eos_token``."""
        after = self._text_around_answers([_said('user', 'q'), _said('assistant', 'a')])[1].lstrip()
        # Whole tokens, special or not: some tokenizers have ChatML's as plain added ones.
        whole = {*map(str, self.tokenizer.added_tokens_decoder.values()), *self.tokenizer.all_special_tokens}
        found = max((token for token in whole if after.startswith(token)), key=len, default=None)
        if (end_token := found or self.tokenizer.eos_token) is None:
            found = 'none, of template or tokenizer. Set `processor.tokenizer.eos_token`'
            raise ValueError(f'`processor` must have an ending token, got: {found}.')
        return end_token

    def _adds_special_tokens(self, text: str) -> bool:
        """Tells whether the tokenizer adds the first token: not a second time, where the template writes it."""
        bos = self.tokenizer.bos_token
        return not (bos and text.startswith(bos))

    def _encode(
        self, text: str, media: Mapping[str, Sequence[Any]], add_special_tokens: bool
    ) -> dict[str, torch.Tensor]:
        options: dict[str, Any] = {'return_tensors': 'pt', 'add_special_tokens': add_special_tokens}
        options |= {key: dict(values) for key, values in self.media_options.items()}
        given = {modality: list(items) for modality, items in media.items() if items}
        videos = given.get('video', [])
        if not self.parts:
            return dict(self.tokenizer([text], **options))
        if hasattr(self.processor, 'num_query_tokens'):  # a clip is an image to it
            images = [*given.get('image', ()), *(video.frames for video in videos)]
            return dict(self.processor(text=[text], **({'images': images} if images else {}), **options))
        if 'image' in given:
            given['image'] = [given['image']]  # of the one text: OneVision cuts a text's only image into tiles
        if videos:
            given['video'] = [video.frames for video in videos]
            # The frames are chosen already.
            metadata = [dict(video.metadata) for video in videos]
            options.setdefault('videos_kwargs', {}).update(video_metadata=metadata, do_sample_frames=False)
        if 'audio' in given:
            options['audio_kwargs'] = {'sampling_rate': self.parts['audio'].sampling_rate}
        arguments = {TAKEN_BY[modality][1]: items for modality, items in given.items()}
        encoded = dict(self.processor(text=[text], **arguments, **options))
        has_slots = videos and 'pixel_values_videos' not in encoded and encoded['pixel_values'].dim() == 5
        if has_slots and len(videos) + len(given.get('image', ())) > 1:
            found = f'{type(self.processor).__name__}, which takes one video in a conversation and no image beside it'
            raise ValueError(f'`processor` must join the pixels of all media, got: {found}. Split the conversation')
        for key in {'video_second_per_grid', 'second_per_grid_ts'} & encoded.keys():
            # Qwen-Omni's processor takes all frames for two a second, and Qwen2.5-VL's did in Transformers 4.57.
            together = self.parts['video'].temporal_patch_size
            encoded[key] = torch.tensor([together * one.metadata['duration'] / len(one.frames) for one in videos])
        return encoded

    def _with_queries(self, encoded: dict[str, torch.Tensor], instruction: str) -> dict[str, torch.Tensor]:
        """Checks what a processor with query tokens (BLIP) encodes, and hides answers from its query transformer.

        Such a processor writes the queries of one image whatever the number of images, and its model does not count
        them. It takes all the text for the instruction, answers included, and writes one for samples without images.
        """
        pixels = encoded.get('pixel_values')
        expected = 0 if pixels is None else self.processor.num_query_tokens * pixels.shape[:-3].numel()
        token = getattr(self.processor, 'image_token', None) or self.processor.video_token
        found = int((encoded['input_ids'] == self.tokenizer.convert_tokens_to_ids(str(token))).sum())
        if found != expected:
            raise ValueError(
                f'`processor` must write {expected} query tokens for the media of a sample, got: {found}. It takes one '
                'image, or one clip of four frames, for which the chat template must write nothing.'
            )
        if 'qformer_input_ids' not in encoded:
            return encoded
        rest = {key: value for key, value in encoded.items() if not key.startswith('qformer_')}
        if pixels is None:
            return rest
        tokenizer = self.processor.qformer_tokenizer
        instructed = tokenizer([instruction], return_tensors='pt', verbose=False)
        if (length := instructed['input_ids'].shape[1]) > tokenizer.model_max_length:
            found = f'{length} tokens, over its limit of {tokenizer.model_max_length}. Shorten it'
            raise ValueError(f'`qformer_tokenizer` must have room for all before the first answer, got: {found}.')
        return {**rest, **{f'qformer_{key}': instructed[key] for key in ('input_ids', 'attention_mask')}}

    def _token_spans(
        self, text: str, answers: Sequence[AnswerSpan], input_ids: torch.Tensor, add_special_tokens: bool
    ) -> list[tuple[int, int]]:
        """Finds positions ``[start, end)`` of each answer in ``input_ids``, whose placeholders are expanded.

        First in the tokens of the text alone, where the tokenizer knows characters, then again by the last token of
        the answer, which ends it and which no medium is made of: ``U <image> A Red.`` is ``[U, I, A, Red, .]`` and
        expanded, with three tokens an image, ``[U, I, I, I, A, Red, .]``, so that its only ``.`` moves from 4 to 6.
        """
        tokens = self.tokenizer(text, add_special_tokens=add_special_tokens, **_IDS_ALONE)
        text_ids = torch.tensor(tokens['input_ids'])
        spans = []
        for answer in answers:
            first, last = _tokens_of(tokens.encodings[0], answer)
            before, after = ((ids == text_ids[last - 1]).nonzero()[:, 0] for ids in (text_ids, input_ids))
            last_at = int(after[before == last - 1]) + 1 if len(before) == len(after) else 0
            first_at = last_at - (last - first)
            if not torch.equal(input_ids[first_at:last_at], text_ids[first:last]):
                found = f'{type(self.processor).__name__}, which writes other tokens for {text[slice(*answer)]!r}'
                raise ValueError(f'`processor` must expand nothing but placeholders, got: {found}.')
            spans.append((first_at, last_at))
        return spans


def _labels(input_ids: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns labels ``(1, length)`` of the tokens in the spans, and of no others."""
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    for start, end in spans:
        labels[0, start:end] = input_ids[0, start:end]
    return labels


def _tokens_of(encoding: Encoding, answer: AnswerSpan) -> tuple[int, int]:
    """Returns positions ``[first, last)`` of the tokens that hold characters of an answer; spaces may be in none."""
    characters = range(answer.start, answer.end)
    first, last = (
        next(token for place in places if (token := encoding.char_to_token(place)) is not None)
        for places in (characters, reversed(characters))
    )
    return first, last + 1


def _said(role: str, text: str) -> dict[str, Any]:
    return {'role': role, 'content': [{'type': 'text', 'text': text}]}


def _marked(message: Message, position: int) -> Message:
    """Returns the same turn with a marker for each text."""
    marks = ({'text': MARKER.format(f'{position}.{i}')} for i in range(len(message['content'])))
    parts = zip(message['content'], marks, strict=True)
    return {**message, 'content': [{**part, **mark} if part['type'] == 'text' else part for part, mark in parts]}


def _text(message: Message) -> str:
    return ''.join(part['text'] for part in message['content'] if part['type'] == 'text')
