"""A process that has children write a checkpoint, each killed a moment later than the one before.

A moment is a call that reaches the disk. For every child it prints, as a line of JSON, whether it
was killed, the step that a run would go on from then, and the same after one more checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.engine import checkpoint
from runtime.engine.resume import find_start
from tests.unit.test_checkpoint_files import CONFIG, part_copy, write

MOST = 200
PLACES: list[tuple[Any, str]] = [
    (os, "fsync"), (os, "open"), (os, "rename"), (os, "unlink"), (os, "rmdir"),
    (Path, "mkdir"), (Path, "open"), (Path, "replace"), (Path, "unlink"), (Path, "stat"),
    (Path, "glob"), (checkpoint, "save_file"), (checkpoint.shutil, "rmtree"),
]  # fmt: skip


class Countdown:
    """Lets so many calls through and kills this process at the next."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call


def main(folder: Path, keep: int) -> None:
    copy = part_copy()
    for moment in range(MOST):
        runs = folder / str(moment)
        write(runs, 10, copy, keep)
        child = os.fork()
        if child == 0:
            countdown = Countdown(moment)
            for owner, name in PLACES:
                setattr(owner, name, countdown.around(getattr(owner, name)))
            write(runs, 20, copy, keep)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        step = find_start(CONFIG, runs)[0].step
        write(runs, 30, copy, keep)
        told = {
            "killed": os.WIFSIGNALED(status),
            "step": step,
            "next_step": find_start(CONFIG, runs)[0].step,
        }
        sys.stdout.write(json.dumps(told) + "\n")
        if not told["killed"]:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
