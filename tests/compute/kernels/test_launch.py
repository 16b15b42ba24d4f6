"""A kernel that is launched again is the one that Triton would choose, and gets the arguments that it would get."""

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from narrowgauge.compute.kernels.fused import amax, blocks, launch, rows, tensorwise
from narrowgauge.compute.quant import CURRENT, CURRENT_POW2, ROWWISE, BLOCK_1x128, BLOCK_128x128, PerRow, PerTensor
from narrowgauge.compute.recipes import Operand
from narrowgauge.formats import E4M3FN, E5M2

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Kernel:
    """Stands for a `triton.jit` function: tells how it was launched, and compiles a kernel that does too."""

    def __init__(self):
        self.told = []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.told.append(("compiled", grid, args, options))
            return Compiled(self.told)

        return run


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, told):
        self.told = told

    def __getitem__(self, grid):
        return lambda *args, stream: self.told.append(("told of", grid, args, stream))

    def run(self, *args):
        grid, (stream, *facts), args = args[:3], args[3:9], args[9:]
        assert facts == ["function", "metadata", None, None, None]
        self.told.append(("ready", grid, args, stream))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_LAUNCHES", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    return Kernel()


def test_the_second_launch_gets_addresses_and_the_stream(kernel):
    x, y = torch.zeros(64), torch.zeros(64)
    for late in (5, 16):
        launch.launch(kernel, 3, (x, None, y), (64, 1), (True, 2.0), (late,), num_warps=4)
    assert kernel.told == [
        ("compiled", (3,), (x, None, y, 64, 1, 5, True, 2.0), {"num_warps": 4}),
        ("ready", (3, 1, 1), (x.data_ptr(), None, y.data_ptr(), 64, 1, 16, True, 2.0), 77),
    ]


def test_a_launch_is_made_again_with_another_first_tensor(kernel):
    x, y, z = torch.zeros(64), torch.zeros(64), torch.ones(64)
    made = launch.Launch(kernel, 3, (64, 1), (True, 2.0), num_warps=4)
    assert made.again((x, None, y)) is None  # it never was
    made((x, None, y), (5,))
    again = made.again((x, None, y))
    again(z, z.data_ptr(), (16,))
    assert kernel.told[1:] == [("ready", (3, 1, 1), (z.data_ptr(), None, y.data_ptr(), 64, 1, 16, True, 2.0), 77)]
    knobs.runtime.launch_enter_hook.add(print)
    again(z, z.data_ptr(), (17,))
    knobs.runtime.launch_enter_hook.remove(print)
    assert kernel.told[2:] == [("told of", (3, 1, 1), (z.data_ptr(), None, y.data_ptr(), 64, 1, 17, True, 2.0), 77)]
    assert made.again((torch.zeros(65)[1:], None, y)) is None  # Triton may compile another kernel for that


class CudaLauncher:
    """As Triton's: `launch` is told more than it is, of what it finds out each time."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = "cooperative", "pdl"

    def __init__(self, told):
        self.told = told

    def __call__(self, *args):
        self.told.append(("by Triton", args))

    def launch(self, *args):
        self.told.append(("at once", args))


@pytest.mark.parametrize(
    ("version", "needs", "way"),
    [("3.6.0", 0, "at once"), ("3.6.0", 128, "by Triton"), ("3.5.1", 0, "by Triton"), ("3.7.0", 0, "by Triton")],
)
def test_what_a_launcher_would_find_out_again_is_told_it_where_its_version_is_known(
    kernel, version, needs, way, monkeypatch
):
    x = torch.zeros(64)
    launcher = CudaLauncher(kernel.told)
    launcher.global_scratch_size = needs
    monkeypatch.setattr(launch.triton, "__version__", version)
    made = launch.Launch(kernel, 3, (64,), (True,))
    made((x,))
    next(iter(made._ready.values())).run = launcher
    made.again((x,))(x, x.data_ptr(), ())
    more = ("cooperative", "pdl", None, None) if way == "at once" else ()
    args = (3, 1, 1, 77, "function", *more, "metadata", None, None, None, x.data_ptr(), 64, True)
    assert kernel.told[1:] == [(way, args)]


def test_a_profiler_is_told_of_every_launch(kernel, monkeypatch):
    hook = knobs.runtime.launch_enter_hook
    hook.add(print)
    for _ in range(2):
        launch.launch(kernel, 1, (torch.zeros(1),), (), ())
    hook.remove(print)
    launch.launch(kernel, 1, (torch.zeros(1),), (), ())
    assert [how for how, *_ in kernel.told] == ["compiled", "told of", "ready"]


@pytest.mark.parametrize(
    "changed",
    [
        {"programs": 4},
        {"sizes": (32,)},
        {"constants": (False,)},
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": torch.zeros(65)[1:]},
        {"x": None},
        {"device": 1},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_triton_compiles_by_is_asked_anew(kernel, changed, monkeypatch):
    usual = {"programs": 3, "x": torch.zeros(64), "sizes": (64,), "constants": (True,)}

    def run(programs, x, sizes, constants, device=0):
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device)
        launch.launch(kernel, programs, (x,), sizes, constants)

    for what in (usual, usual | changed, usual):
        run(**what)
    assert [how for how, *_ in kernel.told] == ["compiled", "compiled", "ready"]


def test_shapes_that_never_come_back_do_not_pile_up(kernel, monkeypatch):
    monkeypatch.setattr(launch, "MOST", 10)
    for n in range(100):
        launch.launch(kernel, 1, (torch.zeros(1),), (n,), ())
    assert len(launch._LAUNCHES) <= 10


@cuda
@pytest.mark.gpu
def test_triton_would_choose_the_same(monkeypatch):
    chosen = {}
    inner = launch.Launch.__call__

    def asked(self, tensors, late=()):
        kept, self._ready = self._ready, {}  # so that Triton chooses each time
        inner(self, tensors, late)
        (key, compiled), self._ready = next(iter(self._ready.items())), kept
        whole = (id(self._kernel), self._programs, self._sizes, self._constants, key, tensors[0].dtype)
        assert chosen.setdefault(whole, compiled) is compiled

    monkeypatch.setattr(launch.Launch, "__call__", asked)
    table = torch.ones(64, device="cuda")
    calls = 0
    for M, K in ((256, 512), (130, 77), (1, 16), (16, 1)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for offset in (0, 1, 8):
                for row in (0, 1):
                    x = torch.randn(M * K + offset, device="cuda").to(dtype)[offset:].view(M, K)
                    for fmt in (E4M3FN, E5M2):
                        rule = Operand(fmt, PerTensor(), CURRENT)
                        tensorwise.cast(x, rule, amax.amax(x))
                        tensorwise.cast_given(x, rule, table[row], table[row + 1], slot=table[row + 2 : row + 3])
                        blocks.cast_tiles(x, Operand(fmt, BLOCK_1x128, CURRENT_POW2))
                        blocks.cast_squares(x, Operand(fmt, BLOCK_128x128, CURRENT_POW2))
                        rows.cast_rows(x, Operand(fmt, PerRow(), ROWWISE))
                        calls += 7
    assert 50 < len(chosen) < calls
