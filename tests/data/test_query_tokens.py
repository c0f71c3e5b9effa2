# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""BLIP-2 and InstructBLIP, from a JSON file to the gradient. Query tokens stand for an image; text rows have none."""

from __future__ import annotations

import functools

import pytest
import torch
from PIL import Image

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.data import LlavaDataset, VisionLanguageCollator
from composer_tokacc.data.conversation import ConversationEncoder
from composer_tokacc.data.lengths import build_length_table
from tests.data.chat_processors import assert_same, blip2, instructblip, instructblipvideo
from tests.matrix.collator import join
from tests.model_types.tiny import float32_model, tiny_config
from tests.support.clips import write_media_folder
from tests.support.conversations import IMAGE, assistant, turns, user, write_json
from tests.support.training import assert_exact, fit, loader, reference_gradients

PROCESSORS = {'blip2': blip2, 'instructblip': instructblip}
NUM_QUERIES = 4
NUM_FRAMES = 4
TURNS = [
    ('<image>\nWhat is this?', 'A red square.'),
    ('What is blue?', 'Blue, I think: <b>7</b> of them.'),
    ('And now?\n<image>', 'Blue.', 'What is this? A square.', 'Red'),
    ('<image>What', 'A'),
    ('What is this?', 'Red.', 'And now?', 'Blue.'),
    ('<image>\nAnd now: 7 of them?', 'I think.'),
]
HAS_IMAGE = [True, False, True, True, False, True]
TEXT_SAMPLES = (1, 4)


@functools.cache
def model_of(name):
    return build_model(name).requires_grad_(True)


def build_model(name):
    model_type = 'blip-2' if name == 'blip2' else name
    settings = {'text_config': 'LlamaConfig'} if name != 'blip2' else {}
    return float32_model(tiny_config(model_type, settings, tokenizer=processor_of(name).tokenizer))


@functools.cache
def processor_of(name):
    return instructblipvideo() if name == 'instructblipvideo' else PROCESSORS[name]()


def write_samples(folder):
    records = []
    for index, texts in enumerate(TURNS):
        record = {'id': f's{index}', 'conversations': turns(*texts)}
        if HAS_IMAGE[index]:
            record['image'] = f'{index}.png'
            gradient = Image.linear_gradient('L').rotate(60 * index)
            gradient.resize((24, 20)).convert('RGB').save(folder / record['image'])
        records.append(record)
    return write_json(folder, records)


def tensors(sample):
    return {key: value for key, value in sample.items() if isinstance(value, torch.Tensor)}


def collate(name, samples):
    return VisionLanguageCollator(processor_of(name))(samples)


@pytest.fixture(params=PROCESSORS)
def name(request):
    return request.param


@pytest.fixture
def dataset(name, tmp_path):
    return LlavaDataset(write_samples(tmp_path), processor_of(name))


def assert_step_is_exact(name, samples, side):
    """Compares the step of the collated samples with one forward over rows that another collator has joined."""
    processor_of(name).tokenizer.padding_side = side
    batch = collate(name, samples)
    rows = [tensors(sample) for sample in samples]
    assert_exact(model_of(name), batch, batch=join(rows, side=side), microbatch_size=2)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_gradient_is_that_of_one_forward(name, dataset, side):
    assert_step_is_exact(name, list(dataset), side)


def test_rows_without_images_are_evaluated(name, dataset):
    model = model_of(name)
    text_samples = [dataset[index] for index in TEXT_SAMPLES]
    assert not any('pixel_values' in sample for sample in text_samples)
    text = collate(name, text_samples)
    with pytest.raises((AttributeError, TypeError, ValueError)):
        model(**tensors(text))  # a batch without images
    spec = token_data_spec(loader(text), model=model)
    (microbatch,) = spec.split_batch(text, 2)
    inputs = tensors(spec.microbatch_transforms(microbatch))
    with torch.no_grad():
        loss = model(**inputs).loss
    _, expected = reference_gradients(model.language_model, tensors(text))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert spec.get_num_samples_in_batch(microbatch) == 2


def test_table_holds_the_query_tokens(name, dataset):
    processor = processor_of(name)
    encoder = ConversationEncoder(processor)
    table = build_length_table(dataset, processor, patch_size=4)
    assert table.image_tokens.tolist() == [NUM_QUERIES * has_image for has_image in HAS_IMAGE]
    assert table.vision_patches.tolist() == [16 * has_image for has_image in HAS_IMAGE]
    for index, record in enumerate(dataset.records):
        text, *_ = encoder.render(record.messages())
        num_text_tokens = len(processor.tokenizer(text)['input_ids'])
        assert table.lengths[index] - table.image_tokens[index] == num_text_tokens


def test_processor_from_a_folder(name, dataset, tmp_path):
    """The saved processor loses its chat template. Its tokenizer still has it."""
    processor_of(name).save_pretrained(tmp_path / 'processor')
    loaded = type(processor_of(name)).from_pretrained(tmp_path / 'processor')
    loaded_dataset = LlavaDataset(tmp_path / 'data.json', loaded)
    for index in (0, 1):
        assert_same(loaded_dataset[index], dataset[index])


