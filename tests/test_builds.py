"""Compilers, their flags, other CPUs and the control word of the caller change no bit.

Every compiler and level takes minutes (`make golden`, `make golden-aarch64`, the slow tests here);
the rest looks at the flags, at the float environment, and at the comparison itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from golden import builds, make, playback, wide
from models import ADVERSARIAL_9_3, write_hf_model
from native_cases import BODIES, F32, differing, floats, leaves, native, needs_native, panels

from anyshard.checkpoint import open_checkpoint
from anyshard.errors import CheckpointError
from anyshard.loading import loader
from anyshard.ops import Body, Kernels
from anyshard.ops import reference as reference_ops
from anyshard.ops.control_word import set_control_word
from anyshard.verify.driver import Driver, served
from anyshard.verify.naive import rank_body
from anyshard.worker import Worker

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "src" / "anyshard" / "_native.pyi"
KERNELS_H = ROOT / "src" / "anyshard" / "_native" / "kernels.h"
needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
needs_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="sets x86's control word")


def script(name: str) -> ModuleType:
    """A module of scripts/, which is no package."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        spec = importlib.util.spec_from_file_location(
            f"script_{name}", ROOT / "scripts" / f"{name}.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "scripts"))


# --- the control word -----------------------------------------------------------------------------

PLAIN = 0x1F80  # of MXCSR: nearest even, nothing flushed, no traps
FLUSH, UP, TOWARDS_ZERO = PLAIN | 0x8040, PLAIN | 0x4000, PLAIN | 0x6000
STICKY = 0x3F  # which exceptions there have been


def control_word() -> int:
    environment = (ctypes.c_uint32 * 8)()  # x86's fenv_t; the last word is MXCSR
    assert ctypes.CDLL(None).fegetenv(environment) == 0
    return environment[7] & ~STICKY


@contextmanager
def under(word: int) -> Iterator[None]:
    """This thread computes with that control word."""
    library, environment = ctypes.CDLL(None), (ctypes.c_uint32 * 8)()
    assert library.fegetenv(environment) == 0
    before, environment[7] = environment[7], word
    library.fesetenv(environment)
    try:
        yield
    finally:
        environment[7] = before
        library.fesetenv(environment)


class Under:
    """A module whose ops and functions are called under a control word, and must leave it."""

    def __init__(self, module: Any, word: int) -> None:
        self._module, self._word = module, word

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._module, name)
        if not hasattr(part, "run"):
            return self._within(part)

        def bind(*arguments: Any) -> Any:
            bound = type(name, (), {})()
            bound.run = self._within(self._within(part)(*arguments).run)
            return bound

        return bind

    def _within(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*arguments: Any, **named: Any) -> Any:
            with under(self._word):
                result = call(*arguments, **named)
                assert control_word() == self._word, "the caller's control word was not restored"
            return result

        return within


@cache
def as_installed() -> builds.Found:
    kernels = Kernels("scalar", threads=1, spin=False)
    return builds.compute(kernels.module, kernels.pool, "scalar")


@needs_native
@needs_x86
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("word", "threads"), [(FLUSH, 1), (FLUSH, 3), (UP | FLUSH, 3)])
def test_native_ops_keep_the_golden_bits_under_any_control_word(
    body: Body, word: int, threads: int
) -> None:
    with under(word):  # its threads inherit it
        kernels = Kernels(body, threads=threads, spin=False)
    found = builds.compute(Under(kernels.module, word), kernels.pool, body)
    assert builds.against_golden(found).differing == 0
    assert builds.against(found, as_installed()).differing == 0


@needs_x86
@pytest.mark.parametrize("word", [UP, TOWARDS_ZERO])
def test_the_vectors_show_another_rounding(word: int) -> None:
    """The witness of the test above: reference bodies round as their thread does."""
    plain = make.linear(reference_ops, None)
    rounded = make.linear(Under(reference_ops, word), None)
    assert all(differing(rounded[name], plain[name]) for name in plain)


@needs_x86
def test_the_wider_set_shows_flushed_subnormals() -> None:
    plain = wide.subnormals(reference_ops, None)
    flushed = wide.subnormals(Under(reference_ops, FLUSH), None)
    for name, values in plain.items():
        tiny = (values != 0) & (np.abs(values) < 2.0**-126)
        assert tiny.mean() > 0.5
        assert not flushed[name][tiny].all(), name


def cpu_seconds(task: Path) -> float:
    """Time that a thread has computed."""
    return int((task / "schedstat").read_text().split()[0]) / 1e9


