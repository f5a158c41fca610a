"""Other builds, compilers and CPUs give the same bits.

    python scripts/builds.py builds [WORD]   the module by every compiler, optimisation and body
    python scripts/builds.py aarch64         the same ops for 64-bit Arm, under qemu-user

With a WORD, only the builds that have it in their name.

From the environment of `make setup`. Each build gets a folder in build/golden and is compared with
the golden vectors, and with the installed module on a wider set (tests/golden). Two builds are
wrong on purpose: unless the vectors show it, the check is worth nothing. Exit code 4 if a build
differs or a wrong one does not, 2 if what is needed is not installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from native import ROOT, compile_beside, load

sys.path.insert(0, str(ROOT / "tests"))

from golden import builds

FOLDER = ROOT / "build" / "golden"
LEVELS = ("0", "2", "3")
# What a distribution or a user may have exported; our own flags come after and win.
HOSTILE = "-Ofast -march=native -DNDEBUG"
THREADS = (1, 3)

ARM_COMPILER, ARM_RUNNER = "aarch64-linux-gnu-g++", "qemu-aarch64"
ARM_PACKAGES = "apt-get install g++-aarch64-linux-gnu qemu-user"
STANDALONE = {"ANYSHARD_STANDALONE": "ON"}
ARM = {
    "CMAKE_CXX_COMPILER": ARM_COMPILER,
    "CMAKE_SYSTEM_NAME": "Linux",
    "CMAKE_SYSTEM_PROCESSOR": "aarch64",
    "CMAKE_EXE_LINKER_FLAGS": "-static",  # so qemu needs no libraries of that CPU
}


@dataclass(frozen=True)
class Build:
    """One way to compile. wrong: on purpose."""

    name: str
    defined: dict[str, str] = field(default_factory=dict)
    flags: str = ""
    wrong: bool = False

    @property
    def folder(self) -> Path:
        """Where it is built: another one for every name."""
        return FOLDER / "".join(c if c.isalnum() else "-" for c in self.name)

    def compile(self) -> None:
        """Raises: RuntimeError with what the compiler said."""
        environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "CXXFLAGS")}
        compile_beside(self.folder, self.defined, environment | {"CXXFLAGS": self.flags})


class Report:
    """Prints a line for each comparison; `failed` if one is not as it has to be."""

    def __init__(self) -> None:
        self.failed = False

    def line(self, name: str, tallies: dict[str, builds.Tally], *, wrong: bool = False) -> None:
        """tallies: by what was compared with. wrong: the golden vectors have to differ."""
        for what, tally in tallies.items():
            print(f"{name:44} {what:9} {tally}", flush=True)
        if wrong and not tallies["golden"].differing:
            self.fail(f"{name}: a wrong build has the golden bits; the vectors do not show it")
        if not wrong:
            self.failed |= any(tally.differing for tally in tallies.values())

    def fail(self, text: str) -> None:
        """Say what is not as it has to be."""
        print(text, flush=True)
        self.failed = True

    def end(self, start: float) -> int:
        """The last line; the exit code."""
        seconds = time.monotonic() - start
        print(f"{seconds:.0f} s: {'NOT as it has to be' if self.failed else 'as it has to be'}")
        return 4 if self.failed else 0


def clang() -> str | None:
    """clang++, or the newest that has its version in its name."""
    names = ["clang++", *(f"clang++-{version}" for version in range(40, 10, -1))]
    return next((found for name in names if (found := shutil.which(name))), None)


def version(compiler: str) -> str:
    """Such as `g++ 12.2.0`."""
    name = re.sub(r"-[0-9]+$", "", Path(compiler).name)
    asked = "-dumpversion" if "clang" in name else "-dumpfullversion"
    done = subprocess.run([compiler, asked], capture_output=True, text=True, check=True)
    return f"{name} {done.stdout.strip()}"


def of_the_module(compilers: list[str]) -> list[Build]:
    """Right builds by each compiler, then the wrong ones by the first."""
    found = []
    for compiler in compilers:
        cxx, name = {"CMAKE_CXX_COMPILER": compiler}, version(compiler)
        found += [Build(f"{name} -O{n}", cxx | {"ANYSHARD_OPTIMIZE": n}) for n in LEVELS]
        lto = "" if "clang" in compiler else " -flto"
        found.append(Build(f"{name} {HOSTILE}{lto}", cxx, flags=HOSTILE + lto))
    first = {"CMAKE_CXX_COMPILER": compilers[0]}
    for mutant in ("fused", "fast"):
        name = f"{version(compilers[0])} WRONG: {mutant}"
        found.append(Build(name, first | {"ANYSHARD_MUTANT": mutant}, wrong=True))
    return found


def installed_bodies() -> list[str]:
    """Native bodies of the installed module."""
    from anyshard.ops import available_bodies

    return [body for body in available_bodies() if body != "reference"]


def computed(folder: Path | None) -> dict[str, builds.Found]:
    """What the module in that folder (None: the installed one) computes, by body and threads.

    In a process of its own: one process can hold one module.
    """
    results = FOLDER / "results.npz"
    command = [sys.executable, __file__, "compute", str(folder or "installed"), str(results)]
    subprocess.run(command, check=True)
    found: dict[str, builds.Found] = {}
    with np.load(results) as content:
        for key in content.files:
            body, _, name = key.partition("|")
            found.setdefault(body, {})[name.replace("\\", "/")] = content[key]
    results.unlink()
    return found


def compute(folder: str, results: str) -> int:
    """The child of `computed`."""
    if folder != "installed":
        load(Path(folder))
    from anyshard.ops import Kernels, native_module

    native = native_module()
    assert native is not None, "the package is installed without native kernels"
    assert np.float32(1e-40) * np.float32(0.5) != 0, "loading the module changed the control word"
    assert folder == "installed" or Path(folder) in Path(str(native.__file__)).parents
    found = {}
    for body in installed_bodies():
        for threads in THREADS:
            kernels = Kernels(body, threads=threads, spin=False)
            here = builds.compute(kernels.module, kernels.pool, body)
            # a / would be a folder in the archive
            found |= {f"{body} x{threads}|{k.replace('/', chr(92))}": v for k, v in here.items()}
    np.savez(results, **found)
    return 0


def module_builds(word: str) -> int:
    other = clang()
    if other is None:
        print("clang++ is not installed (apt-get install clang): its builds are left out")
    possible = of_the_module(["g++", *([other] if other else [])])
    asked = [build for build in possible if word in build.name]
    if not asked:
        names = ", ".join(build.name for build in possible)
        print(f"no build has {word!r} in its name; there are {names}", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    report, start = Report(), time.monotonic()
    installed = computed(None)
    expected = next(iter(installed.values()))
    for body, found in installed.items():
        tallies = {"golden": builds.against_golden(found), "wide": builds.against(found, expected)}
        report.line(f"installed, {body}", tallies)
    for build in asked:
        build.compile()
        for body, found in computed(build.folder).items():
            tallies = {
                "golden": builds.against_golden(found),
                "wide": builds.against(found, expected),
            }
            report.line(f"{build.name}, {body}", tallies, wrong=build.wrong)
    return report.end(start)


def arm_builds() -> int:
    missing = [name for name in (ARM_COMPILER, ARM_RUNNER) if not shutil.which(name)]
    if missing:
        print(f"{' and '.join(missing)} not found; {ARM_PACKAGES}", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    report, start = Report(), time.monotonic()
    drivers = Drivers(report, builds.record(FOLDER / "calls"), next(iter(computed(None).values())))
    here = Build("standalone g++", STANDALONE)
    here.compile()
    expected = drivers.run(here, body="scalar", threads=1)
    if "avx2" in installed_bodies():
        drivers.run(here, body="avx2", threads=1, expected=expected)
    arm = version(ARM_COMPILER)
    for level in LEVELS:
        build = Build(f"{arm} -O{level}", STANDALONE | ARM | {"ANYSHARD_OPTIMIZE": level})
        build.compile()
        drivers.run(build, threads=max(THREADS), flush=level == LEVELS[0], expected=expected)
    drivers.run(build, threads=1, expected=expected)
    fused = Build(
        f"{arm} WRONG: fused", STANDALONE | ARM | {"ANYSHARD_MUTANT": "fused"}, wrong=True
    )
    fused.compile()
    drivers.run(fused, threads=1)
    return report.end(start)


class Drivers:
    """Runs builds of tests/standalone over one file of calls.

    module: what the installed module computes.
    """

    def __init__(self, report: Report, calls: list[bytes], module: builds.Found) -> None:
        self._report, self._calls, self._module = report, calls, module

    def run(
        self,
        build: Build,
        *,
        body: str = "scalar",
        threads: int,
        flush: bool = False,
        expected: bytes | None = None,
    ) -> bytes:
        """Report one run against vectors and module; its file of answers.

        Which has to be `expected`, but that a NaN of a marked row has the sign that the CPU gives.

        flush: with a calling thread that flushes subnormals to zero.
        """
        answers = FOLDER / "answers"
        runner = [ARM_RUNNER] if ARM.items() <= build.defined.items() else []
        asked = [FOLDER / "calls", answers, body, threads, *(["flush"] if flush else [])]
        subprocess.run([*runner, build.folder / "driver", *map(str, asked)], check=True)
        name = f"{build.name}, {body} x{threads}{' flushing' if flush else ''}"
        found = builds.play(self._calls, answers)
        tallies = {
            "golden": builds.against_golden(found),
            "wide": builds.against(found, self._module),
        }
        self._report.line(name, tallies, wrong=build.wrong)
        content = answers.read_bytes()
        if expected is not None and not builds.same_answers(content, expected):
            self._report.fail(f"{name}: the answers are not byte for byte those of this CPU")
        return content


def main() -> int:
    match sys.argv[1:]:
        case ["builds"]:
            return module_builds("")
        case ["builds", word]:
            return module_builds(word)
        case ["aarch64"]:
            return arm_builds()
        case ["compute", folder, results]:
            return compute(folder, results)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
