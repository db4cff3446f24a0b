"""Which checkpoint a run goes back to when its state is lost everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.engine.checkpoint import MANIFEST, PartCopy
from runtime.engine.resume import find_fallback
from runtime.plan.manifest import Start
from tests.unit.test_checkpoint_files import copy, write

__all__ = ["copy"]


def damage(folder: Path) -> None:
    (part,) = (file for file in folder.iterdir() if file.name != MANIFEST)
    part.write_bytes(part.read_bytes()[:-1])


def test_the_newest_that_can_be_trusted(tmp_path: Path, copy: PartCopy) -> None:
    run = tmp_path / "r1" / "checkpoint"
    assert find_fallback(run, Start()) == (None, "")
    folders = [write(tmp_path, step, copy, keep=3) for step in (10, 20, 30)]
    assert find_fallback(run, Start()) == (Start(checkpoint=str(folders[2]), run="r1", step=30), "")
    damage(folders[2])
    start, word = find_fallback(run, Start())
    assert start == Start(checkpoint=str(folders[1]), run="r1", step=20)
    assert str(folders[2]) in word
    assert "is damaged" in word


@pytest.mark.parametrize("with_own", [False, True])
def test_the_one_the_run_began_at_comes_last(
    tmp_path: Path, copy: PartCopy, with_own: bool
) -> None:
    began_at = write(tmp_path / "earlier", 40, copy)
    run = tmp_path / "r1" / "checkpoint"
    if with_own:
        damage(write(tmp_path, 50, copy))
    start, word = find_fallback(run, Start(checkpoint=str(began_at), run="earlier", step=40))
    assert start is not None
    assert (start.checkpoint, start.step) == (str(began_at), 40)
    assert bool(word) == with_own
    damage(began_at)
    assert find_fallback(run, start)[0] is None