def test_query_transformer_sees_no_answer(tmp_path):
    processor = processor_of('instructblip')
    dataset = LlavaDataset(write_samples(tmp_path), processor)
    instruction = processor.qformer_tokenizer.decode(dataset[2]['qformer_input_ids'][0])
    assert instruction.strip() == 'USER: And now? ASSISTANT:'
    assert 'qformer_input_ids' not in dataset[1]


def test_query_transformer_reads_control_tokens():
    """With control_tokens=text it reads the control token in the question, and not the stand-in for it."""
    processor = instructblip()
    encoder = ConversationEncoder(processor, control_tokens='text')
    sample = encoder([user(IMAGE, 'A </s>?'), assistant('Red.')], [Image.new('RGB', (24, 20))])
    expected = processor.qformer_tokenizer(['USER: A </s>? ASSISTANT: '], return_tensors='pt')
    assert torch.equal(sample['qformer_input_ids'], expected['input_ids'])


def test_second_image_of_a_sample(name, tmp_path):
    """The processor writes the tokens of one image only, and the model would drop the other."""
    Image.new('RGB', (9, 9)).save(tmp_path / 'a.png')
    record = {'id': 'two', 'image': ['a.png', 'a.png'], 'conversations': turns('<image><image>What is this?', 'Red.')}
    dataset = LlavaDataset(write_json(tmp_path, [record]), processor_of(name))
    with pytest.raises(ValueError, match=r'two.*must write 8 query tokens.*got: 4.*one image'):
        dataset[0]


def encode_image(processor, question):
    """Encodes a question about one image, and its answer."""
    messages = [user(IMAGE, question), assistant('Red.')]
    return ConversationEncoder(processor)(messages, [Image.new('RGB', (9, 9))])


def test_template_that_writes_an_image(name):
    processor = PROCESSORS[name]()
    processor.chat_template = '<image>' + processor.chat_template
    with pytest.raises(ValueError, match=r'4 query tokens.*got: 5.*template must write nothing'):
        encode_image(processor, 'What?')


def test_missing_number_of_query_tokens(name):
    with pytest.raises(ValueError, match='num_query_tokens'):
        ConversationEncoder(PROCESSORS[name](num_query_tokens=None))


def test_instruction_over_the_limit():
    processor = instructblip()
    processor.qformer_tokenizer.model_max_length = 8
    with pytest.raises(ValueError, match=r'fit into the query transformer, got: [0-9]+ > 8 tokens'):
        encode_image(processor, 'What is this?' * 9)


def test_model_of_other_query_tokens(name, dataset):
    """The features of an image would go to the placeholders of other rows, without an error."""
    model = build_model(name)
    model.query_tokens = torch.nn.Parameter(torch.randn(1, 6, 16))
    model.config.num_query_tokens = 6
    with pytest.raises(ValueError, match=r'placeholders of 4 whole images.*same `num_query_tokens`'):
        fit(model, collate(name, list(dataset)))


def test_text_rows_with_instructions_are_refused():
    """The processor gives an instruction to text too. The model wants one for each image, and refuses the batch."""
    processor = processor_of('instructblip')
    image = Image.new('RGB', (9, 9))
    with_image = processor(text=['What is this?'], images=[image], return_tensors='pt')
    without_image = processor(text=['And now?'], return_tensors='pt')
    rows = [{**row, 'labels': row['input_ids'].clone()} for row in (with_image, without_image)]
    batch = join(rows, side='right')
    layout = BatchLayout.for_model(model_of('instructblip'))
    with pytest.raises(ValueError, match=r'one for each image|whole images'):
        layout.select(batch, [0])


def test_clips_of_a_file(tmp_path):
    """Four frames are taken of each film, however long it is. Rows without a film have none."""
    processor = processor_of('instructblipvideo')
    path = write_media_folder(tmp_path, [['video'], [], ['video'], [], ['video']])
    dataset = LlavaDataset(path, processor, video={'num_frames': NUM_FRAMES})
    samples = list(dataset)
    table = build_length_table(dataset, processor, patch_size=4)
    for index, num_videos in enumerate([1, 0, 1, 0, 1]):
        assert samples[index]['num_videos'] == [num_videos]
        assert ('pixel_values' in samples[index]) == bool(num_videos)
        assert table.image_tokens[index] == NUM_FRAMES * NUM_QUERIES * num_videos
        if num_videos:
            assert samples[index]['pixel_values'].shape == (1, NUM_FRAMES, 3, 16, 16)
    layout = BatchLayout.for_model(model_of('instructblipvideo'))
    batch = collate('instructblipvideo', samples)
    assert BatchLayout.infer(batch).family is layout.family
    assert layout.units_per_row(batch, 'video') == [1, 0, 1, 0, 1]
    assert_step_is_exact('instructblipvideo', samples, 'left')


def test_video_of_other_than_four_frames(tmp_path):
    path = write_media_folder(tmp_path, [['video']])
    dataset = LlavaDataset(path, processor_of('instructblipvideo'), video={'num_frames': 5})
    with pytest.raises(ValueError, match=r's0.*must write 20 query tokens.*got: 16.*four frames'):
        dataset[0]
