"""Libraries that shard by FSDP1 or FSDP2: what is said once they are told to use FSDP2, and what they then demand."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from migration.rewriter.check import everything
from tests.rewriter.test_commands import run
from tests.rewriter.test_configs import ACCELERATE

PLUGIN = """\
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP

plugin = FullyShardedDataParallelPlugin({}state_dict_config=FullStateDictConfig(offload_to_cpu=True))
accelerator = Accelerator(fsdp_plugin=plugin)
model, optimizer = accelerator.prepare(build(), optimizer)
if isinstance(model, FSDP):
    with FSDP.summon_full_params(model):
        model.lm_head.weight.norm()
"""
IDIOM = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator()
net = accelerator.prepare(build())
adam = torch.optim.AdamW(net.parameters())
adam, loader = accelerator.prepare(adam, loader)
adam.zero_grad()
"""


def codes(*paths: Path) -> list[tuple[int, str, str]]:
    return [(one.line, one.code, one.status) for one in everything([str(path) for path in paths]).findings]


def test_accelerate_by_fsdp2_is_no_use_of_fsdp1_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PLUGIN.format(""))
    assert (4, "FC21", "to decide first") in codes(path)
    path.write_text(PLUGIN.format("fsdp_version=2, use_orig_params=True, "))
    found = codes(path)
    assert [one for one in found if one[2] == "to decide"] == [(4, "FY03", "to decide"), (8, "FM09", "to decide")]
    assert run("rewrite", "--write", path) == 1
    made = path.read_text()
    assert "if isinstance(model, FSDPModule):" in made
    assert "# fsdp2: FY03 use_orig_params: With FSDP2 accelerate refuses forward_prefetch" in made
    done = made.replace("use_orig_params=True, ", "").replace("with FSDP.summon_full_params(model)", "if True")
    path.write_text("\n".join(line for line in done.splitlines() if "# fsdp2:" not in line and " as FSDP" not in line))
    assert codes(path) == []


@pytest.mark.parametrize("how", ["moved with it", "given", "beside it"])
def test_a_configuration_says_which_fsdp_a_script_gets(tmp_path: Path, how: str) -> None:
    script, config = tmp_path / "train.py", tmp_path / "fsdp.yaml"
    script.write_text(PLUGIN.format(""))
    config.write_text(ACCELERATE)
    assert (4, "FC21", "to decide first") in codes(script), "which says FSDP1 and isn't moved"
    if how != "moved with it":
        assert run("rewrite", "--write", config) == 0
    given = [script] if how == "beside it" else [script, config]
    assert [code for _, code, _ in codes(*given) if code == "FC21"] == []
    config.write_text(ACCELERATE.replace("SHARD_GRAD_OP", "HYBRID_SHARD"))
    assert (4, "FC21", "to decide first") in codes(script, config), "which stays as it is"


def test_what_accelerate_prepares_alone_is_found(tmp_path: Path) -> None:
    """Also in a script that says nothing of FSDP, which its configuration alone asks for."""
    script, config = tmp_path / "train.py", tmp_path / "fsdp.yaml"
    script.write_text(IDIOM)
    assert codes(script) == []
    config.write_text(ACCELERATE)
    assert [one for one in codes(script, config) if one[1] == "FC38"] == [(7, "FC38", "to decide")]
    script.write_text(IDIOM.replace("build()", "model"))
    assert [line for line, code, _ in codes(script, config) if code == "FC38"] == [5, 7]
    together = IDIOM.replace("prepare(adam, loader)", "prepare(net, adam, loader)")
    script.write_text(together.replace("accelerator.prepare(build())", "build()"))
    assert [one for one in codes(script, config) if one[1] == "FC38"] == []


def test_accelerate_demands_it() -> None:
    accelerate = pytest.importorskip("accelerate")
    assert "must be passed together to `Accelerator.prepare()`" in inspect.getsource(accelerate.Accelerator.prepare)


