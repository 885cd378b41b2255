"""An engine whose steps take long enough for a test to act between them."""

from __future__ import annotations

import time
from typing import Any


def slow_down(engine: Any) -> None:
    """Steps of 20 ms more: requests of 200 tokens live for seconds, on whatever machine."""
    execute = engine.worker.execute

    def slowly(plan: Any) -> Any:
        time.sleep(0.02)
        return execute(plan)

    engine.worker.execute = slowly
