"""Seeds: fixed values, and different wherever what they are for differs."""

import hashlib

from ullage.base.seeds import derive


def test_golden_values():
    digest = hashlib.blake2b(b"1/2/abc/0/0/0", digest_size=8).digest()
    assert derive(1, 2, "abc", 0, 0, 0) == int.from_bytes(digest, "big") // 2
    assert [derive(1), derive(1, 2, "abc", 0, 0, 0)] == [8898586205396736955, 6462306374770540878]


def test_fits_a_signed_64_bit_integer():
    assert all(0 <= derive(i) < 2**63 for i in range(1000))


def test_every_part_matters():
    seeds = {derive(run, step, prompt, i) for run in (1, 2) for step in (1, 2) for prompt in ("a", "b") for i in (0, 1)}
    assert len(seeds) == 16


def test_parts_do_not_run_together():
    assert derive(1, 23) != derive(12, 3)
