# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: the first batch of rank 0 has only a row of one token. Returns the error."""

from __future__ import annotations

from composer.utils import dist

from composer_tokacc import token_data_spec
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit, loader, reference_gradients, relative_error

LENGTHS = [(1, 1), (9, 4)]


def main() -> dict[str, float]:
    rows = text_rows(LENGTHS)
    model = text_model()
    expected, _ = reference_gradients(model, collate(rows))
    data = token_data_spec(loader(collate([rows[dist.get_global_rank()]])))
    recorder = fit(model, data)
    return {'error': relative_error(recorder.gradients, expected)}
