"""The one exception of w4q."""

from __future__ import annotations

import re

_GOT = re.compile(r"expected (?P<expected>.+?), (?:got|found) (?P<got>.+)")


class Error(Exception):
    """Something is wrong with an input, an argument or a device; or a check did not hold.

    code         "bad_argument", "bad_file", "unsupported", "mismatch", "device", "verification_failed" or "internal"
    exit_status  what the program would have ended with
    summary      one line: what is wrong
    place        the tensor, file or option that the summary begins with; None where it names none
    details      further lines: expected and found, who needs it
    expected, got  of the detail that says so, else None
    remedy       what to do; None where nothing is known
    report       of verify and compare: what the checks found; else None
    """

    def __init__(self, code: str, exit_status: int, summary: str, details: str = "", remedy: str = ""):
        self.code = code
        self.exit_status = exit_status
        self.summary = summary
        self.details = [line.strip() for line in details.split("\n") if line.strip()]
        self.remedy = remedy or None
        place, colon, _ = summary.partition(": ")
        self.place = place if colon and "\n" not in place else None
        found = next(filter(None, map(_GOT.search, [summary, *self.details])), None)
        self.expected, self.got = (found["expected"], found["got"]) if found else (None, None)
        self.report: dict | None = None
        lines = [summary, *("  " + line for line in self.details)]
        super().__init__("\n".join(lines + (["  hint: " + remedy] if remedy else [])))
