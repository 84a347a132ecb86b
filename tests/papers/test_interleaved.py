"""Interleaved 1F1B and breadth-first: bubbles divided by chunks, activations, messages."""

import pytest

from holdall.pipelines import lower, pipeline, simulate


@pytest.mark.parametrize(("chunks", "makespan", "bubble"), [(1, 33, 0.2727), (2, 57, 0.1579), (3, 81, 0.1111)])
def test_chunks_divide_the_bubble(chunks, makespan, bubble):
    found = simulate(pipeline("interleaved", ranks=4, micro_batches=8, chunks=chunks))
    assert found.makespan == makespan
    assert found.bubble == pytest.approx(bubble, abs=5e-5)
    assert found.bubble == pytest.approx((3 / chunks) / (8 + 3 / chunks))
    assert found.activations == tuple(min(8 * chunks, (chunks - 1) * 4 + 2 * (3 - r) + 1) for r in range(4))


def test_one_chunk_holds_more_than_1f1b_and_takes_as_long():
    one, plain = (simulate(pipeline(name, ranks=4, micro_batches=8)) for name in ("interleaved:chunks=1", "1f1b"))
    assert one.makespan == plain.makespan
    assert one.activations == (7, 5, 3, 1)


def test_messages_multiply_with_chunks():
    for chunks in (1, 2, 3):
        lists = lower(pipeline("interleaved", ranks=4, micro_batches=8, chunks=chunks))
        assert sum(t.kind.startswith("SEND") for tasks in lists for t in tasks) == 2 * 8 * (chunks * 4 - 1)


def test_breadth_first_has_the_same_bubble_and_finishes_a_chunk_at_once():
    made = pipeline("breadth_first", ranks=4, micro_batches=8)
    found = simulate(made)
    assert found.makespan == simulate(pipeline("interleaved", ranks=4, micro_batches=8)).makespan
    assert found.activations == (16,) * 4
    for tasks in made.lists:
        backwards = [t.stage for t in tasks if t.kind == "B"]
        assert backwards == sorted(backwards, reverse=True)
