"""What users of other libraries have filed, in few words, and the tests that keep it from us."""

import ast

import pytest
from launch import ROOT

COMPLAINTS = {
    "a short last accumulation window fails": (
        "engine/test_optimizer.py",
        "test_gradient_accumulation_sums_and_a_short_last_window_works",
    ),
    "several passes and one step: neither the sum nor the mean": (
        "engine/test_optimizer.py",
        "test_gradient_accumulation_sums_and_a_short_last_window_works",
    ),
    "clipping synchronizes twice": (
        "engine/test_optimizer.py",
        "test_synchronizing_twice_aggregates_once",
    ),
    "clipping clips the wrong gradient": (
        "engine/test_optimizer.py",
        "test_gradients_can_be_clipped_between_synchronize_and_step",
    ),
    "an overflow leaves handles behind, or enters the residual and stays": (
        "engine/test_amp.py",
        "test_an_overflow_on_one_rank_skips_one_step_of_200_on_all",
    ),
    "a scaler is not seen": (
        "engine/test_amp.py",
        "test_a_scaler_that_the_optimizer_was_not_told_of_is_pointed_out",
    ),
    "zero_grad(set_to_none=True) is not supported": (
        "engine/test_optimizer.py",
        "test_gradients_are_views_of_flat_buckets_however_they_are_zeroed",
    ),
    "a scheduler does not take the wrapper for an optimizer": (
        "engine/test_optimizer.py",
        "test_schedulers_work_whether_built_before_or_after_wrapping",
    ),
    "two optimizers share names or residuals": (
        "engine/test_optimizer_models.py",
        "test_two_optimizers_share_nothing",
    ),
    "a GAN's optimizers get in each other's way": (
        "engine/test_optimizer_faults.py",
        "test_a_gan_trains_as_with_bare_optimizers",
    ),
    "a parameter is frozen, or unfrozen, on the way": (
        "engine/test_optimizer_models.py",
        "test_frozen_parameters_stay_and_may_be_unfrozen_on_the_way",
    ),
    "a parameter group is added on the way": (
        "engine/test_optimizer_models.py",
        "test_a_group_added_on_the_way_is_aggregated",
    ),
    "a parameter is unused on one rank only": (
        "engine/test_optimizer_models.py",
        "test_parameters_unused_on_one_rank_count_as_zero_there_when_asked",
    ),
    "wrapping again drops momentum": (
        "engine/test_optimizer.py",
        "test_wrapping_twice_changes_nothing",
    ),
    "resuming loses Adam's scalars, or all ranks get rank 0's residual": (
        "engine/test_checkpoint.py",
        "test_a_resumed_run_is_the_uninterrupted_one_to_the_bit",
    ),
    "sparse gradients of embeddings": (
        "engine/test_optimizer_models.py",
        "test_sparse_embedding_gradients_are_aggregated",
    ),
    "a rank without a gradient does not know that it should be sparse": (
        "engine/test_optimizer_models.py",
        "test_a_rank_that_used_no_embedding_meets_one_that_has_a_sparse_gradient",
    ),
    "half precision on the CPU is not supported": (
        "engine/test_optimizer_models.py",
        "test_half_precision_and_channels_last_models_train",
    ),
    "indices are rounded to the values' precision": (
        "engine/test_optimizer_models.py",
        "test_entries_beyond_what_a_float_counts_are_found_again",
    ),
    "what is said to be compressed travels as float32": (
        "engine/test_wires.py",
        "test_compact_wires_take_at_most_4_3_bytes_an_entry_at_density_0_001",
    ),
    "half-precision sums overflow before they are divided": (
        "engine/test_optimizer_models.py",
        "test_half_precision_averages_do_not_overflow_where_their_sums_would",
    ),
    "DDP makes its buckets anew, and residuals are gone": (
        "engine/ddp_hook_laws.py",
        "every_gradient_is_applied_or_owed_when_buckets_are_made_anew",
    ),
    "unequal numbers of batches hang": (
        "engine/test_join.py",
        "test_law_of_join_holds_on_threads",
    ),
    "one rank raises, and the others wait for ever": (
        "engine/test_failures.py",
        "test_a_rank_that_fails_ends_all_in_time_and_is_named",
    ),
    "local ranks from two sources that disagree": (
        "engine/test_process_group.py",
        "test_a_local_rank_that_mpi_contradicts_is_refused",
    ),
    "constants of somebody else's network": (
        "engine/test_auto.py",
        "test_all_ranks_learn_the_same_links",
    ),
    "compression makes it slower, and nobody says so": (
        "advise/test_offline.py",
        "test_networks_decide_whether_compression_pays",
    ),
    "timelines that are no JSON, empty, or huge": (
        "engine/test_timeline.py",
        "test_the_file_is_valid_json_whenever_all_ranks_are_killed",
    ),
    "nobody can say where the time goes": (
        "engine/test_metrics.py",
        "test_the_printed_summary_answers_in_milliseconds",
    ),
    "a hidden schedule uses another density": (
        "engine/test_optimizer_models.py",
        "test_the_density_is_the_one_that_was_asked_for_from_the_first_step_on",
    ),
}


@pytest.mark.parametrize("complaint", COMPLAINTS)
def test_every_complaint_has_its_test(complaint):
    file, name = COMPLAINTS[complaint]
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
