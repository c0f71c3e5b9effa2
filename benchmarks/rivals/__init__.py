# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The packages people train with, each by its own public interface, on the same samples, weights, memory and machine."""
