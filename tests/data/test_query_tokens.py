# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""BLIP-2 and InstructBLIP from a JSON file to the gradient: query tokens stand for an image, text rows have none."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from PIL import Image

from composer_tokacc import BatchLayout, TokenAccumulation, token_data_spec
from composer_tokacc.data import LlavaDataset, VisionLanguageCollator
from composer_tokacc.data.conversation import ConversationEncoder
from composer_tokacc.data.lengths import build_length_table
from tests.data.chat_processors import blip2, instructblip, instructblipvideo
from tests.matrix.collator import join
from tests.support import family_models
from tests.support.clips import write_media_folder
from tests.support.family_media import TokenIds
from tests.support.training import loader, logged, reference_gradients, relative_error, train

PROCESSORS = {'blip2': blip2, 'instructblip': instructblip}
NUM_QUERIES, NUM_FRAMES = 4, 4
# Microbatch size, whether rows are regrouped.
CUTS = {
    'right': [(size, regroup) for size in (1, 2, 3, 6) for regroup in (True, False)],
    'left': [(1, True), (3, False)],
}
TURNS = [
    ('<image>\nWhat is this?', 'A red square.'),
    ('What is blue?', 'Blue, I think: <b>7</b> of them.'),
    ('And now?\n<image>', 'Blue.', 'What is this? A square.', 'Red'),
    ('<image>What', 'A'),
    ('What is this?', 'Red.', 'And now?', 'Blue.'),
    ('<image>\nAnd now: 7 of them?', 'I think.'),
]


@functools.cache
def model_of(name):
    model = family_models.MODELS[name](TokenIds(processor_of(name).tokenizer))
    return model.requires_grad_(True)


@functools.cache
def processor_of(name):
    return {**PROCESSORS, 'instructblipvideo': instructblipvideo}[name]()


def write(folder, turns=TURNS):
    records = []
    for index, values in enumerate(turns):
        speakers = ('human', 'gpt') * 2
        conversation = [{'from': who, 'value': value} for who, value in zip(speakers, values, strict=False)]
        records.append({'id': f's{index}', 'conversations': conversation})
        if '<image>' in ''.join(values):
            Image.frombytes('RGB', (24, 20), bytes((37 * index + k) % 256 for k in range(1440))).save(
                folder / f'{index}.png'
            )
            records[-1]['image'] = f'{index}.png'
    (folder / 'data.json').write_text(json.dumps(records))
    return folder / 'data.json'


def tensors(sample):
    return {key: value for key, value in sample.items() if isinstance(value, torch.Tensor)}


@pytest.fixture(params=PROCESSORS)
def family(request, tmp_path):
    return request.param, LlavaDataset(write(tmp_path), processor_of(request.param))


def worst_error(name, batch, side, expected, loss=None):
    """Of the gradient, and of the logged loss where one is expected, over all cuts."""
    errors = {}
    for size, regroup in CUTS[side]:
        data = token_data_spec(loader(batch), regroup=regroup)
        recorder, memory, _ = train(model_of(name), data, algorithms=[TokenAccumulation()], microbatch_size=size)
        found = logged(memory, 'loss/train/total')[-1]
        of_loss = 0 if loss is None else abs(found - loss) / loss
        errors[size, regroup] = max(relative_error(recorder.gradients, expected), of_loss)
    return max(errors.values())


@pytest.mark.parametrize('side', ['left', pytest.param('right', marks=pytest.mark.slow)])
def test_gradient_is_that_of_one_forward(family, side):
    name, dataset = family
    samples = [dataset[index] for index in range(len(dataset))]
    expected, loss = reference_gradients(model_of(name), join([tensors(sample) for sample in samples], side=side))
    processor_of(name).tokenizer.padding_side = side
    batch = VisionLanguageCollator(processor_of(name))(samples)
    assert worst_error(name, batch, side, expected, loss) < 1e-6


def test_step_without_any_image(family):
    """The model itself takes no batch without images."""
    name, dataset = family
    text = [dataset[index] for index in (1, 4)]
    assert not any('pixel_values' in sample for sample in text)
    with pytest.raises((AttributeError, TypeError, ValueError)):
        model_of(name)(**join([tensors(sample) for sample in text], side='right'))
    batch = join([tensors(sample) for sample in text], side='right')
    named = {key: batch[key] for key in ('input_ids', 'attention_mask', 'labels')}
    expected, _ = reference_gradients(model_of(name).language_model, named)
    expected = {key.replace('model.', 'model.language_model.', 1): value for key, value in expected.items()}
    whole = VisionLanguageCollator(processor_of(name))([dataset[index] for index in range(6)])
    spec = token_data_spec(loader(VisionLanguageCollator(processor_of(name))(text), whole))
    recorder, _, _ = train(
        model_of(name), spec, algorithms=[TokenAccumulation()], microbatch_size=1, max_duration='2ba'
    )
    assert relative_error(recorder.steps[0], expected) < 1e-6


