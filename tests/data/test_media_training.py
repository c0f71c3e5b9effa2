# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A file with images, videos, sounds and plain text -> dataset -> batch -> one step: the gradient of one forward."""

from __future__ import annotations

import copy

import pytest
from torch.utils.data import DataLoader

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc.data import LlavaDataset, VisionLanguageCollator, image_token_ids, length_table
from composer_tokacc.layout import BatchLayout
from tests.support.clips import write_media_folder
from tests.support.family_media import MEDIA
from tests.support.training import reference_gradients, relative_error, train

PICTURES = (
    (),
    ('video',),
    ('image', 'video', 'image'),
    ('video', 'video'),
    (),
    ('image', 'image'),
    ('video',),
    ('image',),
)
OMNI = ((), ('video',), ('image', 'video'), ('audio',), ('audio', 'image', 'video'), (), ('image',))
SOUNDS = ((), ('audio',), ('audio', 'audio'), (), ('audio',))
# Its processor joins neither the pixels of two videos nor those of a video and an image.
APART = ((), ('video',), ('image',), (), ('image', 'image'), ('video',))
FEW, FIXED = {'fps': 3, 'max_frames': 8}, {'num_frames': 3}
# Rows of the file, and which frames: the videos of LLaVA and its kin must be of one number of frames.
FAMILIES = {
    'qwen2_vl': (PICTURES, FEW),
    'qwen2_5_vl': (PICTURES, FEW),
    'qwen3_vl': (PICTURES, FEW),
    'qwen2_5_omni': (OMNI, FEW),
    'qwen2_audio': (SOUNDS, None),
    'llava_onevision': (PICTURES, FIXED),
    'llava_next_video': (PICTURES, FIXED),
    'video_llava': (PICTURES, FIXED),
    'internvl': (PICTURES, FIXED),
    'smolvlm_video': (APART, FEW),
}


def load(name, folder, **options):
    if name not in MEDIA:
        pytest.skip('its processor wants num2words')
    case, (rows, video) = MEDIA[name](), FAMILIES[name]
    path = write_media_folder(folder, rows)
    return case, LlavaDataset(path, case.processor, video=video, **options)


@pytest.mark.parametrize('name', FAMILIES)
def test_gradient_is_that_of_one_forward(tmp_path, name):
    case, dataset = load(name, tmp_path)
    for side in ('right', 'left'):
        case.processor.tokenizer.padding_side = side
        collate = VisionLanguageCollator(case.processor, layout=BatchLayout.for_model(case.model))
        expected, _ = reference_gradients(case.model, collate([dataset[i] for i in range(len(dataset))]))
        for microbatch_size in (1, 2, 3, len(dataset)) if side == 'right' else (2,):
            for regroup in (True, False):
                loader = DataLoader(dataset, batch_size=len(dataset), collate_fn=collate)
                spec = token_data_spec(loader, regroup=regroup)
                model = copy.deepcopy(case.model)
                recorder, *_ = train(model, spec, algorithms=[TokenAccumulation()], microbatch_size=microbatch_size)
                error = relative_error(recorder.gradients, expected)
                assert error < 1e-6, f'{side}, {microbatch_size=}, {regroup=}'


@pytest.mark.parametrize('name', FAMILIES)
def test_a_sample_says_what_it_holds(tmp_path, name):
    case, dataset = load(name, tmp_path)
    rows = FAMILIES[name][0]
    table = length_table(dataset, case.processor, folder=tmp_path / 'lengths')
    placeholders = set(image_token_ids(case.processor))
    for index, kinds in enumerate(rows):
        sample = dataset[index]
        for kind in ('image', 'video', 'audio'):
            assert sample.get(f'num_{kind}s', [0]) == [kinds.count(kind)]
        ids = sample['input_ids'][0].tolist()
        assert table.lengths[index] == len(ids)
        assert table.image_tokens[index] == sum(token in placeholders for token in ids)
        assert bool(table.image_tokens[index]) == bool(kinds)
        assert bool(table.vision_patches[index]) == ({'image', 'video'} & set(kinds) != set())
        learnt = sample['labels'][sample['labels'] != -100]
        assert not placeholders & set(learnt.tolist())
        spoken = [turn.text.split() for turn in dataset.records[index].turns if turn.role == 'assistant']
        end = case.processor.tokenizer.eos_token
        assert case.processor.tokenizer.decode(learnt).split() == [word for words in spoken for word in [*words, end]]
