"""A fuzz target for the readers: any bytes are a CheckpointError or a model, and little memory.

    python tests/fuzz_readers.py gguf -max_total_time=600
    python tests/fuzz_readers.py safetensors -max_total_time=600

Needs `atheris` (the `fuzz` extra). Starts from small sound files made here; options after the
name are libFuzzer's. Ends with a trace at the first finding, with "Done" otherwise.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris  # type: ignore[import-untyped]

# atheris can count what a plain import loads, not what an editable install redirects
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

with atheris.instrument_imports(include=["anyshard"]):
    from anyshard.checkpoint import open_checkpoint
    from anyshard.checkpoint.gguf import read_gguf
    from anyshard.checkpoint.safetensors import read_safetensors
    from anyshard.errors import AnyshardError
    from anyshard.tokenizer import open_tokenizer

MEMORY_LIMIT = 4 << 30  # address space; a size that is believed before it is checked ends here


def try_gguf(path: Path) -> None:
    """Read the table, then the model and its tokenizer."""
    for tensor in read_gguf(path).tensors.values():
        assert tensor.raw.size >= 1
    checkpoint = open_checkpoint(str(path))
    for name, shape in checkpoint.config.tensor_shapes().items():
        assert checkpoint.tensors()[name].shape == shape
    open_tokenizer(checkpoint)


def try_safetensors(path: Path) -> None:
    """Read the header; every tensor lies within the file."""
    for tensor in read_safetensors(path).values():
        assert tensor.raw.size <= path.stat().st_size


def seeds(kind: str, folder: Path) -> None:
    """Small sound files for the fuzzer to change."""
    from gguf_files import file_bytes, tensor, write_tiny_gguf
    from models import ADVERSARIAL_9_3, write_hf_model

    if kind == "gguf":
        write_tiny_gguf(folder / "tiny.gguf")
        (folder / "small.gguf").write_bytes(file_bytes(tensors=(tensor("t", (16,)),), payload=64))
        return
    from dataclasses import replace

    small = replace(
        ADVERSARIAL_9_3, num_layers=1, hidden=8, ffn=8, num_heads=1, num_kv_heads=1, head_dim=8,
        vocab=17,
    )  # fmt: skip
    directory = write_hf_model(folder / "model", small, seed=1)
    (directory / "model.safetensors").rename(folder / "model.safetensors")


def main() -> None:
    kind = sys.argv[1]
    attempt = {"gguf": try_gguf, "safetensors": try_safetensors}[kind]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    with TemporaryDirectory() as folder:
        corpus, file = Path(folder) / "corpus", Path(folder) / "input"
        corpus.mkdir()
        seeds(kind, corpus)

        def one_input(content: bytes) -> None:
            file.write_bytes(content)
            try:
                attempt(file)
            except AnyshardError as error:
                assert "\n" not in str(error)

        atheris.Setup([sys.argv[0], *sys.argv[2:], str(corpus)], atheris.instrument_func(one_input))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
