# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: every rank takes its share of one global batch; the relative errors.

Arguments: groups of cases (``text``, ``weights llava``, ``fsdp llava``, ``router``, ...). What must be
refused is written with its message.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from composer.callbacks import NaNMonitor
from composer.utils import dist

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.algorithm import step_loss_weights
from tests.algorithm.test_router_balance import COEFFICIENT, mixture
from tests.algorithm.test_router_loss import Microbatches, expected_gradients
from tests.algorithm.test_router_loss import mixture as weighted_mixture
from tests.model_types.rows import Maker
from tests.model_types.tiny import tiny_config, tiny_model
from tests.support.families import FAMILIES
from tests.support.fsdp import FSDP, repair_average, sharded
from tests.support.text import collate, text_model, text_rows
from tests.support.training import (
    TOTAL,
    fit,
    loader,
    rank_share,
    reference_gradients,
    relative_error,
)
from tests.support.weights import column, weighted_reference

SHAPE = [(4, 2), (14, 11), (9, 9), (3, 0), (6, 1), (7, 2)]  # 22 loss tokens against 3 on two ranks
# Rows of the families by number of images are 0, 1, 1, 2, 0, 3: 'text_rank' gives the first rank both text-only rows,
# or makes one of them a rank of its own.
ORDERS = {'mixed': (0, 1, 2, 3, 4, 5), 'text_rank': (0, 4, 1, 2, 3, 5)}
# How many of the six rows each rank takes: uneven, so that ranks make different numbers of microbatches.
SHARES = {'mixed': {2: (4, 2), 4: (2, 2, 1, 1)}, 'text_rank': {2: (2, 4), 4: (1, 1, 2, 2)}}
MEAN = 'token_accumulation/token_mean_loss'
LARGE = ('llava', 'qwen2_5_vl')
"""Two families that are packed as well, one with multimodal rotary positions."""

Case = tuple[str, Callable[[], Any]]


def share_of(rows: Any, order: str = 'mixed') -> list[Any]:
    return rank_share(rows, SHARES[order][dist.get_world_size()])


def measure(
    model: Any, batch: Any, data: Any, size: int = 2, *, weights: str = 'token', fsdp: bool = False, **options: Any
) -> dict[str, float]:
    """Errors of gradient and losses of a step on the data, against one forward over the whole batch, on rank 0."""
    expected, losses = {}, []
    if weights != 'token':
        options['token_weights'] = weights
    if not dist.get_global_rank():
        reference = (
            weighted_reference(model, batch, weights) if weights != 'token' else reference_gradients(model, batch)
        )
        expected, *losses = reference
    # Logits only at labels, or refused: nothing else shows that FSDP's hooks and ours go together.
    own = {**FSDP, 'logits': 'labels'} if fsdp else {}
    options = {'callbacks': [NaNMonitor()], **options, **own}
    recorder = fit(sharded(model) if fsdp else model, data, microbatch_size=size, **options)
    assert not fsdp or any(hasattr(one, 'full_tensor') for one in recorder.trainer.state.model.parameters())
    if not expected:
        return {}
    errors = [abs(recorder.logged(name)[-1] / loss - 1) for name, loss in zip((TOTAL, MEAN), losses, strict=False)]
    return {'error': relative_error(recorder.gradients, expected), 'loss_error': max(errors)}


def refusal(model: Any, data: Any, **options: Any) -> str:
    try:
        fit(model, data, microbatch_size=1, **options)  # so that every rank's own weights are wrong
    except RuntimeError as error:
        return str(error)
    return ''


def of_family(name: str) -> Iterator[Case]:
    case = FAMILIES[name]()
    rows, layout = case.rows, BatchLayout.for_model(case.config)
    # A row without loss tokens, in every family.
    rows[2] = {**rows[2], 'labels': torch.full_like(rows[2]['labels'], -100)}

    def of(order: str, side: str, size: int, packing: bool) -> dict[str, Any]:
        ordered = [rows[index] for index in ORDERS[order]]
        whole, own = (
            layout.concat(part, padding_side=side, pad_token_id=case.pad_token_id)
            for part in (ordered, share_of(ordered, order))
        )
        return measure(case.model, whole, token_data_spec(loader(own), layout=layout, packing=packing), size)

    packings = (False, True) if name in LARGE else (False,)
    for packing, side, order, size in itertools.product(packings, ('right', 'left'), ORDERS, (1, 3)):
        label = f'{name} {side} {order} microbatch {size}{" packed" * packing}'
        yield label, lambda given=(order, side, size, packing): of(*given)

    def unknown() -> dict[str, Any]:
        """The layout is inferred from the batch, of which the first rank sees only text."""
        model, ordered = copy.deepcopy(case.model), [rows[index] for index in ORDERS['text_rank']]
        model.config.model_type = 'known_to_nobody'
        own = layout.concat(share_of(ordered, 'text_rank'), pad_token_id=case.pad_token_id)
        whole = layout.concat(ordered, pad_token_id=case.pad_token_id)
        return measure(model, whole, token_data_spec(loader(own)))

    if name == 'llava':
        yield 'llava of a family that is not known', unknown


