"""The header scan against the standard library's tarfile."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llmscale.data.tar import scan_tar
from lightning_llmscale.errors import DataError
from tests.unit.data.archives import write_tar

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
_LETTERS = st.characters(codec="utf-8", exclude_characters="/\0\n", exclude_categories=("Cs",))
_PARTS = st.text(_LETTERS, min_size=1, max_size=60).filter(lambda part: part not in (".", ".."))
_NAMES = st.lists(_PARTS, min_size=1, max_size=8).map("/".join)
_MEMBERS = st.lists(st.tuples(_NAMES, st.binary(max_size=1500), st.sampled_from(["file", "dir", "link"])), max_size=8)


def scan(data: bytes) -> list[tuple[str, bytes]]:
    return [(name, data[offset : offset + size]) for name, offset, size in scan_tar(memoryview(data), "x.tar")]


@settings(max_examples=150, deadline=None)
@given(members=_MEMBERS, format=st.sampled_from(FORMATS))
def test_finds_what_tarfile_finds(members: list[tuple[str, bytes, str]], format: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data, kind in members:
            info = tarfile.TarInfo(name)
            try:
                if kind == "file":
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
                else:
                    info.type = tarfile.DIRTYPE if kind == "dir" else tarfile.SYMTYPE
                    info.linkname = name if kind == "link" else ""
                    tar.addfile(info)
            except ValueError:  # the name does not fit into ustar
                continue
    raw = buffer.getvalue()
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        expected = [(m.name, tar.extractfile(m).read()) for m in tar if m.isreg()]  # type: ignore[union-attr]
    assert scan(raw) == expected


def test_pax_size_and_global_path_win(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"}) as tar:
        info = tarfile.TarInfo("short.txt")
        info.pax_headers = {"path": "from/pax.txt", "mtime": "1.5"}
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    assert scan(buffer.getvalue()) == [("from/pax.txt", b"abc")]


def test_every_cut_is_found(tmp_path: Path) -> None:
    """webdataset reads a cut archive without an error when the cut is at a member or inside a header."""
    raw = write_tar(tmp_path / "a.tar", [(f"{i}.txt", b"x" * 700) for i in range(5)]).read_bytes()
    end = 5 * (512 + 1024)
    for cut in [1, 100, 511, 512, 600, 1535, 1536, 1536 + 100, 1536 * 3, end - 1, end, end + 100]:
        with pytest.raises(DataError, match=r"x\.tar (is truncated|is not a tar)"):
            scan(raw[:cut])
    assert len(scan(raw[: end + 512])) == 5


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", r"x\.tar is an empty file \(0 bytes\); write the shard again"),
        (b"hello " * 200, r"x\.tar is not a tar archive"),
        (b"<html>404</html>".ljust(2048), r"x\.tar is not a tar archive"),
    ],
)
def test_what_is_no_tar_is_said_so(raw: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        scan(raw)


def test_a_damaged_header_is_found(tmp_path: Path) -> None:
    raw = bytearray(write_tar(tmp_path / "a.tar", [("a.txt", b"1"), ("b.txt", b"2")]).read_bytes())
    raw[1024 + 3] ^= 1
    with pytest.raises(DataError, match="damaged at byte 1024"):
        scan(bytes(raw))


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_sparse_members_are_refused(format: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        info = tarfile.TarInfo("hole.bin")
        if format == tarfile.GNU_FORMAT:
            info.type = tarfile.GNUTYPE_SPARSE
        else:
            info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        tar.addfile(info)
    with pytest.raises(DataError, match=r"'hole\.bin' is a sparse file"):
        scan(buffer.getvalue())
