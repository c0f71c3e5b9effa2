# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Renders conversations with a chat template, and finds the answers in the rendered text.

The template is rendered a second time with a marker in the place of every answer. The text between the markers is the
text between the answers. So this works for templates that the package has never seen, and without ``{% generation %}``
tags. If these texts and the answers do not give the first rendering, the template has changed an answer, see
:meth:`ChatTemplate.render`.

Example: the template writes ``Q: Color? A: Red.<end>``, and with a marker ``Q: Color? A: MARKER<end>``. So the answer
comes after ``Q: Color? A: ``. It is followed by its ending ``<end>``, which the model must learn, too.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from jinja2 import TemplateError

from composer_tokacc.batch import MODALITIES
from composer_tokacc.data.records import Message
from composer_tokacc.refusals import InvalidInputError

MARKER = '\ue000{}\ue001'
"""Stands for a text of a message. ``{}`` becomes the indices of the message and of its part, such as ``2.0``. The two
characters around them are private-use ones of Unicode. Texts do not use them, and templates do not strip them."""

PRINTED_PART = re.compile(r"""['"]text['"]: ['"]q""")
"""Finds the text part of the question in :func:`example_conversation`, printed as Python or JSON does: ``'text': 'q'``.

A template that expects a string may print a list of parts like this, instead of writing only the text.
"""

log = logging.getLogger(__name__)


class AnswerSpan(NamedTuple):
    """Characters ``[start, end)`` of a rendered text that carry loss: an answer with its ending token."""

    start: int
    end: int


class Rendered(NamedTuple):
    """A conversation as text. Placeholders of media are not expanded."""

    text: str
    """The text that the template writes, plus the ending tokens that :class:`ChatTemplate` adds to answers without
    one. White space after such answers may be left out."""
    answers: list[AnswerSpan]
    """The answers that carry loss."""


class _TextsOfExample(NamedTuple):
    """The texts that a template writes around the questions and answers of an example."""

    before: str
    """The text before the first question, with a system text if the template writes one."""
    after_question: str
    """The text between a question and its answer."""
    after_answer: str
    """The text between an answer and the next question."""
    after_last: str
    """The text after the last answer."""


class _RoleContent(NamedTuple):
    """The content that a template takes in turns of a role."""

    is_parts: bool
    """Whether it takes a list of parts. If not, it takes a string, and the turn can have no media."""
    modalities: frozenset[str] = frozenset()
    """The modalities for which it writes a placeholder, one for each part of this modality."""


