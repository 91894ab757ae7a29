"""What may have happened to a file: strategies for its bytes, for JSON, and for pickles."""

from __future__ import annotations

import copy
import pickle
import pickletools
import struct
from typing import Any

from hypothesis import strategies as st

LARGE = [1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 70, 10**400]
WORDS = ["", "../outside", "/etc/hosts", "a/../../outside", "\0", "\ud800", "\x1b[31m\n", "x" * 300, "y" * 100_000]


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` after one to three changes: bits, zeros, other bytes, a part that is missing, doubled or elsewhere."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.sampled_from([1, 2, 4, 8, 100, 4096, len(data)]))
        elsewhere = draw(st.integers(0, len(data)))
        part = data[at : at + length]
        change = draw(st.sampled_from(["bit", "zeros", "bytes", "cut", "insert", "double", "copy"]))
        new = {
            "bit": bytes(byte ^ (1 << elsewhere % 8) for byte in part[:1]) + part[1:],
            "zeros": bytes(len(part)),
            "bytes": draw(st.binary(min_size=1, max_size=8)),
            "cut": b"",
            "insert": draw(st.binary(max_size=8)) + part,
            "double": part * 2,
            "copy": data[elsewhere : elsewhere + len(part)],
        }
        data = data[:at] + new[change] + data[at + length :]
    return data


# --- JSON ------------------------------------------------------------------------------------------------


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 5), st.floats(), st.sampled_from([*LARGE, *WORDS]), st.text(max_size=5)
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.dictionaries(st.text(max_size=5), SCALARS, max_size=2),
    st.sampled_from([60, 400]).map(_nested),
)


@st.composite
def changed(draw: st.DrawFn, tree: Any) -> Any:
    """JSON's values with one to three parts removed, added, or replaced by something else."""
    whole = [copy.deepcopy(tree)]
    for _ in range(draw(st.integers(1, 3))):
        node: Any = whole
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw(st.sampled_from(keys))
            if not (isinstance(node[key], (dict, list)) and node[key] and draw(st.integers(0, 3))):
                break
            node = node[key]
        if node is not whole and draw(st.integers(0, 3)) == 0:
            del node[key]
        elif isinstance(node, dict) and draw(st.integers(0, 3)) == 0:
            node[draw(st.one_of(st.text(max_size=5), st.sampled_from(WORDS)))] = draw(
                st.one_of(VALUES, st.just(node[key]))
            )
        else:
            node[key] = draw(VALUES)
    return whole[0]


# --- pickles ---------------------------------------------------------------------------------------------

DCP = "torch.distributed.checkpoint."
NAMES = [
    *(("os", "mkdir"), ("pathlib", "Path.mkdir"), ("pathlib", "PosixPath"), ("builtins", "setattr")),
    *(("builtins", "getattr"), ("builtins", "bytearray"), ("builtins", "set"), ("builtins", "complex")),
    *(("torch", "float32"), ("torch", "Size"), ("torch", "device"), ("torch", "Tensor"), ("torch", "FloatStorage")),
    *(("torch.storage", "UntypedStorage"), ("torch.storage", "_load_from_bytes"), ("collections", "OrderedDict")),
    *(("torch._utils", f"_rebuild_{name}") for name in ("tensor_v2", "tensor_v3", "parameter", "qtensor")),
    *(("torch._tensor", "_rebuild_from_type_v2"), ("_codecs", "encode"), ("torch.nn.parameter", "Parameter")),
    *((f"{DCP}metadata", name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "StorageMeta")),
    *((f"{DCP}metadata", name) for name in ("ChunkStorageMetadata", "BytesStorageMetadata", "TensorProperties")),
    (f"{DCP}filesystem", "_StorageInfo"),
]
TEXTS = [*WORDS[:6], "made-by-a-pickle", "is_file", "__class__", "__setstate__", "storage", "0", "cpu", "latin1"]
TEXTS += ["state_dict_metadata", "storage_data", "fqn", "offset", "relative_path", "__0_0.distcp", "length", "size"]


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(raw)) + raw


def _number(number: int) -> bytes:
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(raw)]) + raw if len(raw) < 256 else pickle.NONE


_NAMED = st.sampled_from(NAMES).map(lambda name: f"c{name[0]}\n{name[1]}\n".encode())
_LEAVES = st.one_of(
    _NAMED,
    st.sampled_from([pickle.NONE, pickle.NEWTRUE, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, b"h\0"]),
    st.sampled_from(TEXTS).map(_text),
    st.one_of(st.integers(-1, 3), st.sampled_from(LARGE)).map(_number),
    st.binary(max_size=4).map(lambda raw: b"C" + bytes([len(raw)]) + raw),
)


def _made_of(below: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    several = st.lists(below, max_size=4).map(b"".join)
    pairs = st.lists(st.tuples(below, below).map(b"".join), max_size=3).map(b"".join)
    return st.one_of(
        several.map(lambda parts: b"(" + parts + b"t"),
        several.map(lambda parts: b"](" + parts + b"e"),
        pairs.map(lambda parts: b"}(" + parts + b"u"),
        st.tuples(st.one_of(_NAMED, below), several, st.sampled_from([b"R", b"\x81"])).map(
            lambda call: call[0] + b"(" + call[1] + b"t" + call[2]
        ),
        st.tuples(below, below).map(lambda both: b"".join(both) + b"b"),
        below.map(lambda value: value + b"q\0"),
        below.map(lambda value: value + b"Q"),
        st.tuples(below, several).map(lambda both: both[0] + b"(" + both[1] + b"e"),
    )


# Whatever a pickle can say in good order, and then anything at all.
_ORDERLY = st.recursive(_LEAVES, _made_of, max_leaves=30)
_ARGUMENTS: dict[str, st.SearchStrategy[bytes]] = {
    "uint1": st.binary(min_size=1, max_size=1),
    "uint2": st.binary(min_size=2, max_size=2),
    "int4": st.sampled_from([bytes(4), b"\x01\0\0\0", b"\xff\xff\xff\x7f", b"\xff" * 4]),
    "uint4": st.sampled_from([bytes(4), b"\x01\0\0\0", b"\0\0\0\x10", b"\xff" * 4]),
    "uint8": st.sampled_from([bytes(8), b"\x01" + bytes(7), b"\xff" * 8]),
    "float8": st.binary(min_size=8, max_size=8),
}
_NOISE = st.lists(
    st.one_of(
        st.sampled_from(pickletools.opcodes).flatmap(
            lambda op: _ARGUMENTS.get(op.arg.name if op.arg else "", st.binary(max_size=3) if op.arg else st.just(b""))
            .map(lambda argument: op.code.encode("latin1") + argument)
        ),
        _LEAVES,
    ),
    max_size=12,
).map(b"".join)  # fmt: skip
PICKLES = st.one_of(_ORDERLY, st.tuples(_ORDERLY, _NOISE).map(b"".join), _NOISE).map(
    lambda body: b"\x80\x02" + body + pickle.STOP
)
