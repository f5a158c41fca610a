"""`anyshard generate`: load, split, stream one or several answers, report.

Knows the engine's front half only: which ranks exist and how they talk is the engine's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from anyshard.cli.drafting import draft_figures, speculation_json
from anyshard.cli.flags import HostFlags, PromptFlags, SamplingFlags, SpeculationFlags, SplitFlags
from anyshard.cli.hosts import from_torchrun
from anyshard.cli.member import run_member
from anyshard.cli.recording import Recorder
from anyshard.cli.running import (
    Loading,
    context_limit,
    open_model,
    rank_group,
    start_engine,
    wait_loaded,
)
from anyshard.cli.screen import Bar, abandon_stdout, tell
from anyshard.cli.trace import TRACE_EVENTS, TraceFile
from anyshard.comm.link import emulated_text
from anyshard.errors import AnyshardError, OptionError, PromptTooLong

if TYPE_CHECKING:
    from anyshard.answer import Answer
    from anyshard.engine import Engine
    from anyshard.request import Request
    from anyshard.tokenizer import Tokenizer

__all__ = ["generate"]

DEFAULT_MAX_TOKENS = 128
FAULT_EXIT = 1


def generate(
    model: str | None = None,
    /,
    *,
    prompts: PromptFlags = PromptFlags(),
    sampling: SamplingFlags = SamplingFlags(),
    split: SplitFlags = SplitFlags(),
    hosts: HostFlags = HostFlags(),
    speculation: SpeculationFlags = SpeculationFlags(),
    record: str | None = None,
    trace: str | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Continue one or several prompts, on any split of the model, with the same bits.

    Parameters
    ----------
    model
        A .gguf file, a Hugging Face directory, or a Hub id (ORG/NAME, ORG/NAME:FILE.gguf);
        without it the demo model, SmolLM2-135M.
    record
        Write digests of every op of the run to this file, for anyshard compare; of several prompts
        to RUN.1.anyd, RUN.2.anyd and so on for RUN.anyd.
    trace
        Write what every rank did when to this file, such as run.json.gz, for anyshard trace.
    json_output
        Print one JSON object, with tokens, digest, layout, timings and bytes per rank.
    """
    hosts = from_torchrun(hosts)
    if hosts.node_rank:
        return run_member(model, split, hosts)
    files = {"record": record, "trace": trace}
    return _Generate(
        model, prompts, sampling, split, hosts, speculation, **files, as_json=json_output
    ).run()


@dataclass
class _Outcome:
    """One prompt on its way: what was asked, what came, and how it ended."""

    request: Request
    answer: Answer
    reason: str = ""
    fault: str | None = None


