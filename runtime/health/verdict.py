"""One GPU, one state: claims in, verdicts out; no I/O and no clock of its own.

A claim is what one source holds against a GPU for one reason; the verdict is the worst claim that
stands. It rises at once and falls only after a quiet time; a GPU that keeps coming back bad is
quarantined, longer each time. Faults of the application and the cleaning up after other faults are
kept as evidence and condemn nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from runtime.health.config import VerdictConfig
from runtime.health.observation import BADNESS, Observation, SourceKind
from storage.records import GpuState

KEPT_EVIDENCE = 20
KEPT_CLAIMS = 64
KEPT_FALLS = 32


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What holds of one GPU. since: when it came to this state. evidence: (time, what was seen),
    oldest first. quarantined_until: it is left out until then, however well it looks."""

    gpu: str
    state: GpuState = "healthy"
    since: float = 0.0
    reason: str = ""
    action: str = ""
    evidence: tuple[tuple[float, str], ...] = ()
    quarantined_until: float | None = None

    def age_s(self, now: float) -> float:
        return max(0.0, now - self.since)


class Claim(msgspec.Struct, kw_only=True):
    """cleared_at: since when its source no longer holds it. lasting: only its source or a repair
    ends it. snapshot: its source says so for as long as it holds, else it told of an event."""

    source: SourceKind
    code: str
    state: GpuState
    text: str
    action: str
    at: float
    lasting: bool
    snapshot: bool
    cleared_at: float | None = None


class GpuHealth(msgspec.Struct, kw_only=True):
    """What the book knows of one GPU; `memory` and `recall` carry it over a restart. claims and
    repeats (times of equal suspicions): by source and code. falls: when it went bad."""

    verdict: Verdict
    claims: dict[str, Claim] = {}
    evidence: list[tuple[float, str]] = []
    repeats: dict[str, list[float]] = {}
    falls: list[float] = []
    quarantines: int = 0
    repairing: bool = False

    def note(self, at: float, text: str) -> None:
        self.evidence.append((at, text))
        del self.evidence[:-KEPT_EVIDENCE]


