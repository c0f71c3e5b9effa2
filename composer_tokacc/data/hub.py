# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Asks the Hugging Face hub once whether it answers. Its own clients would try again for minutes."""

from __future__ import annotations

import os
from typing import Literal

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

HUB = 'hf://datasets/'
"""Start of the name of a dataset of the hub: ``hf://datasets/owner/name``, or with ``/subset`` behind it."""
PATIENCE = 5.0
"""Seconds to wait for an answer."""
FILE_OF_KIND = {'model': 'config.json', 'dataset': 'README.md'}
"""A file that every repository of a kind has."""


def ask_hub(name: str, kind: Literal['model', 'dataset']) -> None:
    """Asks the hub for one file, once. Does nothing offline, for a folder, or if the file is in the hub's cache.

    Raises:
        OSError: If the hub does not answer, or the name cannot be one of the hub.
    """
    if constants.HF_HUB_OFFLINE or os.path.isdir(name):
        return
    file = FILE_OF_KIND[kind]
    try:
        is_cached = isinstance(try_to_load_from_cache(name, file, repo_type=kind), str)
        if not is_cached:
            get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=PATIENCE)
    except HfHubHTTPError:  # the hub answers, if only with an error. Loading reports a missing repository
        return
    except HFValidationError as error:
        raise OSError('there is no such folder, and the hub has no such names') from error
    except Exception as error:  # of the HTTP client that huggingface_hub uses
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise OSError(
            f'{constants.ENDPOINT} does not answer: {reason}. Give a folder of this machine, or set '
            'HF_HUB_OFFLINE=1 to use the files that an earlier run has downloaded'
        ) from error
