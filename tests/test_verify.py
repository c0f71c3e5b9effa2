# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The program `verify`: its exit status, figures and reasons, for runs that are exact and runs that are not."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

from composer_tokacc import BatchLayout, TokenAccumulation, invariance
from composer_tokacc import verify as program
from composer_tokacc.algorithm.loss_terms import LossTerms
from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.checks import step
from composer_tokacc.checks.first_batch import FirstBatchCheck
from composer_tokacc.refusals import NotExactError
from composer_tokacc.verify import main
from tests.support.image_codes import (
    collate_with_codes,
    gradients_of_single_rows,
    image_codes_model,
    rows_with_codes,
)
from tests.support.launch import launch_program
from tests.support.programs import DIGITS, TINY_DIGITS
from tests.support.text import packed_row, ragged_batch, text_model, text_rows
from tests.support.training import hugging_face, take_gradients

FLAG = 'trainer.accumulate_train_batch_on_tokens=true'
TINY = [*TINY_DIGITS, 'dataset.eval=null', 'report.num_samples=0']
BOTH_SIDES = program.SIDES


@pytest.fixture(autouse=True)
def _one_side(monkeypatch):
    """Rows are padded on one side only, which takes half the time. One test sets both sides."""
    monkeypatch.setattr(program, 'SIDES', ('right',))


def errors(printed, split):
    """Returns the errors in the lines of one way to split."""
    numbers = re.findall(rf'^{split} .*? (\S+e[-+]\d+)', printed, re.MULTILINE)
    return [float(number) for number in numbers]


def largest_error(printed, split):
    return max(errors(printed, split))


def verify(*overrides, rows=2, config=DIGITS):
    """Returns the exit status."""
    return main([config, '--rows', str(rows), *TINY, *overrides])


@pytest.fixture
def assert_reference(monkeypatch):
    """Returns a function that compares the reference of the last case with the gradients of a model."""
    relative_error = mock.Mock(wraps=invariance.relative_error)
    monkeypatch.setattr(invariance, 'relative_error', relative_error)

    def compare(expected):
        _, reference_gradients = relative_error.call_args.args
        reference = {name.removeprefix('model.'): gradient for name, gradient in reference_gradients.items()}
        error, reason = invariance.relative_error(reference, expected)
        assert error < 1e-6, reason

    return compare


def test_demo_is_exact_and_stock_not(capsys, monkeypatch):
    monkeypatch.setattr(program, 'SIDES', BOTH_SIDES)

    assert verify(rows=3) == 0

    printed = capsys.readouterr().out
    # Microbatches of 1, 2 and 3 rows, padded left and right.
    for split in ('in order', 'regrouped'):
        assert len(errors(printed, split)) == 6
        assert largest_error(printed, split) < 1e-6
    assert largest_error(printed, 'stock Composer') > 1e-2
    assert 'exact: largest relative gradient error' in printed


def test_weighted_run_has_weighted_reference(capsys):
    assert verify('algorithms.token_accumulation.token_weights=sqrt') == 0
    printed = capsys.readouterr().out
    assert largest_error(printed, 'regrouped') < 1e-6
    assert largest_error(printed, 'stock Composer') > 1e-2


def test_noise_is_switched_off(capsys):
    """The layers read this number in each forward, and there is no module to switch off."""
    text_config = 'model.config.text_config'
    assert verify(f'{text_config}.model_type=mixtral', f'{text_config}.router_jitter_noise=0.2') == 0
    printed = capsys.readouterr().out
    assert largest_error(printed, 'regrouped') < 1e-6


def test_cuts_are_made_with_the_runs_options(monkeypatch):
    """These options are wrong for the model, and switch off the check that would say so. The run has them, too."""
    fit = mock.Mock(side_effect=NotExactError('the algorithm is known'))
    monkeypatch.setattr(program._VerifiedRun, '_fit', fit)
    monkeypatch.setattr(program._VerifiedRun, '_fit_stock', lambda self, batch, steps: None)

    assert verify('algorithms.token_accumulation={loss_tokens: unshifted, check_loss: false, logits: all}') == 1

    _, _, algorithm = fit.call_args.args
    arguments = repr(algorithm)
    assert "loss_tokens='unshifted'" in arguments
    assert 'check_loss=False' in arguments


