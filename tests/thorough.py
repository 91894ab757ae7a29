"""Which cases run by `make test-all` alone, as `.ci/run` does: further cases of what other tests show too, and slow.

`make test` leaves them out, so that it answers within minutes. By itself pytest runs all, as for one file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

# A test -> how many of its cases, the first ones, `make test` runs.
KEPT = {
    "tests/docs/test_blocks.py::test_the_code_of_a_page_runs": 2,
    "tests/doctor/test_network.py::test_a_rank_that_never_comes_to_a_collective_is_named": 1,
    "tests/gpu/fake/test_fake.py::test_a_step_stays_on_its_device_and_waits_for_nothing": 8,
    "tests/launchers/test_elastic.py::test_a_lost_node_is_gone_on_without_and_taken_in_when_it_is_back": 0,
    "tests/others/test_published.py::test_a_published_configuration_does_what_the_page_says": 4,
    "tests/others/test_splits.py::test_a_run_goes_on_bit_for_bit_and_is_exported_in_the_published_order": 1,
    "tests/others/test_splits.py::test_a_run_is_that_of_one_process": 1,
    "tests/others/test_splits.py::test_each_gradient_is_that_of_plain_transformers": 1,
    "tests/others/test_splits.py::test_the_first_step_in_bf16_is_that_of_one_process": 0,
    "tests/others/test_table.py::test_a_row": 1,
    "tests/others/test_training.py::test_losses_are_those_of_a_plain_loop_and_of_a_resumed_run": 2,
    "tests/plan/test_memory.py::test_a_plan_of_a_mesh_takes_what_a_run_takes": 1,
    "tests/plan/test_memory.py::test_a_plan_takes_what_a_run_takes": 3,
    "tests/plan/test_published.py::test_each_way_changes_what_is_planned": 0,
    "tests/plan/test_search.py::test_what_is_heavier_takes_no_less_memory_and_is_not_planned_where_less_does_not_fit": 0,  # noqa: E501
    "tests/plan/test_time.py::test_equal_blocks_planned_once_take_the_same_time": 1,
    "tests/test_compile.py::test_equal_blocks_share_a_graph": 4,
    "tests/test_dimensions.py::test_a_run_is_that_of_one_process": 3,
    "tests/test_dimensions.py::test_each_gradient_is_that_of_the_whole_model": 2,
    "tests/test_dimensions.py::test_each_mesh_reads_the_checkpoints_of_the_others": 2,
    "tests/test_dimensions_models.py::test_a_run_is_that_of_one_process": 2,
    "tests/test_dimensions_models.py::test_each_gradient_is_that_of_the_whole_model": 2,
    "tests/test_memory_checkpoint.py::test_a_run_that_loses_a_node_goes_on_from_the_others_memory_bit_for_bit": 2,
}


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark what is left out as `thorough`."""
    seen: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if seen[test] > KEPT.get(test, seen[test]):
            item.add_marker("thorough")
