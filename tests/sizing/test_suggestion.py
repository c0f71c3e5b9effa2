# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The suggested size of microbatches, compared with arithmetic by hand on a memory model of round numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.testing import assert_array_equal

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
from composer_tokacc.sizing.suggestion import Capacity

PARAMETERS = GIB
MODEL_GIB = 4
"""Parameters, gradients, and two states of AdamW."""
PER_TOKEN = 1 << 20
PER_LOGIT_ROW = 1 << 19
PER_IMAGE_TOKEN = 1 << 18
PER_POSITION = PER_TOKEN + PER_LOGIT_ROW + 48
"""Bytes of a position with its logits. Ids, mask and labels take 24 bytes, and are there twice."""
SAFETY = 0.92
"""Share of the device memory that is planned for, by default."""


def most_positions(device_memory_gib: float, *, model_gib: float = MODEL_GIB, bytes_each: float = PER_POSITION) -> int:
    """Returns how many positions of a microbatch fit into the memory that the model leaves."""
    free_gib = SAFETY * device_memory_gib - model_gib
    return int(free_gib * GIB / bytes_each)


def memory_model(**changes: Any) -> MemoryModel:
    """Returns a memory model: 4 GiB for float32 and AdamW, 1.5 MiB a token, a quarter MiB an image token."""
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
    memory = MemoryModel(static=static, phases={'head': fit})
    return replace(memory, **changes)


def table(num_samples: int = 1000, seed: int = 0) -> LengthTable:
    """Returns samples of lognormal length. Three of five have an image of 64 tokens; half of the text has labels."""
    rng = np.random.default_rng(seed)
    has_image = rng.random(num_samples) < 0.6
    images = 64 * has_image.astype(np.int64)
    drawn = rng.lognormal(4, 0.7, num_samples)
    text = np.clip(drawn, 4, 448).astype(np.int64)
    return LengthTable(
        lengths=text + images,
        image_tokens=images,
        loss_tokens=text // 2,
        vision_patches=4 * images,
    )


def sizes_of(lengths: Any, image_tokens: Any = 0, loss_tokens: Any = 0, vision_patches: Any = 0) -> LengthTable:
    """Returns a table of these columns. A number stands for a column of it."""
    columns = {
        'lengths': lengths,
        'image_tokens': image_tokens,
        'loss_tokens': loss_tokens,
        'vision_patches': vision_patches,
    }
    num_samples = max(np.size(column) for column in columns.values())
    full_columns = {name: np.full(num_samples, column) for name, column in columns.items()}
    return LengthTable(**full_columns)


def suggest(lengths: Any = None, **changes: Any) -> Any:
    """Returns the report for four ranks with 16 GiB, unless `changes` say otherwise."""
    if lengths is None:
        lengths = table()
    arguments = {
        'num_ranks': 4,
        'global_batch_size': 128,
        'memory': memory_model(),
        'device_memory_gib': 16.0,
        **changes,
    }
    return suggest_microbatching(lengths, **arguments)


def suggest_for_one_rank(lengths: Any, **changes: Any) -> Any:
    """Returns the report for one rank, whose global batch is the whole dataset."""
    arguments = {'num_ranks': 1, 'global_batch_size': len(lengths), **changes}
    return suggest(lengths, **arguments)


def stored_report(report: Any, folder: Path) -> dict[str, Any]:
    """Returns what is in the file that the report is saved to."""
    path = folder / 'size.json'
    report.save(path)
    return json.loads(path.read_text())


def pasted_keys(report: Any) -> dict[str, Any]:
    """Returns the keys that a user pastes into the YAML file of the run."""
    return yaml.safe_load(report.yaml())['microbatching']


