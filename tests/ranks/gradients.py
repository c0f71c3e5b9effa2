# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: each rank trains on its share of one global batch.

Arguments: groups of cases (``text``, ``weights llava``, ``fsdp llava``, ``router``, ...). Returns for each case the
relative errors of gradient and losses. If a case must be refused, its label begins with ``refused``, and its result is
the message.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from composer import Evaluator
from composer.callbacks import NaNMonitor
from composer.core import Event
from composer.models import HuggingFaceModel
from composer.utils import dist

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.algorithm import step_loss_weights
from composer_tokacc.row_counts import RowCounts, attach_row_counts
from tests.algorithm.test_router_loss import Microbatches, expected_step, subject_with_router
from tests.model_types.rows import Maker
from tests.model_types.tiny import tiny_config, tiny_model
from tests.support.families import FAMILIES
from tests.support.fsdp import FSDP, sharded
from tests.support.masked_text import masked_batch, masked_model
from tests.support.mixtures import COEFFICIENT, mixture_of_experts
from tests.support.text import collate, next_token_loss, text_model, text_rows
from tests.support.training import (
    COMPOSERS_FLAG,
    TOTAL,
    GradientRecorder,
    On,
    composer_gradients,
    fit,
    gradients_of,
    largest,
    loader,
    rank_share,
    reference_gradients,
    relative_error,
)
from tests.support.weights import column, weighted_reference

Results = Iterator[tuple[str, Any]]
"""Label and result of each case."""

# Length and number of labels of each row of text. On two ranks 22 labels and 3 labels.
SHAPE = [(4, 2), (14, 11), (9, 9), (3, 0), (6, 1), (7, 2)]
FIRST_RANK_HAS_NO_LABELS = [(4, 0), (14, 0), (9, 0), (3, 0), (6, 1), (7, 2)]
# A row of one token has no loss in a causal model.
FIRST_RANK_HAS_NO_LOSS = [(1, 1), (1, 1), (1, 1), (1, 1), (9, 4), (7, 2)]
MEAN_LOSS = 'token_accumulation/token_mean_loss'
# Two families that are also packed. The second has multimodal rotary positions.
PACKED_FAMILIES = ('llava', 'qwen2_5_vl')
ORDERS = {
    'mixed': (0, 1, 2, 3, 4, 5),
    'text_rank': (0, 4, 1, 2, 3, 5),
}
"""Orders of the rows of a family. They have 0, 1, 1, 2, 0 and 3 images.

With 'text_rank' the first rank of two gets both rows without images, and of four ranks two get only such a row."""
SHARES = {
    'mixed': {2: (4, 2), 4: (2, 2, 1, 1)},
    'text_rank': {2: (2, 4), 4: (1, 1, 2, 2)},
}
"""Rows of each rank, by the number of ranks. They are uneven, so that ranks make different numbers of microbatches."""
MICROBATCH_SIZES = {2: (1, 2, 6), 4: (1, 2)}
"""Sizes for text by the number of ranks. Four ranks have at most two rows each."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a global batch is cut."""

    size: int
    """Rows of a microbatch."""
    order: str = 'mixed'
    side: str = 'right'
    """Side of the padding."""
    weights: str = 'token'
    packing: bool = False


# Any value of one option occurs once with any value of another.
CUTS_OF_FAMILIES = (
    Cut(order='mixed', side='right', size=1),
    Cut(order='mixed', side='left', size=3),
    Cut(order='text_rank', side='right', size=3),
    Cut(order='text_rank', side='left', size=1),
)
FSDP_CUTS = (
    Cut(order='mixed', size=3),
    Cut(order='text_rank', size=1),
    Cut(order='text_rank', size=3, weights='sqrt'),
)
WEIGHTED_CUTS = (
    Cut(size=1, weights='sqrt'),
    Cut(size=3, weights='sample'),
    Cut(size=1, weights='column'),
    Cut(size=3, weights='sqrt', packing=True),
    Cut(size=1, weights='sample', packing=True),
    Cut(size=3, weights='column', packing=True),
)
ROUTER_CUTS = (
    Cut(size=1),
    Cut(size=3),
    Cut(size=2, packing=True),
)