def of_text() -> Iterator[Case]:
    rows, model = text_rows(SHAPE), text_model()
    own, whole = loader(collate(share_of(rows))), collate(rows)

    def cut(split: str, size: int) -> dict[str, Any]:
        data: Any = own
        if split != 'stock':
            equal = False if split == 'free' else 'auto'
            data = token_data_spec(data, regroup=split != 'ordered', equal_counts=equal, packing=split == 'packed')
        return measure(model, whole, data, size)

    for split, size in itertools.product(('stock', 'ordered', 'regrouped', 'free', 'packed'), (1, 2, 6)):
        yield f'text {split} microbatch {size}', lambda given=(split, size): cut(*given)

    def empty_rank() -> dict[str, Any]:
        rows = text_rows([(4, 0), (14, 0), (9, 0), (3, 0), (6, 1), (7, 2)])
        return measure(model, collate(rows), token_data_spec(loader(collate(share_of(rows)))))

    yield 'text rank without loss tokens', empty_rank

    def plain_loop() -> dict[str, Any]:
        """Without a Trainer: DistributedDataParallel and the functional form alone."""
        expected, _ = reference_gradients(model, whole)
        parallel: Any = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        microbatches = [collate([row]) for row in share_of(rows) if bool((row['labels'] != -100).any())]
        for index, weight in enumerate(step_loss_weights(microbatches)):
            parallel.require_backward_grad_sync = index == len(microbatches) - 1
            (parallel(**microbatches[index]).loss * weight).backward()
        found = {name.removeprefix('module.'): p.grad for name, p in parallel.named_parameters() if p.grad is not None}
        return {'error': relative_error({f'model.{n}': g for n, g in found.items()}, expected), 'loss_error': 0.0}

    yield 'text plain loop', plain_loop

    flag: dict[str, Any] = {'accumulate_train_batch_on_tokens': True}

    def flag_alone() -> dict[str, Any]:
        """Composer then logs another mean, which a row without loss tokens makes no number."""
        data = token_data_spec(own, model=model)
        return {**measure(model, whole, data, algorithms=[], callbacks=[], **flag), 'loss_error': 0.0}

    yield 'text flag without algorithm', flag_alone
    yield 'refused default counter', lambda: refusal(text_model(), own, **flag)
    yield 'refused exact counter', lambda: refusal(text_model(), token_data_spec(own), **flag)


def with_column(rows: Any, zero: Any = ()) -> list[dict[str, Any]]:
    """Rows with random weights, those of some rows all zero."""
    return [{**row, 'loss_weights': column(row, seed=index) * (index not in zero)} for index, row in enumerate(rows)]


def of_weights(name: str) -> Iterator[Case]:
    if name == 'text':
        rows, model, pad, order = text_rows(SHAPE), text_model(), 0, 'mixed'
    else:
        case = FAMILIES[name]()
        rows, model, pad, order = case.rows, case.model, case.pad_token_id, 'text_rank'
    layout = BatchLayout.for_model(model)

    def weighted(rows: Any, order: str, weights: str, size: int, **options: Any) -> dict[str, Any]:
        whole, own = (layout.concat(part, pad_token_id=pad) for part in (rows, share_of(rows, order)))
        return measure(model, whole, token_data_spec(loader(own), **options), size, weights=weights)

    ordered, packings = with_column([rows[index] for index in ORDERS[order]]), (False, True)[: 1 + (name != LARGE[1])]
    for packing, size, weights in itertools.product(packings, (1, 3), ('sqrt', 'sample', 'column')):
        label = f'{name} {weights} microbatch {size}{" packed" * packing}'
        yield label, lambda given=(weights, size), packing=packing: weighted(ordered, order, *given, packing=packing)

    without = with_column(rows, zero=range(SHARES['mixed'][dist.get_world_size()][0]))
    yield f'{name} rank without weight', lambda: weighted(without, 'mixed', 'column', 2)

    def router() -> dict[str, Any]:
        mixtral, seen = weighted_mixture('mixtral', 0.1), Microbatches()
        recorder = fit(mixtral, collate(share_of(rows)), token_weights='sqrt', microbatch_size=1, callbacks=[seen])
        microbatches = dist.all_gather_object(seen.inputs)
        expected, *losses = expected_gradients(mixtral, collate(rows), microbatches, 'sqrt')
        found = [recorder.logged(f'loss/train/{name}')[-1] for name in ('tokens', 'router')]
        errors = [abs(one / loss.item() - 1) for one, loss in zip(found, losses, strict=True)]
        return {'error': relative_error(recorder.gradients, expected), 'loss_error': max(errors)}

    if name == 'text':
        yield 'router of a mixture of experts', router


