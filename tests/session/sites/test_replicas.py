"""`nn.DataParallel` calls replicas of a model in threads: what these multiply is the model's own layers'."""

import threading

import pytest
import torch
from tests.session.inline import followed
from torch import nn


class Replicas(nn.DataParallel):
    """As it is with two GPUs, on a CPU: module by module its own copies, whose parameters are copies in the graph."""

    def forward(self, x):
        modules = list(self.module.modules())
        halves, outputs = x.chunk(2), [None, None]

        def work(which, replica):
            outputs[which] = replica(halves[which])

        threads = []
        for which in range(2):
            copies = {module: module._replicate_for_data_parallel() for module in modules}
            for module, copy in copies.items():
                for name, child in module._modules.items():
                    setattr(copy, name, copies[child])
                for name, p in module._parameters.items():
                    setattr(copy, name, p.clone())
            threads.append(threading.Thread(target=work, args=(which, copies[self.module])))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat(outputs)


@pytest.mark.parametrize("recipe", [None, "current"])
def test_layers_have_the_rows_of_all_their_replicas(tmp_path, recipe):
    torch.manual_seed(0)
    with followed(tmp_path, judge="current", recipe=recipe, every=1) as (session, writer):
        model = Replicas(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs, losses = [torch.randn(8, 16) for _ in range(3)], []
        for x in inputs:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert list(writer.column("loss").values()) == pytest.approx(losses)
    rows = {
        (step, site): {name: float(columns[name][at]) for name in ("numel", "amax")}
        for step, sites, columns in writer.tensors
        for at, site in enumerate(sites)
    }
    for step, x in enumerate(inputs, 1):
        assert rows[step, "0:input"] == {"numel": x.numel(), "amax": pytest.approx(float(x.abs().max()))}
        assert rows[step, "2:input"]["numel"] == 8 * 32
        assert rows[step, "2:grad_output"]["numel"] == 8 * 8
        assert rows[step, "2:weight"]["numel"] == 32 * 8
    assert not any("Not seen as a weight" in note or "thread" in note for note in session.facts()["notes"])


def test_replicas_of_a_model_that_was_called_itself_before_train_nothing_of_their_own(tmp_path):
    with followed(tmp_path, judge="current", every=1) as (session, writer):
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 16)
        for called in (model, model, Replicas(model), Replicas(model)):  # its hooks are on the copies as well
            called(x).square().mean().backward()
            optimizer.step()
    assert writer.column("tokens") == dict.fromkeys(range(1, 5), 8)
    numels = [
        float(columns["numel"][sites.index("0:input")]) for _, sites, columns in writer.tensors if "0:input" in sites
    ]
    assert numels == [x.numel()] * 4
    assert session.hearing.notes == []
