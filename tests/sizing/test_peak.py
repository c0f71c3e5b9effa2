# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Bytes predicted from fake probes against what a real forward pass saves, at shapes that no probe had."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from composer_tokacc.memory import BatchShape, MemoryModel, calibrate_fake
from composer_tokacc.memory.ledger import SavedBytes
from composer_tokacc.memory.probes import probe_batches
from composer_tokacc.memory.shapes import batch_of_width
from composer_tokacc.memory.trace import FakeRun
from transformers import PreTrainedModel

from composer_tokacc.layout import BatchLayout
from tests.support.families import FAMILIES, FamilyCase

PROBE_WIDTH = 128
# Rows of the family's samples (with 0, 1, 1, 2, 0 and 3 images) and widths: 18 shapes.
ROWS = ((0, 0), (1, 1, 4), (2, 0), (3, 3, 3), (1, 2, 3, 4, 5), (5,) * 7)
WIDTHS = (96, 131, 200)


def builder(case: FamilyCase, attention: str, checkpointing: bool) -> Callable[[], PreTrainedModel]:
    trains = [parameter.requires_grad for parameter in case.model.parameters()]

    def build() -> PreTrainedModel:
        model = type(case.model)(case.config).train()
        model.set_attn_implementation(attention)
        for parameter, train in zip(model.parameters(), trains, strict=True):
            parameter.requires_grad_(train)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
        return model

    return build


def saved_by_a_real_step(model: PreTrainedModel, batch: dict[str, Any]) -> int:
    named = inspect.signature(model.forward).parameters
    saved = SavedBytes(model)
    with saved.counting():
        loss = model(**{key: value for key, value in batch.items() if key in named}).loss
    loss.backward()
    return saved.total


def errors(case: FamilyCase, attention: str, checkpointing: bool) -> tuple[dict[str, float], MemoryModel]:
    build = builder(case, attention, checkpointing)
    memory = calibrate_fake(build, case.config, case.rows, width=PROBE_WIDTH)
    model = build()
    layout = BatchLayout.for_model(model)
    probed = {BatchShape.of(batch, layout) for batch in probe_batches(layout, case.rows, PROBE_WIDTH)}
    found = {}
    for rows, width in product(ROWS, WIDTHS):
        batch = batch_of_width(layout, [case.rows[row] for row in rows], width)
        shape = BatchShape.of(batch, layout)
        assert shape not in probed
        assert memory.saved is not None
        predicted = sum(memory.saved.predict(shape).values())
        found[f'{rows} x {width}'] = predicted / saved_by_a_real_step(model, batch) - 1
    return found, memory


def assert_within(found: dict[str, float], limit: float) -> None:
    assert len(found) >= 12
    worst = max(found, key=lambda name: abs(found[name]))
    assert abs(found[worst]) < limit, f'{worst}: {found[worst]:+.2%}'


def test_llama_with_sdpa() -> None:
    found, memory = errors(FAMILIES['llama'](), 'sdpa', checkpointing=False)
    assert_within(found, 0.03)
    assert memory.residual < 0.05


@pytest.mark.slow
@pytest.mark.parametrize('checkpointing', [False, True])
@pytest.mark.parametrize('attention', ['sdpa', 'eager'])
@pytest.mark.parametrize('family', ['llama', 'llava', 'qwen2_5_vl'])
def test_three_families(family: str, attention: str, checkpointing: bool) -> None:
    found, _ = errors(FAMILIES[family](), attention, checkpointing)
    assert_within(found, 0.03)


@pytest.mark.slow
@pytest.mark.parametrize('family', FAMILIES)
def test_a_trace_saves_byte_for_byte_what_a_real_step_saves(family: str) -> None:
    case = FAMILIES[family]()
    build = builder(case, 'eager' if family == 'mllama' else 'sdpa', checkpointing=False)
    model = build()
    layout = BatchLayout.for_model(model)
    batch = layout.concat(case.rows[1:4])
    traced = FakeRun(build, batch).measure(batch)
    assert sum(traced.saved.values()) == saved_by_a_real_step(model, batch)
    assert traced.saved['logits'] > 0
    assert (traced.saved['vision'] > 0) == (family != 'llama')
