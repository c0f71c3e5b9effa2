# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Ends the demo: the trained model answers held-out samples, and a picture of the run is drawn."""

from __future__ import annotations

from composer_tokacc.programs.answers import Answer, answer_eval_samples
from composer_tokacc.programs.run_result import FinishedRun

__all__ = ['answer_and_draw']

# The metric of each curve of the picture.
_CURVES = {
    'loss': 'loss/train/total',
    'eval_loss': 'metrics/eval/LanguageCrossEntropy',
    'padding': 'token_monitor/padding_ratio',
    'stock_padding': 'token_monitor/device_batch_padding_ratio',
}


def answer_and_draw(
    run: FinishedRun,
    *,
    num_samples: int = 0,
    max_new_tokens: int = 64,
    picture: bool = False,
) -> list[tuple[str, str]]:
    """Adds ``answers`` to the result and draws ``result.png``. yamls/digits.yaml names it under ``report.name``.

    Args:
        run: The finished run.
        num_samples: Held-out samples that the trained model answers.
        max_new_tokens: Most tokens of an answer.
        picture: Whether to draw the picture, which needs matplotlib.

    Returns:
        Lines for the summary: a description and a figure each.
    """
    answers: list[Answer] = []
    # This function runs only on rank 0, which cannot run a sharded model.
    if run.eval_dataset is not None and not run.is_sharded:
        answers = answer_eval_samples(
            run.model,
            run.eval_dataset,
            run.processor,
            num_samples=num_samples,
            max_new_tokens=max_new_tokens,
        )
    run.result['answers'] = [answer.as_json() for answer in answers]
    lines = []
    if answers:
        num_right = sum(answer.is_right for answer in answers)
        lines.append(('held-out answers generated right', f'{num_right} of {len(answers)}'))
    if picture:
        try:
            from examples.digits.picture import draw_result

            curves = {key: run.series(metric) for key, metric in _CURVES.items()}
            draw_result(run.folder / 'result.png', curves, answers)
        except ImportError as error:
            lines.append(('no picture', str(error)))
    return lines
