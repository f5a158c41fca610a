"""The verbs, and the only prints: stdout holds the answer or the JSON, stderr all the rest.

Reads flags and `ANYSHARD_*`, turns exceptions into one sentence and an exit code (0 fine, 1
internal, 2 usage or bad input, 4 a difference, 5 a lost peer, 130 Ctrl-C). Imports what is
heavy only after the command line is known to be right.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from cyclopts import App, Parameter
from cyclopts.config import Env
from cyclopts.exceptions import CycloptsError

from anyshard import __version__
from anyshard.errors import AnyshardError, OptionError, PromptTooLong, UserError

if TYPE_CHECKING:
    from anyshard.answer import Answer
    from anyshard.config import ModelConfig
    from anyshard.engine import Engine
    from anyshard.launcher import RankGroup
    from anyshard.request import Request, Sampling
    from anyshard.tokenizer import Tokenizer

__all__ = ["app", "main"]

DEFAULT_MAX_TOKENS = 128

app = App(
    name="anyshard",
    help="Split an LLM any way. Get the same bits.",
    version=__version__,
    config=Env("ANYSHARD_", command=False),
)

Text = Parameter(negative="", allow_leading_hyphen=True)
Flag = Parameter(negative="")


@app.command
def generate(
    model: str | None = None,
    /,
    *,
    prompt: Annotated[list[str] | None, Text] = None,
    prompts: str | None = None,
    chat: Annotated[bool, Flag] = False,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop: Annotated[list[str] | None, Text] = None,
    ignore_eos: Annotated[bool, Flag] = False,
    tensor_parallel_size: Annotated[
        int | None, Parameter(name=["--tensor-parallel-size", "-tp"])
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None, Parameter(name=["--pipeline-parallel-size", "-pp"])
    ] = None,
    heads: str | None = None,
    layers: str | None = None,
    threads: int | None = None,
    chunk: int = 256,
    comm: Literal["auto", "shm", "torch", "threads"] = "auto",
    kernels: Literal["auto", "avx2", "scalar", "reference"] = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 32,
    deadline: float = 10.0,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Continue one or several prompts, on any split of the model, with the same bits.

    Parameters
    ----------
    model
        A .gguf file or a Hugging Face directory; without it the demo model, SmolLM2-135M.
    prompt
        Text to continue; repeat it for a batch.
    prompts
        A JSON-lines file of prompts: strings, or objects with "prompt" and "max_tokens".
    chat
        Wrap each prompt as a user message in the model's chat template.
    max_tokens
        Longest answer in tokens; 128, or what the context leaves if that is less.
    temperature
        0 is greedy; above it, the noise is drawn from --seed, position and token id.
    top_k
        Sample among the k best tokens; 0 is all.
    top_p
        Sample among the best tokens that hold this share of probability; 1 is all.
    min_p
        Drop tokens below this share of the best one's probability; 0 drops none.
    seed
        Key of the sampling noise, 0 to 2^64-1.
    stop
        Text that ends the answer and is not shown; repeat for several.
    ignore_eos
        Go on past the model's end-of-text tokens.
    tensor_parallel_size
        Ranks that share each layer, 1 to the number of query heads.
    pipeline_parallel_size
        Stages that share the layers, 1 to the number of layers.
    heads
        Query heads of each rank, such as 5,4; implies -tp.
    layers
        Layers of each stage, such as 22,8; implies -pp.
    threads
        Threads per rank; by default cores divided by ranks, at least 1.
    chunk
        Most rows of one prompt in a step.
    comm
        Ranks as processes over shared memory (auto, shm), over torch.distributed with Gloo
        (torch), or as threads of one process (threads).
    kernels
        Kernel bodies; all have the same bits. auto takes the fastest here.
    max_model_len
        Tokens that a prompt and its answer may hold together; by default as many as asked for.
    max_num_seqs
        Prompts in flight at once.
    deadline
        Seconds without a sign of life after which a rank counts as lost.
    json_output
        Print one JSON object, with tokens, digest, layout, timings and bytes per rank.
    """
    # before NumPy is imported: its BLAS would start threads that a fork does not survive
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    from anyshard.request import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    for name, value, least, most in (
        ("chunk", chunk, 1, 1 << 16),
        ("max-num-seqs", max_num_seqs, 1, 4096),
        ("threads", threads, 1, 256),
        ("max-tokens", max_tokens, 1, 1 << 24),
        ("max-model-len", max_model_len, 2, 1 << 24),
        ("deadline", deadline, 0.1, 86400.0),
    ):
        if value is not None and not least <= value <= most:
            raise OptionError(f"--{name} is {value}; it can be {least} to {most}")
    if any(not text for text in stop or []):
        raise OptionError("--stop is empty; give the text that should end the answer")
    job = _Job(
        model=model,
        texts=_read_prompts(prompt, prompts),
        chat=chat,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        tp=tensor_parallel_size,
        pp=pipeline_parallel_size,
        heads=_counts(heads, "--heads"),
        layers=_counts(layers, "--layers"),
        threads=threads,
        chunk=chunk,
        comm=comm,
        kernels=kernels,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        deadline_s=deadline,
        as_json=json_output,
    )
    _Generate(job).run()


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A checked command line of `generate`."""

    model: str | None
    texts: tuple[tuple[str, int | None], ...]
    chat: bool
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    tp: int | None
    pp: int | None
    heads: tuple[int, ...] | None
    layers: tuple[int, ...] | None
    threads: int | None
    chunk: int
    comm: Literal["auto", "shm", "torch", "threads"]
    kernels: Literal["auto", "avx2", "scalar", "reference"]
    max_model_len: int | None
    max_num_seqs: int
    deadline_s: float
    as_json: bool


def _counts(text: str | None, flag: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"{flag} is {text!r}; whole numbers such as 5,4 are needed") from None


def _read_prompts(
    prompt: Sequence[str] | None, path: str | None
) -> tuple[tuple[str, int | None], ...]:
    """(text, max_tokens or None) of every prompt on the command line and in the file."""
    texts: list[tuple[str, int | None]] = [(text, None) for text in prompt or ()]
    if path is not None:
        texts += list(_prompts_file(path))
    if not texts:
        raise OptionError("no prompt; give --prompt TEXT or --prompts FILE.jsonl")
    for index, (text, _) in enumerate(texts):
        if not text:
            raise OptionError(f"prompt {index + 1} is empty; give at least one token of text")
    return tuple(texts)


def _prompts_file(path: str) -> Iterator[tuple[str, int | None]]:
    try:
        with open(path, encoding="utf-8") as lines:
            content = lines.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--prompts {path} cannot be read: {error}") from None
    for number, line in enumerate(content, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            raise OptionError(f"--prompts {path} line {number} is not JSON") from None
        if isinstance(entry, str):
            entry = {"prompt": entry}
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise OptionError(
                f'--prompts {path} line {number}: a string or an object with "prompt" is needed'
            )
        unknown = sorted(set(entry) - {"prompt", "max_tokens"})
        if unknown:
            raise OptionError(f"--prompts {path} line {number}: unknown field {unknown[0]!r}")
        limit = entry.get("max_tokens")
        if limit is not None and (type(limit) is not int or not 1 <= limit <= 1 << 24):
            raise OptionError(f"--prompts {path} line {number}: max_tokens is {limit!r}")
        yield entry["prompt"], limit


class _Generate:
    """Runs one checked job: load, split, stream, report."""

    def __init__(self, job: _Job) -> None:
        self.job = job
        self.start_s = time.monotonic()
        self.first_token_s: float | None = None

    def run(self) -> None:
        """Print the answers or the JSON.

        Raises: UserError, PeerLost.
        """
        from anyshard.engine import loader
        from anyshard.launcher import ThreadGroup, fork_launcher
        from anyshard.worker import rank_main

        job = self.job
        load = loader(job.model, threads=len(os.sched_getaffinity(0)))
        group: RankGroup
        if job.comm == "threads":
            group = ThreadGroup(load, rank_main)
        else:
            group = fork_launcher(load, rank_main, deadline_s=job.deadline_s)
        try:
            self._with(group)
        finally:
            group.close()

    def _with(self, group: RankGroup) -> None:
        from anyshard.checkpoint import open_checkpoint
        from anyshard.engine import Engine, EngineOptions, f32_profile
        from anyshard.layout import plan
        from anyshard.tokenizer import open_tokenizer

        job = self.job
        checkpoint = open_checkpoint(job.model)
        config, profile = checkpoint.config, f32_profile()
        layout = plan(
            config,
            tp=job.tp or 1,
            pp=job.pp or 1,
            heads=job.heads,
            layers=job.layers,
            leaf=profile.leaf,
        )
        _check_agreement(job, tp=layout.tp, pp=layout.pp)
        tokenizer = open_tokenizer(checkpoint)
        requests = [self._request(text, limit, tokenizer, config) for text, limit in job.texts]
        needed = max(len(request.prompt) + request.max_tokens for request in requests)
        length = min(config.context, -(-needed // 32) * 32)
        if job.max_model_len is not None:
            length = job.max_model_len
        if length > config.context:
            raise OptionError(
                f"--max-model-len is {length}; the model's context holds {config.context}"
            )
        for request in requests:
            if len(request.prompt) + request.max_tokens > length:
                raise PromptTooLong(
                    prompt_tokens=len(request.prompt), max_tokens=request.max_tokens, limit=length
                )
        with _Bar("loading weights") as bar:
            group.wait_loaded(bar.update)
        engine = Engine(
            group,
            config,
            profile,
            layout,
            EngineOptions(
                kernels=job.kernels,
                comm=job.comm,
                threads=job.threads,
                chunk=min(job.chunk, length),
                max_num_seqs=min(job.max_num_seqs, len(requests)),
                max_model_len=length,
                deadline_s=job.deadline_s,
            ),
        )
        self.load_s = time.monotonic() - self.start_s
        answers = self._stream(engine, requests, tokenizer)
        self._report(engine, requests, answers)
        engine.close()

    def _request(
        self, text: str, limit: int | None, tokenizer: Tokenizer, config: ModelConfig
    ) -> Request:
        from anyshard.request import Request

        job = self.job
        if job.chat:
            prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
        else:
            prompt = tokenizer.encode(text, add_special=True)
        room = config.context - len(prompt)
        if limit is None:
            limit = job.max_tokens
        if limit is None:
            limit = min(DEFAULT_MAX_TOKENS, max(1, room))
        if limit > room:
            raise PromptTooLong(prompt_tokens=len(prompt), max_tokens=limit, limit=config.context)
        return Request(
            prompt=tuple(prompt),
            max_tokens=limit,
            sampling=job.sampling,
            stop_ids=frozenset() if job.ignore_eos else tokenizer.eos_ids,
            want_logits=True,
        )

    def _stream(
        self, engine: Engine, requests: Sequence[Request], tokenizer: Tokenizer
    ) -> list[tuple[Answer, str]]:
        """Run all requests; returns each answer and why it ended."""
        from anyshard.answer import Answer

        answers = [
            Answer(tokenizer.stream_decoder(), stop=self.job.stop, stop_ids=request.stop_ids)
            for request in requests
        ]
        reasons = [""] * len(requests)
        for request in requests:
            engine.submit(request)
        with _Bar("reading the prompt") as bar:
            self._consume(engine, answers, reasons, bar)
        return list(zip(answers, reasons, strict=True))

    def _consume(
        self, engine: Engine, answers: list[Answer], reasons: list[str], bar: _Bar
    ) -> None:
        live = not self.job.as_json and len(answers) == 1
        for event in engine.run(bar.update):
            answer = answers[event.request_id]
            if self.first_token_s is None:
                self.first_token_s = time.monotonic() - self.start_s
            shown = "" if event.token is None else answer.push(event.token, event.logits)
            reason = event.finish
            if reason == "fault":
                raise UserError(
                    f"prompt {event.request_id + 1} failed: a value left the range of float32 "
                    f"in {event.fault}"
                )
            if answer.stopped:
                engine.cancel(event.request_id)
                reason = "stop"
            if reason:
                reasons[event.request_id] = reason
                shown += answer.finish()
            if live:
                sys.stdout.write(shown)
                sys.stdout.flush()

    def _report(
        self, engine: Engine, requests: Sequence[Request], answers: list[tuple[Answer, str]]
    ) -> None:
        job = self.job
        if job.as_json:
            print(json.dumps(self._json(engine, requests, answers)))
            return
        if len(answers) == 1:
            print()
        else:
            for index, (answer, _) in enumerate(answers):
                print(f"[{index + 1}] {answer.text}")
        rates = self._timings(engine)
        t = engine.timings
        print(
            f"prefill {t.prefill_tokens} tok {rates['prefill_tokens_per_s']:.1f} tok/s · "
            f"decode {t.decode_tokens} tok {rates['decode_tokens_per_s']:.1f} tok/s · "
            f"first token {rates['ttft_s']:.2f} s\n"
            f"{engine.layout.describe()} · {engine.profile.name} {engine.body} "
            f"x{engine.threads}",
            file=sys.stderr,
        )
        for answer, _ in answers:
            print(f"logits_sha256 {answer.logits_sha256}", file=sys.stderr)

    def _timings(self, engine: Engine) -> dict[str, float]:
        t = engine.timings
        return {
            "load_s": round(self.load_s, 4),
            "ttft_s": round(self.first_token_s or 0.0, 4),
            "prefill_tokens_per_s": round(t.prefill_tokens / max(t.prefill_s, 1e-9), 2),
            "decode_tokens_per_s": round(t.decode_tokens / max(t.decode_s, 1e-9), 2),
        }

    def _json(
        self, engine: Engine, requests: Sequence[Request], answers: list[tuple[Answer, str]]
    ) -> dict[str, Any]:
        results = [
            {
                "text": answer.text,
                "prompt_tokens": len(request.prompt),
                "tokens": answer.tokens,
                "finish_reason": reason,
                "logits_sha256": answer.logits_sha256,
            }
            for request, (answer, reason) in zip(requests, answers, strict=True)
        ]
        head = results[0] if len(results) == 1 else {"results": results}
        views = engine.control.statuses()
        apart = [view.wire_bytes["logits"] for view in views]
        return head | {
            "layout": _layout_json(engine),
            "profile": engine.profile.name,
            "profile_hash": engine.profile.sha256(),
            "timings": self._timings(engine),
            "weight_bytes": [view.weight_bytes for view in views],
            "kv_bytes": [view.kv_bytes for view in views],
            "wire_bytes_sent": [
                sum(view.wire_bytes.values()) - extra
                for view, extra in zip(views, apart, strict=True)
            ],
            "wire_messages_sent": [
                sum(view.wire_messages.values()) - view.wire_messages["logits"] for view in views
            ],
            "logits_bytes_gathered": apart,
        }


def _layout_json(engine: Engine) -> dict[str, Any]:
    def sizes(spans: Sequence[tuple[int, int]]) -> list[int]:
        return [stop - start for start, stop in spans]

    layout = engine.layout
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "heads": sizes(layout.heads),
        "ffn": sizes(layout.ffn),
        "vocab": sizes(layout.vocab),
        "layers": sizes(layout.layers),
        "kv_shard": "heads",
        "comm": "solo" if layout.world == 1 else engine.comm,
        "kernels": engine.body,
        "threads": engine.threads,
    }


def _check_agreement(job: _Job, *, tp: int, pp: int) -> None:
    for flag, asked, cut, got in (
        ("-tp", job.tp, "--heads", tp),
        ("-pp", job.pp, "--layers", pp),
    ):
        if asked is not None and asked != got:
            raise OptionError(f"{flag} {asked} contradicts {cut}, which has {got} parts; drop one")


class _Bar:
    """A progress bar on stderr, on a terminal only, gone when it is done."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._label, total=None)
            self._bar.start()
        return self

    def update(self, done: int, total: int) -> None:
        """`done` of `total` steps are over; at the end the bar goes."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            if done >= total:
                self._bar.stop()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _terminated(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code.

    Held by: test_cli.py.
    """
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        sentence = str(error).rstrip(".")
        print(f"anyshard: {sentence}; see anyshard --help", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("anyshard: interrupted; all ranks are ended", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of stdout left; nothing more can be said there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except AnyshardError as error:
        lines = [str(error), *getattr(error, "__notes__", [])]
        print("anyshard: " + "\n".join(lines), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