class ChatTemplate:
    """The chat template of a processor or tokenizer. Its properties, such as its ending token, are found by rendering.

    Args:
        owner: The processor or tokenizer that has the template. A processor that was loaded from a folder may have lost
            it (BLIP), while its tokenizer still has it.
        tokenizer: The tokenizer. Its special and added tokens may end an answer.
        takes_media: Whether messages may hold media. If not, the template gets the content of each message as a string.
            If so, it gets a list of parts, except in turns of a role for which it cannot write parts (the assistant in
            Pixtral, the system in Llama 3.2 Vision).
        add_end_token: Whether to add the ending token after answers that the template leaves open.

    Raises:
        ValueError: If neither the template nor the tokenizer has an ending token, or if the template raises an error
            for a question and its answer.
    """

    def __init__(
        self,
        owner: Any,
        tokenizer: Any,
        *,
        takes_media: bool,
        add_end_token: bool,
    ) -> None:
        self._owner = owner
        self._adds_end_token = add_end_token
        self._takes_media = takes_media
        self._content_by_role: dict[str, _RoleContent] = {}
        """The results of `_content_of`, by role."""
        self._checked_shapes: set[tuple[tuple[str, ...], ...]] = set()
        """Shapes of conversations (see `_shape_of`) for which a rendering with markers has shown that the template
        writes all turns, see `_check_markers_written`."""
        example = self._texts_of_example()
        added_tokens = _added_tokens_of(tokenizer)
        self._endings = _find_endings(example, tokenizer, added_tokens)
        """The texts that may end an answer, see `_find_endings`."""
        self.end_token = self._endings[0]
        """The ending token: it is added to answers that the template leaves open. Several tokens in Aya Vision."""
        self.control_tokens = _control_tokens_of(example, self._endings, added_tokens)
        """The tokens that end answers, end questions and begin a conversation. `ControlTokenPolicy` looks for them in
        the texts of a dataset, also if they are no special tokens."""
        has_ending = example.after_answer.lstrip().startswith(self._endings)
        last_has_ending = example.after_last.lstrip().startswith(self._endings)
        if add_end_token and not (has_ending and last_has_ending):
            _warn_of_added_token(self.end_token)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Renders a conversation and finds the answers that carry loss. Each answer must have a text part.

        Nearly all templates write answers as they are. Some change them: templates of reasoning models drop the
        thoughts of earlier answers. So three ways are tried in this order:

        1. With a marker for every answer. If ending tokens are added, answers without loss get one, too.
        2. With a marker for every answer that carries loss. The template may change the others. Their text stays as the
           template writes it, and they get no ending token.
        3. If the last message carries loss: with a marker for every earlier answer that does. The last one is looked
           for after the generation prompt. For all other answers it is as in way 2.

        Raises:
            ValueError: If the template leaves out or changes a turn. It may change only an answer without loss.
        """
        # Twice, because some templates write the date (Llama 3.2), and midnight may come between two renderings.
        for _ in range(2):
            rendered = self._render(messages)
            if rendered is not None:
                return rendered
        raise InvalidInputError(
            '`chat_template` must write the assistant turns as they are, but this one changes them, or the text around '
            'them. Set another, or train only the last answer with `dataset.train_on=last`: templates of reasoning '
            'models change earlier answers'
        )

    def _render(self, messages: Sequence[Message]) -> Rendered | None:
        """Tries the three ways of :meth:`render` once. Returns None if none of them finds the answers."""
        text = self.apply(messages)
        answer_indices = _indices_of_answers(messages)
        learned_indices = [index for index in answer_indices if _carries_loss(messages[index])]
        rendered = self._render_around_markers(messages, answer_indices, text)
        # Way 2. An answer without loss may be changed by the template, because the model only reads it.
        if rendered is None and learned_indices != answer_indices:
            rendered = self._render_around_markers(messages, learned_indices, text)
        # Way 3. Templates of reasoning models write an empty thought before a marker, because a marker has none. The
        # real answer brings its own thought, so it does not fit between the texts around the marker.
        last_index = len(messages) - 1
        if rendered is None and last_index in learned_indices:
            earlier = self._render_around_markers(messages, learned_indices[:-1], text)
            if earlier is not None:
                rendered = self._render_after_prompt(messages, text, earlier)
        if rendered is not None:
            self._check_all_written(messages, text)
        return rendered

    def apply(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Returns the text that the template writes for some messages.

        Args:
            messages: The messages. Their content is a list of parts.
            add_generation_prompt: Whether to end with the text after which the model writes its answer.

        Raises:
            ValueError: If the template raises a Jinja or arithmetic error. Other errors in it are passed on.
        """
        plain_messages = [self._for_template(message) for message in messages]
        try:
            return self._owner.apply_chat_template(
                plain_messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, ArithmeticError) as error:
            got = f'{type(error).__name__}: {error}'
            raise InvalidInputError(f'`chat_template` must write such messages, got: {got}. Set another.') from error

    def _for_template(self, message: Message) -> dict[str, Any]:
        """Returns a message in the form that the template takes: its content is a list of parts, or a string."""
        role = message['role']
        if not self._content_of(role).is_parts:
            return {'role': role, 'content': text_of(message)}
        # An empty turn gets an empty text, because some templates read the first part (SmolVLM).
        content = message['content'] or text_message(role, '')['content']
        return {'role': role, 'content': content}

    def has_placeholders(self, role: str, modality: str) -> bool:
        """Tells whether the template writes a placeholder for each medium in a turn.

        Args:
            role: ``user`` or ``tool``, because only their turns may hold media in a record.
            modality: The modality of the media.
        """
        return modality in self._content_of(role).modalities

    def _content_of(self, role: str) -> _RoleContent:
        """Returns the content that the template takes in turns of a role. It is a string if messages never hold media.

        Each role is tried once, by rendering examples.
        """
        if not self._takes_media:
            return _RoleContent(is_parts=False)
        if role not in self._content_by_role:
            self._content_by_role[role] = self._try_content(role)
        return self._content_by_role[role]

    def _try_content(self, role: str) -> _RoleContent:
        """Finds the result of :meth:`_content_of` by rendering examples with a list of parts in a turn of this role."""
        text = self._text_of_trial(role)
        # A template for strings raises, or writes the list as Python or JSON prints it.
        if not text or PRINTED_PART.search(text):
            return _RoleContent(is_parts=False)
        modalities = set()
        for modality in MODALITIES:
            text_with_one = self._text_of_trial(role, [modality])
            text_with_two = self._text_of_trial(role, [modality] * 2)
            if len(text) < len(text_with_one) < len(text_with_two):  # it writes something for each medium
                modalities.add(modality)
        return _RoleContent(is_parts=True, modalities=frozenset(modalities))

    def _text_of_trial(self, role: str, modalities: Sequence[str] = ()) -> str:
        """Returns the text of a conversation with a turn of this role and media. '' if the template raises an error."""
        question, answer = example_conversation()
        turn_of_user, _ = example_conversation(modalities)
        # Not given to `_for_template`, which would try this role again.
        conversation: list[Any] = [{**turn_of_user, 'role': role}]
        if role == 'system':
            conversation = [*conversation, self._for_template(question)]
        elif role == 'assistant':
            conversation = [self._for_template(question), *conversation]
        elif role == 'tool':  # a tool answers a request of the assistant
            conversation = [self._for_template(question), self._for_template(answer), *conversation]
        try:
            return self._owner.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False)
        except Exception:  # the template's code may raise anything
            return ''

    def _render_around_markers(self, messages: Sequence[Message], indices: Sequence[int], text: str) -> Rendered | None:
        """Finds answers: renders markers in their place, and puts the answers between the texts around the markers.

        Returns None if this does not give the text of the template. Then the template has changed an answer, or writes
        other text around it than around a marker.

        Args:
            messages: The conversation.
            indices: Indices of the messages whose answers are replaced by markers.
            text: The conversation as the template writes it.
        """
        before_first, *texts_after = self._text_around(messages, indices)
        text_with_answers = before_first
        for index, text_after in zip(indices, texts_after, strict=True):
            text_with_answers += text_of(messages[index]) + text_after
        if text_with_answers != text:
            return None
        # The same text again, now with the ending tokens that the template does not write.
        text_with_endings = before_first
        spans = []
        for index, text_after in zip(indices, texts_after, strict=True):
            start = len(text_with_endings)
            ending, text_after_ending = self._split_ending(text_after)
            text_with_endings += text_of(messages[index]) + ending
            if _carries_loss(messages[index]):
                spans.append(AnswerSpan(start, len(text_with_endings)))
            text_with_endings += text_after_ending
        return Rendered(text_with_endings, spans)

    def _split_ending(self, text_after: str) -> tuple[str, str]:
        """Splits the text after an answer into the ending and the rest.

        White space before the ending belongs to it: the model must write it, too. If the template writes no ending, the
        ending is the added token, or '' if no token is added.
        """
        after_space = text_after.lstrip()
        for ending in self._endings:
            if after_space.startswith(ending):
                after_ending = after_space[len(ending) :]
                return text_after.removesuffix(after_ending), after_ending
        if not self._adds_end_token:
            return '', text_after
        # LLaVA-1.5's template writes a space after an answer. LLaVA's training code writes the token instead of this
        # space, so the space is dropped.
        return self.end_token, text_after.lstrip(' ')

    def _render_after_prompt(self, messages: Sequence[Message], text: str, earlier: Rendered) -> Rendered | None:
        """Finds the last answer after the generation prompt, where a model would write it. None if it is not there.

        Templates of reasoning models write the thoughts of the last answer with other line breaks than the data. So the
        comparison ignores white space. Everything after the prompt must belong to the answer, because all of it is
        learned.

        For example, a template leaves the first answer, ``one``, open, and ends the last one, ``two``. (Here
        ``text_after_prompt`` begins with a space.) ::

            text                 Q: 1? A: one Q: 2? A: two<end>
            prompt               Q: 1? A: one Q: 2? A:
            text_after_prompt                          two<end>
            earlier.text         Q: 1? A: one<end>Q: 2? A: two<end>
            prompt_with_endings  Q: 1? A: one<end>Q: 2? A:

        Args:
            messages: The conversation. Its last message is an answer that carries loss.
            text: The conversation as the template writes it.
            earlier: The result of :meth:`_render_around_markers` for all answers that carry loss, except the last. Its
                text is the whole conversation. Ending tokens may have been added to its answers.
        """
        prompt = self.apply(messages[:-1], add_generation_prompt=True)
        if not text.startswith(prompt):
            return None
        text_after_prompt = text.removeprefix(prompt)
        reply = text_after_prompt.rstrip()
        space_after_reply = text_after_prompt.removeprefix(reply)
        # `end_token` is the only ending to look for, because it is the ending of last answers, see _find_endings().
        reply_without_ending = reply.removesuffix(self.end_token)
        answer_letters = _without_space(text_of(messages[-1]))
        # The prompt may hold the first letters of the answer: some prompts end in `<think>`.
        is_complete = _without_space(prompt + reply_without_ending).endswith(answer_letters)
        has_other_text = len(_without_space(reply_without_ending)) > len(answer_letters)
        if not is_complete or has_other_text:
            return None
        if not reply.endswith(self.end_token):
            space_after_reply = ''  # after an answer without an ending, white space is dropped
            if self._adds_end_token:
                reply += self.end_token
        # `earlier.text` differs from `text` only directly after earlier answers: ending tokens were added there, and
        # spaces dropped. All these places are in the prompt, so it still ends with `text_after_prompt`.
        prompt_with_endings = earlier.text.removesuffix(text_after_prompt)
        start = len(prompt_with_endings)
        span = AnswerSpan(start, start + len(reply))
        return Rendered(prompt_with_endings + reply + space_after_reply, [*earlier.answers, span])

    def _check_all_written(self, messages: Sequence[Message], text: str) -> None:
        """Raises ValueError if the template leaves out a turn, or changes one that is not an answer.

        Templates silently drop turns of roles that they do not know.
        """
        for message in messages:
            # Answers are not looked for in the text: `_render` has compared those that carry loss, and the template may
            # change the others. The markers show that none is left out.
            if message['role'] != 'assistant':
                _check_written(message, text)
        # The text of a dropped turn may also stand in another turn. A marker cannot.
        self._check_markers_written(messages)

    def _check_markers_written(self, messages: Sequence[Message]) -> None:
        """Renders the conversation with a marker for every text, and raises ValueError if one is left out or changed.

        It is done once for all conversations of the same shape.
        """
        shape = _shape_of(messages)
        if shape in self._checked_shapes:
            return
        marked_messages = _with_markers(messages, range(len(messages)))
        marked_text = self.apply(marked_messages)
        for message in marked_messages:
            _check_written(message, marked_text)
        self._checked_shapes.add(shape)

    def _text_around(self, messages: Sequence[Message], indices: Sequence[int]) -> list[str]:
        """Renders markers in the place of the texts of these messages, and cuts the rendered text at the markers.

        Returns the pieces: before the first marker, between the markers, and after the last. If the template leaves out
        a marker, all pieces after it are ''. Then `_render_around_markers` finds that they do not fit.
        """
        marked_messages = _with_markers(messages, indices)
        remaining = self.apply(marked_messages)
        pieces = []
        for index in indices:
            piece, _, remaining = remaining.partition(text_of(marked_messages[index]))
            pieces.append(piece)
        return [*pieces, remaining]

    def _texts_of_example(self) -> _TextsOfExample:
        """Renders an example of two questions and answers, or of one if the template raises an error for two.

        An error for one question is passed on.
        """
        try:
            conversation = example_conversation() + example_conversation()
            # `_` is the text after the second question. It is not needed, because the first question has the same.
            before, after_question, after_answer, _, after_last = self._text_around(conversation, range(4))
        except ValueError:  # perhaps the template refuses a second question
            before, after_question, after_last = self._text_around(example_conversation(), range(2))
            after_answer = after_last
        return _TextsOfExample(before, after_question, after_answer, after_last)


