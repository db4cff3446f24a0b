"""What is told to people who do not look at a screen, and the address of what it is about.

Pure. A notice has an id that never changes however often it is made or sent, so that whoever
receives it twice can tell.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlencode

import msgspec

from storage.records import Severity

NoticeKind = Literal[
    "proposal_opened", "proposal_expired", "proposal_failed", "decision_made",
    "incident_opened", "incident_closed", "run_in_trouble", "run_failed", "test",
]  # fmt: skip
DEFAULT_BASE_URL = "http://127.0.0.1:8501"
_PAGES = {
    "proposal_opened": "reconfigure",
    "proposal_expired": "reconfigure",
    "proposal_failed": "reconfigure",
    "decision_made": "reconfigure",
    "incident_opened": "incidents",
    "incident_closed": "incidents",
}


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One message. id: the idempotency key. at: epoch seconds of what happened. title: one line.

    text: the rest, one fact a line. proposal, incident, gpu, replica: what it is about.
    """

    id: str
    kind: NoticeKind
    at: float
    run: str
    run_name: str
    severity: Severity
    title: str
    text: str = ""
    proposal: str = ""
    incident: str = ""
    gpu: str = ""
    replica: int | None = None

    def url(self, base: str) -> str:
        """Address of the card, the incident or the run in the dashboard at `base`."""
        query = {"run": self.run, "proposal": self.proposal, "incident": self.incident}
        if self.kind == "test":
            return f"{base.rstrip('/')}/"
        page = _PAGES.get(self.kind, "")
        if page == "reconfigure":
            query.pop("incident")
        given = {name: value for name, value in query.items() if value}
        return f"{base.rstrip('/')}/{page}?{urlencode(given)}"
