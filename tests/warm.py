"""Programs in processes that have torch loaded already: a fork in place of five seconds of imports.

    server    one process per worker of the tests: loads torch and what a watched program loads besides, and waits
    request   words, folder, environment and three file descriptors    ->    a fork of it
    child     becomes what `python WORDS` would have been: environment, path, sitecustomize, __main__, the end; only its
              memory is not taken apart, which takes seconds of what it shares with its parent

The program's `import torch` is still the moment at which torch appears, so that what waits for it sees it coming, as
`session.process.inject` does. What is about the start of Python itself, or several processes, has real ones.

    python warm.py FD SOURCE    is the server; SOURCE is the folder that narrowgauge is imported from
"""

import atexit
import contextlib
import importlib
import json
import os
import random
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

LOADED = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed", "torch.profiler"),
    *("numba", "duckdb", "narrowgauge.observe.stats.host_kernel"),
    *("narrowgauge.session.process.armed", "narrowgauge.session.process.live", "narrowgauge.session.same_weights"),
)
READ_ONCE = ("TORCH", "TRITON", "NUMBA", "CUDA")  # begin the names of variables that count while those are loaded
LARGEST = 1 << 20  # bytes of a request
_EXIT = os._exit  # a watched program's is another


class Warm:
    """The client: its `popen` and `run` are those of `subprocess`, as far as these tests need them."""

    def __init__(self, source):
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hidden = ("PYTHONPATH", "NARROWGAUGE_PLAN")
        words = [sys.executable, __file__, str(theirs.fileno()), str(source)]
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self._loaded_with = read_once(environment)
        no_workers = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # they do not survive a fork
        self._server = subprocess.Popen(words, env=environment | no_workers, pass_fds=[theirs.fileno()])
        theirs.close()
        self.pid, self._standard = self._server.pid, (0, 1, 2)

    def close(self):
        self._ours.close()
        self._server.wait()

    def popen(self, words, *, cwd=None, env=None, stdin=None, stdout=None, stderr=None):
        """A program's process; a real one if it is no plain `python FILE` or `python -m MODULE`, or is set up anew."""
        words = [os.fspath(word) for word in words]
        environment = dict(os.environ if env is None else env)
        files = [
            usual if file is None else file for file, usual in zip((stdin, stdout, stderr), self._standard, strict=True)
        ]
        python = len(words) > 1 and Path(words[0]).name.startswith("python")
        plain = python and (words[1] == "-m" or words[1].endswith(".py"))
        if not plain or read_once(environment) != self._loaded_with:
            return subprocess.Popen(words, None, None, *files, cwd=cwd, env=environment)
        with open(os.devnull, "r+b") as nothing:
            places = [nothing if file == subprocess.DEVNULL else file for file in files]
            if stderr == subprocess.STDOUT:
                places[2] = places[1]
            fds = [file if isinstance(file, int) else file.fileno() for file in places]
            request = {"words": words[1:], "cwd": os.fspath(cwd or os.getcwd()), "env": environment}
            answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                socket.send_fds(self._ours, [json.dumps(request).encode()], [*fds, theirs.fileno()])
        return Child(answers, words)

    def run(self, words, *, cwd, env=None):
        """A program's whole life, and what it said."""
        with self._heard(cwd) as heard:
            heard.returncode = self.popen(words, cwd=cwd, env=env).wait()
        return heard

    def narrowgauge(self, words, *, cwd, env):
        """The same of `narrowgauge WORDS`: its own part in this process, the program that it starts in a fork."""
        import pytest

        from narrowgauge.cli.main import main

        with pytest.MonkeyPatch.context() as patch, self._heard(cwd) as heard:
            patch.chdir(cwd)
            for name in os.environ.keys() - env.keys():
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
            self.instead(patch)
            try:
                main([os.fspath(word) for word in words])
                heard.returncode = 0
            except SystemExit as end:
                heard.returncode = end.code
        return heard

    @contextlib.contextmanager
    def _heard(self, cwd):
        """What goes to the standard files meanwhile, in the end."""
        paths = [Path(cwd) / ".stdout", Path(cwd) / ".stderr"]
        heard = subprocess.CompletedProcess((), None)
        before = self._standard
        with open(os.devnull) as nothing, paths[0].open("a") as out, paths[1].open("a") as err:
            self._standard = (nothing, out, err)
            try:
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    yield heard
            finally:
                self._standard = before
        heard.stdout, heard.stderr = (path.read_text() for path in paths)
        for path in paths:
            path.unlink()

    def instead(self, monkeypatch):
        """Whatever `session.process.launch` starts is a fork from now on."""
        kept = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
        monkeypatch.setattr(
            "narrowgauge.session.process.launch.subprocess", types.SimpleNamespace(Popen=self.popen, **kept)
        )