def owner_of_template(processor: Any) -> Any:
    """Returns the processor if it has a chat template, else its tokenizer.

    A processor that was loaded from a folder may have lost its template, while the tokenizer still has it.
    """
    if getattr(processor, 'chat_template', None):
        return processor
    return getattr(processor, 'tokenizer', processor)


@cache
def _warn_of_added_token(token: str) -> None:
    """Warns once in a process, because a run may open several datasets with the same template."""
    log.warning(
        'The chat template does not write %s after every answer. It is added to each answer and learned, because a '
        'model that never sees an end does not learn to stop. To train on the text as the template writes it, set '
        'dataset.add_end_token=false.',
        token,
    )


def only_last_learned(messages: Sequence[Message]) -> list[Message]:
    """Returns the conversation with loss on its last answer only.

    Raises:
        ValueError: If the last answer has ``weight`` 0.
    """
    answers = _indices_of_answers(messages)
    if answers and not _carries_loss(messages[answers[-1]]):
        raise InvalidInputError(
            'the last answer must carry loss with train_on=last, got: `weight` 0. Take the sample out'
        )
    changed = list(messages)
    for index in answers[:-1]:
        changed[index] = {**messages[index], 'weight': 0}
    return changed


def _added_tokens_of(tokenizer: Any) -> set[str]:
    """Returns the special and added tokens of a tokenizer, without tokens of white space.

    Some tokenizers add ChatML's tokens as plain ones. Gemma's tokenizer has added tokens of line breaks, which neither
    begin nor end anything.
    """
    tokens = {
        *map(str, tokenizer.added_tokens_decoder.values()),
        *tokenizer.all_special_tokens,
    }
    return {token for token in tokens if token.strip()}


