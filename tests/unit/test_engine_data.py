"""The text: the same samples on every machine, and clear words when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.config import TrainConfig
from runtime.engine.data import Text
from runtime.engine.optimizer import clip_factor, learning_rate
from runtime.errors import UserError


def test_a_sample_depends_on_seed_and_index_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    train = TrainConfig(text=str(text), seq_len=16, seed=3)
    whole = Text(train).samples(0, 32)
    assert whole.shape == (32, 17)
    assert torch.equal(whole[5:9], Text(train).samples(5, 9))
    other = Text(TrainConfig(text=str(text), seq_len=16, seed=4)).samples(0, 32)
    assert not torch.equal(whole, other)
    # Samples are windows of the text.
    assert torch.equal((whole[:, 1:] - whole[:, :-1]) % 256, torch.ones(32, 16, dtype=torch.int64))


def test_a_folder_is_read_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"bbbb")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_bytes(b"zz")
    (tmp_path / ".hidden").write_bytes(b"hh")
    (tmp_path / "binary").write_bytes(b"\0\1")
    text = Text(TrainConfig(text=str(tmp_path), seq_len=5))
    assert bytes(text.samples(0, 1)[0].tolist()) == b"bbbbzz"


def test_the_standard_library_is_the_default() -> None:
    first, again = Text(TrainConfig()), Text(TrainConfig())
    assert first.checksum == again.checksum
    assert first.samples(0, 2).shape == (2, 65)


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read"), (b"short", "has 5 bytes")])
def test_a_text_that_will_not_do(tmp_path: Path, content: bytes | None, said: str) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(UserError, match=said):
        Text(TrainConfig(text=str(text)))


def test_warmup_and_clipping() -> None:
    train = TrainConfig(lr=1.0, warmup_steps=4, clip_norm=2.0)
    assert [learning_rate(train, step) for step in (0, 3, 4, 100)] == [0.25, 1.0, 1.0, 1.0]
    assert learning_rate(TrainConfig(lr=1.0, warmup_steps=0), 0) == 1.0
    assert clip_factor(train, 1.0) == 1.0
    assert clip_factor(train, 8.0) == pytest.approx(0.25)


def test_the_learning_rate_comes_down_along_a_cosine_of_tokens() -> None:
    train = TrainConfig(
        lr=1.0, warmup_steps=2, global_batch=4, seq_len=8, decay_tokens=32 * 10, min_lr=0.2
    )
    rates = [learning_rate(train, step) for step in (0, 1, 2, 6, 10, 99)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    # The same tokens in batches half as large: the same rate.
    halved = TrainConfig(
        lr=1.0, warmup_steps=4, global_batch=2, seq_len=8, decay_tokens=32 * 10, min_lr=0.2
    )
    assert learning_rate(halved, 12) == pytest.approx(0.6)
