# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the programs are made of: from a checked config to model, data, Trainer and report."""
