"""Schedules as lists: every member, the simulator against a naive reading, and random lists that deadlock or do not."""

import random

import pytest

from holdall.errors import InvalidInput
from holdall.pipelines import PipeCosts, PipeTask, lower, pipeline, read_task, schedule, schedule_names, simulate
from holdall.pipelines.pipeline import Pipeline, check_lists
from holdall.pipelines.simulator import deadlock

# A second, dumber reading of lowered lists: executed in random order, timed by relaxation, recounted.

F, B, GRAD, W = "F", "B", "I", "W"  # torch's letters


def work_of(task):
    return task.parts or (task,)


def made_by(pipeline, task):
    """The rank and task at the other end of a message."""
    sends = task.kind.startswith("SEND")
    down = task.kind.endswith("_F") == sends  # the other end has the next stage
    stage = task.stage + (1 if down else -1)
    kind = ("RECV" if sends else "SEND") + task.kind[4:]
    return pipeline.rank_of[stage], (stage, kind, task.batch)


def inputs(pipeline, work):
    """(task of this rank that must be over) for one computation, messages included."""
    found = []
    stage, kind, batch = work.stage, work.kind, work.batch
    first, last = stage % pipeline.chain == 0, stage % pipeline.chain == pipeline.chain - 1
    if kind == F and not first:
        local = pipeline.rank_of[stage - 1] == pipeline.rank_of[stage]
        found.append((stage - 1, F, batch) if local else (stage, "RECV_F", batch))
    if kind in (B, GRAD):
        found.append((stage, F, batch))
        if not last:
            local = pipeline.rank_of[stage + 1] == pipeline.rank_of[stage]
            found.append((stage + 1, "grad", batch) if local else (stage, "RECV_B", batch))
    if kind == W:
        found.append((stage, "grad", batch))
    return found


def names(task):
    """What is over when a task is."""
    for work in work_of(task):
        yield (work.stage, work.kind, work.batch)
        if work.kind in (B, GRAD):
            yield (work.stage, "grad", work.batch)


def execute(pipeline, lists, sends, seed=0):
    """Run the lists in a random order of ranks. Returns the positions at which they halt; the end if they end."""
    rng = random.Random(seed)
    at = [0] * len(lists)
    over = set()
    wires = {}  # (from, to) -> messages under way
    claims = {}  # (from, to) -> receives that were posted
    while True:
        ranks = [r for r in range(len(lists)) if at[r] < len(lists[r])]
        rng.shuffle(ranks)
        if not any(step(pipeline, lists, sends, r, at, over, wires, claims) for r in ranks):
            return at


def step(pipeline, lists, sends, rank, at, over, wires, claims):
    task = lists[rank][at[rank]]
    if task.kind.startswith("SEND"):
        maker = (task.stage, F if task.kind == "SEND_F" else "grad", task.batch)
        if maker not in over:
            return False
        to, receive = made_by(pipeline, task)
        if sends == "rendezvous":
            if at[to] >= len(lists[to]) or tuple(lists[to][at[to]][:3]) != receive:
                return False
            at[to] += 1
            over.add(receive)
        else:
            wires.setdefault((rank, to), []).append(receive)
            deliver(wires, claims, over, rank, to)
    elif task.kind.startswith("RECV"):
        sender, _ = made_by(pipeline, task)
        if sends == "rendezvous":
            return False
        if sends == "buffered":
            if not wires.get((sender, rank)) or wires[sender, rank][0] != tuple(task[:3]):
                return False
            over.add(wires[sender, rank].pop(0))
        else:
            claims.setdefault((sender, rank), []).append(tuple(task[:3]))
            deliver(wires, claims, over, sender, rank)
    else:
        mine = set(names(task))
        if any(need not in over | mine for work in work_of(task) for need in inputs(pipeline, work)):
            return False
        over |= mine
    at[rank] += 1
    return True


def deliver(wires, claims, over, sender, rank):
    wire, claim = wires.get((sender, rank), []), claims.get((sender, rank), [])
    while wire and claim and wire[0] == claim[0]:
        over.add(wire.pop(0))
        claim.pop(0)


def ends(pipeline, lists, sends, seed=0):
    return execute(pipeline, lists, sends, seed) == list(map(len, lists))


def makespan(pipeline, lists, seconds, hop):
    """By relaxation: every time is pushed up until nothing changes. For posted messages."""
    finish = {}
    while True:
        before = dict(finish)
        arrival = {}
        for tasks in lists:
            clock, links = 0.0, {}
            for task in tasks:
                if task.kind.startswith("SEND"):
                    to, receive = made_by(pipeline, task)
                    links[to] = max(clock, links.get(to, 0.0)) + hop
                    arrival[receive] = links[to]
                elif not task.kind.startswith("RECV"):
                    mine = set(names(task))
                    needs = [n for work in work_of(task) for n in inputs(pipeline, work) if n not in mine]
                    clock = max([clock, *(finish.get(n, 0.0) for n in needs)]) + sum(seconds[w.kind] for w in work_of(task))
                    finish.update(dict.fromkeys(mine, clock))
        finish.update(arrival)
        if finish == before:
            return max(v for (_, kind, _), v in finish.items() if kind in (F, B, GRAD, W))


