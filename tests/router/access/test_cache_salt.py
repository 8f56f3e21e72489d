"""CacheSalts: the same for one client everywhere, and another one's for nobody."""

from __future__ import annotations

from router.access.cache_salt import CacheSalts


def test_a_clients_salt_is_the_same_in_every_process_and_no_two_are_equal() -> None:
    salts = CacheSalts({"alice": "sk-1", "bob": "sk-2"})
    again = CacheSalts({"bob": "sk-2", "carol": "sk-3", "alice": "sk-1"})
    assert salts.derive("alice") == again.derive("alice") == "459d157f91134eeeb14fbc7ce40ef51e"
    different = [salts.derive(client, own) for client in ("alice", "bob") for own in ("", "x", "alice", "\ud800")]
    assert len(set(different)) == len(different)


def test_who_does_not_have_the_key_does_not_know_the_salt() -> None:
    assert CacheSalts({"alice": "sk-1"}).derive("alice") != CacheSalts({"alice": "sk-2"}).derive("alice")
