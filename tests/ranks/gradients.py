# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: each rank trains on its share of one global batch.

Arguments: groups of cases (``text``, ``weights llava``, ``fsdp llava``, ``router``, ...). Returns for each case the
relative errors of gradient and losses. If a case must be refused, its label begins with ``refused``, and its result is
the message.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
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
    On,
    composer_gradients,
    fit,
    gradients_of,
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
# The rows of a family have 0, 1, 1, 2, 0 and 3 images. With 'text_rank' the first rank of two gets both rows without
# images, and of four ranks two get only such a row.
ORDERS = {'mixed': (0, 1, 2, 3, 4, 5), 'text_rank': (0, 4, 1, 2, 3, 5)}
# Rows of each rank, by the number of ranks. They are uneven, so that ranks make different numbers of microbatches.
SHARES = {'mixed': {2: (4, 2), 4: (2, 2, 1, 1)}, 'text_rank': {2: (2, 4), 4: (1, 1, 2, 2)}}
MEAN_LOSS = 'token_accumulation/token_mean_loss'
# Two families that are also packed. The second has multimodal rotary positions.
PACKED_FAMILIES = ('llava', 'qwen2_5_vl')
CUTS_OF_FAMILIES = (('mixed', 'right', 1), ('mixed', 'left', 3), ('text_rank', 'right', 3), ('text_rank', 'left', 1))
"""Order, side of the padding and microbatch size. Any value of one occurs once with any value of another."""
FSDP_CUTS = (('mixed', 3, 'token'), ('text_rank', 1, 'token'), ('text_rank', 3, 'sqrt'))
"""Order, microbatch size and token weights."""
MICROBATCH_SIZES = {2: (1, 2, 6), 4: (1, 2)}
"""Sizes for text by the number of ranks. Four ranks have at most two rows each."""
WEIGHTED_CUTS = ((1, 'sqrt'), (3, 'sample'), (1, 'column'))
"""Microbatch size and token weights."""
PACKED_WEIGHTED_CUTS = ((3, 'sqrt'), (1, 'sample'), (3, 'column'))


def share_of(rows: Sequence[Any], order: str = 'mixed') -> list[Any]:
    """Returns the rows of this rank."""
    sizes = SHARES[order][dist.get_world_size()]
    return rank_share(rows, sizes)


