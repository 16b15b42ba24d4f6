"""A Jupyter notebook, its cells run by a kernel of its own: `ng.watch` in one, training in others, errors between; and
the same cells in another kernel without us, where what layers see is measured by hand."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.integrations.differences import differences
from tests.integrations.watched import HERE, ROLES, Case, environment
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "Jupyter notebooks", ("ipykernel", "nbclient"), "`ng.watch` in one cell, training and errors in others"
)

pytestmark = [pytest.mark.slow]

HAND = f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport by_hand\nby_hand.listen()"
TELL = "by_hand.tell(globals())"
STEP = "optimizer.zero_grad()\nloss = (model(x) - x).square().mean()\nloss.backward()\noptimizer.step()\nloss.item()"
CELLS = {
    "import": "import torch, narrowgauge as ng\ntorch.manual_seed(0)\nfrom torch import nn",
    "model": "model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))\n"
    "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\nx = torch.randn(8, 16)",
    "watch": "watching = ng.watch(model, out='out', every=1)\nwatching",
    "first": STEP,
    "another": "ng.watch(model, out='another')",
    "wrong shape": "model(torch.ones(2, 3))",
    "second": "optimizer.zero_grad()\nh = model[:2](x)\n(model[2](h) * 0).sum()\n" + STEP,
    "loop": "said = []\nfor _ in range(3):\n    x = torch.randn(8, 16)\n    " + STEP.replace("\n", "\n    ") + "\n"
    "    said.append(loss.item())\nsaid",
    "show": "print(model[4])\n[p.abs().max().item() for p in model.parameters()]",
}
OURS = ("watch", "another")  # cells that a notebook has which is watched


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    if reason := WORKS.missing():
        pytest.skip(reason)
    case = Case(tmp_path_factory.mktemp("notebook"), "notebook")
    case.works = WORKS
    return case


@pytest.fixture(scope="module")
def outputs(case):
    """What each cell showed, watched and alone; a kernel is shut down as Jupyter does it."""
    alone = {"hand": HAND, **{name: cell for name, cell in CELLS.items() if name not in OURS}, "tell": TELL}
    with ThreadPoolExecutor() as pool:
        played = [
            pool.submit(play, case.folder / name, cells) for name, cells in (("watched", CELLS), ("plain", alone))
        ]
    return [each.result() for each in played]


def play(folder, cells):
    import nbclient
    import nbformat

    folder.mkdir()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells.values()])
    client = nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3", allow_errors=True)
    # In an event loop of its own, which is closed: `execute` leaves each thread's to the collector, with its sockets.
    asyncio.run(client.async_execute(cwd=str(folder), env=environment(folder)))
    return {name: cell.outputs for name, cell in zip(cells, notebook.cells, strict=True)}


def shown(outputs):
    return next(output.data["text/plain"] for output in outputs if output.output_type == "execute_result")


def told(outputs):
    """What a cell shows, whatever its number is."""
    return [{name: value for name, value in each.items() if name != "execution_count"} for each in outputs]


def test_cells_show_what_they_show_without_us_and_an_error_is_only_its_cell_s(case, outputs):
    watched, plain = outputs
    errors = [(name, each.ename) for name, cell in watched.items() for each in cell if each.output_type == "error"]
    assert errors == [("another", "UsageError"), ("wrong shape", "RuntimeError")]
    assert shown(watched["watch"]) == f"<narrowgauge watch into {case.folder / 'watched' / 'out'}>"
    assert "one watch at a time" in watched["another"][-1].evalue
    assert plain["hand"] == plain["tell"] == []
    assert plain["wrong shape"][-1].evalue == watched["wrong shape"][-1].evalue  # its traceback has the cell's number
    for name in CELLS.keys() - {*OURS, "wrong shape"}:
        assert told(watched[name]) == told(plain[name]), name


def test_the_run_is_whole_when_the_kernel_has_been_shut_down(case, outputs):
    run, (watched, _) = case.run(), outputs
    assert (run.status, run.meta["error"], run.meta["steps"]) == ("complete", "", 5)
    found, by_hand = run.scalars(), case.scalars_by_hand()[0]
    losses = [float(shown(watched["first"])), float(shown(watched["second"])), *eval(shown(watched["loop"]))]
    assert found["loss"].tolist() == pytest.approx(losses, rel=1e-7)
    for name in ("lr", "grad_norm", "param_norm"):
        assert found[name].tolist() == pytest.approx([by_hand[step][name] for step in range(1, 6)], rel=1e-5), name
    assert not (case.folder / "watched" / "another").exists()


def test_every_tensor_is_what_it_is_by_hand(case, outputs):
    want = case.rows_by_hand()
    sites = {f"{n}:{role}" for n in (0, 2, 4) for role in ROLES}
    assert want.keys() == {(step, site) for step in range(1, 6) for site in sites}
    assert want[2, "2:input"]["numel"] == 2 * want[1, "2:input"]["numel"]  # the cell that calls it twice
    assert differences(case.rows(), want) == []