class VerdictBook:
    """Keeps the verdicts of all GPUs that it heard of; what it never heard of is healthy.

    Every method takes the time and returns the verdicts that changed.
    """

    def __init__(self, config: VerdictConfig) -> None:
        self._config = config
        self._gpus: dict[str, GpuHealth] = {}

    def verdict(self, gpu: str) -> Verdict:
        known = self._gpus.get(gpu)
        return known.verdict if known is not None else Verdict(gpu=gpu)

    def bad(self) -> list[Verdict]:
        """Everything that is not healthy."""
        return [g.verdict for g in self._gpus.values() if g.verdict.state != "healthy"]

    def memory(self) -> dict[str, GpuHealth]:
        """All that a restart must not forget, by GPU."""
        return {
            gpu: known
            for gpu, known in self._gpus.items()
            if known.claims or known.falls or known.repeats or known.verdict.state != "healthy"
        }

    def recall(self, memory: Mapping[str, GpuHealth]) -> None:
        """Go on with what an earlier book knew."""
        self._gpus = dict(memory)

    def observe(self, seen: Observation, now: float) -> list[Verdict]:
        """Take what a source saw of one GPU."""
        if seen.gpu is None:
            return []
        gpu = self._gpu(seen.gpu)
        at = min(seen.at, now) if seen.at is not None and seen.at > 1e9 else now
        if seen.snapshot:
            self._clear_snapshots(gpu, seen, now)
        if seen.verdict != "healthy":
            self._claim(gpu, seen, at, now)
        elif seen.code is not None:
            gpu.note(at, _told(seen))
            if seen.source == "kernel_log" and seen.code == 154:
                self._clear_kernel_log(gpu, now)
        return self._settle(seen.gpu, gpu, now)

    def withdraw(self, gpu: str, source: SourceKind, code: str, now: float) -> list[Verdict]:
        """A source no longer holds one thing against a GPU."""
        known = self._gpus.get(gpu)
        if known is None:
            return []
        claim = known.claims.get(_key(source, code))
        if claim is not None and claim.cleared_at is None:
            claim.cleared_at = now
        return self._settle(gpu, known, now)

    def repair_began(self, gpu: str, now: float) -> list[Verdict]:
        """Somebody works on it: it stays out until `repaired`."""
        known = self._gpu(gpu)
        known.repairing = True
        return self._settle(gpu, known, now)

    def repaired(self, gpu: str, now: float) -> list[Verdict]:
        """It is back: whatever was held against it no longer counts; a quarantine stands."""
        known = self._gpus.get(gpu)
        if known is None:
            return []
        known.repairing = False
        known.claims.clear()
        known.repeats.clear()
        return self._settle(gpu, known, now)

    def pardon(self, gpu: str, now: float) -> list[Verdict]:
        """An operator says it is fine: quarantine and all claims end."""
        known = self._gpu(gpu)
        known.falls.clear()
        known.quarantines = 0
        known.verdict = _with(known.verdict, quarantined_until=None)
        return self.repaired(gpu, now)

    def tick(self, now: float) -> list[Verdict]:
        """Let time pass: suspicions clear, quarantines end."""
        changed: list[Verdict] = []
        for name, gpu in self._gpus.items():
            if gpu.claims or gpu.verdict.state != "healthy":
                changed += self._settle(name, gpu, now)
        return changed

    # claims ----------------------------------------------------------------------------------

    def _gpu(self, name: str) -> GpuHealth:
        return self._gpus.setdefault(name, GpuHealth(verdict=Verdict(gpu=name)))

    def _claim(self, gpu: GpuHealth, seen: Observation, at: float, now: float) -> None:
        key = _key(seen.source, str(seen.code))
        state, text = seen.verdict, _told(seen)
        known = gpu.claims.get(key)
        if seen.snapshot and known is not None and known.cleared_at is None:
            known.text, known.at = text, now
            return
        gpu.note(at, text)
        if state == "suspect" and not seen.snapshot:
            state = self._repeated(gpu, key, seen.count, now)
        lasting = seen.snapshot or BADNESS[state] >= BADNESS["draining"]
        if known is not None and BADNESS[known.state] > BADNESS[state]:
            state, lasting = known.state, known.lasting
        gpu.claims[key] = Claim(
            source=seen.source,
            code=str(seen.code),
            state=state,
            text=text,
            action=seen.action,
            at=now,
            lasting=lasting,
            snapshot=seen.snapshot,
        )
        while len(gpu.claims) > KEPT_CLAIMS:
            del gpu.claims[min(gpu.claims, key=lambda each: BADNESS[gpu.claims[each].state])]

    def _repeated(self, gpu: GpuHealth, key: str, count: int, now: float) -> GpuState:
        """One suspicion is a suspicion; the same again and again is a reason to drain."""
        times = gpu.repeats.setdefault(key, [])
        times += [now] * min(count, self._config.repeats)
        del times[: -self._config.repeats]
        recent = [at for at in times if now - at <= self._config.repeat_window_s]
        return "draining" if len(recent) >= self._config.repeats else "suspect"

    @staticmethod
    def _clear_snapshots(gpu: GpuHealth, seen: Observation, now: float) -> None:
        """A source's new word replaces its last one; events that it told of stay."""
        for claim in gpu.claims.values():
            is_last_word = claim.source == seen.source and claim.snapshot
            if is_last_word and claim.code != str(seen.code) and claim.cleared_at is None:
                claim.cleared_at = now

    @staticmethod
    def _clear_kernel_log(gpu: GpuHealth, now: float) -> None:
        """The driver says that nothing is to be done any more."""
        for claim in gpu.claims.values():
            if claim.source == "kernel_log" and claim.cleared_at is None:
                claim.cleared_at = now

    # verdicts --------------------------------------------------------------------------------

    def _settle(self, name: str, gpu: GpuHealth, now: float) -> list[Verdict]:
        self._drop_old_claims(gpu, now)
        before = gpu.verdict
        worst = max(
            gpu.claims.values(), key=lambda each: (BADNESS[each.state], each.at), default=None
        )
        state: GpuState = worst.state if worst is not None else "healthy"
        reason, action = (worst.text, worst.action) if worst is not None else ("", "")
        until = before.quarantined_until
        # A worker that was killed says nothing of the hardware.
        is_hardware = worst is not None and worst.source != "worker"
        if is_hardware and self._is_fall(before.state, state):
            until = self._quarantine(gpu, now) or until
        if until is not None and now >= until:
            until = None
        if gpu.repairing:
            state, reason, action = "repairing", "it is being repaired", ""
        elif until is not None and BADNESS[state] < BADNESS["draining"]:
            state, action = "draining", "QUARANTINE"
            reason = f"quarantined for {until - now:.0f} s more: it went bad {len(gpu.falls)} times"
        after = Verdict(
            gpu=name,
            state=state,
            since=before.since if state == before.state else now,
            reason=reason,
            action=action,
            evidence=tuple(gpu.evidence),
            quarantined_until=until,
        )
        gpu.verdict = after
        return [after] if after.state != before.state else []

    def _drop_old_claims(self, gpu: GpuHealth, now: float) -> None:
        config = self._config
        gone = [
            key
            for key, claim in gpu.claims.items()
            if (claim.cleared_at is not None and now - claim.cleared_at >= config.settle_s)
            or (not claim.lasting and now - claim.at >= config.clear_s)
        ]
        for key in gone:
            del gpu.claims[key]

    def _is_fall(self, before: GpuState, after: GpuState) -> bool:
        """Whether a GPU that was well enough to train no longer is."""
        bad = BADNESS["draining"]
        return BADNESS[before] < BADNESS["repairing"] and BADNESS[after] >= bad

    def _quarantine(self, gpu: GpuHealth, now: float) -> float | None:
        """Count a fall; end of the quarantine if it was one too many."""
        config = self._config
        gpu.falls = [at for at in gpu.falls if now - at <= config.flap_window_s]
        gpu.falls = [*gpu.falls[1 - KEPT_FALLS :], now]
        if len(gpu.falls) < config.flaps:
            return None
        length = min(config.quarantine_s * 2.0 ** min(gpu.quarantines, 32), config.quarantine_max_s)
        gpu.quarantines += 1
        return now + length


