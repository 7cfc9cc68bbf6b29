"""The request buffer: where the responses of a rollout wait, and the room that workers have for them.

`dispatch.Dispatcher` owns one buffer and the rooms, and is the only one to call them; the invariants stand there.
Three buffers behind one interface: `DividedBuffer` (Seer 4.3), `StickyBuffer` (the same where keys and values cannot
move) and `BoundBuffer` (veRL). What a heap sorts by changes while it is in the heap, so entries are checked when they
come up (lazy deletion): every call is O(log n).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import islice
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from paceline.errors import EngineError
from paceline.planning.length import LengthEstimator

_LEAST_LIMIT = 64  # entries that a lazy heap may always hold


class BufferedGroup:
    """A group's constants, and its place in the buffer."""

    __slots__ = (
        "entry",
        "is_guarded",
        "max_tokens",
        "num_unfinished",
        "number",
        "order",
        "prompt_tokens",
        "room",
        "served_tokens",
        "waiting",
    )

    def __init__(
        self, number: int, order: int, prompt_tokens: int, max_tokens: int, num_unfinished: int
    ) -> None:
        self.number = number
        self.order = order
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        # Divided rollout:
        self.waiting: list[tuple[int, int, BufferedResponse]] = []  # heap by rank and sample, without probes
        self.entry: _Entry[BufferedGroup] | None = None
        self.is_guarded = False  # in the heap by tokens ordered, once
        self.served_tokens = 0  # ordered so far
        # Bound to a worker:
        self.num_unfinished = num_unfinished
        self.room: Room | None = None


class BufferedResponse:
    """A response and, while it waits, the chunk that it will run next."""

    __slots__ = (
        "chunk_tokens",
        "failed_in",
        "group",
        "home",
        "num_blocks",
        "num_tokens",
        "order",
        "rank",
        "sample",
    )

    def __init__(self, group: BufferedGroup, sample: int, rank: int, order: int) -> None:
        self.group = group
        self.sample = sample
        self.rank = rank  # within the group, the lowest first
        self.order = order  # of submission
        self.num_tokens = 0
        self.chunk_tokens = 0
        self.num_blocks = 0
        self.home: Room | None = None  # where its last chunk ran, be it up or not
        self.failed_in: Room | None = None  # where its last chunk failed, be it up or not


class Room:
    """A worker's KV blocks, and what runs in them."""

    __slots__ = (
        "entry",
        "free_blocks",
        "groups",
        "line",
        "max_concurrency",
        "num_blocks",
        "num_bound",
        "order",
        "running",
        "worker",
    )

    def __init__(self, worker: str, order: int, num_blocks: int, max_concurrency: int) -> None:
        self.worker = worker
        self.order = order
        self.num_blocks = num_blocks
        self.free_blocks = num_blocks
        self.max_concurrency = max_concurrency
        self.running: set[int] = set()  # numbers of assignments
        self.entry: _Entry[Room] | None = None
        # With responses or groups bound to it:
        self.line: list[tuple[int, BufferedResponse]] = []  # heap by order: what waits for this worker
        self.groups: list[BufferedGroup] = []
        self.num_bound = 0  # responses that are not finished

    def has_room(self, num_blocks: int) -> bool:
        """Whether one more response with so many blocks may run."""
        return num_blocks <= self.free_blocks and len(self.running) < self.max_concurrency


_Item = TypeVar("_Item", BufferedGroup, Room)
_Entry: TypeAlias = tuple[int, int, _Item]  # key, order, item


