# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The errors by which this package refuses an input, a model or a step.

The programs print such an error in one line. Any other error keeps its traceback: it is a bug of this package, or a
``TypeError`` for an argument of a wrong type.
Each class is also a ``ValueError`` or a ``RuntimeError``, so that callers need not know it.
"""

from __future__ import annotations


class RefusalError(Exception):
    """Base class of all refusals. The message says what is wrong, shows the value, and says what to do."""


class InvalidInputError(RefusalError, ValueError):
    """An argument, a config, a batch or a sample is not valid."""


class NotExactError(RefusalError, RuntimeError):
    """The run or the step cannot be exact as it is set up, or was found not to be exact."""
