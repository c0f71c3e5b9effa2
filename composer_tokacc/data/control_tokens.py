# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Control tokens in what users write, as ``<|im_end|>`` inside an answer: named, refused, or made plain text."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from copy import copy, deepcopy
from typing import Any, Literal, get_args

import torch
from tokenizers import AddedToken

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.data.records import Record

ControlTokens = Literal['warn', 'text', 'refuse']
"""Encode them as what they are, and name the first sample; encode them as text; refuse the sample."""
STAND_IN = '\ue002{}\ue003'
"""As the marker of an answer: no text holds it, no template changes it."""

log = logging.getLogger(__name__)


class ControlTokenPolicy:
    """Finds control tokens in what users wrote; those of the chat template stay what they are.

    To be encoded as text, each goes through template and processor as a token of its own, which its spelling then
    replaces: so it needs nothing of the processor, and no other token of the sample changes.
    """

    def __init__(self, option: ControlTokens, processor: Any, *, end_token: str) -> None:
        if option not in get_args(ControlTokens):
            raise ValueError(f'`control_tokens` must be one of {get_args(ControlTokens)}, got: {option!r}.')
        self.option, self.processor = option, processor
        self.tokenizer = tokenizer = getattr(processor, 'tokenizer', processor)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        tokens = sorted({*special, *tokenizer.all_special_tokens, end_token}, key=len, reverse=True)
        self._pattern = re.compile('|'.join(map(re.escape, tokens)))
        self._has_warned = False
        self._stand_ins: dict[str, str] = {}
        self._spelled: dict[int, torch.Tensor] = {}
        if option == 'text':  # the run's own must not know the stand-ins
            self.tokenizer = deepcopy(tokenizer)
            self.processor = self.tokenizer if tokenizer is processor else copy(processor)
            if tokenizer is not processor:
                self.processor.tokenizer = self.tokenizer

    def check(self, record: Record) -> None:
        """Refuses a record with control tokens in its text, or warns of the first."""
        if self.option == 'text' or self._has_warned:
            return
        if found := self._pattern.search('\n'.join(record.texts)):
            error = record.error(
                f'has the control token {found[0]} in its text. Take it out, or set control_tokens=text'
            )
            if self.option == 'refuse':
                raise error
            self._has_warned = True
            log.warning('%s. It is encoded as a control token; later samples are not named.', error)

    def hide(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a turn with stand-ins for what is to become text."""
        if self.option != 'text':
            return message
        texts = [self._pattern.sub(self._stand_in, part.get('text', '')) for part in message['content']]
        parts = [{**part, 'text': text} if text else part for part, text in zip(message['content'], texts, strict=True)]
        return {**message, 'content': parts}

    def spell(self, sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns a sample ``(1, length)`` with the tokens of its text in the place of each stand-in."""
        ids = sample['input_ids'][0].tolist()
        if self._spelled.keys().isdisjoint(ids):
            return sample
        pieces = [self._spelled.get(token, torch.tensor([token])) for token in ids]
        counts, input_ids = torch.tensor(list(map(len, pieces))), torch.cat(pieces)[None]
        per_token = {key: value for key, value in sample.items() if value.shape == (1, len(ids))}
        longer = {key: value.repeat_interleave(counts, dim=1) for key, value in per_token.items()}
        labels = longer['labels'].where(longer['labels'] == IGNORE_INDEX, input_ids)
        return {**sample, **longer, 'input_ids': input_ids, 'labels': labels}

    def _stand_in(self, match: re.Match[str]) -> str:
        token, tokenizer = match[0], self.tokenizer
        if token not in self._stand_ins:
            ids = tokenizer(token, add_special_tokens=False, split_special_tokens=True)['input_ids']
            if {tokenizer.convert_tokens_to_ids(token), tokenizer.unk_token_id} & {*ids} or not ids:
                raise ValueError(f'the tokenizer must have tokens for the text {token}, got: none. Take it out')
            stand_in = self._stand_ins[token] = STAND_IN.format(len(self._stand_ins))
            tokenizer.add_tokens([AddedToken(stand_in, normalized=False)])
            self._spelled[tokenizer.convert_tokens_to_ids(stand_in)] = torch.tensor(ids)
        return self._stand_ins[token]