def in_order(rows: Sequence[Any], order: str) -> list[Any]:
    return [rows[index] for index in ORDERS[order]]


def share_of(rows: Sequence[Any], order: str = 'mixed') -> list[Any]:
    """Returns the rows of this rank."""
    sizes = SHARES[order][dist.get_world_size()]
    return rank_share(rows, sizes)


def batches_of(
    layout: BatchLayout,
    rows: Sequence[Any],
    order: str = 'mixed',
    **options: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns all rows as one batch, and the rows of this rank. Takes the options of ``concat``."""
    batch = layout.concat(rows, **options)
    rank_batch = layout.concat(share_of(rows, order), **options)
    return batch, rank_batch


def measure(
    model: Any,
    batch: Any,
    data: Any,
    size: int = 2,
    *,
    weights: str = 'token',
    fsdp: bool = False,
    **options: Any,
) -> dict[str, float]:
    """Runs a step on ``data``, and compares it with one forward over the whole batch.

    With FSDP also ``logits='labels'`` is set. Both have hooks on the model, so they are tested together.

    Returns:
        On rank 0 the errors of the gradient and of the logged losses.
    """
    is_first = dist.get_global_rank() == 0
    expected = {}
    expected_losses = {}
    if is_first:
        if weights == 'token':
            expected, expected_losses[TOTAL] = reference_gradients(model, batch)
        else:
            expected, expected_losses[TOTAL], expected_losses[MEAN_LOSS] = weighted_reference(model, batch, weights)

    options = {'callbacks': [NaNMonitor()], **options}
    if weights != 'token':
        options['token_weights'] = weights
    trained_model = model
    if fsdp:
        trained_model = sharded(model)
        options = {**options, **FSDP, 'logits': 'labels'}
    recorder = fit(trained_model, data, microbatch_size=size, **options)

    if fsdp:
        parameters = recorder.trainer.state.model.parameters()
        assert any(hasattr(parameter, 'full_tensor') for parameter in parameters), 'FSDP has sharded the model'
    if not is_first:
        return {}
    return errors_of(recorder, expected, expected_losses)


def errors_of(
    recorder: GradientRecorder,
    expected: Mapping[str, torch.Tensor],
    expected_losses: Mapping[str, float],
) -> dict[str, float]:
    """Returns the relative error of the recorded gradients, and the largest one of the losses that were logged last.

    Args:
        recorder: Has recorded the run.
        expected: The expected gradient of each parameter.
        expected_losses: The expected value of each metric. If it is empty, the error of the losses is 0.
    """
    loss_errors = [0.0]
    for name, loss in expected_losses.items():
        last_logged = recorder.logged(name)[-1]
        loss_errors.append(abs(last_logged / loss - 1))
    gradient_error = relative_error(recorder.gradients, expected)
    return {'error': gradient_error, 'loss_error': largest(loss_errors)}


def refusal(model: Any, data: Any, **options: Any) -> str:
    """Returns the message of the error, or an empty text if the run is not refused."""
    try:
        # Microbatches of one row, so that Composer's own weights are wrong on every rank.
        fit(model, data, microbatch_size=1, **options)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ''


def packed_label(packing: bool) -> str:
    return ' packed' if packing else ''


def family_results(name: str) -> Results:
    """Cuts the rows of a family in several ways. One row has no labels."""
    case = FAMILIES[name]()
    layout = BatchLayout.for_model(case.config)
    third_row = case.rows[2]
    third_row['labels'] = torch.full_like(third_row['labels'], -100)
    packings = [False]
    if name in PACKED_FAMILIES:
        packings.append(True)
    for packing in packings:
        for cut in CUTS_OF_FAMILIES:
            rows = in_order(case.rows, cut.order)
            options = {'padding_side': cut.side, 'pad_token_id': case.pad_token_id}
            batch, rank_batch = batches_of(layout, rows, cut.order, **options)
            data = token_data_spec(loader(rank_batch), layout=layout, packing=packing)
            label = f'{name} {cut.side} {cut.order} microbatch {cut.size}{packed_label(packing)}'
            yield label, measure(case.model, batch, data, cut.size)
    if name == 'llava':
        yield 'llava with an unknown type', measure_unknown_type(case)


def measure_unknown_type(case: Any) -> dict[str, float]:
    """Measures a model type that the package does not know, so that it infers the layout from the batch.

    The first rank sees only text, and must still agree with the other ranks.
    """
    model = copy.deepcopy(case.model)
    model.config.model_type = 'known_to_nobody'
    layout = BatchLayout.for_model(case.config)
    rows = in_order(case.rows, 'text_rank')
    batch, rank_batch = batches_of(layout, rows, 'text_rank', pad_token_id=case.pad_token_id)
    return measure(model, batch, token_data_spec(loader(rank_batch)))


def text_results() -> Results:
    """Cuts ragged rows of text in five ways, also packed."""
    rows = text_rows(SHAPE)
    model = text_model()
    batch = collate(rows)
    rank_batch = collate(share_of(rows))
    data = loader(rank_batch)
    data_of_splits = {
        'stock': data,
        'ordered': token_data_spec(data, regroup=False),
        'regrouped': token_data_spec(data),
        'unequal counts': token_data_spec(data, equal_counts=False),
        'packed': token_data_spec(data, packing=True),
    }
    sizes = MICROBATCH_SIZES[dist.get_world_size()]
    for split, data_of_split in data_of_splits.items():
        for size in sizes:
            yield f'text {split} microbatch {size}', measure(model, batch, data_of_split, size)

    yield 'text rank without labels', measure_text(model, FIRST_RANK_HAS_NO_LABELS)
    yield 'text rank with rows of one token', measure_text(model, FIRST_RANK_HAS_NO_LOSS)
    yield 'text rank with rows of one token in fixed width', measure_text(model, FIRST_RANK_HAS_NO_LOSS, width=16)
    yield 'text plain loop', measure_plain_loop(rows)

    exact_counter = token_data_spec(data, model=model)
    errors = measure(model, batch, exact_counter, algorithms=[], callbacks=[], **COMPOSERS_FLAG)
    # Composer logs another mean, which is NaN if a row has no labels.
    yield 'text flag without algorithm', {**errors, 'loss_error': 0.0}

    yield 'refused default counter', refusal(text_model(), data, **COMPOSERS_FLAG)
    yield 'refused exact counter', refusal(text_model(), token_data_spec(data), **COMPOSERS_FLAG)


def measure_text(model: Any, shape: Sequence[tuple[int, int]], width: int = 0) -> dict[str, float]:
    """Each rank pads its rows to its longest one, or to ``width``."""
    rows = text_rows(shape)
    rank_batch = collate(share_of(rows), width=width)
    data = token_data_spec(loader(rank_batch))
    return measure(model, collate(rows), data)


def masked_results() -> Results:
    """Cuts rows of an encoder with a masked loss, also packed."""
    lengths = [4, 5, 9, 14, 6, 3, 2, 9]
    batch = masked_batch(lengths)
    rows_of_rank = rank_share(range(len(lengths)), (3, 5))
    rank_batch = {key: value[rows_of_rank] for key, value in batch.items()}
    for packing in (False, True):
        for size in (1, 3, 8):
            model = masked_model('modernbert')
            data = token_data_spec(loader(rank_batch), packing=packing)
            label = f'masked microbatch {size}{packed_label(packing)}'
            yield label, measure(model, batch, data, size)


def measure_plain_loop(rows: Sequence[Any]) -> dict[str, float]:
    """Only DistributedDataParallel and the functional form, without a Trainer."""
    model = text_model()
    expected, _ = reference_gradients(model, collate(rows))
    parallel: Any = torch.nn.parallel.DistributedDataParallel(model)
    microbatches = []
    for row in share_of(rows):
        has_labels = (row['labels'] != -100).any()
        if has_labels:  # the model's mean over no labels is NaN
            microbatches.append(collate([row]))

    weights = step_loss_weights(microbatches)
    for index, (microbatch, weight) in enumerate(zip(microbatches, weights, strict=True)):
        is_last = index == len(microbatches) - 1
        parallel.require_backward_grad_sync = is_last
        loss = parallel(**microbatch).loss
        (loss * weight).backward()

    gradient_error = relative_error(composer_gradients(model), expected)
    return {'error': gradient_error, 'loss_error': 0.0}


def with_weights(rows: Sequence[Any], num_zero_rows: int = 0) -> list[dict[str, Any]]:
    """Returns rows with random weights. The first ``num_zero_rows`` rows have only weights of 0."""
    weighted_rows = []
    for index, row in enumerate(rows):
        weights = column(row, seed=index)
        if index < num_zero_rows:
            weights = torch.zeros_like(weights)
        weighted_rows.append({**row, 'loss_weights': weights})
    return weighted_rows


def weight_results(name: str) -> Results:
    """Cuts rows with token weights in several ways. In one case all weights of the first rank are 0."""
    if name == 'text':
        rows = text_rows(SHAPE)
        model: Any = text_model()
        pad_token_id = 0
        order = 'mixed'
    else:
        case = FAMILIES[name]()
        rows = case.rows
        model = case.model
        pad_token_id = case.pad_token_id
        order = 'text_rank'
    layout = BatchLayout.for_model(model)

    weighted_rows = with_weights(in_order(rows, order))
    batch, rank_batch = batches_of(layout, weighted_rows, order, pad_token_id=pad_token_id)
    for cut in WEIGHTED_CUTS:
        data = token_data_spec(loader(rank_batch), packing=cut.packing)
        label = f'{name} {cut.weights} microbatch {cut.size}{packed_label(cut.packing)}'
        yield label, measure(model, batch, data, cut.size, weights=cut.weights)

    num_rows_of_first_rank, *_ = SHARES['mixed'][dist.get_world_size()]
    weighted_rows = with_weights(rows, num_zero_rows=num_rows_of_first_rank)
    batch, rank_batch = batches_of(layout, weighted_rows, pad_token_id=pad_token_id)
    data = token_data_spec(loader(rank_batch))
    yield f'{name} rank without weight', measure(model, batch, data, weights='column')

    if name == 'text':
        yield 'router of a mixture of experts', measure_weighted_router(rows)


def measure_weighted_router(rows: Sequence[Any]) -> dict[str, float]:
    """The router's loss of each microbatch weighs the same, whatever its tokens weigh."""
    model = subject_with_router('mixtral', 0.1)
    microbatches = Microbatches()
    rank_batch = collate(share_of(rows))
    recorder = fit(model, rank_batch, token_weights='sqrt', microbatch_size=1, callbacks=[microbatches])

    microbatches_of_ranks = dist.all_gather_object(microbatches.inputs)
    batch = collate(rows)
    expected, token_loss, router_loss = expected_step(model, batch, microbatches_of_ranks, 'sqrt')
    expected_losses = {'loss/train/tokens': token_loss, 'loss/train/router': router_loss}
    return errors_of(recorder, expected, expected_losses)


def fsdp_results(name: str) -> Results:
    """Some microbatches, or all of a rank, have no images."""
    case = FAMILIES[name]()
    layout = BatchLayout.for_model(case.config)
    for cut in FSDP_CUTS:
        rows = in_order(case.rows, cut.order)
        batch, rank_batch = batches_of(layout, rows, cut.order, pad_token_id=case.pad_token_id)
        data = token_data_spec(loader(rank_batch), layout=layout)
        label = f'fsdp {name} {cut.order} microbatch {cut.size} {cut.weights}'
        yield label, measure(case.model, batch, data, cut.size, weights=cut.weights, fsdp=True)

    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    model = with_unsharded_root(case.model)
    data = token_data_spec(loader(batch))
    yield f'refused unsharded root of {name}', refusal(model, data, **FSDP)

    # The same parameters, frozen in the first step.
    model = with_unsharded_root(case.model)
    for parameter_name, parameter in model.named_parameters():
        is_in_layer = 'layers.' in parameter_name
        parameter.requires_grad_(is_in_layer)
    unfreeze = On(Event.BATCH_END, lambda state: state.model.requires_grad_(True))
    data = token_data_spec(loader(batch, batch))
    message = refusal(model, data, callbacks=[unfreeze], max_duration='2ba', **FSDP)
    assert len(unfreeze.values) == 1
    yield f'refused unfrozen root of {name}', message


def with_unsharded_root(model: Any) -> Any:
    """Leaves the root out of FSDP, so that its own parameters are never reduced over the ranks."""
    wrapped = sharded(model)
    wrapped.model._fsdp_wrap = False
    return wrapped


def evaluated_results() -> Results:
    """A second fit after an evaluation, in which FSDP2 has left the weights of the root gathered.

    Blocks are sharded separately. Without them all weights are in the root.
    """
    rows = text_rows(SHAPE)
    model = text_model()
    rank_batch = collate(share_of(rows))
    expected, _ = reference_gradients(model, collate(rows))
    evaluator = Evaluator(label='eval', dataloader=loader(rank_batch), device_eval_microbatch_size=len(rows))
    for has_blocks in (False, True):
        trained_model = sharded(model)
        if not has_blocks:
            trained_model.model.fsdp_wrap_fn = lambda module: False
        recorder = fit(trained_model, rank_batch, **FSDP)
        recorder.trainer.eval(evaluator)
        recorder.trainer.fit(duration='1ba')
        yield f'fsdp after an evaluation, blocks={has_blocks}', errors_of(recorder, expected, {})

    unequal_counts = token_data_spec(loader(rank_batch), equal_counts=False)
    yield 'refused unequal counts', refusal(sharded(model), unequal_counts, **FSDP)


class TwoTerms(HuggingFaceModel):
    """A model whose loss has two multiples of the mean over tokens, three times the mean together."""

    def loss(self, outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
        labels = batch['labels']
        num_tokens = (labels[:, 1:] != -100).sum().clamp(min=1)
        total = next_token_loss(outputs.logits, labels, reduction='sum')
        mean = total / num_tokens
        return {'once': mean, 'twice': 2 * mean}


class TermOfRows(HuggingFaceModel):
    """A model whose loss has a mean over samples, made of the logits. Rows without labels add 0 to it."""

    def loss(self, outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
        has_labels = (batch['labels'] != -100).any(dim=1)
        first_logits = outputs['logits'][:, 0]
        squares = first_logits.square().mean(dim=1) * has_labels
        return {'lm': outputs['loss'], 'rows': squares.mean()}


def with_sharded_layers(model_class: type[HuggingFaceModel], model: Any) -> Any:
    """Returns a copy of the model, wrapped in this class, in which FSDP shards each layer separately."""
    wrapped: Any = model_class(copy.deepcopy(model), shift_labels=True, use_logits=True)
    wrapped.model.fsdp_wrap_fn = lambda module: type(module).__name__.endswith('DecoderLayer')
    return wrapped


def measure_repeated_sample() -> dict[str, float]:
    """The last row of rank 1 is a repeated sample. An extra backward for it would run FSDP's hooks on one rank."""
    rows = text_rows(SHAPE)
    model = text_model()
    batch_without_repeated = collate(rows[:5])
    outputs = model(**batch_without_repeated)
    losses = TermOfRows.loss(None, outputs, batch_without_repeated)  # pyright: ignore[reportArgumentType]
    total = losses['lm'] + losses['rows']
    expected = gradients_of(model, total)

    is_last_repeated = dist.get_global_rank() == 1
    counts = [RowCounts(), RowCounts(), RowCounts(samples=not is_last_repeated)]
    rank_batch = collate(rank_share(rows, (3, 3)))
    rank_batch = attach_row_counts(rank_batch, counts)
    trained_model = with_sharded_layers(TermOfRows, model)
    units = {'lm': 'tokens', 'rows': 'samples'}
    recorder = fit(trained_model, loader(rank_batch), microbatch_size=3, loss_units=units, **FSDP)
    return errors_of(recorder, expected, {TOTAL: total.item()})


def measure_two_terms() -> dict[str, float]:
    """An extra backward to the logits would run FSDP's hooks, and only where there are tokens."""
    batch = collate(text_rows(SHAPE))
    batch['loss_weights'] = column(batch)
    model = text_model()
    gradients_of_mean, weighted_mean, _ = weighted_reference(model, batch, 'column')
    expected = {name: 3 * gradient for name, gradient in gradients_of_mean.items()}
    expected_losses = {'loss/train/once': weighted_mean, 'loss/train/twice': 2 * weighted_mean}

    start = 4 * dist.get_global_rank()
    rank_batch = {key: value[start : start + 4] for key, value in batch.items()}
    trained_model = with_sharded_layers(TwoTerms, model)
    units = {'once': 'tokens', 'twice': 'tokens'}
    options = {'token_weights': 'column', 'loss_units': units, **FSDP}
    recorder = fit(trained_model, rank_batch, microbatch_size=1, **options)
    return errors_of(recorder, expected, expected_losses)


def term_results() -> Results:
    yield 'fsdp, two weighted terms', measure_two_terms()
    yield 'fsdp, a repeated sample on one rank', measure_repeated_sample()


def router_results() -> Results:
    """Cases of ``router_balance='step'`` on two ranks. The second has one text row, so it makes fewer microbatches."""
    rows = text_rows(SHAPE)
    batch = collate(rows)
    rank_batch = collate(rank_share(rows, (5, 1)))
    for fsdp in (False, True):
        for cut in ROUTER_CUTS:
            data = token_data_spec(loader(rank_batch), packing=cut.packing)
            label = f'router, fsdp={fsdp} microbatch {cut.size}{packed_label(cut.packing)}'
            yield label, measure(mixture_of_experts(), batch, data, cut.size, fsdp=fsdp, router_balance='step')

    model = mixture_with_vision()
    layout = BatchLayout.for_model(model)
    batch = Maker('qwen3_vl_moe', model).batch('image')
    rows_of_rank = rows_with_images_on_first_rank(layout, batch)
    rank_batch = layout.select(batch, rows_of_rank)
    for fsdp, packing in ((False, False), (False, True), (True, False)):
        data = token_data_spec(loader(rank_batch), packing=packing)
        label = f'router and images, fsdp={fsdp}{packed_label(packing)}'
        yield label, measure(model, batch, data, 1, fsdp=fsdp, router_balance='step')


def mixture_with_vision() -> Any:
    config = tiny_config('qwen3_vl_moe')
    config.text_config.output_router_logits = True
    config.text_config.router_aux_loss_coef = COEFFICIENT
    config.vision_config.deepstack_visual_indexes = [0]
    return tiny_model(config, transformers.Qwen3VLMoeForConditionalGeneration).train()


def rows_with_images_on_first_rank(layout: BatchLayout, batch: Any) -> list[int]:
    """Returns the rows of this rank: those with images on the first of two ranks, the others on the second."""
    is_first = dist.get_global_rank() == 0
    rows_of_rank = []
    for row, num_images in enumerate(layout.media_per_row(batch)):
        has_images = num_images > 0
        if has_images == is_first:
            rows_of_rank.append(row)
    return rows_of_rank


def results_of(group: str) -> Results:
    kind, _, name = group.rpartition(' ')
    if kind == 'weights':
        return weight_results(name)
    if kind == 'fsdp':
        return fsdp_results(name)
    if name == 'text':
        return text_results()
    if name == 'router':
        return router_results()
    if name == 'masked':
        return masked_results()
    if name == 'evaluated':
        return evaluated_results()
    if name == 'terms':
        return term_results()
    return family_results(name)


def main(*groups: str) -> dict[str, Any]:
    results = {}
    for group in groups:
        results.update(results_of(group))
    return results
