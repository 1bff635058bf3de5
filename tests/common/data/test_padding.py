"""Padded lengths: few, never short, never beyond their bucket."""

import numpy as np

from common.data.padding import padded_lengths

BUCKETS = [512, 1000, 2048, 8192]


def test_known_lengths() -> None:
    longest = np.array([1, 8, 9, 512, 513, 997, 1000, 1001, 1024, 1025, 2048, 2049, 4097, 8192])
    expected = [8, 8, 16, 512, 520, 1000, 1000, 1008, 1024, 1040, 2048, 2080, 4160, 8192]
    assert padded_lengths(longest, BUCKETS).tolist() == expected


def test_every_length_is_padded_a_little_and_to_few_lengths() -> None:
    longest = np.arange(1, 8193)
    padded = padded_lengths(longest, BUCKETS)
    assert (padded >= longest).all()
    assert (padded - longest < np.maximum(8, longest / 64)).all()
    assert np.array_equal(np.searchsorted(BUCKETS, padded), np.searchsorted(BUCKETS, longest))
    assert len(np.unique(padded)) == 128 + 3 * 64


def test_a_padded_length_stays_as_it_is() -> None:
    padded = padded_lengths(np.arange(1, 8193), BUCKETS)
    assert np.array_equal(padded_lengths(padded, BUCKETS), padded)
