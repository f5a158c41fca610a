"""Recording and comparing runs: digests of every op, on file, and the first one that differs."""

from __future__ import annotations

from anyshard.fidelity.agreement import Disagreement
from anyshard.fidelity.compare import Comparison, Divergence, compare_records
from anyshard.fidelity.log import DigestLog, RecordedRow, RunDigests
from anyshard.fidelity.record import (
    RECORD_VERSION,
    Manifest,
    Record,
    RecordError,
    printable,
    read_record,
    tokens_sha256,
    write_record,
)
from anyshard.fidelity.weights import weights_sha256

__all__ = [
    "RECORD_VERSION",
    "Comparison",
    "DigestLog",
    "Disagreement",
    "Divergence",
    "Manifest",
    "Record",
    "RecordError",
    "RecordedRow",
    "RunDigests",
    "compare_records",
    "printable",
    "read_record",
    "tokens_sha256",
    "weights_sha256",
    "write_record",
]
