"""A Jupyter notebook, its cells run by a kernel of its own: `ng.watch` in one, training in others, errors between."""

import pytest
from tests.integrations.watched import environment
from tests.integrations.works_with import WorksWith

from narrowgauge.observe.store import open_run

WORKS = WorksWith("Jupyter notebooks", ("ipykernel", "nbclient"), "`ng.watch` in one cell, training in others")

pytestmark = [pytest.mark.slow]

CELLS = (
    "import torch, narrowgauge as ng\nfrom torch import nn\ntorch.manual_seed(0)",
    "model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "watching = ng.watch(model, out='run', every=1)\nwatching",
    "x = torch.randn(8, 16)\nloss = (model(x) - x).square().mean()\nloss.backward()\noptimizer.step()\nloss.item()",
    "ng.watch(model, out='another')",
    "model(torch.ones(2, 3))",
    "optimizer.zero_grad()\nh = model[1](model[0](x))\n(model[2](h) * 0).sum()\n"
    "loss = (model(x) - x).square().mean()\nloss.backward()\noptimizer.step()\n"
    "[loss.item(), x.abs().max().item(), h.abs().max().item()]",
    "def by_hand(x, largest, dtype):\n"
    "    x, amax = x.detach(), x.detach().abs().max()\n"
    "    codes = (x * (largest / amax)).clamp(-largest, largest).to(dtype).double()\n"
    "    error, lost = x.double() - codes * (amax.double() / largest), (codes == 0) & (x != 0)\n"
    "    return [x.numel(), amax.item(), x.double().norm().item(), error.square().mean().item(), "
    "100 * lost.double().mean().item()]\n"
    "kept = {}\n"
    "def keep(module, args, output):\n"
    "    kept.update(x=args[0].detach().clone(), w=module.weight.detach().clone())\n"
    "    output.register_hook(lambda g: kept.update(g=g.clone()))\n"
    "handle = model[2].register_forward_hook(keep)",
    "optimizer.zero_grad()\nloss = (model(x) - x).square().mean()\nloss.backward()\noptimizer.step()\n"
    "[loss.item(), by_hand(kept['x'], 448.0, torch.float8_e4m3fn), by_hand(kept['w'], 448.0, torch.float8_e4m3fn), "
    "by_hand(kept['g'], 57344.0, torch.float8_e5m2)]",
)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The cells' outputs, and the folder that the kernel ran in; the kernel is shut down as Jupyter does it."""
    if reason := WORKS.missing():
        pytest.skip(reason)
    import nbclient
    import nbformat

    folder = tmp_path_factory.mktemp("notebook")
    found = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(found, timeout=100, kernel_name="python3", allow_errors=True)
    client.execute(cwd=str(folder), env=environment(folder))
    return [cell.outputs for cell in found.cells], folder


def shown(outputs):
    return next(output.data["text/plain"] for output in outputs if output.output_type == "execute_result")


def test_cells_show_what_they_would_and_an_error_is_only_its_cell_s(notebook):
    outputs, folder = notebook
    errors = [[each.ename for each in cell if each.output_type == "error"] for cell in outputs]
    assert errors == [[], [], [], [], ["UsageError"], ["RuntimeError"], [], [], []]
    assert shown(outputs[2]) == f"<narrowgauge watch into {folder / 'run'}>"
    assert "one watch at a time" in outputs[4][-1].evalue


def test_the_run_is_whole_when_the_kernel_has_been_shut_down(notebook):
    outputs, folder = notebook
    run = open_run(folder / "run")
    assert (run.status, run.meta["error"], run.meta["steps"]) == ("complete", "", 3)
    losses = [float(shown(outputs[3])), eval(shown(outputs[6]))[0], eval(shown(outputs[8]))[0]]
    assert run.scalars("loss")["loss"].tolist() == pytest.approx(losses, rel=1e-7)
    _, x, h = eval(shown(outputs[6]))
    assert run.series("0:input", "amax")[1].tolist() == pytest.approx([x, x, x], rel=1e-6)
    assert run.series("2:input", "amax")[1][1] == pytest.approx(h, rel=1e-6)
    assert not (folder / "another").exists()


def test_every_statistic_of_a_layer_is_what_a_cell_computes(notebook):
    outputs, folder = notebook
    run, (_, *wanted) = open_run(folder / "run"), eval(shown(outputs[8]))
    for role, want in zip(("input", "weight", "grad_output"), wanted, strict=True):
        found = [run.series(f"2:{role}", column)[1][-1] for column in ("numel", "amax", "l2", "mse", "underflow_pct")]
        assert found == pytest.approx(want, rel=1e-5), role
