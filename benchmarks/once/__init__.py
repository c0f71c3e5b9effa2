# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Benchmarks that ran once, for a decision or for a sentence of the docs."""
