# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tells whether documents of packed rows see each other, in any model.

A document sees another one if its logits depend on the tokens of the other one. Such a dependence is called a leak.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from composer_tokacc.arguments import check_kind
from composer_tokacc.batch import Batch, text_of
from composer_tokacc.checks.logits import logits_of, tolerance_of
from composer_tokacc.checks.written_state import undisturbed
from composer_tokacc.layout.placeholders import all_placeholders
from composer_tokacc.model_structure import input_embedding
from composer_tokacc.random_state import same_random_numbers
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.step_watch import relative_difference


@dataclass(frozen=True, kw_only=True)
class IsolationReport:
    """The result of :func:`.verify_isolation`; printed as a line for each leak."""

    leaks: tuple[tuple[int, int, int, float], ...]
    """For each leak: the row, the number of a document, the number of the document that it sees, and the size.

    The size is the norm of the gradient. If the gradient is 0, it is the relative change of the logits when the seen
    document gets other ids."""

    @property
    def is_isolated(self) -> bool:
        """Whether no document sees another one."""
        return not self.leaks

    def __str__(self) -> str:
        lines = []
        for row, reader, source, size in self.leaks:
            lines.append(f'row {row}: document {reader} sees document {source}: {size:.1e}')
        verdict = 'NOT isolated' if self.leaks else 'isolated'
        lines.append(f'{verdict}: {len(self.leaks)} leaks')
        return '\n'.join(lines)


@dataclass(frozen=True)
class _Document:
    """A document of a packed row."""

    row: int
    number: int
    positions: torch.Tensor
    """Whether each position of the batch belongs to the document, bool ``(rows, width)``."""


class _LeakPlace(NamedTuple):
    """The place of a leak."""

    row: int
    reader: int
    """Number of the document that sees another one."""
    source: int
    """Number of the document that it sees."""


SizesOfLeaks = dict[_LeakPlace, float]
"""The size of each leak, as in :attr:`IsolationReport.leaks`."""


def verify_isolation(
    model: torch.nn.Module,
    packed: Batch,
    documents: torch.Tensor,
) -> IsolationReport:
    """Tells whether documents of packed rows see each other, in any model, with any packing.

    The gradient of each document's logits by the input embeddings of the others must be exactly 0. Masked attention
    makes it 0 in every precision, so no tolerance is needed. Some leaks have no gradient, for example through hashed
    n-grams of ids, or through experts with a capacity. So each document gets other ids in turn, and the logits of the
    others must stay the same, except for round-off. Only the gradient is checked if the batch has no ``input_ids``, or
    if there are fewer than two ids to choose from.

    Args:
        model: A Hugging Face model, or a module around one. It is checked in its present mode, training or evaluation.
        packed: A batch in the form that the model accepts, on its device. Labels are left out.
        documents: int ``(rows, width)``, the number of the document at each position. Negative: no document.

    Raises:
        ValueError: If ``documents`` has another shape than ``input_ids``, if no row has two documents, or if the model
            gives the same rows other logits each time.
        TypeError: If the model has no input embeddings, does not call them, or returns no logits with a gradient by
            them.

    Example:
        >>> import torch
        >>> from composer_tokacc import verify_isolation
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model, packed = LlamaForCausalLM(config), {'input_ids': torch.tensor([[1, 2, 3, 4, 5]]), 'use_cache': False}
        >>> documents = torch.tensor([[0, 0, 0, 1, 1]])
        >>> verify_isolation(model, packed, documents).is_isolated
        False
        >>> packed['position_ids'] = torch.tensor([[0, 1, 2, 0, 1]])
        >>> verify_isolation(model, packed, documents).is_isolated
        True
    """
    check_kind('model', model, torch.nn.Module)
    hugging_face_model, embedding = _model_with_embedding(model)
    shape = tuple(text_of(packed).shape)
    try:
        document_numbers = torch.as_tensor(documents)
    except (RuntimeError, TypeError, ValueError) as error:  # such as a list of rows of unequal widths
        raise InvalidInputError(
            f'`documents` must be integers in the shape of `input_ids`, {shape}, got: {documents!r:.80}.'
        ) from error
    documents_of_rows = _documents_of_rows(document_numbers, shape)
    inputs = dict(packed)
    inputs.pop('labels', None)
    sizes = _leaks_of_gradient(model, embedding, inputs, documents_of_rows)
    if isinstance(inputs.get('input_ids'), torch.Tensor):
        reserved = _reserved_ids(getattr(hugging_face_model, 'config', None))
        num_embeddings = getattr(embedding, 'num_embeddings', 0)
        replacements = _replacements(inputs['input_ids'], documents_of_rows, reserved, num_embeddings)
        # A leak that both functions find keeps the size of the gradient.
        sizes = _leaks_of_ids(model, inputs, documents_of_rows, replacements) | sizes
    leaks = [(place.row, place.reader, place.source, sizes[place]) for place in sorted(sizes)]
    return IsolationReport(leaks=tuple(leaks))


