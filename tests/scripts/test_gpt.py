"""The packaged training script: it learns, it is what it says, and bad input ends in one clear message."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path

import pytest
import torch

from narrowgauge.scripts import gpt

QUICK = ["--layers", "1", "--seq", "32", "--batch", "2", "--eval-batches", "2", "--device", "cpu"]
SMALL = gpt.Size(dim=32, ffn=64, heads=4, kv_heads=2, layers=2, batch=2, seq=16, lr=1e-3)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Twelve small files of repetitive text."""
    for i in range(12):
        (tmp_path / f"{i:02}.txt").write_text(f"file {i}: the quick brown fox jumps over the lazy dog. " * 20)
    return tmp_path


def test_it_imports_nothing_from_narrowgauge():
    tree = ast.parse(Path(gpt.__file__).read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import)]
    names = {alias.name for node in imports for alias in node.names}
    names |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"torch"}


def test_it_learns_the_standard_library(capsys: pytest.CaptureFixture[str]):
    """60 steps of one block leave what byte frequencies alone can predict."""
    code = gpt.main([*QUICK, "--batch", "8", "--steps", "60", "--lr", "8e-3", "--eval-every", "60"])
    out = capsys.readouterr().out
    entropy = float(out.split("unigram entropy ")[1].split()[0])
    final = float(out.split("validation loss ")[1].split()[0])
    assert code == 0
    assert final < entropy - 0.15


def test_same_seed_same_numbers_and_another_seed_others(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def losses(*more: str) -> list[str]:
        assert gpt.main([*QUICK, "--corpus", str(corpus), "--steps", "3", "--log-every", "1", *more]) == 0
        return [line.split("loss ")[1].split()[0] for line in capsys.readouterr().out.splitlines()[2:]]

    first = losses()
    assert len(first) == 4  # three steps and the validation
    assert losses() == first
    assert losses("--seed", "1") != first


def test_whoever_draws_random_numbers_does_not_change_the_data(corpus: Path):
    data = gpt.Tokens(gpt.read_corpus(corpus)[0], 16, torch.device("cpu"), "training")
    before, _ = data.sample(4, torch.Generator().manual_seed(0))
    torch.rand(100)
    after, _ = data.sample(4, torch.Generator().manual_seed(0))
    assert torch.equal(before, after)


def test_targets_are_the_next_bytes():
    data = gpt.Tokens(bytes(range(100)), 8, torch.device("cpu"), "training")
    inputs, targets = data.at(torch.tensor([0, 91]))
    assert inputs[0].tolist() == list(range(8))
    assert targets[1].tolist() == list(range(92, 100))
    assert data.starts == 92  # 91 is the last place where eight bytes and their targets fit


def test_split_is_disjoint_and_reads_files_in_order(corpus: Path):
    training, validation = gpt.read_corpus(corpus)
    assert b"file 9:" in validation
    assert b"file 9:" not in training
    assert training.startswith(b"file 0:")
    assert validation.count(b"file 9:") == 20


def test_one_file_validates_on_its_last_tenth(tmp_path: Path):
    (tmp_path / "book.txt").write_bytes(bytes(range(1, 201)))
    training, validation = gpt.read_corpus(tmp_path)
    assert (len(training), len(validation)) == (180, 20)


def test_standard_library_is_there_and_excludes_other_peoples_packages():
    training, validation = gpt.read_corpus(None)
    assert len(training) > 2_000_000
    assert len(validation) > 100_000
    assert b"import pytest\n" not in training


# ------------------------------------------------------------------------------------------------ model


def test_no_position_sees_a_later_one():
    torch.manual_seed(0)
    model = gpt.Llama(SMALL)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
    assert difference[:10].max() == 0
    assert difference[10:].min() > 0


def test_rotated_queries_and_keys_see_distances_only():
    cos, sin = gpt.rotary_table(32, 8)
    torch.manual_seed(0)
    q, k = torch.randn(8).expand(32, 8), torch.randn(8).expand(32, 8)
    scores = gpt.rotate(q, cos, sin) @ gpt.rotate(k, cos, sin).T
    for distance in (0, 3, 17):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal))