def _control_tokens_of(example: _TextsOfExample, endings: Iterable[str], tokens: set[str]) -> set[str]:
    """Returns the tokens that end answers, end questions and begin a conversation.

    A token that begins only later turns, such as ``<|assistant|>``, is not among them. If it is a special token,
    `ControlTokenPolicy` finds it all the same.

    Args:
        example: The texts around questions and answers.
        endings: The texts that may end an answer.
        tokens: The special and added tokens of the tokenizer.
    """
    control_tokens = set(_first_tokens(example.before, tokens))
    # Only the first token after a question may end it. The next ones begin a turn.
    token_after_question = _first_token(example.after_question, tokens)
    if token_after_question is not None:
        control_tokens.add(token_after_question)
    for ending in endings:
        tokens_of_ending = _first_tokens(ending, tokens)
        if tokens_of_ending:
            control_tokens.update(tokens_of_ending)
        else:
            # Only the `eos_token` may be none of `tokens`. It is a plain token of the vocabulary then.
            control_tokens.add(ending)
    return control_tokens


def _find_endings(example: _TextsOfExample, tokenizer: Any, tokens: set[str]) -> tuple[str, ...]:
    """Returns the texts that may end an answer. The first one is added to answers that the template leaves open.

    Each is a token, or several without space between them (Aya Vision). Most templates have one ending. gpt-oss has
    two: it ends the last answer with ``<|return|>``, and earlier answers and questions with ``<|end|>``. If the
    template has no ending, it is the tokenizer's ``eos_token``.

    The endings are found by comparing the texts after answers with each other, and with the texts before and after a
    question.

    Args:
        example: The texts around questions and answers.
        tokenizer: The tokenizer. Has the ``eos_token``.
        tokens: Its special and added tokens. An ending consists of them.
    """
    tail_start = _first_token_of_common_tail(example, tokens)
    ending = _ending_of_all_answers(example, tokens, tail_start)
    if ending:
        return (ending,)
    endings = _endings_by_place(example, tokens, tail_start)
    if endings:
        return tuple(endings)
    if tokenizer.eos_token is None:
        raise InvalidInputError(
            '`processor` must have an ending token, but neither its chat template nor its tokenizer has one. Set '
            '`processor.tokenizer.eos_token`.'
        )
    return (tokenizer.eos_token,)


