# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Length tables compared with the samples themselves, and when a saved one is used again."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import PreTokenizer

from composer_tokacc.cache import cache_folder
from composer_tokacc.data import (
    ConversationEncoder,
    LengthTable,
    count_patches,
    identify_data,
    lengths,
    patch_size_of,
    sizes,
)
from composer_tokacc.data.lengths import build_length_table, length_table, table_name
from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs import load_config
from composer_tokacc.programs.sources import source_of
from examples.digits import DigitsDataset, build_digits_processor
from tests.data.chat_processors import QWEN, small, tokenizer
from tests.data.length_tables import assert_same_table, lengths_of
from tests.model_types.tiny import PATCH
from tests.support.conversations import IMAGE, assistant, user
from tests.support.families import FAMILIES, IMAGE_FAMILIES
from tests.support.launch import ROOT


def computed_patches(model, batch):
    """Returns the number of patches that come out of the model's own patch embedding."""
    embeddings = []
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d) and module.kernel_size[-1] == PATCH:
            embeddings.append(module)
    [embedding] = embeddings
    counts = []

    def count(module, inputs, output):
        # The shape is (images, features, height, width) or (patches, features, 1, 1, 1).
        num_features = output.shape[1]
        counts.append(output.numel() // num_features)

    hook = embedding.register_forward_hook(count)
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    with torch.no_grad():
        model(**tensors)
    hook.remove()
    return sum(counts)


def test_table_says_what_the_samples_say(monkeypatch):
    monkeypatch.setattr(sizes, 'FEWEST_FOR_WORKERS', 1)
    dataset = DigitsDataset(num_samples=40)
    random_state = torch.get_rng_state()

    table = build_length_table(dataset, dataset.processor, num_workers=2)

    assert torch.equal(torch.get_rng_state(), random_state)
    assert len(table) == 40
    assert (table.image_tokens == 0).any()
    for index, sample in enumerate(dataset):
        next_labels = sample['labels'][0, 1:]
        has_loss = next_labels != -100
        [num_images] = sample['num_images']
        assert table.lengths[index] == sample['input_ids'].shape[1]
        assert table.image_tokens[index] == num_images  # one token an image
        assert table.loss_tokens[index] == has_loss.sum()


@pytest.mark.parametrize('name', IMAGE_FAMILIES)
def test_vision_patches_are_those_computed(name):
    """Six samples have 0, 1, 1, 2, 0 and 3 images of unequal sizes."""
    case = FAMILIES[name]()
    patch_size = patch_size_of(case.config)

    table = build_length_table(case.rows, case.processor, patch_size=patch_size)

    assert table.vision_patches.dtype == np.int32
    for index, row in enumerate(case.rows):
        num_patches = table.vision_patches[index]
        has_image = case.truth[index]['image'] > 0
        assert num_patches == computed_patches(case.model, row)
        assert (num_patches > 0) == has_image


@pytest.mark.parametrize('name', ['idefics3', 'smolvlm', 'llava_next', 'mllama'])
def test_tiles_that_fill_up_a_batch(name):
    """Mllama also computes the empty tiles of an image and the empty images of a row."""
    case = FAMILIES[name]()
    layout = BatchLayout.for_model(case.model)
    rows = [case.rows[index] for index in (1, 5, 3)]
    batch = layout.concat(rows, pad_token_id=case.pad_token_id)

    num_patches = count_patches(batch, PATCH)

    assert num_patches == computed_patches(case.model, batch)
    patches_of_rows = sum(count_patches(row, PATCH) for row in rows)
    has_empty_tiles = num_patches > patches_of_rows
    assert has_empty_tiles == (name == 'mllama')


def test_margins_that_pixtral_crops():
    """Patches of 4 x 4 pixels: 8 x 4 of the first image, and 2 x 6 of the second one."""
    expected = 8 * 4 + 2 * 6
    config = transformers.PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=PATCH,
    )
    encoder = transformers.PixtralVisionModel(config)
    pixels = torch.ones(2, 3, 32, 24)
    image_sizes = torch.tensor([[32, 16], [8, 24]])

    with torch.no_grad():
        features = encoder(pixel_values=pixels, image_sizes=image_sizes).last_hidden_state
    num_patches = count_patches({'pixel_values': pixels, 'image_sizes': image_sizes}, PATCH)

    assert features.shape[1] == expected
    assert num_patches == expected