def test_layers_that_add_to_the_stream_start_narrower():
    torch.manual_seed(0)
    model = gpt.Llama(gpt.SIZES["tiny"])
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for block in model.blocks:
        assert block.attn.out.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
        assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
        assert block.mlp.gate_up.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("name", gpt.SIZES)
def test_every_matmul_of_every_size_fits_128_blocks(name: str):
    with torch.device("meta"):
        model = gpt.Llama(gpt.SIZES[name])
    sides = {side for m in model.modules() if isinstance(m, torch.nn.Linear) for side in m.weight.shape}
    assert all(side % 128 == 0 for side in sides)
    assert gpt.SIZES[name].batch * gpt.SIZES[name].seq % 128 == 0


@pytest.mark.parametrize(("name", "billions"), [("1b", 0.97), ("8b-slice", 1.75)])
def test_large_sizes_are_as_large_as_they_say(name: str, billions: float):
    with torch.device("meta"):
        count = sum(p.numel() for p in gpt.Llama(gpt.SIZES[name]).parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


def test_only_matrices_decay():
    model = gpt.Llama(SMALL)
    decayed, kept = gpt.make_optimizer(model, 1e-3, torch.device("cpu")).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_schedule_warms_up_for_seven_percent_and_ends_at_a_tenth():
    rates = [gpt.learning_rate(step, 200, 1.0) for step in range(200)]
    assert rates.index(max(rates)) + 1 == 14  # 7% of 200
    assert max(rates) == 1.0
    assert rates[:14] == sorted(rates[:14])
    assert rates[14:] == sorted(rates[14:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_evaluation_is_repeatable_and_builds_no_graph():
    model = gpt.Llama(SMALL)
    graphs: list[bool] = []
    model.register_forward_hook(lambda module, inputs, logits: graphs.append(logits.requires_grad))
    data = gpt.Tokens(bytes(range(256)) * 4, SMALL.seq, torch.device("cpu"), "validation")
    first = gpt.evaluate(model, data, 2, 3)
    assert gpt.evaluate(model, data, 2, 3) == first
    assert first == pytest.approx(math.log(256), abs=0.3)  # a fresh model knows nothing
    assert model.training
    assert graphs == [False] * 6


# -------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("make", [lambda p: None, lambda p: (p / "empty.txt").write_text(" \n")])
def test_an_empty_corpus_is_one_clear_message(make, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make(tmp_path)
    assert gpt.main(["--corpus", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"gpt.py: no text in {tmp_path}; --corpus wants a folder with files ending in .md, .py, .rst, .txt.\n"
    )


def test_a_missing_corpus_names_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert gpt.main(["--corpus", str(tmp_path / "nowhere")]) == 2
    assert f"no folder {tmp_path / 'nowhere'};" in capsys.readouterr().err


def test_a_python_without_sources_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(gpt.sysconfig, "get_path", lambda _: str(tmp_path))
    assert gpt.main([]) == 2
    assert capsys.readouterr().err == (
        f"gpt.py: no text in {tmp_path}; this Python ships without its sources; "
        "point --corpus at any folder of text files.\n"
    )


def test_a_text_shorter_than_a_window_says_both_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text("x" * 100)
    assert gpt.main(["--corpus", str(tmp_path), "--device", "cpu", "--seq", "64"]) == 2
    assert capsys.readouterr().err == (
        "gpt.py: the validation text has 10 bytes and one window needs 66; "
        "give --corpus more text or --seq a smaller number.\n"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps is 0; it must be 1 or more."),
        (["--eval-every", "-1"], "--eval-every is -1; it must be 1 or more."),
        (["--vocab", "100"], "--vocab is 100; the text is bytes, so it must be 256 or more."),
        (["--size", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_flags_out_of_range(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        gpt.main(flags)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