@needs_native
@needs_x86
@pytest.mark.parametrize("body", BODIES)
def test_no_thread_of_a_pool_flushes_or_rounds_as_its_maker_does(body: str) -> None:
    """Runs until every worker thread has computed for 20 ms: all their panels were subnormal."""
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    rng = np.random.default_rng(2)
    x, weight = floats(rng, 64, 64), floats(rng, 2048, 64) * np.float32(2.0**-133)
    program = leaves(64)
    want, got = np.zeros(64 * 2048, np.float32), np.zeros(64 * 2048, np.float32)
    alone = native.Pool(1, body, False)
    native.RowLinear(alone, x, panels(weight), 2048, *program, want).run(64)
    assert ((want != 0) & (np.abs(want) < 2.0**-126)).mean() > 0.9
    with under(FLUSH | UP):
        crowd = native.Pool(3, body, False)
    workers = set(tasks.iterdir()) - before
    assert len(workers) == 2
    op = native.RowLinear(crowd, x, panels(weight), 2048, *program, got)
    end = time.monotonic() + 60
    while not all(cpu_seconds(task) > 0.02 for task in workers):
        assert time.monotonic() < end, "a worker thread was given nothing to do"
        got[:] = 7
        with under(FLUSH | UP):
            op.run(64)
        assert differing(got, want) == 0
    crowd.close()


@needs_x86
def test_a_thread_gets_the_control_word_back() -> None:
    words = []

    def work() -> None:
        with under(FLUSH | UP):
            words.append(control_word())
            set_control_word()
            words.append(control_word())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert words == [FLUSH | UP, PLAIN]


# Each is loaded before Python starts, by LD_PRELOAD. The first is what a numerical library may be
# (gcc 13 and newer no longer let a shared one flush), the second does the same whoever compiles
# it, and the third changes the rounding.
LIBRARIES = {
    "ffast-math": ("", ("-ffast-math",)),
    "flushing": (
        "#include <xmmintrin.h>\n"
        "__attribute__((constructor)) void set(void) { _mm_setcsr(_mm_getcsr() | 0x8040); }",
        (),
    ),
    "rounding-up": (
        "#include <fenv.h>\n__attribute__((constructor)) void set(void) { fesetround(FE_UPWARD); }",
        ("-lm",),
    ),
}


def subnormal_logits(folder: Path) -> Path:
    """A model whose attention passes through subnormals: values of 2^-130, o_proj of 2^124."""

    def change(weights: dict[str, F32]) -> None:
        for name, weight in weights.items():
            if name.endswith((".v", ".v_bias")):
                weight *= np.float32(2.0**-132)
            if name.endswith(".o"):
                weight *= np.float32(2.0**120)

    return write_hf_model(folder, ADVERSARIAL_9_3, seed=3, adversarial=False, change=change)


def digests(folder: Path) -> dict[str, str]:
    """The logits of each body, hashed: taken here, and in preloaded processes."""
    model = served(open_checkpoint(str(folder)))
    found = {}
    for body in ("reference", *BODIES):
        with Driver(model, tp=2, kernels=body, threads=2, ranks="forked") as ranks:
            logits = ranks.logits(range(3, 20))
            assert np.isfinite(logits).all()
            found[body] = hashlib.sha256(logits.tobytes()).hexdigest()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The model, and its digests under this process's own control word."""
    folder = subnormal_logits(tmp_path_factory.mktemp("model"))
    return folder, digests(folder)


