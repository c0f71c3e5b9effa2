# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Exact token accumulation and padding-aware microbatching for MosaicML Composer."""

__version__ = '0.1.0'
