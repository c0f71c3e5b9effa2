# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest

from composer_tokacc.data import VisionLanguageCollator
from examples.digits import DigitsDataset, build_digits_processor


@pytest.fixture(scope='package')
def processor():
    return build_digits_processor()


@pytest.fixture(scope='package')
def batch(processor):
    dataset = DigitsDataset(processor, num_samples=12, max_images=3)
    return VisionLanguageCollator(processor)([dataset[index] for index in range(12)])
