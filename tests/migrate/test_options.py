"""The table of FSDP1's options: nothing of the installed torch is missing, and what it recommends exists."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterator

import pytest
import torch.distributed.fsdp as fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard, wrap
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

from fsdp2.options.errors import ConfigError
from migration.__main__ import main
from migration.options import DECIDE, EXACT, REFUSED, SECTIONS, STATUSES, TABLE, Row, sections

# What the module of FSDP1 also exports, and what isn't FSDP1's.
FSDP2 = {
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "fully_shard",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "register_fsdp_forward_method",
    "UnshardHandle",
    "share_comm_ctx",
}
PRIVATE = ("_HYBRID_SHARD_ZERO2", "_module_classes_to_ignore", "_use_dtensor")  # which people use all the same


def names_in_torch() -> Iterator[str]:
    """As the table spells them."""
    cls = FullyShardedDataParallel
    yield from (f"{cls.__name__}.{name}" for name in inspect.signature(cls).parameters)
    yield from (f"{cls.__name__}.{name}()" for name in vars(cls) if not name.startswith("_"))
    yield from wrap.__all__
    for name in fsdp.__all__:
        if name == cls.__name__ or name in FSDP2:
            continue
        thing = getattr(fsdp, name)
        if issubclass(thing, enum.Enum):
            yield from (f"{name}.{member}" for member in thing.__members__)
        else:
            yield from (f"{name}.{field.name}" for field in dataclasses.fields(thing))


def test_the_shim_has_every_name_of_fsdp1() -> None:
    import fsdp1_interface as shim

    assert {*fsdp.__all__, *wrap.__all__} - FSDP2 <= set(shim.__all__)
    ours = inspect.signature(shim.FullyShardedDataParallel).parameters
    assert list(inspect.signature(FullyShardedDataParallel).parameters) == list(ours)[:-2]  # and two old names
    for name, method in vars(FullyShardedDataParallel).items():
        if not name.startswith("_") and inspect.isroutine(method := getattr(FullyShardedDataParallel, name, method)):
            expected = inspect.signature(method).parameters
            got = inspect.signature(getattr(shim.FullyShardedDataParallel, name)).parameters
            assert "args" in got or set(expected) - {"args", "kwargs"} <= set(got), name


def test_every_name_of_fsdp1_has_a_row() -> None:
    known = {row.name.removeprefix("wrap.") for row in TABLE}
    assert [name for name in names_in_torch() if name not in known] == []
    assert OptimStateKeyType.__name__ in {name.partition(".")[0] for name in names_in_torch()}


def test_no_row_is_of_something_that_torch_does_not_have() -> None:
    """But for what is around FSDP1, the old names, and what is no option at all."""
    beyond = ("Around it, and old names", "In code", "In configuration files")
    around = {row.name for section in beyond for row in SECTIONS[section]}
    there = set(names_in_torch())
    assert [n for row in TABLE if (n := row.name.removeprefix("wrap.")) not in there | around] == []
    for name in PRIVATE:
        assert any(known.endswith(name) for known in there), name


def test_codes_are_unique_and_rows_are_whole() -> None:
    assert len({row.code for row in TABLE}) == len({row.name for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert row.status in STATUSES
        assert row.becomes
        assert row.note or row.status == EXACT, f"{row.code} says neither what to decide nor why it is refused"
        assert row.status != REFUSED or row.becomes == "nothing"


def test_what_a_widely_used_converter_gets_wrong() -> None:
    by_name = {row.name: row for row in TABLE}
    hybrid = by_name["ShardingStrategy.HYBRID_SHARD"]
    assert "replicate" in hybrid.becomes
    assert hybrid.status == DECIDE
    assert by_name["ShardingStrategy.NO_SHARD"].becomes == "DistributedDataParallel(model)"
    assert by_name["StateDictType.LOCAL_STATE_DICT"].status == REFUSED


def test_what_the_rows_recommend_exists() -> None:
    arguments = set(inspect.signature(fully_shard).parameters)
    assert {"mesh", "reshard_after_forward", "mp_policy", "offload_policy", "ignored_params"} <= arguments
    fields = {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}
    assert {"param_dtype", "reduce_dtype", "cast_forward_inputs"} <= fields
    for method in (
        "set_modules_to_forward_prefetch",
        "set_modules_to_backward_prefetch",
        "set_requires_gradient_sync",
        "set_custom_reduce_scatter",
        "unshard",
        "reshard",
    ):
        assert hasattr(FSDPModule, method)
        assert any(method in row.becomes + row.note for row in TABLE) or method == "reshard"
    assert hasattr(DeviceMesh, "from_group")


def test_both_rows_about_recomputation_say_the_same() -> None:
    """After sharding it works, as `tests/rewriter/scripts/` shows with equal losses."""
    for row in (row for row in TABLE if row.code in ("FX02", "FC23")):
        assert row.becomes.startswith("the same")
        assert "has to" not in row.note


def test_each_line_of_a_table_is_a_row() -> None:
    assert sections('## A\n| <a id="fa01"></a>FA01 | `FSDP.module` | `x=…` | exact | a \\| b |\n') == {
        "A": [Row("FA01", "FullyShardedDataParallel.module", "x=…", EXACT, "a | b")]
    }
    for line in ('| <a id="fa02"></a>FA01 | `a` | b | exact | c |', '| <a id="fa01"></a>FA01 | `a` | b | other | c |',
                 '| <a id="fa01"></a>FA01 | `a` | b | exact | c | d |'):  # fmt: skip
        with pytest.raises(ValueError, match=r"row|unpack"):
            sections(f"## A\n{line}\n")


def test_the_command_prints_rows_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    main(["options", "no_shard"])
    printed = capsys.readouterr().out
    assert printed.startswith(
        "FS03 ShardingStrategy.NO_SHARD: decide\n  DistributedDataParallel(model)\n  Not reshard_after"
    )
    assert printed.count("\n") == 6
    assert "FY10 accelerate: fsdp_sharding_strategy NO_SHARD: decide" in printed
    main(["options"])
    assert capsys.readouterr().out.count(": exact\n") == sum(row.status == EXACT for row in TABLE)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["options", "no_such"], "options no_such: FSDP1 has no option of that name"),
        (["convert"], "invalid choice: 'convert'"),
        ([], "required: command"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main(arguments)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
