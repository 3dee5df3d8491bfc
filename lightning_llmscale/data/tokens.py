"""Where tokens come from: bytes of text, a tokenizer, or arrays that were tokenised before."""

from __future__ import annotations

__all__ = ["ByteTokens", "StoredTokens", "TextTokens", "TokenReader", "make_token_reader"]

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_llmscale.data.decoding import npy_layout
from lightning_llmscale.data.index import ShardIndex
from lightning_llmscale.data.order import Int
from lightning_llmscale.errors import ConfigurationError, DataError

Tokens = NDArray[np.integer[Any]]


class TokenReader(ABC):
    """Reads the tokens of a document, which is one member of a shard.

    Args:
        name: Distinguishes the tokens of this reader from those of others; part of a checkpoint's fingerprint.
        vocab_size: Number of token ids, the separator included; 0 when unknown.
        separator: Token that ends each document, ``None`` for none.
    """

    def __init__(self, name: str, vocab_size: int, separator: int | None) -> None:
        self.name, self.vocab_size, self.separator = name, vocab_size, separator

    @abstractmethod
    def lengths(self, index: ShardIndex, members: Int, view: Callable[[], memoryview], shard: str) -> Int:
        """Tokens in each member, without the separator.

        Args:
            index: Index of the shard.
            members: Members that are documents.
            view: Opens the shard, which is needed only where lengths do not follow from sizes.
            shard: Name for error messages.
        """

    @abstractmethod
    def read(self, raw: memoryview, start: int, count: int) -> Tokens:
        """Tokens ``start`` to ``start + count`` of a member."""


class ByteTokens(TokenReader):
    """Bytes are tokens 0 to 255; token 256 ends a document. Lengths are known from the index alone."""

    def __init__(self) -> None:
        super().__init__("bytes", 257, 256)

    def lengths(self, index: ShardIndex, members: Int, view: Callable[[], memoryview], shard: str) -> Int:
        """See :meth:`TokenReader.lengths`."""
        return index.size[members]

    def read(self, raw: memoryview, start: int, count: int) -> Tokens:
        """See :meth:`TokenReader.read`."""
        return np.frombuffer(raw[start : start + count], np.uint8)


class StoredTokens(TokenReader):
    """Arrays of token ids: raw little-endian numbers (``.bin``) or one-dimensional ``.npy``.

    Args:
        dtype: ``"uint16"`` or ``"uint32"``.
        npy: Whether members are ``.npy`` files.
    """

    def __init__(self, dtype: str, npy: bool) -> None:
        super().__init__(dtype, 0, None)
        self._dtype, self._npy = np.dtype(f"<u{np.dtype(dtype).itemsize}"), npy

    def lengths(self, index: ShardIndex, members: Int, view: Callable[[], memoryview], shard: str) -> Int:
        """See :meth:`TokenReader.lengths`.

        Raises:
            DataError: A member holds something else than such numbers.
        """
        sizes = index.size[members]
        if self._npy:
            raw, places = view(), zip(index.offset[members].tolist(), sizes.tolist(), strict=True)
            sizes = sizes - np.array([self._start(raw[at : at + size]) for at, size in places], np.int64)
        odd = np.flatnonzero((sizes % self._dtype.itemsize != 0) | (sizes < 0))
        if len(odd):
            raise DataError(
                f"{shard}: document {int(odd[0])} has {int(sizes[odd[0]])} bytes of tokens, no whole number of "
                f"{self.name}; name the type it was written with as tokenizer=."
            )
        return sizes // self._dtype.itemsize

    def _start(self, raw: memoryview) -> int:
        start, dtype, shape, _ = npy_layout(raw)
        if dtype != self._dtype or len(shape) != 1:
            raise DataError(f"A document is an array of {dtype} with shape {shape}, not a row of {self.name}.")
        return start

    def read(self, raw: memoryview, start: int, count: int) -> Tokens:
        """See :meth:`TokenReader.read`."""
        first = (npy_layout(raw)[0] if self._npy else 0) + start * self._dtype.itemsize
        return np.frombuffer(raw, self._dtype, count, first)