def test_largest_safe_size_by_hand():
    """In 16 GiB all 64 rows fit at once. In 8 GiB the memory of the text is the limit."""
    lengths = [100] * 64

    large = suggest_for_one_rank(lengths, device_memory_gib=16.0)
    small = suggest_for_one_rank(lengths, device_memory_gib=8.0)

    assert most_positions(16) // 100 > 64
    assert large.device_train_microbatch_size == 64
    assert large.peak_gib <= SAFETY * 16
    assert small.device_train_microbatch_size == most_positions(8) // 100
    assert small.binds == 'text'


def test_rows_may_be_wider_than_slots():
    """Two slots hold a row. So 64 rows of a rank need 128 slots, and the size is not limited to 64."""
    lengths = [100] * 64

    report = suggest_for_one_rank(lengths, device_memory_gib=16.0, slot_tokens=50)

    assert report.device_train_microbatch_size == 128
    assert report.binds == 'global batch'
    assert report.figures['split'].microbatches == 1


def test_rows_of_selected_samples():
    """They are the same rows as those selected from the rows of all samples."""
    sizes = SampleSizes.from_lengths(table(20))
    options = CutOptions(cost=CostModel(vision_per_image=2.0, vision_per_patch=0.5))
    samples = np.array([7, 1, 12])

    rows_of_selected = sizes.select(samples).rows(options)
    selected_rows = sizes.rows(options).of(samples)

    has_image = sizes.image_tokens[samples] > 0
    vision_cost = has_image * (2.0 + 0.5 * 256)  # each image has 256 patches
    for rows in (rows_of_selected, selected_rows):
        assert_array_equal(rows.lengths, sizes.tokens[samples])
        assert_array_equal(rows.image_tokens, sizes.image_tokens[samples])
        assert_array_equal(rows.sizes['loss_tokens'], sizes.loss_tokens[samples])
        assert_array_equal(rows.vision_cost, vision_cost)


@pytest.mark.parametrize(
    'lengths',
    [
        pytest.param([3, 4, 5], id='plain lengths'),
        pytest.param(sizes_of([3, 4, 5]), id='columns of zeros'),
    ],
)
def test_sizes_that_are_not_counted(lengths):
    all_sizes = SampleSizes.from_lengths(lengths)
    sizes = all_sizes.select(np.array([2, 0]))
    rows = sizes.rows(CutOptions())
    assert sizes.loss_tokens is None
    assert sizes.vision_patches is None
    assert rows.sizes.keys() == {'image_tokens'}


def test_lengths_may_be_a_tensor():
    lengths = [100, 20] * 16
    report_of_tensor = suggest_for_one_rank(torch.tensor(lengths))
    assert report_of_tensor == suggest_for_one_rank(lengths)


def test_numbers_of_numpy(tmp_path):
    counts = {'num_ranks': 4, 'global_batch_size': 128, 'slot_tokens': 300, 'max_image_tokens': 256}
    numbers_of_numpy = {name: np.int64(count) for name, count in counts.items()}

    expected = suggest(**counts, device_memory_gib=12.5)

    report = suggest(**numbers_of_numpy, device_memory_gib=np.float32(12.5))
    stored = stored_report(report, tmp_path)

    assert report.yaml() == expected.yaml()
    assert stored['device_memory_gib'] == 12.5