class _Generate:
    """Runs one checked command line."""

    def __init__(
        self,
        model: str | None,
        prompts: PromptFlags,
        sampling: SamplingFlags,
        split: SplitFlags,
        hosts: HostFlags,
        speculation: SpeculationFlags,
        *,
        record: str | None,
        trace: str | None,
        as_json: bool,
    ) -> None:
        self.model, self.flags, self.split, self.as_json = model, sampling, split, as_json
        self.hosts, self.speculation = hosts, speculation
        if model is not None and prompts.prompt is None and prompts.prompts is None:
            raise OptionError(
                f"no prompt: {model[:60]!r} was taken as MODEL; give the text with --prompt"
            )
        self.chat, self.texts = prompts.chat, prompts.read()
        self.sampling = sampling.sampling()
        if record is not None and speculation.drafts:
            raise OptionError(
                "--record keeps every row that is run, and of drafts some do not count; leave "
                "--speculate out"
            )
        self.recorder = None if record is None else Recorder(record, len(self.texts))
        if self.recorder is not None and prompts.prompts is not None:
            self.recorder.spare_prompts(prompts.prompts)
        self.trace = None if trace is None else TraceFile(trace)
        self.files = (record, prompts.prompts)
        self.start_s = time.monotonic()
        self._unsaid: AnyshardError | BrokenPipeError | None = None
        self.ready_s = self.first_token_s = self.start_s
        self.is_short_of_kv = False  # --kv-memory, not the context, says how long a prompt may be

    def run(self) -> int:
        """Print the answers or the JSON; returns the exit code.

        Raises: UserError, PeerLost.
        """
        opened = open_model(
            self.model,
            self.split,
            num_prompts=len(self.texts),
            record=self.recorder is not None,
            hosts=self.hosts,
            speculation=self.speculation,
        )
        if self.recorder is not None:
            self.recorder.spare_model(opened.checkpoint.path)
        if self.trace is not None:
            self.trace.spare(opened.checkpoint.path, *self.files)
        with rank_group(opened) as loading:
            return self._with(loading)

    def _with(self, loading: Loading) -> int:
        from anyshard.tokenizer import open_tokenizer

        opened = loading.opened
        limit = opened.limit
        self.is_short_of_kv = limit < context_limit(opened.config, self.split)
        tokenizer = open_tokenizer(opened.checkpoint)
        requests = [self._request(*text, tokenizer, limit) for text in self.texts]
        if not opened.is_final:
            needed = max(len(request.prompt) + request.max_tokens for request in requests)
            block = opened.profile.kv_block
            limit = min(limit, -(-needed // block) * block)
        loaded = wait_loaded(loading, limit=limit, tokenizer=tokenizer)
        events = TRACE_EVENTS if self.trace is not None else 0
        engine = start_engine(loading, limit=limit, trace_events=events)
        self.ready_s = time.monotonic()
        if self.flags.idle:
            print(
                f"note: at temperature 0 these have no effect: {', '.join(self.flags.idle)}",
                file=sys.stderr,
            )
        outcomes = self._stream(engine, requests, tokenizer, loaded.weights_sha256)
        self._report(engine, outcomes)
        if self.trace is not None:
            self.trace.add(engine, f"generate {engine.layout.describe()}")
            self.trace.write()
        engine.close()
        if self.recorder is not None:
            self.recorder.refuse_unwritten()
        has_fault = any(outcome.fault for outcome in outcomes)
        if self._unsaid is not None and not has_fault:
            raise self._unsaid
        return FAULT_EXIT if has_fault else 0

    def _request(
        self, text: str, max_tokens: int | None, tokenizer: Tokenizer, limit: int
    ) -> Request:
        from anyshard.request import Request

        _refuse_endless(text, tokenizer, limit)
        if self.chat:
            prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
        else:
            prompt = tokenizer.encode(text, add_special=True)
        room = limit - len(prompt)
        if max_tokens is None:
            max_tokens = self.flags.max_tokens
        if max_tokens is None:
            max_tokens = min(DEFAULT_MAX_TOKENS, max(1, room))
        if max_tokens > room:
            remedy, holder = "shorten the prompt or lower --max-tokens", "the context holds"
            if self.is_short_of_kv:
                remedy += ", or raise --kv-memory"
                holder = f"--kv-memory {self.split.kv_memory} has room for"
            raise PromptTooLong(
                prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                limit=limit,
                remedy=remedy,
                holder=holder,
            )
        return Request(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=self.sampling,
            stop_ids=frozenset() if self.flags.ignore_eos else tokenizer.eos_ids,
            want_logits=True,
        )

    def _stream(
        self,
        engine: Engine,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        weights_sha256: str,
    ) -> list[_Outcome]:
        """Run all requests to their ends; a single plain answer shows as it comes."""
        from anyshard.answer import Answer

        outcomes = [
            _Outcome(
                request,
                Answer(
                    tokenizer.stream_decoder(),
                    stop=self.flags.stop or (),
                    stop_ids=request.stop_ids,
                ),
            )
            for request in requests
        ]
        for request in requests:
            engine.submit(request)
        with Bar("reading the prompt") as bar:
            self._consume(engine, outcomes, bar, weights_sha256)
        return outcomes

    def _consume(
        self, engine: Engine, outcomes: list[_Outcome], bar: Bar, weights_sha256: str
    ) -> None:
        live, done = not self.as_json and len(outcomes) == 1, 0
        for event in engine.run(bar.update):
            outcome = outcomes[event.request_id]
            answer = outcome.answer
            if self.first_token_s == self.start_s:
                self.first_token_s = time.monotonic()
            shown = "" if event.token is None else answer.push(event.token, event.logits)
            outcome.reason, outcome.fault = event.finish or "", event.fault
            if outcome.reason:
                shown += answer.finish()
            elif answer.stopped:
                engine.cancel(event.request_id)
            if answer.stopped:
                outcome.reason = "stop"
            if live:
                self._say(shown, end="")
            elif not self.as_json:
                done = self._show_in_order(outcomes, done)
            if outcome.reason and self.recorder is not None:
                layout = _layout_json(engine)
                self.recorder.write(
                    engine, event.request_id, outcome, layout, weights_sha256=weights_sha256
                )

    def _show_in_order(self, outcomes: Sequence[_Outcome], done: int) -> int:
        """Print the answers of a batch as their turn comes; `done` of them are out, then more."""
        while done < len(outcomes) and outcomes[done].reason:
            self._say(f"[{done + 1}] {outcomes[done].answer.text.lstrip()}\n")
            done += 1
        return done

    def _say(self, text: str, *, end: str = "\n") -> None:
        """On stdout; where that fails, records are still to be written, and it is raised last."""
        try:
            tell(text, end=end)
        except (BrokenPipeError, AnyshardError) as error:
            if self.recorder is None:
                raise
            abandon_stdout()
            self._unsaid = self._unsaid or error

    def _report(self, engine: Engine, outcomes: list[_Outcome]) -> None:
        if self.as_json:
            self._say(json.dumps(self._json(engine, outcomes)))
        else:
            if len(outcomes) == 1:
                self._say("")
            self._figures(engine, outcomes)
        for index, outcome in enumerate(outcomes):
            if outcome.fault:
                print(
                    f"anyshard: prompt {index + 1} failed: a value left the range of float32 in "
                    f"{outcome.fault}",
                    file=sys.stderr,
                )

    def _figures(self, engine: Engine, outcomes: list[_Outcome]) -> None:
        t, rates, layout = engine.timings, self._timings(engine), _layout_json(engine)
        heads, layers = (",".join(map(str, layout[part])) for part in ("heads", "layers"))
        print(
            f"load {rates['load_s']:.2f} s · first token {rates['ttft_s']:.2f} s later · "
            f"prefill {t.prefill_tokens} tok {rates['prefill_tokens_per_s']:.1f} tok/s · "
            f"decode {t.decode_tokens} tok {rates['decode_tokens_per_s']:.1f} tok/s\n"
            f"{engine.layout.describe()} · heads {heads} · layers {layers} · {layout['comm']} · "
            f"{_hosts_text(engine)}room for {engine.kv_tokens} tokens · "
            f"{emulated_text(engine.options.links)}"
            f"{engine.profile.name} {engine.body} x{engine.threads}",
            file=sys.stderr,
        )
        if engine.speculator is not None:
            print(engine.speculator.figures.text(), file=sys.stderr)
            if (figures := draft_figures(engine.speculator)) is not None:
                print(figures.text(), file=sys.stderr)
        for index, outcome in enumerate(outcomes):
            number = "" if len(outcomes) == 1 else f"[{index + 1}] "
            end = f"ended by {outcome.reason}" if outcome.reason != "stop" else "ended"
            print(
                f"{number}logits_sha256 {outcome.answer.logits_sha256} · {end} after "
                f"{len(outcome.answer.tokens)} tok",
                file=sys.stderr,
            )

    def _timings(self, engine: Engine) -> dict[str, float]:
        """load_s: command to ranks ready; ttft_s: from there to the first token."""
        t = engine.timings
        return {
            "load_s": round(self.ready_s - self.start_s, 4),
            "ttft_s": round(max(0.0, self.first_token_s - self.ready_s), 4),
            "prefill_tokens_per_s": round(t.prefill_tokens / max(t.prefill_s, 1e-9), 2),
            "decode_tokens_per_s": round(t.decode_tokens / max(t.decode_s, 1e-9), 2),
        }

    def _json(self, engine: Engine, outcomes: list[_Outcome]) -> dict[str, Any]:
        results = [_result_json(outcome) for outcome in outcomes]
        for request_id, path in self.recorder.written.items() if self.recorder else ():
            results[request_id]["record"] = str(path)
        head = results[0] if len(results) == 1 else {"results": results}
        views, links = engine.control.statuses(), engine.options.links
        apart = [view.wire_bytes["logits"] for view in views]
        return head | {
            "layout": _layout_json(engine),
            **({"emulated_links": list(map(str, links))} if links else {}),
            **speculation_json(engine),
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


def _refuse_endless(text: str, tokenizer: Tokenizer, limit: int) -> None:
    """A text that no tokenizer could fit is refused unread: 21 MB would take half a minute."""
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    if num_bytes <= 64 * limit:
        return
    longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab))
    if num_bytes > longest * limit:
        raise OptionError(
            f"a prompt of {num_bytes} bytes is at least {num_bytes // longest} tokens; the context "
            f"holds {limit}"
        )


def _result_json(outcome: _Outcome) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": outcome.answer.text,
        "prompt_tokens": len(outcome.request.prompt),
        "tokens": outcome.answer.tokens,
        "finish_reason": outcome.reason,
        "logits_sha256": outcome.answer.logits_sha256,
    }
    return result | ({"fault": outcome.fault} if outcome.fault else {})


def _comm_text(engine: Engine) -> str:
    """How ranks talk; of several hosts, also between these."""
    if engine.layout.world == 1:
        return "solo"
    is_mixed = engine.options.hosts and engine.comm == "shm"
    return f"{engine.comm}+torch" if is_mixed else engine.comm


def _hosts_text(engine: Engine) -> str:
    hosts = engine.options.hosts
    return f"{max(hosts) + 1} hosts · " if hosts else ""


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
        "kv_shard": layout.kv_shard,
        "schedule": engine.options.schedule,
        "micro_batches": engine.schedule.micro_batches,
        "comm": _comm_text(engine),
        **({"hosts": list(engine.options.hosts)} if engine.options.hosts else {}),
        "kernels": engine.body,
        "threads": engine.threads,
    }
