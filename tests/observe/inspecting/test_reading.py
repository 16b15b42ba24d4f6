"""What is found in a file, and how a file that cannot be read is told apart from one that must not be."""

import json
import os
import pickle
import re
import struct
import sys
import warnings
import zipfile
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint

from narrowgauge.errors import UsageError
from narrowgauge.observe.inspect import inspect, open_checkpoint


def header(facts, data=b""):
    text = json.dumps(facts).encode()
    return struct.pack("<Q", len(text)) + text + data


def kinds(path, **options):
    return {row.entry.name: row.kind for row in inspect(open_checkpoint(path), **options).rows}


def refused(path):
    with pytest.raises(UsageError) as told:
        open_checkpoint(path)
    assert str(path) in str(told.value)
    assert not re.search(r"\n|[A-Z]\w+Error|Errno", str(told.value))  # in words, not in those of the code that failed
    return str(told.value)


def test_a_safetensors_file(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(2, 3), "b": torch.zeros(3), "s": torch.tensor(1.0), "i": torch.arange(3)}, path)
    found = open_checkpoint(path)
    assert {(e.name, e.shape, e.dtype) for e in found.entries} == {
        ("w", (2, 3), "float32"), ("b", (3,), "float32"), ("s", (), "float32"), ("i", (3,), "int64"),
    }  # fmt: skip
    assert found.size == path.stat().st_size
    assert kinds(path) == {"w": "matrix", "b": "vector", "s": "vector", "i": "skipped"}
    assert inspect(found).parameters == 6 + 3 + 1


def test_a_file_is_known_by_what_is_in_it_and_not_by_its_name(tmp_path):
    save_file({"w": torch.ones(2, 2)}, tmp_path / "a.weights")
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "b.weights")
    save_file({"w": torch.ones(2, 2)}, tmp_path / "c.bin")
    for name in ("a.weights", "b.weights", "c.bin"):
        assert kinds(tmp_path / name) == {"w": "matrix"}


@pytest.mark.parametrize("old", [False, True])
def test_nested_dicts_are_joined_by_dots(tmp_path, old):
    path = tmp_path / "a.pt"
    content = {"model": {"up.weight": torch.ones(2, 2)}, "parts": [torch.ones(1), (torch.ones(1), "word")], "step": 3}
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    assert kinds(path) == {"model.up.weight": "matrix", "parts.0": "vector", "parts.1.0": "vector"}
    assert len(open_checkpoint(path).notes) == old  # that it was read as a whole is said


@pytest.mark.parametrize("old", [False, True])
def test_a_torch_checkpoint_that_is_named_as_safetensors(tmp_path, old):
    """torch.load goes by the name: it was called damaged."""
    path = tmp_path / "model.safetensors"
    torch.save({"up": torch.full((2, 2), 1.5)}, path, _use_new_zipfile_serialization=not old)
    file = open_checkpoint(path)
    assert file.read("up").tolist() == [[1.5, 1.5], [1.5, 1.5]]
    assert file.notes == (
        "model.safetensors is a torch checkpoint, whatever its name says. Under a name with .safetensors it is read as "
        "a whole.",
    )
    path.write_bytes(path.read_bytes()[:-30])
    assert "is no whole torch checkpoint" in refused(path)


def test_a_bare_tensor_has_a_name(tmp_path):
    torch.save(torch.ones(2, 2), tmp_path / "a.pt")
    assert kinds(tmp_path / "a.pt") == {"tensor": "matrix"}


def test_two_paths_that_are_written_alike_are_two_tensors(tmp_path):
    torch.save({"a.b": torch.ones(2, 2), "a": {"b": torch.zeros(2)}}, tmp_path / "a.pt")
    assert kinds(tmp_path / "a.pt") == {"a.b": "matrix", "a.b#2": "vector"}


