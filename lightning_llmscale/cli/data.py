"""`llmscale data`: pack text into shards, index them, find damages, count what is there."""

from __future__ import annotations

__all__ = ["run"]

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_llmscale.data.convert import convert
from lightning_llmscale.data.inspection import index_shards, inspect_shards, plot_lengths, verify_shards
from lightning_llmscale.data.opening import open_shards
from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.data.shards import expand_shards

Progress = Callable[[int, int], None]


def run(args: list[str]) -> int:
    """Runs one of the subcommands.

    Args:
        args: Arguments after ``data``.

    Returns:
        0; 1 when ``verify`` found a damage.
    """
    options = _parser().parse_args(args)
    return {"pack": _pack, "index": _index, "verify": _verify, "inspect": _inspect}[options.command](options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmscale data", description="Makes WebDataset shards and looks into them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    pack = commands.add_parser(
        "pack",
        help="write shards and indexes",
        description="Writes shards; a run that was killed goes on where it was, and the bytes are always the same.",
    )
    pack.add_argument(
        "inputs", nargs="+", help="jsonl, parquet or text files, folders of text files, Hugging Face datasets"
    )
    pack.add_argument("--out", required=True, help="pattern of the shards, such as shards/train-%%06d.tar")
    pack.add_argument("--text", default="text", help="field that holds the text (default: text)")
    pack.add_argument("--tokenizer", help="store token ids: a tokenizer.json, or tiktoken:ENCODING")
    pack.add_argument("--samples-per-shard", type=int, default=10_000, help="default: 10000")
    pack.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")

    for name, text in (
        ("index", "write an index beside each shard, so that runs need not scan them"),
        ("verify", "find every damaged shard and sample; exit code 1 if there is one"),
        ("inspect", "count samples, bytes and tokens"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("shards", nargs="+", help="paths, globs, folders, brace patterns or URLs")
        command.add_argument("--cache-dir", help="folder for remote and compressed shards")
        command.add_argument("--cache-limit", default="200GB", help="bytes it may hold (default: 200GB)")
        if name == "verify":
            command.add_argument("--decode", action="store_true", help="decode every member too")
            command.add_argument("--sha256", action="store_true", help="print the hash of each shard")
        if name == "inspect":
            command.add_argument("--text-key", default="txt", help="extension of the documents (default: txt)")
            command.add_argument(
                "--tokenizer", help="count tokens: bytes, uint16, uint32, tokenizer.json, tiktoken:ENCODING"
            )
            command.add_argument("--plot", help="write a histogram of lengths to this PNG file")
    return parser


@contextmanager
def _progress(title: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _reader(options: argparse.Namespace) -> ShardReader:
    shards = expand_shards(options.shards, "shards")
    return open_shards(shards, cache_dir=options.cache_dir, cache_limit=options.cache_limit)


def _pack(options: argparse.Namespace) -> int:
    with _progress("packing") as progress:
        shards = convert(
            options.inputs,
            options.out,
            text=options.text,
            tokenizer=options.tokenizer,
            samples_per_shard=options.samples_per_shard,
            jobs=options.jobs,
            progress=progress,
        )
    print(
        f"{len(shards):,} shards, {sum(shard.stat().st_size for shard in shards):,} bytes: {shards[0]} ... {shards[-1]}"
    )
    return 0


def _index(options: argparse.Namespace) -> int:
    reader = _reader(options)
    with _progress("indexing") as progress:
        samples = index_shards(reader, progress=progress)
    print(f"{samples:,} samples in {len(reader.shards):,} shards are indexed")
    return 0


def _verify(options: argparse.Namespace) -> int:
    reader = _reader(options)
    with _progress("verifying") as progress:
        reports = verify_shards(reader, decode=options.decode, sha256=options.sha256, progress=progress)
    problems = [problem for report in reports for problem in report.problems]
    for report in reports if options.sha256 else ():
        print(f"{report.sha256 or '-' * 64}  {report.shard}")
    for problem in problems:
        print(problem)
    samples, damaged = sum(report.samples for report in reports), sum(bool(report.problems) for report in reports)
    print(f"{samples:,} samples in {len(reports):,} shards, {len(problems):,} problems in {damaged:,} shards")
    return 1 if problems else 0


def _inspect(options: argparse.Namespace) -> int:
    reader = _reader(options)
    with _progress("reading") as progress:
        summary = inspect_shards(reader, text_key=options.text_key, tokenizer=options.tokenizer, progress=progress)
    print(summary.table())
    if options.plot:
        plot_lengths(summary, Path(options.plot))
    return 0
