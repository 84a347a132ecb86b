"""The host's Adam step: both back ends against torch.optim, against each other, and what happens without a compiler."""

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch

from holdall.testing.stand_ins import host_adam_by, host_adam_not_chosen, pieces_of
from holdall.updates import host_adam, host_library, host_native
from holdall.updates.host_step import step_by_torch

SHAPES = [(), (1,), (3,), (16,), (17, 5), (64, 63), (1,), (129, 257), (0,)]
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LOW = [torch.bfloat16, torch.float16]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")


@pytest.fixture(params=["native", "torch"])
def backend(request):
    """Each test runs with either back end in place of the chosen one."""
    if request.param == "torch":
        with host_adam_by(step_by_torch):
            yield request.param
        return
    if not host_adam.backend().startswith("native"):
        pytest.skip(host_adam.backend())
    yield request.param


@pytest.fixture
def nothing_chosen(monkeypatch, tmp_path):
    """As in a new process of a new user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with host_adam_not_chosen():
        yield


class World:
    def __init__(self, shapes=SHAPES, grad=torch.float32, seed=0):
        torch.manual_seed(seed)
        self.params = [torch.randn(s) for s in shapes]
        self.exp_avg = [torch.zeros(s) for s in shapes]
        self.exp_avg_sq = [torch.zeros(s) for s in shapes]
        self.steps = [torch.tensor(0.0) for _ in shapes]
        self.grads = [torch.randn(s).to(grad) for s in shapes]

    def update(self, *, threads=2, decoupled=True, **options):
        hyper = HYPER | {k: options.pop(k) for k in HYPER if k in options}
        lists = (self.params, self.exp_avg, self.exp_avg_sq, self.steps, self.grads)
        host_adam.update(*lists, decoupled=decoupled, threads=threads, **hyper, **options)

    def state(self):
        return [*self.params, *self.exp_avg, *self.exp_avg_sq, *self.steps]


def assert_same(ours, theirs):
    """The same bits, or a few last ones apart where the native back end says of itself that it is not exact."""
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == y.dtype
        if host_adam.is_exact():
            assert torch.equal(x.isnan(), y.isnan())
            assert torch.equal(x.nan_to_num(), y.nan_to_num())
        else:
            torch.testing.assert_close(x, y, rtol=1e-5 if x.dtype == torch.float32 else 1e-2, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.4, 0.999)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_ten_steps_with_a_schedule_equal_torch_optim(backend, kind, betas, weight_decay, maximize):
    world = World()
    theirs = [torch.nn.Parameter(p.clone()) for p in world.params]
    options = {"betas": betas, "weight_decay": weight_decay, "maximize": maximize}
    optimizer = kind(theirs, lr=1e-2, eps=1e-8, fused=True, **options)
    for i in range(10):
        lr = optimizer.param_groups[0]["lr"] = 1e-2 * (10 - i) / 7
        for p, g in zip(theirs, world.grads, strict=True):
            g.normal_()
            p.grad = g.clone()
        optimizer.step()
        world.update(lr=lr, decoupled=kind is torch.optim.AdamW, **options)
    state = [optimizer.state[p] for p in theirs]
    assert_same(world.state(), [p.detach() for p in theirs] + [s[k] for k in ("exp_avg", "exp_avg_sq", "step") for s in state])


def test_the_scale_is_clipping_by_hand_and_leaves_the_gradients(backend):
    ours, byhand = World(), World()
    before = [g.clone() for g in ours.grads]
    for g in byhand.grads:
        g.mul_(0.37)
    ours.update(scale=0.37)
    byhand.update()
    assert_same(ours.state(), byhand.state())
    assert all(map(torch.equal, ours.grads, before))


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_in_and_out_equals_the_explicit_casts(backend, dtype):
    ours, explicit = World(grad=dtype), World(grad=dtype)
    explicit.grads = [g.float() * 0.37 for g in explicit.grads]
    out = [torch.full_like(g, 7) for g in ours.grads]
    for _ in range(3):
        ours.update(scale=0.37, out=out)
        explicit.update()
    assert_same(ours.state(), explicit.state())
    assert_same(out, [p.to(dtype) for p in ours.params])


@pytest.mark.parametrize("dtype", LOW)
def test_a_peek_gives_the_weights_of_the_update_and_changes_nothing(backend, dtype):
    world = World([*SHAPES, (300_001,)], grad=dtype)
    world.update()
    before = [t.clone() for t in (*world.state(), *world.grads)]
    seen, out = ([torch.full_like(g, 7) for g in world.grads] for _ in range(2))
    world.update(scale=0.37, out=seen, peek=True)
    assert all(map(torch.equal, (*world.state(), *world.grads), before))
    world.update(scale=0.37, out=out)
    assert all(map(torch.equal, seen, out))


def test_a_peek_without_a_place_for_the_weights_is_refused(backend):
    with pytest.raises(ValueError, match="`peek` writes `out` and nothing else"):
        World().update(peek=True)


@pytest.mark.parametrize("dtype", LOW)
def test_the_low_precision_weight_may_take_the_gradients_memory(backend, dtype):
    apart, shared = World([(300_001,), (5,)], dtype), World([(300_001,), (5,)], dtype)
    out = [torch.empty_like(g) for g in apart.grads]
    apart.update(out=out)
    shared.update(out=shared.grads)
    assert_same(shared.state(), apart.state())
    assert_same(shared.grads, out)


@pytest.mark.parametrize("dtype", LOW)
def test_weights_are_rounded_as_torch_rounds_them(backend, dtype):
    world = World([(1 << 18,)])
    patterns = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 18,), dtype=torch.int64)
    ties = torch.arange(1 << 16) << 16 | 0x8000 | torch.randint(0, 3, (1 << 16,)) - 1
    patterns[: 1 << 16] = torch.where(ties >= 1 << 31, ties - (1 << 32), ties)
    world.params = [patterns.to(torch.int32).view(torch.float32)]
    before = world.params[0].clone()
    out = [torch.zeros(1 << 18, dtype=dtype)]
    world.update(lr=0.0, weight_decay=0.0, out=out)  # which changes no weight
    assert torch.equal(before.isnan(), world.params[0].isnan())
    assert_same(out, [before.to(dtype)])


@pytest.mark.parametrize("dtype", LOW)
def test_every_low_precision_gradient_is_read_as_torch_reads_it(backend, dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    ours, explicit = World([(1 << 16,)]), World([(1 << 16,)])
    ours.grads, explicit.grads = [every], [every.float()]
    ours.update()
    explicit.update()
    assert_same(ours.state(), explicit.state())


def test_both_back_ends_agree_after_many_steps():
    if not host_adam.is_exact() or not host_adam.backend().startswith("native"):
        pytest.skip(host_adam.backend())
    ours, theirs = (World([(4096 + 7,)], torch.bfloat16) for _ in range(2))
    many_steps(ours)
    with host_adam_by(step_by_torch):
        many_steps(theirs)
    assert all(map(torch.equal, ours.state(), theirs.state()))


def many_steps(world):
    dice = torch.Generator().manual_seed(1)
    for i in range(100):
        rule = {"lr": 1e-3 / (i + 1), "betas": (0.9, 0.999), "weight_decay": 0.01 * (i % 3), "scale": 1 / (1 + i % 4)}
        world.grads[0].copy_(torch.randn(4103, generator=dice))
        world.update(decoupled=bool(i % 2), maximize=bool(i % 5), **rule)


@pytest.mark.parametrize("length", [48, 1024])
@host_adam_by(step_by_torch)
def test_slices_give_the_bits_of_the_whole(length):
    shapes = [(5,), (16,), (2003,), (3, 701)]
    whole, sliced = World(shapes, torch.bfloat16), World(shapes, torch.bfloat16)
    whole.update(scale=0.5)
    with pieces_of(length):
        sliced.update(scale=0.5)
    assert all(map(torch.equal, whole.state(), sliced.state()))


def test_a_step_is_the_same_with_any_number_of_threads(backend):
    one, many = World([(1_000_003,)], torch.bfloat16), World([(1_000_003,)], torch.bfloat16)
    one.update(threads=1)
    many.update(threads=7)
    assert all(map(torch.equal, one.state(), many.state()))


def test_parameters_that_require_gradients_are_updated(backend):
    world = World()
    for p in world.params:
        p.requires_grad_()
    world.update()
    assert all(s == 1 for s in world.steps)


def test_nothing_to_update_is_no_error(backend):
    World([]).update()
    World([(0,)]).update()


def longest_silence(work):
    """The share of `work`'s time for which a second Python thread could not run."""
    beats, stop = [time.perf_counter()], threading.Event()

    def beat():
        while not stop.is_set():
            beats.append(time.perf_counter())

    heart = threading.Thread(target=beat)
    heart.start()
    began = time.perf_counter()
    work()
    ended = time.perf_counter()
    stop.set()
    heart.join()
    during = [began, *(b for b in beats if began < b < ended), ended]
    return max(b - a for a, b in itertools.pairwise(during)) / (ended - began)


