"""What isn't converted: one line that says why and what to do, nothing left behind, the source as it was."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp2.checkpoint.pickles import Unread
from fsdp2.checkpoint.refusal import Refused
from migration.checkpoints.names import stripped
from migration.checkpoints.rank_files import SHARDED, _whole
from migration.checkpoints.tree import Entry
from tests.harness import Payload
from tests.migrate.checkpoints.conftest import Cli, Saved, everything

State = dict[str, Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False))


def trained(net: nn.Module | None = None, groups: Callable[[Any], Any] = lambda parameters: parameters) -> Any:
    """A plain model's state dict, and its optimizer's with numbers for names."""
    net = net or model()
    adam = torch.optim.Adam(groups(list(net.parameters())), lr=0.1)
    net(torch.randn(4, 3)).square().sum().backward()
    adam.step()
    return net.state_dict(), adam.state_dict()


def named(optimizer: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The same with names, as FSDP.optim_state_dict gives it."""
    groups = [{**group, "params": [names[n] for n in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": {names[n]: state for n, state in optimizer["state"].items()}, "param_groups": groups}


def _nothing(place: Path, trace: Path) -> list[Any]:
    return [place / "absent"]


def _an_empty_folder(place: Path, trace: Path) -> list[Any]:
    return [place]


def _a_folder_of_checkpoints(place: Path, trace: Path) -> list[Any]:
    dcp.save({"model": trained()[0]}, checkpoint_id=place / "step" / "7")
    return [place]


def _text(place: Path, trace: Path) -> list[Any]:
    (place / "m.pt").write_text("not a checkpoint")
    return [place / "m.pt"]


def _a_truncated_file(place: Path, trace: Path) -> list[Any]:
    torch.save(trained()[0], place / "m.pt")
    content = (place / "m.pt").read_bytes()
    (place / "m.pt").write_bytes(content[: len(content) // 2])
    return [place / "m.pt"]


def _a_file_of_values(place: Path, trace: Path) -> list[Any]:
    torch.save({"epoch": 3, "name": "x"}, place / "m.pt")
    return [place / "m.pt"]


def _unknown_keys(place: Path, trace: Path) -> list[Any]:
    torch.save({"generator": trained()[0], "discriminator": trained()[0]}, place / "m.pt")
    return [place / "m.pt"]


def _two_models(place: Path, trace: Path) -> list[Any]:
    for name in ("student", "teacher"):
        torch.save(trained()[0], place / f"{name}.pt")
    return [place]


def _two_optimizers(place: Path, trace: Path) -> list[Any]:
    weights, optimizer = trained()
    torch.save({"model": weights, "optimizer_states": [optimizer, optimizer]}, place / "m.pt")
    return [place / "m.pt"]


def _an_optimizer_alone(place: Path, trace: Path) -> list[Any]:
    torch.save(trained()[1], place / "optim.pt")
    return [place / "optim.pt"]


def _another_models_optimizer_by_name(place: Path, trace: Path) -> list[Any]:
    weights, optimizer = trained()
    torch.save({"model": weights, "optim": named(optimizer, ["a.weight", "a.bias", "b.weight"])}, place / "m.pt")
    return [place / "m.pt"]


def _another_models_optimizer_by_shape(place: Path, trace: Path) -> list[Any]:
    weights, _ = trained()
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3, bias=False))
    torch.save({"model": weights, "optim": named(trained(other)[1], list(weights))}, place / "m.pt")
    return [place / "m.pt"]


def _another_models_optimizer_by_number(place: Path, trace: Path) -> list[Any]:
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3, bias=False))
    torch.save({"model": trained()[0], "optim": trained(other)[1]}, place / "m.pt")
    return [place / "m.pt"]


def _numbers_that_fit_in_two_ways(place: Path, trace: Path) -> list[Any]:
    net = model()
    net.register_buffer("table", torch.zeros(4, 3))  # as the first weight
    torch.save({"model": net.state_dict(), "optim": trained()[1]}, place / "m.pt")
    return [place / "m.pt"]


def _numbers_over_groups_that_share_shapes(place: Path, trace: Path) -> list[Any]:
    square = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    weights, optimizer = trained(square, lambda ps: [{"params": [ps[1]]}, {"params": [ps[0]]}])
    torch.save({"model": weights, "optim": optimizer}, place / "m.pt")
    return [place / "m.pt"]


def _too_few_names(place: Path, trace: Path) -> list[Any]:
    weights, optimizer = trained()
    torch.save({"model": weights, "optim": optimizer}, place / "m.pt")
    (place / "names.json").write_text(json.dumps(list(weights)[1:]))
    return [place / "m.pt", "--optimizer-names", place / "names.json"]


def _names_that_collide(place: Path, trace: Path) -> list[Any]:
    weights, _ = trained()
    torch.save({**weights, "_orig_mod.0.weight": weights["0.weight"]}, place / "m.pt")
    return [place / "m.pt"]


def _an_optimizer_without_groups(place: Path, trace: Path) -> list[Any]:
    torch.save({"model": trained()[0], "optimizer": {"state": {0: {"step": 3}}}}, place / "m.pt")
    return [place / "m.pt"]


def _torchscript(place: Path, trace: Path) -> list[Any]:
    torch.jit.script(nn.Linear(2, 2)).save(str(place / "m.pt"))
    return [place / "m.pt"]


def _a_whole_module(place: Path, trace: Path) -> list[Any]:
    torch.save(model(), place / "m.pt")
    return [place / "m.pt"]


def _deepspeed(place: Path, trace: Path) -> list[Any]:
    (place / "zero_to_fp32.py").write_text("")
    return [place]


def _a_missing_shard(place: Path, trace: Path) -> list[Any]:
    dcp.save({"model": trained()[0]}, checkpoint_id=place)
    (place / "__0_0.distcp").unlink()
    return [place]


def _a_truncated_shard(place: Path, trace: Path) -> list[Any]:
    dcp.save({"model": trained()[0]}, checkpoint_id=place)
    content = (place / "__0_0.distcp").read_bytes()
    (place / "__0_0.distcp").write_bytes(content[: len(content) // 2])
    return [place]


def _truncated_metadata(place: Path, trace: Path) -> list[Any]:
    dcp.save({"model": trained()[0]}, checkpoint_id=place)
    content = (place / ".metadata").read_bytes()
    (place / ".metadata").write_bytes(content[: len(content) // 2])
    return [place]


def _metadata_with_code(place: Path, trace: Path) -> list[Any]:
    dcp.save({"model": trained()[0]}, checkpoint_id=place)
    (place / ".metadata").write_bytes(pickle.dumps(Payload(trace)))
    return [place]


def _a_setting_with_code_in_dcp(place: Path, trace: Path) -> list[Any]:
    weights, optimizer = trained()
    state = named(optimizer, list(weights))
    state["param_groups"][0]["lr"] = Payload(trace)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=place)
    return [place]


def _a_file_that_is_code(place: Path, trace: Path) -> list[Any]:
    torch.save(Payload(trace), place / "m.pt")
    return [place / "m.pt"]


def _a_setting_with_code(place: Path, trace: Path) -> list[Any]:
    weights, optimizer = trained()
    optimizer["param_groups"][0]["lr"] = Payload(trace)
    torch.save({"model": weights, "optim": optimizer}, place / "m.pt")
    return [place / "m.pt"]


def _a_step_with_code(place: Path, trace: Path) -> list[Any]:
    weights, optimizer = trained()
    optimizer["state"][1]["step"] = Payload(trace)
    torch.save({"model": weights, "optim": optimizer}, place / "m.pt")
    return [place / "m.pt"]


def _an_attribute_of_a_function(place: Path, trace: Path) -> list[Any]:
    """What reads it may not change torch either: BUILD sets attributes of what a file names."""
    torch.save(trained()[0], place / "m.pt")
    built = pickle.dumps({"model": 1})[:-1] + b"ctorch._utils\n_rebuild_tensor_v2\n(N}X\x01\x00\x00\x00aK\x01stb."
    with zipfile.ZipFile(place / "m.pt") as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(place / "m.pt", "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            archive.writestr(name, built if name.endswith("/data.pkl") else data)
    return [place / "m.pt"]


def _dtensor() -> Any:
    """In a group of one process, which then ends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return distribute_tensor(torch.zeros(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    finally:
        dist.destroy_process_group()


def _a_dtensor_among_tensors(place: Path, trace: Path) -> list[Any]:
    """Of which the rest would make a model without its weights."""
    torch.save({"model": {"running_mean": torch.zeros(3), "weight": _dtensor()}}, place / "m.pt")
    torch.save({"epoch": 1}, place / "other.pt")
    return [place]


def _dtensors_of_ranks(place: Path, trace: Path) -> list[Any]:
    for rank in range(2):
        torch.save({"weight": _dtensor(), "table": torch.zeros(3)}, place / f"model_rank{rank}.bin")
    return [place]


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (_a_dtensor_among_tensors, "m.pt: model.weight is one rank's part of a tensor"),
        (_dtensors_of_ranks, "model_rank0.bin: weight is one rank's part of a tensor"),
        (_nothing, "there is nothing; give a checkpoint's file or folder"),
        (_an_empty_folder, "holds no checkpoint that is known"),
        (_a_folder_of_checkpoints, "give one of the folders in it, such as step"),
        (_text, "m.pt: can't be loaded"),
        (_a_truncated_file, "m.pt: can't be loaded"),
        (_a_file_of_values, "holds epoch, name, and it isn't clear which are a model's weights"),
        (_unknown_keys, "name them with --model-key"),
        (_two_models, "teacher.pt; give one of them as SRC, and what was saved with it as --optimizer, or choose one"),
        (_two_optimizers, "holds 2 optimizers"),
        (_an_optimizer_alone, "is an optimizer's state alone"),
        (_another_models_optimizer_by_name, "3 of its 3 parameters, such as a.weight, are not in the model"),
        (_another_models_optimizer_by_shape, "has the shape (5, 3), and 0.weight (4, 3): the optimizer is another"),
        (_another_models_optimizer_by_number, "whose shapes are not those of the model in its order"),
        (_numbers_that_fit_in_two_ways, "the model has 4 tensors that may be those"),
        (_numbers_over_groups_that_share_shapes, "over 2 groups that share shapes"),
        (_too_few_names, "--optimizer-names: has 2 names for 3"),
        (_names_that_collide, "0.weight and _orig_mod.0.weight both become 0.weight"),
        (_an_optimizer_without_groups, "m.pt optimizer has no parameter groups"),
        (_torchscript, "is TorchScript, which holds code"),
        (_a_whole_module, "holds a torch.nn.modules.container.Sequential and no state dict"),
        (_deepspeed, "is DeepSpeed's; its zero_to_fp32.py writes a state dict"),
        (_a_missing_shard, "__0_0.distcp"),
        (_a_truncated_shard, "can't be read"),
        (_truncated_metadata, ".metadata can't be used"),
        (_metadata_with_code, "which a checkpoint's metadata never holds"),
        (_a_setting_with_code_in_dcp, "optim.param_groups.0.lr can't be read"),
        (_a_file_that_is_code, "holds a pathlib.Path.touch and no state dict"),
        (_a_setting_with_code, "optim.param_groups.0.lr is a pathlib.Path.touch, which is not read"),
        (_a_step_with_code, "optim.state.1.step is a pathlib.Path.touch, which is not read"),
        (_an_attribute_of_a_function, "of a function"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(
    cli: Cli, tmp_path: Path, make: Callable[[Path, Path], list[Any]], part: str
) -> None:
    place, trace = tmp_path / "source", tmp_path / "trace"
    place.mkdir()
    arguments = make(place, trace)
    before = everything(tmp_path)
    status, line = cli(*arguments, tmp_path / "out")
    assert status == 2
    assert part in line
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("size", "part"), [([0, 2**61, 8], "a size beyond what any tensor has"), ([-1, 2**70], "a size that isn't valid")]
)
def test_a_sharded_tensor_that_no_tensor_can_be(size: list[int], part: str) -> None:
    place = Unread("ShardMetadata", (), {"shard_offsets": [0, 0, 0]})
    shard = Unread("Shard", (), {"metadata": place, "tensor": torch.empty(0, 1, 1)})
    whole = Unread(SHARDED, (), ([shard], Unread("ShardedTensorMetadata", (), {"size": size})))
    with pytest.raises(Refused, match=f"^m_rank0.pt: weight has {part}$"):
        _whole(("weight",), [{("weight",): Entry(None, lambda: whole, "m_rank0.pt: weight")}])


@pytest.mark.parametrize("trained_as", ["flat", "orig"])
@pytest.mark.parametrize("what", ["one rank's optimizer", "all ranks' optimizers", "local", "one rank's local"])
def test_what_has_no_names_is_refused_with_how_to_save_again(
    request: pytest.FixtureRequest, cli: Cli, tmp_path: Path, trained_as: str, what: str
) -> None:
    local = request.getfixturevalue(trained_as).folder / "local"
    source = tmp_path / "source"
    source.mkdir()
    if "optimizer" in what:
        shutil.copy(local.parent / "two" / "model.pt", source)
        for rank in range(1 if what.startswith("one") else 2):
            shutil.copy(local / f"optim_rank{rank}.pt", source)
    else:
        for rank in range(1 if what.startswith("one") else 2):
            shutil.copy(local / f"model_rank{rank}.pt", source)
    if what.startswith("one") and "local" in what:
        source = source / "model_rank0.pt"
    status, line = cli(source, tmp_path / "out")
    assert status == 2
    assert {
        "one rank's optimizer": "save it again with `FSDP.optim_state_dict(model, optimizer)`",
        "all ranks' optimizers": "save it again with `FSDP.optim_state_dict(model, optimizer)`",
        "local": "is a LOCAL_STATE_DICT",
        "one rank's local": "is one rank's, and the files of the others aren't beside it",
    }[what] in line
    assert not (tmp_path / "out").exists()


def test_a_state_that_fsdp1_overwrote_is_refused(orig: Saved, cli: Cli, tmp_path: Path) -> None:
    """Torch's fault: what it gathers for exp_avg is in the buffer of exp_avg_sq, unless it is copied off a GPU."""
    state = torch.load(orig.folder / "offloaded.pt", weights_only=True)["optimizer"]["state"]["class_token"]
    assert torch.equal(state["exp_avg"], state["exp_avg_sq"])
    status, line = cli(orig.folder / "offloaded.pt", tmp_path / "out")
    assert (status, "save again without offload_to_cpu" in line) == (2, True)
    assert cli(orig.folder / "offloaded.pt", tmp_path / "out", "--no-optimizer")[0] == 0


def test_a_missing_rank_is_named(orig: Saved, cli: Cli, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(orig.folder / "local" / "model_rank1.pt", source)
    assert "model_rank*.pt of rank 0 is missing" in cli(source, tmp_path / "out")[1]


def test_a_strangers_names_are_printed_without_their_control_characters(cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": trained()[0], "\x1b[31mred": 1}, tmp_path / "m.pt")
    status, printed = cli(tmp_path / "m.pt", tmp_path / "out")
    assert status == 0
    assert "\x1b" not in printed
    assert "left out: \\x1b[31mred, 1 entries" in printed


def test_names_are_stripped_where_wrappers_put_them_and_nowhere_else() -> None:
    given = {
        "module._fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module._orig_mod.weight": "blocks.0.weight",
        "module._forward_module.module.bias": "module.bias",
    }
    assert stripped(given) == given
    assert stripped(["module.a", "b"]) == {"module.a": "module.a", "b": "b"}
    assert stripped(["my_orig_mod.a"]) == {"my_orig_mod.a": "my_orig_mod.a"}