@pytest.mark.parametrize(
    ('slot_tokens', 'device_memory_gib'),
    [
        pytest.param(None, 7.0, id='a slot holds the longest sample'),
        # The memory is only a little more than the longest sample needs.
        pytest.param(16, 6.65, id='short slots'),
        pytest.param(300, 6.65, id='long slots'),
    ],
)
def test_budget_of_any_slot_fits(slot_tokens, device_memory_gib):
    """A microbatch of the suggested budget fits at every width, and one row more does not fit."""
    sizes = table()
    memory = memory_model()
    limit = SAFETY * device_memory_gib * GIB
    image_shares = sizes.image_tokens / sizes.lengths

    def peak_of(rows, width, num_tokens):
        image_tokens = int(num_tokens * image_shares.max())
        shape = BatchShape(rows=rows, width=width, image_tokens=image_tokens)
        return memory.peak(shape, num_ranks=4)

    report = suggest(sizes, device_memory_gib=device_memory_gib, global_batch_size=512, slot_tokens=slot_tokens)

    budget = report.max_tokens
    if slot_tokens is not None:
        assert 1 < budget / sizes.lengths.max() < 1.5
    for width in set(sizes.lengths):
        rows_that_fit = max(budget // width, 1)
        peak = peak_of(rows_that_fit, width, budget)
        assert peak <= limit
    one_row_more = report.device_train_microbatch_size + 1
    tokens_of_one_row_more = one_row_more * report.slot_tokens
    assert peak_of(one_row_more, report.slot_tokens, tokens_of_one_row_more) > limit


def test_budget_fits_with_rounded_widths():
    """Planned rows of 130 tokens become 192 wide, with more entries of attention for as many positions."""
    coefficients = {'text': {'area': PER_TOKEN / 64}, 'logits': {}, 'vision': {}}
    fit = ActivationFit(coefficients=coefficients, area='always', residual=0.0)
    memory = memory_model(phases={'head': fit})

    report = suggest_for_one_rank([130] * 64, memory=memory, width_multiple=64, device_memory_gib=8.0)

    rows = report.device_train_microbatch_size
    assert report.max_tokens == rows * 192
    shape = BatchShape(rows=rows, width=192)
    peak = memory.peak(shape)
    assert peak == report.peak_gib * GIB
    assert peak <= SAFETY * 8 * GIB


def at_labels(bytes_of_logits: int = PER_LOGIT_ROW) -> MemoryModel:
    """Returns a memory model with these bytes for each position at which logits are computed."""
    coefficients = {
        'text': {'tokens': PER_TOKEN},
        'logits': {'logits': bytes_of_logits},
        'vision': {},
        'weights': {},
    }
    fit = ActivationFit(coefficients=coefficients, area='never', residual=0.01)
    return memory_model(phases={'head': fit}, logits='labels')


@pytest.mark.parametrize(
    ('most_loss_tokens', 'share'),
    [
        # 20 of 100 tokens, because a model that does not shift also counts the label of the first token.
        pytest.param(19, 0.2, id='few labels'),
        pytest.param(95, 1.0, id='from 90 % of labels on, all logits'),
        pytest.param(None, 1.0, id='unknown labels'),
    ],
)
def test_logits_count_by_the_largest_share(most_loss_tokens, share):
    loss_tokens = [0] * 64
    if most_loss_tokens is not None:
        loss_tokens = [9] * 63 + [most_loss_tokens]
    sizes = sizes_of(100, loss_tokens=loss_tokens)

    report = suggest(sizes, memory=at_labels(), num_ranks=1, global_batch_size=256, device_memory_gib=20.0)

    bytes_of_position = PER_TOKEN + share * PER_LOGIT_ROW + 48
    positions = most_positions(20, bytes_each=bytes_of_position)
    assert report.logits == 'labels'
    assert report.device_train_microbatch_size == positions // 100
    assert report.most_logits == pytest.approx(share * report.max_tokens, abs=1)
    assert report.as_dict()['most_logits'] == report.most_logits
    says_how_many = f'at most {report.most_logits:,} of' in report.text()
    computes_all = share == 1.0
    assert says_how_many is not computes_all
    # Stock Composer computes all logits.
    assert report.stock_microbatch_size == most_positions(20) // 100


def densest_microbatch(sizes: LengthTable, samples: np.ndarray, max_tokens: int) -> BatchShape:
    """Shape of a microbatch of the first samples that fit into the budget."""
    rows = 0
    width = 0
    labels = 0
    for sample in samples.tolist():
        wider = max(width, int(sizes.lengths[sample]))
        if (rows + 1) * wider > max_tokens:
            break
        rows += 1
        width = wider
        labels += int(sizes.loss_tokens[sample])
    return BatchShape(rows=rows, width=width, labels=labels + 1)


def test_any_microbatch_fits_with_its_labels():
    """Also the worst: the samples with the most labels for their length."""
    rng = np.random.default_rng(2)
    sizes = table()
    drawn_labels = rng.integers(0, 64, len(sizes))
    loss_tokens = np.minimum(drawn_labels, sizes.lengths // 4)
    sizes = replace(sizes, loss_tokens=loss_tokens)
    memory = at_labels()
    memory_of_all_logits = replace(memory, logits='all')
    arguments = {'num_ranks': 1, 'global_batch_size': 512, 'device_memory_gib': 6.0, 'slot_tokens': 16}

    report = suggest(sizes, memory=memory, **arguments)
    report_of_all_logits = suggest(sizes, memory=memory_of_all_logits, **arguments)

    assert report.max_tokens > 1.1 * report_of_all_logits.max_tokens
    share_of_labels = loss_tokens / sizes.lengths
    most_labels_first = np.argsort(-share_of_labels)
    for start in range(0, 200, 7):
        shape = densest_microbatch(sizes, most_labels_first[start:], report.max_tokens)
        assert memory.peak(shape) <= SAFETY * 6 * GIB


def test_profile_against_a_plain_count():
    sizes = table(512)

    report = suggest_for_one_rank(sizes)

    # One rank has all samples in one global batch. Stock Composer computes each as wide as the longest.
    computed_tokens = 512 * sizes.lengths.max()
    stock_padding = 1 - sizes.lengths.sum() / computed_tokens
    is_text = sizes.image_tokens == 0
    assert report.figures['stock'].padding_ratio == pytest.approx(stock_padding)
    assert report.figures['split'].padding_ratio < report.figures['stock'].padding_ratio
    assert report.profile.text_only_share == pytest.approx(is_text.mean())


def test_seconds_of_a_step_by_hand():
    """Four rows of 100 tokens on one rank, one microbatch: 4 x (100 + 100 x 100 / 1000) + 5 units."""
    measured_cost = CostModel(quadratic=1000.0, launch=5.0, seconds_per_token=1e-2)

    report = suggest_for_one_rank([100] * 4, measured_cost=measured_cost, seconds_per_step=0.5)
    report_without_measurement = suggest()

    assert report.step_seconds('stock') == pytest.approx(445e-2 + 0.5)
    assert report.step_seconds('split') == pytest.approx(445e-2 + 0.5)
    assert report_without_measurement.step_seconds('stock') is None


def test_cost_of_the_run_cuts_steps():
    """The measured cost only prices them. Cheap launches make a microbatch of each width, dear ones as few as fit."""
    lengths = [10, 11] * 64
    cheap_launches = CostModel(launch=1.0)
    dear_launches = CostModel(launch=1e6)

    cheap = suggest_for_one_rank(lengths, cost=cheap_launches, measured_cost=CostModel()).figures
    dear = suggest_for_one_rank(lengths, cost=dear_launches, measured_cost=CostModel()).figures

    for method in ('split', 'planned'):
        assert cheap[method].microbatches == 2
        assert dear[method].microbatches == 1
    assert cheap['stock'] == dear['stock']


def test_measured_encoder_time_counts():
    """One rank, one microbatch of four rows of 100 tokens: 440 units, 5 of launch, and two images in the encoder."""
    patches = np.array([10, 0, 30, 0])
    sizes = sizes_of(100, image_tokens=patches // 10, loss_tokens=patches, vision_patches=patches)
    measured_cost = CostModel(
        quadratic=1000.0,
        launch=5.0,
        vision_per_image=3.0,
        vision_per_patch=0.5,
        vision_per_square=0.01,
        seconds_per_token=1e-2,
    )

    report = suggest_for_one_rank(sizes, measured_cost=measured_cost)

    cost_of_encoder = 2 * 3.0 + 0.5 * 40 + 0.01 * (10**2 + 30**2)
    cost_of_step = 445 + cost_of_encoder
    assert report.step_seconds('stock') == pytest.approx(cost_of_step * 1e-2)
    assert report.step_seconds('planned') == pytest.approx(cost_of_step * 1e-2)
    assert report.bound == pytest.approx(cost_of_step)
    pasted_cost = CostModel(**pasted_keys(report)['cost'])
    assert pasted_cost == replace(measured_cost, seconds_per_token=None)


def test_pasted_lines_keep_cost_and_equal_counts():
    cost = CostModel(quadratic=1 / 3, launch=12345.6)
    measured_cost = CostModel(launch=5.0)

    keys = pasted_keys(suggest(cost=cost, equal_counts=True))
    default_keys = pasted_keys(suggest())
    measured_keys = pasted_keys(suggest(cost=cost, measured_cost=measured_cost))

    assert CostModel(**keys['cost']) == cost
    assert keys['equal_counts'] is True
    assert default_keys['equal_counts'] == 'auto'
    assert 'cost' not in default_keys
    assert measured_keys['cost'] == {'launch': 5.0}


def test_packed_steps_have_no_padding():
    packed = suggest(packing=True)
    padded = suggest()

    assert packed.figures['split'].padding_ratio == 0
    assert packed.figures['planned'].padding_ratio == 0
    assert packed.figures['stock'] == padded.figures['stock']
    assert pasted_keys(packed)['packing'] is True
    assert packed.max_tokens == padded.max_tokens


def padding_of_a_step(method: str, tokens: list[int], image_tokens: list[int], **options: Any) -> float:
    """Returns the share of padding if two ranks compute all samples in one step."""
    sizes = SampleSizes(tokens=np.array(tokens), image_tokens=np.array(image_tokens))
    all_samples = np.arange(len(sizes))
    step = simulate_steps(
        sizes,
        [all_samples],
        method=method,
        num_ranks=2,
        microbatch_rows=1,
        options=CutOptions(**options),
        price=CostModel(),
    )
    return step.padding_ratio


def test_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"`method` must be .*, got: 'plan'"):
        padding_of_a_step('plan', [40, 10], [0, 0], max_tokens=100)


def test_undecided_packing_is_refused():
    """Whether ``'auto'`` packs depends on the model, which is not known here."""
    with pytest.raises(ValueError, match=r"`packing` must be .*, got: 'auto'"):
        padding_of_a_step('split', [40, 10], [0, 0], max_tokens=100, packing='auto')


def test_dummies_of_plans_are_not_packed():
    """Under FSDP the plan gives the second rank a copy of the only image. The run does not read it for packing."""
    options = {'max_tokens': 100, 'packing': True, 'objective': 'fsdp'}
    padding = padding_of_a_step('planned', [40, 10, 10, 10], [20, 0, 0, 0], **options)
    assert padding == 0


@pytest.mark.parametrize(
    ('equal_counts', 'image_tokens', 'dummy_tokens'),
    [
        pytest.param(False, 0, 0, id='no dummy row'),
        pytest.param(True, 0, 10, id='the shortest row'),
        pytest.param(True, 8, 30, id='the shortest row with an image'),
    ],
)
def test_dummy_rows_of_equal_counts(equal_counts, image_tokens, dummy_tokens):
    """Rank 0 makes two microbatches of 500 tokens, rank 1 only one. For equal counts it repeats a row."""
    lengths = [500, 10, 500, 30]
    images = [image_tokens, 0, image_tokens, image_tokens]

    padding = padding_of_a_step('split', lengths, images, max_tokens=500, equal_counts=equal_counts)

    computed = 500 + 500 + 2 * 30 + dummy_tokens  # the row of 10 tokens is padded to 30
    assert padding == pytest.approx(1 - 1040 / computed)


def test_planning_is_best_within_the_bound():
    report = suggest()
    assert 0 < report.share_of_bound('split') <= report.share_of_bound('planned') <= 1
    assert report.speedup('planned') >= report.speedup('split') >= 1


def test_microbatches_of_stock_composer():
    arguments = {'num_ranks': 4, 'global_batch_size': 48}

    enough = suggest([100] * 64, device_memory_gib=8.0, **arguments)
    tight = suggest([100] * 64, device_memory_gib=6.3, **arguments)

    assert enough.stock_microbatch_size == 12
    assert enough.identity() == '(12 x 1) rows x 4 ranks = 48 samples a step'
    # The buckets of DDP take another GiB.
    assert most_positions(6.3, model_gib=MODEL_GIB + 1) // 100 == 5
    assert tight.identity() == '(5 x 2 + 2) rows x 4 ranks = 48 samples a step'


def test_stock_composer_may_not_fit():
    """With logits only at few labels rows of 1000 tokens fit, but one row with all its logits does not.

    A row takes 1.0 GiB, and 2.0 GiB more for all its logits. The devices have 2.4 GiB and 3.4 GiB for activations.
    """
    sizes = sizes_of([1000] * 64, loss_tokens=20)
    memory = at_labels(bytes_of_logits=4 * PER_LOGIT_ROW)

    report = suggest_for_one_rank(sizes, memory=memory, device_memory_gib=7.0)
    report_of_larger_device = suggest_for_one_rank(sizes, memory=memory, device_memory_gib=8.0)

    assert report.device_train_microbatch_size == 2
    assert report.stock_microbatch_size == 0
    assert report.speedup('split') is None
    assert report.as_dict()['speedup'] == {'split': None, 'planned': None}
    assert report.identity() == '(1 x 64) rows x 1 ranks = 64 samples a step'
    [warning] = report.warnings()
    assert 'one row of the longest sample (1000 tokens) may not fit' in warning
    assert report_of_larger_device.stock_microbatch_size == 1
    assert report_of_larger_device.speedup('split') > 1


def test_sharding_makes_room():
    sharded = memory_model(strategy='fsdp')

    two_ranks = suggest(memory=sharded, num_ranks=2, device_memory_gib=6.0)
    eight_ranks = suggest(memory=sharded, num_ranks=8, device_memory_gib=6.0)

    assert eight_ranks.max_tokens > two_ranks.max_tokens
    assert eight_ranks.terms['parameters'] == pytest.approx(1 / 8)


def test_samples_over_the_budget_are_named():
    """The device has 0.9 GiB for activations."""
    lengths = [50] * 60 + [900, 700, 50, 50]
    ids = [f'sample-{index}' for index in range(64)]

    report = suggest_for_one_rank(lengths, device_memory_gib=4.9 / SAFETY, sample_ids=ids)

    limit = int(0.9 * GIB / PER_POSITION)
    assert 50 < limit < 700
    assert report.max_tokens <= limit
    assert report.too_large == ['"sample-60": 900 tokens', '"sample-61": 700 tokens']
    assert 'dataset.max_length' in report.warnings()[0]


def test_rough_memory_model_warns():
    fit = memory_model().phases['head']
    rough_fit = replace(fit, residual=0.08)

    rough = suggest(memory=memory_model(phases={'head': rough_fit}))
    good = suggest()

    assert '8.0%' in '\n'.join(rough.warnings())
    assert good.warnings() == []


def test_report_as_text_json_yaml_picture(tmp_path):
    report = suggest(table(600))
    text = report.text()
    for words in ('largest safe size', 'DDP buckets', 'stock Composer'):
        assert words in text
    assert report.yaml() in text

    stored = stored_report(report, tmp_path / 'new folder')
    assert stored['profile']['num_samples'] == 600
    for keys in (stored, pasted_keys(report)):
        assert keys['device_train_microbatch_size'] * keys['slot_tokens'] == stored['max_tokens']

    picture_path = tmp_path / 'size.svg'
    draw_report(picture_path, report)
    picture = picture_path.read_text()
    for words in ('Computed positions that are padding', 'planned over ranks', 'Peak memory of a rank'):
        assert f'<!-- {words}' in picture


def check_capped_steps(sizes: LengthTable, cap: dict[str, int], **arguments: Any) -> tuple[Any, Any]:
    """Checks that eight rows fit at once, and that a cap which holds for two rows makes four microbatches.

    Returns the reports without and with the cap.
    """
    free = suggest_for_one_rank(sizes, **arguments)
    capped = suggest_for_one_rank(sizes, **cap, **arguments)
    packed = suggest_for_one_rank(sizes, packing=True, **cap, **arguments)

    assert free.figures['split'].microbatches == 1
    assert free.figures['planned'].microbatches == 1
    assert capped.figures['split'].microbatches == 4
    assert capped.figures['planned'].microbatches == 4
    assert packed.figures['split'].microbatches == 4
    assert free.figures['stock'] == capped.figures['stock']
    assert cap.items() <= pasted_keys(capped).items()
    return free, capped


def saved_bytes(free: Any, capped: Any) -> float:
    """Returns how many bytes less the peak is with a cap."""
    return (free.peak_gib - capped.peak_gib) * GIB


def test_image_cap_bounds_memory_and_steps():
    sizes = sizes_of([100] * 8, image_tokens=60, loss_tokens=1, vision_patches=60)

    free, capped = check_capped_steps(sizes, {'max_image_tokens': 120}, width_multiple=2)
    below_a_sample = suggest_for_one_rank(sizes, max_image_tokens=59)

    # A microbatch of all rows has 480 image tokens, and one under the cap 120.
    assert saved_bytes(free, capped) == pytest.approx(360 * PER_IMAGE_TOKEN)
    assert len(below_a_sample.oversize) == 8


def test_loss_cap_bounds_logits_and_steps():
    sizes = sizes_of([100] * 8, loss_tokens=50)
    memory = at_labels()

    free, capped = check_capped_steps(sizes, {'max_loss_tokens': 100}, memory=memory)
    below_a_sample = suggest_for_one_rank(sizes, memory=memory, max_loss_tokens=49)

    # Without the cap each of 8 rows may need logits at 51 positions. With it, a microbatch of 100 labels computes all
    # logits if it has at most 100 / 0.9 positions, rounded up to 112. One more is counted, for the last token.
    assert free.most_logits == 408
    assert capped.most_logits == 113
    assert saved_bytes(free, capped) == pytest.approx((408 - 113) * PER_LOGIT_ROW)
    assert len(below_a_sample.oversize) == 8


def test_loss_cap_allows_larger_microbatches():
    """One sample has a label everywhere. Without a cap a microbatch could hold only such samples."""
    sizes = sizes_of([100] * 63 + [50], loss_tokens=[4] * 63 + [50])
    arguments = {'memory': at_labels(), 'device_memory_gib': 7.0}

    free = suggest_for_one_rank(sizes, **arguments)
    capped = suggest_for_one_rank(sizes, max_loss_tokens=60, **arguments)

    assert capped.device_train_microbatch_size > free.device_train_microbatch_size
    assert capped.peak_gib <= SAFETY * 7.0


@pytest.mark.parametrize(
    ('image_tokens', 'loss_tokens', 'width', 'options'),
    [
        pytest.param(4900, 0, 5000, {'max_image_tokens': 100}, id='over the image cap'),
        pytest.param(0, 4900, 5000, {'max_loss_tokens': 100}, id='over the loss cap'),
        pytest.param(0, 0, 5000, {}, id='no cap'),
        pytest.param(4900, 0, 5056, {'max_image_tokens': 100, 'width_multiple': 64}, id='rounded width'),
    ],
)
def test_memory_of_a_sample_alone(image_tokens, loss_tokens, width, options):
    """A cap of a microbatch does not bound a sample that is over it."""
    sizes = sizes_of(
        [100] * 7 + [5000],
        image_tokens=[20] * 7 + [image_tokens],
        loss_tokens=[4] * 7 + [loss_tokens],
    )
    memory = at_labels() if loss_tokens else memory_model()
    large_sample = BatchShape(rows=1, width=width, image_tokens=image_tokens)
    needed_gib = memory.peak(large_sample) / GIB
    more_gib = needed_gib + 0.1
    less_gib = needed_gib - 0.1
    arguments = {'memory': memory, 'slot_tokens': 100, **options}

    enough = suggest_for_one_rank(sizes, device_memory_gib=more_gib / SAFETY, **arguments)
    too_little = suggest_for_one_rank(sizes, device_memory_gib=less_gib / SAFETY, **arguments)

    assert enough.too_large == []
    assert needed_gib - 1e-6 <= enough.peak_gib <= more_gib
    sizes_within_caps = [size for size in enough.sizes if size.size <= 8]  # a slot for each row
    assert sizes_within_caps
    for size in sizes_within_caps:
        assert size.peak_gib == pytest.approx(needed_gib), 'a microbatch within the caps takes less'
    assert too_little.too_large == ['sample 7: 5000 tokens']
    assert too_little.peak_gib < less_gib


def test_samples_alone_are_predicted_once(monkeypatch):
    """A large dataset has thousands of them. For each of them it takes long, so it is not done again for each size."""
    sizes = sizes_of([100] * 6 + [5000, 6000])
    samples_alone = []
    peak = Capacity.peak

    def noting_peak(self: Capacity, tokens: int, image_tokens: int | None = None) -> float:
        if len(self.table) == 1:
            samples_alone.append(tokens)
        return peak(self, tokens, image_tokens)

    monkeypatch.setattr(Capacity, 'peak', noting_peak)
    report = suggest_for_one_rank(sizes, slot_tokens=100, device_memory_gib=80)

    assert len(report.sizes) > 1
    assert samples_alone == [5000, 6000]


def test_labels_of_a_sample_alone():
    """It has few labels, and short samples have a label everywhere. They are not in its microbatch."""
    sizes = sizes_of([100] * 7 + [5000], loss_tokens=[99] * 7 + [50])
    memory = at_labels()
    large_sample = BatchShape(rows=1, width=5000, labels=51)
    needed_gib = memory.peak(large_sample) / GIB
    more_gib = needed_gib + 0.1

    report = suggest_for_one_rank(sizes, memory=memory, slot_tokens=100, device_memory_gib=more_gib / SAFETY)

    assert report.oversize == ['sample 7: 5000 tokens']
    assert report.too_large == []


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'lengths': []}, '`lengths` must hold at least one sample'),
        ({'lengths': [5, -3, 4]}, r'`lengths` must be .* at least 1, got: -3 at sample 1\.'),
        ({'lengths': [5, 0], 'sample_ids': ['a', 'b']}, r'`lengths` must be .* got: 0 at sample 1 \("b"\)'),
        ({'num_ranks': 0}, '`num_ranks` must be a positive integer, got: 0'),
        ({'global_batch_size': 30}, 'multiple of the number of ranks, got: 30 on 4 ranks. Set it to 32'),
        ({'device_memory_gib': 2.0}, r'must hold the model and a microbatch.*sharding with FSDP or over'),
        ({'device_memory_gib': 0.0}, '`device_memory_gib` must hold the model'),
        ({'safety': 1.2}, '`safety` must be over 0 and at most 1'),
        ({'slot_tokens': 0}, '`slot_tokens` must be a positive integer'),
        ({'packing': 'auto'}, r"`packing` must be .*, got: 'auto'"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        suggest(**arguments)
    assert '\n' not in str(caught.value)
