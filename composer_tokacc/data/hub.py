# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Asks the Hugging Face hub once whether it answers.

Done before a model or a dataset is loaded, because without an answer the libraries that load it try again for minutes.
"""

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
"""Start of a path that means a dataset of the hub: ``hf://datasets/owner/name``, or ``.../name/subset``."""
TIMEOUT = 5.0
"""Seconds to wait for an answer. This is ample for one small request, and short for a user who waits."""
FILE_OF_KIND = {'model': 'config.json', 'dataset': 'README.md'}
"""The file to ask for, by the kind of repository. Nearly all repositories have it. "No such file" is an answer, too."""


def ask_hub(name: str, kind: Literal['model', 'dataset']) -> None:
    """Asks the hub for one file, once. Does nothing offline, for a folder, or if the file is in the hub's cache.

    Args:
        name: ``owner/name`` of a repository, or a folder of this machine.
        kind: The kind of the repository.

    Raises:
        OSError: If the hub does not answer, or the name cannot be one of the hub.
    """
    if constants.HF_HUB_OFFLINE or os.path.isdir(name):
        return
    file = FILE_OF_KIND[kind]
    try:
        cached_path = try_to_load_from_cache(name, file, repo_type=kind)
    except HFValidationError as error:
        raise OSError('there is no such folder, and names on the hub have the form owner/name') from error
    # If the file is not in the cache, this is None, or a mark that the repository has no such file.
    if isinstance(cached_path, str):
        return  # libraries can load the repository without an answer of the hub
    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=TIMEOUT)
    except HfHubHTTPError:
        return  # the hub has answered. If the repository is missing, loading it says so
    except Exception as error:  # no answer. The HTTP client of huggingface_hub (requests or httpx) raises its own types
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise OSError(
            f'{constants.ENDPOINT} does not answer: {reason}. Give a folder of this machine, or set '
            'HF_HUB_OFFLINE=1 to use the files that an earlier run has downloaded'
        ) from error
