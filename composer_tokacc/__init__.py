# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Token-exact gradient accumulation and padding-free microbatches for the MosaicML Composer trainer."""

__version__ = '0.1.0'
