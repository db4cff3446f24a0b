"""One GPU, one state: claims in, verdicts out; no I/O and no clock of its own.

A claim is what one source holds against a GPU for one reason; the verdict is the worst claim that
stands. It rises at once and falls only after a quiet time; a GPU that keeps coming back bad is
quarantined, longer each time. Faults of the application and the cleaning up after other faults are
kept as evidence and condemn nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.health.config import VerdictConfig
from runtime.health.observation import BADNESS, Observation, SourceKind
from storage.records import GpuState

KEPT_EVIDENCE = 20
KEPT_CLAIMS = 64
Key = tuple[str, str]


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


@dataclass(slots=True)
class _Claim:
    """cleared_at: since when its source no longer holds it. lasting: only its source or a repair
    ends it. snapshot: its source says so for as long as it holds, else it told of an event."""

    state: GpuState
    text: str
    action: str
    at: float
    lasting: bool
    snapshot: bool
    cleared_at: float | None = None


@dataclass(slots=True)
class _Gpu:
    verdict: Verdict
    claims: dict[Key, _Claim] = field(default_factory=dict)
    evidence: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=KEPT_EVIDENCE))
    repeats: dict[Key, deque[float]] = field(default_factory=dict)
    falls: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    quarantines: int = 0
    repairing: bool = False


class VerdictBook:
    """Keeps the verdicts of all GPUs that it heard of; what it never heard of is healthy.

    Every method takes the time and returns the verdicts that changed.
    """

    def __init__(self, config: VerdictConfig) -> None:
        self._config = config
        self._gpus: dict[str, _Gpu] = {}

    def verdict(self, gpu: str) -> Verdict:
        known = self._gpus.get(gpu)
        return known.verdict if known is not None else Verdict(gpu=gpu)

    def bad(self) -> list[Verdict]:
        """Everything that is not healthy."""
        return [g.verdict for g in self._gpus.values() if g.verdict.state != "healthy"]

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
            gpu.evidence.append((at, _told(seen)))
            if seen.source == "kernel_log" and seen.code == 154:
                self._clear_kernel_log(gpu, now)
        return self._settle(seen.gpu, gpu, now)

    def withdraw(self, gpu: str, source: SourceKind, code: str, now: float) -> list[Verdict]:
        """A source no longer holds one thing against a GPU."""
        known = self._gpus.get(gpu)
        if known is None:
            return []
        claim = known.claims.get((source, code))
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

    def _gpu(self, name: str) -> _Gpu:
        return self._gpus.setdefault(name, _Gpu(verdict=Verdict(gpu=name)))

    def _claim(self, gpu: _Gpu, seen: Observation, at: float, now: float) -> None:
        key = (seen.source, str(seen.code))
        state, text = seen.verdict, _told(seen)
        known = gpu.claims.get(key)
        if seen.snapshot and known is not None and known.cleared_at is None:
            known.text, known.at = text, now
            return
        gpu.evidence.append((at, text))
        if state == "suspect" and not seen.snapshot:
            state = self._repeated(gpu, key, seen.count, now)
        lasting = seen.snapshot or BADNESS[state] >= BADNESS["draining"]
        if known is not None and BADNESS[known.state] > BADNESS[state]:
            state, lasting = known.state, known.lasting
        gpu.claims[key] = _Claim(state, text, seen.action, now, lasting, seen.snapshot)
        while len(gpu.claims) > KEPT_CLAIMS:
            del gpu.claims[min(gpu.claims, key=lambda each: BADNESS[gpu.claims[each].state])]

    def _repeated(self, gpu: _Gpu, key: Key, count: int, now: float) -> GpuState:
        """One suspicion is a suspicion; the same again and again is a reason to drain."""
        times = gpu.repeats.setdefault(key, deque(maxlen=self._config.repeats))
        times.extend([now] * min(count, self._config.repeats))
        recent = [at for at in times if now - at <= self._config.repeat_window_s]
        return "draining" if len(recent) >= self._config.repeats else "suspect"

    @staticmethod
    def _clear_snapshots(gpu: _Gpu, seen: Observation, now: float) -> None:
        """A source's new word replaces its last one; events that it told of stay."""
        for (source, code), claim in gpu.claims.items():
            is_last_word = source == seen.source and claim.snapshot and code != str(seen.code)
            if is_last_word and claim.cleared_at is None:
                claim.cleared_at = now

    @staticmethod
    def _clear_kernel_log(gpu: _Gpu, now: float) -> None:
        """The driver says that nothing is to be done any more."""
        for (source, _), claim in gpu.claims.items():
            if source == "kernel_log" and claim.cleared_at is None:
                claim.cleared_at = now

    # verdicts --------------------------------------------------------------------------------

    def _settle(self, name: str, gpu: _Gpu, now: float) -> list[Verdict]:
        self._drop_old_claims(gpu, now)
        before = gpu.verdict
        ranked = max(
            gpu.claims.items(), key=lambda each: (BADNESS[each[1].state], each[1].at), default=None
        )
        worst = ranked[1] if ranked is not None else None
        state: GpuState = worst.state if worst is not None else "healthy"
        reason, action = (worst.text, worst.action) if worst is not None else ("", "")
        until = before.quarantined_until
        # A worker that was killed says nothing of the hardware.
        is_hardware = ranked is not None and ranked[0][0] != "worker"
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

    def _drop_old_claims(self, gpu: _Gpu, now: float) -> None:
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

    def _quarantine(self, gpu: _Gpu, now: float) -> float | None:
        """Count a fall; end of the quarantine if it was one too many."""
        config = self._config
        gpu.falls.append(now)
        while gpu.falls and now - gpu.falls[0] > config.flap_window_s:
            gpu.falls.popleft()
        if len(gpu.falls) < config.flaps:
            return None
        length = min(config.quarantine_s * 2.0 ** min(gpu.quarantines, 32), config.quarantine_max_s)
        gpu.quarantines += 1
        return now + length


def left_out(verdicts: Iterable[Verdict]) -> frozenset[str]:
    """GPUs that should not train though their worker lives."""
    return frozenset(v.gpu for v in verdicts if BADNESS[v.state] >= BADNESS["repairing"])


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