@needs_gcc
@needs_x86
@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["flushing", "rounding-up", pytest.param("ffast-math", marks=pytest.mark.slow)]
)
def test_a_library_that_flushes_subnormals_changes_no_logit(
    name: str, model: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    source, flags = LIBRARIES[name]
    (tmp_path / "set.c").write_text(source)
    library = tmp_path / "set.so"
    compiled = ["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "set.c"), *flags]
    subprocess.run(compiled, check=True)
    folder, expected = model
    asked = "import json, sys, test_builds as t\nfrom pathlib import Path\n"
    asked += "word = t.control_word()\nprint(word, json.dumps(t.digests(Path(sys.argv[1]))))"
    done = subprocess.run(
        [sys.executable, "-c", asked, str(folder)],
        env=os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    word, _, found = done.stdout.partition(" ")
    if name == "ffast-math" and int(word) == PLAIN:
        pytest.skip("this gcc lets no shared library flush subnormals")
    assert int(word) == {"rounding-up": UP}.get(name, FLUSH)
    assert json.loads(found) == expected


@needs_x86
def test_weights_are_widened_under_the_default_control_word(
    model: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types that have no native packing are widened by NumPy, which rounds as its thread does."""
    words = []

    def pack(*_arguments: Any, **_named: Any) -> None:
        words.append(control_word())
        raise CheckpointError("pack no further")

    monkeypatch.setattr("anyshard.loading.load_image", pack)
    checkpoint = open_checkpoint(str(model[0]))
    with under(FLUSH | UP), pytest.raises(CheckpointError, match="pack no further"):
        loader(checkpoint, threads=1)(lambda *_: None)
    assert words == [PLAIN]


@needs_x86
def test_the_model_of_that_test_shows_a_rank_that_flushes(tmp_path: Path) -> None:
    model = served(open_checkpoint(str(subnormal_logits(tmp_path))))
    with Driver(model, kernels="reference") as ranks:
        right = ranks.logits(range(3, 20))

    class Flushing(Worker):
        def serve(self) -> None:
            with under(FLUSH):
                super().serve()

    with Driver(model, kernels="reference", rank_body=rank_body(Flushing)) as ranks:
        assert differing(ranks.logits(range(3, 20)), right) > right.size // 2


# --- flags ----------------------------------------------------------------------------------------

PARTS = (
    "-Ofast",
    "-ffast-math",
    "-ffinite-math-only",
    "-freciprocal-math",
    "-fno-signed-zeros",
    "-mfpmath=387",
)


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    """Where coefficients.h is, which the build writes."""
    write = ROOT / "cmake" / "write_coefficients.py"
    source = ROOT / "src" / "anyshard" / "ops" / "coefficients.py"
    subprocess.run([sys.executable, write, source, tmp_path / "coefficients.h"], check=True)
    return tmp_path


def preprocess(generated: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    asked = ["-std=c++17", "-fsyntax-only", "-x", "c++", f"-I{generated}", *flags]
    command = ["g++", *asked, str(KERNELS_H)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_gcc
@needs_x86
@pytest.mark.parametrize("flag", PARTS)
def test_the_kernels_refuse_a_compiler_that_may_reorder(flag: str, generated: Path) -> None:
    done = preprocess(generated, flag)
    assert done.returncode != 0
    assert "compile it without -ffast-math" in done.stderr or "no x87" in done.stderr
    assert preprocess(generated, flag, "-DANYSHARD_MUTANT").returncode == 0
    assert preprocess(generated, "-O3", "-march=native", "-DNDEBUG").returncode == 0


HOSTILE = (
    "-Ofast -ffast-math -funsafe-math-optimizations -fassociative-math -freciprocal-math "
    "-ffinite-math-only -fno-signed-zeros -ffp-contract=fast -march=native -flto -DNDEBUG"
)
LEAKS = (
    "__FAST_MATH__", "__FINITE_MATH_ONLY__ 1", "__ASSOCIATIVE_MATH__", "__RECIPROCAL_MATH__",
    "__NO_SIGNED_ZEROS__",
)  # fmt: skip


@needs_gcc
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_exported_flags_lose_against_ours(compiler: str, tmp_path: Path) -> None:
    path = shutil.which("g++") if compiler == "g++" else script("builds").clang()
    if path is None:
        pytest.skip("clang++ is not installed")
    defined = {"ANYSHARD_STANDALONE": "ON", "CMAKE_EXPORT_COMPILE_COMMANDS": "ON"}
    script("native").configure_beside(
        tmp_path, defined | {"CMAKE_CXX_COMPILER": path}, os.environ | {"CXXFLAGS": HOSTILE}
    )
    commands = json.loads((tmp_path / "compile_commands.json").read_text("utf-8"))
    assert {Path(each["file"]).name for each in commands} >= {"body_scalar.cpp", "pack.cpp"}
    for each in commands:
        words = shlex.split(each["command"])
        assert "-Ofast" in words, "CXXFLAGS did not arrive; this test shows nothing"
        contracts = [word for word in words if word.startswith("-ffp-contract")]
        levels = [word for word in words if word.startswith("-O")]
        assert (contracts[-1], levels[-1]) == ("-ffp-contract=off", "-O3")
        flags = words[: words.index("-o")]
        macros = subprocess.run(
            [*flags, "-dM", "-E", "-x", "c++", os.devnull],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert [leak for leak in LEAKS if leak in macros] == []
    link = (tmp_path / "build.ninja").read_text("utf-8")
    (flags_of_link,) = [line for line in link.splitlines() if "LINK_FLAGS" in line]
    assert flags_of_link.rstrip().endswith("-O3 -fno-fast-math -fno-unsafe-math-optimizations")


# --- the comparison itself ------------------------------------------------------------------------


def test_one_flipped_bit_is_counted_and_named() -> None:
    found = {
        f"golden/{op}/{name}": values
        for op, build in make.OPS.items()
        for name, values in build(reference_ops, reference_ops.Pool()).items()
    }
    right = builds.against_golden(found)
    assert (right.ops, right.differing, right.first) == (len(make.OPS), 0, "")
    changed = found["golden/reduce/nodes 1 1 1"].copy()
    changed.view(np.uint32)[0, 3] ^= 1
    wrong = builds.against_golden({**found, "golden/reduce/nodes 1 1 1": changed})
    assert (wrong.differing, wrong.first) == (1, "reduce 'nodes 1 1 1'")
    other = {**found, "golden/reduce/nodes 1 1 1": changed}
    between = builds.against(other, found, "golden")
    assert (between.differing, between.first) == (1, "reduce 'nodes 1 1 1'")
    assert between.elements == right.elements


def test_answers_are_equal_but_for_the_sign_of_a_nan() -> None:
    def file(*words: int) -> bytes:
        return b"".join(word.to_bytes(4, "little") for word in words)

    one = file(1, 0x7FC00000, 0x80000000)
    assert builds.same_answers(one, one)
    assert builds.same_answers(one, file(1, 0xFFC00000, 0x80000000))
    for other in (
        file(1, 0x7FC00000, 0),
        file(0, 0x7FC00000, 0x80000000),
        file(1, 0x7FC00001, 0x80000000),
        file(1, 0x7FC00000),
    ):
        assert not builds.same_answers(one, other)


def test_calls_are_played_back_in_their_order_only(tmp_path: Path) -> None:
    recorder = playback.Recorder()
    make.reduce(recorder, None)
    assert len(recorder.calls) == 4
    nothing = [playback.Answer(0, 0.0, ())] * 4
    player = playback.Player(recorder.calls, nothing)
    with pytest.raises(ValueError, match="this call of Embed is not the one that was recorded"):
        make.embed(player, None)
    answers = tmp_path / "answers"
    answers.write_bytes(bytes(20 * 4 - 1))
    with pytest.raises(ValueError, match="ends early"):
        playback.read_answers(answers, 4)
    answers.write_bytes(bytes(20 * 4 + 1))
    with pytest.raises(ValueError, match="more than 4 answers"):
        playback.read_answers(answers, 4)


NOT_OPS = {
    "read_streams",
    "Bound",
    "Exchange",
    "Gather",
    "Op",
    "Pool",
    "Walk",
    "available_bodies",
    "shm_abort",
    "shm_publish",
    "sources_sha256",
    "spread",  # beside a token, and no bit of it: test_native_spread.py
}


def test_the_driver_without_python_knows_every_op() -> None:
    names = re.search(r"__all__ = \[(.*?)\]", STUB.read_text("utf-8"), re.DOTALL)
    assert names is not None
    ops = set(re.findall(r'"(\w+)"', names[1])) - NOT_OPS
    assert ops == {*playback.OPS, *playback.FUNCTIONS}
    driver = (ROOT / "tests" / "standalone" / "driver.cpp").read_text("utf-8")
    assert [op for op in ops if f'name == "{op}"' not in driver] == []
    recorder = playback.Recorder()
    builds.compute(recorder, None, "")
    called = {call[8 : 8 + call[0]].decode() for call in recorder.calls}
    assert called == ops, "an op that no vector calls"


def test_no_op_needs_the_python_bindings() -> None:
    lists = re.search(r"set\(OPS(.*?)\)", (ROOT / "CMakeLists.txt").read_text("utf-8"), re.DOTALL)
    assert lists is not None
    files = re.findall(r"\{NATIVE\}/(\w+\.cpp)", lists[1])
    assert "ops.cpp" in files
    for file in files:
        assert "nanobind" not in (KERNELS_H.parent / file).read_text("utf-8"), file


# --- whole builds ---------------------------------------------------------------------------------


def run_builds(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "builds.py"), *arguments],
        env=os.environ | ({} if path is None else {"PATH": path}),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_missing_cross_compiler_is_one_sentence() -> None:
    done = run_builds("aarch64", path="")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "not found; apt-get install g++-aarch64-linux-gnu qemu-user" in line


def test_an_unknown_set_of_builds_gets_the_usage() -> None:
    done = run_builds("everything")
    assert done.returncode == 2 and "python scripts/builds.py aarch64" in done.stderr


@needs_gcc
def test_a_word_that_is_in_no_build_is_told_the_builds() -> None:
    done = run_builds("builds", "icc")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("no build has 'icc' in its name; there are g++")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_native
@needs_gcc
def test_every_compiler_level_and_body_gives_the_golden_bits() -> None:
    done = run_builds("builds")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG: fused" in done.stdout and "WRONG: fast" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_native
@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    reason="g++-aarch64-linux-gnu or qemu-user is not installed",
)
def test_64_bit_arm_gives_the_golden_bits() -> None:
    done = run_builds("aarch64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG: fused" in done.stdout
