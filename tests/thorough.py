"""Which cases are left out by `make test`, so that it answers within minutes, and which by `.ci/run` too.

They are further cases of what other tests show too, and slow. `.ci/run` keeps at least one case of each test, since it
looks after each change; `make test-all` has them all. By itself pytest runs all, as for one file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

ALL = 1_000
# A test -> how many of its cases, the first ones, `make test` runs. A second number is for `.ci/run`, which without it
# runs as many, but at least one.
KEPT: dict[str, int | tuple[int, int]] = {
    "tests/commands/test_card.py::test_it_says_steps_losses_flags_and_versions": 1,
    "tests/commands/test_eval.py::test_a_run_is_scored": 0,
    "tests/commands/test_export.py::test_every_format_holds_the_full_model": 5,
    "tests/commands/test_export.py::test_memory_is_bounded_by_a_tensor_and_not_by_the_model": 0,
    "tests/commands/test_import.py::test_settings_of_an_import_with_which_no_step_is_made": 3,
    "tests/docs/test_blocks.py::test_the_code_of_a_page_runs": (1, ALL),
    "tests/docs/test_reference.py::test_each_field_of_a_record_is_explained": 1,
    "tests/gpu/fake/test_fake.py::test_a_step_stays_on_its_device_and_waits_for_nothing": 1,
    "tests/hostile/test_bounds.py::test_a_configuration_that_asks_for_too_much": 1,
    "tests/hostile/test_bounds.py::test_a_forward_that_no_step_could_hold": 7,
    "tests/hostile/test_memory.py::test_no_file_takes_more_memory_than_it_has": 0,
    "tests/launchers/test_elastic.py::test_a_lost_node_is_gone_on_without_and_taken_in_when_it_is_back": 0,
    "tests/launchers/test_ray_further.py::test_a_mesh_of_two_dimensions_with_four_workers": 1,
    "tests/launchers/test_ray_train.py::test_a_run_of_torchrun_goes_on_through_ray": 1,
    "tests/launchers/test_ray_train.py::test_losses_reports_and_artifacts": 0,
    "tests/launchers/test_torchrun.py::test_two_nodes_train": 0,
    "tests/memory/test_runs.py::test_recording_changes_no_loss": 1,
    "tests/migrate/checkpoints/test_convert.py::test_fsdp2_goes_on_bit_for_bit": 3,
    "tests/migrate/checkpoints/test_layouts.py::test_a_layout_is_found_out_and_converted": 3,
    "tests/migrate/prove/test_against_one.py::test_the_fault_is_named_and_none_without_it": 32,
    "tests/migrate/prove/test_two.py::test_what_the_rewriter_makes_is_proven": 5,
    "tests/migrate/test_shim.py::test_losses_are_bit_equal_to_fsdp1": 2,
    "tests/migrate/test_shim_api.py::test_the_code_that_is_logged_trains_the_same": 4,
    "tests/others/test_accelerate.py::test_a_run_goes_on_with_the_losses_of_the_other_program": 0,
    "tests/others/test_dpo.py::test_what_a_program_says": 0,
    "tests/others/test_dpo_memory.py::test_the_sum_of_a_plan_and_the_references_shards": 0,
    "tests/others/test_dpo_memory.py::test_with_adapters_a_plan_of_the_training": 0,
    "tests/others/test_examples.py::test_dpo_computes_in_bf16": 1,
    "tests/others/test_examples.py::test_dpo_with_adapters_has_one_model": 0,
    "tests/others/test_flex.py::test_a_sharded_model_trains_by_flex_as_by_a_mask": 1,
    "tests/others/test_flex.py::test_flex_is_the_mask_for_each_pair": 2,
    "tests/others/test_generate.py::test_generate_gives_the_tokens_of_one_process": 1,
    "tests/others/test_published.py::test_a_published_configuration_does_what_the_page_says": 4,
    "tests/others/test_splits.py::test_a_plan_that_the_folder_brings_does_not_count": 0,
    "tests/others/test_splits.py::test_a_run_goes_on_bit_for_bit_and_is_exported_in_the_published_order": 0,
    "tests/others/test_splits.py::test_a_run_is_that_of_one_process": 1,
    "tests/others/test_splits.py::test_each_gradient_is_that_of_plain_transformers": 1,
    "tests/others/test_splits.py::test_the_first_step_in_bf16_is_that_of_one_process": 0,
    "tests/others/test_start.py::test_the_weights_of_a_folder_are_there_on_any_number_of_ranks": 1,
    "tests/others/test_table.py::test_a_row": 0,
    "tests/others/test_training.py::test_losses_are_those_of_a_plain_loop_and_of_a_resumed_run": 1,
    "tests/plan/test_calibration.py::test_the_rates_of_another_machine_are_found_and_carry_over": 0,
    "tests/plan/test_command.py::test_advice_is_drawn_from_plans": 0,
    "tests/plan/test_command.py::test_what_a_plan_that_fits_could_do_without": 0,
    "tests/plan/test_in_a_run.py::test_a_run_says_what_the_plan_said": 0,
    "tests/plan/test_in_a_run.py::test_other_flags_and_other_ranks_are_named": 0,
    "tests/plan/test_memory.py::test_a_flag_lowers_its_kind": 3,
    "tests/plan/test_memory.py::test_a_plan_of_a_mesh_takes_what_a_run_takes": 0,
    "tests/plan/test_memory.py::test_a_plan_takes_what_a_run_takes": 1,
    "tests/plan/test_memory.py::test_equal_blocks_planned_once_are_the_same_plan": 0,
    "tests/plan/test_memory.py::test_more_ranks_take_less_until_padding_is_all_that_is_left": 0,
    "tests/plan/test_memory.py::test_no_rank_takes_more_than_the_first": 0,
    "tests/plan/test_memory.py::test_padding_takes_more_of_a_small_model_on_more_ranks": 0,
    "tests/plan/test_page.py::test_the_page_draws_memory_exchanges_and_sliders": 0,
    "tests/plan/test_published.py::test_each_way_changes_what_is_planned": 0,
    "tests/plan/test_saving.py::test_a_save_takes_what_is_planned": 1,
    "tests/plan/test_saving.py::test_copies_of_a_save_in_the_background_are_there_in_later_steps": 0,
    "tests/plan/test_saving.py::test_starting_from_weights_takes_what_is_planned": 0,
    "tests/plan/test_search.py::test_the_search_finds_what_brute_force_finds": 0,
    "tests/plan/test_search.py::test_what_is_heavier_takes_no_less_memory_and_is_not_planned_where_less_does_not_fit": 0,  # noqa: E501
    "tests/plan/test_time.py::test_accumulation_exchanges_gradients_as_often_as_the_flag_says": 0,
    "tests/plan/test_time.py::test_equal_blocks_planned_once_take_the_same_time": 1,
    "tests/plan/test_transformers.py::test_a_plan_takes_what_a_run_takes": 1,
    "tests/remote/test_failures.py::test_a_run_that_has_lost_its_lease_does_not_commit": 1,
    "tests/remote/test_failures.py::test_a_server_that_stays_away_ends_the_run": 1,
    "tests/remote/test_failures.py::test_from_a_command_line_after_a_run_that_was_killed": 0,
    "tests/remote/test_runs.py::test_a_run_goes_on_elsewhere_as_if_it_were_local": 1,
    "tests/remote/test_runs.py::test_damage_is_named": 0,
    "tests/remote/test_runs.py::test_old_checkpoints_are_removed_and_newer_ones_set_aside": 0,
    "tests/slurm/test_slurm.py::test_the_script_starts_one_run_of_all_tasks": 1,
    "tests/test_adapter_files.py::test_a_setting_by_which_adapters_mean_something_else_is_refused": 1,
    "tests/test_adapter_files.py::test_adapters_count_as_their_checkpoint_says": 13,
    "tests/test_additions.py::test_the_book_trains_resumes_and_infers_without_another_package": 0,
    "tests/test_agreement.py::test_ranks_that_do_not_come_are_named": 1,
    "tests/test_anomalies.py::test_a_flipped_bit_is_found_and_its_rank_named": 1,
    "tests/test_async_save.py::test_asynchronous_checkpoints_change_no_loss": 1,
    "tests/test_async_save.py::test_what_is_written_is_the_state_of_that_moment": 2,
    "tests/test_bos.py::test_a_document_begins_as_its_tokenizer_says": 3,
    "tests/test_chaos.py::test_a_struck_run_loses_nothing_and_goes_on_bit_for_bit": 1,
    "tests/test_collectives.py::test_groups_and_reshard_policy_decide_the_collectives": 4,
    "tests/test_compile.py::test_documents": 1,
    "tests/test_compile.py::test_equal_blocks_share_a_graph": 2,
    "tests/test_compile.py::test_models_of_transformers": 1,
    "tests/test_compile.py::test_torchs_limit_is_for_each_kind_of_block": 1,
    "tests/test_compositions.py::test_a_cell_is_one_process_or_is_refused": (8, 16),
    "tests/test_compositions.py::test_dropout_differs_but_where_ranks_compute_the_same": 1,
    "tests/test_dimensions.py::test_a_run_goes_on_bit_for_bit_on_its_mesh": 1,
    "tests/test_dimensions.py::test_a_run_is_that_of_one_process": 1,
    "tests/test_dimensions.py::test_a_run_starts_from_weights_and_is_used_without_its_mesh": 1,
    "tests/test_dimensions.py::test_documents_of_a_row_stay_apart": 1,
    "tests/test_dimensions.py::test_each_gradient_is_that_of_the_whole_model": 2,
    "tests/test_dimensions.py::test_each_mesh_reads_the_checkpoints_of_the_others": 1,
    "tests/test_dimensions.py::test_the_first_step_in_half_precision_is_that_of_one_process": 1,
    "tests/test_dimensions.py::test_what_travels_in_a_step": 1,
    "tests/test_dimensions_models.py::test_a_run_goes_on_bit_for_bit_and_on_one_rank": 1,
    "tests/test_dimensions_models.py::test_a_run_is_that_of_one_process": 1,
    "tests/test_dimensions_models.py::test_each_gradient_is_that_of_the_whole_model": 1,
    "tests/test_ema.py::test_it_is_the_average_of_the_weights_of_each_step": 1,
    "tests/test_equalities.py::test_a_fused_update_rounds_otherwise_and_goes_on_with_the_same_state": 1,
    "tests/test_equalities.py::test_world_size_changes_only_rounding": 1,
    "tests/test_float8.py::test_a_run_is_near_bf16_and_resumes_bit_for_bit": 1,
    "tests/test_float8.py::test_weights_are_gathered_in_float8_with_the_scale_of_the_whole": 1,
    "tests/test_forms.py::test_each_form_of_conversations_is_that_of_messages": 3,
    "tests/test_full_state.py::test_all_ranks_write_a_large_model_together": 1,
    "tests/test_full_state.py::test_other_ranks_hold_one_full_parameter_at_a_time": 3,
    "tests/test_gpu_lane.py::test_a_record_is_measured_once_and_is_a_trial_for_the_planner": 0,
    "tests/test_infer.py::test_accuracy_is_that_of_the_last_evaluation": 1,
    "tests/test_init_from.py::test_a_run_starts_from_what_a_run_exported": 1,
    "tests/test_launch.py::test_a_rank_that_fails_ends_the_job_and_the_next_resumes": 1,
    "tests/test_launch.py::test_the_main_job_in_one_process_then_infer": 0,
    "tests/test_lost_rundir.py::test_a_run_that_has_lost_its_directory_stops_and_leaves_others_alone": 2,
    "tests/test_memory_checkpoint.py::test_a_run_that_loses_a_node_goes_on_from_the_others_memory_bit_for_bit": 0,
    "tests/test_memory_checkpoint.py::test_ranks_that_are_started_again_go_on_from_memory": 1,
    "tests/test_models.py::test_the_same_model_on_any_number_of_ranks": 1,
    "tests/test_nonfinite.py::test_a_skipped_step_leaves_everything_as_it_was": 3,
    "tests/test_nonfinite.py::test_every_rank_stops_after_the_step_and_saves_nothing": 1,
    "tests/test_optimizer_state.py::test_a_resumed_run_goes_on_bit_for_bit": 1,
    "tests/test_optimizer_state.py::test_another_number_of_ranks_restores_the_same_bits": 1,
    "tests/test_package.py::test_a_command_runs_from_a_wheel": 2,
    "tests/test_recipes.py::test_a_recipe_trains_from_weights": 1,
    "tests/test_resume.py::test_a_resumed_run_goes_on_bit_for_bit": 1,
    "tests/test_resume.py::test_another_number_of_ranks_restores_the_same_state": 1,
    "tests/test_resume.py::test_strategies_read_each_others_checkpoints": 2,
    "tests/test_rooms.py::test_a_reader_loads_few_files": 1,
    "tests/test_rooms.py::test_help_and_a_refused_flag_are_answered_without_torch": 12,
    "tests/test_schedule.py::test_a_run_made_longer_has_the_rates_of_an_uninterrupted_one": 2,
    "tests/test_settings.py::test_deterministic_algorithms_and_collections_leave_the_losses_as_they_are": 2,
    "tests/test_signals.py::test_a_signal_does_what_the_table_says": 2,
    "tests/test_weights.py::test_every_form_loads_bit_for_bit": 3,
}


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark as `thorough` what `make test` leaves out, and as `nightly` what `.ci/run` leaves out too."""
    seen: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        kept = KEPT.get(test, ALL)
        soon, each_change = kept if isinstance(kept, tuple) else (kept, max(kept, 1))
        if seen[test] > soon:
            item.add_marker("thorough")
        if seen[test] > each_change:
            item.add_marker("nightly")
