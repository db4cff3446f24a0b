"""A browser session of the dashboard without a browser: speaks Streamlit's websocket protocol.

It does what the page's script does: opens the page, then asks for each live part again whenever its
interval is over, and reads what comes. It draws nothing, so twenty of them cost the machine little.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import websockets
from websockets.typing import Subprotocol

MAX_MESSAGE_BYTES = 64 * 2**20
ANSWER_DEADLINE_S = 20.0
# ForwardMsg.ScriptFinishedStatus
WHOLE_RUN, FRAGMENT_RUN = 0, 3


@dataclass
class Ticks:
    """What sessions measured: seconds from asking to the end of the answer, bytes of it."""

    seconds: list[float] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def clear(self) -> None:
        self.seconds.clear()
        self.num_bytes.clear()


class Session:
    """One page of one viewer.

    Args:
        address: `127.0.0.1:8501`. query: of the page's address, without the question mark.
    """

    def __init__(self, address: str, query: str) -> None:
        self._uri = f"ws://{address}/_stcore/stream"
        self._query = query
        self._socket: Any = None
        self._page_hash = ""
        self.pages: dict[str, str] = {}
        self.intervals: dict[str, float] = {}

    async def open(self, page: str) -> float:
        """Connect and load `page` (its name in the address); returns the seconds it took."""
        self._socket = await websockets.connect(
            self._uri, subprotocols=[Subprotocol("streamlit")], max_size=MAX_MESSAGE_BYTES
        )
        return await self._whole_run(page_name=page)

    async def switch(self, page: str) -> float:
        """Go to another page, as a click in the navigation does; seconds until it is all here."""
        return await self._whole_run(page_script_hash=self.pages[page])

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def tick_until(self, stop: asyncio.Event, ticks: Ticks, phase: float) -> None:
        """Keep every live part up to date until `stop`; every answer is noted in `ticks`.

        phase: 0 to 1, where in its interval this viewer begins; people do not come all at once.
        """
        now = time.monotonic()
        due = {part: now + phase * interval for part, interval in self.intervals.items()}
        while not stop.is_set():
            part = min(due, key=lambda one: due[one])
            wait_s = due[part] - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            began = time.monotonic()
            await self._ask(fragment_id=part, page_script_hash=self._page_hash, is_auto_rerun=True)
            num_bytes = await self._answer(FRAGMENT_RUN)
            ticks.seconds.append(time.monotonic() - began)
            ticks.num_bytes.append(num_bytes)
            due[part] = max(due[part] + self.intervals[part], time.monotonic())

    async def _whole_run(self, **client_state: Any) -> float:
        self.intervals.clear()
        began = time.monotonic()
        await self._ask(**client_state)
        await self._answer(WHOLE_RUN)
        return time.monotonic() - began

    async def _ask(self, **client_state: Any) -> None:
        from streamlit.proto.BackMsg_pb2 import BackMsg
        from streamlit.proto.ClientState_pb2 import ClientState

        state = ClientState(query_string=self._query, **client_state)
        await self._socket.send(BackMsg(rerun_script=state).SerializeToString())

    async def _answer(self, status: int) -> int:
        """Read until a script run ends with `status`; returns the bytes that came."""
        from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

        num_bytes = 0
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            while True:
                data = await self._socket.recv()
                num_bytes += len(data)
                message = ForwardMsg.FromString(data)
                kind = message.WhichOneof("type")
                if kind == "script_finished" and message.script_finished == status:
                    return num_bytes
                if kind == "auto_rerun":
                    self.intervals[message.auto_rerun.fragment_id] = message.auto_rerun.interval
                elif kind == "navigation":
                    self._page_hash = message.navigation.page_script_hash
                    for page in message.navigation.app_pages:
                        self.pages[page.url_pathname] = page.page_script_hash