def test_an_optimizer_is_known_by_its_form_or_its_name(tmp_path):
    model = torch.nn.Linear(4, 4)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    adam.step()
    torch.save({"net": model.state_dict(), "whatever": adam.state_dict()}, tmp_path / "a.pt")
    seen = inspect(open_checkpoint(tmp_path / "a.pt"))
    assert seen.parameters == 4 * 4 + 4
    assert [row.entry.name for row in seen.of("matrix")] == ["net.weight"]
    assert {row.entry.name for row in seen.rows if row.entry.optimizer} == {
        f"whatever.state.{i}.{name}" for i in (0, 1) for name in ("step", "exp_avg", "exp_avg_sq")
    }
    save_file({"optimizer.0.exp_avg": torch.ones(2, 2), "w": torch.ones(2, 2)}, tmp_path / "b.safetensors")
    assert kinds(tmp_path / "b.safetensors") == {"optimizer.0.exp_avg": "vector", "w": "matrix"}
    assert inspect(open_checkpoint(tmp_path / "b.safetensors")).parameters == 4


def test_tied_tensors_are_counted_once(tmp_path):
    w = torch.ones(4, 4)
    torch.save({"embed": w, "head": w, "part": w[:2], "turned": w.t()}, tmp_path / "a.pt")
    seen = inspect(open_checkpoint(tmp_path / "a.pt"))
    assert [(row.entry.name, row.kind) for row in seen.rows] == [
        ("embed", "matrix"), ("head", "tied"), ("part", "matrix"), ("turned", "matrix"),
    ]  # fmt: skip
    assert seen.rows[1].note == "it is embed"
    assert seen.parameters == 16 + 8 + 16
    # Asked for by its second name alone it is looked at.
    assert kinds(tmp_path / "a.pt", only=["head"]) == {"head": "matrix"}


def test_a_tensor_without_a_name_is_tied_to_none(tmp_path):
    save_file({"": torch.ones(2, 4), "a.weight": torch.zeros(2, 4)}, tmp_path / "a.safetensors")
    assert kinds(tmp_path / "a.safetensors") == {"": "matrix", "a.weight": "matrix"}


@pytest.mark.parametrize("old", [False, True])
def test_empty_and_scalar_tensors(tmp_path, old):
    content = {"none": torch.zeros(0, 4), "also": torch.zeros(0, 4), "one": torch.tensor(2.0)}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
    assert kinds(tmp_path / "a.pt") == {"none": "empty", "also": "empty", "one": "vector"}


def test_what_has_no_plain_values_is_skipped_with_its_reason(tmp_path):
    torch.save(
        {
            "mask": torch.ones(2, dtype=torch.bool),
            "ids": torch.arange(4, dtype=torch.int32),
            "wave": torch.ones(2, dtype=torch.complex64),
            "sparse": torch.eye(3).to_sparse(),
            "meta": torch.ones(2, 2, device="meta"),
        },
        tmp_path / "a.pt",
    )
    seen = inspect(open_checkpoint(tmp_path / "a.pt"))
    assert {row.entry.name: row.note for row in seen.rows if row.kind == "skipped"} == {
        "mask": "it is bool",
        "ids": "it is int32",
        "wave": "it is complex64",
        "sparse": "it is sparse_coo",
        "meta": "it was saved without its data (meta)",
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("layout", "old"), [(torch.strided, False), (torch.jagged, False), (torch.jagged, True)])
def test_nested_tensors_are_skipped(tmp_path, layout, old):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    content = {"nested": nested, "w": torch.ones(2, 4)}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
    skipped, measured = inspect(open_checkpoint(tmp_path / "a.pt")).rows
    assert (skipped.kind, skipped.note, skipped.entry.shape) == ("skipped", "it is nested", (18,))
    assert measured.kind == "matrix"


@pytest.fixture
def unloaded():
    """Torch's reader as in a process that has not imported what nested tensors and DTensors need."""
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield known
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(known)


def test_what_reads_jagged_tensors_is_imported(tmp_path, monkeypatch, unloaded):
    nested = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    torch.save({"nested": nested}, tmp_path / "a.pt")
    imported = []

    def imports(name):
        imported.append(name)
        torch.serialization.add_safe_globals(unloaded)

    monkeypatch.setattr("narrowgauge.observe.inspect.torch_file.import_module", imports)
    assert kinds(tmp_path / "a.pt") == {"nested": "skipped"}
    assert imported == ["torch._dynamo"]