def test_the_gil_is_released(backend):
    world = World([(6_000_000,)], torch.bfloat16)
    world.update(threads=1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # or the Python around the step would give the other thread a fair share
    try:
        shares = (longest_silence(lambda: world.update(threads=1)) for _ in range(30))  # other work may silence it now and then
        assert any(share < 0.3 for share in shares)
    finally:
        sys.setswitchinterval(interval)


@host_adam_by(step_by_torch)
def test_torch_runs_with_the_threads_asked_for_and_keeps_its_own(monkeypatch):
    seen = []
    fused = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *a, **k: (seen.append(torch.get_num_threads()), fused(*a, **k)))
    settings = []

    def work():
        torch.set_num_threads(1)
        World().update(threads=3)
        settings.append(torch.get_num_threads())

    before = torch.get_num_threads()
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    torch.set_num_threads(before)
    assert set(seen) == {3}
    assert settings == [1]


@on_linux
def test_native_runs_in_the_threads_asked_for_and_leaves_none():
    if not host_adam.backend().startswith("native"):
        pytest.skip(host_adam.backend())
    world = World([(2_000_000,)], torch.bfloat16)
    seen, stop, ready = set(), threading.Event(), threading.Event()

    def watch():
        while not stop.is_set():
            seen.add(len(os.listdir("/proc/self/task")))
            ready.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    ready.wait()
    alone = min(seen)
    deadline = time.perf_counter() + 5  # on a busy machine the watcher may look too seldom to see them all at once
    while max(seen) < alone + 4 and time.perf_counter() < deadline:
        world.update(threads=5)
    stop.set()
    watcher.join()
    assert max(seen) == alone + 4
    while (left := len(os.listdir("/proc/self/task"))) >= alone and time.perf_counter() < deadline + 1:
        time.sleep(0.001)  # a thread that was joined leaves /proc a moment later
    assert left == alone - 1