class TextTokens(TokenReader):
    """Tokenises text while it is read.

    The number of tokens of a text is known only from tokenising it, so each shard is tokenised once when it is first
    needed to lay out the epoch; for large data tokenise when packing, and read with :class:`StoredTokens`.

    Args:
        name: See :class:`TokenReader`.
        vocab_size: See :class:`TokenReader`.
        separator: See :class:`TokenReader`.
        encode: Tokenises one text.
    """

    def __init__(self, name: str, vocab_size: int, separator: int | None, encode: Callable[[str], list[int]]) -> None:
        super().__init__(name, vocab_size, separator)
        self.encode = encode
        self._last: tuple[tuple[int, int], memoryview, Tokens] | None = None

    def lengths(self, index: ShardIndex, members: Int, view: Callable[[], memoryview], shard: str) -> Int:
        """See :meth:`TokenReader.lengths`.

        Raises:
            DataError: A member is not UTF-8 text.
        """
        counts, raw = list[int](), view()
        for start, size in zip(index.offset[members].tolist(), index.size[members].tolist(), strict=True):
            try:
                counts.append(len(self._tokens(raw[start : start + size])))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{shard}: document {len(counts)} is not UTF-8 text ({error.reason}, byte {error.start}); repair "
                    f"or remove it."
                ) from error
        return np.array(counts, np.int64)

    def _tokens(self, raw: memoryview) -> Tokens:
        return np.array(self.encode(str(raw, "utf-8")), np.int64)

    def read(self, raw: memoryview, start: int, count: int) -> Tokens:
        """See :meth:`TokenReader.read`; the last document is kept, as its parts are often read one after the other."""
        place = np.frombuffer(raw, np.uint8).ctypes.data, len(raw)
        if self._last is None or self._last[0] != place:
            self._last = place, raw, self._tokens(raw)  # the view keeps the address taken
        return self._last[2][start : start + count]


def make_token_reader(tokenizer: str, text_key: str) -> TokenReader:
    """Make the reader that a user named.

    Args:
        tokenizer: ``"bytes"``; ``"uint16"`` or ``"uint32"`` for members that hold token ids; the path of a Hugging Face
            ``tokenizer.json``; or ``"tiktoken:<encoding>"``.
        text_key: Extension of the members.

    Raises:
        ConfigurationError: An unknown name, a missing file or a package that is not installed.
    """
    if tokenizer == "bytes":
        return ByteTokens()
    if tokenizer in ("uint16", "uint32"):
        return StoredTokens(tokenizer, text_key.rpartition(".")[2] == "npy")
    if tokenizer.startswith("tiktoken:"):
        return _tiktoken(tokenizer.partition(":")[2])
    if Path(tokenizer).is_file():
        return _hugging_face(Path(tokenizer))
    raise ConfigurationError(
        f"tokenizer={tokenizer!r} is neither 'bytes', 'uint16', 'uint32' or 'tiktoken:<encoding>' nor a tokenizer.json "
        f"file that exists; use one of these."
    )


def _tiktoken(encoding: str) -> TokenReader:
    model = _package("tiktoken").get_encoding(encoding)
    return TextTokens(f"tiktoken:{encoding}", model.n_vocab, model.eot_token, model.encode_ordinary)


def _hugging_face(path: Path) -> TokenReader:
    raw = path.read_bytes()
    model = _package("tokenizers").Tokenizer.from_str(raw.decode())
    ends = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
    separator = next((number for text in ends if (number := model.token_to_id(text)) is not None), None)

    def encode(text: str) -> list[int]:
        return list(model.encode(text, add_special_tokens=False).ids)

    return TextTokens(hashlib.sha256(raw).hexdigest()[:16], model.get_vocab_size(), separator, encode)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ConfigurationError(f"This tokenizer needs the package {name}; run: pip install {name}") from None
