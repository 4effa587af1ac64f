"""From a file's bytes to its text, by the rules of its language."""

from __future__ import annotations

import codecs
import io
import tokenize
from dataclasses import dataclass

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A text, or why its bytes are none.

    Attributes:
        text: The text without a byte order mark; where ``problem`` is set, each byte as one character.
        encoding: What to write it back with.
        problem: What is wrong with the bytes; empty if nothing is.
        line: Where, from 1.
    """

    text: str
    encoding: str = "utf-8"
    problem: str = ""
    line: int = 1


def decode_python(data: bytes) -> Decoded:
    """Decode as Python does: a byte order mark, a coding comment in the first two lines, else UTF-8."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        text = data.decode("latin-1")
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as wrong:
            return _broken(data, wrong)
        return Decoded(text=text, encoding="latin-1", problem=f"its coding comment: {error.msg}")
    try:
        return Decoded(text=data.decode(encoding), encoding=encoding)
    except UnicodeDecodeError as wrong:
        return _broken(data, wrong)
    except (ValueError, LookupError) as error:
        # Codecs that are no text encodings (`coding: rot13`).
        return Decoded(text=data.decode("latin-1"), encoding="latin-1", problem=f"its coding comment: {error}")


def decode_any(data: bytes) -> Decoded:
    """Decode a shell script or a page: UTF-8, or each byte as one character."""
    try:
        has_mark = data.startswith(codecs.BOM_UTF8)
        return Decoded(text=data.decode("utf-8-sig"), encoding="utf-8-sig" if has_mark else "utf-8")
    except UnicodeDecodeError:
        return Decoded(text=data.decode("latin-1"), encoding="latin-1")


def is_utf16(data: bytes) -> bool:
    """Whether these bytes say of themselves that they are UTF-16."""
    return data.startswith(_UTF16)


def tell_binary(data: bytes) -> str:
    """Tell why these bytes are no text at all; empty if they may be one."""
    if is_utf16(data):
        return "it is UTF-16; save it as UTF-8"
    return f"it has a NUL byte (at offset {data.index(0)}), so it is not text" if 0 in data else ""


def _broken(data: bytes, error: UnicodeDecodeError) -> Decoded:
    byte = f"byte 0x{error.object[error.start]:02x}"
    return Decoded(
        text=data.decode("latin-1"),
        encoding="latin-1",
        problem=f"{byte} is no {error.encoding.upper()}",
        line=data.count(b"\n", 0, error.start) + 1,
    )
