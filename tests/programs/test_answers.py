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
from tests.support.conversations import turns, write_json
from tests.support.training import hugging_face


@pytest.fixture(scope='module')
def model(processor):
    sizes = {'hidden_size': 32, 'num_layers': 1, 'vision_hidden_size': 16, 'num_vision_layers': 1}
    config = digits_model_config(processor, **sizes)
    torch.manual_seed(0)
    llava = LlavaForConditionalGeneration(config)
    return hugging_face(llava).train()


@pytest.fixture(scope='module')
def dataset(processor):
    return DigitsDataset(processor, split='eval', num_samples=8, max_images=3)


def answers_at_evaluations(model, dataset, processor, folder, *, steps):
    """Evaluates after the given steps. Returns the answers of the last evaluation."""
    folder_of_run = str(folder / '{run_name}')
    answers = Answers(dataset, processor, folder=folder_of_run, num_samples=2, max_new_tokens=3)
    for step in steps:
        timestamp = Timestamp(batch=step)
        state = SimpleNamespace(model=model, algorithms=[], run_name='run', timestamp=timestamp)
        answers.eval_end(state, None)
    return answers.last


def generate(model, processor, question, images):
    """Returns the reference: the answer of Transformers' own ``generate``."""
    text = processor.apply_chat_template([question], add_generation_prompt=True)
    inputs = processor(text=[text], images=images or None, return_tensors='pt')
    model.eval()
    ids = model.model.generate(
        **inputs,
        max_new_tokens=3,
        do_sample=False,
        suppress_tokens=[processor.image_token_id],
    )
    model.train()
    prompt_length = inputs['input_ids'].shape[1]
    answer_ids = ids[0, prompt_length:]
    return processor.tokenizer.decode(answer_ids, skip_special_tokens=True).strip()


