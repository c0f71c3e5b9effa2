# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""`verify_isolation`: whether documents of a packed row see each other."""

from __future__ import annotations

import math

import pytest
import torch

from composer_tokacc import verify_isolation
from tests.checks.test_written_state import Cache, with_layers
from tests.support.text import packed_row, text_model, text_rows
from tests.support.training import hugging_face


def document_numbers(lengths):
    """Returns the number of the document of each token, for one row of documents of these lengths."""
    return torch.repeat_interleave(torch.tensor(lengths))[None]


PACKED = {
    'input_ids': torch.tensor([[5, 9, 7, 12, 30, 8, 41, 22, 17, 3, 5, 28, 11, 19]]),
    'position_ids': torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4]]),
}
DOCUMENTS = document_numbers([5, 4, 5])
"""The documents of ``PACKED``."""


def packed_documents(document_sizes):
    """Returns a row of documents of the given (length, labelled tokens), and the document of each token."""
    packed = packed_row(text_rows(document_sizes))
    lengths = [length for length, _ in document_sizes]
    return packed, document_numbers(lengths)


def pairs_of(report):
    """Returns (row, document that sees, document that is seen) of each leak."""
    return [leak[:3] for leak in report.leaks]


def change_of_logits(model, reader, source):
    """Returns the relative change of the logits of document ``reader`` if every id of ``source`` becomes 50."""
    changed_ids = PACKED['input_ids'].masked_fill(source == DOCUMENTS, 50)
    changed = {**PACKED, 'input_ids': changed_ids}
    is_read = reader == DOCUMENTS
    with torch.no_grad():
        before = model(**PACKED)[is_read]
        after = model(**changed)[is_read]
    change = (after - before).norm() / before.norm()
    return float(change)


# A model with attention.


@pytest.mark.parametrize('is_wrapped', [False, True], ids=['model', 'HuggingFaceModel'])
def test_isolation_of_documents(is_wrapped):
    """Positions that start again isolate documents. With running positions a document sees those before it."""
    packed, documents = packed_documents([(4, 2), (6, 3), (5, 5)])
    num_tokens = documents.numel()
    running = {**packed, 'position_ids': torch.arange(num_tokens)[None]}
    model = text_model()
    if is_wrapped:
        model = hugging_face(model)

    report = verify_isolation(model, packed, documents)
    report_of_running = verify_isolation(model, running, documents)
    with torch.no_grad():
        report_without_grad = verify_isolation(model, running, documents)

    assert report.is_isolated, report
    assert str(report) == 'isolated: 0 leaks'
    assert pairs_of(report_of_running) == [(0, 1, 0), (0, 2, 0), (0, 2, 1)]
    assert 'row 0: document 1 sees document 0: ' in str(report_of_running)
    assert pairs_of(report_without_grad) == pairs_of(report_of_running)


@pytest.mark.parametrize(
    ('documents', 'message'),
    [
        pytest.param(torch.zeros(1, 14, dtype=torch.long), '`documents` must be integers', id='one document'),
        pytest.param([[0, 1], [0]], r'`documents` must be integers .* got: \[\[0, 1\], \[0\]\]', id='ragged list'),
        pytest.param(torch.tensor(3), r'`documents` must be integers .* in the shape \(\)', id='one number'),
    ],
)
def test_unusable_documents_are_refused(documents, message):
    with pytest.raises(ValueError, match=message):
        verify_isolation(text_model(), PACKED, documents)


def test_isolation_needs_called_embeddings():
    """If a batch holds ``inputs_embeds`` instead of ids, no layer of the model embeds anything."""
    packed, documents = packed_documents([(4, 2), (6, 3)])
    model = text_model()
    ids = packed.pop('input_ids')
    embed = model.get_input_embeddings()
    packed['inputs_embeds'] = embed(ids)

    with pytest.raises(TypeError, match=r'must call its input embeddings, got: no call of Embedding'):
        verify_isolation(model, packed, documents)


def test_cache_that_grows():
    """The width of the cache is a plain number, and must fit its table in every forward."""
    packed, documents = packed_documents([(4, 2), (6, 3)])
    report = verify_isolation(with_layers(Cache()), packed, documents)
    assert report.is_isolated


