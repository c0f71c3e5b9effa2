# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The errors that this package raises if it refuses an input, a model or a step.

The programs print such an error in one line. They print any other error with its traceback, because it is a bug of this
package, or a ``TypeError`` for an argument of a wrong type. Each class is also a ``ValueError`` or a ``RuntimeError``,
so that callers can catch it without an import from here.
"""

from __future__ import annotations


class RefusalError(Exception):
    """Base class of all refusals. A message names the fault, shows the value, and tells the user what to do."""


class InvalidInputError(RefusalError, ValueError):
    """An argument, a config, a batch or a sample is not valid."""


class NotExactError(RefusalError, RuntimeError):
    """The run or the step cannot be exact as it is set up, or was found not to be exact."""
