"""llama.cpp as a peer: its build and its model files, in the benchmark's environment.

    python benchmarks/llama.py [--environment .venv-bench] [--background]

The source is the one that llama-cpp-python brings, built as its users would: Release, for this
CPU. Everything lies in ENVIRONMENT/llama.cpp. What is finished is stamped and not made again; a
build that was broken off goes on where it stopped; one run at a time builds, others wait for it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import hf

from anyshard.checkpoint import demo_model_path

PACKAGE: Final = "llama-cpp-python"
VERSION: Final = "0.3.36"  # a figure names it; a new one is built anew
VENDORED: Final = "/vendor/llama.cpp/"  # in the package
FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_RPC=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)
# by what they are for: peers.py, kl.py, and benchmarks of batches, servers and several hosts
TARGETS: Final = {
    "speed": ("llama-bench", "llama-quantize"),
    "accuracy": ("llama-perplexity", "llama-quantize"),  # kl.py
    "serving": ("llama-batched-bench", "llama-server", "ggml-rpc-server"),
}
NICE: Final = ("nice", "-n", "15")
SHOWN_LINES: Final = 20  # of the log of a build that failed


@dataclass(frozen=True)
class Llama:
    """A finished build: the folder of its programs, and where its source is from."""

    programs: Path
    commit: str

    def run(self, program: str, *arguments: str, with_log: bool = False) -> str:
        """What the program prints on stdout (and its log); ends the benchmark where it fails."""
        done = subprocess.run(
            [str(self.programs / program), *arguments], capture_output=True, text=True
        )
        if done.returncode:
            last = "\n".join(done.stderr.splitlines()[-SHOWN_LINES:])
            sys.exit(f"{program} {' '.join(arguments)} ended with {done.returncode}:\n{last}")
        return done.stdout + (done.stderr if with_log else "")

    def bench(
        self, model: Path, task: hf.Task, threads: int, more: Sequence[str] = ()
    ) -> dict[str, Any]:
        """One repetition after llama-bench's own warm-up; the record that it prints.

        A decode begins after as many tokens as ours does, so that both attend to the same past.
        more: flags, such as those of its KV.
        """
        shape = (
            ("-p", str(task.prompt), "-n", "0")
            if task.name == "prefill"
            else ("-p", "0", "-n", str(task.new - 1), "-d", str(task.prompt))
        )
        flags = ("-m", str(model), "-t", str(threads), "-r", "1", "-o", "json", *shape, *more)
        records: list[dict[str, Any]] = json.loads(self.run("llama-bench", *flags))
        assert len(records) == 1, f"llama-bench ran {len(records)} tests where one was asked"
        return records[0]


def build(environment: Path, purposes: Iterable[str]) -> Llama:
    """llama.cpp of VERSION for this CPU, with the TARGETS of `purposes` built if not there."""
    if not (environment / ".tools").exists():
        sys.exit(f"{environment} is not there or not finished; `make peers` makes it")
    folder = environment / "llama.cpp"
    folder.mkdir(exist_ok=True)
    with alone(folder):
        commit = fetch(environment, folder)
        for purpose in purposes:
            compile_targets(environment, folder, purpose, wanted=key(commit))
    return Llama(folder / "build" / "bin", commit)


def model_files(llama: Llama, environment: Path) -> dict[str, Path]:
    """The demo model by its types: its own file, and F32 and Q8_0 that llama-quantize makes.

    F32 holds the values of the demo's blocks, which are the weights of our f32 and of HF; Q8_0 is
    made of those.
    """
    demo = demo_model_path()
    folder = environment / "llama.cpp" / hashlib.sha256(demo.read_bytes()).hexdigest()[:12]
    folder.mkdir(exist_ok=True)
    files = {"F32": folder / "F32.gguf", "Q8_0": folder / "Q8_0.gguf", "Q4_1": demo}
    with alone(folder.parent):
        for kind, made_of in (("F32", demo), ("Q8_0", files["F32"])):
            if not files[kind].exists():
                say(f"writing the model in {kind}")
                part = folder / f"{kind}.part"
                llama.run("llama-quantize", "--allow-requantize", str(made_of), str(part), kind)
                part.rename(files[kind])
    return files


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time is in here; the lock goes with the process, however it ends."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for the build that runs; its log is {folder / 'build.log'}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def key(commit: str) -> str:
    """What a build is for: another source, flag or CPU needs another one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    cpu = [hf.cpu(), hashlib.sha256(features.encode()).hexdigest()[:12]]
    return json.dumps({"commit": commit, "version": VERSION, "flags": FLAGS, "cpu": cpu})