def _first_token_of_common_tail(example: _TextsOfExample, tokens: set[str]) -> str | None:
    """Returns the first token of the text that ``after_question`` and ``after_last`` both end with.

    It is needed for templates that write a generation prompt after every conversation, even if none is asked for (Llama
    3's first template). Then both texts end with the prompt, and either may have an ending before it::

        after_question   <turn>model:        <end><turn>model:   <end><turn>model:
        after_last       <end><turn>model:   <turn>model:        <end><turn>model:
        common tail      <turn>model:        <turn>model:        <end><turn>model:
        returned         <turn>              <turn>              <end>

    So one text ends with the other, and the tail is the shorter one. The returned token begins the prompt, or an ending
    if both texts have the same ending. It is None if neither text ends with the other, or if no token begins the tail.
    """
    texts = [example.after_last.rstrip(), example.after_question.rstrip()]
    shorter_text, longer_text = sorted(texts, key=len)
    if not longer_text.endswith(shorter_text):
        return None
    return _first_token(shorter_text, tokens)


def _ending_of_all_answers(example: _TextsOfExample, tokens: set[str], tail_start: str | None) -> str:
    """Returns the ending that both the last answer and earlier ones have. '' if there is none.

    After an earlier answer comes its ending, and then the next question. After the last answer comes only its ending
    (and perhaps the prompt). So the tokens that both texts begin with are the ending. An example with a template that
    writes a generation prompt after every conversation::

        before          <begin><turn>user:
        after_question  <end><turn>model:
        after_answer    <end><turn>user:
        after_last      <end><turn>model:

    Both texts after an answer begin with ``<end><turn>``. ``<turn>`` also stands before a question, so it begins the
    next turn. The ending is ``<end>``.
    """
    before_questions = _first_tokens(example.before, tokens)
    tokens_after_last = _first_tokens(example.after_last, tokens)
    tokens_after_answer = _first_tokens(example.after_answer, tokens)
    ending = ''
    for token, token_after_answer in zip(tokens_after_last, tokens_after_answer, strict=False):
        if token != token_after_answer:
            break
        # A token that also stands before a question begins the next turn, if it comes after an ending or begins the
        # common tail, which is the prompt then. (The tail may also begin with an ending, but an ending rarely stands
        # before a question.) Otherwise it is an ending: EXAONE 4 writes an empty system turn, with an ending, before
        # the first question.
        if token in before_questions and (ending or token == tail_start):
            break
        ending += token
    return ending


