"""A mistake on the command line or in the YAML file ends in one sentence, exit code 2, before any process starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.cli.runs import MODULE, command

RING = "lightning_llmscale.RingAllReduceStrategy"

ON_COMMAND_LINE = {
    "misspelt command": (["fitt"], ["'fitt'", "did you mean 'fit'", "predict"]),
    "misspelt option": (["--modle=x"], ["'modle'", "did you mean 'model'"]),
    "abbreviated option": (["--trainer.max_step=3"], ["'trainer.max_step'", "did you mean 'trainer.max_steps'"]),
    "wrong type": (["--trainer.max_steps=many"], ["trainer.max_steps='many'", "give int"]),
    "wrong choice": (["--trainer.precision=bf17"], ["'bf17'", "did you mean 'bf16'", "bf16-mixed"]),
    "misspelt class": ([f"--model={MODULE}s"], ["'Regressions'", "did you mean 'Regression'"]),
    "missing module": (["--model=no_such_package.Model"], ["no module 'no_such_package'", "check the spelling"]),
    "class without module": (["--model=Nothing"], ["no class is named 'Nothing'", "package.module.ClassName"]),
    "no model": (["--model=null"], ["--model is missing"]),
    "no file": (["--config=absent.yaml"], ["absent.yaml", "--config"]),
    "misspelt strategy": (["--trainer.strategy=ring_allredcue"], ["'ring_allredcue'", "did you mean 'ring_allreduce'"]),
    "misspelt strategy class": (
        ["--trainer.strategy=RingAlReduceStrategy"],
        ["'RingAlReduceStrategy'", "did you mean 'RingAllReduceStrategy'"],
    ),
    "misspelt strategy path": (
        ["--trainer.strategy=lightning_llmscale.RingAlReduceStrategy"],
        ["'RingAlReduceStrategy'", "did you mean 'RingAllReduceStrategy'"],
    ),
    "not a strategy": (
        ["--trainer.strategy=lightning.pytorch.Trainer"],
        ["lightning.pytorch.Trainer", "not a strategy"],
    ),
    "misspelt strategy option": (
        [f"--trainer.strategy={RING}", "--trainer.strategy.bucket_mb=4"],
        ["'bucket_mb'", "did you mean 'bucket_cap_mb'", "peer_timeout"],
    ),
    "wrong strategy option": (
        [f"--trainer.strategy={RING}", "--trainer.strategy.algorithm=rings"],
        ["algorithm='rings'", "did you mean 'ring'", "shared_memory"],
    ),
    "impossible strategy option": (
        [f"--trainer.strategy={RING}", "--trainer.strategy.peer_timeout=-1"],
        ["peer_timeout=-1"],
    ),
    "options of a short name": (
        ["--trainer.strategy=ring_allreduce", "--trainer.strategy.bucket_cap_mb=4"],
        ["'ring_allreduce'", "takes no options", "class path"],
    ),
    "no devices": (["--trainer.devices=0"], ["devices='0'", "at least 1"]),
    "absent device": (["--trainer.accelerator=tpu"], ["torch_xla"]),
    "misspelt accelerator": (["--trainer.accelerator=cpuu"], ["accelerator='cpuu'", "cpu"]),
    "folder below a file": (["--trainer.default_root_dir=a_file/logs"], ["a_file/logs", "is a file", "another folder"]),
    "folder that cannot be written": (["--trainer.default_root_dir=/proc/x"], ["/proc/x", "cannot be written"]),
    "absent checkpoint": (["--ckpt_path=absent.ckpt"], ["absent.ckpt", "does not exist"]),
    "not a checkpoint": (["--ckpt_path=a_file"], ["a_file", "not a checkpoint"]),
}

IN_YAML = {
    "no mapping": ("- trainer", ["mapping"]),
    "no YAML": ("trainer: [", ["cannot be read", "line 2"]),
    "no options": ("trainer: 3", ["trainer: 3 holds no options"]),
    "misspelt section": ("trainr: {max_steps: 1}", ["'trainr.max_steps'", "did you mean 'trainer.max_steps'"]),
    "misspelt option": ("trainer: {max_stps: 1}", ["'trainer.max_stps'", "did you mean 'trainer.max_steps'"]),
    "misspelt class path": (
        "trainer: {strategy: {class_path: lightning_llmscale.RingAlReduceStrategy}}",
        ["'RingAlReduceStrategy'", "did you mean 'RingAllReduceStrategy'"],
    ),
    "misspelt strategy option": (
        f"trainer: {{strategy: {{class_path: {RING}, init_args: {{bucket_mb: 4}}}}}}",
        ["'bucket_mb'", "did you mean 'bucket_cap_mb'"],
    ),
    "wrong strategy option": (
        f"trainer: {{strategy: {{class_path: {RING}, init_args: {{uneven: dorp}}}}}}",
        ["uneven='dorp'", "did you mean 'drop'"],
    ),
    "misspelt callback option": (
        "trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {monitr: x}}]}",
        ["'monitr'", "did you mean 'monitor'"],
    ),
    "misspelt data option": (
        "data: {class_path: WebDatasetDataModule, init_args: {train: x.tar, global_batch: 4}}",
        ["'global_batch'", "did you mean 'global_batch_size'"],
    ),
}

DATA = {
    "missing shards": ("absent-*.tar", {}, ["absent-*.tar", "check the path"]),
    "empty shard": ("empty.tar", {}, ["empty.tar", "0 bytes"]),
    "no tar": ("a_file", {}, ["a_file", "not a tar archive"]),
    "too long a sequence": ("text.tar", {"seq_len": 1000}, ["seq_len=1000", "longer than the data"]),
    "more than one batch needs": ("text.tar", {"global_batch_size": 1000, "seq_len": 2}, ["global_batch_size=1000"]),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMSCALE_DEBUG", raising=False)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # so that they are gone again after the test
        monkeypatch.setenv(name, "0")
    Path("a_file").write_text("no checkpoint, no tar and no folder" * 40)


def refused(code: int, error: str, words: list[str]) -> None:
    assert code == 2, error
    sentences = [line for line in error.splitlines() if ": error: " in line]
    assert len(sentences) == 1, error
    assert "Traceback" not in error
    assert "usage:" not in error
    for word in words:
        assert word in sentences[0]


@pytest.mark.parametrize(("args", "words"), ON_COMMAND_LINE.values(), ids=ON_COMMAND_LINE.keys())
def test_command_line(args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if args[0].startswith("--"):
        given = [] if args[0].startswith("--model") else [f"--model={MODULE}"]
        args = ["fit", *given, *args, *([] if "accelerator" in args[0] else ["--trainer.accelerator=cpu"])]
    done = command(capsys, *args)
    refused(done.code, done.err, words)
    assert sorted(os.listdir()) == ["a_file"]


@pytest.mark.parametrize(("text", "words"), IN_YAML.values(), ids=IN_YAML.keys())
def test_yaml(text: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(text)
    done = command(capsys, "fit", "--config=run.yaml", f"--model={MODULE}")
    refused(done.code, done.err, words)
    assert sorted(os.listdir()) == ["a_file", "run.yaml"]


@pytest.mark.parametrize(("shards", "options", "words"), DATA.values(), ids=DATA.keys())
def test_data(shards: str, options: dict[str, int], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_llmscale.data import pack_text_files

    Path("text.txt").write_text("a few words")
    pack_text_files(["text.txt"], "text%d.tar")[0].rename("text.tar")
    Path("empty.tar").touch()
    before = sorted(os.listdir())
    settings = {"global_batch_size": 1, **options}
    arguments = [f"--data.{name}={value}" for name, value in settings.items()]
    done = command(
        capsys, "fit", f"--model={MODULE}", "--data=WebDatasetDataModule", f"--data.train={shards}", *arguments,
        "--trainer.accelerator=cpu", "--trainer.logger=false",
    )  # fmt: skip
    assert done.code == 1
    assert "Traceback" not in done.err
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("llmscale: error: ")
    for word in words:
        assert word in last
    assert sorted(os.listdir()) == before


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_llmscale.errors import ConfigurationError

    monkeypatch.setenv("LLMSCALE_DEBUG", "1")
    with pytest.raises(ConfigurationError, match="ring_allredcue"):
        command(capsys, "fit", f"--model={MODULE}", "--trainer.strategy=ring_allredcue")


def test_only_the_first_rank_of_a_host_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    done = command(capsys, "fit", f"--model={MODULE}", "--trainer.strategy=ring_allredcue")
    assert (done.code, done.err) == (2, "")
