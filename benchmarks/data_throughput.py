"""CPU time and wall time a sample: this package, webdataset, LitData, MosaicML Streaming and Hugging Face datasets.

python benchmarks/data_throughput.py [--work text,text_str,tokens,images] [--workers 0,2] [--repeats 5] [--folder
/tmp/data]

Every contender gives the same decoded values of the same samples (str and parsed json, str alone, or a torch tensor),
in a shuffled order, a list of 64 a batch. A repetition is one pass over the data in a fresh process pinned to its
cores, after the files were read once; contenders take turns. Peers that are not installed are left out: pip install
litdata mosaicml-streaming datasets
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 64
SHARDS, SAMPLES = 8, {"text": 6000, "tokens": 6000, "images": 150}
GOALS = {
    "text": "webdataset 15x",
    "text_str": "best peer 1.2x",
    "tokens": "webdataset 25x, LitData 2x",
    "images": "1.0x",
}


# ---- data: the same samples in the form of each contender -------------------------------------------------------


def samples(kind: str, shard: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(shard)
    blob = rng.integers(97, 123, 200_000, dtype=np.uint8).tobytes()
    for number in range(SAMPLES[kind]):
        key = f"{shard:06d}_{number:06d}"
        if kind == "text":
            size, start = int(rng.integers(1024, 4096)), int(rng.integers(0, 190_000))
            yield {
                "key": key,
                "txt": blob[start : start + size].decode(),
                "json": {"id": number, "shard": shard, "url": f"http://x/{key}", "length": size},
            }
        elif kind == "tokens":
            yield {"key": key, "npy": rng.integers(0, 50_000, int(rng.integers(256, 4096))).astype(np.uint16)}
        else:
            yield {"key": key, "jpg": picture(rng)}


def picture(rng: np.random.Generator) -> bytes:
    from PIL import Image

    small = Image.fromarray(rng.integers(0, 255, (80, 80, 3)).astype(np.uint8))
    out = io.BytesIO()
    small.resize((512, 512), Image.Resampling.BICUBIC).save(out, "JPEG", quality=95)
    return out.getvalue()


def write_tars(kind: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for sample in samples(kind, shard):
                for name, value in sample.items():
                    if name == "key":
                        continue
                    raw = encode(name, value)
                    info = tarfile.TarInfo(f"{sample['key']}.{name}")
                    info.size = len(raw)
                    tar.addfile(info, io.BytesIO(raw))


def encode(name: str, value: Any) -> bytes:
    if name == "npy":
        out = io.BytesIO()
        np.save(out, value)
        return out.getvalue()
    if name == "json":
        return json.dumps(value).encode()
    return value.encode() if isinstance(value, str) else value


def write_mds(kind: str, folder: Path) -> None:
    from streaming import MDSWriter

    columns = {"text": {"txt": "str", "json": "json"}, "tokens": {"npy": "ndarray:uint16"}, "images": {"jpg": "bytes"}}
    with MDSWriter(out=str(folder), columns=columns[kind]) as out:
        for shard in range(SHARDS):
            for sample in samples(kind, shard):
                out.write({name: value for name, value in sample.items() if name != "key"})


def lit_items(shard: int, kind: str) -> Iterator[Any]:
    for sample in samples(kind, shard):
        if kind == "text":
            yield {"txt": sample["txt"], "json": json.dumps(sample["json"])}
        else:
            yield sample["npy"] if kind == "tokens" else sample["jpg"]


def write_litdata(kind: str, folder: Path) -> None:
    from functools import partial

    from litdata import optimize

    optimize(
        fn=partial(lit_items, kind=kind),
        inputs=list(range(SHARDS)),
        output_dir=str(folder),
        chunk_bytes="16MB",
        num_workers=1,
    )


def write_parquet(kind: str, folder: Path) -> None:
    import datasets

    folder.mkdir(parents=True)
    for shard in range(SHARDS):
        rows = [
            {name: json.dumps(value) if name == "json" else value for name, value in sample.items()}
            for sample in samples(kind, shard)
        ]
        datasets.Dataset.from_list(rows).to_parquet(str(folder / f"{shard:04d}.parquet"))


# ---- contenders: iterables of lists of decoded samples ----------------------------------------------------------


def tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)


def ours(work: str, folder: Path, workers: int) -> Iterable[list[Any]]:
    from lightning_llmscale.data import WebDatasetDataModule

    stages: dict[str, Any] = {
        "text_str": lambda sample: sample["txt"],
        "tokens": lambda sample: tensor(sample["npy"]),
        "images": lambda sample: sample["jpg"],
    }
    data = WebDatasetDataModule(
        train=str(folder / "tar"),
        global_batch_size=BATCH,
        num_workers=workers,
        epoch_end="pad",
        members=["txt"] if work == "text_str" else None,
        transform=stages.get(work),
        collate=list,
    )
    data.setup("fit")
    return data.train_dataloader()


def webdataset_peer(work: str, folder: Path, workers: int) -> Iterable[list[Any]]:
    import webdataset as wds

    stages: dict[str, list[Any]] = {
        "text": [wds.decode()],
        "text_str": [wds.decode(only=["txt"]), wds.map(lambda sample: sample["txt"])],
        "tokens": [wds.decode(), wds.map(lambda sample: tensor(sample["npy"]))],
        "images": [wds.decode("torchrgb8"), wds.map(lambda sample: sample["jpg"])],
    }
    shards = sorted(str(path) for path in (folder / "tar").glob("*.tar"))
    data = wds.WebDataset(shards, shardshuffle=100, seed=0).shuffle(1000)
    data = data.compose(*stages[work], wds.batched(BATCH, collation_fn=list))
    return wds.WebLoader(data, batch_size=None, num_workers=workers)


def from_torch(data: Any, workers: int) -> Iterable[list[Any]]:
    from torch.utils.data import DataLoader

    return DataLoader(data, batch_size=BATCH, num_workers=workers, collate_fn=list)


def rgb(raw: bytes) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(raw)) as image:
        return tensor(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def litdata_peer(work: str, folder: Path, workers: int) -> Iterable[list[Any]]:
    import litdata

    steps: dict[str, Callable[[Any], Any]] = {
        "text": lambda item: {"txt": item["txt"], "json": json.loads(item["json"])},
        "text_str": lambda item: item["txt"],
        "tokens": lambda item: item if not isinstance(item, np.ndarray) else tensor(item),
        "images": rgb,
    }
    data = litdata.StreamingDataset(str(folder / "litdata"), shuffle=True, seed=0, transform=steps[work])
    return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, collate_fn=list)


def streaming_peer(work: str, folder: Path, workers: int) -> Iterable[list[Any]]:
    from streaming import StreamingDataset

    steps: dict[str, Callable[[Any], Any]] = {
        "text": lambda item: item,
        "text_str": lambda item: item["txt"],
        "tokens": lambda item: tensor(item["npy"]),
        "images": lambda item: rgb(item["jpg"]),
    }

    class Data(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> Any:
            return steps[work](super().__getitem__(at))

    return from_torch(Data(local=str(folder / "mds"), shuffle=True, batch_size=BATCH), workers)


def datasets_peer(work: str, folder: Path, workers: int) -> Iterable[list[Any]]:
    import datasets

    steps: dict[str, Callable[[Any], Any]] = {
        "text": lambda item: {"txt": item["txt"], "json": json.loads(item["json"])},
        "text_str": lambda item: {"txt": item["txt"]},
        "tokens": lambda item: {"npy": tensor(np.array(item["npy"], np.uint16))},
        "images": lambda item: {"jpg": rgb(item["jpg"])},
    }
    files = sorted(str(path) for path in (folder / "parquet").glob("*.parquet"))
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return from_torch(data.shuffle(seed=0, buffer_size=1000).map(steps[work]), workers)


def ceiling(work: str, folder: Path, workers: int) -> Iterable[list[Any]]:
    """Reading the cached files, nothing more."""
    for path in sorted((folder / "tar").glob("*.tar")):
        path.read_bytes()
        yield [None] * SAMPLES["text" if work == "text_str" else work]


CONTENDERS: dict[str, tuple[str, str, Callable[[str, Path], None], Callable[[str, Path, int], Iterable[list[Any]]]]] = {
    "lightning_llmscale": ("lightning-llmscale", "tar", write_tars, ours),
    "webdataset": ("webdataset", "tar", write_tars, webdataset_peer),
    "LitData": ("litdata", "litdata", write_litdata, litdata_peer),
    "MosaicML Streaming": ("mosaicml-streaming", "mds", write_mds, streaming_peer),
    "HF datasets (parquet)": ("datasets", "parquet", write_parquet, datasets_peer),
    "(reading the files)": ("numpy", "tar", write_tars, ceiling),
}


# ---- measuring ---------------------------------------------------------------------------------------------------


def run_once(name: str, work: str, folder: Path, workers: int) -> None:
    """One pass; prints CPU and wall microseconds a sample, workers included, and the number of samples."""
    loader = CONTENDERS[name][3](work, folder, workers)
    start, count = time.perf_counter(), 0
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    iterator = iter(loader)
    for batch in iterator:
        count += len(batch)
    del iterator, batch, loader
    wall = time.perf_counter() - start
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime for a, b in zip(before, after, strict=True))
    print("RESULT", json.dumps({"cpu": cpu / count * 1e6, "wall": wall / count * 1e6, "samples": count}))


def measure(name: str, work: str, folder: Path, workers: int) -> dict[str, float] | None:
    command = [
        sys.executable,
        __file__,
        "--once",
        name,
        "--work",
        work,
        "--folder",
        str(folder),
        "--workers",
        str(workers),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    except subprocess.TimeoutExpired:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if done.returncode or not lines:
        print(f"  {name}: {(done.stderr.strip().splitlines() or ['no output'])[-1][:160]}", file=sys.stderr)
        return None
    return dict(json.loads(lines[-1][7:]))


def installed() -> dict[str, str]:
    found = {}
    for name, (package, *_) in CONTENDERS.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found


def prepare(names: Iterable[str], kind: str, folder: Path) -> None:
    for name in names:
        _, form, write, _ = CONTENDERS[name]
        if not (folder / form).exists():
            partial = folder / f"{form}.part"
            shutil.rmtree(partial, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            write(kind, partial)
            partial.replace(folder / form)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="text,text_str,tokens,images")
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/llmscale_data_benchmark"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/data_throughput.json"))
    parser.add_argument(
        "--only", default=",".join(CONTENDERS), help="contenders to run (default: all that are installed)"
    )
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        run_once(options.once, options.work, options.folder, int(options.workers))
        return 0
    found, results = installed(), []
    found = {name: number for name, number in found.items() if name in options.only.split(",")}
    for work in options.work.split(","):
        kind = "text" if work == "text_str" else work
        folder = options.folder / kind
        names = list(found)
        for name in list(names):
            try:
                prepare([name], kind, folder)
            except Exception as error:  # noqa: BLE001  (a peer that cannot write its form is left out)
                print(f"  {name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
                names.remove(name)
        for workers in map(int, options.workers.split(",")):
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for repeat in range(options.repeats + 1):
                for name in names:
                    result = measure(name, work, folder, workers)
                    if result is not None and repeat:  # the first pass warms the page cache
                        runs[name].append(result)
            results.append({"work": work, "workers": workers, "runs": runs})
            table(work, workers, runs)
    record = {
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "versions": found,
        "results": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def table(work: str, workers: int, runs: dict[str, list[dict[str, float]]]) -> None:
    print(f"\n{work}, {workers} workers (goal: {GOALS[work]})\n")
    print("| | CPU us a sample | wall us a sample | CPU against ours | samples |\n|---|---|---|---|---|")
    own = statistics.median([run["cpu"] for run in runs["lightning_llmscale"]] or [float("nan")])
    for name, measured in runs.items():
        if measured:
            cpu, wall = (statistics.median(run[key] for run in measured) for key in ("cpu", "wall"))
            print(
                f"| {name} | {cpu:.2f} | {wall:.2f} | {cpu / own:.2f}x | {int(measured[0]['samples']):,} |", flush=True
            )


if __name__ == "__main__":
    sys.exit(main())
