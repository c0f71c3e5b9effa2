# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""token_data_spec: exact counters, and the split that cuts, trims and packs microbatches."""

from composer_tokacc.data_spec.token_data_spec import token_data_spec

__all__ = ['token_data_spec']
