"""The exchange of reports between the launchers of a run's nodes: node 0 relays them and serves the ranks' store.

No shared file system is needed. A caller is answered only after it has proved that it knows the run's secret
(`meeting.py`). One thread serves all connections in an event loop; a peer that neither sends nor reads delays no other
peer and is dropped.
"""

import asyncio
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress

import msgspec

from shardwright.io import RunFailed, Stopped
from shardwright.launch.failure_report import NodeReport, shifted
from shardwright.launch.heartbeat import START_UP_S
from shardwright.launch.meeting import ANSWER_S, REMEDY, Place, admit, call, framed, place_of, read_frame
from shardwright.launch.nodes import Nodes
from shardwright.launch.store import RankCall, Values

_RETRY_S = 0.5
_POLL_S = 0.05
_UNREACHED_S = 3.0
_PATIENCE_S = 30.0
"""Seconds that a node waits for node 0 before it prints a message about it."""
_HOW_TO_MEET = f"start the command there with the same --rendezvous and output, on a shared folder, or {REMEDY}"
_MAX_STRANGERS = 128
"""Limit of callers that have not proved the secret yet; beyond it, the oldest one is dropped."""
_REPORTS: msgspec.json.Decoder[NodeReport] = msgspec.json.Decoder(NodeReport)
_FIRST: msgspec.json.Decoder[NodeReport | RankCall] = msgspec.json.Decoder(NodeReport | RankCall)
_ENDS = (OSError, EOFError, ValueError, RecursionError, msgspec.MsgspecError)
"""Errors that end a connection: it breaks, or its peer is too slow or sends something invalid."""
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Exchange:
    """The connections of this node's launcher to the other launchers; with a single node it sends nothing."""

    def __init__(self, nodes: Nodes, run: str, start: int = 0, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._nodes = nodes
        self.launch = "" if nodes.rank else secrets.token_hex()
        """The random name of node 0's launch; on another node, empty until it has joined."""
        self._last_report = NodeReport(node=nodes.rank, run=run, start=start, launch=self.launch)
        self._heard: dict[int, NodeReport] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._loop = loop
        # From here on: used only in the event loop's thread, and so without a lock.
        self._peers: list[asyncio.StreamWriter] = []
        self._sending = set[asyncio.Task[None]]()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._values = Values()
        self._server: asyncio.Server | None = None
        self.place: Place | None = None
        """The address at which the ranks meet, and the secret; None with a single node."""
        self.address_here = "127.0.0.1"
        """The address at which this node reaches the others."""

    def tell(self, report: NodeReport) -> None:
        """Send a report to all other launchers, now or once the connection to them exists."""
        with self._changed:
            run, start, launch = self._last_report.run, self._last_report.start, self._last_report.launch
            stamped = msgspec.structs.replace(report, run=run, start=start, launch=launch, now_s=time.monotonic())
            self._last_report = stamped
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self._send(stamped, self._peers))

    @property
    def start(self) -> int:
        """Return how often the ranks of all nodes were restarted: the highest number that any node has reported."""
        with self._changed:
            return self._last_report.start

    def heard(self) -> tuple[NodeReport, ...]:
        """Return the last report of each other node that has sent one."""
        with self._changed:
            return tuple(self._heard.values())

    def gather(self, last: NodeReport, wait_s: float) -> tuple[NodeReport, ...]:
        """Send a last report, and return all nodes' last reports once all have ended or `wait_s` has passed.

        They are in the order of the nodes. A node that sent none has an empty report; `gone` is set if the connection
        to its launcher broke. The wait is short if some launcher was never reached.
        """
        self.tell(last)
        with self._changed:
            reached = len(self._heard) == self._nodes.count - 1
            wait_s = wait_s if reached else min(wait_s, _UNREACHED_S)
            self._changed.wait_for(lambda: self._closed or self._all_ended(), wait_s)
            heard = self._heard | {last.node: self._last_report}
            return tuple(heard.get(node, NodeReport(node=node)) for node in range(self._nodes.count))

    def _all_ended(self) -> bool:
        return sum(report.ended or report.gone for report in self._heard.values()) == self._nodes.count - 1

    async def listen(self, server: socket.socket, place: Place) -> None:
        """Answer callers at node 0 until the exchange is closed."""
        self.place, self.address_here = place, server.getsockname()[0]
        self._server = await asyncio.start_server(lambda *line: self._answer(line), sock=server.dup())

    async def _answer(self, line: Line) -> None:
        reader, writer = line
        with _ended_line(writer):
            async with asyncio.timeout(ANSWER_S):
                with self._as_stranger(writer):
                    assert self.place is not None
                    await admit(reader, writer, self.place.secret)
                first = _FIRST.decode(await read_frame(reader))
            if isinstance(first, NodeReport):
                await self._take(line, first)
            elif first.launch == self.launch:
                await self._values.serve(reader, writer)

    @contextmanager
    def _as_stranger(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        if len(self._strangers) >= _MAX_STRANGERS:
            first = next(iter(self._strangers))
            del self._strangers[first]
            first.transport.abort()
        self._strangers[writer] = None
        try:
            yield
        finally:
            self._strangers.pop(writer, None)

    async def join(self, stopping: Callable[[], bool]) -> None:
        """Call node 0 until this node is in the same launch.

        Raises RunFailed if that takes longer than START_UP_S, Stopped if `stopping` returns True.
        """
        why, said, meeting = "it belongs to another launch", False, None
        began_s = next_s = time.monotonic()
        while not self.launch:
            now_s = time.monotonic()
            if stopping():
                raise Stopped("stopped before node 0 was reached: run the same command again")
            if now_s - began_s > START_UP_S:
                raise RunFailed(f"node 0 was not reached within {START_UP_S:g} s ({why}): {_HOW_TO_MEET}")
            if now_s - began_s > _PATIENCE_S and not said:
                print(f"node 0 is not reached yet ({why}): {_HOW_TO_MEET}", file=sys.stderr, flush=True)
                said = True
            if now_s >= next_s and (meeting is None or meeting.done()):
                next_s = now_s + _RETRY_S
                try:
                    self.place = place_of(self._nodes)
                    line = await asyncio.to_thread(call, self.place)
                    self.address_here = line.getsockname()[0]
                    meeting = asyncio.create_task(self._take_call(line))
                except OSError as error:
                    why = error.strerror or str(error)
            await asyncio.sleep(_POLL_S)

    async def _take_call(self, line: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=line)
        with _ended_line(writer):
            await self._take((reader, writer))
        with self._changed:
            if 0 in self._heard:
                self._closed = True  # without node 0, nobody passes anything on
                self._changed.notify_all()

    async def _take(self, line: Line, first: NodeReport | None = None) -> None:
        """Send a peer this node's last report, and note the peer's reports until the connection breaks."""
        reader, writer = line
        node: int | None = None
        writer.transport.set_write_buffer_limits(0)  # so that draining it means sending everything
        self._peers.append(writer)
        self._send(self._last_report, [writer])
        try:
            while True:
                report = first or _REPORTS.decode(await read_frame(reader))
                first = None
                self._catch_up(report)
                if (report.run, report.start) == (self._last_report.run, self._last_report.start):
                    node = report.node if node is None else node
                    self._note(shifted(report, time.monotonic()), writer)
        finally:
            self._peers.remove(writer)
            if node is not None and not self._closed and not self._heard.get(node, self._last_report).ended:
                gone = NodeReport(node=node, run=self._last_report.run, start=self._last_report.start, gone=True)
                self._note(gone, writer)

    def _catch_up(self, report: NodeReport) -> None:
        """Adopt a higher number of restarts that a node reports: this launcher was started later than that."""
        with self._changed:
            behind = report.run == self._last_report.run and report.start > self._last_report.start
            if not behind or self._last_report.failed or self._last_report.ended:
                return
            self._last_report, self._heard = msgspec.structs.replace(self._last_report, start=report.start), {}
        self._send(self._last_report, self._peers)

    def _note(self, report: NodeReport, sender: asyncio.StreamWriter) -> None:
        if report.node == self._nodes.rank or not 0 <= report.node < self._nodes.count:
            return
        with self._changed:
            known = self._heard.get(report.node) if report.gone else None  # its earlier reports still count
            noted = msgspec.structs.replace(known, gone=True) if known else report
            self._heard[report.node] = noted
            self.launch = self.launch or noted.launch  # which only node 0 sets
            self._changed.notify_all()
        if self._nodes.rank == 0:
            self._send(noted, [peer for peer in self._peers if peer is not sender])

    def _send(self, report: NodeReport, peers: list[asyncio.StreamWriter]) -> None:
        for peer in peers:
            peer.write(framed(report))
            task = asyncio.get_running_loop().create_task(_sent(peer))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def close(self) -> None:
        """Close the connections after the last reports are sent, or their time limit has passed."""
        with self._changed:
            self._closed = True
        if self._server is not None:
            self._server.close()
        if self._sending:
            await asyncio.wait(self._sending)
        for peer in self._peers:
            peer.close()


async def _sent(peer: asyncio.StreamWriter) -> None:
    """Wait until a peer has received its messages; close the connection if the peer does not read."""
    try:
        async with asyncio.timeout(ANSWER_S):
            await peer.drain()
    except OSError:  # includes TimeoutError; a peer that is gone is noticed by the task that reads from it
        peer.transport.abort()


@contextmanager
def _ended_line(writer: asyncio.StreamWriter) -> Iterator[None]:
    # At its end, the event loop cancels what still waits: Python 3.11's streams print a traceback of a cancelled task.
    with suppress(*_ENDS, asyncio.CancelledError):
        try:
            yield
        finally:
            writer.close()


@contextmanager
def exchange(
    nodes: Nodes, run: str, start: int = 0, stopping: Callable[[], bool] = lambda: False
) -> Iterator[Exchange]:
    """Yield the exchange of the launch named `run` on all nodes, whose ranks were started `start` times before.

    A node other than node 0 waits until node 0 is in the same launch. Raises RunFailed if that does not happen, Stopped
    if `stopping` returns True before.
    """
    if nodes.count == 1:
        yield Exchange(nodes, run, start)
        return
    with _event_loop() as loop:
        made = Exchange(nodes, run, start, loop)
        if nodes.rank == 0:
            assert nodes.meeting is not None and nodes.meeting.server is not None
            asyncio.run_coroutine_threadsafe(made.listen(nodes.meeting.server, place_of(nodes)), loop).result()
        else:
            joined = asyncio.run_coroutine_threadsafe(made.join(stopping), loop)
            while not joined.done():  # Python handles a signal only when this thread runs
                futures.wait([joined], _POLL_S)
            joined.result()
        try:
            yield made
        finally:
            asyncio.run_coroutine_threadsafe(made.close(), loop).result()


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a separate thread."""
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        runner.close()  # cancels what still runs
