"""The end of the process when a thread is in something that cannot be interrupted, such as a compilation.

An interpreter that ends under such a thread may crash, and waiting for it may take a minute.
"""

from __future__ import annotations

import os
import sys
import threading

_left_running: list[threading.Thread] = []


def leave_running(thread: threading.Thread) -> None:
    """Nobody waits for `thread`; `end_process` has to be called with the exit code."""
    _left_running.append(thread)


def end_process(code: int) -> None:
    """End the process now if a thread was left running; otherwise return, and it ends as usual."""
    if any(thread.is_alive() for thread in _left_running):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
