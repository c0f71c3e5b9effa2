# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Data, processor and vocabulary in a few characters each, by which what was made of them is known again."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from composer_tokacc.cache import fingerprint
from composer_tokacc.data.records import BadSampleError

NUM_READ = 64
"""Samples that stand for a dataset that says nothing about itself."""


def identify_data(dataset: Any) -> str:
    """Returns what changes with what a model is trained on, and not with where it lies.

    That is ``dataset.identity()``, or ``dataset.fingerprint()``, where there is such a method. Otherwise it is the
    number of samples and the token ids of 64 of them, evenly spread: a change of samples between those goes unnoticed.
    Of a bad sample it is the reason; whoever reads all of them says what becomes of it.
    """
    if isinstance(dataset, ConcatDataset):
        return fingerprint([identify_data(part) for part in dataset.datasets])
    own = getattr(dataset, 'identity', None) or getattr(dataset, 'fingerprint', None)
    if callable(own):
        return fingerprint(own())
    found: list[Any] = [len(dataset)]
    for index in np.unique(np.linspace(0, len(dataset) - 1, NUM_READ).astype(int)).tolist():
        try:
            check_sample(sample := dataset[index], 'input_ids')
            found.append(np.asarray(sample['input_ids']).tolist())
        except BadSampleError as error:
            found.append(str(error))
    return fingerprint(found)


def check_sample(sample: Any, *needed: str) -> None:
    """Raises ValueError unless a sample is a mapping with such keys."""
    keys = getattr(sample, 'keys', tuple)()
    if missing := set(needed) - set(keys):
        found = f'one without {min(missing)}' if keys else type(sample).__name__
        raise ValueError(f'`dataset` must give samples with `input_ids` and `labels`, got: {found}.')


def identify_processor(processor: Any) -> str:
    """Returns what changes with what a processor makes of text and media, its vocabulary left out."""
    tokenizer = getattr(processor, 'tokenizer', processor)
    parts = [getattr(processor, name, None) for name in ('image_processor', 'video_processor', 'feature_extractor')]
    template = getattr(processor, 'chat_template', None) or getattr(tokenizer, 'chat_template', None)
    settings = [getattr(part, 'to_dict', dict)() for part in (processor, *parts)]
    return fingerprint([class_name(processor), settings[0], settings[1:], template])


def identify_vocabulary(processor: Any) -> str:
    """Returns what changes with the tokens and their numbers, and with those that begin, end and fill up a text."""
    tokenizer = getattr(processor, 'tokenizer', processor)
    tokens = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, 'get_vocab') else []
    return fingerprint([tokens, getattr(tokenizer, 'special_tokens_map', {})])


def class_name(thing: Any) -> str:
    """Returns the full name of an object's class."""
    return f'{type(thing).__module__}.{type(thing).__qualname__}'
