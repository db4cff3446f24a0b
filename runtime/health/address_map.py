"""Which GPU of the run sits at which PCI address, across reboots and renumbering. Pure.

A GPU is known by its UUID or its board's serial number; the address is only where it was seen last.
GPUs that the config does not pin get the host's slots in the order of their addresses when first
seen, and keep them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from runtime.health.observation import Identity, Observation, normal_pci


class AddressMap:
    """GPU ids by UUID, serial number and address.

    Args:
        gpus: the host's GPU ids, in the order of its devices.
        pinned: UUID or serial number -> GPU id, from the config.
        known: what `remember` gave when the host was last up.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        pinned: Mapping[str, str] | None = None,
        known: Mapping[str, str] | None = None,
    ) -> None:
        ours = frozenset(gpus)
        self._gpus = tuple(gpus)
        self._by_name: dict[str, str] = {}
        for names in (known or {}, pinned or {}):
            self._by_name |= {_plain(name): gpu for name, gpu in names.items() if gpu in ours}
        # A pin may name an address too: a fixed machine, or one without UUIDs.
        self._by_pci: dict[str, str] = {
            normal_pci(name): gpu
            for name, gpu in (pinned or {}).items()
            if normal_pci(name) and gpu in ours
        }

    def learn(self, identities: Iterable[Identity], *, complete: bool = True) -> None:
        """Take who sits where now.

        complete: these are all of the host's devices. A board that nobody knows then takes the
        slot whose board is not among them: first that at its own address (it was swapped), else
        the first that nobody was seen in yet.
        """
        ordered = sorted(identities, key=lambda each: each.pci)
        placed: dict[str, Identity] = {}
        for identity in ordered:
            gpu = self._named(identity)
            if gpu is not None:
                placed[gpu] = identity
        for identity in ordered:
            if complete and identity not in placed.values():
                gpu = self._free_slot(identity, placed)
                if gpu is not None:
                    placed[gpu] = identity
        for gpu, identity in placed.items():
            self._place(gpu, identity)

    def _free_slot(self, identity: Identity, placed: Mapping[str, Identity]) -> str | None:
        here = self._by_pci.get(identity.pci)
        if here is not None and here not in placed:
            return here
        named = set(self._by_name.values())
        free = [gpu for gpu in self._gpus if gpu not in placed]
        unseen = [gpu for gpu in free if gpu not in named and gpu not in self._by_pci.values()]
        if unseen:
            return unseen[0]
        return free[0] if free and len(placed) < len(self._gpus) and _name_of(identity) else None

    def _place(self, gpu: str, identity: Identity) -> None:
        for name in (_plain(identity.uuid), _plain(identity.serial)):
            if name:
                self._by_name[name] = gpu
        if identity.pci:
            self._by_pci = {at: who for at, who in self._by_pci.items() if who != gpu}
            self._by_pci[identity.pci] = gpu

    def gpu_of(self, *, pci: str = "", uuid: str = "") -> str | None:
        """The GPU at an address or of a UUID; None when it is not one of ours."""
        found = self._by_name.get(_plain(uuid)) if uuid else None
        return found or self._by_pci.get(normal_pci(pci) if pci else "")

    def locate(self, name: str) -> str | None:
        """The GPU that is called so: by rack/slot, UUID, serial number or PCI address."""
        return name if name in self._gpus else self.gpu_of(pci=name, uuid=name)

    def placed(self, observation: Observation) -> Observation:
        """The observation with the run's GPU id, or with None when it is no GPU of ours."""
        gpu = observation.gpu or ""
        if gpu in self._gpus:
            return observation
        found = self.gpu_of(pci=observation.pci or gpu, uuid=gpu)
        return msgspec.structs.replace(observation, gpu=found)

    def remember(self) -> dict[str, str]:
        """UUIDs and serial numbers with their GPU ids, to be kept over a restart."""
        return dict(self._by_name)

    def _named(self, identity: Identity) -> str | None:
        for name in (identity.uuid, identity.serial):
            gpu = self._by_name.get(_plain(name))
            if gpu is not None:
                return gpu
        return None


def _name_of(identity: Identity) -> str:
    return _plain(identity.uuid) or _plain(identity.serial)


def _plain(name: str) -> str:
    """A UUID or serial number in one spelling; some exporters leave out `GPU-`. Blanked: ""."""
    plain = name.strip().lower().removeprefix("gpu-")
    return "" if not plain.strip("0-") else plain
