# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""All model types, tried again and held to the table: ``make model-types``. Not collected by itself."""

from __future__ import annotations

import pytest

from tests.model_types.table import results
from tests.model_types.trial import assert_as_the_table_says

ALL_TYPES = [(kind, model_type) for kind, types in results().items() for model_type in types]


@pytest.mark.parametrize(('kind', 'model_type'), ALL_TYPES)
def test_type_is_as_the_table_says(kind, model_type):
    assert_as_the_table_says(model_type, kind)