def most_held(pipeline, rank):
    """Forwards less finished backwards, at most."""
    held = most = 0
    for task in pipeline.lists[rank]:
        for work in work_of(task):
            held += {F: 1, B: -1, W: -1}.get(work.kind, 0)
            most = max(most, held)
    return most


# tests

WAYS = ("posted", "buffered", "rendezvous")
SIZES = ((1, 2), (2, 2), (2, 6), (3, 3), (4, 4), (4, 8), (4, 12), (6, 12))


def made(name, ranks, n):
    """None: sizes that a schedule is not defined for, which it says."""
    try:
        return pipeline(name, ranks=ranks, micro_batches=n)
    except InvalidInput as error:
        assert f"the schedule `{name.split(':')[0]}` needs" in str(error)
        return None


OPTIONS = (
    "chimera:doubling=true",
    "hanayo:waves=2",
    "interleaved:chunks=3",
    "breadth_first:chunks=3",
    "gpipe:reverse=true",
    "dapple:most=2",
    "xpipe:per_update=2",
)
CASES = [(name, ranks, n) for name in (*schedule_names(), *OPTIONS) for ranks, n in SIZES if made(name, ranks, n)]


def test_every_schedule_is_defined_for_some_sizes():
    assert {name for name, _, _ in CASES} == {*schedule_names(), *OPTIONS}
    assert len(CASES) > 100


@pytest.mark.parametrize(("name", "ranks", "n"), CASES)
def test_every_schedule_ends_whichever_way_messages_go(name, ranks, n):
    pipe = made(name, ranks, n)
    lists = lower(pipe)
    for way in WAYS:
        assert deadlock(pipe, lists, sends=way) == ""
        assert ends(pipe, lists, way)


@pytest.mark.parametrize(("name", "ranks", "n"), CASES)
def test_time_and_activations_are_those_of_a_naive_reading(name, ranks, n):
    pipe = made(name, ranks, n)
    for hop, (f, i, w) in ((0.75, (1.0, 1.25, 0.5)), (4.0, (1.0, 2.0, 1.0))):
        costs = PipeCosts.even(pipe.chain, forward=f, input=i, weight=w, hop=hop)
        found = simulate(pipe, costs)
        expected = makespan(pipe, lower(pipe), {"F": f, "I": i, "W": w, "B": i + w, "U": 0.0}, hop)
        assert found.makespan == pytest.approx(expected, rel=1e-12)
        assert sum(map(found.busy, range(ranks))) == pytest.approx(pipe.copies and pipe.chain * n * (f + i + w))
    assert found.activations == tuple(most_held(pipe, rank) for rank in range(ranks))


def test_messages_that_wait_take_longer_and_never_less():
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "chimera", "hanayo"):
        pipe = pipeline(name, ranks=4, micro_batches=8)
        posted, buffered, rendezvous = (simulate(pipe, PipeCosts.even(pipe.chain, hop=0.5), sends=way).makespan for way in WAYS)
        assert posted <= buffered <= rendezvous


def random_lists(rng):
    """Stages over ranks at random, every rank's tasks in an order that its own stages permit; often no order of all ranks."""
    ranks, n = rng.randint(2, 4), rng.randint(1, 4)
    stages = ranks * rng.randint(1, 2)
    rank_of = [s % ranks for s in range(stages)]
    rng.shuffle(rank_of)
    lists = [[] for _ in range(ranks)]
    for rank in range(ranks):
        own = [s for s in range(stages) if rank_of[s] == rank]
        left = [(s, "F", m) for s in own for m in range(n)]
        while left:
            task = left.pop(rng.randrange(len(left)) if rng.random() < 0.3 else 0)
            lists[rank].append(PipeTask(*task))
            if task[1] == "F":
                after = [(task[0], "B", task[2])] if rng.random() < 0.6 else [(task[0], "I", task[2])]
                left.insert(rng.randint(0, len(left)), after[0])
            elif task[1] == "I":
                left.insert(rng.randint(0, len(left)), (task[0], "W", task[2]))
    pipe = Pipeline(name="random", lists=tuple(map(tuple, lists)), rank_of=tuple(rank_of), micro_batches=n, chain=stages)
    check_lists(pipe)
    return pipe


def test_500_random_lists_are_accepted_if_and_only_if_they_run_to_the_end():
    """Where they are refused, a naive executor halts before the end."""
    rng = random.Random(0)
    accepted = 0
    for seed in range(500):
        pipe = random_lists(rng)
        raw = with_messages(pipe)
        try:
            lists = lower(pipe)
        except InvalidInput as error:
            assert "never end" in str(error)
            assert not ends(pipe, raw, "posted", seed)
            continue
        accepted += 1
        assert ends(pipe, raw, "posted", seed) == (deadlock(pipe, raw) == "")  # messages may cross, which `lower` avoids
        assert all(ends(pipe, lists, way, seed) for way in WAYS)
    assert 100 <= accepted <= 400


