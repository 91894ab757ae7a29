"""Configuration files: accelerate's are moved line by line, others are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from migration.rewriter.check import everything
from tests.rewriter.test_commands import run

ACCELERATE = """\
# two nodes
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_sharding_strategy: SHARD_GRAD_OP  # ZeRO-2
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
num_processes: 8
"""
MOVED = """\
# two nodes
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: false  # ZeRO-2
  fsdp_state_dict_type: SHARDED_STATE_DICT
num_processes: 8
"""


def test_accelerates_configuration_is_moved(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(ACCELERATE)
    codes = [(finding.line, finding.code) for finding in everything([str(path)]).findings]
    assert codes == [
        (4, "FY01"), (5, "FY05"), (6, "FY03"), (7, "FY03"), (8, "FY02"), (9, "FY04"), (10, "FY03"), (11, "FY03")
    ]  # fmt: skip
    assert run("rewrite", "--write", path) == 0
    assert path.read_text() == MOVED
    assert run("rewrite", "--write", path) == 0
    assert path.read_text() == MOVED
    assert everything([str(path)]).findings == []


def test_what_accelerates_bf16_adds_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(f"{ACCELERATE}mixed_precision: bf16\n")
    assert run("rewrite", "--write", path) == 0
    *moved, mark, last = path.read_text().splitlines(keepends=True)
    assert ("".join(moved), last) == (MOVED, "mixed_precision: bf16\n")
    assert mark.startswith("# fsdp2: FY11 With FSDP2 accelerate sets output_dtype too")
    assert f"{path}:13:1 FY11 mixed_precision: bf16" in (said := capsys.readouterr().err)
    assert "accelerate sets output_dtype too" in said
    path.write_text(f"{ACCELERATE}mixed_precision: 'no'\n")
    assert "FY11" not in [finding.code for finding in everything([str(path)]).findings]


@pytest.mark.parametrize("indent", [None, 4, "\t"])
def test_accelerates_json_is_moved(tmp_path: Path, indent: int | str | None) -> None:
    held = {"fsdp_sharding_strategy": 1, "fsdp_use_orig_params": True, "fsdp_offload_params": False}
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"num_processes": 8, "fsdp_config": held, "é": None}, indent=indent, ensure_ascii=False))
    assert run("rewrite", "--write", path) == 0
    moved = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False}
    expected = {"num_processes": 8, "fsdp_config": moved, "é": None}
    assert path.read_text() == json.dumps(expected, indent=indent, ensure_ascii=False)
    assert everything([str(path)]).findings == []


@pytest.mark.parametrize(("strategy", "code"), [("HYBRID_SHARD", "FY09"), ("NO_SHARD", "FY10")])
def test_a_strategy_that_is_no_resharding_policy_is_not_made_one(
    tmp_path: Path, strategy: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fsdp.yaml"
    text = ACCELERATE.replace("SHARD_GRAD_OP", strategy)
    path.write_text(text)
    assert run("rewrite", "--write", path) == 1
    assert path.read_text() == text
    said = capsys.readouterr().err
    assert f"{path}:8:3 {code} fsdp_sharding_strategy: {strategy}: " in said
    assert "FULL_SHARD" not in said
    assert "1 place to decide" in said


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("composer.yaml", "trainer:\n  fsdp_config:\n    sharding_strategy: FULL_SHARD\n", "FY06"),
        ("lightning.yaml", "trainer:\n  strategy: fsdp\n", "FY07"),
        ("class.yml", "trainer:\n  strategy:\n    class_path: lightning.pytorch.strategies.FSDPStrategy\n", "FY07"),
        ("hybrid.json", '{"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}', "FY09"),
        ("trainers.yaml", "output_dir: x\nfsdp: full_shard auto_wrap\n", "FC39"),
        ("args.json", '{"fsdp": "full_shard auto_wrap", "fsdp_config": "fsdp_config.json"}', "FC39"),
        ("nested.json", '{"fsdp": "hybrid_shard auto_wrap", "fsdp_config": {"use_orig_params": true}}', "FC39"),
        ("nested.yaml", "fsdp: no_shard\nfsdp_config:\n  use_orig_params: true\n", "FC39"),
    ],
)  # fmt: skip
def test_others_are_found_and_left(tmp_path: Path, name: str, text: str, code: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert code in [finding.code for finding in everything([str(path)]).findings]
    run("rewrite", "--write", path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none.yaml", "distributed_type: FSDP\nnum_processes: 8\n"),
        ("empty.yaml", "distributed_type: FSDP\nfsdp_config: {}\n"),
        (
            "list.yaml",
            "a:\n  - distributed_type: FSDP\n    fsdp_config:\n      fsdp_sharding_strategy: FULL_SHARD\n",
        ),
        ("fsdp_config.json", '{"_comment": "ours", "use_orig_params": true}'),
    ],
)
def test_what_says_fsdp_in_another_form_is_not_passed_over(
    tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert run("check", path) == 1
    printed = capsys.readouterr()
    assert "FC24" in printed.out
    assert "in a form that isn't known here: move it by hand" in printed.err
    run("rewrite", "--write", path)
    assert path.read_text() == text
    path.write_text(text.replace("FSDP", "MULTI_GPU").replace("fsdp", "ours").replace("orig_params", "seed"))
    assert run("check", path) == 0


@pytest.mark.parametrize(
    "text",
    [
        '{"fsdp": "", "fsdp_config": {"min_num_params": 0, "xla": false, "xla_fsdp_v2": false}}',
        '[{"distributed_type": "FSDP", "fsdp_version": 1, "loss": 3}]',
        '{"matrix": {"fsdp": ["full_shard", "no_shard"]}}',
        '{"fsdp": "we tried full_shard and no_shard"}',
        '{"runs": [{"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2}}]}',
    ],
)
def test_what_only_speaks_of_fsdp_is_passed_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(text)
    assert run("check", path) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("flow.yaml", "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_use_orig_params: true}\n"),
        ("below.yaml", "fsdp_config:\n  fsdp_sharding_strategy:\n    FULL_SHARD\n"),
        ("question.yaml", "fsdp_config:\n  ? fsdp_sharding_strategy\n  : FULL_SHARD\n"),
        ("anchor.yaml", "fsdp_config:\n  fsdp_use_orig_params: &yes true\n  fsdp_offload_params: *yes\n"),
        ("merged.yaml", "a: &own {fsdp_use_orig_params: true, fsdp_offload_params: true}\nfsdp_config:\n  <<: *own\n"),
        ("shared.yaml", "own: &own\n  fsdp_use_orig_params: true\nfsdp_config: *own\n"),
        ("separator.yaml", "a: 'x\u2028y'\nfsdp_config:\n  fsdp_use_orig_params: true\n  fsdp_offload_params: true\n"),
        ("half.json", '{"a": "\\ud800", "fsdp_config": {"fsdp_use_orig_params": true}}'),
        ("huge.json", '{"a": 1e400, "fsdp_config": {"fsdp_use_orig_params": true}}'),
    ],
)  # fmt: skip
def test_what_lines_do_not_say_is_left(
    tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert run("check", path) == 1
    assert "FY01 [to decide]" in capsys.readouterr().out
    assert run("rewrite", "--write", path) == 1
    assert "move its keys by hand" in capsys.readouterr().err
    assert path.read_text() == text


def test_of_two_json_configurations_accelerates_is_moved(tmp_path: Path) -> None:
    path, other = tmp_path / "two.json", {"fsdp_config": {"size": 1}}
    path.write_text(json.dumps({"a": other, "b": {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}}))
    assert run("rewrite", "--write", path) == 0
    moved = {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}}
    assert json.loads(path.read_text()) == {"a": other, "b": moved}


def test_aliases_that_stand_for_terabytes_end_nothing(tmp_path: Path) -> None:
    doubled = [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 60)]
    (tmp_path / "bomb.yaml").write_text("\n".join(["# fsdp", "a0: &a0 {x: 1}", *doubled]))
    (tmp_path / "fsdp.yaml").write_text(ACCELERATE)
    found = everything([str(tmp_path)])
    assert [config.source.path.name for config in found.configs] == ["fsdp.yaml"]
    assert "bomb.yaml: is made of aliases that stand for more than it could hold" in found.notes[0]


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("fsdp: [1\n")
    (tmp_path / "other.yaml").write_text("a: 1\nb: [fsdp]\n")
    (tmp_path / "own.yaml").write_text("fsdp_config:\n  _target_: engine.Config\n  fsdp_size: 2\n")
    (tmp_path / "actor.yaml").write_text("strategy: fsdp\nppo_epochs: 1\n")
    (tmp_path / "two.yaml").write_text("fsdp_config:\n  fsdp_version: 2\n")
    found = everything([str(tmp_path)])
    findings, notes = found.findings, found.notes
    assert [(Path(one.file).name, one.code) for one in findings] == [("broken.yaml", "FC24")]  # it may be one
    assert len(notes) == 1
    assert "broken.yaml: is not YAML" in notes[0]
