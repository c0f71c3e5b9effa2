# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a fit leaves behind: in the model, in the algorithm and in the split of its loader."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import yaml
from composer.core import Event
from transformers.modeling_outputs import CausalLMOutput

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc.algorithm import token_accumulation
from tests.support.text import next_token_loss, one_layer_model, ragged_batch
from tests.support.training import (
    TOLERANCE,
    GradientRecorder,
    On,
    fit,
    hugging_face,
    loader,
    num_hooks,
    reference_gradients,
    relative_error,
)

SPARSE = [(40, 3), (30, 2), (20, 5)]
"""Length and number of labels of each row. Few positions have a label, so logits are computed only there."""


def test_fit_after_an_interrupted_one():
    """The first fit ends after the next forward was told to compute logits only at labels."""
    model = hugging_face(one_layer_model())
    batch = ragged_batch(SPARSE)
    expected, _ = reference_gradients(model.model, batch)
    is_interrupted = iter([True, False])

    def interrupt(state):
        if next(is_interrupted):
            raise KeyboardInterrupt

    recorder = GradientRecorder()
    callbacks = [On(Event.BEFORE_FORWARD, interrupt)]
    with pytest.raises(KeyboardInterrupt):
        fit(model, batch, callbacks=callbacks, microbatch_size=len(SPARSE), recorder=recorder)

    recorder.trainer.fit(duration='1ba')

    assert relative_error(recorder.gradients, expected) < TOLERANCE
    assert num_hooks(model) == 0


class WithoutOneToken(torch.nn.Module):
    """A model whose loss leaves out the labels of one token. It is wrong only in rows with this token."""

    def __init__(self, token):
        super().__init__()
        self.model = one_layer_model()
        self.config = self.model.config
        self.token = token

    def forward(self, input_ids, attention_mask, labels, use_cache=False):
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        targets = labels.masked_fill(labels == self.token, -100)
        loss = next_token_loss(outputs.logits, targets)
        return CausalLMOutput(loss=loss, logits=outputs.logits)


def test_every_fit_measures_every_label_once():
    """The first fit has seen the token as a label, but with another model."""
    token = 5
    batch = ragged_batch([(10, 6)] * 12)
    labels = batch['labels']
    labels[labels == token] = token + 1
    one_row = 9
    labels[one_row, -2] = token
    algorithm = TokenAccumulation()
    exact_model = WithoutOneToken(token=-1)  # no label is -1
    fit(exact_model, batch, algorithms=[algorithm], microbatch_size=1)

    wrong_model = WithoutOneToken(token)
    with pytest.raises(RuntimeError, match=f'the label {token} '):
        fit(wrong_model, batch, algorithms=[algorithm], microbatch_size=1)


@pytest.mark.parametrize(('spins', 'places_in_second_fit'), [(True, [1, 2, 0]), (False, [0, 1, 2])])
def test_place_of_batches_in_loader(spins, places_in_second_fit, monkeypatch):
    """The last batch of an epoch may have a repeated sample. A second fit goes on in the epoch, or begins it again."""
    places = []

    def note_place(dataloader, batch_index, num_rows):
        places.append(batch_index)
        return 0

    monkeypatch.setattr(token_accumulation, 'num_repeated', note_place)
    batch = ragged_batch()
    data = token_data_spec(loader(batch, batch, batch))

    recorder = fit(one_layer_model(), data, spin_dataloaders=spins, max_duration='1ba')
    assert places == [0]

    recorder.trainer.fit(duration='3ba')
    assert places == [0, *places_in_second_fit]


def copy_by_pickle(algorithm):
    return pickle.loads(pickle.dumps(algorithm))


@pytest.mark.parametrize('copied', [copy.copy, copy.deepcopy, copy_by_pickle])
def test_copy_after_a_fit(copied):
    batch = ragged_batch(SPARSE)
    expected, _ = reference_gradients(one_layer_model(), batch)
    algorithm = TokenAccumulation(loss_tokens='causal')
    fit(one_layer_model(), batch, algorithms=[algorithm])

    copy_of_algorithm = copied(algorithm)
    assert repr(copy_of_algorithm) == repr(algorithm)
    assert copy_of_algorithm.rule is None

    recorder = fit(one_layer_model(), batch, algorithms=[copy_of_algorithm])
    assert relative_error(recorder.gradients, expected) < TOLERANCE
    assert copy_of_algorithm.rule == 'causal'
    # Checkpoints hold only plain values.
    state = copy_of_algorithm.state_dict()
    assert yaml.safe_load(yaml.safe_dump(state)) == state


def test_packing_spec_without_algorithm():
    """The first run has shown that its model tells packed documents apart. This does not hold after its end."""
    data = token_data_spec(loader(ragged_batch()), packing=True)
    fit(one_layer_model(), data)
    with pytest.raises(RuntimeError, match='needs TokenAccumulation'):
        fit(one_layer_model(), data, algorithms=[])
