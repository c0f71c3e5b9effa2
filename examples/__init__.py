# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs from the root of the repository, or where `python -m composer_tokacc.examples` has put them."""