def left_out(verdicts: Iterable[Verdict]) -> frozenset[str]:
    """GPUs that should not train though their worker lives."""
    return frozenset(v.gpu for v in verdicts if BADNESS[v.state] >= BADNESS["repairing"])


def _key(source: str, code: str) -> str:
    return f"{source} {code}"


def _with(verdict: Verdict, *, quarantined_until: float | None) -> Verdict:
    return Verdict(
        gpu=verdict.gpu,
        state=verdict.state,
        since=verdict.since,
        reason=verdict.reason,
        action=verdict.action,
        evidence=verdict.evidence,
        quarantined_until=quarantined_until,
    )


def _told(seen: Observation) -> str:
    """An observation in a line of evidence."""
    is_xid = isinstance(seen.code, int)
    number = f"{'SXid' if seen.is_sxid else 'Xid'} {seen.code}"
    what = number if is_xid else str(seen.code or "").replace("_", " ")
    parts = [f"{seen.source.replace('_', ' ')}: {what}"]
    if seen.subcode:
        parts.append(f"({seen.subcode})")
    if seen.cause_of is not None:
        parts.append(f"after Xid {seen.cause_of}")
    if seen.count > 1:
        parts.append(f"x{seen.count}")
    if not is_xid and seen.text:
        parts.append(f"- {seen.text}")
    return " ".join(parts)
