"""What the launchers of a run's nodes tell one another: node 0 listens and passes all on, and serves the ranks' store.

No shared file system is needed for it. A caller is answered once it has proved the secret of the run (`meeting.py`).
One thread runs all lines in one event loop: a peer that neither speaks nor reads holds up nobody and is dropped.
"""

import asyncio
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import msgspec

from shardwright_formats.io.errors import RunFailed, Stopped
from shardwright_launch.failure_report import NodeReport, shifted
from shardwright_launch.heartbeat import START_UP_S
from shardwright_launch.meeting import ANSWER_S, REMEDY, Place, admit, call, framed, place_of, read_frame
from shardwright_launch.nodes import Nodes
from shardwright_launch.store import RankCall, Values

_RETRY_S = 0.5
_POLL_S = 0.05
_UNREACHED_S = 3.0
_PATIENCE_S = 30.0
"""How long a node waits for node 0 before it says so."""
_HOW_TO_MEET = f"start the command there with the same --rendezvous and output, on a shared folder, or {REMEDY}"
_MAX_STRANGERS = 128
"""How many callers may be about to prove the secret at once; of more, the first is dropped."""
_REPORTS: msgspec.json.Decoder[NodeReport] = msgspec.json.Decoder(NodeReport)
_FIRST: msgspec.json.Decoder[NodeReport | RankCall] = msgspec.json.Decoder(NodeReport | RankCall)
_ENDS = (OSError, EOFError, ValueError, RecursionError, msgspec.MsgspecError)
"""How a line ends: it breaks, its peer is too slow, or what the peer says makes no sense."""
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Exchange:
    """This node's line to the others; on a single node it is silent."""

    def __init__(self, nodes: Nodes, run: str, start: int = 0, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._nodes = nodes
        self.launch = "" if nodes.rank else secrets.token_hex()
        """The random name of node 0's launch; another node has it once it has joined."""
        self._own = NodeReport(node=nodes.rank, run=run, start=start, launch=self.launch)
        self._heard: dict[int, NodeReport] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._loop = loop
        # What follows is the loop's alone.
        self._peers: list[asyncio.StreamWriter] = []
        self._sending = set[asyncio.Task[None]]()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._values = Values()
        self._server: asyncio.Server | None = None
        self.place: Place | None = None
        """Where the ranks meet; None on a single node."""
        self.address_here = "127.0.0.1"
        """The address by which this node meets the others."""

    def tell(self, report: NodeReport) -> None:
        """Tell all other launchers, now or, where the line to them is not up yet, once it is."""
        with self._changed:
            run, start, launch = self._own.run, self._own.start, self._own.launch
            told = msgspec.structs.replace(report, run=run, start=start, launch=launch, now_s=time.monotonic())
            self._own = told
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self._send(told, self._peers))

    @property
    def start(self) -> int:
        """How often the ranks of all nodes were started anew before, as the node says that has seen most of it."""
        with self._changed:
            return self._own.start

    def heard(self) -> tuple[NodeReport, ...]:
        """The last that each other node has told."""
        with self._changed:
            return tuple(self._heard.values())

    def gather(self, own: NodeReport, wait_s: float) -> tuple[NodeReport, ...]:
        """This node's last report and those of all others by number, waited for `wait_s` at most, or until all are in.

        Of a node that told nothing there is an empty one; `gone` is set where the line to its launcher broke. Where
        some launcher was not reached at all, the wait is short.
        """
        self.tell(own)
        with self._changed:
            reached = len(self._heard) == self._nodes.count - 1
            wait_s = wait_s if reached else min(wait_s, _UNREACHED_S)
            self._changed.wait_for(lambda: self._closed or self._all_ended(), wait_s)
            heard = self._heard | {own.node: self._own}
            return tuple(heard.get(node, NodeReport(node=node)) for node in range(self._nodes.count))

    def _all_ended(self) -> bool:
        return sum(report.ended or report.gone for report in self._heard.values()) == self._nodes.count - 1

    async def listen(self, server: socket.socket, place: Place) -> None:
        """Node 0: answer those who call, until the exchange is closed."""
        self.place, self.address_here = place, server.getsockname()[0]
        self._server = await asyncio.start_server(
            lambda reader, writer: self._answer((reader, writer)), sock=server.dup()
        )

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

    def join(self, stopping: Callable[[], bool]) -> None:
        """Another node: call node 0 until it is in the same launch, and leave the line to the loop.

        Raises RunFailed where that takes longer than START_UP_S, Stopped when `stopping` says so.
        """
        assert self._loop is not None
        began_s, why, said = time.monotonic(), "its launch is another", False
        until_s = began_s + START_UP_S
        while time.monotonic() < until_s and not self.launch:
            try:
                self.place = place_of(self._nodes)
                line = call(self.place)
            except OSError as error:
                why = error.strerror or str(error)
            else:
                self.address_here = line.getsockname()[0]
                taken = asyncio.run_coroutine_threadsafe(self._take_call(line), self._loop)
                self._meet(taken, until_s, stopping)
            if not self.launch and not said and time.monotonic() - began_s > _PATIENCE_S:
                print(f"node 0 is not met yet ({why}): {_HOW_TO_MEET}", file=sys.stderr, flush=True)
                said = True
            _pause(_RETRY_S, stopping)
        if not self.launch:
            raise RunFailed(f"node 0 was not met within {START_UP_S:g} s ({why}): {_HOW_TO_MEET}")

    def _meet(self, taken: "Future[None]", until_s: float, stopping: Callable[[], bool]) -> None:
        """Wait until node 0 names its launch, or the line ends: it was of the launch before."""
        while not taken.done() and not self.launch and time.monotonic() < until_s:
            with self._changed:
                self._changed.wait_for(lambda: 0 in self._heard, _POLL_S)
                self.launch = self._heard[0].launch if 0 in self._heard else ""
            _pause(0.0, stopping)

    async def _take_call(self, line: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=line)
        with _ended_line(writer):
            await self._take((reader, writer))
        with self._changed:
            if 0 in self._heard:
                self._closed = True  # without node 0 there is nobody to pass anything on
                self._changed.notify_all()

    async def _take(self, line: Line, first: NodeReport | None = None) -> None:
        """Tell a peer what this node has to say, and note what it says until the line breaks."""
        reader, writer = line
        node: int | None = None
        writer.transport.set_write_buffer_limits(0)  # so that to drain it is to send all
        self._peers.append(writer)
        self._send(self._own, [writer])
        try:
            while True:
                report = first or _REPORTS.decode(await read_frame(reader))
                first = None
                self._catch_up(report)
                if (report.run, report.start) == (self._own.run, self._own.start):
                    node = report.node if node is None else node
                    self._note(shifted(report, time.monotonic()), writer)
        finally:
            self._peers.remove(writer)
            if node is not None and not self._closed and not self._heard.get(node, self._own).ended:
                own = self._own
                self._note(NodeReport(node=node, run=own.run, start=own.start, gone=True), writer)

    def _catch_up(self, report: NodeReport) -> None:
        """Take the number of starts from a node that has seen more of them: this launcher is new, it came back."""
        with self._changed:
            behind = report.run == self._own.run and report.start > self._own.start
            if not behind or self._own.failed or self._own.ended:
                return
            self._own, self._heard = msgspec.structs.replace(self._own, start=report.start), {}
        self._send(self._own, self._peers)

    def _note(self, report: NodeReport, sender: asyncio.StreamWriter) -> None:
        if report.node == self._nodes.rank or not 0 <= report.node < self._nodes.count:
            return
        with self._changed:
            known = self._heard.get(report.node)
            gone = report.gone and known is not None  # what it told before counts still
            noted = msgspec.structs.replace(known, gone=True) if gone and known else report
            self._heard[report.node] = noted
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
        """Hang up, once what was told last has been sent or had its time."""
        with self._changed:
            self._closed = True
        if self._server is not None:
            self._server.close()
        if self._sending:
            await asyncio.wait(self._sending)
        for peer in self._peers:
            peer.close()


