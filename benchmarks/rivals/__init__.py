# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Compares trainers by their own public interfaces, on the same samples, first weights, memory and machine."""
