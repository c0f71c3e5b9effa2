# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Whether the Hugging Face hub answers, which its own clients find out in minutes."""

from __future__ import annotations

import os
from typing import Literal

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

PATIENCE = 5.0
"""Seconds."""


def ask_hub(name: str, kind: Literal['model', 'dataset']) -> None:
    """Asks the hub once, and does not try again, unless the name is a folder or was kept by an earlier run.

    Raises:
        OSError: If it does not answer, or the name cannot be one of the hub.
    """
    file = {'model': 'config.json', 'dataset': 'README.md'}[kind]
    if constants.HF_HUB_OFFLINE or os.path.isdir(name):
        return
    try:
        if not isinstance(try_to_load_from_cache(name, file, repo_type=kind), str):
            get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=PATIENCE)
    except HfHubHTTPError:  # an answer; what the hub lacks is reported by who reads it
        return
    except HFValidationError as error:
        raise OSError('there is no such folder, and the hub has no such names') from error
    except Exception as error:  # of the client that huggingface_hub has chosen
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise OSError(
            f'{constants.ENDPOINT} does not answer: {reason}. Give a folder of this machine, or set HF_HUB_OFFLINE=1 '
            'for what an earlier run has kept'
        ) from error