class _LazyHeap(Generic[_Item]):
    """Items by (key, order) where keys change: an entry counts if it is its item's `entry`. Others are dropped when
    they come up, and all of them when they have become the larger part.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry[_Item]] = []
        self._limit = _LEAST_LIMIT

    def put(self, item: _Item, key: int) -> None:
        """Enter the item, or move it to a new key."""
        item.entry = entry = (key, item.order, item)
        heappush(self._heap, entry)
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if entry[2].entry is entry]
            heapify(self._heap)
            self._limit = max(2 * len(self._heap), _LEAST_LIMIT)

    def first(self) -> _Item | None:
        """The item with the lowest key, which stays."""
        heap = self._heap
        while heap:
            item = heap[0][2]
            if item.entry is heap[0]:
                return item
            heappop(heap)
        return None

    def lowest(self, count: int) -> list[_Item]:
        """The items with the lowest keys, from the lowest on; they stay. Amortised O(count log n)."""
        found: list[_Entry[_Item]] = []
        while len(found) < count and self.first() is not None:
            found.append(heappop(self._heap))
        for entry in found:
            heappush(self._heap, entry)
        return [entry[2] for entry in found]


def _in_order(heap: list[tuple[int, int, BufferedResponse]]) -> Iterator[tuple[int, int, BufferedResponse]]:
    """The entries of a heap from the lowest on, which stay: O(k log k) for the first k."""
    ahead = [(heap[0], 0)] if heap else []
    while ahead:
        entry, place = heappop(ahead)
        yield entry
        for child in (2 * place + 1, 2 * place + 2):
            if child < len(heap):
                heappush(ahead, (heap[child], child))


class Rooms:
    """The workers that are up; in the heap are those below their concurrency for which nobody stands in line."""

    def __init__(self) -> None:
        self.by_worker: dict[str, Room] = {}
        self.largest_blocks = 0
        """KV blocks of the largest worker so far."""
        self.num_added = 0
        """Workers that have come, those that have gone included."""
        self._by_free_blocks = _LazyHeap[Room]()

    def add(self, worker: str, num_blocks: int, max_concurrency: int) -> None:
        """A worker is up. Raises EngineError if it was already, or has room for nothing."""
        if worker in self.by_worker:
            raise EngineError(f"worker {worker!r} is up already: report it lost before it comes up again")
        if num_blocks < 1 or max_concurrency < 1:
            raise EngineError(
                f"worker {worker!r} has {num_blocks} KV blocks and runs {max_concurrency} responses: "
                "give it at least 1 of each"
            )
        room = self.by_worker[worker] = Room(worker, self.num_added, num_blocks, max_concurrency)
        self.num_added += 1
        self.largest_blocks = max(self.largest_blocks, num_blocks)
        self._by_free_blocks.put(room, -num_blocks)

    def remove(self, worker: str) -> Room:
        """A worker is gone. Raises EngineError if it was not up."""
        room = self.by_worker.pop(worker, None)
        if room is None:
            raise EngineError(
                f"worker {worker!r} is not among the {len(self.by_worker)} that are up: report it up first"
            )
        room.entry = None
        return room

    def freest(self) -> Room | None:
        """The one with the most free blocks that may run one more; ties to the first that came up."""
        return self._by_free_blocks.first()

    def home_of(self, response: BufferedResponse) -> Room | None:
        """Where its last chunk ran, if that worker is still up."""
        home = response.home
        return home if home is not None and self.by_worker.get(home.worker) is home else None

    def choose(self, response: BufferedResponse) -> Room | None:
        """Where the response's next chunk runs; None: the freest worker has no room for it.

        That is where its last chunk ran, unless the freest worker would have more free blocks with the response than
        that one has without it: moving then evens out more than it costs. Else the freest worker.
        """
        freest, home = self.freest(), self.home_of(response)
        if freest is None or not freest.has_room(response.num_blocks):
            return None
        left = freest.free_blocks - response.num_blocks
        stays = home is not None and home.has_room(response.num_blocks) and left <= home.free_blocks
        return home if stays else freest

    def has_other(self, room: Room, num_blocks: int) -> bool:
        """Whether another worker than this one could run a response with so many blocks, when it is empty."""
        rooms = self.by_worker.values()
        return any(other is not room and num_blocks <= other.num_blocks for other in rooms)

    def choose_other(self, response: BufferedResponse) -> Room | None:
        """Where a response that failed runs next: on the freest of the other workers, or nowhere before that has room.

        It goes where it failed only if that is the one worker that is large enough.
        """
        failed, num_blocks = response.failed_in, response.num_blocks
        is_bound = failed is None or not self.has_other(failed, num_blocks)
        freest = self._by_free_blocks.lowest(2)
        room = next((room for room in freest if is_bound or room is not failed), None)
        return room if room is not None and room.has_room(num_blocks) else None

    def take(self, room: Room, assignment: int, num_blocks: int) -> None:
        """A chunk begins."""
        room.running.add(assignment)
        room.free_blocks -= num_blocks
        self.enter(room)

    def give_back(self, room: Room, assignment: int, num_blocks: int) -> None:
        """A chunk ended."""
        room.running.remove(assignment)
        room.free_blocks += num_blocks
        self.enter(room)

    def enter(self, room: Room) -> None:
        """The worker's free blocks, its concurrency or its line have changed."""
        if len(room.running) < room.max_concurrency and not room.line:
            self._by_free_blocks.put(room, -room.free_blocks)
        else:
            room.entry = None