def test_both_halves_of_an_adapter(capsys, monkeypatch):
    """peft starts with B = 0. Then the gradient of A is 0 and cannot be wrong. So `verify` starts with other values."""
    pytest.importorskip('peft')
    relative_error = mock.Mock(wraps=invariance.relative_error)
    monkeypatch.setattr(invariance, 'relative_error', relative_error)
    lora = 'model.lora={r: 4, dropout: 0.5, modules_to_save: [multi_modal_projector]}'

    assert verify(lora, 'model.dtype=bfloat16', 'trainer.precision=amp_bf16') == 0

    printed = capsys.readouterr().out
    assert largest_error(printed, 'regrouped') < 1e-6
    _, reference_gradients = relative_error.call_args.args
    for half in ('.lora_A.', '.lora_B.'):
        assert any(half in name for name in reference_gradients)
    for name, gradient in reference_gradients.items():
        assert gradient.any(), name
        assert gradient.dtype == torch.float32, name


@pytest.mark.parametrize(('device', 'tolerance'), [('cpu', 1e-6), ('gpu', 1e-5)])
def test_tolerance_fits_the_runs_device(device, tolerance, monkeypatch):
    """A run on the CPU has the tolerance of CPUs, even if the machine has a GPU."""
    verify_config = mock.Mock(side_effect=NotExactError('the tolerance is known'))
    monkeypatch.setattr(program, 'verify', verify_config)
    monkeypatch.setattr(program, 'runs_on_gpu', lambda config: config.trainer['device'] != 'cpu')

    assert verify(f'trainer.device={device}') == 1

    assert verify_config.call_args.kwargs['tolerance'] == tolerance


@pytest.mark.slow
def test_on_two_ranks():
    printed = launch_program('composer_tokacc.verify', DIGITS, '--rows', '3', *TINY, ranks=2)
    assert largest_error(printed, 'regrouped') < 1e-6


def without_algorithm(folder, **other_algorithms):
    """Returns the path of the demo without `token_accumulation`. An override cannot take it away."""
    config = yaml.safe_load(Path(DIGITS).read_text())
    config['algorithms'] = other_algorithms
    path = folder / 'stock.yaml'
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_run_without_the_algorithm(tmp_path, capsys):
    """Such a run has the weights of stock Composer."""
    assert verify(config=without_algorithm(tmp_path)) == 1
    assert 'NOT exact: The run must weight its microbatches by their tokens' in capsys.readouterr().err


class AlgorithmOfUser(TokenAccumulation):
    """An algorithm of a user, which has arguments of its own."""

    def __init__(self, weights: str = 'token'):
        super().__init__(token_weights=weights)


def test_subclass_of_the_algorithm(tmp_path, capsys):
    """Its own arguments set the weights, so `verify` must build the subclass itself."""
    name = f'{__name__}.{AlgorithmOfUser.__name__}'
    config = without_algorithm(tmp_path, **{name: {'weights': 'sqrt'}})

    assert verify(config=config) == 0

    printed = capsys.readouterr().out
    assert largest_error(printed, 'regrouped') < 1e-6
    assert largest_error(printed, 'stock Composer') > 1e-2


def test_model_without_trained_parameters(capsys):
    assert verify('model.freeze=[model, lm_head]') == 1
    assert 'NOT exact: No parameter of the model requires a gradient' in capsys.readouterr().err


ONLY_PROJECTOR = 'model.freeze=[language_model, vision_tower, lm_head]'


def test_only_the_projector_is_trained(capsys):
    """A microbatch without images then has no gradient. Of the three rows one has an image."""
    assert verify(ONLY_PROJECTOR, rows=3) == 0
    printed = capsys.readouterr().out
    assert largest_error(printed, 'regrouped') < 1e-6


