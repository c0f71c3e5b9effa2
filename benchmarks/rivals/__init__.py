# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The packages people train with, by their own public interfaces, on the same samples, weights, memory and machine."""
