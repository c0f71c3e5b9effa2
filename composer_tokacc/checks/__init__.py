# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What is measured of a model and its loss, and refused: at the logits, on the first batch, in every step."""