def test_rows_that_do_not_train_the_projector(capsys, monkeypatch):
    all_rows = program._rows

    def rows_without_images(batch, layout, max_rows):
        rows = all_rows(batch, layout, max_rows)
        text_row = next(row for row in rows if not layout.media_of(row))
        return [text_row, text_row]

    monkeypatch.setattr(program, '_rows', rows_without_images)

    assert verify(ONLY_PROJECTOR, rows=3) == 2

    assert '`--rows` must take rows that train something' in capsys.readouterr().err


def test_chosen_rows_have_unlike_numbers_of_labels():
    """With equal numbers, a mean of means would be right. Only the second row has another number than the others.

    Rows that are evenly spread in the order of the batch would leave it out.
    """
    seven_equal_rows = [(9, 2)] * 7
    batch = ragged_batch([(9, 2), (12, 7), *seven_equal_rows])
    layout = BatchLayout.infer(batch)

    rows = program._rows(batch, layout, 3)

    num_labels = []
    for row in rows:
        is_label = row['labels'] != IGNORE_INDEX
        num_labels.append(int(is_label.sum()))
    assert sorted(num_labels) == [2, 2, 7]


def take_first_batch(monkeypatch, model, batch):
    """Makes the run train this model, with this batch as its first one."""
    loader = mock.Mock(dataloader=[batch])
    parts = mock.Mock(model=hugging_face(model), train_loader=loader)
    monkeypatch.setattr(program, 'build_parts', lambda config: parts)


def packed_rows():
    """Returns two rows of several documents. Every token has a label, also the first one of each document."""
    first = packed_row(text_rows([(4, 4), (9, 9)]))
    second = packed_row(text_rows([(6, 6), (3, 3), (5, 5)]))
    padding = {  # one column for the first row
        'input_ids': torch.tensor([[0]]),
        'labels': torch.tensor([[-100]]),
        'position_ids': torch.tensor([[0]]),
    }
    batch = {}
    for key in padding:
        padded_first = torch.cat([first[key], padding[key]], dim=1)
        batch[key] = torch.cat([padded_first, second[key]])
    return batch


@pytest.mark.parametrize(
    ('uses_flag', 'padding'),
    [
        pytest.param(False, 'right', id='algorithm, right'),
        pytest.param(False, 'left', id='algorithm, left'),
        pytest.param(True, 'right', id='flag'),
    ],
)
def test_labels_that_packed_rows_lose(uses_flag, padding, tmp_path, capsys, monkeypatch, assert_reference):
    """The run masks the first label of each further document. So the reference must not train on it, either."""
    monkeypatch.setattr(program, 'SIDES', (padding,))
    model = text_model()
    batch = packed_rows()
    take_first_batch(monkeypatch, model, batch)

    if uses_flag:
        assert verify(FLAG, config=without_algorithm(tmp_path)) == 0
    else:
        assert verify() == 0

    printed = capsys.readouterr().out
    assert largest_error(printed, 'regrouped') < 1e-6
    # The first label of each further document.
    batch['labels'][0, 4] = -100
    batch['labels'][1, 6] = -100
    batch['labels'][1, 9] = -100
    model.zero_grad()
    model(**batch).loss.backward()
    assert_reference(take_gradients(model))


def test_packed_rows_without_logits(monkeypatch):
    """A model with a fused loss returns no logits. Only token weights need them."""
    model = text_model()

    def drop_logits(module, args, outputs):
        outputs.logits = None

    model.register_forward_hook(drop_logits)
    take_first_batch(monkeypatch, model, packed_rows())
    assert verify() == 0


def test_rule_that_the_run_does_not_check(monkeypatch):
    """The model of such a run may hide its rule. So the reference takes the named rule, as the run does."""
    take_first_batch(monkeypatch, text_model(), packed_rows())
    monkeypatch.setattr(program, 'find_loss_rule', mock.Mock(side_effect=NotExactError('no rule fits')))
    assert verify() == 1
    assert verify('algorithms.token_accumulation={loss_tokens: causal, check_loss: false}') == 0


def test_packed_rows_need_no_logits(monkeypatch):
    """Only token weights do. The model of packed rows may return only its loss."""
    take_first_batch(monkeypatch, text_model(), packed_rows())
    monkeypatch.setattr(program, 'token_weights_of', mock.Mock(side_effect=AttributeError('no logits')))
    assert verify() == 0


