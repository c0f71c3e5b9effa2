# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``examples/masked_lm.py`` compared with a plain loop over whole batches. ``docs/encoders.md`` runs the program."""

from __future__ import annotations

import pytest
import transformers

from tests.ranks import masked_lm
from tests.support.launch import launch_json


@pytest.mark.slow
@pytest.mark.skipif(transformers.__version__.startswith('4.'), reason='encoders of Transformers 4 are not packed')
@pytest.mark.parametrize('ranks', [1, 2])
def test_every_cut_trains_as_whole_batches(ranks):
    if ranks == 1:
        results = masked_lm.main()
    else:
        results = launch_json('tests/ranks/masked_lm.py', ranks=ranks)
    assert len(results['errors']) == 6
    for name, error in results['errors'].items():
        assert error < 1e-6, name
    curves = results['curves']
    expected = curves.pop('one forward a step')
    # The losses fall by far more than the tolerance between the curves.
    assert expected[0] - expected[-1] > 0.1
    for name, losses in curves.items():
        assert losses == pytest.approx(expected, rel=2e-6), name
