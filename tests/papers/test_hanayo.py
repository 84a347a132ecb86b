"""Hanayo: the snake of stages, bubbles by waves, activations, and transfers that it saves against interleaved 1F1B."""

import pytest

from holdall.pipelines import PipeCosts, lower, pipeline, simulate


def run(ranks, n, waves, hop=0.0):
    made = pipeline("hanayo", ranks=ranks, micro_batches=n, waves=waves)
    return simulate(made, PipeCosts.even(made.chain, hop=hop))


def test_stages_lie_as_torchs_v_mapping_has_them():
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    for ranks, waves in ((2, 1), (4, 1), (4, 2), (3, 4)):
        made = pipeline("hanayo", ranks=ranks, micro_batches=ranks, waves=waves)
        assert dict(enumerate(made.rank_of)) == generate_stage_to_rank_mapping(ranks, 2 * waves * ranks, style="v")


@pytest.mark.parametrize(
    ("ranks", "waves", "makespan", "bubble"),
    [(4, 1, 36, 0.3333), (4, 2, 61, 0.2131), (4, 4, 109, 0.1193), (8, 1, 76, 0.3684), (8, 2, 126, 0.2381), (8, 4, 222, 0.1351)],
)
def test_more_waves_leave_fewer_bubbles(ranks, waves, makespan, bubble):
    found = run(ranks, ranks, waves)
    assert found.makespan == makespan
    assert found.bubble == pytest.approx(bubble, abs=5e-5)
    assert max(found.activations) <= 2 * waves * ranks  # P stages' worth
    plain = simulate(pipeline("1f1b", ranks=ranks, micro_batches=ranks))
    assert found.bubble < plain.bubble


def test_activations_stay_bounded_with_many_micro_batches():
    for ranks, waves in ((2, 2), (4, 1), (4, 2)):
        bounded = run(ranks, 5 * ranks, waves)
        assert max(bounded.activations) <= 2 * waves * ranks
        more = simulate(pipeline("hanayo", ranks=ranks, micro_batches=5 * ranks, waves=waves, under_way=2 * ranks))
        assert more.bubble < bounded.bubble and max(more.activations) > max(bounded.activations)


def test_turns_save_messages_and_win_where_messages_are_slow():
    """Interleaved 1F1B with as many stages has fewer bubbles while messages are free, and more when they are slow."""
    made = {
        "hanayo": pipeline("hanayo", ranks=4, micro_batches=4, waves=1),
        "interleaved": pipeline("interleaved", ranks=4, micro_batches=4, chunks=2),
    }
    sent = {name: sum(t.kind.startswith("SEND") for tasks in lower(pipe) for t in tasks) for name, pipe in made.items()}
    assert sent == {"hanayo": 2 * 4 * 6, "interleaved": 2 * 4 * 7}
    times = {
        hop: [simulate(pipe, PipeCosts.even(8, hop=hop)).makespan for pipe in made.values()] for hop in (0.0, 1.0, 2.0, 4.0)
    }
    assert times[0.0][0] > times[0.0][1]
    assert times[4.0][0] < times[4.0][1]