def as_tuple(batch):
    return tuple(batch.values())


def mask_as_list(batch):
    mask = batch['attention_mask'].tolist()
    return {**batch, 'attention_mask': mask}


def labels_of_int32(batch):
    labels = batch['labels'].int()
    return {**batch, 'labels': labels}


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        pytest.param(as_tuple, '`batch` must be a mapping with a `labels` tensor .*, got: tuple', id='tuple'),
        pytest.param(mask_as_list, '`attention_mask` must be real numbers, .* list', id='mask is a list'),
        pytest.param(labels_of_int32, '`labels` must be int64', id='labels are int32'),
    ],
)
def test_first_batch_that_cannot_be_counted(change, message, capsys, monkeypatch):
    batch = change(ragged_batch([(4, 2), (9, 7)]))
    take_first_batch(monkeypatch, text_model(), batch)
    assert verify() == 2
    assert re.search(f'error: {message}', capsys.readouterr().err)


@pytest.mark.parametrize(
    ('images', 'chosen_rows'),
    [
        pytest.param([1, 1, 0], [0, 1, 2], id='all rows'),
        pytest.param([1, 2, 1], [0, 2], id='rows with the fewest and the most labels'),
    ],
)
def test_rows_keep_their_image_codes(images, chosen_rows, capsys, monkeypatch, assert_reference):
    """An image has 6 codes, and the widest row 6 tokens. Only the whole batch shows that the codes are not text."""
    rows = rows_with_codes([(4, 2), (5, 4), (6, 6)], images)
    batch = collate_with_codes(rows)
    model = image_codes_model()
    take_first_batch(monkeypatch, model, batch)

    assert verify(rows=len(chosen_rows)) == 0

    printed = capsys.readouterr().out
    assert largest_error(printed, 'regrouped') < 1e-6
    expected = gradients_of_single_rows(model, [rows[index] for index in chosen_rows])
    assert_reference(expected)


