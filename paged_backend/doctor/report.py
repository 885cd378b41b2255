"""What a check found, and how it is told. Knows no checks."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paged_backend.errors import PagedBackendError


class Verdict(enum.Enum):
    """How a check came out, with the word printed before it."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "FAILED"


@dataclass(frozen=True)
class Finding:
    """One line of the report: `subject` was looked at; `text` is what was found and, unless it is fine, what to do."""

    verdict: Verdict
    subject: str
    text: str


Check = Callable[[], Iterable[Finding]]


def ok(subject: str, text: str) -> Finding:
    """All is well."""
    return Finding(Verdict.OK, subject, text)


def warning(subject: str, text: str) -> Finding:
    """It works, but may not as wished."""
    return Finding(Verdict.WARNING, subject, text)


def failure(subject: str, text: str) -> Finding:
    """It will not work."""
    return Finding(Verdict.FAILURE, subject, text)


def examine(checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """Run the checks; one that raises has failed with its message, and the others still run."""
    findings: list[Finding] = []
    for subject, check in checks:
        try:
            findings += check()
        except PagedBackendError as error:
            findings.append(failure(subject, str(error)))
        except Exception as error:
            findings.append(failure(subject, f"the check itself failed: {type(error).__name__}: {error}"))
    return findings


def tell(findings: Iterable[Finding], *, quiet: bool, say: Callable[[str], None]) -> int:
    """Print the findings (`quiet`: only those that need something); returns the exit code, 1 with a failure."""
    failed = False
    for finding in findings:
        failed = failed or finding.verdict is Verdict.FAILURE
        if not quiet or finding.verdict is not Verdict.OK:
            say(f"{finding.verdict.value:>7}  {finding.subject}: {finding.text}")
    return int(failed)
