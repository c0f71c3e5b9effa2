# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the first batch does not show: later batches are padded, or have media, where the first has neither."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from composer.models import HuggingFaceModel

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.layout import PreSplitBatch
from tests.matrix.harness import kinds_of_steps, measure_steps, plain_gradients
from tests.matrix.native_models import NativeModel
from tests.matrix.subjects import SUBJECTS
from tests.support import family_models
from tests.support.family_media import TokenIds
from tests.support.sample_encoder import word_tokenizer
from tests.support.small_batches import text_batch
from tests.support.text import collate, text_rows
from tests.support.training import COMPOSERS_FLAG, GivenBatches, fit, loader, relative_error

UNEQUAL = [(4, 2), (12, 9), (7, 1), (3, 2), (9, 7)]
EQUAL = [(4, 2), (12, 2), (7, 2), (3, 2), (9, 2)]
LLAMA: dict[str, Any] = {
    'vocab_size': 64,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 2,
    'pad_token_id': 0,
}


def batch_of(shape, **options):
    return collate(text_rows(shape), **options)


MEDIA = ('pixel_values', 'pixel_values_videos', 'input_features')
TEXT = ['llama', 'gpt2', 'gpt_neo', 'opt', 'bloom', 'falcon_alibi', 'mamba', 'gemma2', 'bert']
WITH_MEDIA = ['llava', 'qwen2_vl', 'qwen3_vl', 'paligemma', 'gemma3', 'idefics3', 'mllama_mixed', 'qwen2_audio']


def check(outcomes, num_batches, *, packing=False):
    # Padded batches are refused by nothing here; a packed one may be, and ends the run.
    expected = ('exact', 'refused') if packing else ('exact',)
    assert all(outcome.kind in expected for outcome in outcomes), [str(outcome) for outcome in outcomes]
    assert len(outcomes) == num_batches or outcomes[-1].kind == 'refused'


