# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks that the gradient of a run is exact, and refuses a run before its optimizer moves if it is not.

A cut says how the rows of a batch become microbatches: which rows share one, and how they are trimmed or packed.

On the first batch, ``row_ranges`` chooses a few rows, ``probe`` runs the model on them, ``first_batch`` finds the loss
rule and ``comparison`` finds a cut that keeps the gradient of every row. In every step, ``step`` measures some tokens
and compares all counts. ``logits`` reads the weight of a token off a gradient for both, and for ``token_weights``,
which measures any trainer.
"""
