# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Makes llm-foundry wrap its loaders with token_data_spec: exact counts, and regrouped and trimmed microbatches.

``llmfoundry train examples/llm_foundry/tiny.yaml 'code_paths=[examples/llm_foundry/token_data_spec.py]'``
"""

from collections.abc import Iterable
from typing import Any

from composer.core import DataSpec
from llmfoundry.registry import data_specs
from torch.utils.data import DataLoader

from composer_tokacc import token_data_spec


@data_specs.register('data_spec')  # the name under which llm-foundry looks up the wrapper
def build(dl: DataLoader | Iterable, dataset_cfg: dict[str, Any]) -> DataSpec:
    """Wraps the loader. llm-foundry's own ``DataSpec`` cuts batches in order and trims nothing."""
    del dataset_cfg
    return token_data_spec(dl)
