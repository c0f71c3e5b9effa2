# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Costs fitted to the times of microbatches, and the timer that measures them in a run."""

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
from tests.support.families import FAMILIES, MEDIA
from tests.support.training import loader, saving, train

PER_TOKEN = 2e-5
PER_IMAGE_TOKEN = 1e-5
PER_LAUNCH = 3e-3
QUADRATIC = 768.0

PER_SQUARE = 4e-9
PER_PATCH = 1e-6
PER_IMAGE = 2e-4
"""Seconds in an encoder that is timed by itself."""


def filled_timer(num_delayed: int = 0) -> MicrobatchTimer:
    """Returns a timer with exact times of 40 microbatches. The delayed ones took six times as long."""
    rng = np.random.default_rng(0)
    timer = MicrobatchTimer()
    for _ in range(40):
        rows = int(rng.integers(1, 30))
        width = int(rng.integers(5, 60))
        image_tokens = int(rng.integers(0, 50))
        text_seconds = PER_TOKEN * rows * (width + width**2 / QUADRATIC)
        image_seconds = PER_IMAGE_TOKEN * image_tokens
        seconds = text_seconds + image_seconds + PER_LAUNCH
        timer.microbatches.append(TimedMicrobatch(rows, width, image_tokens, seconds))
    for delayed in range(num_delayed):
        index = 7 * delayed
        microbatch = timer.microbatches[index]
        timer.microbatches[index] = microbatch._replace(seconds=6 * microbatch.seconds)
    timer.outside.extend([0.01, 0.02, 0.9])
    return timer


def test_terms_come_back_from_exact_times():
    cost, outside = fit_cost([filled_timer()], quadratic=QUADRATIC)

    assert cost.seconds_per_token == pytest.approx(PER_TOKEN)
    # The other terms are in units of a token.
    assert cost.vision_per_token == pytest.approx(PER_IMAGE_TOKEN / PER_TOKEN)
    assert cost.launch == pytest.approx(PER_LAUNCH / PER_TOKEN)
    assert outside == 0.02, 'the median'


def test_delayed_microbatches_hardly_count():
    timer = filled_timer(num_delayed=3)
    cost, _ = fit_cost([timer], quadratic=QUADRATIC)
    assert cost.seconds_per_token == pytest.approx(PER_TOKEN, rel=0.05)
    assert cost.launch == pytest.approx(PER_LAUNCH / PER_TOKEN, rel=0.1)


@pytest.mark.parametrize(
    ('family', 'modality'), [pytest.param('qwen2_vl', 'video', marks=pytest.mark.slow), ('qwen2_audio', 'audio')]
)
def test_placeholders_of_videos_and_sounds(family, modality):
    case = MEDIA[family]()
    row = case.rows[case.kinds.index(modality)]
    layout = BatchLayout.for_model(case.model)
    timer = MicrobatchTimer(layout, skip=0)
    placeholder_id = getattr(case.model.config, f'{modality}_token_id')
    num_placeholders = int((row['input_ids'] == placeholder_id).sum())

    train(case.model, token_data_spec(loader(row)), callbacks=[timer])

    (microbatch,) = timer.microbatches
    assert num_placeholders > 0
    assert microbatch.image_tokens == num_placeholders


def test_first_steps_of_resumed_run_are_skipped(tmp_path):
    case = FAMILIES['qwen2_vl']()
    batches = [case.rows[0]] * 8
    train(case.model, token_data_spec(loader(*batches)), max_duration='4ba', **saving(str(tmp_path)))
    timer = MicrobatchTimer(skip=2)

    spec = token_data_spec(loader(*batches))
    load_path = str(tmp_path / 'ba4.pt')
    train(case.model, spec, max_duration='8ba', load_path=load_path, callbacks=[timer])

    assert len(timer.microbatches) == 2  # steps 6 and 7
    assert len(timer.outside) == 1  # of step 6: a step ends when the next one starts