def _model_with_embedding(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Returns the outermost module that names its input embedding, which is a Hugging Face model, and the embedding.

    Raises TypeError if there is none.
    """
    for module in model.modules():
        embedding = input_embedding(module)
        if embedding is not None:
            return module, embedding
    raise TypeError(f'`model` must be a Hugging Face model, or hold one, got: {type(model).__name__}.')


def _documents_of_rows(documents: torch.Tensor, shape: tuple[int, ...]) -> list[_Document]:
    """Returns the documents of all rows. Raises ValueError if no row has two documents, or if the shape is another one.

    Args:
        documents: The number of the document at each position, ``(rows, width)``.
        shape: The shape that ``documents`` must have, which is the shape of the ids.
    """
    rows = torch.atleast_1d(documents)  # a single number has no rows, and is refused below
    numbers_by_row = [row[row >= 0].unique().tolist() for row in rows]
    most_documents = max(map(len, numbers_by_row), default=0)
    if documents.is_floating_point() or documents.shape != shape or most_documents < 2:
        raise InvalidInputError(
            f'`documents` must be integers in the shape of `input_ids`, {shape}, and some row must have at least two '
            f'documents, got: the documents {numbers_by_row} in the shape {tuple(documents.shape)}.'
        )
    documents_of_rows = []
    for row, numbers in enumerate(numbers_by_row):
        for number in numbers:
            positions = torch.zeros_like(documents, dtype=torch.bool)
            positions[row] = documents[row] == number
            documents_of_rows.append(_Document(row, number, positions))
    return documents_of_rows


def _others(document: _Document, documents: Sequence[_Document]) -> Iterator[_Document]:
    """Yields the documents that are in the same row as a document."""
    for other in documents:
        if other.row == document.row and other.number != document.number:
            yield other


@torch.enable_grad()
def _leaks_of_gradient(
    model: torch.nn.Module,
    embedding: torch.nn.Module,
    inputs: Batch,
    documents: Sequence[_Document],
) -> SizesOfLeaks:
    """Finds documents whose logits have a gradient by the embeddings of another document. The size is its norm."""
    logits, embeddings_of_calls = _logits_and_embeddings(model, embedding, inputs, documents[0].positions.shape)
    # One backward for each document computes the gradient of a sum of its logits. In a plain sum the gradients of
    # several logits could cancel, so each logit has a random factor.
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(logits.shape, generator=generator).to(logits)
    products = logits * factors
    sizes: SizesOfLeaks = {}
    for reader in documents:
        total = products[reader.positions].sum()
        # None for the embeddings of a call that these logits do not depend on.
        gradients = torch.autograd.grad(total, embeddings_of_calls, retain_graph=True, allow_unused=True)
        if all(gradient is None for gradient in gradients):
            raise TypeError(
                '`model` must compute its logits from its input embeddings, but the logits have no gradient by them. '
                'So leaks cannot be found. Do not detach the embeddings.'
            )
        for source in _others(reader, documents):
            norms = [_norm(gradient[source.positions]) for gradient in gradients if gradient is not None]
            size = math.hypot(*norms)  # the norm of all gradients together
            if size != 0.0:
                sizes[_LeakPlace(reader.row, reader.number, source.number)] = size
    return sizes


def _logits_and_embeddings(
    model: torch.nn.Module,
    embedding: torch.nn.Module,
    inputs: Batch,
    shape: torch.Size,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Makes a forward whose graph starts at the input embeddings. Returns the logits and the embeddings.

    There is one tensor of embeddings for each call of the embedding with ids of this shape, ``(rows, width)``. Other
    calls cannot be compared with the documents. Leaks through them show in :func:`_leaks_of_ids`.
    """
    embeddings_of_calls: list[torch.Tensor] = []

    def start_graph(module: torch.nn.Module, args: object, embeddings: torch.Tensor) -> torch.Tensor:
        leaf = embeddings.detach().requires_grad_()
        if leaf.shape[:2] == shape:
            embeddings_of_calls.append(leaf)
        # A copy, because some models write the features of images into this tensor. Autograd forbids to write into a
        # tensor at which the graph begins. The copy must have a gradient, even if the model embeds under `no_grad`.
        with torch.enable_grad():
            return leaf.clone()

    with embedding.register_forward_hook(start_graph):
        logits = _logits(model, inputs)
    if not embeddings_of_calls:
        raise TypeError(
            f'`model` must call its input embeddings, got: no call of {type(embedding).__name__} for the positions of '
            'the batch. Give `input_ids`, not `inputs_embeds`, to a model that embeds them as (rows, width).'
        )
    return logits, embeddings_of_calls


def _norm(tensor: torch.Tensor) -> float:
    """Returns the norm of a tensor. It is computed in float64, because squares of small numbers are 0 in float32."""
    return float(tensor.cpu().double().norm())


@torch.no_grad()
def _leaks_of_ids(
    model: torch.nn.Module,
    inputs: Batch,
    documents: Sequence[_Document],
    replacements: Sequence[torch.Tensor],
) -> SizesOfLeaks:
    """Finds documents whose logits change if another document gets other ids. The size is the relative change.

    The largest change counts. Changes within round-off are left out.

    Args:
        model: The model.
        inputs: The batch as it is.
        documents: The documents of all rows.
        replacements: Versions of the whole batch with other ids, see :func:`_replacements`. In each forward one
            document gets its ids from one of them.
    """
    expected = _logits(model, inputs)
    tolerance = tolerance_of(expected.dtype)
    # If the logits already change with the same ids, a change proves nothing. `not <=`, because a change may be NaN.
    change_with_same_ids = relative_difference(expected, _logits(model, inputs))
    if not change_with_same_ids <= tolerance:
        raise InvalidInputError(
            f'`model` must give the same rows the same logits, got: a change of {change_with_same_ids:.1e} in a second '
            'forward. Switch off what is random or counts its forwards.'
        )
    sizes: SizesOfLeaks = {}
    ids = inputs['input_ids']
    for source, replacement in product(documents, replacements):
        changed_ids = torch.where(source.positions.to(ids.device), replacement, ids)
        logits = _logits(model, {**inputs, 'input_ids': changed_ids})
        for reader in _others(source, documents):
            change = relative_difference(expected[reader.positions], logits[reader.positions])
            if not change <= tolerance:
                place = _LeakPlace(reader.row, reader.number, source.number)
                sizes[place] = max(change, sizes.get(place, 0.0))
    return sizes


def _logits(model: torch.nn.Module, inputs: Batch) -> torch.Tensor:
    """Returns the logits of a forward. Every call starts with the same random numbers and state of the model."""
    try:
        with undisturbed(model, watches_parameters=False), same_random_numbers():
            # Only models of Composer have `eval_forward`. They take the batch as one argument.
            outputs = model(dict(inputs)) if hasattr(model, 'eval_forward') else model(**inputs)
    except IndexError as error:  # raised on a CPU for an id that the embedding does not have
        raise InvalidInputError(f'`packed` must hold what the model takes, got: {error}.') from error
    logits = logits_of(outputs)
    if logits is None:
        raise TypeError(f'`model` must return logits (rows, width, vocabulary), got: {type(outputs).__name__}.')
    return logits


def _replacements(
    ids: torch.Tensor,
    documents: Sequence[_Document],
    reserved: set[int],
    num_embeddings: int,
) -> list[torch.Tensor]:
    """Returns several versions of a batch with other ids, because models leak in different ways.

    Reserved ids are neither replaced nor inserted. They may tell the model where documents and padding end, and there
    must be one placeholder for each image feature. So other reserved ids in a document could change the logits of other
    documents, although these do not see its text. The other ids of the documents are the ordinary ones. If these are
    fewer than two, all ids of the vocabulary count that are not reserved.

    In the first version each ordinary id becomes the next one, so every token differs. In each of the others all
    ordinary ids become the same one, so all tokens choose the same experts. If experts have a capacity, these overflow,
    and drop tokens of other documents. Which experts overflow depends on the id, so several ids are tried. Returns
    no version if there are still fewer than two ordinary ids.

    Args:
        ids: ``input_ids`` of the batch, ``(rows, width)``.
        documents: The documents of all rows.
        reserved: Ids to which the config gives a special meaning. Ids that separate the documents are added.
        num_embeddings: The size of the vocabulary, or 0 if it is not known.
    """
    ids_of_documents = [ids[document.positions].tolist() for document in documents]
    reserved = reserved | _separators(ids_of_documents)
    ordinary_ids = set().union(*ids_of_documents) - reserved
    if len(ordinary_ids) < 2:
        ordinary_ids = set(range(num_embeddings)) - reserved
    if len(ordinary_ids) < 2:
        return []
    ordinary = ids.new_tensor(sorted(ordinary_ids))
    last = len(ordinary) - 1
    # The place of each id among the ordinary ids. Reserved ids have none, and are put back below.
    places = torch.searchsorted(ordinary, ids).clamp(max=last)
    next_places = (places + 1) % len(ordinary)
    is_reserved = torch.isin(ids, ids.new_tensor(sorted(reserved)))
    replacements = []
    for other_ids in (ordinary[next_places], ordinary[0], ordinary[last // 2], ordinary[last]):
        replacements.append(torch.where(is_reserved, ids, other_ids))
    return replacements


def _separators(ids_of_documents: Sequence[Sequence[int]]) -> set[int]:
    """Returns the first id of the documents if it is the same in all of them, and likewise their last id.

    They may separate documents, even if the config does not name them.
    """
    separators: set[int] = set()
    first_ids = {ids[0] for ids in ids_of_documents}
    last_ids = {ids[-1] for ids in ids_of_documents}
    for ids in (first_ids, last_ids):
        if len(ids) == 1:
            separators |= ids
    return separators


def _reserved_ids(config: object) -> set[int]:
    """Returns the ids to which a config gives a special meaning: placeholders of media, begin, end and padding."""
    if config is None:
        return set()
    reserved = set(all_placeholders(config))
    for part in (config, getattr(config, 'text_config', None)):
        for name, value in getattr(part, '__dict__', {}).items():
            if not re.search('_token_(id|index)$', name):
                continue
            tokens = value if isinstance(value, (list, tuple)) else [value]  # Llama 3 has several ids for the end
            for token in tokens:
                if isinstance(token, int):
                    reserved.add(token)
    return reserved