def of_fsdp(name: str) -> Iterator[Case]:
    """Text-only microbatches and ranks."""
    repair_average()
    case = FAMILIES[name]()
    layout = BatchLayout.for_model(case.config)

    def of(order: str, size: int, weights: str) -> dict[str, Any]:
        rows = [case.rows[index] for index in ORDERS[order]]
        whole, own = (layout.concat(part, pad_token_id=case.pad_token_id) for part in (rows, share_of(rows, order)))
        data = token_data_spec(loader(own), layout=layout)
        return measure(case.model, whole, data, size, weights=weights, fsdp=True)

    for order, (size, weights) in itertools.product(ORDERS, ((1, 'token'), (3, 'token'), (1, 'sqrt'))):
        yield f'fsdp {name} {order} microbatch {size} {weights}', lambda given=(order, size, weights): of(*given)

    def unsharded_root() -> str:
        """A model whose root is left out of FSDP: its own parameters would never be reduced over ranks."""
        wrapped = sharded(case.model)
        wrapped.model._fsdp_wrap = False
        return refusal(
            wrapped, token_data_spec(loader(layout.concat(case.rows, pad_token_id=case.pad_token_id))), **FSDP
        )

    yield f'refused unsharded root of {name}', unsharded_root


def of_router() -> Iterator[Case]:
    """The loss of a router over the step."""
    repair_average()
    rows = text_rows(SHAPE)

    def of(given: Any, size: int, fsdp: bool, packing: bool) -> dict[str, Any]:
        model, whole, own = given
        data = token_data_spec(loader(own), packing=packing)
        return measure(model, whole, data, size, fsdp=fsdp, router_balance='step')

    for fsdp, (size, packing) in itertools.product((False, True), ((1, False), (3, False), (2, True))):
        given = mixture(), collate(rows), collate(rank_share(rows, (5, 1)))
        label = f'{"fsdp" if fsdp else "ddp"} microbatch {size}{" packed" * packing}'
        yield label, lambda given=given, cut=(size, fsdp, packing): of(given, *cut)

    # A mixture with a vision encoder, and rows of which the last rank's have no image.
    config = tiny_config('qwen3_vl_moe')
    config.text_config.output_router_logits, config.text_config.router_aux_loss_coef = True, COEFFICIENT
    config.vision_config.deepstack_visual_indexes = [0]
    model: Any = tiny_model(config, transformers.Qwen3VLMoeForConditionalGeneration).train()
    whole, layout = Maker('qwen3_vl_moe', model).batch('image'), BatchLayout.for_model(model)
    has_images = [count > 0 for count in layout.media_per_row(whole)]
    own = layout.select(whole, [row for row, has in enumerate(has_images) if has == (dist.get_global_rank() == 0)])
    for fsdp, packing in ((False, False), (False, True), (True, False)):
        label = f'images {"fsdp" if fsdp else "ddp"}{" packed" * packing}'
        yield label, lambda cut=(1, fsdp, packing): of((model, whole, own), *cut)


def cases(group: str) -> Iterator[Case]:
    kind, _, name = group.rpartition(' ')
    if kind:
        return {'weights': of_weights, 'fsdp': of_fsdp}[kind](name)
    return {'text': of_text, 'router': of_router}.get(group, lambda: of_family(group))()


def main(*groups: str) -> dict[str, Any]:
    results = {}
    for group in groups:
        for label, run in cases(group):
            results[label] = run()
    return results
