# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How long every sample of a dataset is, measured once."""

from composer_tokacc.lengths.table import LengthTable, build_length_table, fingerprint, image_token_ids, length_table

__all__ = ['LengthTable', 'build_length_table', 'fingerprint', 'image_token_ids', 'length_table']
