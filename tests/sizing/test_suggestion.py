# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import yaml

from composer_tokacc.data.lengths import LengthTable
from composer_tokacc.planning import CostModel, CutOptions
from composer_tokacc.sizing import (
    GIB,
    BatchShape,
    MemoryModel,
    SampleSizes,
    StaticBytes,
    draw_report,
    simulate_steps,
    suggest_microbatching,
)
from composer_tokacc.sizing.memory_model import ActivationFit

PARAMETERS, PER_TOKEN, PER_LOGIT_ROW, PER_IMAGE_TOKEN = GIB, 1 << 20, 1 << 19, 1 << 18


def memory_model(**changes: Any) -> MemoryModel:
    """4 GiB of model in float32 with AdamW, 1.5 MiB a token, a quarter MiB an image token."""
    static = StaticBytes(
        parameters=PARAMETERS,
        buffers=0,
        gradients=PARAMETERS,
        optimizer=2 * PARAMETERS,
        optimizer_step=0,
        block=10_000_000,
        outside=20_000_000,
        trained_block=10_000_000,
        trained_outside=20_000_000,
        compute_bytes=2,
    )
    coefficients = {
        'text': {'tokens': PER_TOKEN},
        'logits': {'tokens': PER_LOGIT_ROW},
        'vision': {'image_tokens': PER_IMAGE_TOKEN},
        'weights': {},
    }
    fit = ActivationFit(coefficients=coefficients, area='never', residual=0.01)
    return replace(MemoryModel(static=static, phases={'head': fit}), **changes)


