"""The parts of the demo: the corpus and its entropy, the model, the curves read back from Lightning's log."""

from __future__ import annotations

import math
import tarfile
from pathlib import Path

import pytest
import torch

from lightning_llmscale.cli.demo.corpus import (
    is_validation,
    order0_entropy,
    pack_standard_library,
    standard_library_sources,
)
from lightning_llmscale.cli.demo.model import ByteGPT
from lightning_llmscale.cli.demo.report import Curves, largest_difference, plot, read_curves, text_chart


@pytest.mark.parametrize(
    ("texts", "bits"),
    [
        ([], 0.0),
        ([b"aaaa"], 0.0),
        ([b"ab"], 1.0),
        ([b"a", b"bcd"], 2.0),
        ([bytes(range(256))], 8.0),
        ([b"aaab"], 0.811278),
    ],
)
def test_entropy_has_shannons_value(texts: list[bytes], bits: float) -> None:
    assert order0_entropy(texts) == pytest.approx(bits, abs=1e-6)


def test_the_corpus_holds_each_source_once_and_is_reused_only_when_complete(tmp_path: Path) -> None:
    corpus = pack_standard_library(tmp_path)
    sources = standard_library_sources()
    assert (corpus.files, corpus.train_bytes > 4_000_000, corpus.val_bytes > 10_000) == (len(sources), True, True)
    held_out = [path for name, path in sources.items() if is_validation(name)]
    assert texts(tmp_path, "val") == sorted(path.read_bytes() for path in held_out)
    assert len(texts(tmp_path, "train")) == len(sources) - len(held_out)

    shards = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.tar")}
    assert pack_standard_library(tmp_path) == corpus
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.tar")} == shards

    contents = {path: path.read_bytes() for path in shards}
    (tmp_path / "corpus.json").unlink()  # as if the first run had been killed
    next(iter(shards)).unlink()
    assert pack_standard_library(tmp_path) == corpus
    assert {path: path.read_bytes() for path in tmp_path.glob("*.tar")} == contents


def texts(folder: Path, split: str) -> list[bytes]:
    found = []
    for path in folder.glob(f"{split}-*.tar"):
        with tarfile.open(path) as archive:
            found += [archive.extractfile(member).read() for member in archive]  # type: ignore[union-attr]
    return sorted(found)


def test_the_model_starts_at_the_entropy_of_a_uniform_guess_and_sees_no_future() -> None:
    torch.manual_seed(0)
    model = ByteGPT(width=32, depth=2, heads=2, seq_len=16)
    tokens = torch.randint(0, 257, (4, 17))
    loss = model.loss({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
    assert loss.item() == pytest.approx(math.log(257), rel=0.02)

    changed = tokens[:, :-1].clone()
    changed[:, 10:] = 0
    torch.testing.assert_close(model(changed)[:, :10], model(tokens[:, :-1])[:, :10])


def test_a_sample_is_reproducible_and_longer_than_the_context() -> None:
    model = ByteGPT(width=16, depth=1, heads=2, seq_len=8)
    first = model.generate("def ", 20, seed=3)
    assert first.startswith("def ")
    assert model.generate("def ", 20, seed=3) == first


METRICS = """\
epoch,step,train/items_per_sec,train_loss,val_loss
0,0,,2.0794415,
0,1,300.0,1.3862944,
0,1,,,0.6931472
0,2,100.0,0.6931472,
0,2,200.0,,
"""


def test_curves_are_bits_per_byte_and_the_median_speed(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(METRICS)
    curves = read_curves(tmp_path / "metrics.csv")
    assert curves.train == pytest.approx({0: 3.0, 1: 2.0, 2: 1.0}, abs=1e-6)
    assert curves.val == pytest.approx({1: 1.0}, abs=1e-6)
    assert curves.tokens_per_second == 200.0


def test_curves_are_compared_over_the_first_common_steps() -> None:
    left = Curves(train={0: 4.0, 1: 2.0, 2: 2.0, 3: 1.0})
    right = Curves(train={1: 2.0, 2: 2.1, 3: 9.0})
    assert largest_difference(left, right, first_steps=1) == (0.0, 1)
    assert largest_difference(left, right, first_steps=2) == (pytest.approx(0.05), 2)
    assert largest_difference(left, Curves(), first_steps=2) == (0.0, 0)


def test_the_text_chart_falls_from_the_top_left_to_the_bottom_right() -> None:
    chart = text_chart({step: 8.0 - step for step in range(7)}, entropy=4.0, columns=7, rows=7).splitlines()
    assert [line.index("*") for line in chart[:7]] == sorted(line.index("*") for line in chart[:7])
    assert chart[0].strip().startswith("8.00")
    assert "entropy 4.00" in chart[-1]
    assert text_chart({}, 4.0) == "(no losses were logged)"


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot(Curves(train={0: 8.0, 1: 4.0}, val={1: 4.5}), 4.7, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
