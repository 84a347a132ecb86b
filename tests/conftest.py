"""One thread: tests compare bits, not seconds, and small kernels only lose time by sharing cores.

By default long families of alike cases are sampled, one in three (of members held against their papers: one in ten), always
the same ones, and a few long tests are left out.
Three parts run apart from the others: members held against their papers (`pytest tests/papers`), cases that enter through
`fit` (`pytest tests/conformance`; every model, at one of its two budgets), and several ranks, each a process
(`pytest tests/parallel`).
`pytest --all` runs everything. A plain `pytest`, with no file named, runs in as many processes as there are cores, at most
four, where pytest-xdist is installed; `-n 0` runs it in one.
"""

import gc
import os
import sys
import zlib

import pytest
import torch

os.environ["HOLDALL_CACHE"] = "off"  # no test finds what another has left; those about the cache have folders of their own

torch.set_num_threads(1)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """The folder of the tier `nvme`, empty again after every test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    monkeypatch.setenv("HOLDALL_NVME", str(folder))
    yield folder
    gc.collect()
    assert not list(folder.iterdir())


walked = None  # the file whose tests run, and how many modules were loaded when garbage was last collected


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """What is alive between two files, and modules that a test has loaded, no later collection of garbage walks over.

    One took a fifth of a second, for 400,000 objects, and many tests begin with one. Garbage is collected as before.
    """
    global walked
    if walked != (item.path, len(sys.modules)):
        walked = item.path, len(sys.modules)
        gc.collect()
        gc.freeze()


SAMPLED = (
    "papers/test_angel_ptm.py::test_steps_are_plain_trainings_bit_for_bit",
    "papers/test_autotm.py::test_models_train_to_the_same_bits_with_the_bytes_that_were_predicted",
    "papers/test_capuchin.py::test_real_models_train_to_the_same_bits_with_the_predicted_bytes",
    "papers/test_delta.py::test_real_models_train_to_the_same_bits_with_the_predicted_bytes",
    "papers/test_distflashattn.py::test_real_models_train_to_the_same_weights",
    "papers/test_elixir.py::test_steps_are_plain_trainings_bit_for_bit",
    "papers/test_flashneuron.py::test_real_models_train_to_the_same_bits_from_a_disk",
    "papers/test_gemini.py::test_steps_are_plain_trainings_bit_for_bit",
    "papers/test_korthikanti.py::test_real_models_train_to_the_same_weights",
    "papers/test_loongtrain.py::test_real_models_train_to_the_same_weights",
    "papers/test_memo.py::test_training_has_the_same_bits_for_every_alpha",
    "papers/test_patrickstar.py::test_steps_are_plain_trainings_bit_for_bit",
    "papers/test_rotor.py::test_real_models_train_to_the_same_weights",
    "papers/test_str.py::test_models_train_to_the_same_bits_with_the_bytes_that_were_predicted",
    "papers/test_superneurons.py::test_models_train_to_the_same_bits_with_the_bytes_that_were_predicted",
    "papers/test_swapadvisor.py::test_real_models_train_to_the_same_bits_with_the_predicted_bytes",
    "papers/test_te_offload.py::test_training_has_the_same_bits_and_the_predicted_peak_and_traffic",
    "papers/test_vdnn.py::test_models_train_to_the_same_bits_with_the_bytes_that_were_predicted",
    "papers/test_yuan.py::test_training_has_the_same_bits_for_every_alpha",
    "unit/test_states.py::",
    "unit/test_state_edges.py::",
    "unit/test_nested_recompute.py::test_any_nesting",
    "unit/test_compress.py::",
    "unit/test_in_backward.py::",
    "unit/test_head.py::",
    "unit/test_real_allocator.py::",
    "unit/test_loops_on_placed_states.py::",
    "unit/test_readers.py::test_weights_that_come_and_go",
    "unit/test_tracing.py::test_the_predicted_peak",
    "unit/test_runtime.py::test_any_mix",
    "unit/test_reschedule.py::",
    "unit/test_recompute_family.py::test_the_same_bits",
    "unit/test_auto_against_simple.py::",
    "papers/test_chen.py::",
    "papers/test_exact_planners.py::test_exact_planners_are_never_slower",
    "unit/test_nvme.py::test_units_that_live_in_the_tier",
    "unit/test_states_on_disk.py::test_the_bits_and_bytes",
    "unit/test_disk_faults.py::test_a_fault_at_any_moment",
    "gpu/test_disk.py::test_weights_and_gradients_on_disk",
    "gpu/test_disk.py::test_states_on_disk",
    "papers/test_angel_ptm.py::test_steps_are_plain_trainings",
    "papers/test_elixir.py::test_steps_are_plain_trainings",
    "papers/test_gemini.py::test_steps_are_plain_trainings",
    "papers/test_patrickstar.py::test_steps_are_plain_trainings",
    "papers/test_zero_infinity.py::test_steps_are_those_of_plain_training",
    "papers/test_autotm.py::test_models_train",
    "papers/test_autotm.py::test_every_block_of_a_transformer",
    "papers/test_autotm.py::test_the_program_finds",
    "papers/test_autotm.py::test_late_copies",
    "papers/test_capuchin.py::test_real_models_train",
    "papers/test_delta.py::test_real_models_train",
    "papers/test_swapadvisor.py::test_real_models_train",
    "papers/test_flashneuron.py::test_real_models_train",
    "papers/test_str.py::test_it_finds_what_enumeration",
    "papers/test_str.py::test_models_train",
    "papers/test_str.py::test_transformers",
    "papers/test_superneurons.py::test_models_train",
    "papers/test_superneurons.py::test_late_copies",
    "papers/test_vdnn.py::test_models_train",
    "papers/test_vdnn.py::test_late_copies",
    "papers/test_yuan.py::test_after_forward",
    "unit/test_single_tensors.py::test_any_tensors",
    "unit/test_layer_swaps.py::test_any_swaps",
    "papers/test_dtr.py::test_a_real_model_runs_within_its_budget",
    "papers/test_distflashattn.py::test_real_models_train",
    "papers/test_korthikanti.py::test_real_models_train",
    "papers/test_loongtrain.py::test_",
    "unit/test_by_name.py::test_a_recipe_trains_under_a_plan",
    "unit/test_by_name.py::test_an_optimizer_trains_under_a_plan",
    "unit/test_compiled.py::test_compiled_programs",
    "unit/test_decoding.py::test_peaks_are_as_predicted",
    "gpu/test_planners_by_name.py::",
    "unit/test_precision.py::test_bytes_per_parameter",
    "unit/test_optimizers_in_the_engine.py::test_states_pass_through",
    "unit/test_pieces.py::test_the_predicted_peak",
    "unit/test_planning.py::test_auto_finds_the_fastest_mix",
    "unit/test_nvme.py::test_bytes_come_back",
    "unit/test_flat_buffer.py::test_every_result",
    "unit/test_auto_across_blocks.py::test_auto_is_no_slower",
    "papers/test_low_precision.py::test_a_recipe_gives",
    "parallel/test_by_rule.py::test_the_rule_is_what",
)
RARE = (  # one in six of these
    "contracts/test_compatibility.py::test_a_pair",
    "contracts/test_compatibility.py::test_a_triple",
    "papers/test_memo.py::test_training_has_the_same_bits",
    "papers/test_te_offload.py::test_training_has_the_same_bits",
    "papers/test_yuan.py::test_training_has_the_same_bits",
)
LONG = (
    "unit/test_compare_peers.py::test_compare_puts_peers_beside_planners",
    "unit/test_compare_peers.py::test_the_benchmark_writes_every_row",
    "unit/test_ladder.py::test_the_benchmark_runs_on_a_cpu",
    "unit/test_caching.py::test_identities_are_the_same_in_another_process[tiny-llama",
    "unit/test_recompute_family.py::test_systems_that_see_more_are_never_slower[llama]",
    "unit/test_recompute_family.py::test_the_same_bits_in_less_memory_as_predicted[checkmate-gpt2]",
    "papers/test_korthikanti.py::test_a_layer_saves_what_the_formula_says_and_selective_leaves_the_linear_part[sizes2",
    "papers/test_adam8bit.py::test_a_small_language_model",
    "papers/test_megtaichi.py::test_on_an_arena",
    "contracts/test_planners.py::TestRockmate::test_the_same_problem",
    "contracts/test_planners.py::TestRockmate::test_a_looser_budget",
    "contracts/test_planners.py::TestMoccasin::test_a_real_model",
    "contracts/test_planners.py::TestDelta::test_the_same_problem",
    "unit/test_captured.py::test_blocks_run_by_programs_under_a_recipe_too",
    "unit/test_real_allocator.py::test_the_allocator_sees_the_predicted_peak[planned-tiny-llama",
    "conformance/test_commands.py::test_small_families_and_the_page",
    "contracts/test_planners.py::TestRockmate::test_plans_are_legal",
    "contracts/test_planners.py::TestCheckmate::test_the_same_problem",
    *(
        f"unit/test_runtime.py::test_no_random_budget_is_ever_exceeded[{case}]"
        for case in ("tied-50", "convnet-34", "tiny-llama-8", "tiny-t5-8")
    ),
)


EITHER = "conformance/test_families.py::test_fit_computes_what_plain_training_computes"  # in one of two budgets
APART = ("papers/", "conformance/", "parallel/", "contracts/test_compatibility.py::test_fit")  # not by a plain `pytest`
WHOLE = "HOLDALL_TESTS_WITHOUT_PATHS"
ALL = "HOLDALL_TESTS_ALL"  # as in `holdall.testing.ranks`
MOST_PROCESSES = 4  # each takes one to two GB


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Ask for processes before pytest-xdist looks whether any were asked for."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # such a process itself: it must not start others
    option = config.option
    os.environ[ALL] = "1" if option.all else ""
    is_whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    os.environ[WHOLE] = "1" if is_whole else ""  # for the processes that this one starts, too
    if is_whole and config.pluginmanager.hasplugin("xdist") and option.numprocesses is None and not option.usepdb:
        option.numprocesses = min(MOST_PROCESSES, cores())
        option.dist = "worksteal" if option.dist == "no" else option.dist


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run every case, also those that are left out by default")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all"):
        return
    left_out = [item for item in items if is_long(item)]
    items[:] = [item for item in items if not is_long(item)]
    config.hook.pytest_deselected(items=left_out)


def is_long(item):
    if any(name in item.nodeid for name in LONG):
        return True
    if os.environ.get(WHOLE) and any(name in item.nodeid for name in APART):
        return True
    if not hasattr(item, "callspec"):
        return False
    if EITHER in item.nodeid:
        return item.callspec.params["share"] != (70, 45)[zlib.crc32(item.callspec.params["name"].encode()) % 2]
    of_papers = 10 if "papers/" in item.nodeid else 3
    every = 6 if any(name in item.nodeid for name in RARE) else of_papers if any(name in item.nodeid for name in SAMPLED) else 1
    return zlib.crc32(item.nodeid.encode()) % every != 0
