# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: ModernBERT on ranks with different numbers of rows. Returns the errors."""

from __future__ import annotations

from composer.utils import dist

from composer_tokacc import token_data_spec
from tests.support.masked_text import masked_batch, masked_model
from tests.support.training import fit, loader, rank_share, reference_gradients, relative_error

LENGTHS = [4, 5, 9, 14, 6, 3, 2, 9]
NUM_ROWS = (3, 5)


def main() -> dict[str, float]:
    batch = masked_batch(LENGTHS)
    rows = rank_share(range(len(LENGTHS)), NUM_ROWS)
    rank_batch = {key: value[list(rows)] for key, value in batch.items()}
    errors = {}
    for packing in (False, True):
        for microbatch_size in (1, 3, 8):
            model = masked_model('modernbert')
            expected, _ = reference_gradients(model, batch)
            data = token_data_spec(loader(rank_batch), packing=packing)
            recorder = fit(model, data, microbatch_size=microbatch_size)
            if dist.get_global_rank() == 0:
                errors[f'packing={packing}, {microbatch_size}'] = relative_error(recorder.gradients, expected)
    return errors