def test_without_a_compiler_torch_does_the_work(nothing_chosen, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    ours, theirs = World(), World()
    ours.update()
    assert host_adam.backend() == "torch: no C++ compiler is on the path (of c++, g++, clang++)"
    assert host_adam.is_exact()
    with host_adam_by(step_by_torch):
        theirs.update(threads=1)
    assert all(map(torch.equal, ours.state(), theirs.state()))


def test_a_compiler_that_fails_is_named_and_torch_does_the_work(nothing_chosen, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _name: "/bin/false")
    assert host_adam.backend().startswith("torch: the native back end does not load: /bin/false says")


def native_steps_are(monkeypatch, step):
    """Whatever is compiled does this."""
    monkeypatch.setattr(shutil, "which", lambda _name: "c++")
    monkeypatch.setattr(host_library, "build", lambda _compiler, _fusion: "nowhere")
    monkeypatch.setattr(host_native, "bind", lambda _library, _rounding: step)


def test_a_native_step_that_is_wrong_is_not_taken(nothing_chosen, monkeypatch):
    native_steps_are(monkeypatch, lambda _arrays, _rule, _threads: None)
    assert host_adam.backend().startswith("torch: the native back end differs by")


def test_a_native_step_that_is_nearly_right_says_how_far_it_is(nothing_chosen, monkeypatch):
    def nearly(arrays, rule, threads):
        step_by_torch(arrays, rule, threads)
        for a in arrays:
            a.param[0] = torch.nextafter(a.param[0], torch.tensor(9.0))

    native_steps_are(monkeypatch, nearly)
    assert "at most 1 ulps" in host_adam.backend()
    assert not host_adam.is_exact()
    exact, theirs, near = (World([(5,), (64,)]) for _ in range(3))
    exact.update(exact=True)  # which torch does then
    near.update()
    with host_adam_by(step_by_torch):
        theirs.update()
    assert all(map(torch.equal, exact.state(), theirs.state()))
    assert not all(map(torch.equal, near.state(), theirs.state()))


def test_it_is_compiled_once_for_all_processes(nothing_chosen, monkeypatch, tmp_path):
    if not host_adam.backend().startswith("native"):
        pytest.skip(host_adam.backend())
    libraries = list((tmp_path / "holdall").iterdir())
    assert 1 <= len(libraries) <= 2 and {library.suffix for library in libraries} == {".so"}
    monkeypatch.setattr(subprocess, "run", lambda *_a, **_k: pytest.fail("compiled again"))
    with host_adam_not_chosen():
        assert host_adam.backend().startswith("native")


def test_a_cache_that_cannot_be_written_is_done_without(nothing_chosen, monkeypatch, tmp_path):
    if not any(map(shutil.which, host_library.COMPILERS)):
        pytest.skip("no C++ compiler")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert host_adam.backend().startswith("native")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w.grads.pop(), "`grads` has 8 tensors and `params32` 9"),
        (lambda w: w.params.__setitem__(3, w.params[3].double()), r"`params32\[3\]` is torch.float64"),
        (lambda w: w.grads.__setitem__(5, w.grads[5].t().contiguous().t()), r"`grads\[5\]` .* contiguous"),
        (lambda w: w.exp_avg.__setitem__(3, torch.zeros(15)), r"`exp_avg\[3\]` .* 16 elements"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_changes(spoil, message):
    world = World()
    spoil(world)
    with pytest.raises(ValueError, match=message):
        world.update()
    assert all(s == 0 for s in world.steps)


def test_an_update_needs_a_thread():
    with pytest.raises(ValueError, match="`threads` is 0"):
        World().update(threads=0)


def test_a_core_is_left_to_the_thread_that_launches_kernels(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16), raising=False)
    assert host_adam.host_threads(torch.device("cuda")) == 15
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1), raising=False)
    assert host_adam.host_threads(torch.device("cuda")) == 1
    assert host_adam.host_threads(torch.device("cpu")) == torch.get_num_threads()
