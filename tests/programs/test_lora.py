# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""LoRA: what is trained, its gradient, and checkpoints that hold no more than that."""

from __future__ import annotations

import pytest
import torch

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc.programs.models import build_model
from tests.programs.test_models import LLAVA
from tests.support.training import loader, reference_gradients, relative_error, train

pytest.importorskip('peft')


@pytest.fixture
def pretrained(processor, tmp_path):
    """A folder as the hub has it."""
    build_model(config=LLAVA, processor=processor).model.save_pretrained(tmp_path / 'base')
    return str(tmp_path / 'base')


def with_lora(processor, *, pretrained=None, **lora):
    source = {'config': LLAVA} if pretrained is None else {'pretrained': pretrained}
    return build_model(**source, processor=processor, lora={'r': 4, **lora})


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def stir(model):
    """Peft starts at B = 0, where A has no gradient at all."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if 'lora_B' in name:
            parameter.data.normal_(0, 0.2, generator=generator)


def test_the_language_models_adapters_alone_are_trained(processor):
    names = trained(with_lora(processor))
    assert len(names) == 2 * 7 * 2  # two layers of seven linear modules, A and B
    assert all('lora_' in name and 'language_model' in name for name in names)


def test_modules_to_save_are_trained_whole(processor):
    names = trained(with_lora(processor, modules_to_save=['multi_modal_projector']))
    assert sum('multi_modal_projector.modules_to_save' in name for name in names) == 4
    assert not any('vision_tower' in name for name in names)


@pytest.mark.parametrize('size', [1, 3, 12])
def test_the_adapters_gradient_is_that_of_the_whole_batch(processor, batch, size):
    model = with_lora(processor, modules_to_save=['multi_modal_projector'])
    stir(model)
    expected, _loss = reference_gradients(model.model, batch)
    recorder, _memory, _ = train(
        model, token_data_spec(loader(batch)), algorithms=[TokenAccumulation()], microbatch_size=size
    )
    assert recorder.gradients.keys() == trained(model)
    assert relative_error(recorder.gradients, expected) < 1e-6


def test_a_checkpoint_leaves_out_a_base_that_can_be_loaded_again(processor, pretrained):
    model = with_lora(processor, pretrained=pretrained, modules_to_save=['multi_modal_projector'])
    assert {name for name, _ in model.state_dict().items()} == trained(model)
    # Under DDP the state dict is asked of the module around it.
    around = torch.nn.ModuleDict({'module': model})
    assert {name.removeprefix('module.') for name in around.state_dict()} == trained(model)


def test_a_checkpoint_keeps_a_base_that_is_nowhere_else(processor):
    model = with_lora(processor)
    assert model.state_dict().keys() == {name for name, _ in model.named_parameters()}


def test_a_checkpoint_without_its_base_is_loaded_strictly(processor, pretrained):
    model = with_lora(processor, pretrained=pretrained)
    stir(model)
    other = with_lora(processor, pretrained=pretrained)
    other.load_state_dict(model.state_dict(), strict=True)
    for (name, found), expected in zip(other.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)
    lacking = dict(list(model.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match='Missing key'):
        other.load_state_dict(lacking, strict=True)


@pytest.mark.parametrize(
    ('lora', 'message'),
    [
        ({'rank': 4}, r"must have keys of .* got: \['rank'\]"),
        ({'modules_to_save': ['projektor']}, 'fits none'),
        ({'target_modules': ['q_projection']}, 'q_projection'),
    ],
)  # fmt: skip
def test_mistyped_settings_are_named(processor, lora, message):
    with pytest.raises(ValueError, match=message):
        with_lora(processor, **lora)