class RequestBuffer(Protocol):
    """Where responses wait."""

    def add(self, response: BufferedResponse) -> None:
        """A response waits, with its next chunk cut."""

    def match(self) -> tuple[BufferedResponse, Room] | None:
        """Take out the response whose turn it is, if a worker has room for it."""

    def peek(self, count: int) -> list[BufferedResponse]:
        """The responses whose turn is next if nothing else happens, the first one first; they stay."""

    def returned(self, group: BufferedGroup, room: Room, finished: bool) -> None:
        """A response of the group has left the worker; the group's length estimate may have changed."""

    def lost(self, room: Room) -> None:
        """A worker is gone; what it ran will be added next."""


class DividedBuffer:
    """Seer's buffer: Q_spec and C_rest of algorithm 1, or the same with own tokens weighed against the estimate."""

    def __init__(
        self,
        rooms: Rooms,
        lengths: LengthEstimator,
        *,
        has_probes: bool,
        guard_interval: int,
        token_weight: int,
    ) -> None:
        """has_probes: the first response of a group is one. guard_interval: see `DispatchSettings`, 0: never.
        token_weight: what a token that a response has takes from its group's estimate; 0: the longest estimate first,
        as in Seer. 1 would be the longest rest first, endlessly many the fewest tokens first.
        """
        self._rooms = rooms
        self._lengths = lengths
        self._has_probes = has_probes
        self._guard_interval = guard_interval
        self._token_weight = token_weight
        self._failed: deque[BufferedResponse] = deque()
        self._probes: list[tuple[int, int, BufferedResponse]] = []  # heap by tokens so far and order
        self._rest = _LazyHeap[BufferedGroup]()  # by key of the first that waits
        self._by_service: list[_Entry[BufferedGroup]] = []  # heap by tokens ordered when it was entered
        self._num_taken = 0  # of the rest

    def add(self, response: BufferedResponse) -> None:
        if response.failed_in is not None:
            self._failed.append(response)
            return
        if self._has_probes and response.sample == 0:
            heappush(self._probes, (response.num_tokens, response.order, response))
            return
        rank = response.num_tokens if self._token_weight else response.rank
        heappush(response.group.waiting, (rank, response.sample, response))
        self._place(response.group)

    def match(self) -> tuple[BufferedResponse, Room] | None:
        """What failed comes first: until other workers have it nobody is given anything else, so that one broken worker
        cannot run through all that waits.
        """
        if self._failed:
            room = self._rooms.choose_other(self._failed[0])
            return None if room is None else (self._failed.popleft(), room)
        response = self._head()
        room = self._rooms.choose(response) if response is not None else None
        if response is None or room is None:
            return None
        self._take(response)
        return response, room

    def peek(self, count: int) -> list[BufferedResponse]:
        """Without what the guard will draw, and what stands in a worker's line: its keys and values are there."""
        found = list(islice(self._failed, count))
        found += [response for *_, response in islice(_in_order(self._probes), count - len(found))]
        groups = self._rest.lowest(count - len(found))
        rest = merge(*map(self._foresee, groups))
        return [*found, *(place[-1] for place in islice(rest, count - len(found)))]

    def _foresee(self, group: BufferedGroup) -> Iterator[tuple[Any, ...]]:
        """The waiting responses of a group, each with what its turn goes by."""
        for rank, sample, response in _in_order(group.waiting):
            yield self._key(group, rank, sample), group.order, rank, sample, response

    def _key(self, group: BufferedGroup, rank: int, sample: int) -> int:
        """What the turn of a waiting response goes by, the lowest first."""
        estimate = self._lengths.estimate(group.number, sample, group.max_tokens)
        return self._token_weight * rank - estimate

    def returned(self, group: BufferedGroup, room: Room, finished: bool) -> None:
        self._place(group)

    def lost(self, room: Room) -> None:
        """Nothing waits for a worker here."""

    def _head(self) -> BufferedResponse | None:
        if self._probes:
            return self._probes[0][2]
        group = self._rest.first()
        if group is None:
            return None
        if self._guard_interval and (self._num_taken + 1) % self._guard_interval == 0:
            group = self._least_served()
        return group.waiting[0][2]

    def _take(self, head: BufferedResponse) -> None:
        group = head.group
        group.served_tokens += head.chunk_tokens
        if self._probes:
            heappop(self._probes)
            return
        heappop(group.waiting)
        self._num_taken += 1
        self._place(group)

    def _place(self, group: BufferedGroup) -> None:
        """Enter the group where its estimate and its first waiting response put it."""
        if not group.waiting:
            group.entry = None
            return
        key = self._key(group, *group.waiting[0][:2])
        if group.entry is None or group.entry[0] != key:
            self._rest.put(group, key)
        if not group.is_guarded:
            group.is_guarded = True
            heappush(self._by_service, (group.served_tokens, group.order, group))

    def _least_served(self) -> BufferedGroup:
        """The group that was ordered the fewest tokens among those that wait, of which there is one."""
        heap = self._by_service
        while True:
            served_tokens, order, group = heap[0]
            if not group.waiting:
                heappop(heap)
                group.is_guarded = False
            elif served_tokens != group.served_tokens:
                heapreplace(heap, (group.served_tokens, order, group))
            else:
                return group