def test_flag_instead_of_the_algorithm(tmp_path, capsys):
    assert verify(FLAG, config=without_algorithm(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert largest_error(printed, 'regrouped') < 1e-6


def test_flag_with_a_wrong_rule(tmp_path, capsys):
    """The program `train` refuses it, too."""
    wrong_rule = 'microbatching.loss_tokens=unshifted'
    assert verify(FLAG, wrong_rule, config=without_algorithm(tmp_path)) == 1
    assert '`loss_tokens` must be the rule' in capsys.readouterr().err


def test_flag_beside_the_algorithm(capsys):
    """Both would weight the loss."""
    assert verify(FLAG) == 1
    assert 'Set `accumulate_train_batch_on_tokens` to False' in capsys.readouterr().err


def test_error_over_the_tolerance(capsys, monkeypatch):
    right_scaled = LossTerms.scaled

    def wrong_scaled(self, loss, scales, **options):
        wrong_scales = {unit: 1.001 * scale for unit, scale in scales.items()}
        return right_scaled(self, loss, wrong_scales, **options)

    monkeypatch.setattr(LossTerms, 'scaled', wrong_scaled)
    monkeypatch.setattr(step, '_check_tokens', lambda *_, **__: None)  # it would refuse the step

    assert verify() == 1

    printed = capsys.readouterr().out
    errors_of_sizes_1_and_2 = errors(printed, 'regrouped')
    assert errors_of_sizes_1_and_2 == pytest.approx([1e-3, 1e-3], rel=1e-2)
    assert re.search(r'over tolerance; .*\S+weight is off', printed)
    assert 'NOT exact' in printed


def make_steps_wrong(monkeypatch, is_wrong):
    """Makes the gradient of a step 1.001 times as large if ``is_wrong(state)`` is True."""
    right_after_loss = TokenAccumulation._after_loss

    def wrong_after_loss(self, state):
        right_after_loss(self, state)
        if is_wrong(state):
            state.loss = 1.001 * state.loss

    monkeypatch.setattr(TokenAccumulation, '_after_loss', wrong_after_loss)
    monkeypatch.setattr(step, '_check_tokens', lambda *_, **__: None)  # it would refuse the step


@pytest.mark.parametrize('wrong_size', [1, 2, 3])
def test_error_in_one_microbatch_size(wrong_size, capsys, monkeypatch):
    """The steps of all sizes belong to one fit. The other sizes must not hide the error."""
    make_steps_wrong(monkeypatch, lambda state: state.device_train_microbatch_size == wrong_size)

    assert verify(rows=3) == 1

    printed = capsys.readouterr().out
    errors_by_size = errors(printed, 'regrouped')
    error_of_wrong_size = errors_by_size.pop(wrong_size - 1)
    assert error_of_wrong_size == pytest.approx(1e-3, rel=1e-2)
    assert max(errors_by_size) < 1e-6


@pytest.mark.parametrize('is_first', [True, False])
def test_error_in_first_or_later_steps(is_first, capsys, monkeypatch):
    """The first step of one fit has the smallest microbatches, that of the other the largest."""
    make_steps_wrong(monkeypatch, lambda state: (state.timestamp.batch == 0) == is_first)

    assert verify() == 1

    printed = capsys.readouterr().out
    first_of_regrouped, later_of_regrouped = errors(printed, 'regrouped')
    later_in_order, first_in_order = errors(printed, 'in order')
    assert (first_of_regrouped > 1e-4) is is_first
    assert (first_in_order > 1e-4) is is_first
    assert (later_of_regrouped > 1e-4) is not is_first
    assert (later_in_order > 1e-4) is not is_first


def test_each_size_begins_a_fit(capsys, monkeypatch):
    """Otherwise an error that only the first step with one size has would not be noticed."""
    monkeypatch.setattr(program, 'SIDES', BOTH_SIDES)
    make_steps_wrong(monkeypatch, lambda state: state.timestamp.batch == 0)

    assert verify(rows=4) == 1

    printed = capsys.readouterr().out
    wrong_sizes = []
    for split in ('in order', 'regrouped'):
        # Sizes 1, 2, 3 and 4 padded on the right, then on the left.
        for place, error in enumerate(errors(printed, split)):
            if error > 1e-4:
                wrong_sizes.append(1 + place % 4)
    assert sorted(wrong_sizes) == [1, 2, 3, 4]


def test_sizes_share_one_check(monkeypatch):
    """Only another order of the rows, or another padding side, needs another check."""
    right_check_rows = FirstBatchCheck._check_rows
    check_rows = mock.create_autospec(right_check_rows, side_effect=right_check_rows)
    monkeypatch.setattr(FirstBatchCheck, '_check_rows', check_rows)

    assert verify(rows=3) == 0

    assert check_rows.call_count == 2  # in order and regrouped


def test_model_that_cannot_be_exact(capsys, monkeypatch):
    build_parts = program.build_parts

    def loss_with_z_loss(outputs, batch):
        # A mean over all positions, also padding. It depends on which rows share a microbatch.
        mean_square = outputs['logits'].square().mean()
        return outputs['loss'] + mean_square

    def with_other_loss(config):
        parts = build_parts(config)
        monkeypatch.setattr(parts.model, 'loss', loss_with_z_loss)
        return parts

    monkeypatch.setattr(program, 'build_parts', with_other_loss)

    assert verify() == 1

    printed = capsys.readouterr().err
    assert re.search(r'NOT exact: .* changes by .* a mean over other positions', printed)


def test_error_of_torch(capsys, monkeypatch):
    """``torch.OutOfMemoryError`` is a RuntimeError as well."""
    out_of_memory = mock.Mock(side_effect=torch.OutOfMemoryError('out of memory'))
    monkeypatch.setattr(LossTerms, 'scaled', out_of_memory)
    assert verify() == 2
    assert 'error: the device must have memory' in capsys.readouterr().err


def test_wrong_config_is_one_line(capsys):
    assert main([DIGITS, 'modell.x=1']) == 2
    assert 'Did you mean model?' in capsys.readouterr().err
