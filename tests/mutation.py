"""Do the proofs notice? Injects every defect in turn and lists what caught it.

    python -m tests.mutation            all defects, about two minutes
    python -m tests.mutation WORDS      those whose name contains WORDS

Exits with 1 if a defect gets past every proof.
"""

from __future__ import annotations

import sys
import time

import torch

from tests.support.defects import DEFECTS
from tests.support.engine_proofs import caught_by


def main(words: str) -> int:
    torch.set_num_threads(1)
    assert not caught_by(), "the proofs fail without any defect"
    survived = 0
    for defect in DEFECTS:
        if words not in defect.name:
            continue
        began = time.monotonic()
        with defect.injected():
            caught = caught_by()
        survived += not caught
        took_s = time.monotonic() - began
        sys.stdout.write(f"{defect.name:46} {took_s:5.1f} s  {caught or 'SURVIVED'}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{survived} survived\n" if survived else "all caught\n")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
