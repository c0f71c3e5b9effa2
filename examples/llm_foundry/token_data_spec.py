# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Has llm-foundry wrap its loaders with token_data_spec: exact counts, and microbatches that are regrouped and trimmed.

``llmfoundry train examples/llm_foundry/tiny.yaml 'code_paths=[examples/llm_foundry/token_data_spec.py]'``
"""

from collections.abc import Iterable
from typing import Any

from composer.core import DataSpec
from llmfoundry.registry import data_specs
from torch.utils.data import DataLoader

from composer_tokacc import token_data_spec


@data_specs.register('data_spec')  # the name that llm-foundry's loaders ask for
def build(dl: DataLoader | Iterable, dataset_cfg: dict[str, Any]) -> DataSpec:
    """``dl`` in place of llm-foundry's own ``DataSpec``, which cuts batches in order and trims nothing."""
    del dataset_cfg
    return token_data_spec(dl)