@pytest.mark.parametrize(
    ('name', 'default_size', 'factor'),
    [
        pytest.param('llava', 4, 4, id='declared'),
        pytest.param('idefics3', 14, 1 / 4, id='not declared'),
    ],
)
def test_patch_size_of_the_processor(name, default_size, factor):
    """LLaVA's processor declares a patch size of 4. For Idefics3's, which declares none, 14 is assumed.

    An image of 16 x 16 pixels has 4 patches of 8 x 8, 16 patches of 4 x 4, and one patch of 14 x 14.
    """
    case = FAMILIES[name]()

    table = build_length_table(case.rows, case.processor)
    table_of_size_8 = build_length_table(case.rows, case.processor, patch_size=8)

    assert patch_size_of(case.processor) == default_size
    assert table_of_size_8.vision_patches.any()
    expected = factor * table_of_size_8.vision_patches
    assert (table.vision_patches == expected).all()


@pytest.mark.parametrize(
    ('declared', 'expected'),
    [
        (16, 16),
        ({'height': 16, 'width': 16}, 16),
        ((16, 16), 16),
        (None, 8),
        ({}, 8),
        ((), 8),
    ],
)
def test_forms_of_a_patch_size(declared, expected):
    owner = SimpleNamespace(patch_size=declared)
    next_owner = 8

    assert patch_size_of(owner, next_owner) == expected


def test_run_counts_patches_of_its_model(tmp_path):
    overrides = ['dataset.num_samples=20', f'loader.lengths_folder={tmp_path}', 'dataset.processor.patch_size=4']
    config = load_config(ROOT / 'yamls' / 'digits.yaml', overrides)
    table = source_of(config).train_table
    # The processor makes a token of each 4 x 4 pixels. The model's patch is as large as the image, 8 x 8 pixels.
    assert table.image_tokens.any()
    assert (table.image_tokens == 4 * table.vision_patches).all()


def empty_table():
    """Returns a table of three samples without a token."""
    zeros = np.zeros(3, np.int32)
    return LengthTable(lengths=zeros, image_tokens=zeros, loss_tokens=zeros, vision_patches=zeros)


def test_patch_token_of_llama_4():
    """Llama 4 writes `<|patch|>` for each patch, and `<|image|>` once."""
    words = tokenizer('<|image|>', '<|patch|>', '<|im_start|>', '<|im_end|>', eos_token='<|im_end|>')
    image_processor = getattr(transformers, 'Llama4ImageProcessor', None) or transformers.Llama4ImageProcessorFast
    images = image_processor(size={'height': 28, 'width': 28}, max_patches=4)
    template = QWEN.replace('<|vision_start|><|image_pad|><|vision_end|>', '<|image|>')
    processor = transformers.Llama4Processor(images, words, patch_size=7, chat_template=template)
    encode = ConversationEncoder(processor)
    image = Image.new('RGB', (60, 50))
    sample = encode([user(IMAGE, 'What?'), assistant('Red.')], [image])

    table = build_length_table([sample], processor, num_workers=0)

    ids = sample['input_ids'][0].tolist()
    num_patches = ids.count(words.convert_tokens_to_ids('<|patch|>'))
    assert table.image_tokens.tolist() == [num_patches + 1]


def test_tokens_of_an_image_are_counted_alike():
    """Processors of newer Transformers list all tokens of an image, such as the line breaks of Pixtral."""
    words = tokenizer('[IMG]', '[IMG_BREAK]')
    image, line_break = words.convert_tokens_to_ids(['[IMG]', '[IMG_BREAK]'])
    with_one_id = SimpleNamespace(tokenizer=words, image_token_id=image, image_token_ids=[image, line_break])
    with_list = SimpleNamespace(tokenizer=words, image_token_ids=[image], video_token_ids=[None])

    assert sizes.image_token_ids(with_one_id) == (image,)
    assert sizes.image_token_ids(with_list) == (image,)


def test_loss_tokens_of_packed_samples():
    """Training masks the label of the first token of the second document."""
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    sample = {'input_ids': ids, 'labels': ids, 'position_ids': positions}

    table = build_length_table([sample], small(), num_workers=0)

    assert table.loss_tokens.tolist() == [3]


