"""The command line is a promise: verbs and flags are pinned, wrong ones get one clear message and exit code 2."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from narrowgauge.cli.main import VERBS, cli, main

FLAGS = {
    "compare": {"--recipes", "--baseline", "--steps", "--config", "--out"},
    "run": {"--convert", "--steps", "--every", "--config", "--out"},
    "report": {"-o", "--out", "--text"},
    "inspect": {"--recipes", "--role", "--only", "--top", "--json", "--out"},
    "bench quantize": {"--recipes", "--shape", "--peer", "--rounds", "--device", "--json", "--out"},
    "bench gemm": {"--shape", "--sweep", "--recipes", "--peer", "--rounds", "--device", "--json", "--out"},
    "bench step": {
        "--size", "--recipes", "--precisions", "--peer", "--brief", "--eager", "--cuda-graphs", "--rounds",
        "--device", "--json", "--out",
    },
    "bench overhead": {
        "--size", "--recipes", "--peer", "--eager", "--cuda-graphs", "--rounds", "--device", "--json", "--out",
    },
    "doctor": set(),
}  # fmt: skip


def commands():
    """Every command by its words: `run`, `bench step`."""
    for verb in VERBS:
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None
        if isinstance(command, click.Group):
            yield from ((f"{verb} {name}", sub) for name, sub in command.commands.items())
        else:
            yield verb, command


def flags_of(command):
    options = [p for p in command.params if isinstance(p, click.Option)]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


def test_flags_are_pinned():
    assert {words: flags_of(command) for words, command in commands()} == FLAGS


def run(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    said = capsys.readouterr()
    return stop.value.code, said.out + said.err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["compar"], "there is no verb 'compar'; did you mean 'compare'?"),
        (["compare", "--", "none.py"], "cannot run 'none.py': there is no such file"),
        (["compare", "--recipes", "curent", "--", "train.py"], "did you mean 'current'?"),
        (["compare", "--recipes", ",", "--", "train.py"], "no recipe was named"),
        (["compare", "--recipes", "current,current", "--", "train.py"], "named twice"),
        (["compare", "--steps", "0", "--", "train.py"], "0 is not in the range x>=1"),
        (["run", "--steps", "-3", "--", "train.py"], "-3 is not in the range x>=1"),
        (["compare", "--out", "/proc/none", "--", "train.py"], "cannot write to /proc/none: No such file or directory"),
        (["run", "--out", "train.py", "--", "train.py"], "is a file"),
        (["run", "--out", "/proc/none", "--", "train.py"], "cannot write to /proc/none: No such file or directory"),
        (["compare", "--out", "full", "--", "train.py"], "full is not empty"),
        (["compare", "--out", "train.py", "--", "train.py"], "is a file"),
        (["compare", "--baseline", "fp7", "--", "train.py"], "'fp7' is not one of"),
        (["compare", "--config", "none.toml", "--", "train.py"], "cannot read the configuration none.toml"),
        (["run"], "no command was given"),
        (["run", "--convert", "blokwise", "--", "train.py"], "did you mean 'blockwise'?"),
        (["run", "--out", "full", "--", "train.py"], "full is not empty"),
        (["run", "--out", "", "--", "train.py"], "an empty name is no folder's; give the name of one with --out."),
        (["compare", "--out", "", "--", "train.py"], "an empty name is no folder's"),
        (["report", "nothing"], "nothing"),
        (["report", "full", "--text", "-o", "a.txt"], "--text prints, and writes no page; leave out -o, or --text."),
    ],
)
def test_wrong_use_is_told_why_and_ends_with_2(capsys, tmp_path, monkeypatch, argv, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "run.json").write_text("{}")
    code, text = run(capsys, *argv)
    assert code == 2
    assert says in text
    assert "Traceback" not in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["doctor"]])
def test_a_disk_that_takes_no_more_words_is_one_message(words):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "narrowgauge", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    told = "narrowgauge: what this command prints or writes could not be: No space left on device.\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_help_loads_no_torch():
    code = (
        "import sys; from narrowgauge.cli.main import main\ntry: main(['--help'])\n"
        "except SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in VERBS)


def test_a_run_s_launcher_loads_no_torch(tmp_path):
    """The program loads it; loading it beside the program would double its start, and hold memory while it trains."""
    (tmp_path / "train.py").write_text("print('ran')\n")
    code = (
        "import sys; from narrowgauge.cli.main import main\n"
        "try: main(['run', '--steps', '3', '--every', '2', '--', 'train.py'])\n"
        "except SystemExit: pass\nassert not {'torch', 'numba', 'bokeh'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran\n"


def test_what_stands_behind_the_program_is_the_program_s(tmp_path):
    """Also without `--`: a flag of its own that has the name of one of ours would be lost without a word."""
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])\n")
    code = "from narrowgauge.cli.main import main; main(['run', '--every', '2', 'train.py', '--steps', '3', '--lr=1'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "['--steps', '3', '--lr=1']\n"), done.stderr


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_settings_that_lie_here_and_were_not_asked_for_are_told(capsys, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    told = "narrowgauge: narrowgauge.toml is not read; to use it, give --config narrowgauge.toml\n"
    assert told not in run(capsys, verb, "--", "none.py")[1]
    (tmp_path / "narrowgauge.toml").write_text("seed = 1\n")
    assert told in run(capsys, verb, "--", "none.py")[1]
    assert told not in run(capsys, verb, "--config", "narrowgauge.toml", "--", "none.py")[1]
