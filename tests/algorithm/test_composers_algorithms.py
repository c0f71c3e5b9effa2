# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""TokenAccumulation with Composer's algorithms for language models: each row of the table in ``docs/trainer.md``.

The reference is stock Composer with the algorithm only, and one microbatch of the whole batch.
SeqLengthWarmup: ``tests/data_spec/test_batches_of_other_hosts.py``.
Microbatch size ``'auto'``: ``test_token_accumulation.py``, a retry after an out-of-memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from composer.algorithms import (
    EMA,
    SAM,
    SWA,
    Alibi,
    GatedLinearUnits,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    LowPrecisionLayerNorm,
    SelectiveBackprop,
)
from composer.core import Algorithm

from composer_tokacc import TokenAccumulation, token_data_spec
from tests.support.launch import ROOT
from tests.support.masked_text import masked_batch, masked_model
from tests.support.training import hugging_face, loader, relative_error, train

# The first batch has the shortest and the longest row, so that its check holds for all steps.
LENGTHS = ([3, 16, 4, 9], [4, 5, 14, 6])
WHOLE_BATCH = 4
EXACT: dict[str, Callable[[], Algorithm]] = {
    'GradientClipping norm': lambda: GradientClipping('norm', clipping_threshold=0.1),
    'GradientClipping value': lambda: GradientClipping('value', clipping_threshold=0.01),
    'GradientClipping adaptive': lambda: GradientClipping('adaptive', clipping_threshold=0.01),
    'EMA': lambda: EMA(half_life='2ba'),
    'SWA': lambda: SWA(swa_start='0.3dur', swa_end='0.9dur', update_interval='1ba'),
    'SAM': lambda: SAM(rho=0.05),
    'LowPrecisionLayerNorm': LowPrecisionLayerNorm,
    'GatedLinearUnits': GatedLinearUnits,
    'LayerFreezing': lambda: LayerFreezing(freeze_start=0.0),  # half of the layers for the second epoch
}


def selective_backprop() -> SelectiveBackprop:
    return SelectiveBackprop(start=0.0, end=1.0, interrupt=0, input_key='input_ids', target_key='labels')


NOT_IN_COMPOSER: dict[str, tuple[Callable[[], Algorithm], str]] = {
    'SelectiveBackprop': (selective_backprop, 'Unexpected batch type'),
    'LabelSmoothing': (lambda: LabelSmoothing(target_key='labels'), 'Multiple tensors not supported'),
    # It calls attention as Transformers did until 2023.
    'Alibi': (lambda: Alibi(max_sequence_length=64, train_sequence_length_scaling=1.0), 'forward'),
}
"""Algorithms that Composer itself cannot run with the model, and key words of its error."""


def weights_after_training(algorithm: Algorithm, *, microbatch_size: int, is_ours: bool) -> dict[str, torch.Tensor]:
    """Returns the weights after two epochs. They include the averages of EMA."""
    model = hugging_face(masked_model('bert'))
    batches = [masked_batch(lengths) for lengths in LENGTHS]
    data: Any = loader(*batches)
    algorithms = [algorithm]
    if is_ours:
        data = token_data_spec(data)
        algorithms.append(TokenAccumulation())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    _, _, trainer = train(
        model,
        data,
        algorithms=algorithms,
        microbatch_size=microbatch_size,
        optimizer=optimizer,
        max_duration='2ep',
        seed=1,
    )
    weights = {}
    for name, parameter in trainer.state.model.named_parameters():
        weights[name] = parameter.detach().clone()
    if isinstance(algorithm, EMA):
        assert algorithm.ema_model is not None
        for name, average in algorithm.ema_model.named_parameters_dict.items():
            weights[f'average {name}'] = average
    return weights


@pytest.mark.parametrize('name', EXACT)
def test_algorithm_is_exact(name):
    build = EXACT[name]
    expected = weights_after_training(build(), microbatch_size=WHOLE_BATCH, is_ours=False)

    weights = weights_after_training(build(), microbatch_size=1, is_ours=True)
    assert relative_error(weights, expected) < 1e-6

    # Stock Composer in the same microbatches is off, so the test can fail.
    stock_weights = weights_after_training(build(), microbatch_size=1, is_ours=False)
    assert relative_error(stock_weights, expected) > 1e-4


@pytest.mark.parametrize('is_ours', [False, True])
@pytest.mark.parametrize('name', NOT_IN_COMPOSER)
def test_composer_itself_cannot_run_it(name, is_ours):
    build, message = NOT_IN_COMPOSER[name]
    with pytest.raises((AssertionError, AttributeError, TypeError, ValueError), match=message):
        weights_after_training(build(), microbatch_size=WHOLE_BATCH, is_ours=is_ours)


def test_every_row_of_the_page_has_a_test():
    page = (ROOT / 'docs' / 'trainer.md').read_text()
    _, _, section = page.partition("## Composer's algorithms")
    names_in_table = re.findall(r'^\| `(\w+)', section, re.MULTILINE)
    tested_names = {'SeqLengthWarmup', 'device_train_microbatch_size'}  # see the head of this file
    for name in (*EXACT, *NOT_IN_COMPOSER):
        algorithm, *_ = name.split()
        tested_names.add(algorithm)
    assert tested_names == set(names_in_table)
