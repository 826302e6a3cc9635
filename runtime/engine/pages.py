"""Who owns which page of the KV cache, and which prefixes are worth keeping.

Every page is in exactly one state: free, leased to requests, or idle (unused, but its tokens may come again). Full
pages of tokens form a tree: the path from the root to a node spells a prefix, page by page. A request leases the
longest path that matches its tokens and grows it with pages of its own, which join the tree once they are full.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class Node:
    """One full page in the tree."""

    __slots__ = ("children", "key", "page", "parent", "refs")

    def __init__(self, key: tuple[int, ...], page: int, parent: "Node | None") -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.refs = 0


class Lease:
    """The pages of one request, in order of position.

    The first `len(nodes)` pages are full and have a node in the tree. A node may name another page than the lease does:
    two requests that compute the same tokens at the same time each keep their own page, and the first one's is shared.
    """

    __slots__ = ("nodes", "pages")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.nodes: list[Node] = []


class Pages:
    """Allocator of `num_pages` pages of `page_size` tokens with prefix reuse.

    Idle pages count as available: taking one evicts the least recently used. A path's nodes are returned deepest first,
    and a node in use keeps its ancestors in use, so the oldest idle node is always a leaf.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._free = list(range(num_pages - 1, -1, -1))
        self._root = Node((), -1, None)
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens that all pages hold."""
        return self.num_pages * self.page_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages no request uses, kept for reuse."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Pages that can be had now."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages leased to requests."""
        return self.num_pages - self.available

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def lease(self, tokens: Sequence[int], limit: int) -> Lease:
        """A lease of the longest known prefix of `tokens`, in full pages, of at most `limit` tokens."""
        lease = Lease()
        if not self.prefix_cache:
            return lease
        node = self._root
        for end in range(self.page_size, min(limit, len(tokens)) + 1, self.page_size):
            child = node.children.get(tuple(tokens[end - self.page_size : end]))
            if child is None:
                break
            node = child
            self._hold(node)
            lease.nodes.append(node)
            lease.pages.append(node.page)
        return lease

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Extend `lease` to hold `num_tokens`; False, and nothing is changed, when too few pages are available."""
        more = self.pages_for(num_tokens) - len(lease.pages)
        if more > self.available:
            return False
        lease.pages.extend(self._take() for _ in range(more))
        return True

    def commit(self, lease: Lease, tokens: Sequence[int], computed: int) -> None:
        """Enter into the tree the lease's pages that are full now that `computed` of `tokens` are in them."""
        if not self.prefix_cache:
            return
        for index in range(len(lease.nodes), computed // self.page_size):
            parent = lease.nodes[-1] if lease.nodes else self._root
            key = tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
            node = parent.children.get(key)
            if node is None:
                node = parent.children[key] = Node(key, lease.pages[index], parent)
            self._hold(node)
            lease.nodes.append(node)

    def release(self, lease: Lease) -> None:
        """Give the lease's pages back; those in the tree become idle unless others hold them."""
        for index in reversed(range(len(lease.pages))):
            node = lease.nodes[index] if index < len(lease.nodes) else None
            if node is None or node.page != lease.pages[index]:
                self._free.append(lease.pages[index])
            if node is not None:
                node.refs -= 1
                if node.refs == 0:
                    self._idle[node] = None
        lease.pages, lease.nodes = [], []

    def flush(self) -> int:
        """Forget every idle page; returns how many."""
        count = len(self._idle)
        for _ in range(count):
            self._free.append(self._evict())
        return count

    def check(self, leases: Iterable[Lease] = ()) -> None:
        """Assert that every page is accounted for exactly once, given all leases there are."""
        nodes = list(self._walk())
        leases = list(leases)
        shared = {node.page for node in nodes}
        own = [page for lease in leases for page in lease.pages if page not in shared]
        assert len(shared) == len(nodes), "a page is in the tree twice"
        assert len(own) == len(set(own)), "a page outside the tree is leased twice"
        assert sorted([*self._free, *shared, *own]) == list(range(self.num_pages)), "a page is lost or counted twice"
        holds = Counter(node for lease in leases for node in lease.nodes)
        assert all(node.refs == holds[node] for node in nodes), "a node's reference count is wrong"
        assert {node for node in nodes if node.refs == 0} == set(self._idle), "an unused node is not idle"

    def _walk(self) -> Iterable[Node]:
        ahead = [self._root]
        while ahead:
            children = ahead.pop().children.values()
            ahead.extend(children)
            yield from children

    def _hold(self, node: Node) -> None:
        if node.refs == 0:
            self._idle.pop(node, None)  # absent when the node was made just now
        node.refs += 1

    def _take(self) -> int:
        return self._free.pop() if self._free else self._evict()

    def _evict(self) -> int:
        node, _ = self._idle.popitem(last=False)
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.key]
        return node.page
