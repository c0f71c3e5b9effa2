# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What only a GPU can show, a claim a module with `run(scale, store)`; `python -m benchmarks.gpu` runs them all."""
