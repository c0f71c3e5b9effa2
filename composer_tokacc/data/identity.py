# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Computes fingerprints of data, processors and vocabularies. They show whether a cache or checkpoint still fits."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torch.utils.data import ConcatDataset

from composer_tokacc.cache import fingerprint, fingerprint_of_bytes
from composer_tokacc.data.chat_template import owner_of_template
from composer_tokacc.data.conversation import PROCESSOR_PARTS
from composer_tokacc.data.records import BadSampleError
from composer_tokacc.refusals import InvalidInputError

NUM_READ = 64
"""Maximum number of samples that are read to identify a dataset without an ``identity`` or ``fingerprint`` method."""


def identify_data(dataset: Any) -> str:
    """Returns a fingerprint of the data.

    It is a hash of ``dataset.identity()`` or, if there is no such method, of ``dataset.fingerprint()``. ``identity`` is
    preferred, because for ``LlavaDataset`` it does not change if the folder is moved.

    If the dataset has neither, it is a hash of the number of samples and the token ids of at most 64 of them, evenly
    spread. Then a change of labels, of media, or of a sample that is not read goes unnoticed. A bad sample raises no
    error here, because the run will handle it. The message of its error takes the place of its ids.

    Args:
        dataset: A map-style dataset, or a ``ConcatDataset`` of map-style datasets.

    Raises:
        ValueError: If a sample is not a mapping with ``input_ids``.
    """
    if isinstance(dataset, ConcatDataset):
        return fingerprint([identify_data(part) for part in dataset.datasets])
    for name in ('identity', 'fingerprint'):
        identify = getattr(dataset, name, None)
        if callable(identify):  # an attribute of a user's class may be something else
            identity = identify()
            if isinstance(identity, Iterator):  # of bytes, such as the parts of a file
                return fingerprint_of_bytes(identity)
            return fingerprint(identity)
    parts: list[Any] = [len(dataset)]
    indices = np.linspace(0, len(dataset) - 1, min(NUM_READ, len(dataset))).astype(int)
    for index in indices.tolist():
        try:
            sample = dataset[index]
            check_keys_of_sample(sample, 'input_ids')
            parts.append(np.asarray(sample['input_ids']).tolist())
        except BadSampleError as error:
            parts.append(str(error))
    return fingerprint(parts)


def check_keys_of_sample(sample: Any, *keys: str) -> None:
    """Raises ValueError unless a sample is a mapping with these keys (``input_ids``, ``labels`` or both)."""
    missing = set(keys)
    if hasattr(sample, 'keys'):
        missing -= set(sample.keys())
    if missing:
        got = f'a {type(sample).__name__} without {sorted(missing)}'
        raise InvalidInputError(f'`dataset` must give samples with `input_ids` and `labels`, got: {got}.')


def identify_processor(processor: Any) -> str:
    """Returns a fingerprint of a processor's settings and chat template.

    The vocabulary has its own fingerprint, see :func:`identify_vocabulary`.
    """
    template = getattr(owner_of_template(processor), 'chat_template', None)
    settings = _settings_of(processor)
    settings_of_parts = []
    for attributes_of_part in PROCESSOR_PARTS.values():
        # A part may be under one of several attributes. Only the first one is read, so that fingerprints of earlier
        # releases stay the same. The settings of an `audio_processor`, which is the second attribute for audio, are not
        # lost: Transformers 5 lists them among those of the processor.
        part = getattr(processor, attributes_of_part[0], None)
        settings_of_parts.append(_settings_of(part))
    return fingerprint([class_name(processor), settings, settings_of_parts, template])


def _settings_of(part: Any) -> dict[str, Any]:
    """Returns the settings of a processor or of one of its parts. Empty if it has none, or there is no such part."""
    if not hasattr(part, 'to_dict'):
        return {}
    return part.to_dict()


def identify_vocabulary(processor: Any) -> str:
    """Returns a fingerprint of the tokens and their ids, and of the special tokens, such as BOS, EOS and padding."""
    tokenizer = getattr(processor, 'tokenizer', processor)
    tokens: list[tuple[str, int]] = []
    if hasattr(tokenizer, 'get_vocab'):
        tokens = sorted(tokenizer.get_vocab().items())
    special_tokens = getattr(tokenizer, 'special_tokens_map', {})
    return fingerprint([tokens, special_tokens])


def identify_tokenization(processor: Any) -> str:
    """Returns a fingerprint of everything that decides how a fast tokenizer cuts a text into tokens.

    This is more than :func:`identify_vocabulary`, which does not include the merges, the normalizer or which tokens are
    matched first. That function must not change, because checkpoints hold its results. For a tokenizer that is not a
    fast one, returns ''.
    """
    tokenizer = getattr(processor, 'tokenizer', processor)
    backend = getattr(tokenizer, 'backend_tokenizer', None)
    if not isinstance(backend, Tokenizer):
        return ''
    # Not `backend.to_str()`, because it also has the padding and truncation of the last call, and parsing it takes
    # seconds for a large vocabulary.
    parts = [backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.model]
    identities_of_parts = [_identify_tokenizer_part(part) for part in parts]
    added_tokens = [(token_id, repr(token)) for token_id, token in sorted(tokenizer.added_tokens_decoder.items())]
    splits_special_tokens = getattr(tokenizer, 'split_special_tokens', False)
    return fingerprint([identities_of_parts, added_tokens, splits_special_tokens])


def _identify_tokenizer_part(part: Any) -> str:
    """Returns a fingerprint of a normalizer, pre-tokenizer, post-processor or model, or of None.

    For a part that is written in Python, returns the name of its class.
    """
    try:
        pickled = pickle.dumps(part, protocol=4)  # fixed, because the default protocol changes with Python's version
    except Exception:  # `tokenizers` raises Exception itself for a part that is written in Python (RoFormer's)
        return class_name(part)
    return fingerprint_of_bytes([pickled])


def class_name(instance: object) -> str:
    """Returns module and name of an object's class."""
    return f'{type(instance).__module__}.{type(instance).__qualname__}'
