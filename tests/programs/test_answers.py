# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Answers at evaluations equal plain generation. The page shows them with the images of the samples."""

from __future__ import annotations

import base64
import json
import re
from io import BytesIO
from types import SimpleNamespace

import pytest
import torch
from composer.core import Timestamp
from PIL import Image
from transformers import LlavaForConditionalGeneration

from composer_tokacc.data import LlavaDataset
from composer_tokacc.programs.answers import Answers, _inputs_before, _thumbnails
from composer_tokacc.programs.report_page import write_page
from examples.digits import DigitsDataset, build_digits_processor, digits_model_config
from tests.data.chat_processors import qwen2_vl
from tests.support.conversations import turns
from tests.support.training import hugging_face


@pytest.fixture(scope='module')
def model(processor):
    torch.manual_seed(0)
    config = digits_model_config(processor, hidden_size=32, num_layers=1, vision_hidden_size=16, num_vision_layers=1)
    return hugging_face(LlavaForConditionalGeneration(config)).train()


@pytest.fixture(scope='module')
def dataset(processor):
    return DigitsDataset(processor, split='eval', num_samples=8, max_images=3)


def answers_at_evaluations(model, dataset, processor, folder, *, steps):
    """Evaluates after the given steps. Returns the answers of the last evaluation."""
    answers = Answers(dataset, processor, folder=str(folder / '{run_name}'), num_samples=2, max_new_tokens=3)
    for step in steps:
        state = SimpleNamespace(model=model, run_name='run', timestamp=Timestamp(batch=step))
        answers.eval_end(state, None)
    return answers.last


def generate(model, processor, question, images):
    """Returns the reference: the answer of Transformers' own ``generate``."""
    text = processor.apply_chat_template([question], add_generation_prompt=True)
    inputs = processor(text=[text], images=images or None, return_tensors='pt')
    options = {'max_new_tokens': 3, 'do_sample': False, 'suppress_tokens': [processor.image_token_id]}
    model.eval()
    ids = model.model.generate(**inputs, **options)
    model.train()
    prompt_length = inputs['input_ids'].shape[1]
    answer_ids = ids[0, prompt_length:]
    return processor.tokenizer.decode(answer_ids, skip_special_tokens=True).strip()


def test_answer_is_that_of_plain_generation(model, dataset, processor, tmp_path):
    last = answers_at_evaluations(model, dataset, processor, tmp_path, steps=(3, 6))
    assert model.training
    written = (tmp_path / 'run' / 'answers.jsonl').read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    assert [line['step'] for line in lines] == [3, 3, 6, 6]
    assert [line['sample_id'] for line in lines] == ['digits-eval-0', 'digits-eval-4'] * 2
    for index, answer, line in zip((0, 4), last, lines[2:], strict=True):
        (question, expected), images, _ = dataset.conversation(index)
        assert question['content'][-1]['text'] in answer.question
        assert answer.expected == expected['content'][0]['text']
        assert answer.generated == generate(model, processor, question, images)
        assert line['expected'] == answer.expected
        assert line['generated'] == answer.generated
        for shown_image, image in zip(answer.images, images, strict=True):
            assert shown_image == image


def text_without_labels(sample):
    del sample['pixel_values']
    is_text = sample['input_ids'] != build_digits_processor().image_token_id
    ids = sample['input_ids'][is_text][None]
    sample.update(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.full_like(ids, -100))


def with_media_at_its_end(sample):
    """Adds the images once more after the answer, in a turn without loss."""
    is_image = sample['input_ids'] == build_digits_processor().image_token_id
    added_ids = sample['input_ids'][is_image][None]
    added = {
        'input_ids': added_ids,
        'attention_mask': torch.ones_like(added_ids),
        'labels': torch.full_like(added_ids, -100),
    }
    for key, value in added.items():
        sample[key] = torch.cat([sample[key], value], dim=1)
    sample['pixel_values'] = torch.cat([sample['pixel_values'], sample['pixel_values']])


