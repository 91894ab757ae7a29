"""Values of a data file are those that it holds: none is taken for a date, rounded, or left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp2.data.errors import UnusableText
from fsdp2_extra.text import published
from fsdp2_extra.text.forms import messages_of
from fsdp2_extra.text.places import find
from fsdp2_extra.text.reading import rows_of

ASKED = {"role": "user", "content": "a"}


def conversation(**answer: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "content": "b", **answer}]}


def calls(arguments: Any) -> dict[str, Any]:
    return conversation(tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}])


def read(place: Path, field: str | dict[str, str]) -> list[Any]:
    pytest.importorskip("datasets")
    return [row.content for row in rows_of(published.find(str(place)), field)]


# Of several files, as types are guessed file by file.
JSON: dict[str, list[list[dict[str, Any]]]] = {
    "a content of two types": [[conversation(), conversation(content=[{"type": "text", "text": "c"}])]],
    "a field of two types": [[{"text": 'say "a"\n', "of": 1}, {"text": "b", "of": "c"}]],
    "dates": [[{"text": "a"}], [{"text": "2024-01-01"}, {"text": "2024-01-02"}]],
    "dates alone": [[{"text": "2024-01-01T10:00:00Z"}]],
    "numbers": [[calls({"x": 3.141592653589793, "n": 123456789012345678901}), calls({"y": [1e-20]})]],
    "other keys": [[calls({"city": "a", "unit": None})], [calls({"city": "b"})]],
}


@pytest.mark.parametrize("form", ["lines", "list"])
@pytest.mark.parametrize("what", JSON)
def test_json_is_as_it_is_written(tmp_path: Path, what: str, form: str) -> None:
    for number, values in enumerate(JSON[what]):
        lines = "".join(json.dumps(one) + "\n" for one in values)
        (tmp_path / f"{number}.json").write_text(lines if form == "lines" else json.dumps(values, indent=1))
    assert read(tmp_path, {}) == [one for values in JSON[what] for one in values]


def test_csv_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufeffinstruction,output\nwhich type,None\n"in ""two""\nlines",NA\n\n')
    (tmp_path / "b.csv").write_text("instruction,output\n007,1.50\nx,\n2024-01-01,TRUE\n")
    wanted = [["which type", "None"], ['in "two"\nlines', "NA"], ["007", "1.50"], ["x", ""], ["2024-01-01", "TRUE"]]
    assert read(tmp_path, {}) == [dict(zip(("instruction", "output"), one, strict=True)) for one in wanted]


REFUSED = {
    "a field too many": ("a.csv", "text,output\na,b\nc,d,e\n", r"a\.csv, line 3: has 3 fields, and its first"),
    "a column twice": ("a.csv", "text,text\na,b\n", "has several columns text; give one of them another name"),
    "a quote": ("a.csv", 'text\n"a" b\n', r"line 2: can't be read as CSV"),
    "a key twice": ("a.json", '{"text": "a", "text": "b"}', "line 1: an object has 'text' twice; keep one of them"),
    "half": ("a.json", '[{"text": "\\ud800"}]', "value 1: has half of a character"),
    "no object": ("a.json", '["a"]', "value 1: is no object"),
    "torn": ("a.json", '[{"text": "a"}', r"a\.json: can't be read as JSON"),
    "nothing": ("a.json", "\n", "is empty"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_as_it_seems_is_one_line(tmp_path: Path, what: str) -> None:
    name, content, part = REFUSED[what]
    (tmp_path / name).write_text(content)
    with pytest.raises(UnusableText, match=part) as refused:
        read(tmp_path / name, "text")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("reader", ["pyarrow", "datasets"])
def test_a_row_of_a_table_has_its_own_keys(tmp_path: Path, reader: str) -> None:
    """A table has the keys of all rows in each, and what is of several types as JSON."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tools = [[{"name": "f", "parameters": {one: {"type": "string"}}}] for one in ("city", "unit")]
    rows = [{**calls({"city": "a", "unit": "b"}), "tools": tools[0]}, {**calls({"unit": "c"}), "tools": tools[1]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    texts = pyarrow.array(['"a"', '[{"type": "text", "text": "b"}]'])
    columns = [pyarrow.array(["user", "assistant"]), pyarrow.ExtensionArray.from_storage(pyarrow.json_(), texts)]
    messages = pyarrow.StructArray.from_arrays(columns, ["role", "content"])
    table = pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 2], messages)})
    parquet.write_table(table, tmp_path / "b.parquet")
    for name, wanted in (("a", rows), ("b", [conversation(content=[{"type": "text", "text": "b"}])])):
        file = tmp_path / f"{name}.parquet"
        found = read(file, {}) if reader == "datasets" else [row.content for row in rows_of(find(str(file))[0], {})]
        assert found == wanted


@pytest.mark.parametrize(
    ("form", "line", "part"),
    [
        ("messages", {"messages": '[{"role": "user", "content": "a", "content": "b"}]'}, "has 'content' twice"),
        ("messages", {"messages": [json.dumps(ASKED)[:-1] + ', "role": "tool"}']}, "has 'role' twice"),
        (
            "conversations",
            {"conversations": [{"from": "human", "value": "a", "content": "b"}]},
            "a turn with content beside value; leave that out",
        ),
        ("instruction", {"instruction": "add", "input": 0, "output": "a"}, "its input is no text"),
        ("instruction", {"instruction": "add", "input": [], "output": "a"}, "its input is no text"),
        ("prompt", {"system": False, "prompt": "a", "completion": "b"}, "its system is no text"),
    ],
)
def test_nothing_of_a_line_is_left_out(form: str, line: dict[str, Any], part: str) -> None:
    with pytest.raises(UnusableText, match=part):
        messages_of(line, form, {}, "line 1")


@pytest.mark.parametrize("deep", [101, 900, 200_000])
def test_a_line_that_is_nested_too_deeply(tmp_path: Path, deep: int) -> None:
    """Another process couldn't be given it."""
    (tmp_path / "a.jsonl").write_text('{"messages": ' + "[" * deep + "]" * deep + "}\n")
    with pytest.raises(UnusableText, match=r"a\.jsonl, line 1: its lists are more than 100 deep"):
        list(rows_of(find(str(tmp_path / "a.jsonl"))[0], {}))


def test_groups_of_a_table_that_hold_no_row_are_passed_over(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    with parquet.ParquetWriter(tmp_path / "a.parquet", pyarrow.schema([("text", "string")])) as writer:
        for texts in ([], ["a", "b"], [], ["c"], []):
            writer.write_table(pyarrow.table({"text": pyarrow.array(texts, "string")}))
    assert read(tmp_path, "text") == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_another_encoding_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text\né\n" if name == "a.csv" else '{"text": "é"}\n', "utf-16")
    with pytest.raises(
        UnusableText, match=rf"{name}: can't be read as text \('utf-8' codec.*\); write it again as UTF-8$"
    ):
        read(tmp_path, "text")
