"""What `make` needs to know of this machine to build the native kernels; builds beside them.

    python scripts/native.py build COMMAND...  runs a command that builds the package
    python scripts/native.py report            prints the kernels it got, or how to get them

`compile_beside` and `load` are for the other scripts: another build of the module, in a folder of
its own, in the place of the installed one.

`build` sets ANYSHARD_NATIVE_REQUIRED for the command, unless it is set: 1 where a compiler and
Python's headers are, so that an error in the C++ stops the build; else 0, and the package installs
as pure Python. Debian has the headers in a package of its own, which python3-venv does not bring:
where they are missing, `build` fetches that package into the environment (apt-get download, which
needs no root and installs nothing).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FETCHED = Path(sys.prefix, "python-headers")
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"

MISSING = """\
anyshard is installed WITHOUT native kernels; not found when it was built: {lacking}.
It computes the same bits with the reference bodies, many times slower.
To build them: apt-get install g++ python3-dev (or your system's names), `make clean`, again."""


def compiler() -> str | None:
    """The C++ compiler that CMake will find."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def has_headers() -> bool:
    """Whether this Python's own headers are installed."""
    return Path(sysconfig.get_path("include"), "Python.h").exists()


def fetched_headers() -> Path | None:
    """The headers of Debian's package, unpacked in the environment; None if it cannot be had."""
    include = FETCHED / "usr" / "include"
    if (include / VERSION / "Python.h").exists():
        return include
    of_debian = sys.base_prefix == "/usr" and all(map(shutil.which, ("apt-get", "dpkg-deb")))
    if not of_debian:
        return None
    print(f"fetching the headers of {VERSION}, which are not installed", flush=True)
    FETCHED.mkdir(exist_ok=True)
    sandbox = "APT::Sandbox::User=root"  # as root, apt would warn that it cannot drop to _apt here
    fetch = ["apt-get", "-qq", "-o", sandbox, "download", f"lib{VERSION}-dev"]
    if subprocess.run(fetch, cwd=FETCHED).returncode:
        return None
    for package in FETCHED.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(FETCHED)], check=True)
        package.unlink()
    return include if (include / VERSION / "Python.h").exists() else None


def build_environment() -> dict[str, str]:
    """What to add to the environment of the building command."""
    if not compiler():
        return {"ANYSHARD_NATIVE_REQUIRED": "0"}
    if has_headers():
        return {"ANYSHARD_NATIVE_REQUIRED": "1"}
    include = fetched_headers()
    if include is None:
        return {"ANYSHARD_NATIVE_REQUIRED": "0"}
    return {
        "ANYSHARD_NATIVE_REQUIRED": "1",
        "SKBUILD_CMAKE_DEFINE": f"Python_INCLUDE_DIR={include / VERSION}",
        # pyconfig.h includes the one of the architecture by its folder below usr/include
        "CPLUS_INCLUDE_PATH": str(include),
        "C_INCLUDE_PATH": str(include),
    }


def configure_beside(
    folder: Path, defined: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Configure CMakeLists.txt in `folder`; returns the environment to build it in.

    defined: CMake's variables. environment: instead of this process's, such as another CXXFLAGS.

    Raises: RuntimeError with what CMake said, if it fails.
    """
    added = build_environment()
    name, _, value = added.get("SKBUILD_CMAKE_DEFINE", "").partition("=")
    variables = {
        "Python_EXECUTABLE": sys.executable,
        **({name: value} if name else {}),
        **defined,
    }
    asked = added | dict(os.environ if environment is None else environment)
    asked["PATH"] = f"{Path(sys.executable).parent}:{asked['PATH']}"
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "--log-level=WARNING"]
    _run([*configure, *(f"-D{name}={value}" for name, value in variables.items())], asked)
    return asked


def compile_beside(
    folder: Path, defined: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> None:
    """Configure and build; arguments and errors as `configure_beside`."""
    asked = configure_beside(folder, defined, environment)
    _run(["cmake", "--build", str(folder)], asked)


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")


def load(folder: Path) -> None:
    """Put the module that was built in `folder` where `import anyshard._native` finds it."""
    (built,) = folder.glob("_native.*.so")
    spec = importlib.util.spec_from_file_location("anyshard._native", built)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["anyshard._native"] = module
    spec.loader.exec_module(module)


def report() -> int:
    """Print the kernels of the installed package, or what was lacking."""
    try:
        # Not `import anyshard._native`: where it was not built, that finds the folder of sources.
        from anyshard._native import available_bodies
    except ImportError:
        needs = {"a C++ compiler": compiler(), "Python.h": has_headers()}
        lacking = [name for name, found in needs.items() if not found]
        print(MISSING.format(lacking=", ".join(lacking) or "a usable compiler"), file=sys.stderr)
        return 0
    print(f"native kernels on {platform.machine()}:", ", ".join(available_bodies()))
    return 0


def main() -> int:
    match sys.argv[1:]:
        case ["report"]:
            return report()
        case ["build", *command] if command:
            os.execvpe(command[0], command, build_environment() | dict(os.environ))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
