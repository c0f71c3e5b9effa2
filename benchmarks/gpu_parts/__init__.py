# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The parts of `benchmarks.gpu`, a claim each. Every one has `run(scale, store)`."""