def batches_of(
    layout: BatchLayout, rows: Sequence[Any], order: str = 'mixed', **options: Any
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
    losses: Sequence[float] = ()
    if is_first:
        if weights == 'token':
            expected, *losses = reference_gradients(model, batch)
        else:
            expected, *losses = weighted_reference(model, batch, weights)

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
    loss_errors = []
    # The mean loss is only known, and only logged, if tokens have weights.
    for name, loss in zip((TOTAL, MEAN_LOSS), losses, strict=False):
        last_logged = recorder.logged(name)[-1]
        loss_errors.append(abs(last_logged / loss - 1))
    gradient_error = relative_error(recorder.gradients, expected)
    return {'error': gradient_error, 'loss_error': max(loss_errors)}


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
    rows = case.rows
    layout = BatchLayout.for_model(case.config)
    no_labels = torch.full_like(rows[2]['labels'], -100)
    rows[2] = {**rows[2], 'labels': no_labels}
    packings = (False, True) if name in PACKED_FAMILIES else (False,)
    for packing in packings:
        for order, side, size in CUTS_OF_FAMILIES:
            ordered_rows = [rows[index] for index in ORDERS[order]]
            options = {'padding_side': side, 'pad_token_id': case.pad_token_id}
            batch, rank_batch = batches_of(layout, ordered_rows, order, **options)
            data = token_data_spec(loader(rank_batch), layout=layout, packing=packing)
            label = f'{name} {side} {order} microbatch {size}{packed_label(packing)}'
            yield label, measure(case.model, batch, data, size)
    if name == 'llava':
        yield 'llava with an unknown type', measure_unknown_type(case)


def measure_unknown_type(case: Any) -> dict[str, float]:
    """Measures a model type that the package does not know, so that it infers the layout from the batch.

    The first rank sees only text, and must still agree with the other ranks.
    """
    model = copy.deepcopy(case.model)
    model.config.model_type = 'known_to_nobody'
    layout = BatchLayout.for_model(case.config)
    rows = [case.rows[index] for index in ORDERS['text_rank']]
    batch, rank_batch = batches_of(layout, rows, 'text_rank', pad_token_id=case.pad_token_id)
    return measure(model, batch, token_data_spec(loader(rank_batch)))


def text_results() -> Results:
    """Cuts ragged rows of text in five ways, also packed."""
    rows = text_rows(SHAPE)
    model = text_model()
    batch = collate(rows)
    rank_batch = collate(share_of(rows))
    data_of_splits = {
        'stock': loader(rank_batch),
        'ordered': token_data_spec(loader(rank_batch), regroup=False),
        'regrouped': token_data_spec(loader(rank_batch)),
        'unequal counts': token_data_spec(loader(rank_batch), equal_counts=False),
        'packed': token_data_spec(loader(rank_batch), packing=True),
    }
    for split, data in data_of_splits.items():
        for size in MICROBATCH_SIZES[dist.get_world_size()]:
            yield f'text {split} microbatch {size}', measure(model, batch, data, size)

    yield 'text rank without labels', measure_text(model, FIRST_RANK_HAS_NO_LABELS)
    yield 'text rank with rows of one token', measure_text(model, FIRST_RANK_HAS_NO_LOSS)
    yield 'text rank with rows of one token in fixed width', measure_text(model, FIRST_RANK_HAS_NO_LOSS, width=16)
    yield 'text plain loop', measure_plain_loop(rows)

    exact_counter = token_data_spec(loader(rank_batch), model=model)
    errors = measure(model, batch, exact_counter, algorithms=[], callbacks=[], **COMPOSERS_FLAG)
    # Composer logs another mean, which is NaN if a row has no labels.
    yield 'text flag without algorithm', {**errors, 'loss_error': 0.0}

    yield 'refused default counter', refusal(text_model(), loader(rank_batch), **COMPOSERS_FLAG)
    yield 'refused exact counter', refusal(text_model(), token_data_spec(loader(rank_batch)), **COMPOSERS_FLAG)


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
            data = token_data_spec(loader(rank_batch), packing=packing)
            label = f'masked microbatch {size}{packed_label(packing)}'
            yield label, measure(masked_model('modernbert'), batch, data, size)


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

    ordered_rows = [rows[index] for index in ORDERS[order]]
    weighted_rows = with_weights(ordered_rows)
    batch, rank_batch = batches_of(layout, weighted_rows, order, pad_token_id=pad_token_id)
    cuts = [(False, *cut) for cut in WEIGHTED_CUTS]
    cuts += [(True, *cut) for cut in PACKED_WEIGHTED_CUTS]
    for packing, size, weights in cuts:
        data = token_data_spec(loader(rank_batch), packing=packing)
        label = f'{name} {weights} microbatch {size}{packed_label(packing)}'
        yield label, measure(model, batch, data, size, weights=weights)

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
    expected, *losses = expected_step(model, collate(rows), microbatches_of_ranks, 'sqrt')
    loss_errors = []
    for term, loss in zip(('tokens', 'router'), losses, strict=True):
        last_logged = recorder.logged(f'loss/train/{term}')[-1]
        loss_errors.append(abs(last_logged / loss - 1))
    gradient_error = relative_error(recorder.gradients, expected)
    return {'error': gradient_error, 'loss_error': max(loss_errors)}


def fsdp_results(name: str) -> Results:
    """Some microbatches, or all of a rank, have no images."""
    case = FAMILIES[name]()
    layout = BatchLayout.for_model(case.config)
    for order, size, weights in FSDP_CUTS:
        rows = [case.rows[index] for index in ORDERS[order]]
        batch, rank_batch = batches_of(layout, rows, order, pad_token_id=case.pad_token_id)
        data = token_data_spec(loader(rank_batch), layout=layout)
        label = f'fsdp {name} {order} microbatch {size} {weights}'
        yield label, measure(case.model, batch, data, size, weights=weights, fsdp=True)

    # If the root is left out of FSDP, its own parameters are never reduced over the ranks.
    model = sharded(case.model)
    model.model._fsdp_wrap = False
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    data = token_data_spec(loader(batch))
    yield f'refused unsharded root of {name}', refusal(model, data, **FSDP)

    # The same parameters, frozen in the first step.
    model = sharded(case.model)
    model.model._fsdp_wrap = False
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_('layers.' in parameter_name)
    unfreeze = On(Event.BATCH_END, lambda state: state.model.requires_grad_(True))
    data = token_data_spec(loader(batch, batch))
    message = refusal(model, data, callbacks=[unfreeze], max_duration='2ba', **FSDP)
    assert len(unfreeze.values) == 1
    yield f'refused unfrozen root of {name}', message


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
        error = relative_error(recorder.gradients, expected)
        yield f'fsdp after an evaluation, blocks={has_blocks}', {'error': error, 'loss_error': 0.0}

    unequal_counts = token_data_spec(loader(rank_batch), equal_counts=False)
    yield 'refused unequal counts', refusal(sharded(model), unequal_counts, **FSDP)


class TwoTerms(HuggingFaceModel):
    """A model whose loss has two multiples of the mean over tokens, three times the mean together."""

    def loss(self, outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
        labels = batch['labels']
        num_tokens = (labels[:, 1:] != -100).sum().clamp(min=1)
        mean = next_token_loss(outputs.logits, labels, reduction='sum') / num_tokens
        return {'once': mean, 'twice': 2 * mean}


class TermOfRows(HuggingFaceModel):
    """A model whose loss has a mean over samples, made of the logits. Rows without labels add 0 to it."""

    def loss(self, outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
        has_labels = (batch['labels'] != -100).any(dim=1)
        squares = outputs['logits'][:, 0].square().mean(dim=1) * has_labels
        return {'lm': outputs['loss'], 'rows': squares.sum() / len(squares)}


def measure_repeated_sample() -> dict[str, float]:
    """The last row of rank 1 is a repeated sample. An extra backward for it would run FSDP's hooks on one rank."""
    rows = text_rows(SHAPE)
    model = text_model()
    batch = collate(rows[:5])
    losses = TermOfRows.loss(None, model(**batch), batch)  # pyright: ignore[reportArgumentType]
    expected = gradients_of(model, losses['lm'] + losses['rows'])

    counts = [RowCounts(), RowCounts(), RowCounts(samples=dist.get_global_rank() == 0)]
    rank_batch = attach_row_counts(collate(rank_share(rows, (3, 3))), counts)
    trained_model = TermOfRows(model, shift_labels=True, use_logits=True)
    trained_model.model.fsdp_wrap_fn = lambda module: type(module).__name__.endswith('DecoderLayer')
    units = {'lm': 'tokens', 'rows': 'samples'}
    recorder = fit(trained_model, loader(rank_batch), microbatch_size=3, loss_units=units, **FSDP)
    logged = recorder.logged(TOTAL)[-1]
    loss_error = abs(logged / float(sum(losses.values())) - 1)
    return {'error': relative_error(recorder.gradients, expected), 'loss_error': loss_error}


def term_results() -> Results:
    """Two weighted terms. An extra backward to the logits would run FSDP's hooks, and only where there are tokens."""
    batch = collate(text_rows(SHAPE))
    batch['loss_weights'] = column(batch)
    start = 4 * dist.get_global_rank()
    rank_batch = {key: value[start : start + 4] for key, value in batch.items()}
    model = text_model()
    expected, weighted_mean, _ = weighted_reference(model, batch, 'column')
    trained_model = TwoTerms(copy.deepcopy(model), shift_labels=True, use_logits=True)
    trained_model.model.fsdp_wrap_fn = lambda module: type(module).__name__.endswith('DecoderLayer')
    recorder = fit(
        trained_model,
        rank_batch,
        microbatch_size=1,
        token_weights='column',
        loss_units={'once': 'tokens', 'twice': 'tokens'},
        **FSDP,
    )
    gradients = {name: gradient / 3 for name, gradient in recorder.gradients.items()}
    loss_errors = []
    for name, factor in (('once', 1), ('twice', 2)):
        logged = recorder.logged(f'loss/train/{name}')[-1]
        loss_errors.append(abs(logged / (factor * weighted_mean) - 1))
    yield 'fsdp, two weighted terms', {'error': relative_error(gradients, expected), 'loss_error': max(loss_errors)}
    yield 'fsdp, a repeated sample on one rank', measure_repeated_sample()


def router_results() -> Results:
    """Cases of ``router_balance='step'`` on two ranks. The second has one text row, so it makes fewer microbatches."""
    rows = text_rows(SHAPE)
    batch = collate(rows)
    rank_batch = collate(rank_share(rows, (5, 1)))
    for fsdp in (False, True):
        for size, packing in ((1, False), (3, False), (2, True)):
            data = token_data_spec(loader(rank_batch), packing=packing)
            label = f'router, fsdp={fsdp} microbatch {size}{packed_label(packing)}'
            yield label, measure(mixture_of_experts(), batch, data, size, fsdp=fsdp, router_balance='step')

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
    rows = []
    for row, num_images in enumerate(layout.media_per_row(batch)):
        has_images = num_images > 0
        if has_images == is_first:
            rows.append(row)
    return rows


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
