# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
import transformers

from composer_tokacc.layout import FAMILIES

pytest.importorskip('transformers.models.auto.auto_mappings', reason='of transformers 5')

from tests.matrix.model_types import MODEL_TYPES, entry_of, inferred
from tests.support.launch import ROOT


@pytest.mark.skipif(not transformers.__version__.startswith('5.23'), reason='the page lists the types of 5.23')
def test_page_lists_every_type_of_the_auto_classes():
    page = (ROOT / 'docs' / 'families.md').read_text()
    assert [model_type for model_type in MODEL_TYPES if f'`{model_type}`' not in page] == []


def test_types_without_an_entry_are_taken_for_a_format_or_for_none():
    if 'qwen3_5' not in MODEL_TYPES:
        pytest.skip('newer than this transformers')
    assert entry_of('qwen3_5') is None
    assert inferred('qwen3_5') == {'image': 'Qwen-VL', 'video': 'Qwen-VL'}
    assert inferred('lfm2_vl') == {}
    assert inferred('fuyu') == {}


def test_no_type_has_two_entries():
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types))
