# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Hugging Face models inside Composer."""

from composer_tokacc.models.build import build_model, build_transformers_model, freeze_parameters, transformer_blocks

__all__ = ['build_model', 'build_transformers_model', 'freeze_parameters', 'transformer_blocks']