def _endings_by_place(example: _TextsOfExample, tokens: set[str], tail_start: str | None) -> list[str]:
    """Returns the ending of the last answer, and that of earlier answers, if the template writes them.

    Used if the two are not the same.
    """
    endings = []
    token_after_last = _first_token(example.after_last, tokens)
    if token_after_last is not None and token_after_last != tail_start:
        endings.append(token_after_last)
    # The first token after an earlier answer may end this answer, or begin the next question. It is an ending if it
    # also ends questions, and begins nothing in the text before the first question.
    token_after_answer = _first_token(example.after_answer, tokens)
    token_after_question = _first_token(example.after_question, tokens)
    if token_after_answer is not None and token_after_answer == token_after_question:
        beginning_tokens = {*_first_tokens(example.before, tokens), *_tokens_that_begin(example.before, tokens)}
        if token_after_answer not in beginning_tokens:
            endings.append(token_after_answer)
    return endings


def _first_token(text: str, tokens: Iterable[str]) -> str | None:
    """Returns the token at the beginning of a text, after white space. None if there is no token."""
    first_tokens = _first_tokens(text, tokens)
    return first_tokens[0] if first_tokens else None


def _first_tokens(text: str, tokens: Iterable[str]) -> list[str]:
    """Returns the tokens at the beginning of a text, in order.

    White space before the first token is ignored. Any other text ends the list, also white space between two tokens. So
    ``<|im_end|>``, a line break and ``<|im_start|>`` give only ``<|im_end|>``.

    Args:
        text: The text.
        tokens: The tokens to look for.
    """
    remaining = text.lstrip()
    first_tokens = []
    while True:
        # Of the tokens that fit, takes the longest, because one token may be the beginning of another.
        token = max(filter(remaining.startswith, tokens), key=len, default='')
        if not token:
            return first_tokens
        first_tokens.append(token)
        remaining = remaining.removeprefix(token)