def test_dtensors_are_told_how_to_be_made_whole(tmp_path, unloaded):
    (tmp_path / "a.pt").write_bytes(b"\x80\x02ctorch.distributed.tensor\nDTensor\n.")
    told = refused(tmp_path / "a.pt")
    assert "holds DTensors, which are spread over processes: it has one process's part of them." in told
    assert "each one's full_tensor()" in told


class Own(torch.Tensor):
    """As DTensors are where they can be read: a tensor without memory of its own."""


def test_what_is_more_than_a_tensor_is_skipped(tmp_path):
    torch.save({"w": torch.ones(2, 4).as_subclass(Own), "p": torch.nn.Parameter(torch.ones(2, 4))}, tmp_path / "a.pt")
    with torch.serialization.safe_globals([Own]):
        skipped, measured = inspect(open_checkpoint(tmp_path / "a.pt")).rows
    assert (skipped.kind, skipped.note, measured.kind) == ("skipped", "its type is Own", "matrix")


def test_packed_numbers_are_skipped(tmp_path):
    facts = {"w": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}}
    (tmp_path / "a.safetensors").write_bytes(header(facts, bytes(8)))
    [row] = inspect(open_checkpoint(tmp_path / "a.safetensors")).rows
    assert (row.kind, row.entry.dtype) == ("skipped", "F4")
    assert "one value per element" in row.note


@pytest.fixture
def shards(tmp_path):
    for i in (1, 2):
        save_file(
            {f"layers.{i}.w": torch.full((4, 4), float(i)), "extra": torch.ones(1)}, tmp_path / f"{i}.safetensors"
        )
    index = {"metadata": {}, "weight_map": {f"layers.{i}.w": f"{i}.safetensors" for i in (1, 2)}}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    return path


def test_a_sharded_model(shards):
    seen = inspect(open_checkpoint(shards))
    assert [(row.entry.name, row.own["amax"]) for row in seen.rows] == [("layers.1.w", 1.0), ("layers.2.w", 2.0)]
    assert seen.parameters == 32
    assert seen.checkpoint.size == sum(path.stat().st_size for path in shards.parent.iterdir())
    assert seen.checkpoint.notes == tuple(
        f"{i}.safetensors holds 1 tensors that the index does not name; they are left out." for i in (1, 2)
    )


def test_shards_of_torch_checkpoints(tmp_path):
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "1.bin")
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": {"w": "1.bin"}}))
    assert kinds(path) == {"w": "matrix"}


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "is no index (line 1 is no JSON: Expecting property name"),
        ("\xff", "is no index (it is not UTF-8); expected JSON with a weight_map."),
        ("[" * 100_000, "is no index (it nests too deep)"),
        ("[1]", "is no index (it has no weight_map); expected JSON with a weight_map."),
        ('{"model_type": "llama"}', "is no index (it has no weight_map)"),
        ('{"weight_map": {}}', "has no usable weight_map"),
        ('{"weight_map": {"w": 1}}', "has no usable weight_map"),
        ('{"weight_map": {"w": ""}}', "names the shard ''; expected the name of a file"),
        ('{"weight_map": {"w": "3.safetensors"}}', "names the shard 3.safetensors, which is not beside it"),
        (
            '{"weight_map": {"w": "../1.safetensors"}}',
            "names the shard '../1.safetensors'; expected the name of a file",
        ),
        ('{"weight_map": {"w": "model.safetensors.index.json"}}', "expected the name of a file of tensors"),
        ('{"weight_map": {"w": "1.safetensors"}}', "says that 1.safetensors holds 'w', which it does not (1 of 1"),
    ],
)
def test_an_index_that_does_not_fit(shards, index, says):
    shards.write_text(index, encoding="latin-1")
    assert says in refused(shards)