def read_lines(path):
    """Returns the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answer_is_that_of_plain_generation(model, dataset, processor, tmp_path):
    last = answers_at_evaluations(model, dataset, processor, tmp_path, steps=(3, 6))

    assert model.training
    for index, answer in zip([0, 4], last, strict=True):
        (question, expected_answer), images, _ = dataset.conversation(index)
        question_text = question['content'][-1]['text']
        expected_text = expected_answer['content'][0]['text']
        assert answer.sample_id == f'digits-eval-{index}'
        assert question_text in answer.question
        assert answer.expected == expected_text
        assert answer.generated == generate(model, processor, question, images)
        assert list(answer.images) == list(images)


def test_answers_of_all_evaluations_are_written(model, dataset, processor, tmp_path):
    last = answers_at_evaluations(model, dataset, processor, tmp_path, steps=(3, 6))

    lines = read_lines(tmp_path / 'run' / 'answers.jsonl')
    steps_and_samples = [(line['step'], line['sample_id']) for line in lines]
    assert steps_and_samples == [
        (3, 'digits-eval-0'),
        (3, 'digits-eval-4'),
        (6, 'digits-eval-0'),
        (6, 'digits-eval-4'),
    ]
    for answer, line in zip(last, lines[2:], strict=True):
        assert line['expected'] == answer.expected
        assert line['generated'] == answer.generated


def unlabelled_row(ids):
    """Returns a row of these ids, with its mask and its labels. No token has a label."""
    row = ids[None]
    return {
        'input_ids': row,
        'attention_mask': torch.ones_like(row),
        'labels': torch.full_like(row, -100),
    }


IMAGE_TOKEN = build_digits_processor().image_token_id


def text_without_labels(sample):
    """Leaves only the text of a sample, without its labels."""
    del sample['pixel_values']
    ids = sample['input_ids']
    text_ids = ids[ids != IMAGE_TOKEN]
    sample.update(unlabelled_row(text_ids))


def text_without_question(sample):
    """Leaves only the text of a sample, with a label at every token, as in a plain text."""
    text_without_labels(sample)
    sample['labels'] = sample['input_ids'].clone()


def with_media_at_its_end(sample):
    """Adds the images once more after the answer, in a turn without loss."""
    ids = sample['input_ids']
    image_ids = ids[ids == IMAGE_TOKEN]
    for key, added in unlabelled_row(image_ids).items():
        sample[key] = torch.cat([sample[key], added], dim=1)
    images = sample['pixel_values']
    sample['pixel_values'] = torch.cat([images, images])


@pytest.mark.parametrize('change', [text_without_labels, text_without_question, with_media_at_its_end])
def test_sample_that_cannot_be_answered(change, model, dataset, processor, tmp_path, caplog):
    """The other samples are answered. With media at its end, generation would get media without their placeholders."""
    samples = [dataset[index] for index in range(len(dataset))]
    first_sample = samples[0]
    change(first_sample)

    (answer,) = answers_at_evaluations(model, samples, processor, tmp_path, steps=(3,))

    assert answer.sample_id == 'digits-eval-4'
    assert 'does not answer sample digits-eval-0' in caplog.text


def test_page_has_answers_and_images(model, dataset, processor, tmp_path):
    last = answers_at_evaluations(model, dataset, processor, tmp_path, steps=(3,))
    path = tmp_path / 'report.html'

    write_page(path, 'run', [], {}, last)

    text = path.read_text()
    num_images = 0
    for answer in last:
        assert answer.expected in text
        assert answer.sample_id in text
        num_images += len(answer.images)
    shown_images = re.findall(r'base64,([^"]+)"', text)
    assert num_images > 0
    assert len(shown_images) == num_images
    for encoded in shown_images:
        image_file = BytesIO(base64.b64decode(encoded))
        image = Image.open(image_file)
        assert image.size == (8, 8)


def test_images_of_files_are_shown_small(tmp_path):
    image_folder = tmp_path / 'images'
    image_folder.mkdir()
    noise = Image.effect_noise((448, 112), 90).convert('RGB')
    noise.save(image_folder / 'a.png')
    record = {'image': 'a.png', 'conversations': turns('<image>Which?', 'Noise.')}
    data_path = write_json(tmp_path, [record])
    dataset = LlavaDataset(data_path, qwen2_vl(), image_dir=image_folder)

    (thumbnail,) = _thumbnails(dataset, 0)

    assert thumbnail.size == (224, 56)


@pytest.mark.parametrize('mode', ['RGB', 'CMYK'])
def test_images_of_a_dataset_stay_as_they_are(mode):
    large = Image.new(mode, (448, 448))
    dataset = SimpleNamespace(decoded=lambda index: {'image': [large]})

    (thumbnail,) = _thumbnails(dataset, 0)

    assert thumbnail.mode == 'RGB'
    assert thumbnail.size == (224, 224)
    assert large.mode == mode
    assert large.size == (448, 448)


def test_patches_stay_when_text_is_cut():
    """An image of two patches, each with as many numbers as the sample has tokens."""
    model = SimpleNamespace(model_forward_args={'input_ids', 'pixel_values'})
    ids = torch.tensor([[1, 2, 3, 4]])
    patches = torch.rand(2, 4)
    sample = {'input_ids': ids, 'pixel_values': patches}

    inputs = _inputs_before(model, sample, 3)

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


@pytest.mark.parametrize(
    ('first_step', 'kept_steps'),
    [
        pytest.param(0, [], id='starts again'),
        pytest.param(100, [50, 100], id='resumes'),
    ],
)
def test_answers_of_repeated_steps_are_removed(tmp_path, first_step, kept_steps):
    """A killed run had answered at step 150. It goes on from the checkpoint of step 100, or starts again."""
    path = tmp_path / 'answers.jsonl'
    with path.open('w') as file:
        for step in (50, 100, 150):
            line = json.dumps({'step': step, 'generated': 'seven'})
            file.write(f'{line}\n')
    state = SimpleNamespace(run_name='x', timestamp=Timestamp(batch=first_step))
    callback = Answers([], None, folder=str(tmp_path), num_samples=1, max_new_tokens=1)

    callback.fit_start(state, None)

    steps = [line['step'] for line in read_lines(path)]
    assert steps == kept_steps
