# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Run the examples in the repository, or in the folder to which `python -m composer_tokacc.examples` copies them."""