def add_encoder_times(timer: MicrobatchTimer) -> None:
    """Replaces the seconds of the image tokens of each microbatch with the seconds of some images in an encoder."""
    rng = np.random.default_rng(1)
    for index, microbatch in enumerate(timer.microbatches):
        if index == 3:  # one microbatch without images
            num_images = 0
            patches = np.zeros(2, int)
        else:
            num_images = int(rng.integers(1, 5))
            patches = rng.integers(16, 4096, num_images)
        encoder_seconds = PER_SQUARE * (patches**2).sum() + PER_PATCH * patches.sum() + PER_IMAGE * num_images
        text_seconds = microbatch.seconds - PER_IMAGE_TOKEN * microbatch.image_tokens
        seconds = text_seconds + encoder_seconds
        if index == 20:  # a delayed microbatch
            seconds *= 5
        timer.microbatches[index] = microbatch._replace(
            patches=patches.tolist(),
            seconds=seconds,
            vision_seconds=encoder_seconds,
        )


def test_encoder_has_its_own_terms():
    timer = filled_timer()
    add_encoder_times(timer)

    cost, _ = fit_cost([timer], quadratic=QUADRATIC)

    unit = cost.seconds_per_token
    assert unit == pytest.approx(PER_TOKEN, rel=0.05)
    assert cost.vision_per_square == pytest.approx(PER_SQUARE / unit)
    assert cost.vision_per_patch == pytest.approx(PER_PATCH / unit)
    assert cost.vision_per_image == pytest.approx(PER_IMAGE / unit)
    assert cost.vision_per_token == 0.0


class FakeClock:
    """Moves on when a watched layer runs forward, and when a gradient leaves it."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def watch(self, layers: list[torch.nn.Module], *, forward: float, backward: float) -> None:
        """Makes each of these layers take the given seconds."""

        def on_backward(gradient: torch.Tensor) -> None:
            self.seconds += backward

        def on_forward(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self.seconds += forward
            if inputs[0].requires_grad:
                # The gradient of the input comes last, after the timer has seen the gradient of the encoder's output.
                inputs[0].register_hook(on_backward)

        for layer in layers:
            layer.register_forward_hook(on_forward)


def linear_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


@pytest.mark.parametrize(('frozen', 'seconds_of_layer'), [(False, 1.0 + 10.0), (True, 1.0)], ids=['trained', 'frozen'])
def test_time_in_the_encoder(frozen, seconds_of_layer):
    """A fake clock: a linear layer of the encoder takes 1 forward and 10 backward, one of the text 100 and 1000."""
    case = FAMILIES['qwen2_vl']()
    (encoder,) = [module for name, module in case.model.named_modules() if name.endswith('visual')]
    encoder.requires_grad_(not frozen)
    encoder_layers = linear_layers(encoder)
    text_layers = [layer for layer in linear_layers(case.model) if layer not in encoder_layers]
    clock = FakeClock()
    clock.watch(encoder_layers, forward=1.0, backward=10.0)
    clock.watch(text_layers, forward=100.0, backward=1000.0)
    layout = BatchLayout.for_model(case.model)
    timer = MicrobatchTimer(layout, patches=partial(count_patches, patch_size=14), skip=0)
    timer._now = clock.now
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)

    spec = token_data_spec(loader(batch))
    train(case.model, spec, callbacks=[timer], microbatch_size=len(case.rows))

    (microbatch,) = timer.microbatches
    expected_patches = [computed_patches(case.model, row) for row in case.rows]
    assert microbatch.patches == expected_patches
    assert microbatch.vision_seconds == len(encoder_layers) * seconds_of_layer
    assert microbatch.seconds == microbatch.vision_seconds + len(text_layers) * 1100.0


def test_nothing_timed_is_refused():
    with pytest.raises(ValueError, match='at least one microbatch'):
        fit_cost([MicrobatchTimer()], quadratic=QUADRATIC)
