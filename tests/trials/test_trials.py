# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Inputs as users give them: each works, or is refused in one line that names what is wrong.

A new input is a line in ``configs``, ``records``, ``programs`` or ``python``. Who fixes one of :data:`OPEN` takes it
out of there, or its test fails.
"""

from __future__ import annotations

import pytest

from tests.trials.configs import CONFIG_TRIALS
from tests.trials.outcomes import WORKS, Trial
from tests.trials.programs import PROGRAM_TRIALS
from tests.trials.python import PYTHON_TRIALS
from tests.trials.records import RECORD_TRIALS

TRIALS = [*CONFIG_TRIALS, *RECORD_TRIALS, *PROGRAM_TRIALS, *PYTHON_TRIALS]
NOT_RUN = {
    'a sound of eight channels': 'ends the process',
    'a loader of nothing': 'hangs',
    'a pipe as the YAML file': 'hangs',
    'export of a pipe': 'hangs',
    'size of lengths from a pipe': 'hangs',
}
"""Open, too, and never tried until they are fixed."""
OPEN = {
    'a PNG as a video',
    'a TIFF of many pages',
    'a blank answer',
    'a dangling link under skip',
    'a data spec in a data spec',
    'a layer of the vision encoder that is not there',
    'a looping link under skip',
    'a loss of samples alone',
    'a mask of another width',
    'a number of five thousand digits',
    'a playlist of a file elsewhere',
    'a playlist that climbs',
    'a second key conversations',
    'a sound of one value',
    'an EPS, which calls a program',
    'an animated GIF as a picture',
    'an animated PNG as a picture',
    'an animated WebP as a picture',
    'an attention that is not there',
    'an empty answer',
    'clipping threshold below 0',
    'clipping threshold of 0',
    'clipping threshold that is no number',
    'control tokens in an answer',
    'dataset that is a module',
    'duration in seconds',
    'duration in tokens',
    'duration null',
    'early stopping by a metric as it is logged',
    'end of the schedule below 0',
    'export of NaN weights',
    'export of a file outside of the target',
    'export of a pickle that runs code',
    'export without the model',
    'fewer checkpoints kept than none',
    'freeze as one word',
    'half a GIF',
    'half a WAV',
    'half a transport stream',
    'half an Ogg Opus',
    'hidden size of 0',
    'ids of one dimension',
    'ids that are floats',
    'image of no side',
    'key of a processor misspelt',
    'labels of another width',
    'layers below 0',
    'learning rate without end',
    'longest sample of 0',
    'on_error of another word',
    'one beta',
    'pixels below 0',
    'precision of another name',
    'rank of an adapter above every width',
    'report that is a command',
    'resume from a Hugging Face folder',
    'resume from a folder',
    'resume from a pickle that runs code',
    'resume from a picture',
    'resume from a text',
    'resume from half a checkpoint',
    'resume without the state of the optimizer',
    'size into a folder that cannot be made',
    'size of lengths of at most 0',
    'size of more image tokens than tokens',
    'size of more loss tokens than tokens',
    'size of no lengths',
    'size of two columns of tokens',
    'tensor parallel of nothing',
    'the algorithm twice',
    'token_data_spec twice',
    'verify of no rows',
    'verify of rows below 0',
    'verify with a tolerance below 0',
    'verify with a tolerance that is no number',
    'vocabulary of no words',
    'warm-up longer than the run',
    'weight decay without end',
    'width multiple of a thousand million',
}
"""What is still wrong: accepted in silence, a traceback, or a line that names something else."""
SLOW = ('size of', 'size into', 'verify with')
"""Those that go through to the end as long as they are open."""


def _param(trial: Trial) -> object:
    marks = []
    if trial.name in NOT_RUN:
        marks.append(pytest.mark.xfail(run=False, reason=NOT_RUN[trial.name]))
    elif trial.name in OPEN:
        marks.append(pytest.mark.xfail(strict=True, reason='open'))
        marks += [pytest.mark.slow] * trial.name.startswith(SLOW)
    return pytest.param(trial, marks=marks, id=trial.name)


@pytest.mark.parametrize('trial', map(_param, TRIALS))
def test_an_input_works_or_is_refused_in_one_line(trial, tmp_path):
    line = trial.run(trial.given, tmp_path)
    if trial.expected == WORKS:
        assert line == WORKS
    else:
        assert trial.expected in line
        assert '\n' not in line.strip()


def test_names_are_no_name_twice_and_what_is_open_is_there():
    names = [trial.name for trial in TRIALS]
    assert len(names) == len(set(names))
    assert OPEN | NOT_RUN.keys() <= set(names)