def test_random_logits_are_refused():
    """The second call has logits that are twice as large."""
    model = text_model()
    num_calls = 0

    def scale_by_calls(module, args, outputs):
        nonlocal num_calls
        num_calls += 1
        outputs.logits = outputs.logits * num_calls

    model.register_forward_hook(scale_by_calls)
    batch = {**PACKED, 'use_cache': False}

    with pytest.raises(ValueError, match=r'same logits, got: a change of 5\.0e-01'):
        verify_isolation(model, batch, DOCUMENTS)


# Models in which each document sees all others, by the mean of the row.


class FaintMean(torch.nn.Module):
    """Adds the mean of the row to its states, times a number whose square is 0 in float32."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 32)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, position_ids):
        states = self.embedding(input_ids)
        return with_faint_mean(states)


def with_faint_mean(states):
    return states + 1e-30 * states.mean(dim=1, keepdim=True)


class WrittenEmbeddings(FaintMean):
    """Writes into the tensor of its embedding, as Kosmos-2 and Ovis 2 write the features of their images."""

    def forward(self, input_ids, position_ids):
        states = self.embedding(input_ids)
        states[:, 0] = 1.0
        return states + states.mean(dim=1, keepdim=True)


class NoGradEmbedding(FaintMean):
    """Computes its frozen embeddings without a graph."""

    def forward(self, input_ids, position_ids):
        with torch.no_grad():
            states = self.embedding(input_ids)
        return with_faint_mean(states)


class SecondEmbedding(FaintMean):
    """Embeds the ids twice, and uses only the second result.

    The leaks are too small to change the logits, so only the gradient by the second embeddings shows them.
    """

    def forward(self, input_ids, position_ids):
        self.embedding(input_ids)
        return super().forward(input_ids, position_ids)


class UnknownEmbedding(torch.nn.Module):
    """A module that cannot tell its input embedding, as Transformers raises it, around a model that can."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_input_embeddings(self):
        raise NotImplementedError('not auto-handled')

    def forward(self, **inputs):
        return self.model(**inputs)


ALL_PAIRS = [
    (0, 0, 1),
    (0, 0, 2),
    (0, 1, 0),
    (0, 1, 2),
    (0, 2, 0),
    (0, 2, 1),
]


@pytest.mark.parametrize(
    'make_model',
    [
        pytest.param(FaintMean, id='faint mean'),
        pytest.param(WrittenEmbeddings, id='embeddings written in place'),
        pytest.param(NoGradEmbedding, id='embeddings without a graph'),
        pytest.param(SecondEmbedding, id='second embedding'),
        pytest.param(lambda: UnknownEmbedding(FaintMean()), id='outer module without embedding'),
    ],
)
def test_leaks_between_all_documents(make_model):
    report = verify_isolation(make_model(), PACKED, DOCUMENTS)

    assert pairs_of(report) == ALL_PAIRS


def test_model_without_embedding_is_refused():
    model = UnknownEmbedding(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match='`model` must be a Hugging Face model, or hold one'):
        verify_isolation(model, PACKED, DOCUMENTS)