def _tokens_that_begin(text: str, tokens: Iterable[str]) -> set[str]:
    """Returns the tokens that begin something: those before other text than white space, and the last one.

    A token before another token may end a part instead. Only the last place of each token counts. For example,
    ``<begin><system>one<end>two<end><user>`` gives ``<system>`` and ``<user>``. The first ``<end>`` stands before
    ``two``, but the last one before another token.

    Args:
        text: The text before a question.
        tokens: The tokens to look for. Of those that fit at a place, the longest is taken.
    """
    longest_first = sorted(tokens, key=len, reverse=True)
    pattern = '|'.join(re.escape(token) for token in longest_first)
    pieces = re.split(f'({pattern})', text)  # text, token, text, token, ..., text
    found_tokens = pieces[1::2]
    texts_after_tokens = pieces[2::2]
    last_texts_after: dict[str, str] = {}
    for token, text_after in zip(found_tokens, texts_after_tokens, strict=True):
        last_texts_after[token] = text_after  # a later place replaces an earlier one
    beginning_tokens = set(found_tokens[-1:])
    for token, text_after in last_texts_after.items():
        if text_after.strip():
            beginning_tokens.add(token)
    return beginning_tokens


def _without_space(text: str) -> str:
    return ''.join(text.split())


def _indices_of_answers(messages: Sequence[Message]) -> list[int]:
    indices = []
    for index, message in enumerate(messages):
        if message['role'] == 'assistant':
            indices.append(index)
    return indices


def _carries_loss(answer: Message) -> bool:
    return answer.get('weight', 1) != 0


def text_message(role: str, text: str) -> dict[str, Any]:
    """Returns a message whose content is one text part."""
    return {'role': role, 'content': [{'type': 'text', 'text': text}]}


def example_conversation(modalities: Sequence[str] = ()) -> list[Message]:
    """Returns two messages: a question about media of these modalities, and its answer."""
    content = [{'type': modality} for modality in modalities]
    content.append({'type': 'text', 'text': 'q'})
    return [
        {'role': 'user', 'content': content},
        text_message('assistant', 'a'),
    ]


def text_of(message: Message) -> str:
    """Returns the text of a message, without its media."""
    texts = []
    for part in message['content']:
        if part['type'] == 'text':
            texts.append(part['text'])
    return ''.join(texts)


def _with_markers(messages: Sequence[Message], indices: Iterable[int]) -> list[Message]:
    """Returns the messages. In those with these indices, each text is replaced by a marker."""
    marked_messages = list(messages)
    for index in indices:
        content = []
        for part_index, part in enumerate(messages[index]['content']):
            if part['type'] == 'text':
                part = {**part, 'text': MARKER.format(f'{index}.{part_index}')}
            content.append(part)
        marked_messages[index] = {**messages[index], 'content': content}
    return marked_messages


def _shape_of(messages: Sequence[Message]) -> tuple[tuple[str, ...], ...]:
    """Returns the role of each turn and the types of its parts, such as ``('user', 'image', 'text')``.

    The types decide what a template writes, too: an empty turn shows nothing, and some templates write only the first
    text of a turn, or only the part after an image.
    """
    turns = []
    for message in messages:
        types = [part['type'] for part in message['content']]
        turns.append((message['role'], *types))
    return tuple(turns)


def _check_written(message: Message, text: str) -> None:
    """Raises ValueError if a text of the message is not in the text that the template has written."""
    for part in message['content']:
        if part['type'] != 'text':
            continue
        part_text = part['text'].strip()  # as some templates do
        # Llama 3.1 and gpt-oss write the results of tools as JSON strings.
        part_text_in_json = json.dumps(part_text, ensure_ascii=False)[1:-1]
        if part_text not in text and part_text_in_json not in text:
            raise InvalidInputError(
                f'`chat_template` must write what the {message["role"]} says, but this one leaves it out or changes '
                'it. Set another, or write the text into the turn of another role.'
            )