def read_once(environment):
    """What a process has to be started with. Where compilers cache is set by whoever compiles, and asked each time."""
    named = {name: value for name, value in environment.items() if name.startswith(READ_ONCE)}
    return {name: value for name, value in named.items() if not name.endswith("_CACHE_DIR")}


class Child:
    """A program's process: over its connection come its number, and when it has ended its exit code."""

    def __init__(self, connection, words):
        self._connection, self.args, self.returncode = connection, words, None
        self.pid = int(connection.recv(LARGEST))

    def wait(self, timeout=None):
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(LARGEST))
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            self._connection.close()
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(9)


def serve(connection, source):
    """Answer requests until the client is gone; in a child, go back with what it is to become."""
    path = list(sys.path)
    sys.path.insert(0, source)
    for name in LOADED:
        importlib.import_module(name)
    sys.path[:] = path
    from narrowgauge.observe.stats import host

    host.wait()
    answers = {}
    while True:
        if answers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                with contextlib.suppress(BrokenPipeError), answers.pop(pid) as answer:
                    answer.send(str(os.waitstatus_to_exitcode(status)).encode())
            if not select.select([connection], [], [], 0.02)[0]:
                continue
        data, fds, _, _ = socket.recv_fds(connection, LARGEST, 4)
        if not data:
            return None
        child = os.fork()
        if not child:
            for kept in (connection, *answers.values()):
                kept.close()
            for number, fd in enumerate(fds[:3]):
                os.dup2(fd, number)
            for fd in fds:
                os.close(fd)
            return json.loads(data)
        for fd in fds[:3]:
            os.close(fd)
        answers[child] = socket.socket(fileno=fds[3])
        answers[child].send(str(child).encode())


class Aside:
    """Gives torch, which is loaded already, to whoever imports it."""

    def __init__(self):
        self._torch = sys.modules.pop("torch")
        self._spec = self._torch.__spec__

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = ModuleSpec(name, self, origin=self._spec.origin, is_package=True)
        spec.submodule_search_locations = self._spec.submodule_search_locations
        return spec

    def create_module(self, spec):
        return self._torch

    def exec_module(self, module):
        module.__spec__ = self._spec


def become(words, cwd, env):
    """What Python does from its start to the first line of a program, and that program."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # or TMPDIR is not asked any more, and what a killed program leaves lies in /tmp for ever
    if "PYTHONUNBUFFERED" in env:
        sys.stdout.reconfigure(write_through=True)
    for seed in (random.seed, sys.modules["numpy"].random.seed, sys.modules["torch"].seed):
        seed()  # a fork has its parent's state, a process one of its own
    sys.path[0:1] = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.meta_path.insert(0, Aside())
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    script = Path(words[0]).absolute()
    sys.path.insert(0, str(script.parent))
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules["__main__"] = main
    try:
        exec(compile(script.read_bytes(), script, "exec"), vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        error = error.with_traceback(error.__traceback__.tb_next)  # without this frame
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def end(code):
    """What Python does from the last line of a program on: its threads, its atexit functions, its files."""
    threading._shutdown()
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or nobody reads
            file.flush()
    _EXIT((code or 0) & 0xFF)


if __name__ == "__main__":
    sys.modules["warm"] = sys.modules["__main__"]
    if request := serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]):
        try:
            become(**request)
        except SystemExit as stop:
            end(stop.code)
    end(0)