def with_messages(pipe):
    """Sends right after what makes them, receives right before what needs them."""
    lists = []
    for rank, tasks in enumerate(pipe.lists):
        out = []
        for task in tasks:
            needs = pipe.needs(task)
            for stage, kind, batch in needs:
                if pipe.rank_of[stage] != rank:
                    out.append(PipeTask(task.stage, "RECV_F" if kind == "F" else "RECV_B", batch))
            out.append(task)
            to = pipe.after(task.stage) if task.kind == "F" else pipe.before(task.stage) if task.kind in "BI" else None
            if to is not None and pipe.rank_of[to] != rank:
                out.append(PipeTask(task.stage, "SEND_F" if task.kind == "F" else "SEND_B", task.batch))
        lists.append(out)
    return lists


def test_500_lists_with_moved_messages_deadlock_where_the_simulator_says_so():
    """Lowered lists with messages moved at random: the verdict is the naive executor's, for every way to send."""
    rng = random.Random(1)
    verdicts = {way: [0, 0] for way in WAYS}
    names = [n for n in schedule_names() if schedule(n).is_exact]
    for seed in range(500):
        try:
            pipe = pipeline(rng.choice(names), ranks=rng.choice((2, 2, 4)), micro_batches=rng.choice((4, 4, 8)))
        except InvalidInput:
            continue
        lists = [list(tasks) for tasks in (lower(pipe) if seed % 2 else with_messages(flat(pipe)))]
        for _ in range(rng.randint(0, 2)):
            tasks = rng.choice(lists)
            i = rng.randrange(len(tasks))
            tasks.insert(max(0, i + rng.randint(-4, 4)), tasks.pop(i))
        for way in WAYS:
            ended = ends(pipe, lists, way, seed)
            assert (deadlock(pipe, lists, sends=way) == "") == ended, (pipe.name, way)
            verdicts[way][ended] += 1
    assert all(min(counts) >= 20 for counts in verdicts.values()), verdicts
    assert verdicts["rendezvous"][0] > verdicts["buffered"][0] >= verdicts["posted"][0]


def flat(pipe):
    """The pipeline with overlapped pairs in sequence."""
    lists = tuple(tuple(work for task in tasks for work in task.works) for tasks in pipe.lists)
    return Pipeline(name=pipe.name, lists=lists, rank_of=pipe.rank_of, micro_batches=pipe.micro_batches, chain=pipe.chain)


def test_a_deadlock_says_who_waits_for_whom():
    pipe = pipeline("1f1b", ranks=2, micro_batches=2)
    said = deadlock(pipe, with_messages(pipe), sends="rendezvous")
    assert said == (
        "rank 0 waits at `0SEND_F1` for rank 1 to come to `1RECV_F1`; "
        "rank 1 waits at `1SEND_B0` for rank 0 to come to `0RECV_B0`"
    )
    assert deadlock(pipe, with_messages(pipe), sends="buffered") == ""


def test_tasks_are_written_as_torch_writes_them():
    for text in ("2F0", "0B11", "3I1", "3W1", "1SEND_F2", "1RECV_B2", "(0F7;7B3)OVERLAP_F_B"):
        assert str(read_task(text)) == text
    with pytest.raises(InvalidInput, match="is no task"):
        read_task("F0")


def test_wrong_lists_are_refused_in_one_line():
    good = pipeline("1f1b", ranks=2, micro_batches=2)
    for change, said in (
        (lambda t: t[:-1], "no backward"),
        (lambda t: [*t, t[0]], "twice"),
        (lambda t: [PipeTask(1, "F", 0), *t], "does not have that stage"),
        (lambda t: [x for x in t if x.batch == 0], "other micro-batches"),
    ):
        lists = (good.lists[0], tuple(good.lists[1]))
        lists = (tuple(change(list(lists[0]))), lists[1])
        with pytest.raises(InvalidInput, match=said):
            check_lists(Pipeline(name="mine", lists=lists, rank_of=(0, 1), micro_batches=2, chain=2))


def test_unknown_names_and_sizes_are_refused():
    with pytest.raises(InvalidInput, match="unknown schedule `1f1c`"):
        pipeline("1f1c", ranks=2, micro_batches=2)
    with pytest.raises(InvalidInput, match="`micro_batches` is 0"):
        pipeline("1f1b", ranks=2, micro_batches=0)
    with pytest.raises(InvalidInput, match="even number of ranks"):
        pipeline("chimera", ranks=3, micro_batches=6)
    with pytest.raises(InvalidInput, match="unknown option"):
        pipeline("interleaved:chunk=3", ranks=2, micro_batches=2)
    assert pipeline("interleaved:chunks=3", ranks=2, micro_batches=2).stages == 6
