from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lightning_llmscale.cli.main import main
from tests.unit.data.archives import write_numbered


def test_pack_index_verify_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"body": f"text {n}"}) + "\n" for n in range(12)))
    pattern = str(tmp_path / "out/%03d.tar")
    assert main(["data", "pack", str(source), "--out", pattern, "--text", "body", "--samples-per-shard", "5"]) == 0
    assert "3 shards" in capsys.readouterr().out
    shards = str(tmp_path / "out/*.tar")
    assert main(["data", "index", shards]) == 0
    assert "12 samples in 3 shards are indexed" in capsys.readouterr().out
    assert main(["data", "verify", shards, "--decode"]) == 0
    assert "12 samples in 3 shards, 0 problems" in capsys.readouterr().out
    assert main(["data", "inspect", shards, "--tokenizer", "bytes", "--plot", str(tmp_path / "lengths.png")]) == 0
    assert "tokens a document, largest" in capsys.readouterr().out
    assert (tmp_path / "lengths.png").exists()


def test_verify_fails_on_a_damaged_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = write_numbered(tmp_path, [3, 3])
    os.truncate(shards[1], 2000)
    assert main(["data", "verify", str(tmp_path)]) == 1
    assert "0001.tar is truncated" in capsys.readouterr().out


def test_a_pattern_without_shards_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", str(tmp_path / "*.tar")]) != 0
    error = capsys.readouterr().err
    assert "No shard at" in error
    assert "Traceback" not in error
