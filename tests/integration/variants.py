"""Which tests with real jobs are left to ``make test-long``.

Each of these is a variant of one that ``make test`` runs, or goes the same way in another order; the soak of ``tests/chaos``
and the exhaustive search of ``tests/model`` come by most of them, too. A job costs some four seconds of processor time.
"""

from __future__ import annotations

from pathlib import Path

VARIANTS = {
    "test_pairs.py": ("[stragglers-restore]",),
    "test_checks.py": ("[own-microbatch", "[rows-microbatch"),
    "test_explaining.py": ("[missing-missing",),
    "test_tls.py": ("files_that_are_no_certificate",),
    "test_between.py": (
        "before_all_reduce",
        "before_broadcast",
        "before_barrier",
        "[calling-1-",
        "[called-1-",
        "[called-4-0]",
        "[calling-5-0]",
        "two_joiners_that_are_left_alone",
    ),
    "test_chaos.py": (
        "recovered_from_P1[stop-",
        "recovered_from_P1[raise-",
        "a_slow_worker_is_slow_for_a_while",
        "a_connection_that_is_cut",
        "a_drained_worker_leaves",
        "a_worker_that_goes_through_many_generations",
        "random_faults_of_every_kind",
        "on_a_terminal_it_asks",
        "the_last_worker_with_the_state_is_not_killed",
        "is_left_alone_without_a_yes",
        "[kill-killed",
        "bad_input_is_a_sentence",
    ),
    "test_checkpoints.py": (
        "lost_again_and_again",
        "a_finished_job_has_nothing",
        "resume_begins_anew",
        "a_job_with_another_seed",
        "what_cannot_go_on_is_refused",
        "goes_back_to_a_step_by_hand",
        "where_all_that_is_there_is_damaged",
        "lost_while_a_job_begins_from",
        "never_leads_forward",
    ),
    "test_data.py": (
        "[stop-outside",
        "breaking_out_of_the_inner",
        "streams_without_any_data",
    ),
    "test_dcp.py": (
        "a_rank_that_dies_in_the_middle",
        "loads_the_same_bits[2]",
    ),
    "test_divergence.py": (
        "[skip-arguments0",
        "[after_it]",
        "answers_differ",
        "numbers_that_do_not_become_finite",
        "without_a_checkpoint_to_go_back_to",
        "[while_going_back]",
        "by_default_it_is_told",
    ),
    "test_exactness.py": (
        "P1[3]",
        "P1_P2_P3[2]",
        "P1_P2_P3[3]",
        "[before_join]",
        "P1_P2_P3[1]",
        "change_a_bit_P1[1]",
        "after_join]",
    ),
    "test_faults.py": (
        "[opened-2]",
        "[started-0]",
        "redone_P1_P2[2]",
        "[backward]",
        "by_anybody_P3[1]",
        "one_history_P3[before_acknowledge]",
        "[before_acknowledge-0]",
        "[acknowledging-2]",
        "[update-2]",
        "third_generation_P1_P3[opened]",
        "third_generation_P1_P3[entering]",
        "one_worker_that_is_left",
        "[opening-0]",
        "[started-2]",
        "third_generation_P1_P3[claimed]",
    ),
    "test_guests.py": ("an_abort_does_not_free",),
    "test_hangs.py": (
        "[loop-",
        "[gil_thread-",
        "[deadlock-",
        "something_long_that_all_workers_do",
        "a_person_declares_failed",
        "a_slow_first_step",
        "keeps_the_gil_for_some_seconds",
        "a_pause_that_is_announced",
        "stopped_before_it_joins",
    ),
    "test_hosts.py": (
        "a_cut_that_heals",
        "a_host_that_cannot_reach_the_lighthouse",
        "a_second_agent_of_the_same_host",
        "loses_packets_slows_the_job",
        "a_slow_host_slows",
        "cut_off_for_good",
        "a_second_lighthouse_of_a_job",
        "started_again_by_hand_takes_the_job_over",
        "comes_when_the_job_is_over",
    ),
    "test_models.py": (
        "[text]",
        "can_be_switched_off",
        "[vision]",
        "[pair]",
    ),
    "test_networks.py": (
        "the_summary_of_a_host",
        "out_of_reach_of_the_lighthouse_end_by_themselves[cut_off]",
        "cut_between_two_workers",
        "started_again_by_hand",
    ),
    "test_nvrx.py": ("a_missed_heartbeat", "the_example_of_the_docs", "a_killed_rank_a_stopped_one"),
    "test_own_loop.py": (
        "[updated-1]",
        "[reduced-2]",
        "[acknowledging-1]",
        "[before_acknowledge-3]",
        "[committed-1]",
        "the_number_of_workers",
        "goes_on_from_a_checkpoint",
    ),
    "test_preemption.py": (
        "at_the_deadline",
        "a_job_without_checkpoints",
        "workers_and_lighthouses_that_are_killed_meanwhile",
    ),
    "test_replacement.py": (
        "outlives_every_worker",
        "two_workers_lost_at_the_same_instant",
        "another_P1[opened]",
        "another_P1[replayed]",
        "P1_P3[committed]",
        "with_loader_processes",
        "large_messages",
        "a_latecomer_that_raises",
        "a_spare_that_is_never_needed",
        "with_wait_and_nobody",
        "below_the_least_number",
        "killed_while_another_is_drained",
        "another_P1[loaded]",
        "leave_by_its_deadline",
        "keep_dying_young",
        "with_a_spare_a_drain",
        "comes_later_and_whose_script_fails",
        "frozen_and_trained_again_in_every_step",
    ),
    "test_run.py": (
        "leaves_its_loop_early",
        "an_exit_code_of_the_scripts_own",
        "that_is_still_starting",
        "a_script_that_never_joins",
        "the_summary_lists_faults",
    ),
    "test_saving.py": (
        "joiners_take_part",
        "how_often_is_chosen_from_what_it_costs",
    ),
    "test_stragglers.py": ("is_only_told_of",),
    "test_techniques.py": ("a_technique_that_fails_is_left_out",),
    "test_two_joiners.py": (
        "[fetched]",
        "[loaded]",
        "[replayed]",
    ),
}
"""By file: parts of the names of tests."""


def strays() -> list[str]:
    """Names in the table that no test of their file has: it was renamed, or moved."""
    return [
        f"{file}: {part}"
        for file, parts in VARIANTS.items()
        for part in parts
        if "[" not in part and "]" not in part and part not in (Path(__file__).parent / file).read_text()
    ]


def is_variant(node: str) -> bool:
    """Whether the test of this node id is one of them."""
    return any(
        f"integration/{file}::" in node and any(part in node for part in parts) for file, parts in VARIANTS.items()
    )
