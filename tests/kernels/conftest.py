"""Makes the helpers here importable, and keeps the interpreted tests out of ordinary runs.

TRITON_INTERPRET is read when Triton-lang is imported and when a kernel is decorated, and other tests of the
same run may already have imported it; so `test_triton.py` runs `interpreted/` in a process of its own.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["interpreted"]
