# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Length tables against the samples themselves, and when a kept one is used again."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from composer_tokacc.data import LengthTable, count_patches, image_token_ids, lengths, patch_size_of
from composer_tokacc.data.lengths import build_length_table, length_table, table_name
from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs import load_config
from composer_tokacc.programs.sources import source_of
from examples.digits import DigitsDataset, build_digits_processor
from tests.support.families import FAMILIES, IMAGE_FAMILIES
from tests.support.family_processors import PATCH_SIZE
from tests.support.launch import ROOT


def computed_patches(model, batch):
    """Positions that come out of the patch embedding of the model's own vision tower."""
    counts = []
    embeddings = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d) and module.kernel_size[-1] == PATCH_SIZE
    ]
    assert len(embeddings) == 1
    # (images, features, height, width), or (patches, features, 1, 1, 1).
    hook = embeddings[0].register_forward_hook(lambda _, __, out: counts.append(out.numel() // out.shape[1]))
    with torch.no_grad():
        model(**{key: value for key, value in batch.items() if isinstance(value, torch.Tensor)})
    hook.remove()
    return sum(counts)


class CountReads(DigitsDataset):
    reads = 0

    def __getitem__(self, index):
        CountReads.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize('num_samples', [40, pytest.param(600, marks=pytest.mark.slow)])
def test_table_says_what_the_samples_say(num_samples):
    dataset = DigitsDataset(num_samples=num_samples)
    before = torch.get_rng_state()
    table = build_length_table(dataset, dataset.processor, num_workers=2)
    assert torch.equal(before, torch.get_rng_state())
    samples = [dataset[index] for index in range(num_samples)]
    assert table.lengths.tolist() == [sample['input_ids'].shape[1] for sample in samples]
    # One token an image.
    assert table.image_tokens.tolist() == [sample['num_images'][0] for sample in samples]
    assert table.loss_tokens.tolist() == [int((sample['labels'][0, 1:] != -100).sum()) for sample in samples]
    assert (table.image_tokens == 0).any()
    assert len(table) == num_samples


@pytest.mark.parametrize('name', IMAGE_FAMILIES)
def test_vision_patches_are_those_computed(name):
    # Six samples with 0, 1, 1, 2, 0 and 3 images of unequal sizes.
    case = FAMILIES[name]()
    patch_size = patch_size_of(case.config)
    table = build_length_table(case.rows, case.encode.processor, patch_size=patch_size)
    assert table.vision_patches.dtype == np.int32
    assert table.vision_patches.tolist() == [computed_patches(case.model, row) for row in case.rows]
    assert [bool(count) for count in table.vision_patches] == [bool(sample.images) for sample in case.samples]


@pytest.mark.parametrize('name', ['idefics3', 'smolvlm', 'llava_next', 'mllama'])
def test_tiles_that_fill_up_a_batch(name):
    case = FAMILIES[name]()
    layout = BatchLayout.for_model(case.model)
    batch = layout.concat([case.rows[row] for row in (1, 5, 3)], pad_token_id=case.pad_token_id)
    num_patches = count_patches(batch, PATCH_SIZE)
    assert num_patches == computed_patches(case.model, batch)
    alone = sum(count_patches(case.rows[row], PATCH_SIZE) for row in (1, 5, 3))
    # Mllama runs the empty tiles of an image and the empty images of a row through its tower.
    assert (num_patches > alone) == (name == 'mllama')


def test_margins_that_pixtral_crops():
    vision = {'hidden_size': 16, 'intermediate_size': 32, 'num_hidden_layers': 1, 'num_attention_heads': 2}
    config = transformers.PixtralVisionConfig(**vision, image_size=32, patch_size=PATCH_SIZE)
    batch = {'pixel_values': torch.ones(2, 3, 32, 24), 'image_sizes': torch.tensor([[32, 16], [8, 24]])}
    tower = transformers.PixtralVisionModel(config)
    with torch.no_grad():
        num_positions = tower(**batch).last_hidden_state.shape[1]
    assert count_patches(batch, PATCH_SIZE) == num_positions == 8 * 4 + 2 * 6


def test_where_the_patch_size_comes_from():
    case = FAMILIES['idefics3']()
    processor = case.encode.processor
    assert patch_size_of(processor) == 14
    # Images of 16 x 16 pixels hold one square of 14; a run whose processor declares nothing still gets a table.
    guessed = build_length_table(case.rows, processor).vision_patches
    given = build_length_table(case.rows, processor, patch_size=8).vision_patches
    assert (given == 4 * guessed).all()
    llava = FAMILIES['llava']()
    declared = build_length_table(llava.rows, llava.encode.processor).vision_patches
    given = build_length_table(llava.rows, llava.encode.processor, patch_size=8).vision_patches
    assert (declared == 4 * given).all()
    named = [SimpleNamespace(patch_size=value) for value in (16, {'height': 16, 'width': 16}, (16, 16), None, {}, ())]
    assert [patch_size_of(owner, 8) for owner in named] == [16, 16, 16, 8, 8, 8]


def test_run_counts_patches_of_its_model(tmp_path):
    overrides = ['dataset.num_samples=20', f'loader.lengths_folder={tmp_path}', 'dataset.processor.patch_size=4']
    config = load_config(ROOT / 'yamls' / 'digits.yaml', overrides)
    source = source_of(config)
    processor = source.build_processor()
    table = source.measure(source.build_dataset(processor), processor)
    # The model's patches are as large as an image of 8 x 8; the processor was told otherwise.
    assert table.image_tokens.any()
    assert (4 * table.vision_patches == table.image_tokens).all()


def test_kept_table_is_readable_by_others(tmp_path):
    zeros = np.zeros(3, dtype=np.int32)
    before = os.umask(0o022)
    try:
        LengthTable(lengths=zeros, image_tokens=zeros, loss_tokens=zeros, vision_patches=zeros).save(tmp_path / 'a.npz')
    finally:
        os.umask(before)
    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o644


def test_second_run_reads_for_fingerprint_only(tmp_path):
    dataset = CountReads(num_samples=200)
    CountReads.reads = 0
    first = length_table(dataset, dataset.processor, folder=tmp_path, num_workers=0)
    assert CountReads.reads == 200 + 64
    again = CountReads(num_samples=200)
    second = length_table(again, build_digits_processor(), folder=tmp_path, num_workers=0)
    assert CountReads.reads == 200 + 2 * 64
    for name in lengths.TABLE_COLUMNS:
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert [path.suffix for path in tmp_path.iterdir()] == ['.npz']


def changed(change):
    processor = build_digits_processor()
    change(processor)
    return processor


def test_what_the_fingerprint_depends_on():
    dataset, processor = DigitsDataset(num_samples=20), build_digits_processor()
    same = {table_name(DigitsDataset(num_samples=20), one) for one in (processor, build_digits_processor())}
    assert same == {table_name(dataset, processor, patch_size=8)}  # what the processor declares
    other_data = [DigitsDataset(num_samples=21), DigitsDataset(num_samples=20, seed=1)]
    other_processors = [
        build_digits_processor(image_size=16, patch_size=8),
        changed(lambda other: setattr(other, 'chat_template', other.chat_template + ' ')),
        changed(lambda other: other.tokenizer.add_tokens(['new'])),
        changed(lambda other: setattr(other.tokenizer, 'eos_token', '<unk>')),
    ]
    others = {table_name(data, processor) for data in other_data} | {table_name(dataset, processor, patch_size=4)}
    others |= {table_name(dataset, other) for other in other_processors}
    assert len(others | same) == 8


def test_older_versions_are_not_read(tmp_path, monkeypatch):
    dataset = DigitsDataset(num_samples=8)
    with monkeypatch.context() as older:
        older.setattr(lengths, 'TABLE_VERSION', lengths.TABLE_VERSION - 1)
        older_file = tmp_path / f'{table_name(dataset, dataset.processor)}.npz'
    np.savez(older_file, lengths=[1] * 8, image_tokens=[0] * 8, loss_tokens=[1] * 8)
    table = length_table(dataset, dataset.processor, folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert table.vision_patches.tolist() == table.image_tokens.tolist()


def test_datasets_fingerprint_goes_before_probes():
    class Named(CountReads):
        name = 'first'

        def fingerprint(self):
            return self.name

    dataset, processor = Named(num_samples=20), build_digits_processor()
    CountReads.reads = 0
    first = table_name(dataset, processor)
    dataset.name = 'second'
    assert table_name(dataset, processor) != first
    assert CountReads.reads == 0


def test_kept_table_without_labels_is_refused(tmp_path):
    processor = build_digits_processor()
    table = LengthTable(**dict.fromkeys(lengths.TABLE_COLUMNS[:4], np.zeros(3, np.int32)), errors={0: 'no image'})
    dataset = DigitsDataset(num_samples=3)
    table.save(tmp_path / f'{table_name(dataset, processor)}.npz')
    with pytest.raises(ValueError, match='labels to learn'):
        length_table(dataset, processor, folder=tmp_path, on_error='skip')


def test_tokenizer_has_no_image_tokens():
    tokenizer = build_digits_processor().tokenizer
    assert image_token_ids(tokenizer) == ()


@pytest.mark.parametrize('content', [b'', b'PK', b'not a table', None])
def test_a_damaged_table_is_measured_again(tmp_path, caplog, content):
    dataset = DigitsDataset(num_samples=3)
    processor = dataset.processor
    expected = length_table(dataset, processor, folder=tmp_path)
    (file,) = tmp_path.glob('*.npz')
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    found = length_table(dataset, processor, folder=tmp_path)
    assert found.lengths.tolist() == expected.lengths.tolist()
    assert f'{file} is damaged' in caplog.text
    caplog.clear()
    length_table(dataset, processor, folder=tmp_path)
    assert not caplog.text


def test_unwritable_folder_costs_a_warning(tmp_path, caplog):
    (tmp_path / 'file').write_text('')
    dataset = DigitsDataset(num_samples=3)
    table = length_table(dataset, dataset.processor, folder=tmp_path / 'file' / 'lengths')
    assert table.lengths.tolist() == [dataset[i]['input_ids'].shape[1] for i in range(3)]
    assert '`loader.lengths_folder`' in caplog.text