def test_a_file_that_is_not_there_names_the_one_that_is(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    assert "there is no file" in refused(tmp_path / "modle.safetensors")
    assert "did you mean 'model.safetensors'?" in refused(tmp_path / "modle.safetensors")
    assert refused(tmp_path / "no" / "such.pt").endswith("such.pt.")


def test_a_folder_names_what_is_in_it(shards):
    assert "is a folder; name a file in it: model.safetensors.index.json, 1.safetensors" in refused(shards.parent)
    (shards.parent / "empty").mkdir()
    assert "is a folder; nothing in it is known here; expected safetensors" in refused(shards.parent / "empty")
    (shards.parent / "empty" / "run.json").write_text("{}")
    assert f"of which `narrowgauge report {shards.parent / 'empty'}` makes a page" in refused(shards.parent / "empty")


def test_a_checkpoint_in_parts_is_told_how_to_make_one_file_of_it(tmp_path):
    folder = tmp_path / "step"
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.save({"w": torch.randn(4, 4), "v": torch.randn(4)}, checkpoint_id=folder, no_dist=True)
    (part,) = folder.glob("*.distcp")
    for path in (folder, part):
        told = refused(path)
        assert "is of a checkpoint in parts (torch.distributed.checkpoint); make one file of it" in told
        assert f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} model.pt" in told


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.safetensors", b"", "is empty; expected safetensors, a torch checkpoint (.pt"),
        ("a.pt", b"", "is empty; expected safetensors"),
        ("a.gguf", b"GGUF" + bytes(100), "begins with b'GGUF"),
        ("a.safetensors", b"some words about tensors", "begins with b'some wor', which nothing known here does"),
        ("a.safetensors", b"abc", "is no whole safetensors file: it ends within its header, after 3 bytes. If it was"),
        ("a.safetensors", header({}) + b"abc", "file: its 13 bytes are more or fewer than its header tells of."),
        ("a.safetensors", header({"w": {"dtype": "F32"}}), "its header is damaged (invalid JSON in header: missing"),
        ("a.pt", b"hello", "begins with b'hello', which nothing known here does; expected safetensors"),
        ("a.pt", b"PK\x03\x04" + bytes(100), "torch checkpoint: its end is missing or damaged, at 104 bytes. If"),
        ("a.pt", pickle.dumps({"a": 1}), "torch checkpoint: it is a pickle that torch.save did not write. If"),
        ("a.pt", b"\x80", "torch checkpoint: what it holds is damaged, or ends too early. If"),
        ("a.bin", b"version https://git-lfs.github.com/spec/v1\noid", "is Git LFS's placeholder for the file"),
    ],
)
def test_what_is_no_checkpoint(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    assert says in refused(tmp_path / name)


def test_another_archive_is_not_taken_for_a_checkpoint(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.ones(2))
    says = "is no whole torch checkpoint: it is a zip archive without the data.pkl that torch.save writes. If it was"
    assert says in refused(tmp_path / "a.npz")


def test_a_checkpoint_without_the_bytes_of_a_tensor(tmp_path):
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as found, zipfile.ZipFile(tmp_path / "b.pt", "w") as changed:
        for name in found.namelist():
            if not name.endswith("data/0"):
                changed.writestr(name, found.read(name))
    assert "failed locating file data/0: file not found. If it was downloaded" in refused(tmp_path / "b.pt")


@pytest.mark.parametrize("error", [RuntimeError("no room for 5 GiB.\nbacktrace"), OSError(5, "no room for 5 GiB")])
def test_what_torch_says_in_words_is_told(tmp_path, monkeypatch, error):
    def fails(*_, **__):
        raise error

    torch.save({"w": torch.ones(2, 2)}, tmp_path / "a.pt")
    monkeypatch.setattr(torch, "load", fails)
    assert "is no whole torch checkpoint: no room for 5 GiB. If it was" in refused(tmp_path / "a.pt")


@pytest.mark.parametrize("save", ["safetensors", "zip", "old"])
def test_a_file_that_was_cut_off(tmp_path, save):
    path = tmp_path / ("a.safetensors" if save == "safetensors" else "a.pt")
    if save == "safetensors":
        save_file({"w": torch.ones(64, 64)}, path)
    else:
        torch.save({"w": torch.ones(64, 64)}, path, _use_new_zipfile_serialization=save == "zip")
    whole = path.read_bytes()
    for length in (12, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        said = refused(path)
        assert "is no whole" in said
        assert "do that again" in said


def test_a_checkpoint_with_a_byte_gone_wrong(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2, 2)}, path)
    bad = bytearray(path.read_bytes())
    start = bad.find(b"ctorch._utils")
    bad[start : start + 10] = bytes(10)
    path.write_bytes(bad)
    assert "is no whole torch checkpoint: what it holds is damaged, or ends too early. If" in refused(path)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(1)}, path)

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", denied)
    assert refused(path) == f"{path} cannot be read: Permission denied."


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are Unix's")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.pt")
    assert "is no regular file" in refused(tmp_path / "a.pt")