async def _sent(peer: asyncio.StreamWriter) -> None:
    """Wait until a peer has taken what it was sent; hang up on one that does not read."""
    try:
        async with asyncio.timeout(ANSWER_S):
            await peer.drain()
    except OSError:  # TimeoutError among them; a peer that is gone is found by the task that reads from it
        peer.transport.abort()


@contextmanager
def _ended_line(writer: asyncio.StreamWriter) -> Iterator[None]:
    with suppress(*_ENDS):
        try:
            yield
        finally:
            writer.close()


def _pause(pause_s: float, stopping: Callable[[], bool]) -> None:
    until_s = time.monotonic() + pause_s
    while not stopping():
        if time.monotonic() >= until_s:
            return
        time.sleep(_POLL_S)
    raise Stopped("stopped before node 0 was met: run the same command again")


@contextmanager
def exchange(
    nodes: Nodes, run: str, start: int = 0, stopping: Callable[[], bool] = lambda: False
) -> Iterator[Exchange]:
    """The exchange of the launch that is called `run` on all nodes, whose ranks were started `start` times before.

    Another node than node 0 waits until that is in the same launch. Raises RunFailed where it does not come, Stopped
    when `stopping` says so before.
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
            made.join(stopping)
        try:
            yield made
        finally:
            asyncio.run_coroutine_threadsafe(made.close(), loop).result()


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread of its own."""
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        runner.close()  # which cancels what still runs