@pytest.mark.parametrize('change', [text_without_labels, with_media_at_its_end])
def test_sample_that_cannot_be_answered(change, model, dataset, processor, tmp_path, caplog):
    """The other samples are answered. With media at its end, generation would get media without their placeholders."""
    samples = [dataset[index] for index in range(len(dataset))]
    change(samples[0])
    (answer,) = answers_at_evaluations(model, samples, processor, tmp_path, steps=(3,))
    assert answer.sample_id == 'digits-eval-4'
    assert 'does not answer sample digits-eval-0' in caplog.text


def test_page_has_answers_and_images(model, dataset, processor, tmp_path):
    last = answers_at_evaluations(model, dataset, processor, tmp_path, steps=(3,))
    path = tmp_path / 'report.html'
    write_page(path, 'run', [], {}, last)
    text = path.read_text()
    images = re.findall(r'base64,([^"]+)"', text)
    for image in images:
        content = base64.b64decode(image)
        assert Image.open(BytesIO(content)).size == (8, 8)
    num_images = 0
    for answer in last:
        assert answer.expected in text
        assert answer.sample_id in text
        num_images += len(answer.images)
    assert len(images) == num_images > 0


def test_images_of_files_are_shown_small(tmp_path):
    path = tmp_path / 'images'
    path.mkdir()
    Image.effect_noise((448, 112), 90).convert('RGB').save(path / 'a.png')
    record = {'image': 'a.png', 'conversations': turns('<image>Which?', 'Noise.')}
    (tmp_path / 'data.json').write_text(json.dumps([record]))
    dataset = LlavaDataset(tmp_path / 'data.json', qwen2_vl(), image_dir=path)
    (image,) = _thumbnails(dataset, 0)
    assert image.size == (224, 56)


def test_images_of_a_dataset_stay_as_they_are():
    dataset = SimpleNamespace(decoded=lambda index: {'image': [large]})
    for mode in ('RGB', 'CMYK'):
        large = Image.new(mode, (448, 448))
        (thumbnail,) = _thumbnails(dataset, 0)
        assert (thumbnail.mode, thumbnail.size) == ('RGB', (224, 224))
        assert (large.mode, large.size) == (mode, (448, 448))


def test_patches_stay_when_text_is_cut():
    """An image of two patches, each with as many numbers as the sample has tokens."""
    model = SimpleNamespace(model_forward_args={'input_ids', 'pixel_values'})
    patches = torch.rand(2, 4)
    sample = {'input_ids': torch.tensor([[1, 2, 3, 4]]), 'pixel_values': patches}
    inputs = _inputs_before(model, sample, 3, torch.device('cpu'))
    assert inputs['input_ids'].tolist() == [[1, 2, 3]]
    assert torch.equal(inputs['pixel_values'], patches)


def test_model_that_cannot_generate(dataset, processor, tmp_path, caplog):
    model = torch.nn.Module()
    model.model = None
    model.model_forward_args = ()
    answers = answers_at_evaluations(model, dataset, processor, tmp_path, steps=(3, 6))
    assert answers == []
    assert caplog.text.count('Nothing is answered at evaluations') == 1
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(('first_step', 'kept_steps'), [(0, []), (100, [50, 100])])
def test_answers_of_repeated_steps_are_removed(tmp_path, first_step, kept_steps):
    """A killed run had answered at step 150, and goes on from the checkpoint of step 100 or anew."""
    path = tmp_path / 'answers.jsonl'
    lines = [json.dumps({'step': step, 'generated': 'seven'}) for step in (50, 100, 150)]
    path.write_text('\n'.join(lines) + '\n')
    state = SimpleNamespace(run_name='x', timestamp=Timestamp(batch=first_step))
    callback = Answers([], None, folder=str(tmp_path), num_samples=1, max_new_tokens=1)
    callback.fit_start(state, None)
    steps = [json.loads(line)['step'] for line in path.read_text().splitlines()]
    assert steps == kept_steps