TRAINERS = {
    "transformer_layer_cls_to_wrap": ["Block"], "backward_prefetch": "backward_pre", "use_orig_params": True,
    "sync_module_states": True, "limit_all_gathers": True, "min_num_params": 0, "xla": False,
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_the_trainers_file_is_moved(tmp_path: Path, prefix: str) -> None:
    path = tmp_path / "fsdp_config.json"
    path.write_text(json.dumps({f"{prefix}{key}": value for key, value in TRAINERS.items()}))
    assert {code for _, code, _ in codes(path)} == {"FY03", "FY05", "FY08"}
    assert run("rewrite", "--write", path) == 0
    kept = ("transformer_layer_cls_to_wrap", "min_num_params", "xla")
    assert json.loads(path.read_text()) == {f"{prefix}version": 2, **{f"{prefix}{key}": TRAINERS[key] for key in kept}}
    assert codes(path) == []


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ("fsdp='full_shard auto_wrap', fsdp_config='fsdp_config.json'", True),
        ("fsdp=True", True),
        ("fsdp=True, fsdp_config={'version': 1}", True),
        ("fsdp=True, fsdp_config={'version': 2, 'reshard_after_forward': False}", False),
        ("fsdp=True, fsdp_config='fsdp_config.json'", False),
        ("fsdp='', fsdp_config={}", False),
    ],
)
def test_the_trainers_arguments(tmp_path: Path, arguments: str, left: bool) -> None:
    script, config = tmp_path / "train.py", tmp_path / "fsdp_config.json"
    script.write_text(f"from transformers import TrainingArguments\n\nargs = TrainingArguments('out', {arguments})\n")
    config.write_text(json.dumps({**TRAINERS, "version": 2}))
    assert codes(script, config) == ([(3, "FC39", "to decide")] if left else [])


def test_transformers_uses_fsdp2_as_the_rows_say(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def given(**arguments: object) -> object:
        made = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **arguments)
        return {key: made.fsdp_plugin_args[key] for key in ("fsdp_version", "reshard_after_forward")}

    assert given(fsdp=True, fsdp_config={**TRAINERS}) == {"fsdp_version": 2, "reshard_after_forward": True}
    config = {"version": 2, "reshard_after_forward": False}
    assert given(fsdp=True, fsdp_config=config) == {"fsdp_version": 2, "reshard_after_forward": False}
    assert given(fsdp="shard_grad_op auto_wrap") == {"fsdp_version": 2, "reshard_after_forward": False}
    with pytest.raises(ValueError, match="only available with FSDP1"):
        given(fsdp="hybrid_shard")


def test_both_commands_count_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fsdp.yaml").write_text(ACCELERATE.replace("SHARD_GRAD_OP", "HYBRID_SHARD"))
    (tmp_path / "train.py").write_text(IDIOM)
    assert run("check", tmp_path) == run("rewrite", tmp_path) == 1
    printed = capsys.readouterr()
    assert "2 to decide, " in printed.out
    assert "2 places to decide" in printed.err


@pytest.mark.parametrize(
    "made", ["accelerator = Accelerator", "self.accelerator: Accelerator = accelerate.Accelerator"]
)
def test_accelerates_own_methods_are_no_models(tmp_path: Path, made: str) -> None:
    """In a folder with a program that makes models of FSDP1 itself, where no_sync() may be a model's."""
    (tmp_path / "fsdp.yaml").write_text(ACCELERATE)
    assert run("rewrite", "--write", tmp_path) == 0
    (tmp_path / "plain.py").write_text(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n\nnet = FSDP(build())\n"
    )
    name, script = made.split(":")[0].split(" =")[0], tmp_path / "train.py"
    lines = f"def train(self, net):\n    {made}()\n    with {name}.no_sync(net):\n        {name}.clip_grad_norm_(net)\n"
    script.write_text(f"import accelerate\nfrom accelerate import Accelerator\n\n\n{lines}")
    assert {code for _, code, _ in codes(tmp_path)} == {"FC01", "FA01"}
    script.write_text(script.read_text().replace("Accelerator()", "Other()"))
    assert {"FM12", "FM13"} < {code for _, code, _ in codes(tmp_path)}
