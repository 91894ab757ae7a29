"""The functions of `snippets.py` as text, to be put into a rewritten program."""

from __future__ import annotations

from pathlib import Path

import libcst as cst


class _Bare(cst.CSTTransformer):
    """Without annotations, for which a program would need imports, and by the name that the program calls."""

    def leave_Param(self, original_node: cst.Param, updated_node: cst.Param) -> cst.Param:  # noqa: N802
        if updated_node.default is None:
            return updated_node.with_changes(annotation=None)
        equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        return updated_node.with_changes(annotation=None, equal=equal)

    def leave_FunctionDef(  # noqa: N802  the names are libcst's
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        return updated_node.with_changes(returns=None, leading_lines=[])


def _sources() -> dict[str, str]:
    """Read, and not imported: nothing of torch is needed to rewrite a program."""
    module = cst.parse_module(Path(__file__).with_name("snippets.py").read_text(encoding="utf-8"))
    found = [node for node in module.body if isinstance(node, cst.FunctionDef)]
    return {
        node.name.value: module.code_for_node(cst.ensure_type(node.visit(_Bare()), cst.FunctionDef)) for node in found
    }


HELPERS = _sources()
