# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Answers at evaluation: what plain generation says, with the images that the model saw."""

from __future__ import annotations

import base64
import json
import re
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from composer.core import Timestamp
from PIL import Image
from transformers import LlavaForConditionalGeneration

from composer_tokacc.data import LlavaDataset
from composer_tokacc.programs.answers import Answers
from composer_tokacc.programs.report_page import write_page
from examples.digits import DigitsDataset, digits_model_config
from tests.data.chat_processors import PROCESSORS
from tests.support.llava_folder import write_llava_folder
from tests.support.training import hugging_face


@pytest.fixture(scope='module')
def model(processor):
    torch.manual_seed(0)
    sizes = {'hidden_size': 32, 'num_layers': 1, 'vision_hidden_size': 16, 'num_vision_layers': 1}
    return hugging_face(LlavaForConditionalGeneration(digits_model_config(processor, **sizes))).train()


def answered(model, dataset, processor, folder, *, steps=(3,), **options):
    options = {'num_samples': 2, 'max_new_tokens': 3, **options}
    answers = Answers(dataset, processor, folder=str(folder / '{run_name}'), **options)
    for step in steps:
        state = SimpleNamespace(model=model, run_name='run', timestamp=Timestamp(batch=step))
        answers.eval_end(state, None)
    return answers.last


def test_answer_is_that_of_plain_generation(model, processor, tmp_path):
    dataset = DigitsDataset(processor, split='eval', num_samples=8, max_images=3)
    last = answered(model, dataset, processor, tmp_path, steps=(3, 6))
    assert model.training
    lines = [json.loads(line) for line in (tmp_path / 'run' / 'answers.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines] == [3, 3, 6, 6]
    assert [line['sample_id'] for line in lines] == ['digits-eval-0', 'digits-eval-4'] * 2
    for index, answer, line in zip((0, 4), last, lines[2:], strict=True):
        messages, images, _ = dataset.conversation(index)
        assert answer.expected == line['expected'] == messages[1]['content'][0]['text']
        assert messages[0]['content'][-1]['text'] in answer.question
        assert len(answer.images) == len(images)
        for seen, shown in zip(answer.images, images, strict=True):
            assert np.abs(seen * 255 - np.asarray(shown)).max() < 1
        text = processor.apply_chat_template(messages[:1], add_generation_prompt=True)
        given = processor(text=[text], images=images or None, return_tensors='pt')
        generated = model.eval().model.generate(
            **given, max_new_tokens=3, do_sample=False, suppress_tokens=[processor.image_token_id]
        )
        model.train()
        told = processor.tokenizer.decode(generated[0, given['input_ids'].shape[1] :], skip_special_tokens=True)
        assert answer.generated == line['generated'] == told.strip()


def test_page_has_answers_and_images(model, processor, tmp_path):
    dataset = DigitsDataset(processor, split='eval', num_samples=8, max_images=3)
    last = answered(model, dataset, processor, tmp_path)
    write_page(tmp_path / 'report.html', 'run', [], {}, last)
    text = (tmp_path / 'report.html').read_text()
    pictures = [Image.open(BytesIO(base64.b64decode(one))) for one in re.findall(r'base64,([^"]+)"', text)]
    assert len(pictures) == sum(len(answer.images) for answer in last) > 0
    assert {picture.size for picture in pictures} == {(48, 48)}, 'scans of 8 pixels can be seen'
    assert all(answer.expected in text and answer.sample_id in text for answer in last)


def test_images_in_patches_are_shown_whole(tmp_path):
    processor = PROCESSORS['qwen2_vl'][0]()
    dataset = LlavaDataset(write_llava_folder(tmp_path, 8), processor, image_dir=tmp_path / 'images')
    index = next(index for index, record in enumerate(dataset.records) if record.count('image'))
    images = dataset.decoded(index)['image']
    assert 'pixel_values' in dataset[index]
    from composer_tokacc.programs.answers import _images, _images_of_file

    assert _images(dataset[index], processor) == []
    (shown, *_) = _images_of_file(dataset, index)
    images[0].thumbnail((224, 224))
    assert np.allclose(shown * 255, np.asarray(images[0]))


def test_model_that_cannot_generate(processor, tmp_path, caplog):
    dataset = DigitsDataset(processor, split='eval', num_samples=8)
    broken = torch.nn.Module()
    broken.model, broken.model_forward_args = None, ()
    assert answered(broken, dataset, processor, tmp_path, steps=(3, 6)) == []
    assert caplog.text.count('Nothing is answered at evaluations') == 1
    assert not (tmp_path / 'run').exists()