def test_saved_table_is_readable_by_others(tmp_path):
    path = tmp_path / 'a.npz'
    umask = os.umask(0o022)
    try:
        empty_table().save(path)
    finally:
        os.umask(umask)
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def measure_and_count_reads(folder):
    """Returns the length table of 200 digits, and how many samples were read for it."""
    dataset = DigitsDataset(num_samples=200)
    getitem = DigitsDataset.__getitem__
    with mock.patch.object(DigitsDataset, '__getitem__', autospec=True, side_effect=getitem) as read:
        table = length_table(dataset, dataset.processor, folder=folder, num_workers=0)
    return table, read.call_count


def test_second_run_reads_for_fingerprint_only(tmp_path):
    """A dataset without `fingerprint()` is recognized by 64 of its samples, which are read for that."""
    first_table, first_reads = measure_and_count_reads(tmp_path)
    second_table, second_reads = measure_and_count_reads(tmp_path)

    assert first_reads == 200 + 64
    assert second_reads == 64
    assert_same_table(first_table, second_table)
    assert [path.suffix for path in tmp_path.iterdir()] == ['.npz']


def test_fingerprint_of_a_dataset_reads_nothing():
    dataset = DigitsDataset(num_samples=3)
    name = table_name(dataset, dataset.processor)
    dataset.fingerprint = lambda: 'of the dataset'
    with mock.patch.object(DigitsDataset, '__getitem__') as read:
        assert table_name(dataset, dataset.processor) != name
    assert not read.called


def test_attribute_that_is_no_method_is_ignored():
    """A dataset of a user may have an attribute `identity` of any kind."""
    plain = SimpleNamespace(fingerprint=lambda: 'a')
    with_attribute = SimpleNamespace(fingerprint=lambda: 'a', identity='of the dataset')

    assert identify_data(with_attribute) == identify_data(plain)


def test_identity_of_bytes_in_pieces():
    """A dataset of a user may yield the content of its files."""
    dataset = SimpleNamespace(identity=lambda: iter([b'a', b'bc']))

    identity = identify_data(dataset)

    digest = hashlib.sha256(b'abc').hexdigest()
    assert identity == digest[:32]


def test_name_with_a_pre_tokenizer_in_python():
    """The tokenizers library cannot write such a part to a file (RoFormer's)."""
    dataset = DigitsDataset(num_samples=3)
    processor = build_digits_processor()
    usual_name = table_name(dataset, processor)
    processor.tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(object())

    name = table_name(dataset, processor)
    same_name = table_name(dataset, processor)

    assert name == same_name
    assert name != usual_name


def test_name_changes_with_data_and_processor():
    dataset = DigitsDataset(num_samples=20)
    processor = build_digits_processor()
    name = table_name(dataset, processor)
    assert table_name(DigitsDataset(num_samples=20), build_digits_processor()) == name
    assert table_name(dataset, processor, patch_size=8) == name  # its own patch size
    with_other_template = build_digits_processor()
    with_other_template.chat_template += ' '
    with_new_token = build_digits_processor()
    with_new_token.tokenizer.add_tokens(['new'])
    with_other_end = build_digits_processor()
    with_other_end.tokenizer.eos_token = '<unk>'
    with_other_words = build_digits_processor()
    with_other_words.tokenizer.backend_tokenizer.normalizer = Lowercase()
    with_strict_token = build_digits_processor()
    with_strict_token.tokenizer.add_tokens([AddedToken('new', single_word=True)])
    processor.tokenizer(['a', 'b c'], padding=True, truncation=True, max_length=1)  # changes no later call
    assert table_name(dataset, processor) == name
    names = [
        name,
        table_name(dataset, processor, patch_size=4),
        table_name(DigitsDataset(num_samples=21), processor),
        table_name(DigitsDataset(num_samples=20, seed=1), processor),
        table_name(dataset, build_digits_processor(image_size=16, patch_size=8)),
        table_name(dataset, with_other_template),
        table_name(dataset, with_new_token),
        table_name(dataset, with_other_end),
        table_name(dataset, with_other_words),
        table_name(dataset, with_strict_token),
    ]
    assert len(set(names)) == len(names)


def test_older_versions_are_not_read(tmp_path, monkeypatch):
    dataset = DigitsDataset(num_samples=3)
    older_version = lengths.TABLE_VERSION - 1
    with monkeypatch.context() as older:
        older.setattr(lengths, 'TABLE_VERSION', older_version)
        older_name = table_name(dataset, dataset.processor)
    empty_table().save(tmp_path / f'{older_name}.npz')

    table = length_table(dataset, dataset.processor, folder=tmp_path)

    assert table.lengths.tolist() == lengths_of(dataset)


