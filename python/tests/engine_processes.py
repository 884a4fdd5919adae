# SPDX-License-Identifier: Apache-2.0
"""Engines of the tests of whole engines, each in a process of its own."""

import subprocess
import time


def wait_all(processes, seconds):
    """Until each has ended, for at most so many seconds together; what is left then is killed."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(timeout=max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