class StickyBuffer(DividedBuffer):
    """Seer's buffer for workers that share no KV pool: a response stays with the worker that it began with, as its keys
    and values do, and goes on before any that has not begun. It moves only if that worker is lost, or too small for it.
    """

    def __init__(self, rooms: Rooms, lengths: LengthEstimator, *, guard_interval: int) -> None:
        super().__init__(rooms, lengths, has_probes=True, guard_interval=guard_interval, token_weight=0)
        self._ready: deque[Room] = deque()  # every one that may fit the first of its line

    def add(self, response: BufferedResponse) -> None:
        home = self._rooms.home_of(response)
        if home is None or response.num_blocks > home.num_blocks or response.failed_in is not None:
            response.home = None
            super().add(response)
            return
        heappush(home.line, (response.order, response))
        self._rooms.enter(home)
        self._ready.append(home)

    def match(self) -> tuple[BufferedResponse, Room] | None:
        while self._ready:
            room = self._ready[0]
            if room.line and room.has_room(room.line[0][1].num_blocks):
                response = heappop(room.line)[1]
                response.group.served_tokens += response.chunk_tokens
                return response, room
            self._ready.popleft()
        return super().match()

    def returned(self, group: BufferedGroup, room: Room, finished: bool) -> None:
        super().returned(group, room, finished)
        self._ready.append(room)

    def lost(self, room: Room) -> None:
        for _, response in room.line:
            self.add(response)
        room.line.clear()


class BoundBuffer:
    """veRL's way: groups are bound, in order, to the worker with the fewest unfinished responses, and wait for it.

    A group goes to workers that are large enough for its responses. Where none is, it waits, and those behind it too.

    Binding looks at every worker once per group, and again when one has come. That a response's whole KV has to be free
    is ours: vLLM would start it and preempt later. To model that, give the workers as many KV blocks as you like.
    """

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._unbound: list[tuple[int, BufferedResponse]] = []  # heap by order
        self._ready: deque[Room] = deque()  # every one that may fit the first of its line
        self._tried: tuple[int, int] | None = None  # whose group fits none of so many workers

    def add(self, response: BufferedResponse) -> None:
        room = response.group.room
        if room is None:
            heappush(self._unbound, (response.order, response))
            return
        heappush(room.line, (response.order, response))
        self._ready.append(room)

    def match(self) -> tuple[BufferedResponse, Room] | None:
        self._bind()
        while self._ready:
            room = self._ready[0]
            if room.line and room.has_room(room.line[0][1].num_blocks):
                return heappop(room.line)[1], room
            self._ready.popleft()
        return None

    def peek(self, count: int) -> list[BufferedResponse]:
        """None: nothing is divided here, so nothing that waits has run before."""
        return []

    def returned(self, group: BufferedGroup, room: Room, finished: bool) -> None:
        group.num_unfinished -= finished
        room.num_bound -= finished
        self._ready.append(room)

    def lost(self, room: Room) -> None:
        for group in room.groups:
            group.room = None
        for _, response in room.line:
            self.add(response)
        room.line.clear()

    def _bind(self) -> None:
        while self._unbound:
            response = self._unbound[0][1]
            group = response.group
            if group.room is None:
                if self._tried == (response.order, self._rooms.num_added):
                    return
                rooms = self._rooms.by_worker.values()
                fitting = [room for room in rooms if response.num_blocks <= room.num_blocks]
                if not fitting:
                    self._tried = response.order, self._rooms.num_added
                    return
                room = min(fitting, key=lambda room: (room.num_bound, room.order))
                room.groups.append(group)
                room.num_bound += group.num_unfinished
                group.room = room
            heappop(self._unbound)
            self.add(response)