def test_saved_table_without_labels_is_refused(tmp_path):
    dataset = DigitsDataset(num_samples=3)
    name = table_name(dataset, dataset.processor)
    empty_table().save(tmp_path / f'{name}.npz')

    with pytest.raises(ValueError, match='labels to learn'):
        length_table(dataset, dataset.processor, folder=tmp_path, on_error='skip')


def test_unknown_on_error_is_refused(tmp_path):
    """A misspelled ``raise`` must not act as ``skip``, which only keeps bad samples in ``errors``."""
    dataset = DigitsDataset(num_samples=1)
    message = "`on_error` must be 'raise' or 'skip', got: 'rasie'"
    with pytest.raises(ValueError, match=message):
        length_table(dataset, dataset.processor, folder=tmp_path, on_error='rasie')
    with pytest.raises(ValueError, match=message):
        build_length_table(dataset, dataset.processor, on_error='rasie')


THREE_IDS = torch.tensor([[1, 2, 3]], dtype=torch.int32)


@pytest.mark.parametrize(
    'sample',
    [
        pytest.param({'input_ids': THREE_IDS}, id='no labels'),
        pytest.param({'labels': THREE_IDS}, id='no ids'),
        pytest.param('text', id='no mapping'),
    ],
)
def test_samples_without_keys_are_refused(sample):
    processor = build_digits_processor()

    with pytest.raises(ValueError, match='`dataset` must give samples with `input_ids` and `labels`'):
        build_length_table([sample], processor)


def test_attributes_of_a_users_dataset(tmp_path):
    """They may have the same names as the package's."""
    dataset = DigitsDataset(num_samples=3)
    expected = length_table(dataset, dataset.processor, folder=tmp_path)
    dataset.fingerprint = 'a text'
    dataset.measured = True

    table = length_table(dataset, dataset.processor, folder=tmp_path)

    assert_same_table(table, expected)


@pytest.mark.parametrize(
    'change',
    [
        pytest.param(torch.Tensor.tolist, id='lists'),
        pytest.param(torch.squeeze, id='one dimension'),
    ],
)
def test_samples_of_another_shape_are_refused(tmp_path, change):
    [sample] = DigitsDataset(num_samples=1)
    changed_sample = {'input_ids': change(sample['input_ids']), 'labels': change(sample['labels'])}
    processor = build_digits_processor()

    with pytest.raises(ValueError, match='`input_ids`'):
        length_table([changed_sample], processor, folder=tmp_path)


@pytest.mark.parametrize('content', [b'', b'PK', b'not a table', 'first half'])
def test_a_damaged_table_is_measured_again(tmp_path, caplog, content):
    dataset = DigitsDataset(num_samples=3)
    expected = length_table(dataset, dataset.processor, folder=tmp_path)
    [file] = tmp_path.glob('*.npz')
    if content == 'first half':
        whole_file = file.read_bytes()
        half = len(whole_file) // 2
        content = whole_file[:half]
    file.write_bytes(content)

    table = length_table(dataset, dataset.processor, folder=tmp_path)

    assert_same_table(table, expected)
    assert f'{file} is damaged' in caplog.text
    caplog.clear()
    length_table(dataset, dataset.processor, folder=tmp_path)
    assert not caplog.text


def test_stopped_iteration_is_named():
    """A loader would take it for the end of the dataset."""

    class Reader(DigitsDataset):
        def __getitem__(self, index):
            if index == 2:
                raise StopIteration
            return super().__getitem__(index)

    dataset = Reader(num_samples=3)

    with pytest.raises(RuntimeError, match='StopIteration for sample 2'):
        build_length_table(dataset, dataset.processor)


def test_user_without_a_home(monkeypatch):
    """A container may run as a user that the system does not know."""

    def unknown(user):
        raise KeyError(user)

    monkeypatch.setattr('pwd.getpwuid', unknown)
    for name in ('HOME', 'XDG_CACHE_HOME'):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder('lengths') == Path(tempfile.gettempdir(), '.cache', 'composer_tokacc', 'lengths')


def test_unwritable_folder_costs_a_warning(tmp_path, caplog):
    file = tmp_path / 'file'
    file.write_text('')
    dataset = DigitsDataset(num_samples=3)

    table = length_table(dataset, dataset.processor, folder=file / 'lengths')

    assert table.lengths.tolist() == lengths_of(dataset)
    assert '`loader.lengths_folder`' in caplog.text
