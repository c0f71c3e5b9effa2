# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""All model types, tried again and held to the table: ``make model-types``. Not collected by itself."""

from __future__ import annotations

import pytest

from tests.model_types.exceptions import NEWER
from tests.model_types.table import kind_of, results
from tests.model_types.trial import tried


@pytest.mark.parametrize(('kind', 'model_type'), [(kind, one) for kind, types in results().items() for one in types])
def test_type_is_as_the_table_says(kind, model_type):
    found, kept = tried(model_type, kind), results()[kind][model_type]
    if NEWER in found.get('', ''):
        pytest.skip(NEWER)
    assert {key: kind_of(said) for key, said in found.items()} == {key: kind_of(said) for key, said in kept.items()}, (
        found
    )
