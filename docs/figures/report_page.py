# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Draws the report page of a run in a headless browser: docs/figures/report.png.

    python docs/figures/report_page.py runs/digits/report.html

Needs Chromium (``apt-get install chromium``).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WINDOW = '1400,2330'  # width and height of the page, in pixels
SCALE = 0.6

if __name__ == '__main__':
    page = Path(sys.argv[1]).resolve()
    picture = Path(__file__).with_name('report.png')
    command = [
        'chromium',
        '--headless',
        '--no-sandbox',
        '--disable-gpu',
        '--hide-scrollbars',
        f'--window-size={WINDOW}',
        f'--force-device-scale-factor={SCALE}',
        f'--screenshot={picture}',
        page.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True)
