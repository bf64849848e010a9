"""What follows from who asks: the salt of the prefix cache and the class of a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.callers import ANONYMOUS, Caller, effective_priority, effective_salt

ANN = Caller("ann", salt="ann")
BOB = Caller("bob", salt="bob")
ANNS_OTHER_KEY = Caller("ann-2", salt="ann")


def test_two_tenants_never_share_a_prefix() -> None:
    """B56: one tenant learns by the time to its first token what another one has sent."""
    assert effective_salt(ANN, "", True) != effective_salt(BOB, "", True)
    # Nor can it name the salt under which the other's blocks are kept.
    assert effective_salt(BOB, effective_salt(ANN, "", True), True) != effective_salt(ANN, "", True)


def test_one_tenant_shares_with_itself_alone() -> None:
    """Isolation costs a tenant its own cached prefixes, or ignores the salts it sends itself."""
    assert effective_salt(ANN, "x", True) == effective_salt(ANNS_OTHER_KEY, "x", True)
    assert effective_salt(ANN, "x", True) != effective_salt(ANN, "y", True)


@given(st.text(), st.text(), st.text(), st.text())
def test_no_two_pairs_of_tenant_and_salt_meet(a: str, b: str, c: str, d: str) -> None:
    """B55: fields joined without tags meet: tenant "a" with salt "bc" is tenant "ab" with "c"."""
    one = effective_salt(Caller("n", salt=a), b, True)
    other = effective_salt(Caller("n", salt=c), d, True)
    assert (one == other) == ((a, b) == (c, d))


def test_fields_that_spell_the_same_do_not_meet() -> None:
    """B55: as above, with the neighbours that random text seldom finds."""
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ('a", "b', "c"), ("a", 'b", "c')]
    salts = {effective_salt(Caller("n", salt=tenant), salt, True) for tenant, salt in pairs}
    assert len(salts) == len(pairs)


def test_without_isolation_or_tenants_a_salt_is_the_requests_own() -> None:
    """Callers who were told to share, or who have no names, do not."""
    assert effective_salt(ANN, "x", False) == effective_salt(BOB, "x", False) == "x"
    assert effective_salt(ANONYMOUS, "x", True) == "x"


def test_a_caller_may_be_less_urgent_than_its_key_but_never_more() -> None:
    """A key of a slow class jumps the queue by asking for it."""
    slow = Caller("slow", priority=2)
    assert [effective_priority(slow, asked) for asked in (None, 0, 2, 5)] == [2, 2, 2, 5]
    assert [effective_priority(ANONYMOUS, asked) for asked in (None, 0, 5)] == [0, 0, 5]