class DetachedEmbedding(FaintMean):
    """Detaches its embeddings, so that no gradient shows what its logits depend on."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(32, 64)

    def forward(self, input_ids, position_ids):
        states = self.embedding(input_ids).detach()
        return self.head(with_faint_mean(states))


def test_detached_embeddings_prove_nothing():
    with pytest.raises(TypeError, match='no gradient by them'):
        verify_isolation(DetachedEmbedding(), PACKED, DOCUMENTS)


# Models in which ids leak without a gradient.


class HashedBigrams(torch.nn.Module):
    """Embeds the hash of each token and the token before it.

    The hash has no gradient, so only other ids show that a document sees the last token of the document before it.
    """

    def __init__(self, *, is_isolated):
        super().__init__()
        self.llama = text_model()
        self.is_isolated = is_isolated
        torch.manual_seed(1)
        self.hashed = torch.nn.Embedding(97, 32)

    def get_input_embeddings(self):
        return self.llama.get_input_embeddings()

    def forward(self, input_ids, position_ids):
        ids_before = torch.nn.functional.pad(input_ids, (1, 0))[:, :-1]
        if self.is_isolated:
            ids_before = ids_before.masked_fill(position_ids == 0, 0)
        hashes = (ids_before * 31 + input_ids) % 97
        embed = self.get_input_embeddings()
        states = self.hashed(hashes) + embed(input_ids)
        return self.llama.lm_head(states)


PAIRS_OF_BIGRAMS = [(0, 1, 0), (0, 2, 1)]
"""The leaks of bigrams: a document sees only the one before it."""


class CappedExperts(torch.nn.Module):
    """Routes tokens to experts that take at most ``capacity`` tokens of a row, from the left.

    So documents on the left decide, without a gradient, which tokens of a later document are dropped.
    """

    def __init__(self, capacity):
        super().__init__()
        self.llama = text_model()
        self.capacity = capacity
        torch.manual_seed(1)
        self.router = torch.nn.Linear(32, 4, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 64) for _ in range(4))

    def get_input_embeddings(self):
        return self.llama.get_input_embeddings()

    def forward(self, input_ids, position_ids):
        embed = self.get_input_embeddings()
        embeddings = embed(input_ids)
        outputs = self.llama.model(inputs_embeds=embeddings, position_ids=position_ids)
        hidden = outputs.last_hidden_state
        logits = self.llama.lm_head(hidden)
        choices = self.router(embeddings).argmax(dim=-1)
        for number, expert in enumerate(self.experts):
            is_chosen = choices == number
            num_so_far = is_chosen.cumsum(dim=1)
            is_kept = is_chosen & (num_so_far <= self.capacity)
            logits = logits + expert(hidden) * is_kept[..., None]
        return logits


def test_hashed_bigrams_leak_without_gradient():
    model = HashedBigrams(is_isolated=False)

    report = verify_isolation(model, PACKED, DOCUMENTS)

    assert pairs_of(report) == PAIRS_OF_BIGRAMS
    for _, reader, source, size in report.leaks:
        assert change_of_logits(model, reader, source) > 1e-2
        assert size > 1e-2


# With the capacity 8, experts overflow only if a document has one id at all its positions.
@pytest.mark.parametrize('capacity', [4, 8])
def test_capped_experts_leak_without_gradient(capacity):
    model = CappedExperts(capacity)

    report = verify_isolation(model, PACKED, DOCUMENTS)

    assert report.leaks
    for _, reader, source, _ in report.leaks:
        assert reader > source, 'experts fill up from the left'


def test_leak_between_documents_of_one_id():
    """Three tokens in the middle of each document have one id, so the first document fills their expert."""
    document = [1, 9, 9, 9, 2]
    positions = [0, 1, 2, 3, 4]
    packed = {
        'input_ids': torch.tensor([document + document]),
        'position_ids': torch.tensor([positions + positions]),
    }
    documents = document_numbers([5, 5])

    report = verify_isolation(CappedExperts(capacity=3), packed, documents)

    assert report.leaks


@pytest.mark.parametrize(
    'make_model',
    [
        pytest.param(lambda: HashedBigrams(is_isolated=True), id='bigrams'),
        pytest.param(lambda: CappedExperts(capacity=1000), id='experts'),
    ],
)
@pytest.mark.parametrize('dropout', [0.0, 0.5])
def test_isolated_models_pass(make_model, dropout):
    model = make_model().train()

    def drop(module, args, output):
        return torch.nn.functional.dropout(output, dropout)

    model.llama.model.layers[0].register_forward_hook(drop)
    if not dropout:
        for reader, source in [(0, 1), (1, 0), (2, 0), (2, 1)]:
            assert change_of_logits(model, reader, source) < 1e-6

    report = verify_isolation(model, PACKED, DOCUMENTS)

    assert report.is_isolated, report


@pytest.mark.parametrize('mask', [-math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(
    ('is_isolated', 'expected_pairs'),
    [
        pytest.param(True, [], id='isolated'),
        pytest.param(False, PAIRS_OF_BIGRAMS, id='leaking'),
    ],
)
def test_isolation_with_masked_logits(is_isolated, expected_pairs, mask):
    """Some models mask the logits of ids that no text has. Their size says nothing about the others."""
    model = HashedBigrams(is_isolated=is_isolated)

    def mask_last_id(module, args, logits):
        masked = logits.clone()
        masked[..., -1] = mask
        return masked

    model.register_forward_hook(mask_last_id)

    report = verify_isolation(model, PACKED, DOCUMENTS)

    assert pairs_of(report) == expected_pairs
