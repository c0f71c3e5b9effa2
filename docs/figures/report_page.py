# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Looks at the page of a run in a headless browser: docs/figures/report.png.

    python docs/figures/report_page.py runs/digits/report.html

Needs Chromium (``apt-get install chromium``).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SIZE, SCALE = (1400, 2330), 0.6

if __name__ == '__main__':
    page = Path(sys.argv[1]).resolve()
    command = ['chromium', '--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars']
    command += [f'--window-size={SIZE[0]},{SIZE[1]}', f'--force-device-scale-factor={SCALE}']
    picture = Path(__file__).with_name('report.png')
    subprocess.run([*command, f'--screenshot={picture}', page.as_uri()], check=True, capture_output=True)