def table(num_samples: int = 4000, seed: int = 0) -> LengthTable:
    rng = np.random.default_rng(seed)
    images = np.where(rng.random(num_samples) < 0.6, 64, 0)
    text = np.clip(rng.lognormal(4, 0.7, num_samples), 4, 448).astype(np.int64)
    return LengthTable(lengths=text + images, image_tokens=images, loss_tokens=text // 2, vision_patches=4 * images)


def sizes_of(lengths: Any, image_tokens: Any = 0, loss_tokens: Any = 0, vision_patches: Any = 0) -> LengthTable:
    """A table of these columns; a number stands for a column of it."""
    columns = np.broadcast_arrays(lengths, image_tokens, loss_tokens, vision_patches)
    names = ('lengths', 'image_tokens', 'loss_tokens', 'vision_patches')
    return LengthTable(**dict(zip(names, map(np.array, columns), strict=True)))


def suggest(lengths: Any = None, **changes: Any) -> Any:
    arguments = {'num_ranks': 4, 'global_batch_size': 128, 'memory': memory_model(), 'device_memory_gib': 16.0}
    return suggest_microbatching(table() if lengths is None else lengths, **{**arguments, **changes})


def test_largest_safe_size_is_found_by_hand() -> None:
    lengths = [100] * 64
    report = suggest(lengths, num_ranks=1, global_batch_size=64)
    # 4 GiB of model; 1.5 MiB and 2 x 24 bytes of ids, masks and labels a token; 0.92 of 16 GiB.
    tokens = int((0.92 * 16 - 4) * GIB / (PER_TOKEN + PER_LOGIT_ROW + 48))
    assert report.device_train_microbatch_size == min(tokens // 100, 64)
    assert report.peak_gib <= 0.92 * 16
    half = suggest(lengths, num_ranks=1, global_batch_size=64, device_memory_gib=8.0)
    tokens = int((0.92 * 8 - 4) * GIB / (PER_TOKEN + PER_LOGIT_ROW + 48))
    assert half.device_train_microbatch_size == tokens // 100
    assert half.binds == 'text'


@pytest.mark.parametrize(('slot_tokens', 'device_memory_gib'), [(None, 7.0), (16, 6.65), (300, 6.65)])
def test_budget_of_any_slot_fits(slot_tokens: int | None, device_memory_gib: float) -> None:
    """Rows as wide as the longest sample fit, and so do as many positions of shorter rows."""
    sizes = table()
    report = suggest(sizes, device_memory_gib=device_memory_gib, global_batch_size=512, slot_tokens=slot_tokens)
    if slot_tokens is not None:
        assert 1 < report.max_tokens / sizes.lengths.max() < 1.5
    limit = 0.92 * device_memory_gib * GIB
    image_share = float((sizes.image_tokens / sizes.lengths).max())
    images = int(report.max_tokens * image_share)
    for width in np.unique(sizes.lengths).tolist():
        shape = BatchShape(rows=max(report.max_tokens // width, 1), width=width, image_tokens=images)
        assert memory_model().peak(shape, num_ranks=4) <= limit
    larger = BatchShape(rows=report.device_train_microbatch_size + 1, width=report.slot_tokens)
    larger = replace(larger, image_tokens=int(larger.tokens * image_share))
    assert memory_model().peak(larger, num_ranks=4) > limit


def at_labels(**changes: Any) -> MemoryModel:
    """Half a MiB for each position at which logits are computed."""
    coefficients = {'text': {'tokens': PER_TOKEN}, 'logits': {'logits': PER_LOGIT_ROW}, 'vision': {}, 'weights': {}}
    fit = ActivationFit(coefficients=coefficients, area='never', residual=0.01)
    return memory_model(phases={'head': fit}, logits='labels', **changes)


@pytest.mark.parametrize(
    ('loss_tokens', 'share'),
    [
        ([9] * 63 + [19], 0.2),  # one more for each sample: a model that does not shift counts its first label
        ([9] * 63 + [95], 1.0),  # a microbatch of such samples computes all logits
        ([0] * 64, 1.0),  # unknown
    ],
)
def test_logits_count_by_the_largest_share(loss_tokens: list[int], share: float) -> None:
    sizes = sizes_of(100, loss_tokens=loss_tokens)
    report = suggest(sizes, memory=at_labels(), num_ranks=1, global_batch_size=256, device_memory_gib=20.0)
    usable = (0.92 * 20 - 4) * GIB
    tokens = int(usable / (PER_TOKEN + share * PER_LOGIT_ROW + 48))
    assert report.device_train_microbatch_size == tokens // 100
    assert report.most_logits == pytest.approx(share * report.max_tokens, abs=1)
    assert (report.logits, report.as_dict()['most_logits']) == ('labels', report.most_logits)
    assert (f'at most {report.most_logits:,} of' in report.text()) == (share < 1)
    # Stock Composer computes all logits.
    assert report.stock_microbatch_size == int(usable / (PER_TOKEN + PER_LOGIT_ROW + 48)) // 100


def test_any_microbatch_fits_with_its_labels() -> None:
    rng = np.random.default_rng(2)
    sizes = table()
    loss_tokens = np.minimum(rng.integers(0, 64, len(sizes)), sizes.lengths // 4)
    sizes = replace(sizes, loss_tokens=loss_tokens)
    memory = at_labels()
    arguments = {'num_ranks': 1, 'global_batch_size': 512, 'device_memory_gib': 6.0, 'slot_tokens': 16}
    report = suggest(sizes, memory=memory, **arguments)
    with_all_logits = suggest(sizes, memory=replace(memory, logits='all'), **arguments)
    assert report.max_tokens > 1.1 * with_all_logits.max_tokens
    most_labels = np.argsort(-loss_tokens / sizes.lengths)
    for start in range(0, 200, 7):
        samples = []
        # The samples with most labels, for as long as they fit.
        for sample in most_labels[start:]:
            width = int(sizes.lengths[[*samples, sample]].max())
            if (len(samples) + 1) * width > report.max_tokens:
                break
            samples.append(sample)
        width = int(sizes.lengths[samples].max())
        shape = BatchShape(rows=len(samples), width=width, labels=int(loss_tokens[samples].sum()) + 1)
        assert memory.peak(shape) <= 0.92 * 6 * GIB


def test_profile_and_padding_against_a_plain_count() -> None:
    sizes = table(512)
    report = suggest(sizes, num_ranks=2, global_batch_size=64)
    assert report.profile.text_only_share == pytest.approx((sizes.image_tokens == 0).mean())
    # Four patches for each of 64 image tokens.
    assert report.profile.patches_per_sample == pytest.approx(256)
    assert report.profile.patches_per_image_token == pytest.approx(4)
    assert suggest(sizes.lengths).profile.patches_per_sample is None
    assert report.profile.loss_share == pytest.approx(sizes.loss_tokens.sum() / sizes.lengths.sum())
    # One global batch of all samples: whatever their order, a single rank computes each as wide as the longest.
    whole = suggest(sizes, num_ranks=1, global_batch_size=512, device_memory_gib=16.0)
    padding = 1 - sizes.lengths.sum() / (512 * sizes.lengths.max())
    assert whole.figures['stock'].padding_ratio == pytest.approx(padding)
    assert report.figures['split'].padding_ratio < report.figures['stock'].padding_ratio


def test_seconds_are_those_of_a_step_by_hand() -> None:
    """Four rows of 100 tokens on one rank, one microbatch: 4 x (100 + 100 x 100 / 1000) + 5 units."""
    timed = CostModel(quadratic=1000.0, launch=5.0, seconds_per_token=1e-2)
    report = suggest([100] * 4, num_ranks=1, global_batch_size=4, measured_cost=timed, seconds_per_step=0.5)
    assert report.step_seconds('stock') == pytest.approx(445e-2 + 0.5)
    assert report.step_seconds('split') == pytest.approx(445e-2 + 0.5)
    assert suggest().step_seconds('stock') is None


def test_what_a_step_takes_besides_lowers_the_gain() -> None:
    cost = CostModel(seconds_per_token=1e-4)
    alone, delayed = suggest(measured_cost=cost), suggest(measured_cost=cost, seconds_per_step=0.5)
    assert alone.speedup() > delayed.speedup() > 1


def test_steps_are_cut_by_the_cost_of_the_run_and_priced_by_the_measured_one() -> None:
    """Launches that cost little make a microbatch of each width; those that cost much make as few as fit."""
    lengths = [10, 11] * 64
    cheap, dear = CostModel(launch=1.0), CostModel(launch=1e6)
    arguments = {'num_ranks': 1, 'global_batch_size': 128, 'measured_cost': CostModel()}
    by_cost = [suggest(lengths, cost=cost, **arguments).figures for cost in (cheap, dear)]
    assert [figures['split'].microbatches for figures in by_cost] == [2, 1]
    assert [figures['planned'].microbatches for figures in by_cost] == [2, 1]
    assert by_cost[0]['stock'] == by_cost[1]['stock']


def test_a_measured_tower_is_in_the_seconds_the_bound_and_the_lines_to_paste() -> None:
    """One rank, one microbatch of four rows of 100 tokens: 440 units, 5 of launch, and two images in the tower."""
    patches = np.array([10, 0, 30, 0])
    sizes = sizes_of(100, patches // 10, patches, patches)
    timed = CostModel(
        quadratic=1000.0,
        launch=5.0,
        vision_per_image=3.0,
        vision_per_patch=0.5,
        vision_per_square=0.01,
        seconds_per_token=1e-2,
    )
    report = suggest(sizes, num_ranks=1, global_batch_size=4, measured_cost=timed)
    tower = 2 * 3.0 + 0.5 * 40 + 0.01 * (100 + 900)
    assert report.step_seconds('stock') == pytest.approx((445 + tower) * 1e-2)
    assert report.step_seconds('planned') == pytest.approx((445 + tower) * 1e-2)
    assert report.bound == pytest.approx(445 + tower)
    pasted = yaml.safe_load(report.yaml())['microbatching']['cost']
    assert CostModel(**pasted) == replace(timed, seconds_per_token=None)
    assert 'cost' not in yaml.safe_load(suggest().yaml())['microbatching']


def test_packed_steps_have_no_padding() -> None:
    packed, plain = suggest(packing=True), suggest()
    assert packed.figures['split'].padding_ratio == packed.figures['planned'].padding_ratio == 0
    assert packed.figures['stock'] == plain.figures['stock']
    assert yaml.safe_load(packed.yaml())['microbatching']['packing'] is True
    assert packed.max_tokens == plain.max_tokens


@pytest.mark.parametrize(('equal_counts', 'images', 'weightless'), [(False, 0, 0), (True, 0, 10), (True, 8, 30)])
def test_ranks_with_fewer_microbatches_compute_weightless_rows(
    equal_counts: bool, images: int, weightless: int
) -> None:
    """Rank 0 makes two microbatches of 500 tokens and rank 1 one, and where they must be equal repeats a row: the
    shortest, or the shortest with an image.
    """
    sizes = SampleSizes.from_lengths(np.array([500, 10, 500, 30]))
    if images:
        sizes = replace(sizes, image_tokens=np.array([images, 0, images, images]))
    options = CutOptions(max_tokens=500, equal_counts=equal_counts)
    figures = simulate_steps(
        sizes, [np.arange(4)], method='split', num_ranks=2, microbatch_rows=1, options=options, price=CostModel()
    )
    computed = 500 + 500 + 2 * 30 + weightless
    assert figures.padding_ratio == pytest.approx(1 - 1040 / computed)


def test_no_method_beats_the_bound_and_planning_is_best() -> None:
    report = suggest()
    assert 0 < report.share_of_bound('split') <= report.share_of_bound('planned') <= 1
    assert report.speedup('planned') >= report.speedup('split') >= 1


def test_global_batch_in_microbatches_of_stock_composer() -> None:
    report = suggest([100] * 64, num_ranks=4, global_batch_size=48, device_memory_gib=8.0)
    assert report.stock_microbatch_size == 12
    assert report.identity() == '(12 x 1) rows x 4 ranks = 48 samples a step'
    tight = suggest([100] * 64, num_ranks=4, global_batch_size=48, device_memory_gib=6.3)
    rows = int((0.92 * 6.3 - 5) * GIB / (PER_TOKEN + PER_LOGIT_ROW + 48)) // 100
    assert rows == 5
    assert tight.identity() == '(5 x 2 + 2) rows x 4 ranks = 48 samples a step'


def test_sharding_makes_room() -> None:
    sharded = memory_model(strategy='fsdp')
    alone = suggest(memory=sharded, num_ranks=2, device_memory_gib=6.0)
    many = suggest(memory=sharded, num_ranks=8, device_memory_gib=6.0)
    assert many.max_tokens > alone.max_tokens
    assert many.terms['parameters'] == pytest.approx(1 / 8)


def test_samples_over_the_budget_are_named() -> None:
    lengths = [50] * 60 + [900, 700, 50, 50]
    ids = [f'sample-{index}' for index in range(64)]
    report = suggest(lengths, num_ranks=1, global_batch_size=64, device_memory_gib=4.9 / 0.92, sample_ids=ids)
    limit = int(0.9 * GIB / (PER_TOKEN + PER_LOGIT_ROW + 48))
    assert 50 < limit < 700
    assert report.too_large == ['"sample-60": 900 tokens', '"sample-61": 700 tokens']
    assert 'dataset.max_length' in report.warnings()[0]
    assert report.max_tokens <= limit


def test_a_rough_memory_model_says_so() -> None:
    phases = {name: replace(fit, residual=0.08) for name, fit in memory_model().phases.items()}
    assert any('8.0%' in line for line in suggest(memory=memory_model(phases=phases)).warnings())
    assert suggest().warnings() == []


def test_report_as_text_json_yaml_and_picture(tmp_path: Any) -> None:
    report = suggest(table(600))
    text = report.text()
    for words in ('largest safe size', 'DDP buckets', 'stock Composer', '256 patches a sample with images, 4 for each'):
        assert words in text
    assert report.yaml() in text
    report.save(tmp_path / 'size.json')
    stored = json.loads((tmp_path / 'size.json').read_text())
    assert stored['profile']['patches_per_sample'] == 256
    assert stored['device_train_microbatch_size'] * stored['slot_tokens'] == stored['max_tokens']
    pasted = yaml.safe_load(report.yaml())['microbatching']
    assert pasted['device_train_microbatch_size'] * pasted['slot_tokens'] == stored['max_tokens']
    draw_report(tmp_path / 'size.svg', report)
    drawn = (tmp_path / 'size.svg').read_text()
    for words in ('Computed positions that are padding', 'planned over ranks', 'Peak memory of a rank', 'logits'):
        assert f'<!-- {words}' in drawn


def test_image_cap_of_the_run_is_kept_in_memory_steps_and_yaml() -> None:
    """Eight rows of 100 tokens, 60 of them of images, fit at once: under a cap of 120 image tokens go two and two."""
    sizes = sizes_of([100] * 8, 60, 1, 60)
    free, capped = (
        suggest(sizes, num_ranks=1, global_batch_size=8, max_image_tokens=cap, width_multiple=2) for cap in (None, 120)
    )
    for method in ('split', 'planned'):
        assert (free.figures[method].microbatches, capped.figures[method].microbatches) == (1, 4)
    assert free.figures['stock'] == capped.figures['stock']
    packed = suggest(sizes, num_ranks=1, global_batch_size=8, max_image_tokens=120, packing=True)
    assert packed.figures['split'].microbatches == 4
    assert yaml.safe_load(capped.yaml())['microbatching']['max_image_tokens'] == 120
    # 4 GiB of model, a microbatch of 800 positions, and a quarter MiB for each of 480 or 120 image tokens.
    assert (free.peak_gib - capped.peak_gib) * GIB == pytest.approx(360 * PER_IMAGE_TOKEN)
    tight = suggest(sizes, num_ranks=1, global_batch_size=8, max_image_tokens=59)
    assert len(tight.oversize) == 8


def test_loss_cap_bounds_logits_and_steps() -> None:
    """Eight rows of 100 tokens with 50 labels each fit at once. Under a cap of 100 labels they go two and two."""
    sizes = sizes_of([100] * 8, 0, 50)
    arguments = {'num_ranks': 1, 'global_batch_size': 8, 'memory': at_labels()}
    free = suggest(sizes, **arguments)
    capped = suggest(sizes, max_loss_tokens=100, **arguments)
    for method in ('split', 'planned'):
        assert free.figures[method].microbatches == 1
        assert capped.figures[method].microbatches == 4
    assert free.figures['stock'] == capped.figures['stock']
    assert yaml.safe_load(capped.yaml())['microbatching']['max_loss_tokens'] == 100
    # 51 of 100 positions of each row may need logits. Under the cap a microbatch with logits everywhere has 112.
    assert (free.most_logits, capped.most_logits) == (408, 113)
    assert (free.peak_gib - capped.peak_gib) * GIB == pytest.approx((408 - 113) * PER_LOGIT_ROW)
    packed = suggest(sizes, max_loss_tokens=100, packing=True, **arguments)
    assert packed.figures['split'].microbatches == 4
    assert len(suggest(sizes, max_loss_tokens=49, **arguments).oversize) == 8


def test_loss_cap_leaves_room_for_more_positions() -> None:
    """Long prompts beside one sample of answers only: without a cap every position may need a logit."""
    sizes = sizes_of([100] * 63 + [50], 0, [4] * 63 + [50])
    arguments = {'num_ranks': 1, 'global_batch_size': 64, 'memory': at_labels(), 'device_memory_gib': 7.0}
    free = suggest(sizes, **arguments)
    capped = suggest(sizes, max_loss_tokens=60, **arguments)
    assert capped.device_train_microbatch_size > free.device_train_microbatch_size
    assert capped.peak_gib <= 0.92 * 7.0


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'lengths': []}, '`lengths` must hold at least one sample'),
        ({'lengths': [5, -3, 4]}, r'`lengths` must be at least 1, got: -3 \(sample 1\)'),
        ({'num_ranks': 0}, '`num_ranks` must be a positive integer, got: 0'),
        ({'global_batch_size': 30}, 'multiple of the number of ranks, got: 30 on 4 ranks. Set it to 32'),
        ({'device_memory_gib': 2.0}, r'must hold the model and its shortest sample.*sharding with FSDP, freezing'),
        ({'device_memory_gib': 0.0}, '`device_memory_gib` must be positive'),
        ({'safety': 1.2}, '`safety` must be over 0 and at most 1'),
        ({'slot_tokens': 0}, '`slot_tokens` must be a positive integer'),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        suggest(**arguments)
    assert '\n' not in str(caught.value)