def fetch(environment: Path, folder: Path) -> str:
    """The source of VERSION in folder/source; returns its commit, "" where the package hides it."""
    stamp = folder / "source.json"
    if stamp.exists():
        fetched = json.loads(stamp.read_text())
        if fetched["version"] == VERSION:
            return str(fetched["commit"])
    say(f"fetching {PACKAGE} {VERSION}")
    for each in (stamp, folder / "source", folder / "build"):
        remove(each)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        python = str(environment / "bin" / "python")
        asked = ("--no-deps", "--no-build-isolation", "--no-binary", PACKAGE, "--dest", fresh)
        version = f"{PACKAGE}=={VERSION}"
        pip = subprocess.run([python, "-m", "pip", "download", "--quiet", *asked, version])
        if pip.returncode:
            sys.exit(f"pip ended with {pip.returncode}: no source of {version}, no llama.cpp")
        with tarfile.open(next(Path(fresh).glob("*.tar.gz"))) as archive:
            commit = unpack(archive, Path(fresh) / "source")
        (Path(fresh) / "source").rename(folder / "source")
    stamp.write_text(json.dumps({"version": VERSION, "commit": commit}))
    return commit


def unpack(archive: tarfile.TarFile, source: Path) -> str:
    """The vendored tree without its git link; the commit that the link stood for, or ""."""
    commit = ""
    for member in archive:
        place = f"/{member.name.partition('/')[2]}"
        if place == f"/.git/modules{VENDORED}HEAD":
            head = archive.extractfile(member)
            commit = head.read().decode().strip() if head else ""
        elif place.startswith(VENDORED) and place != f"{VENDORED}.git":
            member.name = place.removeprefix(VENDORED)
            archive.extract(member, source, filter="data")
    return commit


def compile_targets(environment: Path, folder: Path, purpose: str, *, wanted: str) -> None:
    """The targets of a purpose, unless their stamp says that they are there."""
    tree, log = folder / "build", folder / "build.log"
    begun, done = tree / "begun.json", tree / f"{purpose}.json"
    if done.exists() and done.read_text() == wanted:
        return
    if not (begun.exists() and begun.read_text() == wanted):
        remove(tree)
        tree.mkdir()
        begun.write_text(wanted)
    say(f"building {', '.join(TARGETS[purpose])}: minutes; the log is {log}")
    tools = environment.resolve() / "bin"
    cmake, ninja = str(tools / "cmake"), f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    steps = [[cmake, "-S", str(folder / "source"), "-B", str(tree), "-G", "Ninja", ninja, *FLAGS]]
    cores = str(len(os.sched_getaffinity(0)))
    steps += [[cmake, "--build", str(tree), "-j", cores, "--target", *TARGETS[purpose]]]
    # its version would otherwise be that of the repository around it
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve())}
    with log.open("w") as file:
        for step in steps:
            ran = subprocess.run([*NICE, *step], stdout=file, stderr=file, env=outside)
            if ran.returncode:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
                sys.exit(f"the build ended with {ran.returncode}; the end of {log}:\n{last}")
    done.write_text(wanted)


def remove(path: Path) -> None:
    """A file or a folder that may be there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--environment", type=Path, default=hf.ROOT / ".venv-bench")
    parser.add_argument("--background", action="store_true", help="build and return at once")
    asked = parser.parse_args()
    environment = asked.environment.resolve()
    if asked.background:
        log = environment / "llama.cpp.log"
        command = [*NICE, sys.executable, __file__, "--environment", str(environment)]
        with log.open("w") as file:
            subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        say(f"building; what it says is in {log}")
        return
    llama = build(environment, TARGETS)
    for kind, path in model_files(llama, environment).items():
        print(f"{kind:5} {path.stat().st_size / 1e6:6.1f} MB")
    print(f"llama.cpp {llama.commit[:7]} for {platform.machine()} is there")


if __name__ == "__main__":
    main()
