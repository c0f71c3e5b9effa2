# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0
