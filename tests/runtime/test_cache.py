"""Cache storage: shapes, bytes, and the packed step that addresses it."""

import pytest
import torch

from fp4pipe.runtime.batch import Batch, Segment
from fp4pipe.runtime.cache import KVCache, LayerKV


def test_cache_counts_its_bytes():
    layers = [LayerKV(2, 16), LayerKV(1, 32, sliding_window=8)]
    cache = KVCache(layers, num_pages=3, page_size=4, dtype=torch.bfloat16, device="cpu")
    assert cache.k[1].shape == cache.v[1].shape == (3, 4, 1, 32)
    assert cache.num_tokens == 12
    assert cache.bytes == 12 * sum(layer.bytes_per_token(torch.bfloat16) for layer in layers) == 12 * 256


def test_pack_places_tokens_in_their_pages():
    batch = Batch.pack([Segment([7, 8, 9], 3, [5, 2]), Segment([1], 0, [0])], page_size=4)
    assert batch.input_ids.tolist() == [7, 8, 9, 1]
    assert batch.position_ids.tolist() == [3, 4, 5, 0]
    assert batch.slots.tolist() == [23, 8, 9, 0]
    assert batch.query_start.tolist() == [0, 3, 4]
    assert batch.context_len.tolist() == [6, 1]
    assert batch.page_table.tolist() == [[5, 2], [0, 0]]
    assert batch.last_rows.tolist() == [2, 3]
    assert (batch.num_tokens, batch.num_sequences) == (4, 2)


@pytest.mark.parametrize("segment", [Segment([], 0, [1]), Segment([1, 2], 3, [1])])
def test_pack_refuses_what_does_not_fit(segment: Segment):
    with pytest.raises(ValueError, match="segment 0"):
        Batch.pack([segment], page_size=4)
