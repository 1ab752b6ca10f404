"""Usage against a plain model: what is stored, let in, and counted while it changes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.policy.quota import Amount, Quotas, TenantQuota
from kvserve.store.ledger import Ledger

DIRECTORIES = [f"/kv/{tenant}/n/0of1/{fan}" for tenant in "ab" for fan in ("aaa", "bbb", "ccc")]
"""In the order in which a walk visits them."""


def tenant_of(directory: str) -> str:
    return directory.split("/")[2]


def usage_of(tree: dict[str, list[int]]) -> dict[str, Amount]:
    found: dict[str, Amount] = {}
    for directory, sizes in tree.items():
        for size in sizes:
            tenant = tenant_of(directory)
            found[tenant] = found.get(tenant, Amount()) + Amount(size, 1)
    return found


places = st.sampled_from(DIRECTORIES)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), places, st.integers(1, 9)),
        st.tuples(st.just("remove"), places, st.integers(0, 5)),
        st.tuples(st.just("walk"), places, st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(st.dictionaries(places, st.lists(st.integers(1, 9), max_size=4)), steps)
def test_usage_is_the_tree_after_a_count_during_changes(
    before: dict[str, list[int]], changes: list[tuple[str, str, int]]
) -> None:
    """The ledger starts with no idea of the tree; changes fall before and behind the cursor."""
    tree = {directory: list(before.get(directory, [])) for directory in DIRECTORIES}
    ledger = Ledger(Quotas())
    ledger.start_count()
    counted: dict[str, Amount] = {}
    unseen = list(DIRECTORIES)

    def walk() -> None:
        directory = unseen.pop(0)
        ledger.pass_directory(directory)
        for size in tree[directory]:
            tenant = tenant_of(directory)
            counted[tenant] = counted.get(tenant, Amount()) + Amount(size, 1)

    own: dict[str, Amount] = {}
    for what, directory, number in changes:
        if what == "walk":
            if unseen:
                walk()
            continue
        if what == "store":
            change = Amount(number, 1)
            tree[directory].append(number)
        elif tree[directory]:
            change = Amount(-tree[directory].pop(number % len(tree[directory])), -1)
        else:
            continue
        ledger.changed(tenant_of(directory), directory, change.size_bytes, change.files)
        own[tenant_of(directory)] = own.get(tenant_of(directory), Amount()) + change
    while unseen:
        walk()
    found, own_then = ledger.end_count(counted)
    wanted = usage_of(tree)
    assert {tenant: it for tenant, it in found.items() if it} == wanted
    assert ledger.usage() == wanted
    assert own_then == {tenant: it for tenant, it in own.items() if it} == ledger.own_changes()
    # From now on changes add up again, behind where the cursor was, too.
    ledger.changed("a", DIRECTORIES[0], 5, 1)
    assert ledger.usage().get("a") == wanted.get("a", Amount()) + Amount(5, 1)


def test_an_abandoned_count_leaves_nothing_for_the_next() -> None:
    ledger = Ledger(Quotas())
    ledger.start_count()
    ledger.pass_directory(DIRECTORIES[3])
    ledger.changed("a", DIRECTORIES[0], 5, 1)
    ledger.start_count()
    ledger.pass_directory(DIRECTORIES[0])
    ledger.end_count({"a": Amount(5, 1)})
    assert ledger.usage() == {"a": Amount(5, 1)}


def test_what_is_let_in_counts_until_it_is_stored_or_not() -> None:
    ledger = Ledger(Quotas(Amount(1000, 0), default=TenantQuota(Amount(0, 8))))
    first, second = ledger.reserve("a", 100, 20), ledger.reserve("b", 100, 20)
    assert first.chunks == 8, "the tenant's files"
    assert second.chunks == 2, "what is left of the total"
    assert (first.refused_by and first.refused_by.tenant) == "a"
    assert (second.refused_by and second.refused_by.counts) == "size_bytes"
    assert ledger.reserve("c", 100, 1).chunks == 0
    for _ in range(6):
        ledger.changed("a", DIRECTORIES[0], 100, 1)
        first.chunk_stored()
        assert ledger.usage()["a"] == Amount(800, 8), "counted once all the time"
    first.close()
    second.close()
    assert ledger.usage() == {"a": Amount(600, 6)}
    first.chunk_stored()  # a rename that hung
    second.close()
    assert ledger.usage() == {"a": Amount(600, 6)}
    assert ledger.reserve("a", 100, 9).chunks == 2
    assert ledger.reserve("b", 100, 9).chunks == 2


def test_usage_is_the_base_and_the_own_changes_and_what_is_let_in() -> None:
    ledger = Ledger(Quotas(Amount(100, 0), high_watermark=0.5, low_watermark=0.25))
    ledger.changed("a", DIRECTORIES[0], 10, 1)
    assert ledger.reserve("b", 7, 2).refused_by is None
    ledger.set_base({"a": Amount(5, 1), "c": Amount(3, 3)})
    wanted = {"a": Amount(15, 2), "b": Amount(14, 2), "c": Amount(3, 3)}
    assert ledger.usage() == wanted
    ledger.set_base({"a": Amount(5, 1), "c": Amount(3, 3)})
    assert ledger.usage() == wanted, "the base is replaced, not added to"
    assert ledger.pressures() == []
    ledger.set_base({"c": Amount(40, 3)})
    assert [it.excess for it in ledger.pressures()] == [Amount(64 - 25, 0)]


def test_tenants_with_nothing_leave_no_entry() -> None:
    """Names are the clients' to choose."""
    ledger = Ledger(Quotas())
    for number in range(1000):
        room = ledger.reserve(f"t{number}", 10, 1)
        ledger.changed(f"t{number}", DIRECTORIES[0], 10, 1)
        ledger.changed(f"t{number}", DIRECTORIES[0], -10, -1)
        room.close()
    assert ledger.usage() == {}
    assert ledger.own_changes() == {}
    assert repr(ledger) == "<Ledger 0 bytes, 0 files>"


def test_a_count_that_was_given_up_changes_nothing() -> None:
    ledger = Ledger(Quotas())
    ledger.changed("t", "/r/t/n/s/abc", 100, 1)
    ledger.start_count()
    ledger.pass_directory("/r/t/n/s/abc")
    ledger.changed("t", "/r/t/n/s/abc", 100, 1)
    ledger.drop_count()
    assert ledger.usage() == {"t": Amount(200, 2)}
    ledger.start_count()
    assert ledger.end_count({"t": Amount(200, 2)})[0] == {"t": Amount(200, 2)}
