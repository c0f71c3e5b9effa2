# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The end of the demo: held-out samples answered by real generation, and the picture of the run."""

from __future__ import annotations

from composer_tokacc.programs.answers import Answer, answer_eval_samples
from composer_tokacc.programs.run_result import FinishedRun

__all__ = ['answer_and_draw']

_CURVES = {
    'loss': 'loss/train/total',
    'eval_loss': 'metrics/eval/LanguageCrossEntropy',
    'padding': 'token_monitor/padding_ratio',
    'stock_padding': 'token_monitor/device_batch_padding_ratio',
}


def answer_and_draw(
    run: FinishedRun, *, num_samples: int = 0, max_new_tokens: int = 64, picture: bool = False
) -> list[tuple[str, str]]:
    """Adds ``answers`` to the result and draws ``result.png``: the ``report.name`` of yamls/digits.yaml.

    Args:
        run: What has been trained.
        num_samples: Held-out samples that the trained model answers.
        max_new_tokens: Longest such answer.
        picture: Draw the picture; needs matplotlib.

    Returns:
        Lines of the summary.
    """
    answers: list[Answer] = []
    # A sharded model cannot generate on one rank alone.
    if run.eval_dataset is not None and not run.is_sharded:
        answers = answer_eval_samples(
            run.model, run.eval_dataset, run.processor, num_samples=num_samples, max_new_tokens=max_new_tokens
        )
    run.result['answers'] = [answer.as_json() for answer in answers]
    lines = []
    if answers:
        num_right = sum(answer.is_right for answer in answers)
        lines.append(('held-out answers generated right', f'{num_right} of {len(answers)}'))
    if picture:
        try:
            from examples.digits.picture import draw_result

            draw_result(run.folder / 'result.png', {key: run.series(name) for key, name in _CURVES.items()}, answers)
        except ImportError as error:
            lines.append(('no picture', str(error)))
    return lines