def test_rows_without_images_are_evaluated(family):
    name, dataset = family
    text = VisionLanguageCollator(processor_of(name))([dataset[index] for index in (1, 4)])
    spec = token_data_spec(loader(text), model=model_of(name))
    with torch.no_grad():
        (part,) = spec.split_batch(text, 2)
        given = {key: value for key, value in spec.microbatch_transforms(part).items() if torch.is_tensor(value)}
        loss = model_of(name)(**given).loss
    _, expected = reference_gradients(model_of(name).language_model, tensors(text))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert spec.get_num_samples_in_batch(part) == 2


def test_table_holds_the_query_tokens(family):
    name, dataset = family
    table = build_length_table(dataset, processor_of(name), patch_size=4)
    has_image = ['<image>' in values[0] + values[-2] for values in TURNS]
    assert table.image_tokens.tolist() == [NUM_QUERIES * has for has in has_image]
    assert table.vision_patches.tolist() == [16 * has for has in has_image]
    tokenizer, encoder = processor_of(name).tokenizer, ConversationEncoder(processor_of(name))
    texts = [len(tokenizer(encoder.render(record.messages())[0])['input_ids']) for record in dataset.records]
    assert (table.lengths - table.image_tokens).tolist() == texts


@pytest.mark.parametrize('name', PROCESSORS)
def test_processor_from_a_folder(name, tmp_path):
    """It has lost its chat template, which its tokenizer still has."""
    processor_of(name).save_pretrained(tmp_path / 'processor')
    loaded = type(processor_of(name)).from_pretrained(tmp_path / 'processor')
    path = write(tmp_path)
    for index in (0, 1):
        found, expected = (LlavaDataset(path, processor)[index] for processor in (loaded, processor_of(name)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in tensors(expected).items())


def test_query_transformer_sees_no_answer(tmp_path):
    processor = processor_of('instructblip')
    sample = LlavaDataset(write(tmp_path), processor)[2]
    assert processor.qformer_tokenizer.decode(sample['qformer_input_ids'][0]).strip() == 'USER: And now? ASSISTANT:'
    assert 'qformer_input_ids' not in LlavaDataset(tmp_path / 'data.json', processor)[1]


def test_second_image_of_a_sample(family, tmp_path):
    """The processor writes the tokens of one, and the model would drop the other."""
    name, _ = family
    Image.new('RGB', (9, 9)).save(tmp_path / 'a.png')
    turns = [{'from': 'human', 'value': '<image><image>What is this?'}, {'from': 'gpt', 'value': 'Red.'}]
    record = {'id': 'two', 'image': ['a.png', 'a.png'], 'conversations': turns}
    (tmp_path / 'two.json').write_text(json.dumps([record]))
    with pytest.raises(ValueError, match=r'two.*must write 8 query tokens.*got: 4.*one image'):
        LlavaDataset(tmp_path / 'two.json', processor_of(name))[0]


def test_template_that_writes_an_image(family):
    name, _ = family
    processor = PROCESSORS[name]()
    processor.chat_template = '<image>' + processor.chat_template
    message = {'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'What?'}]}
    answer = {'role': 'assistant', 'content': [{'type': 'text', 'text': 'Red.'}]}
    with pytest.raises(ValueError, match=r'4 query tokens.*got: 5.*template must write nothing'):
        ConversationEncoder(processor)([message, answer], [Image.new('RGB', (9, 9))])


@pytest.mark.parametrize('name', PROCESSORS)
def test_missing_number_of_query_tokens(name):
    with pytest.raises(ValueError, match='num_query_tokens'):
        ConversationEncoder(PROCESSORS[name](num_query_tokens=None))


def test_instruction_over_the_limit():
    processor = instructblip()
    processor.qformer_tokenizer.model_max_length = 8
    message = {'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'What is this?' * 9}]}
    answer = {'role': 'assistant', 'content': [{'type': 'text', 'text': 'Red.'}]}
    with pytest.raises(ValueError, match=r'`qformer_tokenizer` must have room.*limit of 8'):
        ConversationEncoder(processor)([message, answer], [Image.new('RGB', (9, 9))])


def test_model_of_other_query_tokens(family):
    """Its features would go to the placeholders of other rows, without a word."""
    name, dataset = family
    samples = [dataset[index] for index in range(6)]
    model = family_models.MODELS[name](TokenIds(processor_of(name).tokenizer))
    model.query_tokens = torch.nn.Parameter(torch.randn(1, 6, 16))
    model.config.num_query_tokens = 6
    data = token_data_spec(loader(VisionLanguageCollator(processor_of(name))(samples)))
    with pytest.raises(ValueError, match=r'placeholders of 4 whole images.*same `num_query_tokens`'):
        train(model, data, algorithms=[TokenAccumulation()], microbatch_size=2)


def test_text_rows_with_instructions_are_refused(family):
    """As the processor itself makes them: the model wants one instruction an image, and cannot take such a batch."""
    name, _ = family
    if name != 'instructblip':
        pytest.skip('has no instructions')
    processor = processor_of(name)
    both = [
        dict(processor(text=['What is this?'], images=[Image.new('RGB', (9, 9))], return_tensors='pt')),
        dict(processor(text=['And now?'], return_tensors='pt')),
    ]
    rows = [{**row, 'labels': row['input_ids'].clone()} for row in both]
    layout = BatchLayout.for_model(model_of(name))
    with pytest.raises(ValueError, match='one entry per image each'):
        layout.select(join(rows, side='right'), [0])


def clip_row(processor, text, frames, seed):
    clip = torch.randint(0, 255, (frames, 3, 20, 24), generator=torch.Generator().manual_seed(seed)).byte()
    row = dict(processor(text=[text], images=[clip], return_tensors='pt'))
    return {**row, 'labels': row['input_ids'].masked_fill(torch.arange(row['input_ids'].shape[1]) < 20, -100)}


@pytest.mark.parametrize('side', ['left', pytest.param('right', marks=pytest.mark.slow)])
def test_clips_as_the_processor_makes_them(side):
    processor, model = processor_of('instructblipvideo'), model_of('instructblipvideo')
    rows = [clip_row(processor, 'What is this? A red square.' + ' Red' * k, 4, k) for k in range(4)]
    text = processor.tokenizer(['And now? Blue, I think.'], return_tensors='pt')
    text['labels'] = text['input_ids'].clone()
    rows.insert(2, dict(text))
    batch = join(rows, side=side)
    assert BatchLayout.infer(batch).family is BatchLayout.for_model(model).family
    assert BatchLayout.for_model(model).units_per_row(batch, 'video') == [1, 1, 0, 1, 1]
    expected, _ = reference_gradients(model, batch)
    assert worst_error('instructblipvideo', batch, side, expected) < 1e-6


def test_clip_of_other_than_four_frames():
    processor, model = processor_of('instructblipvideo'), model_of('instructblipvideo')
    batch = join([clip_row(processor, 'What is this? A red square.', 5, k) for k in range(2)], side='right')
    with pytest.raises(ValueError, match=r'2 whole videos.*\[16, 16\].*\[20, 20\]'):
        train(model, token_data_spec(loader(batch)), algorithms=[TokenAccumulation()])


@pytest.mark.slow
def test_clips_of_a_file(tmp_path):
    """Four frames of each film, whatever its length; rows without one have none."""
    processor, model = processor_of('instructblipvideo'), model_of('instructblipvideo')
    processor.tokenizer.padding_side = 'right'
    path = write_media_folder(tmp_path, [['video'], [], ['video'], [], ['video']])
    dataset = LlavaDataset(path, processor, video={'num_frames': NUM_FRAMES})
    samples = [dataset[index] for index in range(len(dataset))]
    shapes = [tuple(sample['pixel_values'].shape) for sample in samples if 'pixel_values' in sample]
    assert shapes == [(1, NUM_FRAMES, 3, 16, 16)] * 3
    assert [sample['num_videos'] for sample in samples] == [[1], [0], [1], [0], [1]]
    table = build_length_table(dataset, processor, patch_size=4)
    assert table.image_tokens.tolist() == [NUM_FRAMES * NUM_QUERIES * sample['num_videos'][0] for sample in samples]
    expected, _ = reference_gradients(model, join([tensors(sample) for sample in samples], side='right'))
    batch = VisionLanguageCollator(processor)(samples)
    assert worst_error('instructblipvideo', batch, 'right', expected) < 1e-6


def test_video_of_other_than_four_frames(tmp_path):
    path = write_media_folder(tmp_path, [['video']])
    with pytest.raises(ValueError, match=r's0.*must write 20 query tokens.*got: 16.*four frames'):
        LlavaDataset(path, processor_of('instructblipvideo'), video={'num_frames': 5})[0]
