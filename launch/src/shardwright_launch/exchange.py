"""What the launchers of a run's nodes tell one another: node 0 listens one port above the ranks, and passes all on.

No shared file system is needed. A run never fails for want of this exchange: a launcher that cannot be reached is only
missing from the report. Every message is one line of JSON; a peer that sends anything else is dropped.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from shardwright_formats.io.errors import BadInput
from shardwright_launch.failure_report import NodeReport, shifted
from shardwright_launch.heartbeat import START_UP_S
from shardwright_launch.nodes import Address, Nodes

_MAX_MESSAGE_BYTES = 4 * 1024 * 1024
_RETRY_S = 0.5
_SEND_S = 5.0
_UNREACHED_S = 3.0
_REPORTS: msgspec.json.Decoder[NodeReport] = msgspec.json.Decoder(NodeReport)


class Exchange:
    """This node's line to the others; on a single node it is silent."""

    def __init__(self, nodes: Nodes, run: str, start: int = 0) -> None:
        self._nodes = nodes
        self._own = NodeReport(node=nodes.rank, run=run, start=start)
        self._heard: dict[int, NodeReport] = {}
        self._peers: list[socket.socket] = []
        self._changed = threading.Condition()
        self._closed = False

    def tell(self, report: NodeReport) -> None:
        """Tell all other launchers, now or, where the line to them is not up yet, once it is."""
        with self._changed:
            run, start = self._own.run, self._own.start
            self._own = msgspec.structs.replace(report, run=run, start=start, now_s=time.monotonic())
            self._send(self._own, self._peers)

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

    def listen(self, server: socket.socket) -> None:
        """Node 0: take the other launchers' calls until `server` is closed."""
        with suppress(OSError):
            while True:
                peer, _ = server.accept()
                threading.Thread(target=self._take, args=(peer,), daemon=True).start()

    def call(self, address: Address) -> None:
        """Another node: call node 0 until it answers, then take what it tells."""
        until_s = time.monotonic() + START_UP_S
        while time.monotonic() < until_s and not self._closed:
            try:
                peer = socket.create_connection((address.host, address.port + 1), timeout=_SEND_S)
            except OSError:
                time.sleep(_RETRY_S)
                continue
            self._take(peer)
            with self._changed:
                if 0 in self._heard:
                    self._closed = True  # without node 0 there is nobody to pass anything on
                    self._changed.notify_all()
                    return
            time.sleep(_RETRY_S)  # it was node 0's launch before this one

    def _take(self, peer: socket.socket) -> None:
        """Tell a peer what this node has to say, and note what it says until the line breaks."""
        node: int | None = None
        with self._changed:
            self._peers.append(peer)
            self._send(self._own, [peer])
        with suppress(OSError, msgspec.DecodeError), peer, peer.makefile("rb") as lines:
            peer.settimeout(None)
            while line := lines.readline(_MAX_MESSAGE_BYTES):
                report = _REPORTS.decode(line)
                self._catch_up(report)
                if (report.run, report.start) == (self._own.run, self._own.start):
                    node = report.node if node is None else node
                    self._note(shifted(report, time.monotonic()), peer)
        with self._changed:
            self._peers.remove(peer)
        if node is not None and not self._closed and not self._heard.get(node, self._own).ended:
            own = self._own
            self._note(NodeReport(node=node, run=own.run, start=own.start, gone=True), peer)

    def _catch_up(self, report: NodeReport) -> None:
        """Take the number of starts from a node that has seen more of them: this launcher is new, it came back."""
        with self._changed:
            behind = report.run == self._own.run and report.start > self._own.start
            if behind and not (self._own.failed or self._own.ended):
                self._own, self._heard = msgspec.structs.replace(self._own, start=report.start), {}
                self._send(self._own, self._peers)

    def _note(self, report: NodeReport, sender: socket.socket) -> None:
        if report.node == self._nodes.rank or not 0 <= report.node < self._nodes.count:
            return
        with self._changed:
            known = self._heard.get(report.node)
            gone = report.gone and known is not None  # what it told before counts still
            self._heard[report.node] = msgspec.structs.replace(known, gone=True) if gone and known else report
            if self._nodes.rank == 0:
                self._send(self._heard[report.node], [peer for peer in self._peers if peer is not sender])
            self._changed.notify_all()

    def _send(self, report: NodeReport, peers: list[socket.socket]) -> None:
        line = msgspec.json.encode(report) + b"\n"
        for peer in peers:
            with suppress(OSError):  # a peer that is gone is found by the thread that reads from it
                peer.sendall(line)

    def close(self) -> None:
        """Hang up."""
        with self._changed:
            self._closed = True
            for peer in self._peers:
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)


@contextmanager
def exchange(nodes: Nodes, run: str, start: int = 0) -> Iterator[Exchange]:
    """The exchange of the launch that is called `run` on all nodes, whose ranks were started `start` times before.

    BadInput where node 0 cannot listen at its port.
    """
    made, address = Exchange(nodes, run, start), nodes.address
    if nodes.count == 1 or address is None:
        yield made
        return
    server = _listening(address) if nodes.rank == 0 else None
    target, argument = (made.listen, server) if server is not None else (made.call, address)
    threading.Thread(target=target, args=(argument,), daemon=True).start()
    try:
        yield made
    finally:
        if server is not None:
            server.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread that accepts
            server.close()
        made.close()


def _listening(address: Address) -> socket.socket:
    port = address.port + 1
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise BadInput("--rendezvous", f"port {port} cannot be listened at ({why})", "choose another port") from None
