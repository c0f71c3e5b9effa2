# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.sizing.timing import MicrobatchTimer, fit_cost
from tests.support.family_media import MEDIA
from tests.support.training import loader, train

PER_TOKEN, PER_IMAGE_TOKEN, PER_LAUNCH, QUADRATIC = 2e-5, 1e-5, 3e-3, 768.0


def timed(num_late: int = 0) -> MicrobatchTimer:
    rng = np.random.default_rng(0)
    timer = MicrobatchTimer()
    for _ in range(40):
        rows, width, images = int(rng.integers(1, 30)), int(rng.integers(5, 60)), int(rng.integers(0, 50))
        seconds = PER_TOKEN * rows * (width + width**2 / QUADRATIC) + PER_IMAGE_TOKEN * images + PER_LAUNCH
        timer.rows.append(rows)
        timer.widths.append(width)
        timer.image_tokens.append(images)
        timer.seconds.append(seconds)
    for index in range(num_late):
        timer.seconds[7 * index] *= 6
    timer.outside.extend([0.01, 0.02, 0.9])
    return timer


def test_terms_come_back_from_exact_times() -> None:
    cost, outside = fit_cost([timed()], quadratic=QUADRATIC)
    assert cost.seconds_per_token == pytest.approx(PER_TOKEN)
    assert cost.vision_per_token == pytest.approx(PER_IMAGE_TOKEN / PER_TOKEN)
    assert cost.launch == pytest.approx(PER_LAUNCH / PER_TOKEN)
    assert outside == 0.02


def test_microbatches_that_were_held_up_do_not_count() -> None:
    cost, _ = fit_cost([timed(num_late=3)], quadratic=QUADRATIC)
    assert cost.seconds_per_token == pytest.approx(PER_TOKEN, rel=0.05)
    assert cost.launch == pytest.approx(PER_LAUNCH / PER_TOKEN, rel=0.05)


@pytest.mark.parametrize(('family', 'kind'), [('qwen2_vl', 'video'), ('qwen2_audio', 'audio')])
def test_placeholders_of_videos_and_sounds_are_noted(family: str, kind: str) -> None:
    case = MEDIA[family]()
    row = case.rows[case.kinds.index(kind)]
    timer = MicrobatchTimer(BatchLayout.for_model(case.model), skip=0)
    train(case.model, token_data_spec(loader(row)), callbacks=[timer])
    config: Any = case.model.config
    token_id = config.video_token_id if kind == 'video' else config.audio_token_id
    assert timer.image_tokens == [int((row['input_ids'] == token_id).sum())]
    assert timer.image_tokens[0] > 0


def test_nothing_timed_is_refused() -> None:
    with pytest.raises(ValueError, match='`timers` must hold at least one microbatch, got: none'):
        fit_cost([MicrobatchTimer()], quadratic=QUADRATIC)
