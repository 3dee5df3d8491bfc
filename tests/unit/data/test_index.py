from __future__ import annotations

from pathlib import Path

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llmscale.data.index import ShardIndex, index_path, load_index, save_index
from lightning_llmscale.data.reader import ShardReader, open_index
from lightning_llmscale.errors import DataError
from tests.unit.data.archives import write_tar


def read_all(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    shard = ShardReader([str(path)]).opened(0)
    return [
        (shard.key(number), {name: bytes(raw) for name, raw in shard.members(number).items()})
        for number in range(len(shard.index))
    ]


def webdataset_reads(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    samples = webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
    return [(s["__key__"], {k: v for k, v in s.items() if not k.startswith("__")}) for s in samples]


_KEYS = st.lists(
    st.from_regex(r"[a-z0-9_]{1,5}(/[a-z0-9_.]{1,4}){0,2}", fullmatch=True), min_size=1, max_size=6, unique=True
).filter(lambda keys: not any(".." in key.split("/") for key in keys))
_EXTENSIONS = st.lists(st.sampled_from(["txt", "json", "seg.png", "JPG", "a.b.c"]), min_size=1, max_size=4, unique=True)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), keys=_KEYS)
def test_samples_are_those_of_webdataset(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, keys: list[str]
) -> None:
    members = [("__meta__/x.txt", b"m"), ("noextension", b"n")]
    for key in keys:
        members += [(f"{key}.{ext}", data.draw(st.binary(max_size=600))) for ext in data.draw(_EXTENSIONS)]
    path = write_tar(tmp_path_factory.mktemp("tar") / "a.tar", members)
    expected = webdataset_reads(path)
    if len({key for key, _ in expected}) < len(expected):
        return  # webdataset splits what is not adjacent; the next test states our rule
    if expected:
        assert read_all(path) == expected
    else:
        with pytest.raises(DataError, match="holds no samples"):
            read_all(path)


def test_members_of_a_key_need_not_be_adjacent(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "a.tar", [("a.txt", b"1"), ("b.txt", b"2"), ("a.json", b"{}"), ("v1.0/x.seg.png", b"3")]
    )
    assert read_all(path) == [("a", {"txt": b"1", "json": b"{}"}), ("b", {"txt": b"2"}), ("v1.0/x", {"seg.png": b"3"})]


def test_a_repeated_member_starts_another_sample(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.txt", b"1"), ("a.cls", b"1"), ("a.txt", b"2"), ("a.cls", b"2")])
    assert read_all(path) == [("a", {"txt": b"1", "cls": b"1"}), ("a", {"txt": b"2", "cls": b"2"})]


@pytest.mark.parametrize("name", ["../../etc/p.txt", "/etc/p.txt", "a/../b.txt"])
def test_names_that_point_outside_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="points outside of the shard"):
        read_all(write_tar(tmp_path / "a.tar", [(name, b"1")]))


def test_a_saved_index_is_used_instead_of_a_scan(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{i}.{ext}", bytes([i])) for i in range(9) for ext in ("txt", "cls")])
    scanned = open_index(path)
    save_index(scanned, index_path(path))
    loaded = load_index(index_path(path), path.stat().st_size)
    assert loaded.keys == scanned.keys
    assert loaded.extensions == scanned.extensions
    for name in ("first_member", "offset", "size", "extension", "key_end"):
        assert getattr(loaded, name).tolist() == getattr(scanned, name).tolist()
    assert len(read_all(path)) == 9


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[: len(raw) // 2], "is unreadable"),
        (lambda raw: b"something else", "is unreadable \\(not an index file\\)"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "is unreadable \\(its checksum does not match\\)"),
        (lambda raw: b"", "is unreadable"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, damage: object, message: str) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.txt", b"1")])
    save_index(open_index(path), index_path(path))
    index_path(path).write_bytes(damage(index_path(path).read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError, match=f"{message}.*llmscale data index"):
        open_index(path)


def test_an_index_of_another_version_of_the_shard_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.txt", b"1")])
    save_index(open_index(path), index_path(path))
    write_tar(path, [("a.txt", b"1" * 20_000)])
    with pytest.raises(DataError, match="is of a shard of 10240 bytes, which now has 30720"):
        open_index(path)


def test_member_of_names_the_sample_that_lacks_the_extension(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.txt", b"1"), ("b.json", b"2")])
    index = open_index(path)
    assert isinstance(index, ShardIndex)
    with pytest.raises(DataError, match=r"sample 'b' has no member \.txt .*txt, json"):
        index.member_of("txt", str(path))