@pytest.mark.slow
@pytest.mark.parametrize('packing', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize('sides', [('left', 'right'), ('right', 'left')], ids='-'.join)
@pytest.mark.parametrize('name', TEXT)
def test_rows_of_one_length_come_first(name, sides, packing):
    """Nothing is trimmed, and documents as long as each other leak least."""
    subject = SUBJECTS[name]
    rows = subject.rows(0)
    length = max(row['input_ids'].shape[1] for row in rows)
    same = [row for row in rows if row['input_ids'].shape[1] == length][:1] * 4
    same[0]['labels'][:, -1] = same[0]['input_ids'][:, -1]
    batches = [subject.collate(same, 0, side=sides[0])]
    batches += [subject.batch(seed, side=side) for seed, side in enumerate(sides * 2, start=1)]
    check(measure_steps(subject.model('large'), batches, 2, packing=packing), len(batches), packing=packing)


@pytest.mark.slow
@pytest.mark.parametrize('packing', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize('name', WITH_MEDIA)
def test_rows_without_media_come_first(name, packing):
    subject = SUBJECTS[name]
    rows = [row for seed in range(0, 12, 2) for row in subject.rows(seed)]
    text = [row for row in rows if not any(key in row for key in MEDIA) and (row['labels'][:, 1:] != -100).any()][:5]
    assert len(text) > 2
    batches = [subject.collate(text, 0, side='right')]
    batches += [subject.batch(seed, side=side) for seed, side in enumerate(('right', 'left', 'right'), start=1)]
    check(measure_steps(subject.model('large'), batches, 2, packing=packing), len(batches), packing=packing)


@pytest.mark.slow
@pytest.mark.parametrize('regroup', [True, False], ids=['regrouped', 'in order'])
@pytest.mark.parametrize('name', ['llama', 'mistral', 'gemma2', 'mpt', 'bloom', 'opt', 'falcon_alibi', 'mamba'])
def test_labels_behind_padding_come_later(name, regroup):
    """Such a label is predicted from padding, which trimming takes away; rows without one do not tell."""
    subject = SUBJECTS[name]
    first = subject.batch(0, side='left')
    for seed in range(1, 4):  # and sizes of microbatches
        rows = subject.rows(4 * seed)
        # The shorter rows: where they lie beside longer ones, no trimmed column takes the label itself away.
        lengths = sorted(row['input_ids'].shape[1] for row in rows)
        for row in rows:
            if row['input_ids'].shape[1] < lengths[len(lengths) // 2]:
                row['labels'][:, 0] = row['input_ids'][:, 0]
        batches = [first, subject.collate(rows, seed, side='left')]
        check(measure_steps(subject.model('large'), batches, 1 + seed % 3, regroup=regroup), len(batches))


# What the first batch hides.


@pytest.mark.parametrize(
    ('first', 'logits'),
    [(EQUAL, 'always'), (EQUAL, 'never'), ([(6, 4)], 'always'), ([(4, 1), (12, 1), (7, 1)], 'never')],
    ids=['equal', 'equal, no logits', 'one row', 'one label, no logits'],
)
def test_mean_of_row_means_is_refused(first, logits):
    batches = [batch_of(first), batch_of(UNEQUAL)]
    assert kinds_of_steps(NativeModel('per row', logits=logits), batches) == ['refused']
    assert kinds_of_steps(NativeModel('causal', logits=logits), batches) == ['exact', 'exact']


def large(prefix, **settings):
    """A model with large weights, so that positions matter."""
    config = getattr(transformers, f'{prefix}Config')(**LLAMA, num_attention_heads=2, num_key_value_heads=2, **settings)
    torch.manual_seed(0)
    model = getattr(transformers, f'{prefix}ForCausalLM')(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return HuggingFaceModel(model, shift_labels=True, use_logits=True)


def dynamic_rope():
    parameters = {'rope_type': 'dynamic', 'factor': 4.0, 'rope_theta': 100.0}
    return large('Llama', max_position_embeddings=10, rope_parameters=parameters)


def long_rope():
    positions = {'original_max_position_embeddings': 10}
    parameters = {'rope_type': 'longrope', 'rope_theta': 100.0, 'short_factor': [1.0] * 8, 'long_factor': [4.0] * 8}
    return large('Phi3', max_position_embeddings=64, **positions, rope_parameters={**parameters, **positions})


@pytest.mark.skipif(transformers.__version__.startswith('4.'), reason='names its parameters otherwise')
@pytest.mark.parametrize('options', [{}, {'packing': True}], ids=['padded', 'packed'])
@pytest.mark.parametrize('build', [dynamic_rope, long_rope])
def test_rotary_embedding_by_width(build, options):
    short, long = batch_of([(4, 2), (8, 5), (7, 3)]), batch_of([(4, 2), (30, 9), (7, 3), (3, 2)])
    kinds = kinds_of_steps(build(), [short, long, short], **options)
    assert kinds == (['exact', 'refused'] if options else ['exact'] * 3)


@pytest.mark.skipif(transformers.__version__.startswith('4.'), reason='names its parameters otherwise')
@pytest.mark.parametrize('first', [[(4, 2), (8, 5)], [(30, 9), (12, 3)]], ids=['short rows first', 'long rows first'])
def test_rotary_embedding_by_largest_position(first):
    """A short row has another embedding beside a long one than alone, and its padded width does not tell."""
    batches = [batch_of(first), batch_of([(4, 2), (30, 9), (7, 3), (3, 2)])]
    for batch in batches:
        batch['position_ids'] = (batch['attention_mask'].cumsum(dim=1) - 1).clamp(min=0)
    assert kinds_of_steps(long_rope(), batches) == ['exact', 'refused']


def scaled_by_column(scale: Callable[[torch.Tensor], torch.Tensor]) -> HuggingFaceModel:
    """A Llama that scales what stands in a column by a function of its number, whatever the padding before it."""
    model = SUBJECTS['llama'].model('large')

    def scaled(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * scale(torch.arange(output.shape[1]))[:, None]

    model.model.get_input_embeddings().register_forward_hook(scaled)
    return model


@pytest.mark.parametrize(
    'scale',
    [lambda columns: 1 + 0.5 * (columns // 16), lambda columns: (1 + columns / 2048) ** 0.03],
    ids=['from column 16 on, as Llama 4 does', 'hardly, in few columns, as Beam does'],
)
@pytest.mark.parametrize('options', [{}, {'packing': True}, {'regroup': False}], ids=['padded', 'packed', 'in order'])
def test_columns_matter_in_long_rows(scale, options):
    short, long = (batch_of(rows, side='left') for rows in (UNEQUAL, [(4, 2), (40, 9), (21, 3), (38, 12)]))
    kinds = kinds_of_steps(scaled_by_column(scale), [short, long, short, long], **options)
    assert kinds == ['exact'] * 4 if 'packing' not in options else kinds[-1] == 'refused'


@pytest.mark.parametrize('first', [0, 1], ids=['given first', 'absent first'])
def test_positions_that_only_some_batches_bring(first):
    """Where positions are given, trimming on the left moves none; where they are counted from column 0, it does."""
    absent = batch_of(UNEQUAL, side='left')
    given = {**absent, 'position_ids': (absent['attention_mask'].cumsum(dim=1) - 1).clamp(min=0)}
    batches = [given, absent, given, absent][first : first + 3]
    assert kinds_of_steps(SUBJECTS['gpt2'].model('large'), batches) == ['exact'] * 3


@pytest.mark.parametrize('positions', [12, 14, 64])
def test_padding_fits_encoder_positions(positions):
    """Behind more padding than there are positions for, a GPU would stop the process."""
    config = dict.fromkeys(('encoder_layers', 'decoder_layers', 'encoder_attention_heads'), 2)
    config |= {'decoder_attention_heads': 2, 'd_model': 32, 'encoder_ffn_dim': 48, 'decoder_ffn_dim': 48}
    config |= {'vocab_size': 64, 'dropout': 0.0, 'pad_token_id': 0, 'max_position_embeddings': positions}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**config))
    batch = batch_of(UNEQUAL, side='left')
    batch['labels'] = batch_of([(5, 5), (3, 2), (6, 4), (2, 2), (4, 1)])['labels']
    assert kinds_of_steps(HuggingFaceModel(model, use_logits=True), [batch]) == ['exact']


def test_left_padding_is_trimmed_by_width():
    short, long = (batch_of(rows, side='left') for rows in (UNEQUAL, [(4, 2), (40, 9), (21, 3), (38, 12)]))
    rules = []
    for batches in ([short], [short, long]):
        spec = token_data_spec(loader(*batches))
        duration = f'{len(batches)}ba'
        fit(SUBJECTS['llama'].model('large'), spec, max_duration=duration)
        rules.append(split_of(spec.dataloader).rules)
    assert [rule.left for rule in rules] == ['trim', 'trim']
    assert [rule.left_width for rule in rules] == [12, 40]


@pytest.mark.skipif(transformers.__version__.startswith('4.'), reason='not there yet')
def test_norm_behind_rotary_embedding():
    batches = [batch_of(UNEQUAL, side='left'), batch_of(UNEQUAL)]
    assert kinds_of_steps(large('HunYuanDenseV1', head_dim=16), batches) == ['exact', 'exact']


def test_flag_heeds_later_padding():
    """FNet mixes all positions of a row, padding too."""
    config = transformers.FNetConfig(**LLAMA)
    config.hidden_dropout_prob = 0.0
    torch.manual_seed(0)
    model = HuggingFaceModel(transformers.FNetForMaskedLM(config).train(), shift_labels=False, use_logits=True)
    batches = [batch_of([(9, 3), (9, 5), (9, 2)]), batch_of(UNEQUAL), batch_of(UNEQUAL, side='left')]
    kinds = kinds_of_steps(model, batches, model=model, algorithms=[], trainer_options=COMPOSERS_FLAG)
    assert kinds == ['exact'] * 3


# Media.


def with_images(name, *counts):
    """Rows of a family with so many images each, and a label."""
    subject, rows = SUBJECTS[name], []
    drawn = (subject.row(random.Random(seed)) for seed in range(200))
    for count in counts:
        rows.append(next(row for row in drawn if sum(row['num_images']) == count))
        rows[-1]['labels'][:, -2:] = rows[-1]['input_ids'][:, -2:]
    return rows


def changing_pixels(name, change):
    """A model whose pixels are changed in the forward."""
    model = SUBJECTS[name].model('large')

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        pixels = kwargs.get('pixel_values')
        return args, kwargs if pixels is None else {**kwargs, 'pixel_values': change(pixels)}

    model.model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def test_coupled_images_come_later():
    """HunYuan-VL numbers the images of a batch; where one row alone has any, none of it shows."""
    subject = SUBJECTS['llava']
    batches = [subject.collate(with_images('llava', *counts), 0, side='right') for counts in ((1, 0, 0), (1, 0, 2, 1))]
    assert kinds_of_steps(subject.model('large'), batches) == ['exact', 'exact']
    seeing = changing_pixels('llava', lambda pixels: pixels + 0.1 * pixels.mean(dim=0))
    assert kinds_of_steps(seeing, [subject.collate(with_images('llava', 0, 0, 0), 0, side='right'), *batches]) == [
        'exact',
        'exact',
        'refused',
    ]


def test_media_padded_by_microbatch():
    """GLM-ASR hears how far a sound is padded, which a loader of microbatches decides for each by itself."""
    subject = SUBJECTS['llava_next']
    rows = with_images('llava_next', 1, 1, 1, 1, 0, 1, 1)
    rows.sort(key=lambda row: row.get('pixel_values', row['labels']).shape[1])
    batch = PreSplitBatch([subject.collate(part, 0, side='right') for part in (rows[:3], rows[3:])], max_tokens=1000)
    assert len({one['pixel_values'].shape[1] for one in batch.microbatches}) == 2
    model = subject.model('large')
    recorder = fit(model, token_data_spec(GivenBatches([batch])), max_duration='1ba')
    assert relative_error(recorder.gradients, plain_gradients(model, batch)) < 1e-6
    hearing = changing_pixels('llava_next', lambda pixels: pixels + 0.3 * pixels.shape[1])
    with pytest.raises(RuntimeError, match='however far they are padded'):
        fit(hearing, token_data_spec(GivenBatches([batch])), max_duration='1ba')


@pytest.mark.parametrize('hole_first', [True, False], ids=['at first', 'later'])
def test_masked_hole_beside_images(hole_first):
    """Qwen-VL counts attended positions where a batch has images, and all columns where it has none."""
    subject = SUBJECTS['qwen2_vl']
    rows = with_images('qwen2_vl', 1, 0, 2, 0, 0, 1)
    whole = subject.collate(rows, 0, side='right')
    row = sorted((1, 3, 4), key=lambda row: int(whole['attention_mask'][row].sum()))[1]  # none of the extremes
    holed = {**whole, 'attention_mask': whole['attention_mask'].clone()}
    holed['attention_mask'][row, 2] = 0
    batches = [holed, whole] if hole_first else [whole, holed]
    assert kinds_of_steps(subject.model('large'), batches) == ['exact', 'exact']


def test_text_with_frozen_language_model():
    """Only the projector is trained, as LLaVA begins: no gradient comes of a microbatch of text."""
    subject = SUBJECTS['llava']
    model = subject.model('large')
    for name, parameter in model.named_parameters():
        parameter.requires_grad_('projector' in name)
    rows = with_images('llava', 1, 0, 0, 2)
    assert measure_steps(model, [subject.collate(rows, 0, side='right')], 1)[0].kind == 'exact'


def test_text_before_the_first_image():
    """Mllama: a text row must not see an image where no row of its step has one."""
    subject = SUBJECTS['mllama_mixed']
    rows = [subject.row(random.Random(seed)) for seed in range(12)]
    text, media = [[row for row in rows if ('pixel_values' in row) == has_media][:3] for has_media in (False, True)]
    for row in text + media:
        row['labels'][:, -2:] = row['input_ids'][:, -2:]
    batches = [subject.collate(batch, 0, side='right') for batch in (text, [*text[:2], *media[:2]])]
    assert kinds_of_steps(subject.model('large'), batches) == ['exact', 'exact']


def test_model_that_needs_an_image():
    """BLIP-2's forward insists on images, so a row without one is no batch by itself."""
    case = family_models.MODELS['blip2'](TokenIds(word_tokenizer('<image>')))
    layout = BatchLayout.for_model(case)
    text = text_batch([7, 4, 3])
    text['input_ids'] += 10
    marks = torch.full((1, case.config.num_query_tokens), layout.image_token_id)
    ids = torch.cat([marks, text['input_ids'][:1]], dim=1)
    labels = torch.cat([torch.full_like(marks, -100), text['input_ids'][:1]], dim=1)
    image = layout.with_media({'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels})
    model = HuggingFaceModel(case, shift_labels=True, use_logits=True)
    assert kinds_of_steps(model, [layout.concat([image, text])]) == ['exact']