def test_a_checkpoint_that_holds_itself(tmp_path):
    content = {"w": torch.ones(2, 2)}
    content["again"] = content
    torch.save(content, tmp_path / "a.pt")
    assert "nests more than 64 levels deep" in refused(tmp_path / "a.pt")


def test_a_checkpoint_that_unfolds_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.observe.inspect.torch_file.VALUES", 1000)
    content = {"w": 1}
    for _ in range(20):
        content = {"a": content, "b": content}
    torch.save(content, tmp_path / "a.pt")
    assert "holds more than 1,000 values" in refused(tmp_path / "a.pt")


class Trap:
    """What runs code when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def pickled(content, path, how):
    if how == "pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "zip")


def test_a_state_dict_with_tensors_of_torchaos_is_refused_with_what_to_save_instead(tmp_path, monkeypatch):
    theirs, path = ModuleType("torchao.theirs"), tmp_path / "a.pt"  # no class that torchao has torch take for safe
    theirs.Int8Tensor = type("Int8Tensor", (), {"__module__": "torchao.theirs"})
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.theirs", theirs)
    torch.save({"w": theirs.Int8Tensor()}, path)
    said = refused(path)
    assert "(it names `torchao.theirs.Int8Tensor`)" in said
    assert said.endswith("Save plain tensors: of each of torchao's what it stands for, its dequantize().")


@pytest.mark.parametrize("how", ["zip", "old", "pickle"])
def test_code_is_refused_and_not_run(tmp_path, how):
    marker, path = tmp_path / "ran", tmp_path / "a.pt"
    pickled({"w": torch.ones(2, 2), "trap": Trap(marker)} if how != "pickle" else Trap(marker), path, how)
    said = refused(path)
    assert not marker.exists()
    assert f"can only be read by running code that comes with it (it names `{os.mkdir.__module__}.mkdir`)" in said
    assert "Save tensors alone: torch.save(model.state_dict(), ...), or safetensors." in said
    # The trap works: whoever unpickles it runs it.
    with pytest.raises(Exception) if how == "pickle" else warnings.catch_warnings():
        torch.load(path, weights_only=False)
    assert marker.exists()


def test_no_environment_variable_lets_code_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker, path = tmp_path / "ran", tmp_path / "a.pt"
    torch.save({"trap": Trap(marker)}, path)
    assert "nothing of a file is run here" in refused(path)
    assert not marker.exists()


def test_a_whole_model_is_refused_by_the_name_of_its_class(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    assert "it names `torch.nn.modules.linear.Linear`" in refused(tmp_path / "a.pt")


def test_torchscript_is_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "a.pt"))
    assert "it is a TorchScript archive" in refused(tmp_path / "a.pt")


def test_only_takes_globs_and_whatever_lies_below_a_name(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({f"layers.{i}.{n}.weight": torch.ones(2, 2) for i in (0, 1) for n in ("up", "down")}, path)
    assert set(kinds(path, only=["layers.1"])) == {"layers.1.up.weight", "layers.1.down.weight"}
    assert set(kinds(path, only=["*.up.*", "layers.0.down.weight"])) == {
        "layers.0.up.weight", "layers.0.down.weight", "layers.1.up.weight",
    }  # fmt: skip
    seen = inspect(open_checkpoint(path), only=["layers.1"])
    assert seen.parameters == 16  # the file's


def test_only_takes_a_name_with_brackets_as_it_stands(tmp_path):
    save_file({f"heads[{i}].weight": torch.ones(2, 2) for i in range(2)}, tmp_path / "a.safetensors")
    assert set(kinds(tmp_path / "a.safetensors", only=["heads[0]"])) == {"heads[0].weight"}


def test_only_that_matches_nothing_names_what_is_near(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({f"layers.{i}.up.weight": torch.ones(2, 2) for i in range(3)}, path)
    says = "--only 'layers.1.upp.weight' matches no tensor of a.safetensors; near it: layers.1.up.weight"
    with pytest.raises(UsageError, match=re.escape(says)):
        inspect(open_checkpoint(path), only=["layers.0", "layers.1.upp.weight"])
    with pytest.raises(UsageError, match=r"near it: layers\.\d\.up\.weight, layers"):
        inspect(open_checkpoint(path), only=["@@"])
    save_file({}, path)
    with pytest.raises(UsageError, match="it holds no tensors"):
        inspect(open_checkpoint(path), only=["w"])


SCALARS = [
    *(np.float64(1.5), np.float32(1.5), np.float16(1.5), np.int64(3), np.uint8(3), np.bool_(True), np.complex64(1j)),
    *(np.str_("best"), np.bytes_(b"best"), np.datetime64("2020-01-01"), np.timedelta64(3, "s")),
    *(np.array(1.5, ">f8")[()], np.dtype("f4")),
]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("value", SCALARS, ids=lambda value: f"{type(value).__name__} {value}")
def test_numpy_scalars_are_harmless(tmp_path, value, old):
    before = set(torch.serialization.get_safe_globals())
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2, 2), "best": value}, path, _use_new_zipfile_serialization=not old)
    assert kinds(path) == {"w": "matrix"}
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)


def test_classes_of_numpy_that_others_allow_are_not_made(tmp_path):
    path, theirs = tmp_path / "a.pt", [type(np.dtype("f8")), np.dtype]  # as accelerate allows them when it is imported
    torch.save({"w": torch.ones(2, 2), "best": np.float64(1.5)}, path)
    with torch.serialization.safe_globals(theirs):
        assert kinds(path) == {"w": "matrix"}
        assert set(theirs) <= set(torch.serialization.get_safe_globals())


def test_numpy_scalars_are_named_alike_by_numpy_1(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2, 2), "b": np.float64(1.5)}, path)
    with zipfile.ZipFile(path) as found, zipfile.ZipFile(tmp_path / "b.pt", "w") as changed:
        for name in found.namelist():
            changed.writestr(name, found.read(name).replace(b"numpy._core.", b"numpy.core."))
    assert kinds(tmp_path / "b.pt") == {"w": "matrix"}


def test_numpy_scalars_are_keys_by_their_values(tmp_path):
    keys = [np.int64(0), np.int64(1), np.array(2, ">i4")[()], np.str_("head")]
    torch.save({"w": {key: torch.ones(2, 2) for key in keys}}, tmp_path / "a.pt")
    assert set(kinds(tmp_path / "a.pt")) == {"w.0", "w.1", "w.2", "w.head"}


class Made:
    """What is made when it is unpickled: by a function, of arguments and a state."""

    def __init__(self, *how):
        self.how = how

    def __reduce__(self):
        return self.how


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.ones(2), "numpy._core.multiarray._reconstruct"),
        (np.dtype("O"), "numpy.dtype"),
        (np.void(b"abc"), "numpy.dtype"),
        (np.zeros(1, [("a", "f4")])[0], "numpy.dtype"),
        (Made(np.dtype, (np.ndarray,)), "numpy.ndarray"),
        (Made(np.dtype, ("f8", False, False), (3, "?", None, None, None, 1 << 40, -1, 63)), "numpy.dtype"),
        (Made(np.dtype, ("f8",), {"code": "O"}), "numpy.dtype"),
        (Made(np.float64(1).__reduce__()[0], ("f8", "1.5")), "numpy.core.multiarray.scalar"),
    ],
)
def test_more_of_numpy_than_its_scalars_is_refused(tmp_path, value, name):
    torch.save({"w": torch.ones(2, 2), "v": value}, tmp_path / "a.pt")
    assert f"(it names `{name}`), and nothing of a file is run here" in refused(tmp_path / "a.pt")


def test_a_scalar_that_is_cut_is_damage(tmp_path):
    of_numpy = np.float64(1).__reduce__()[0]
    torch.save({"v": Made(of_numpy, (np.dtype("f8"), b"abc"))}, tmp_path / "a.pt")
    assert "is no whole torch checkpoint" in refused(tmp_path / "a.pt")
