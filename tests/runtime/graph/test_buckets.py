"""Buckets: the published list, and when a step fits one."""

import pytest

from fp4pipe.runtime.graph.buckets import bucket_of, token_buckets


@pytest.mark.parametrize(("limit", "count"), [(2048, 42), (4096, 50), (8192, 58), (16384, 74)])
def test_list_is_the_fields_own(limit: int, count: int):
    buckets = token_buckets(limit)
    assert len(buckets) == count
    assert buckets[:9] == [4, 8, 12, 16, 20, 24, 28, 32, 48]
    assert buckets[-1] == limit
    assert buckets == sorted(set(buckets))


def test_nothing_above_the_limit():
    assert token_buckets(50) == [4, 8, 12, 16, 20, 24, 28, 32, 48, 50]
    assert token_buckets(3) == [3]
    with pytest.raises(ValueError, match="limit of 0"):
        token_buckets(0)


@pytest.mark.parametrize(("tokens", "bucket"), [(1, None), (2, 4), (4, 4), (5, 8), (33, 48), (48, 48), (49, None)])
def test_bucket_of(tokens: int, bucket: int | None):
    assert bucket_of(tokens, [4, 8, 48]) == bucket


def test_padding_never_exceeds_twice_the_tokens():
    buckets = token_buckets(8192)
    for tokens in range(1, 8193):
        bucket = bucket_of(tokens, buckets)
        assert bucket is None or tokens <= bucket <= 2 * tokens
        assert bucket is not None or tokens == 1
