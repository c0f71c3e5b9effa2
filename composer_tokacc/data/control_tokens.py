# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Handles control tokens that stand in the texts of a dataset, such as ``<|im_end|>`` inside an answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, Literal, NamedTuple, get_args

import torch
from tokenizers import AddedToken

from composer_tokacc.arguments import check_choice
from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.data.records import PLACEHOLDERS, Message
from composer_tokacc.refusals import InvalidInputError

ControlTokens = Literal['warn', 'text', 'refuse']
"""Handling of a control token in a text. ``warn``: encode it as the control token, and name the first sample that
has one. ``text``: encode the characters that it is written with. ``refuse``: refuse the sample."""
STAND_IN = '\ue002{}\ue003'
"""Text of a new token that stands for a control token. ``{}`` becomes the number of different control tokens that were
hidden before. The characters around it are private-use ones of Unicode, as in ``chat_template.MARKER``."""

log = logging.getLogger(__name__)


class _StandIn(NamedTuple):
    """The new token of a tokenizer that stands for a control token."""

    token_id: int
    """The id of the new token."""
    repeated: str
    """The text of the new token, as often as the spelling has ids."""
    spelling: torch.Tensor
    """The ids that spell the control token, ``(ids,)``."""


class ControlTokenPolicy:
    """Finds control tokens in the texts of a dataset. Those that the chat template writes are not touched.

    The *spelling* of a control token is the ids that the tokenizer gives to its characters as plain text. With
    ``text``, a control token must be encoded as its spelling, but processors do not offer that. So before the template
    and the processor run, :meth:`hide` replaces it by stand-ins: a new token of the tokenizer, written as often as the
    spelling has ids. So all entries of the processor, such as masks, get their final length. Afterwards :meth:`spell`
    replaces each stand-in by one id of the spelling. All other tokens of the sample stay the same. For example, if the
    spelling of ``<|im_end|>`` has six ids, it becomes six stand-ins, and these become the six ids.

    Args:
        option: One of ``ControlTokens``.
        processor: The processor, or a tokenizer.
        template_tokens: Tokens of the chat template that begin or end turns. They may be plain ones, not special.
    """

    def __init__(self, option: ControlTokens, processor: Any, template_tokens: Iterable[str]) -> None:
        check_choice('control_tokens', option, get_args(ControlTokens))
        self.option = option
        self.processor = processor
        """The processor to encode with. With ``text``, it is a copy that gets the stand-ins as tokens."""
        if option == 'text':
            self.processor = deepcopy(processor)  # the caller's tokenizer must not get the stand-ins as tokens
        self.tokenizer = getattr(self.processor, 'tokenizer', self.processor)
        self._pattern = _pattern_of_control_tokens(self.tokenizer, template_tokens)
        self._has_warned = False
        self._stand_ins: dict[str, _StandIn] = {}
        """By control token, for those that were found so far."""

    def check(self, texts: Iterable[str], make_error: Callable[[str], Exception]) -> None:
        """Looks for control tokens in the texts of a conversation. With ``refuse`` raises an error if there are any.

        With ``warn`` only logs a warning, and only for the first such conversation. Both options refuse a tag such as
        ``<image>`` that is a token. With ``text`` nothing is checked, because :meth:`hide` replaces all control tokens.

        Args:
            texts: All texts of the conversation, without the placeholders of its media.
            make_error: Returns the error that names the conversation, for a reason such as "has the control token ...".
        """
        if self.option == 'text':
            return
        tokens = self._pattern.findall('\n'.join(texts))
        for token in tokens:
            if token in PLACEHOLDERS:  # the model expects a medium at this token
                raise make_error(
                    f'has `{token}` in a text where it stands for no medium, but the tokenizer has this token. Take it '
                    'out, or set control_tokens=text if it is a special token'
                )
        if not tokens:
            return
        error = make_error(f'has the control token {tokens[0]} in its text. Take it out, or set control_tokens=text')
        if self.option == 'refuse':
            raise error
        if not self._has_warned:
            self._has_warned = True
            log.warning('%s. It is encoded as a control token; later samples are not named.', error)

    def hide(self, message: Message) -> Message:
        """Returns a message with stand-ins for the control tokens in its texts. Adds new stand-ins to the tokenizer.

        Only ``text`` does this; other options change nothing. Raises ValueError if the tokenizer cannot spell a token.
        """
        if self.option != 'text':
            return message
        content = []
        for part in message['content']:
            if part.get('text'):
                text = self._pattern.sub(self._repeated_stand_in, part['text'])
                content.append({**part, 'text': text})
            else:
                content.append(part)
        return {**message, 'content': content}

    def unhide(self, text: str) -> str:
        """Returns a text with the control tokens in the place of their stand-ins. Undoes :meth:`hide`.

        Needed before the second tokenizer of InstructBLIP encodes the text, because it does not know the stand-ins.
        """
        for token, stand_in in self._stand_ins.items():
            text = text.replace(stand_in.repeated, token)
        return text

    def spell(self, sample: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Replaces the stand-ins of a sample by the spelling of their control token.

        Args:
            sample: An encoded sample of one row, with ``labels`` that are the ids or -100, not shifted.
        """
        input_ids = sample['input_ids'].clone()
        for stand_in in self._stand_ins.values():
            is_stand_in = input_ids == stand_in.token_id
            # Each control token has as many stand-ins as its spelling has ids, one after the other. So the spelling,
            # repeated for each control token, gives the ids of all stand-ins in order.
            num_control_tokens = int(is_stand_in.sum()) // len(stand_in.spelling)
            input_ids[is_stand_in] = stand_in.spelling.repeat(num_control_tokens)
        # If a stand-in carried loss, the id in its place carries loss.
        labels = sample['labels']
        return {
            **sample,
            'input_ids': input_ids,
            'labels': input_ids.where(labels != IGNORE_INDEX, IGNORE_INDEX),
        }

    def _repeated_stand_in(self, match: re.Match[str]) -> str:
        """Returns the stand-ins of a control token as text.

        Args:
            match: A match of ``_pattern``, that is, a control token in a text.
        """
        token = match[0]
        if token not in self._stand_ins:
            self._stand_ins[token] = self._make_stand_in(token)
        return self._stand_ins[token].repeated

    def _make_stand_in(self, token: str) -> _StandIn:
        """Makes the stand-in of a control token, and adds it to the tokenizer.

        Raises ValueError if the tokenizer cannot encode the characters of the control token as plain text.
        """
        spelling = self.tokenizer(token, add_special_tokens=False, split_special_tokens=True)['input_ids']
        # Some tokenizers do not split control tokens, or have no tokens for their characters.
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        is_spelled = spelling and token_id not in spelling and self.tokenizer.unk_token_id not in spelling
        if not is_spelled:
            raise InvalidInputError(f'the tokenizer cannot write the control token {token} as text. Take it out')
        text = STAND_IN.format(len(self._stand_ins))
        self.tokenizer.add_tokens([AddedToken(text, normalized=False)])
        return _StandIn(
            token_id=self.tokenizer.convert_tokens_to_ids(text),
            repeated=text * len(spelling),
            spelling=torch.tensor(spelling),
        )


def _pattern_of_control_tokens(tokenizer: Any, template_tokens: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that finds every special token of the tokenizer, and every one of ``template_tokens``.

    It also finds ``<image>``, ``<video>`` and ``<audio>`` if they are in the vocabulary. A model expects a medium at
    such a token, even if it is a plain one.
    """
    tokens = {*template_tokens, *tokenizer.all_special_tokens}
    tokens.update(tokenizer.get_vocab().keys() & set(PLACEHOLDERS))
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            tokens.add(str(token))
    # The longest first: a token may be the beginning of another.
    longest_first = sorted(tokens, key=len, reverse=True)
    escaped = [re.escape(token) for token in longest_first]
    return re.compile('|'.join(escaped))
