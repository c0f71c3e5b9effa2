# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.data import count_patches
from composer_tokacc.sizing.timing import MicrobatchTimer, TimedMicrobatch, fit_cost
from tests.data.test_lengths import computed_patches
from tests.support.families import FAMILIES
from tests.support.family_media import MEDIA
from tests.support.training import loader, train

PER_TOKEN, PER_IMAGE_TOKEN, PER_LAUNCH, QUADRATIC = 2e-5, 1e-5, 3e-3, 768.0


def timed(num_late: int = 0) -> MicrobatchTimer:
    rng = np.random.default_rng(0)
    timer = MicrobatchTimer()
    for _ in range(40):
        rows, width, images = int(rng.integers(1, 30)), int(rng.integers(5, 60)), int(rng.integers(0, 50))
        seconds = PER_TOKEN * rows * (width + width**2 / QUADRATIC) + PER_IMAGE_TOKEN * images + PER_LAUNCH
        timer.microbatches.append(TimedMicrobatch(rows, width, images, seconds))
    for index in range(0, 7 * num_late, 7):
        late = timer.microbatches[index]
        timer.microbatches[index] = late._replace(seconds=6 * late.seconds)
    timer.outside.extend([0.01, 0.02, 0.9])
    return timer


def test_terms_come_back_from_exact_times() -> None:
    cost, outside = fit_cost([timed()], quadratic=QUADRATIC)
    assert cost.seconds_per_token == pytest.approx(PER_TOKEN)
    assert cost.vision_per_token == pytest.approx(PER_IMAGE_TOKEN / PER_TOKEN)
    assert cost.launch == pytest.approx(PER_LAUNCH / PER_TOKEN)
    assert outside == 0.02


def test_delayed_microbatches_do_not_count() -> None:
    cost, _ = fit_cost([timed(num_late=3)], quadratic=QUADRATIC)
    assert cost.seconds_per_token == pytest.approx(PER_TOKEN, rel=0.05)
    assert cost.launch == pytest.approx(PER_LAUNCH / PER_TOKEN, rel=0.05)


@pytest.mark.parametrize(
    ('family', 'kind'), [pytest.param('qwen2_vl', 'video', marks=pytest.mark.slow), ('qwen2_audio', 'audio')]
)
def test_placeholders_of_videos_and_sounds(family: str, kind: str) -> None:
    case = MEDIA[family]()
    row = case.rows[case.kinds.index(kind)]
    timer = MicrobatchTimer(BatchLayout.for_model(case.model), skip=0)
    train(case.model, token_data_spec(loader(row)), callbacks=[timer])
    config: Any = case.model.config
    token_id = config.video_token_id if kind == 'video' else config.audio_token_id
    (microbatch,) = timer.microbatches
    assert microbatch.image_tokens == int((row['input_ids'] == token_id).sum()) > 0


def test_encoder_has_its_own_terms() -> None:
    rng = np.random.default_rng(1)
    timer = timed()
    for index, microbatch in enumerate(timer.microbatches):
        patches = [0, 0] if index == 3 else rng.integers(16, 4096, int(rng.integers(1, 5))).tolist()
        in_encoder = sum(4e-9 * count**2 + 1e-6 * count + 2e-4 for count in patches if count)
        seconds = microbatch.seconds - PER_IMAGE_TOKEN * microbatch.image_tokens + in_encoder
        seconds *= 5 if index == 20 else 1
        timer.microbatches[index] = microbatch._replace(seconds=seconds, vision_seconds=in_encoder, patches=patches)
    cost, _ = fit_cost([timer], quadratic=QUADRATIC)
    assert cost.seconds_per_token == pytest.approx(PER_TOKEN, rel=0.05)
    found = (cost.vision_per_square, cost.vision_per_patch, cost.vision_per_image)
    assert found == pytest.approx([value / (cost.seconds_per_token or 0.0) for value in (4e-9, 1e-6, 2e-4)])
    assert cost.vision_per_token == 0.0


@pytest.mark.parametrize('frozen', [False, True])
def test_time_in_the_encoder(frozen: bool) -> None:
    """Our own clock: a linear layer of the encoder takes 1 forward and 10 backward, one of the text 100 and 1000."""
    case = FAMILIES['qwen2_vl']()
    encoders = [module for name, module in case.model.named_modules() if name.endswith('visual')]
    encoders[0].requires_grad_(not frozen)
    inside = {id(module) for module in encoders[0].modules()}
    clock = [0.0]

    def passes(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        forward, backward = (1.0, 10.0) if id(module) in inside else (100.0, 1000.0)
        clock[0] += forward

        def arrives(gradient: torch.Tensor) -> None:
            # On its way into the layer; the gradient of what the encoder gave is there before.
            clock[0] += backward

        if inputs[0].requires_grad:
            inputs[0].register_hook(arrives)

    linear = [module for module in case.model.modules() if isinstance(module, torch.nn.Linear)]
    for module in linear:
        module.register_forward_hook(passes)
    timer = MicrobatchTimer(BatchLayout.for_model(case.model), patches=partial(count_patches, patch_size=14), skip=0)
    timer._now = lambda: clock[0]  # type: ignore[method-assign]
    layout = BatchLayout.for_model(case.model)
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    train(case.model, token_data_spec(loader(batch)), callbacks=[timer], microbatch_size=len(case.rows))
    (microbatch,) = timer.microbatches
    assert microbatch.patches == [computed_patches(case.model, row) for row in case.rows]
    in_encoder = sum(id(module) in inside for module in linear)
    assert microbatch.vision_seconds == in_encoder * (1.0 if frozen else 11.0)
    assert microbatch.seconds > 100.0 * (len(linear) - in_encoder)


def test_nothing_timed_is_refused() -> None:
    with pytest.raises(ValueError, match='`timers` must hold at least one microbatch, got: none'):
        fit_cost([MicrobatchTimer()], quadratic=QUADRATIC)
